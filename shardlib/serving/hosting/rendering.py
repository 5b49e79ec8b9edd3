"""Renders templates of conversations: one JSON object a line in, one a line out.

    python -I rendering.py

A process of its own, with little memory and time, of the standard library and Jinja alone: what a
checkpoint brings along is code, and the sandbox of Jinja bounds what it reaches, not what it takes.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Bytes of address space, and of the text of a conversation.
MEMORY, LONGEST = 1 << 29, 1 << 20
#: Seconds of one conversation.
SECONDS = 2


class Generation(Extension):
    """`{% generation %}`, which marks what an assistant wrote for training, changes no text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _as_json(value: object, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def environment() -> ImmutableSandboxedEnvironment:
    """What templates of checkpoints expect to find."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    made.filters["tojson"] = _as_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def rendered(
    read: Callable[[str], Template], template: str, variables: Mapping[str, object]
) -> dict[str, str]:
    """The text of a conversation, or why there is none.

    Args:
        read: from a template's text to the template.
        template: its text.
        variables: that it finds.
    """
    try:
        text = read(template).render(**variables)
    except TemplateError as error:
        return {"error": str(error) or type(error).__name__}
    except (MemoryError, OverflowError, RecursionError, TypeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if len(text) > LONGEST:
        return {"error": f"the template writes {len(text)} characters; {LONGEST} are the most"}
    return {"text": text}


def main() -> None:
    """Renders what comes in, until the end."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    made = environment()
    for line in sys.stdin:
        signal.alarm(SECONDS)  # ends the process, also where nobody waits for it any more
        given = json.loads(line)
        found = rendered(made.from_string, given["template"], given["variables"])
        signal.alarm(0)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
