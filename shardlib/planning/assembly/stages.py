"""What a stage of a pipeline does with one microbatch, and for how long.

The step graph says what a stage does forward and backward; the forward pass is priced on its own,
as a program that ends where the backward pass begins. The rest is backward.
"""

from __future__ import annotations

from dataclasses import replace

from shardlib.cost.estimate import StageSeconds
from shardlib.cost.pricing.step_time import tick_seconds
from shardlib.cost.pricing.sums import sums
from shardlib.cost.pricing.variants.offload_and_partial_remat import rematerialised_share
from shardlib.planning.assembly.candidate_price import OnMachine
from shardlib.planning.space.programs import Program


def stage_seconds(one: OnMachine) -> StageSeconds | None:
    """Seconds of one microbatch on the slowest stage; None without stages, and where layer groups
    follow policies of their own.
    """
    candidate, load = one.candidate, one.load
    how = candidate.decisions
    if candidate.mesh["stage"] == 1 or candidate.groups:
        return None
    rematerialised = _seconds(one, load.programs[how.remat, candidate.routes])
    if not how.remat_layers:
        return rematerialised
    fast = _seconds(one, load.programs["none", candidate.routes])
    share = float(
        rematerialised_share(how.remat_layers, how, load.model, one.c, one.pricer.profile)[0]
    )
    return replace(
        rematerialised,
        **{
            name: getattr(fast, name) * (1 - share) + getattr(rematerialised, name) * share
            for name in ("forward", "backward", "weights")
        },
    )


def _seconds(one: OnMachine, program: Program) -> StageSeconds:
    model, how, pricer, c = one.load.model, one.candidate.decisions, one.pricer, one.c
    stored = one.tally(one.load.rest)
    both, ahead = (
        sums(one.tally(items), stored, [], model, pricer, c)
        for items in (program.work, program.forward)
    )
    # of the two messages of a microbatch, one goes forward
    roles = replace(ahead.collectives, passes=ahead.collectives.passes / 2)
    ahead = replace(ahead, collectives=roles)
    whole, forward = (float(tick_seconds(part, how, model, pricer, c)[0]) for part in (both, ahead))
    weights = float(both.kernels.weights[0]) / one.candidate.mesh["stage"]
    return StageSeconds(
        forward=forward,
        backward=whole - forward - weights,
        weights=weights,
        lockstep=pricer.profile.pipeline == "lockstep",
    )
