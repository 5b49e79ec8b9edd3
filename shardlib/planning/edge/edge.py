"""How is a model's forward pass spread over a chain of unlike devices?

For inference on what is there: a few boards, phones or cards of several generations, each with its
own speed, memory and link (EdgePipe, arXiv:2110.14895). Devices take runs of pieces of the model
(`shardlib.planning.edge.chain`), one after the other, and batches follow each other through them.
The time between two batches is that of the slowest device or message, since messages go beside the
computation; `shardlib.planning.edge.cuts` finds the cut, the order and the devices for which that
is least. Nothing else is decided here: a device computes its part alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardlib.errors import InfeasibleError
from shardlib.graph.problem import Problem
from shardlib.hardware.cluster import Device, cluster, message_seconds
from shardlib.planning.edge.chain import Chain
from shardlib.planning.edge.cuts import Run, best_runs, furthest
from shardlib.planning.edge.edge_plan import EdgePlan, EdgeStage
from shardlib.planning.edge.pieces import chain_of
from shardlib.planning.units.quantity import bytes_text

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What pieces cost on devices.

    Attributes:
        names: of the pieces.
        seconds: of each piece, array [devices, pieces].
        bytes: needed for pieces [i, j), array [devices, pieces + 1, pieces + 1].
        handed: bytes that cross the cut before each piece, array [pieces + 1].
    """

    names: tuple[str, ...]
    seconds: Array
    bytes: Array
    handed: Array

    def compute(self) -> Array:
        """Seconds of pieces [i, j), whatever they need; array [devices, pieces + 1, pieces + 1]."""
        total = np.concatenate(
            [np.zeros((len(self.seconds), 1)), np.cumsum(self.seconds, axis=1)], axis=1
        )
        totals = total[:, None, :] - total[:, :, None]
        return np.where(np.isfinite(self.bytes), totals, np.inf)


def costs_of(problem: Problem, devices: Sequence[Device]) -> Costs:
    """The costs of a model's forward pass."""
    chains: dict[str, Chain] = {}
    for device in devices:
        if device.chip.vendor not in chains:
            chains[device.chip.vendor] = chain_of(problem, device.chip.vendor)
    listed = [chains[device.chip.vendor] for device in devices]
    return Costs(
        names=listed[0].names,
        seconds=np.stack(
            [chain.seconds(device) for chain, device in zip(listed, devices, strict=True)]
        ),
        bytes=np.stack([chain.bytes() for chain in listed]),
        handed=listed[0].handed(),
    )


def plan_chain(
    costs: Costs, devices: Sequence[Device], *, model: str = "", examples: int = 1
) -> EdgePlan:
    """The plan with the least time between two batches, and among those the least from end to end."""
    capacity = np.array([float(device.chip.usable_bytes) for device in devices])
    counts = [device.count for device in devices]
    fits = costs.bytes <= capacity[:, None, None]
    compute = costs.compute()
    messages = np.array(
        [[[message_seconds(size, a, b) for size in costs.handed] for b in devices] for a in devices]
    )
    runs = best_runs(np.where(fits, compute, np.inf), messages, counts)
    if runs is None:
        raise _infeasible(costs, devices, capacity, counts, model)
    single = float(np.where(fits[:, 0, -1], compute[:, 0, -1], np.inf).min())
    return EdgePlan(
        model=model,
        stages=tuple(
            _stage(costs, devices, run, runs[k - 1] if k else None) for k, run in enumerate(runs)
        ),
        examples=examples,
        idle=tuple(
            (device.name, left)
            for v, device in enumerate(devices)
            if (left := device.count - sum(run.device == v for run in runs))
        ),
        single_seconds=single if np.isfinite(single) else None,
    )


def _stage(costs: Costs, devices: Sequence[Device], run: Run, before: Run | None) -> EdgeStage:
    device, names = devices[run.device], costs.names[run.first : run.stop]
    size = float(costs.handed[run.first]) if before else 0.0
    return EdgeStage(
        device=device.name,
        first=run.first,
        last=run.stop - 1,
        pieces=names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}",
        seconds=float(costs.seconds[run.device, run.first : run.stop].sum()),
        received_bytes=size,
        receive_seconds=message_seconds(size, devices[before.device], device) if before else 0.0,
        bytes=float(costs.bytes[run.device, run.first, run.stop]),
        capacity_bytes=float(device.chip.usable_bytes),
    )


def _infeasible(
    costs: Costs, devices: Sequence[Device], capacity: Array, counts: Sequence[int], model: str
) -> InfeasibleError:
    """What is lacking: for one piece that no device holds, or on every device."""
    lacking, pieces = costs.bytes - capacity[:, None, None], len(costs.names)
    lacking_bytes = [
        lacking[:, : k + 1, k + 1 :].min() for k in range(pieces)
    ]  # of all runs that a piece is in: a longer one may hand on less
    worst = int(np.argmax(lacking_bytes))
    if lacking_bytes[worst] > 0:
        v, i, j = (
            int(n)
            for n in np.argwhere(lacking[:, : worst + 1, worst + 1 :] == lacking_bytes[worst])[0]
        )
        return InfeasibleError(
            f"no device holds {costs.names[worst]!r} of {model}: it needs"
            f" {bytes_text(float(costs.bytes[v, i, worst + 1 + j]))} on {devices[v].name}, which"
            f" has {bytes_text(float(capacity[v]))}: {bytes_text(float(lacking_bytes[worst]))} too"
            " little\nTry: a smaller batch, or a smaller dtype",
            short_bytes=int(np.ceil(lacking_bytes[worst])),
        )
    done = furthest(lacking <= 0, counts)
    low, high = 0.0, float(lacking[np.isfinite(lacking)].max())
    while high - low > max(1.0, 1e-4 * high):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if furthest(lacking <= middle, counts) == pieces else (middle, high)
        )
    return InfeasibleError(
        f"{sum(counts)} devices hold {done} of the {pieces} pieces of {model}, up to"
        f" {costs.names[done - 1]!r}; with {bytes_text(high)} more on each they would hold"
        " all\nTry: more devices, a smaller batch, or a smaller dtype",
        short_bytes=int(np.ceil(high)),
    )


def plan_edge(problem: Problem, devices: str | Path | Sequence[Device]) -> EdgePlan:
    """Spreads the forward pass of a traced model over unlike devices.

    Args:
        problem: the model, traced for one batch as it goes through the devices.
        devices: a TOML file (`shardlib.hardware.cluster`), or devices.

    Raises:
        TopologyError, MissingFileError: the devices are not usable.
        TracingError: the model has no layers that repeat.
        InfeasibleError: the devices do not hold the model.
    """
    listed = cluster(devices)
    sizes = [shape[0] for _, shape, _, axes in problem.batch if axes and axes[0] == "batch"]
    return plan_chain(
        costs_of(problem, listed),
        listed,
        model=problem.model,
        examples=math.gcd(*sizes) if sizes else 1,
    )
