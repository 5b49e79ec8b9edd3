"""The commands of the core and of the wings, and errors as messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from shardlib import wings
from shardlib.cli import planning, running
from shardlib.cli.app import SECTIONS, Command, app
from shardlib.cli.output import report
from shardlib.errors import ArgumentError, LaunchError, ShardlibError
from shardlib.untrusted.data import shown

_ALL: Mapping[str, Callable[..., None]] = {
    **planning.COMMANDS,
    **running.COMMANDS,
    **wings.commands(),
}
_ORDER = [*(name for names in SECTIONS.values() for name in names), *_ALL]
#: The commands of the core and of the wings, in the order of the help.
COMMANDS: Mapping[str, Callable[..., None]] = {
    name: _ALL[name] for name in sorted(_ALL, key=_ORDER.index)
}
#: What help shows below the options.
EXAMPLES = {
    "plan": (
        "shardlib plan llama3-8b -t v5e:16x16 -b 256 -s 4096 --out plan.json",
        "shardlib plan my_model:make -t '4*h100:8' --pin mesh.tensor=8 --refine 2",
        "shardlib plan llama3-8b -t v5p:4x4x4 -b 512 -s 8192 --tokens 15T --price 4.20 --mtbf 3h",
    ),
    "why": (
        "shardlib why my_model:step -t v5e:4x4 --mesh data=4,model=4",
        "shardlib why program.hlo.txt",
    ),
}
for _name, _command in COMMANDS.items():
    # Words after those of `launch` are another program's.
    app.command(
        _name,
        cls=Command,
        help=wings.extension(_name).help or None,
        epilog="\n".join(["\b", "Examples:", *(f"  {line}" for line in EXAMPLES[_name])])
        if _name in EXAMPLES
        else None,
        context_settings={"allow_interspersed_args": _name != "launch"},
    )(_command)


def run(arguments: list[str] | None) -> None:
    """Runs a command and turns errors of shardlib into messages."""
    words_given = sys.argv[1:] if arguments is None else arguments
    words = [word for word in words_given if word != "--traceback"]
    try:
        wings.require_command(words)
        code = app(words, prog_name="shardlib", standalone_mode=False)
    except ShardlibError as error:
        if "--traceback" in words_given:
            raise
        report(error, as_json="--json" in words)
        _end(1 if isinstance(error, LaunchError) and error.again else 2)
    except KeyboardInterrupt:
        _end(130)
    except Exception as error:
        if not hasattr(error, "format_message"):  # of click, which typer may have inside of itself
            raise
        _report_usage(error, words)
        _end(2)
    sys.exit(code if isinstance(code, int) else 0)


def _report_usage(error: Any, words: Sequence[str]) -> None:
    """Says what is wrong with a command line: what is missing with its description, everything else
    in the words of the parser.
    """
    context, missing, as_json = error.ctx, getattr(error, "param", None), "--json" in words
    if type(error).__name__ == "MissingParameter" and context is not None and missing is not None:
        option = missing.param_type_name == "option"
        name = " / ".join(missing.opts) if option else missing.metavar or missing.name.upper()
        what = (getattr(missing, "help", "") or "").rstrip(".")
        problem = f"{context.info_name} needs {name}: {what}"
        report(ArgumentError(f"{problem}\nTry: {context.command_path} -h"), as_json=as_json)
        return
    names = getattr(missing, "opts", [])
    parts = [
        part for word in words for part in (word.split("=", 1) if word[:2] == "--" else [word])
    ]
    said = [after for word, after in pairwise(parts) if word in names]
    if said and context is not None:
        problem = f"{names[0]} is {shown(said[-1])}: {error.message}"
        report(ArgumentError(f"{problem}\nTry: {context.command_path} -h"), as_json=as_json)
        return
    if type(error).__name__ == "NoArgsIsHelpError" and not as_json:
        error.show()
        return
    hint = f"\nTry: {context.command_path} -h" if context is not None else ""
    report(ArgumentError(f"{error.format_message()}{hint}"), as_json=as_json)


def _end(code: int) -> NoReturn:
    """Ends the process because something failed; one of several does not wait for the others."""
    wings.leave(code)
    sys.exit(code)
