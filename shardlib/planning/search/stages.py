"""What does a stage of a pipeline do with one microbatch, and for how long?

The step graph says what a stage does forward and backward; the forward pass is priced on its own,
as a program that ends where the backward pass begins. The rest is backward.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardlib.cost.estimate import StageSeconds
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.step_time import tick_seconds
from shardlib.cost.pricing.sums import sums
from shardlib.cost.pricing.variants.offload_and_partial_remat import fullest
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.terms.terms import Item
from shardlib.planning.decisions.candidate import Decision
from shardlib.planning.space.workload import Program, Workload


def stage_seconds(
    load: Workload, decision: Decision, pricer: Pricer, c: Candidates
) -> StageSeconds | None:
    """Seconds of one microbatch on the slowest stage; None without stages, and where classes of
    layers recompute differently.

    Args:
        load: the model.
        decision: a plan for it.
        pricer: the machine and the software.
        c: the same plan as a candidate.
    """
    what = decision.what
    if decision.mesh["stage"] == 1 or what.classes:
        return None
    lean = _seconds(load, load.programs[what.policy, what.routes], decision, pricer, c)
    if not what.recomputed:
        return lean
    fast, share = (
        _seconds(load, load.programs["none", what.routes], decision, pricer, c),
        what.recomputed / float(fullest(what.how, load.model, c)[0]),
    )
    return replace(
        lean,
        **{
            name: getattr(fast, name) * (1 - share) + getattr(lean, name) * share
            for name in ("forward", "backward", "weights")
        },
    )


def _seconds(
    load: Workload, program: Program, decision: Decision, pricer: Pricer, c: Candidates
) -> StageSeconds:
    model, how = load.model, decision.what.how

    def tally(items: list[Item]) -> np.ndarray:
        return pricer.tally(items, decision.what.choice, c.shapes, len(load.counts))

    rest = tally(load.rest)
    both, ahead = (
        sums(tally(items), rest, [], model, pricer, c) for items in (program.work, program.forward)
    )
    ahead = replace(
        ahead, passes=ahead.passes / 2
    )  # of the two messages of a microbatch, one goes forward
    whole, forward = (float(tick_seconds(one, how, model, pricer, c)[0]) for one in (both, ahead))
    weights = float(both.weights[0]) / decision.mesh["stage"]
    return StageSeconds(
        forward=forward,
        backward=whole - forward - weights,
        weights=weights,
        lockstep=pricer.stack.pipeline == "lockstep",
    )
