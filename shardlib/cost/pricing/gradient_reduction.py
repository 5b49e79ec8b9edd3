"""When gradients are reduced, and to which sharding."""

from __future__ import annotations

from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.knobs import Knobs


def once_a_step(profile: FrameworkProfile, knobs: Knobs) -> bool:
    """Whether gradients are kept whole over the microbatches of a step and reduced at its end; with
    parameters stored sharded (ZeRO 3) they never are.
    """
    return profile.reduction == "step" and knobs.zero < 3


def in_the_last(profile: FrameworkProfile, knobs: Knobs) -> bool:
    """Whether gradients are stored replicated and reduced in the last microbatch of a step."""
    return profile.reduction == "last" and knobs.zero < 2


def scatters(profile: FrameworkProfile, knobs: Knobs) -> bool:
    """Whether gradients are reduced to the shards of the optimizer: where they are stored sharded,
    and where they are reduced once for a distributed optimizer.
    """
    return knobs.zero >= 2 or (knobs.zero == 1 and profile.reduction == "step")
