"""`shardlib scale | edge`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.app import AsJson, Model, PinList
from shardlib.cli.groups import spread
from shardlib.cli.inputs import inputs_of
from shardlib.cli.output import echo, quiet_stdout, status, writable, write
from shardlib.cli.pins import parse_pins
from shardlib.errors import BatchError
from shardlib.untrusted.json_types import JsonObject

if TYPE_CHECKING:
    import jax
    import numpy as np

    from shardlib.hardware.cluster import Device
    from shardlib.planning.edge.edge_plan import EdgePlan
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
        found = _scaled(model, topology, numbers, growth, pins)
    if svg is not None:
        write(svg, curve_svg(found))
    echo(json.dumps(found.to_json()) if as_json else str(found), nl=as_json)


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


def edge_command(
    model: Model,
    devices: Annotated[
        Path,
        typer.Option(
            "--devices",
            "-d",
            metavar="FILE.toml",
            help="What there is: [[devices]] with chip, count, memory and link.",
        ),
    ],
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", "-b", min=1, help="Sequences in a batch that goes through the devices."
        ),
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")
    ] = None,
    run: Annotated[
        int | None,
        typer.Option(
            "--run", min=1, metavar="N", help="Also run N batches, each stage in a process here."
        ),
    ] = None,
    simulated: Annotated[
        bool,
        typer.Option("--simulated", help="Stages take as long as planned, at least, for a batch."),
    ] = False,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Where a stage is lost, go on with another cut.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Spread a model's forward pass over a chain of unlike devices, for inference."""
    from shardlib.errors import ArgumentError
    from shardlib.hardware.cluster import cluster

    listed = cluster(devices)
    with quiet_stdout(as_json), status(f"planning {model} for {devices}"):
        inputs = inputs_of(model, batch, seq)
        import shardlib

        def planned(devices: Sequence[Device]) -> EdgePlan:
            return shardlib.plan_edge(
                inputs["init"],
                inputs["loss"],
                inputs["batch"],
                devices=devices,
                batch_axes=inputs["batch_axes"],
                name=inputs["name"],
            )

        found = planned(listed)
    if run is None and (simulated or elastic):
        raise ArgumentError("--simulated and --elastic are of --run N")
    if not as_json:
        echo(found.explain(), nl=False)
    ran = None
    if run is not None:
        with quiet_stdout(as_json), status(f"running {run} batches on this machine"):
            ran = _ran(found, inputs, run, simulated, _fewer(listed, planned) if elastic else None)
    if as_json:
        echo(json.dumps(found.to_json() | ({"run": ran} if ran else {})))
    elif ran:
        rate = ran["examples_per_s"]
        text = f"{rate:.3g} examples/s" if isinstance(rate, float) else "too few to time"
        echo(f"Ran {run} batches: {text}.")


def _ran(
    found: EdgePlan,
    inputs: Mapping[str, Any],
    count: int,
    simulated: bool,
    again: Callable[[str], EdgePlan] | None,
) -> JsonObject:
    """Runs batches of tokens, all different."""
    import jax
    import numpy as np

    from shardlib.serving.edge.running import run_edge

    random = np.random.default_rng(0)

    def drawn(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        whole = np.issubdtype(leaf.dtype, np.integer)
        values = random.integers(0, 128, leaf.shape) if whole else random.normal(size=leaf.shape)
        return values.astype(leaf.dtype)

    batches = [jax.tree.map(drawn, inputs["batch"]) for _ in range(count)]
    made = run_edge(
        found, inputs["init"], inputs["loss"], batches, again=again, simulated=simulated
    )
    rate = made.batches_per_s
    return {
        "batches": len(made.results),
        "examples_per_s": None if rate is None else rate * found.examples,
        "lost": list(made.lost),
    }


def _fewer(
    listed: Sequence[Device], planned: Callable[[Sequence[Device]], EdgePlan]
) -> Callable[[str], EdgePlan]:
    """Plans again without a device that was lost, and without those lost before."""
    left = list(listed)

    def again(lost: str) -> EdgePlan:
        at = next(k for k, one in enumerate(left) if one.name == lost)
        one = left.pop(at)
        if one.count > 1:
            left.insert(at, replace(one, count=one.count - 1))
        return planned(left)

    return again
