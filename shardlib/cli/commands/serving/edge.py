"""`shardlib edge | edge-stage`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.app import AsJson, Model
from shardlib.cli.groups import spread
from shardlib.cli.inputs import inputs_of
from shardlib.cli.output import echo, quiet_stdout, status
from shardlib.errors import ArgumentError
from shardlib.untrusted.json_types import JsonObject

if TYPE_CHECKING:
    import jax
    import numpy as np

    from shardlib.hardware.cluster import Device
    from shardlib.planning.edge.edge_plan import EdgePlan
    from shardlib.serving.edge.workers import Workers


@dataclass(frozen=True, kw_only=True)
class Running:
    """How a plan is run, where it is."""

    run: Annotated[
        int | None,
        typer.Option("--run", min=1, metavar="N", help="Also run N batches, a process a stage."),
    ] = None
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at",
            metavar="DEVICE=HOST:PORT",
            help="Where `shardlib edge-stage` runs on a device. [processes of this machine]",
        ),
    ] = None
    secret_file: Annotated[
        Path | None, typer.Option("--secret-file", help="--at: that all stages know.")
    ] = None
    simulated: Annotated[
        bool,
        typer.Option("--simulated", help="Stages take as long as planned, at least, for a batch."),
    ] = False
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Where a stage is lost, go on with another cut.")
    ] = False

    def check(self) -> None:
        """Refuses what contradicts itself, before anything is planned."""
        if self.run is None and (self.simulated or self.elastic or self.at):
            raise ArgumentError("--simulated, --elastic and --at are of --run N")
        if bool(self.at) != (self.secret_file is not None):
            raise ArgumentError("--at and --secret-file go together: other hosts know the secret")

    def workers(self) -> Workers | None:
        """Processes on other hosts; None for some of this machine."""
        from shardlib.serving.edge.places import read_address, read_secret
        from shardlib.serving.edge.workers import Workers

        if not self.at or self.secret_file is None:
            return None
        named = [word.partition("=") for word in self.at]
        if wrong := [
            word for word, (_, equals, _) in zip(self.at, named, strict=True) if not equals
        ]:
            raise ArgumentError(f"--at is {wrong[0]!r}\nTry: board=192.168.1.7:7000")
        return Workers(
            addresses=[read_address(place, "--at") for _, _, place in named],
            secret=read_secret(self.secret_file),
            names=[name for name, _, _ in named],
        )


def edge_stage_command(
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where; loopback by default.")
    ] = "127.0.0.1:7000",
    *,
    secret_file: Annotated[
        Path,
        typer.Option(
            "--secret-file", help="File with what all stages know, 16 characters or more."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Be a stage of `shardlib edge --run --at`: compute a part of a model for whoever knows the
    secret, until SIGTERM or Ctrl-C.
    """
    from shardlib.serving.edge.places import listener, read_address, read_secret
    from shardlib.serving.edge.stage import serve

    secret = read_secret(secret_file)
    with listener(read_address(listen, "--listen")) as server:
        host, port = server.getsockname()[:2]
        if as_json:
            echo(json.dumps({"host": host, "port": port}))
        else:
            echo(f"a stage listens at {host}:{port}")
        serve(server, secret)


@spread
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
    *,
    running: Running,
    as_json: AsJson = False,
) -> None:
    """Spread a model's forward pass over a chain of unlike devices, for inference."""
    from shardlib.hardware.cluster import cluster

    running.check()
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

        plan = planned(listed)
    if not as_json:
        echo(plan.explain(), nl=False)
    ran = None
    if running.run is not None:
        again = _fewer(listed, planned) if running.elastic else None
        with quiet_stdout(as_json), status(f"running {running.run} batches"):
            ran = _ran(plan, inputs, running, again)
    if as_json:
        echo(json.dumps(plan.to_json() | ({"run": ran} if ran else {})))
    elif ran:
        rate = ran["examples_per_s"]
        text = f"{rate:.3g} examples/s" if isinstance(rate, float) else "too few to time"
        echo(f"Ran {ran['batches']} batches: {text}.")
        for device in ran["lost"]:
            echo(f"{device} was lost; the others went on with another cut.")


def _ran(
    plan: EdgePlan,
    inputs: Mapping[str, Any],
    running: Running,
    again: Callable[[str], EdgePlan] | None,
) -> JsonObject:
    """Runs batches of tokens, all different."""
    import jax
    import numpy as np

    from shardlib.serving.edge.running import run_edge

    random = np.random.default_rng(0)

    def drawn(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        integral = np.issubdtype(leaf.dtype, np.integer)
        values = random.integers(0, 128, leaf.shape) if integral else random.normal(size=leaf.shape)
        return values.astype(leaf.dtype)

    batches = [jax.tree.map(drawn, inputs["batch"]) for _ in range(running.run or 0)]
    result = run_edge(
        plan,
        inputs["init"],
        inputs["loss"],
        batches,
        workers=running.workers(),
        again=again,
        simulated=running.simulated,
    )
    rate = result.batches_per_s
    return {
        "batches": len(result.results),
        "examples_per_s": None if rate is None else rate * plan.examples,
        "lost": list(result.lost),
    }


def _fewer(
    listed: Sequence[Device], planned: Callable[[Sequence[Device]], EdgePlan]
) -> Callable[[str], EdgePlan]:
    """Plans again without a device that was lost, and without those lost before."""
    left = list(listed)

    def again(lost: str) -> EdgePlan:
        index = next(k for k, device in enumerate(left) if device.name == lost)
        device = left.pop(index)
        if device.count > 1:
            left.insert(index, replace(device, count=device.count - 1))
        return planned(left)

    return again
