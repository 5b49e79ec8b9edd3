"""Seconds of one kernel.

The roofline (Williams, Waterman, Patterson, CACM 52(4), 2009): a kernel is as slow as the slowest
of its matmul, its vector work and its memory traffic, which run at the same time, and a launch
comes on top.

    seconds = max(matmul, vector operations / (peak x share), bytes / (bandwidth x share)) + launch

On a CPU core, which does one after another, the sum takes the place of the maximum; a device with
several cores puts no more of them to work than a kernel is worth (`busy_cores`).

A matmul is made of blocks of its result, which the units of a chip compute side by side, a *wave*
of them at a time; the last wave may leave units idle (NVIDIA, "Matrix Multiplication Background
User's Guide", sections 3.2 to 3.4). Of several kinds of blocks it takes the fastest:

    matmul = min over tiles: waves x units x 2 rows columns (depth + start) / (peak x share)
             waves = ceil(blocks / units)

or, where nothing is known of blocks, FLOPs x padding / (peak x share). More rows, columns, depth or
matmuls are never faster, whichever tile is the fastest, since every term is monotone and so is the
least of them (but where a curve says that misaligned dims cost time: only among aligned ones); and
no matmul is faster than FLOPs / (peak x share).

Every amount is what one device does in one execution. This file knows no mesh: the caller says what
an `Amount` is on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardlib.cost.machine.efficiency import Efficiency, Tile
from shardlib.cost.machine.expert_load import load_factor
from shardlib.cost.step.attention_kernels import BACKWARD, FORWARD
from shardlib.cost.step.routed_experts import GROUPED
from shardlib.cost.terms.terms import Amount, AttentionCore, Compute, Routed
from shardlib.graph.graph import ITEMSIZE
from shardlib.hardware.chip import Chip

Array = NDArray[np.float64]
#: Gives what one device has of an amount, by candidate.
Local = Callable[[Amount], Array]

#: Categories of ops that compilers fuse with each other, and `Efficiency.unfused` is of.
CHAINS: frozenset[str] = frozenset({"elementwise", "reduction", "movement"})
#: FLOPs of a matmul, and bytes that another kernel reads and writes, for which a CPU takes another
#: core. Measured on two cores, JAX 0.10.2 and 0.12: products of up to 2^23 FLOPs and chains of
#: results of up to 2^17 bytes keep one busy, those of twice as much keep two (XLA counts 2^18 bytes
#: of a result for a core: openxla/xla `xla/service/cpu/parallel_task_assignment.cc`).
CORE_FLOPS, CORE_BYTES = float(1 << 23), float(3 << 17)


def kernel_seconds(term: Compute, local: Local, chip: Chip, constants: Efficiency) -> Array:
    """Seconds of one execution of a kernel on one device, array [candidates]; arguments as those of
    `kernel_parts`.
    """
    vector, matrix, traffic = kernel_parts(term, local, chip, constants)
    if constants.cores > 1:
        vector, matrix, traffic = (
            part * constants.cores / busy_cores(term, local, constants)
            for part in (vector, matrix, traffic)
        )
    busy = (
        np.maximum(np.maximum(vector, matrix), traffic)
        if constants.at_once
        else vector + matrix + traffic
    )
    return busy + max(chip.launch_s, constants.gap_s)


def busy_cores(term: Compute, local: Local, constants: Efficiency) -> Array:
    """Of a device's cores those that a kernel keeps busy, by candidate: from 1 to
    `Efficiency.cores`, many matmuls in one kernel to `Efficiency.batched_cores`, and never so many
    that one has less than `CORE_FLOPS` or `CORE_BYTES`.

    Args:
        term: FLOPs and bytes of the kernel.
    """
    flops = local(term.flops)
    if term.category not in ("matmul", "convolution"):
        moved = sum((local(amount) for amount in term.traffic), np.zeros_like(flops))
        return np.clip(moved / CORE_BYTES, 1.0, constants.cores)
    limit = np.full_like(flops, constants.cores)
    if term.matmul is not None and term.matmul.batches is not None:
        many = np.rint(local(term.matmul.batches)) > 1
        limit = np.where(many, min(constants.batched_cores, constants.cores), limit)
    return np.clip(flops / CORE_FLOPS, 1.0, limit)


def kernel_parts(
    term: Compute, local: Local, chip: Chip, constants: Efficiency
) -> tuple[Array, Array, Array]:
    """Seconds of a kernel's vector work, of the work that decides its class, and of its memory
    traffic, each as if it ran alone, by candidate.

    Args:
        term: FLOPs and bytes of the kernel.
    """
    flops = local(term.flops)
    zeros = np.zeros_like(flops)
    vector = sum((local(amount) for amount in term.elements.simple), zeros)
    vector = vector + constants.transcendental * sum(
        (local(amount) for amount in term.elements.transcendental), zeros
    )
    passes = (
        constants.sort
        if term.category == "sort"
        else constants.unfused
        if term.category in CHAINS
        else 1.0
    )
    traffic = passes * sum((local(amount) for amount in term.traffic), zeros)
    if term.weight and term.matmul is not None and constants.transposed:
        elements = local(term.matmul.rows) * local(term.matmul.columns)
        if term.matmul.batches is not None:
            elements = elements * local(term.matmul.batches)
        traffic = traffic + constants.transposed * elements * ITEMSIZE.get(term.dtype, 4)
    return (
        vector / (chip.peak("bfloat16") * constants.vector),
        _compute_seconds(term, flops, local, chip, constants),
        traffic / (chip.hbm_bytes_per_s * constants.bandwidth_share(term.category)),
    )


def _compute_seconds(
    term: Compute, flops: Array, local: Local, chip: Chip, constants: Efficiency
) -> Array:
    """Seconds of the work that decides a kernel's class: of the matrix unit, if it has any of
    it.
    """
    peak = chip.peak(term.dtype)
    share = constants.peak_share(term.dtype)
    if term.kind in (FORWARD, BACKWARD):
        padded = _padding(term.core, term.kind, constants)
        matrix = (
            flops
            * padded
            / (
                peak
                * (constants.attention if term.kind == FORWARD else constants.attention_backward)
            )
        )
        moved = constants.scores if term.kind == FORWARD else constants.scores_backward
        scores = term.core.scores if term.core is not None else 0.0
        return np.maximum(matrix, moved * scores * flops / chip.hbm_bytes_per_s)
    if term.kind in GROUPED:
        return flops * busiest(term.routed, local, constants) / (peak * share * constants.grouped)
    if term.category == "convolution":
        return flops / (peak * share * constants.convolution)
    if term.matmul is None:
        return flops / (peak * constants.vector)
    rows, columns, depth = (np.maximum(local(amount), 1.0) for amount in term.matmul.dims)
    if constants.misaligned < 1:
        lanes = 16 / ITEMSIZE.get(term.dtype, 2)
        share = share * np.where(
            (np.rint(columns) % lanes == 0) & (np.rint(depth) % lanes == 0),
            1.0,
            constants.misaligned,
        )
    if constants.tiles:
        batches = (
            np.maximum(local(term.matmul.batches), 1.0)
            if term.matmul.batches is not None
            else np.ones_like(flops)
        )
        return matmul_seconds(rows, columns, depth, batches, peak * share, constants)
    padding = np.ones_like(flops)
    for size, amount in zip((rows, columns, depth), term.matmul.dims, strict=True):
        padding *= (
            np.ceil(size / constants.tile) * constants.tile / size
            if amount.total >= constants.tile
            else 1.0
        )
    return flops * padding / (peak * share)


def _padding(core: AttentionCore | None, kind: str, constants: Efficiency) -> float:
    """How many times its FLOPs a kernel of attention computes, because of heads that it pads.

    Forward one matmul contracts heads of queries and one makes heads of values; backward there are
    3 and 2 (arXiv:2307.08691, section 3.1).
    """
    if core is None or not core.head:
        return 1.0
    widths = core.head, core.value or core.head
    padded = [math.ceil(width / constants.width) * constants.width for width in widths]
    if constants.equal_widths:
        padded = [max(padded)] * 2
    matmuls = (1, 1) if kind == FORWARD else (3, 2)
    done, needed = (
        sum(n * width for n, width in zip(matmuls, each, strict=True)) for each in (padded, widths)
    )
    return done / needed


def busiest(routed: Routed | None, local: Local, constants: Efficiency) -> Array | float:
    """Load of the busiest device over the mean, of a kernel or an all-to-all of routed rows; 1
    where the figures of a chip leave loads even.

    Args:
        routed: the rows and their experts; None for kernels of other things.
    """
    if routed is None or constants.skew is None:
        return 1.0
    devices = np.rint(routed.experts.total / local(routed.experts)).astype(np.int64)
    load = load_factor(local(routed.rows), devices, routed.experts.total, constants.skew)
    return load if routed.most is None else np.minimum(load, max(1.0, routed.most))


def matmul_seconds(
    rows: Array,
    columns: Array,
    depth: Array,
    batches: Array,
    flops_per_s: float | Array,
    constants: Efficiency,
) -> Array:
    """Seconds of `batches` matmuls [rows, depth] x [depth, columns] by the fastest of the tiles."""

    def by(tile: Tile) -> Array:
        high, wide, share = tile
        waves = np.ceil(np.ceil(rows / high) * np.ceil(columns / wide) * batches / constants.units)
        return (
            waves
            * constants.units
            * 2
            * high
            * wide
            * (depth + constants.depth)
            / (flops_per_s * share)
        )

    return np.min(np.stack([by(tile) for tile in constants.tiles]), axis=0)
