"""Prices made of other prices: with something in host memory, and with a part of the layers
recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.device_memory import heap_share
from shardlib.cost.pricing.stage_shares import chunks_of
from shardlib.cost.pricing.sums import Model
from shardlib.cost.pricing.totals import Totals
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.knobs import Knobs

Array = np.ndarray


def offloaded(totals: Totals, what: Sequence[str], pricer: Pricer, c: Candidates) -> Totals:
    """The price with something in host memory or on disk: state is read and written beside the
    update, activations go out and come back behind compute.

    Stages of one program first fill the room for what they remember with zeros, in host memory as
    well, and compute has not begun then.

    Where the rate of disks is not known (`Chip.disk_bytes_per_s` is 0), reading and writing them
    takes no time here.
    """
    rate = pricer.topology.chip.host_bytes_per_s
    seconds, memory, stacks = dict(totals.seconds), dict(totals.device_bytes), totals.stacks
    if "optimizer" in what:
        seconds["optimizer"] = seconds["optimizer"] + 2 * memory["optimizer"] / rate
        memory["optimizer"] = np.zeros_like(stacks)
    if "disk" in what:
        disk = pricer.topology.chip.disk_bytes_per_s
        seconds["optimizer"] = seconds["optimizer"] + (
            2 * memory["optimizer"] / disk if disk else 0.0
        )
        memory["optimizer"] = np.zeros_like(stacks)
    if "activations" in what:
        outwards = stacks / heap_share(pricer, c.stage) / rate
        moved = 2 * outwards / totals.held * c.micro
        seconds["exposed"] = seconds["exposed"] + np.maximum(
            0.0, moved - pricer.constants.overlap * seconds["compute"]
        )
        if pricer.profile.pipeline == "lockstep":
            seconds["exposed"] = seconds["exposed"] + np.where(c.stage > 1, outwards, 0.0)
        memory["activations"] = memory["activations"] - stacks
        stacks = np.zeros_like(stacks)
    return replace(totals, seconds=seconds, device_bytes=memory, stacks=stacks)


def mix(fast: Totals, rematerialised: Totals, share: Array) -> Totals:
    """The price when a part of the layers rematerialises, as in `rematerialised`, and the others
    do not: in between, with the larger of the temporaries.
    """

    def between(a: Array, b: Array) -> Array:
        return a + (b - a) * share

    memory = {
        name: (
            between(value, rematerialised.device_bytes[name])
            if name == "activations"
            else np.maximum(value, rematerialised.device_bytes[name])
        )
        for name, value in fast.device_bytes.items()
    }
    return Totals(
        seconds={
            name: between(value, rematerialised.seconds[name])
            for name, value in fast.seconds.items()
        },
        device_bytes=memory,
        flops=between(fast.flops, rematerialised.flops),
        stacks=between(fast.stacks, rematerialised.stacks),
        held=fast.held,
    )


def fullest(knobs: Knobs, model: Model, c: Candidates) -> Array:
    """Layers of the stage that has the most, of all classes."""
    return sum(fullest_by_class(knobs, model, c), np.zeros(len(c)))


def rematerialised_share(
    number: Array | int, knobs: Knobs, model: Model, c: Candidates, profile: FrameworkProfile
) -> Array:
    """Part of the layers of the fullest stage that rematerialise where so many are to: in lockstep
    all chunks of a stage are one program, so that as many layers of each do.
    """
    alike = chunks_of(knobs, c) if profile.pipeline == "lockstep" else np.ones(len(c))
    return np.ceil(number / alike) * alike / fullest(knobs, model, c)


def fullest_by_class(knobs: Knobs, model: Model, c: Candidates) -> list[Array]:
    """Layers of the stage that has the most, of each class."""
    virtual = chunks_of(knobs, c)
    return [virtual * np.ceil(count / (c.stage * virtual)) for count in model.counts]
