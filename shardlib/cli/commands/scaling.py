"""`shardlib scale`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.app import AsJson, Model, PinList
from shardlib.cli.groups import spread
from shardlib.cli.inputs import inputs_of
from shardlib.cli.output import echo, quiet_stdout, status, writable, write
from shardlib.cli.pins import parse_pins
from shardlib.errors import BatchError

if TYPE_CHECKING:
    from shardlib.planning.questions.scaling import Curve


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The batch, and whether it grows with the devices."""

    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            "-b",
            min=1,
            help="Sequences in the global batch; with --weak, of the smallest machine.",
        ),
    ] = None
    seq: Annotated[int | None, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")] = (
        None
    )
    weak: Annotated[bool, typer.Option("--weak", help="Let the batch grow with the devices.")] = (
        False
    )


@spread
def scale_command(
    model: Model,
    *,
    topology: Annotated[
        str,
        typer.Option(
            "--topology",
            "-t",
            help="A member of the family of machines, e.g. 16*h100:8 or v5e:16x16.",
        ),
    ],
    devices: Annotated[
        str, typer.Option("--devices", "-n", help="8..16384 for doublings, or 8,24,48.")
    ] = "8..16384",
    growth: Growth,
    pin: PinList = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", callback=writable, help="Draw the curve here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The best plan for every number of devices: time, efficiency, memory, and from where on more
    do not pay.
    """
    from shardlib.cli.numbers import sizes
    from shardlib.explanation.curves import curve_svg

    pins, numbers = parse_pins(pin or []), sizes(devices)
    with (
        quiet_stdout(as_json),
        status(f"planning {model} for {numbers[0]:,} to {numbers[-1]:,} devices"),
    ):
        curve = _scaled(model, topology, numbers, growth, pins)
    if svg is not None:
        write(svg, curve_svg(curve))
    echo(json.dumps(curve.to_json()) if as_json else str(curve), nl=as_json)


def _scaled(
    spec: str,
    topology: str,
    devices: tuple[int, ...],
    growth: Growth,
    pins: dict[str, Any],
) -> Curve:
    """The scaling curve of the model that a command line names."""
    from shardlib.hardware.family import of_size

    for number in devices:
        of_size(topology, number)
    inputs = inputs_of(spec, growth.batch, growth.seq)
    import shardlib

    if growth.weak:
        if growth.batch is None:
            raise BatchError(
                f"{spec} brings its own batch, which cannot grow with the devices\nTry: leave out"
                " --weak, or shardlib.scale(..., batch=function)"
            )
        rows: int = growth.batch
        inputs["batch"] = lambda number: inputs_of(spec, rows * number // devices[0], growth.seq)[
            "batch"
        ]
    return shardlib.scale(**inputs, topology=topology, devices=devices, pin=pins)
