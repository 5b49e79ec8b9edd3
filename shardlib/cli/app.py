"""The application, its options and the types of arguments that commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shardlib import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    help="Plans how a JAX model is spread over a GPU cluster or a TPU pod, and says why.",
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset, a Hugging Face config.json, a .toml card, or package.module:function.",
    ),
]
PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A plan that `shardlib plan --out` wrote.")
]
Changed = Annotated[
    bool,
    typer.Option(
        "--changed", help="Take the plan even if its file was changed since it was written."
    ),
]
PinList = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="KEY=VALUE",
        help="Fix a decision, e.g. mesh.tensor=8 or zero=1. Repeatable.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the batch."""

    batch: Annotated[
        int | None, typer.Option("--batch", "-b", min=1, help="Sequences in the global batch.")
    ] = None
    seq: Annotated[int | None, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")] = (
        None
    )


def _show_version(show: bool) -> None:
    if show:
        typer.echo(f"shardlib {__version__}")
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version."),
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option("--traceback", help="Show where an error was raised; may stand anywhere."),
    ] = False,
) -> None:
    """Options of all commands; typer handles them."""
