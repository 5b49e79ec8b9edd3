"""`shardlib fit-model`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shardlib.booking.fitting import TOKENS_PER_PARAMETER
from shardlib.cli.app import AsJson, PinList
from shardlib.cli.commands.booking.targets import failures
from shardlib.cli.groups import spread
from shardlib.cli.numbers import duration, price, quantity
from shardlib.cli.output import echo, quiet_stdout, status, writable, write
from shardlib.cli.pins import parse_pins
from shardlib.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The machine and the batch."""

    topology: Annotated[str, typer.Option("--topology", "-t", help="The machine that there is.")]
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Sequences of the batch.")]
    seq: Annotated[int, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the run may take."""

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
    from shardlib import booking

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
