"""Priced candidates: the parts of the step time and of the memory, as arrays.

A candidate is a mesh with its place on the links and a number of microbatches. `combine` does
everything that is no sum: hiding communication behind compute (`exposed_communication`), pipeline
bubbles (`step_time`), the largest of several memory points (`device_memory`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardlib.axes import TOKEN_AXES
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.device_memory import (
    bytes_by_part,
    heap_share,
    stored_bytes,
    working_sets,
)
from shardlib.cost.pricing.stage_shares import (
    on_stage,
    pipelines_of,
    shares_at_rest,
    shares_moved,
    shares_of,
)
from shardlib.cost.pricing.step_time import seconds_by_part
from shardlib.cost.pricing.sums import Model, Sums
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.terms.knobs import Knobs
from shardlib.schedules.table import named

Array = np.ndarray
#: Smallest buffer that the allocator of a host gives back to the system when it is freed, so that
#: it is mapped anew in every step: glibc keeps smaller ones (mallopt(3), M_MMAP_THRESHOLD: at most
#: 32 MiB where longs have 8 bytes).
GIVEN_BACK = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Priced candidates, as arrays; the names are those of `Seconds` and `DeviceBytes`.

    Attributes:
        seconds: parts of the step time per candidate.
        device_bytes: parts of the memory per candidate.
        flops: executed per device and step, on the average of all stages.
        stacks: bytes of the heap that hold what the forward pass saves of layers, less two layers:
            what offloading can move.
        held: microbatches whose activations are there at once.
    """

    seconds: dict[str, Array]
    device_bytes: dict[str, Array]
    flops: Array
    stacks: Array
    held: Array

    @cached_property
    def step_seconds(self) -> Array:
        """Seconds of a step per candidate."""
        return sum(self.seconds.values(), np.zeros_like(self.flops))

    @cached_property
    def peak_bytes(self) -> Array:
        """Bytes per device per candidate."""
        return sum(self.device_bytes.values(), np.zeros_like(self.flops))

    def take(self, which: Array) -> Totals:
        """Some of the candidates."""
        return Totals(
            stacks=self.stacks[which],
            held=self.held[which],
            seconds={k: v[which] for k, v in self.seconds.items()},
            device_bytes={k: v[which] for k, v in self.device_bytes.items()},
            flops=self.flops[which],
        )


def combine(s: Sums, knobs: Knobs, model: Model, pricer: Pricer, c: Candidates) -> Totals:
    """Turns quantities into the parts of time and memory.

    Args:
        model: layers, and bytes of the batch.
    """
    profile = pricer.profile
    scale, resting = shares_of(knobs, model, c, profile), shares_at_rest(knobs, model, c, profile)
    in_flight = named(knobs.schedule).in_flight(pipelines_of(knobs, c, profile))
    parameters, frozen, gradients, state = stored_bytes(s, resting, knobs, model, profile, c)
    moved = shares_moved(knobs, model, c, profile)
    seconds, flops = seconds_by_part(s, moved, knobs, model, pricer, c)
    parts, stacks = bytes_by_part(s, gradients, scale, in_flight, knobs, model, c, profile)
    heap = heap_share(pricer, c.stage)
    memory, stacks = {name: size * heap for name, size in parts.items()}, stacks * heap
    sets = working_sets(pricer, knobs, c)
    memory |= {name: memory[name] * sets for name in ("activations", "temporaries")}
    memory |= {
        "parameters": parameters,
        "frozen": frozen,
        "optimizer": state,
        "batch": model.batch_bytes / c.ways(TOKEN_AXES) + model.state_bytes,
    }
    updated = on_stage(s.stored.parameters_cut if knobs.zero >= 1 else s.stored.parameters, resting)
    update = (3 * updated + 2 * state) / (
        pricer.topology.chip.hbm_bytes_per_s * pricer.constants.update_share
    )
    seconds["overhead"] = (
        seconds["overhead"]
        + pricer.constants.step_s
        + pricer.constants.microbatch_s * (c.micro + knobs.accumulation * (c.stage - 1))
        + pricer.constants.fresh * mapped_anew(memory) / pricer.topology.chip.hbm_bytes_per_s
    )
    memory["temporaries"] = (
        memory["temporaries"]
        + (profile.fragmentation - 1) * sum(memory.values())
        + profile.runtime_bytes
    )
    return Totals(
        seconds={**seconds, "optimizer": update},
        device_bytes=memory,
        flops=flops,
        stacks=stacks,
        held=in_flight,
    )


def mapped_anew(memory: Mapping[str, Array]) -> Array:
    """Bytes of a device that a step touches first: all but what stays between steps, where they
    are so many that the allocator gives them back. What is predicted may be half of what a CPU's
    program has (20 MiB for 34, an MLP of three layers), so that from half of `GIVEN_BACK` on a part
    counts, and from all of it on everything.

    Args:
        memory: bytes of a device by what they are for, by candidate.
    """
    resting = ("parameters", "frozen", "optimizer", "batch")
    touched = sum((size for part, size in memory.items() if part not in resting), np.zeros(1))
    return touched * np.clip(2 * touched / GIVEN_BACK - 1, 0.0, 1.0)
