"""A plan of `shardlib.plan_edge`, its batches, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from shardlib.annotation.model import Tree
from shardlib.annotation.read import Init, read
from shardlib.errors import ArgumentError
from shardlib.jax_types import Function
from shardlib.planning.edge.edge_plan import EdgePlan
from shardlib.serving.edge.chain import StageError, connected
from shardlib.serving.edge.cutting import cut
from shardlib.serving.edge.workers import Workers
from shardlib.serving.weights import both

#: Results in front of those that are timed: the chain fills.
FILLING = 4


@dataclass(frozen=True, kw_only=True)
class EdgeRun:
    """What went through a chain.

    Attributes:
        results: leaves of what the forward pass gives, for each batch in order.
        batches_per_s: measured between results, once the chain was full; None of too few.
        plans: one, and another for every stage that was lost.
        lost: devices of these stages.
    """

    results: list[list[np.ndarray]]
    batches_per_s: float | None
    plans: tuple[EdgePlan, ...]
    lost: tuple[str, ...]


def run_edge(
    plan: EdgePlan,
    init: Init,
    forward: Function,
    batches: Sequence[Tree],
    *,
    weights: Tree | int = 0,
    workers: Workers | None = None,
    again: Callable[[str], EdgePlan] | None = None,
    simulated: bool = False,
) -> EdgeRun:
    """Runs batches through the stages of a plan.

    Args:
        forward: (model, batch) -> any arrays, as the plan was made for.
        workers: processes of `shardlib.serving.edge.stage`, which are left as they are; by default
            some are started on this machine, and ended.
        again: device that was lost -> another plan, without it; None where that is an error.
    """
    if not batches:
        raise ArgumentError("there are no batches")
    model = read(init)
    arrays = both(model, weights)
    flat = {n: [np.asarray(leaf) for leaf in jax.tree.leaves(b)] for n, b in enumerate(batches)}
    shape = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batches[0])
    done: dict[int, list[np.ndarray]] = {}
    plans, lost = [plan], list[str]()
    used = Workers.here(len(plan.stages)) if workers is None else workers
    times = list[float]()
    try:
        while True:
            stages = cut(model, forward, shape, arrays, plan)
            minimum_seconds = [stage.seconds if simulated else 0.0 for stage in plan.stages]
            addresses = used.of([stage.device for stage in plan.stages])
            times.clear()
            try:
                chain = connected(used, addresses, stages, minimum_seconds)
                try:
                    left = {n: leaves for n, leaves in flat.items() if n not in done}
                    for number, results in chain.through(left):
                        done[number] = results
                        times.append(time.perf_counter())
                finally:
                    chain.close()
                break
            except StageError as error:
                if again is None:
                    raise
                device = plan.stages[error.stage].device
                used.lose(addresses[error.stage])
                lost.append(device)
                plan = again(device)
                plans.append(plan)
    finally:
        if workers is None:
            used.close()
    rate = None
    if len(times) > FILLING + 1:
        rate = (len(times) - 1 - FILLING) / (times[-1] - times[FILLING])
    return EdgeRun(
        results=[done[n] for n in sorted(done)],
        batches_per_s=rate,
        plans=tuple(plans),
        lost=tuple(lost),
    )
