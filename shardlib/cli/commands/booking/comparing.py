"""`shardlib compare`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardlib.booking.side_by_side import LARGEST
from shardlib.cli.app import AsJson, Model, PinList
from shardlib.cli.commands.booking.targets import Terms, failures, prices
from shardlib.cli.commands.planning import Sizes
from shardlib.cli.groups import spread
from shardlib.cli.inputs import inputs_of
from shardlib.cli.numbers import duration, quantity
from shardlib.cli.output import echo, quiet_stdout, status, writable, write
from shardlib.cli.pins import parse_pins
from shardlib.errors import ArgumentError, MissingFileError

if TYPE_CHECKING:
    from shardlib.booking.comparison import Comparison


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Files beside the table."""

    svg: Annotated[
        Path | None, typer.Option("--svg", callback=writable, help="Draw the comparison here.")
    ] = None
    html: Annotated[
        Path | None,
        typer.Option("--html", callback=writable, help="Write a page for the browser here."),
    ] = None
    plans: Annotated[
        Path | None,
        typer.Option("--plans", metavar="FOLDER", help="A folder for the plans of all choices."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """The run, and the kinds of machines that are compared for it."""

    tokens: Annotated[str, typer.Option("--tokens", metavar="15T", help="Of the whole run.")]
    deadline: Annotated[str, typer.Option("--deadline", metavar="30d", help="For the whole run.")]
    topologies: Annotated[
        str,
        typer.Option("--topologies", "-t", help="Kinds of machines, e.g. h100:8,v5p,v6e,b200:8."),
    ]
    largest: Annotated[
        int, typer.Option("--largest", min=1, help="Devices of the largest machine looked at.")
    ] = LARGEST


@spread
def compare_command(
    model: Model,
    *,
    sizes: Sizes,
    kinds: Kinds,
    terms: Terms,
    pin: PinList = None,
    pictures: Pictures,
    as_json: AsJson = False,
) -> None:
    """For each kind of machine the smallest and the cheapest size that ends a run in time."""
    from shardlib import booking

    target = booking.Target(
        tokens=quantity(kinds.tokens, "--tokens"),
        deadline=duration(kinds.deadline, "--deadline"),
        prices=prices(terms.price or []),
        failures=failures(terms.mtbf),
    )
    pins = parse_pins(pin or [])
    families = [word.strip() for word in kinds.topologies.split(",")]
    if pictures.plans is not None:
        _folder(pictures.plans)
    with quiet_stdout(as_json), status(f"planning {model} for machines of {kinds.topologies}"):
        inputs = inputs_of(model, sizes.batch, sizes.seq)
        comparison = booking.compare(
            **inputs, topologies=families, target=target, largest=kinds.largest, pin=pins
        )
    if pictures.svg is not None:
        write(pictures.svg, comparison.svg())
    if pictures.html is not None:
        write(pictures.html, comparison.html())
    if pictures.plans is not None:
        _write_plans(pictures.plans, comparison)
    echo(json.dumps(comparison.to_json()) if as_json else str(comparison), nl=as_json)


def _folder(path: Path) -> None:
    """A folder that plans are written to, made where it is missing."""
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"{path} is no folder, and plans are written there\nTry: another name")
    if not path.parent.is_dir():
        raise MissingFileError(f"the folder {path.parent} for {path.name} does not exist")


def _write_plans(folder: Path, comparison: Comparison) -> None:
    """The plans of the smallest and the cheapest size of every kind, by machine."""
    folder.mkdir(exist_ok=True)
    for family in comparison.families:
        for offer in (family.smallest, family.cheapest):
            if offer is not None and offer.plan is not None:
                name = offer.topology.replace("*", "x").replace(":", "-")
                write(folder / f"{name}.json", offer.plan.to_json() + "\n")
