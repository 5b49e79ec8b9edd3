"""`shardlib compare | fit-model`: what to book.

Options say the work of a run, and its deadline.

>>> prices(["h100=2.40,v5p=4.20"])
{'h100': 2.4, 'v5p': 4.2}
>>> failures("3h@16384")
Failures(every=10800.0, devices=16384)
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardlib.cli.app import AsJson, Model, PinList, Sizes
from shardlib.cli.inputs import duration, inputs_of, parse_pins, price, quantity, spread
from shardlib.cli.output import echo, quiet_stdout, status, writable, write
from shardlib.errors import ArgumentError, MissingFileError, PlanError
from shardlib.launch.booking import LARGEST, TOKENS_PER_PARAMETER, Failures

if TYPE_CHECKING:
    from shardlib.launch.booking import Comparison


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Options of the prices of machines, and of their failures."""

    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="CHIP=MONEY[/h]",
            help="Of a chip and hour, or /d, in your own money: h100=2.40,v5p=4.20. Repeatable.",
        ),
    ] = None
    mtbf: Annotated[
        str | None,
        typer.Option(
            "--mtbf",
            metavar="3h@16384",
            help="Between two failures of a machine of so many devices; others in proportion.",
        ),
    ] = None


def prices(words: Sequence[str]) -> dict[str, float]:
    """Chips and what an hour of one costs."""
    costs: dict[str, float] = {}
    for word in (part.strip() for text in words for part in text.split(",")):
        match = re.fullmatch(r"([\w-]+)=(.+)", word)
        if match is None or match[1] in costs:
            twice = " stands there twice" if match else " says no price"
            raise PlanError(f"--price {word!r}{twice}\nTry: --price h100=2.40,v5p=4.20")
        costs[match[1]] = price(match[2], f"--price {match[1]}")
    return costs


def failures(text: str | None) -> Failures | None:
    """The mean time between failures, as an option says it."""
    if text is None:
        return None
    interval, separator, devices = text.partition("@")
    if not separator or not re.fullmatch(r"0*[1-9]\d{0,11}", devices.strip()):
        raise PlanError(
            f"--mtbf {text!r} does not say of how many devices: machines of many sizes are"
            " compared, and larger ones fail oftener\nTry: --mtbf 3h@16384"
        )
    return Failures(every=duration(interval, "--mtbf"), devices=int(devices))


# --------------------------------------------------------------------------------------------------
# `shardlib compare`.


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
    from shardlib.launch import booking

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


# --------------------------------------------------------------------------------------------------
# `shardlib fit-model`.


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The machine and the batch."""

    topology: Annotated[str, typer.Option("--topology", "-t", help="The machine that there is.")]
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Sequences of the batch.")]
    seq: Annotated[int, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Options of the limits of the run."""

    deadline: Annotated[str, typer.Option("--deadline", metavar="30d", help="For the whole run.")]
    per_parameter: Annotated[
        float | None,
        typer.Option(
            "--tokens-per-parameter",
            help=f"Tokens of the run for each parameter. [{TOKENS_PER_PARAMETER:g}, Hoffmann et al."
            " 2022]",
        ),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="15T", help="Of the run, whatever the size, instead."),
    ] = None
    price: Annotated[
        str | None,
        typer.Option(
            "--price", metavar="MONEY[/h]", help="Of a chip and hour, or /d, in your own money."
        ),
    ] = None
    mtbf: Annotated[
        str | None,
        typer.Option("--mtbf", metavar="3h@16384", help="Between two failures of so many devices."),
    ] = None


@spread
def fit_model_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="One of the family: a preset, a config.json or a .toml card."
        ),
    ] = "llama3-8b",
    *,
    asked: Asked,
    limits: Limits,
    pin: PinList = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=writable, help="Write the plan of the model here."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The largest model of a family that a machine trains in time."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # as in `shardlib.cli.inputs`
    from shardlib.launch import booking

    if limits.tokens is not None and limits.per_parameter is not None:
        raise PlanError("--tokens and --tokens-per-parameter contradict each other\nTry: one")
    budget = booking.Budget(
        deadline=duration(limits.deadline, "--deadline"),
        tokens_per_parameter=limits.per_parameter or TOKENS_PER_PARAMETER,
        tokens=None if limits.tokens is None else quantity(limits.tokens, "--tokens"),
        price=None if limits.price is None else price(limits.price, "--price"),
        failures=failures(limits.mtbf),
    )
    with quiet_stdout(as_json), status(f"planning sizes of {model} for {asked.topology}"):
        fitted = booking.fit_model(
            model,
            topology=asked.topology,
            budget=budget,
            batch=asked.batch,
            seq=asked.seq,
            pin=parse_pins(pin or []) or None,
        )
    plan = fitted.best.offer.plan if fitted.best.offer is not None else None
    if out is not None and plan is not None:
        write(out, plan.to_json() + "\n")
    echo(json.dumps(fitted.to_json()) if as_json else str(fitted), nl=as_json)
