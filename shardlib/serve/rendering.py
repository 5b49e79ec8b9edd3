"""Renders templates of conversations: a program of `shardlib.untrusted.confined`.

Of the standard library and Jinja alone: what a checkpoint brings along is code, and the sandbox of
Jinja bounds what it reaches, not what it takes.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Characters of the text of a conversation.
LONGEST = 1 << 20


class Generation(Extension):
    """`{% generation %}`, which marks what an assistant wrote for training, changes no text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parses the text between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _as_json(value: object, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def environment() -> ImmutableSandboxedEnvironment:
    """Returns the environment that templates of checkpoints expect."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    sandbox.filters["tojson"] = _as_json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return sandbox


def prepare(settings: Mapping[str, Any], body: bytes) -> tuple[Any, Any]:
    """One operation, `render`: {"template", "variables"} -> the text of a conversation."""
    del settings, body
    sandbox = environment()

    def render(header: Mapping[str, Any], body: bytes) -> tuple[Mapping[str, Any], bytes]:
        del body
        try:
            text = sandbox.from_string(header["template"]).render(**header["variables"])
        except TemplateError as error:
            raise ValueError(str(error) or type(error).__name__) from error
        if len(text) > LONGEST:
            raise ValueError(f"the template writes {len(text)} characters; {LONGEST} are the most")
        return {}, text.encode("utf-8", "replace")

    return {"render": render}, ({}, b"")
