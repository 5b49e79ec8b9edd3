"""How long does one kernel take?

The roofline (Williams, Waterman, Patterson, CACM 52(4), 2009): a kernel is as slow as the slowest of its matmul, its vector work and its
memory traffic, which run at the same time, and a launch comes on top.

    seconds = max(FLOPs x padding / (peak x share), vector operations / (peak x share), bytes / (bandwidth x share)) + launch

Every amount is what one device does in one execution. This file knows no mesh: the caller says what an `Amount` is on one device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardlib.cost.efficiency import Efficiency
from shardlib.cost.terms import Amount, Compute
from shardlib.hardware.chip import Chip

Array = NDArray[np.float64]
#: Gives what one device has of an amount, by candidate.
Local = Callable[[Amount], Array]


def kernel_seconds(term: Compute, local: Local, chip: Chip, constants: Efficiency) -> Array:
    """Seconds of one execution of a kernel on one device, by candidate."""
    flops = local(term.flops)
    peak = chip.peak(term.dtype)
    zeros = np.zeros_like(flops)
    vector = sum((local(amount) for amount in term.simple), zeros)
    vector = vector + constants.transcendental * sum((local(amount) for amount in term.transcendental), zeros)
    seconds = vector / (chip.peak("bfloat16") * constants.vector)
    if term.matmul is None:
        seconds = np.maximum(seconds, flops / (peak * constants.vector))
    else:
        padding = np.ones_like(flops)
        for amount in term.matmul:
            size = np.maximum(local(amount), 1.0)
            padding *= np.ceil(size / constants.tile) * constants.tile / size if amount.total >= constants.tile else 1.0
        seconds = np.maximum(seconds, flops * padding / (peak * constants.matmul))
    traffic = sum((local(amount) for amount in term.traffic), zeros)
    return np.maximum(seconds, traffic / (chip.hbm_bytes_per_s * constants.memory)) + chip.launch_s
