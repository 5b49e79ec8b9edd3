"""The application, its options and the types of arguments that commands share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from shardlib import __version__

#: The order of the help of all commands; those that are not named here stand under "Others".
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Plan": ("plan", "explain", "diff", "timeline", "replan", "scale", "models", "topologies"),
    "Book": ("compare", "fit-model"),
    "Check": ("verify", "why", "measure", "doctor"),
    "Train": ("demo", "train", "launch", "status"),
    "Serve": ("serve", "generate", "export", "bench-serve", "edge", "edge-stage"),
}


class Commands(TyperGroup):
    """Commands, whose help has them in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes a list for each section."""
        named = {name for names in SECTIONS.values() for name in names}
        others = tuple(name for name in self.commands if name not in named)
        for title, names in (*SECTIONS.items(), ("Others", others)):
            present = [name for name in names if name in self.commands]
            if present:
                with formatter.section(title):
                    formatter.write_dl(
                        [(name, self.commands[name].get_short_help_str(400)) for name in present]
                    )


class Command(TyperCommand):
    """A command whose help has its options in their groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes a list for each group, those of no group first."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                argument = param.param_type_name == "argument"
                title = "Arguments" if argument else getattr(param, "rich_help_panel", None)
                groups.setdefault(title or "Options", []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


app = typer.Typer(
    cls=Commands,
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
