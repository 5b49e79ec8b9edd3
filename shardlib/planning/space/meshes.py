"""The meshes of a space, with every number of microbatches, and which choices fit them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np

from shardlib.axes import BATCH_AXES, MESH_AXES, STORED_AXES, TENSOR
from shardlib.decisions.lowerings import along, facts_of_pins, lowered
from shardlib.decisions.pins import Pins
from shardlib.hardware.placement import divisors
from shardlib.planning.space.limits import MAX_MICROBATCHES, Limits
from shardlib.planning.space.space import Space
from shardlib.propagation.assignment import Choice
from shardlib.propagation.colours import Colouring

Array = np.ndarray
#: Where the tensor axis stands among the axes, that of stages, and those that split the batch.
_TENSOR = MESH_AXES.index(TENSOR.name)
_STAGE = MESH_AXES.index("stage")
_BATCH: tuple[int, ...] = tuple(MESH_AXES.index(axis) for axis in BATCH_AXES)


def sizes(space: Space, colouring: Colouring, devices: int) -> dict[str, Array]:
    """Every mesh of some number of devices, with every number of microbatches."""
    names = {*space.tensor, *(name for choice in space.choices for name in choice.tensor)}
    cuttable = frozenset(colouring.colours[name].divisor for name in names)
    candidates = _sizes(
        space.pins, space.limits, cuttable | {space.limits.sequence}, True in space.routes, devices
    )
    fits = lowered(facts_of_pins(space.pins), along(candidates), space.gaps)
    if (contexts := space.strategy.contexts) is not None:
        fits = fits & ((candidates["context"] > 1) == contexts)
    return {name: column[fits] for name, column in candidates.items()}


@lru_cache(maxsize=64)
def _sizes(
    pins: Pins, limits: Limits, cuttable: frozenset[int], routed: bool, devices: int
) -> dict[str, Array]:
    """The sizes of every mesh, however the context axis is used, with every number of
    microbatches, in increasing order of the axes; callers leave them as they are.
    """
    free = limits.able.free
    rows: list[tuple[int, ...]] = []
    microbatches: dict[int, list[int]] = {}
    for mesh in meshes(pins, limits, routed, devices):
        degree = mesh[_TENSOR]
        if degree > 1 and all(size % degree for size in cuttable):
            continue
        parts = math.prod(mesh[position] for position in _BATCH)
        if parts not in microbatches:
            microbatches[parts] = (
                _microbatches(limits.batch, parts, pins)
                if limits.splits
                else [1] * (limits.batch % parts == 0)
            )
        rows += [
            (*mesh, micro)
            for micro in microbatches[parts]
            if (micro == 1 or mesh[_STAGE] == 1 or limits.staged)
            and (free or _able(limits, dict(zip(MESH_AXES, mesh, strict=True)), micro))
        ]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(MESH_AXES) + 1)
    return dict(zip((*MESH_AXES, "micro"), table.T, strict=True))


def meshes(pins: Pins, limits: Limits, routed: bool, devices: int) -> Iterator[tuple[int, ...]]:
    """Sizes of the axes, in the order of `MESH_AXES`, of every factorisation of a device count that
    pins and model allow, however the context axis is used.
    """
    if pins.mesh is not None:
        if pins.mesh.devices == devices:
            yield tuple(pins.mesh[axis] for axis in MESH_AXES)
        return
    fixed = dict(pins.axes)
    beyond = {"stage": limits.layers, "expert": limits.experts, "context": limits.sequence}
    piped, axes = (
        pins.staged,
        limits.able.axes,
    )  # who asks for a schedule and the like asks for stages

    def allowed(axis: str, left: int) -> list[int]:
        if axis not in axes:
            return [1]
        if axis in fixed:
            return [fixed[axis]] if left % fixed[axis] == 0 else []
        if (axis == "stage" and pins.unstaged) or (axis == "expert" and not routed):
            return [1]
        limit = max(1, beyond.get(axis, left))
        return [
            n
            for n in divisors(left, limit)
            if (axis == "stage" or axis not in beyond or limit % n == 0)
            and not (axis == "stage" and piped and n == 1)
        ]

    last = MESH_AXES[-1]
    partial_meshes: list[tuple[tuple[int, ...], int]] = [((), devices)]
    for axis in MESH_AXES[:-1]:
        sizes_by_left: dict[int, list[int]] = {}
        extended: list[tuple[tuple[int, ...], int]] = []
        for sizes, left in partial_meshes:
            if left not in sizes_by_left:
                sizes_by_left[left] = allowed(axis, left)
            extended += [((*sizes, size), left // size) for size in sizes_by_left[left]]
        partial_meshes = extended
    for sizes, left in partial_meshes:
        if fixed.get(last, left) == left and (left == 1 or last in axes):
            yield (*sizes, left)


def _able(limits: Limits, mesh: Mapping[str, int], micro: int) -> bool:
    """Whether the framework has a mesh with so many microbatches, as far as that can be said of
    them alone.
    """
    able, stages = limits.able, mesh["stage"]
    alone = mesh["data"] > 1 and math.prod(mesh.values()) > mesh["data"]
    sharded = math.prod(mesh[axis] for axis in STORED_AXES) > 1
    return not (
        (able.has("equal stages") and stages > 1 and (limits.layers % stages or limits.groups > 1))
        or (able.has("microbatches in groups") and stages > 1 and micro % stages)
        or (able.has("a microbatch a chunk") and stages > 1 and micro < stages)
        or (able.has("replicas alone") and alone and not sharded)
    )


def _microbatches(size: int, degree: int, pins: Pins) -> list[int]:
    if size % degree:
        return []
    allowed = [
        n for n in divisors(size // degree, MAX_MICROBATCHES) if n % (pins.accumulation or 1) == 0
    ]
    return (
        [n for n in allowed if pins.microbatches in (None, n)]
        if pins.microbatches is None or pins.microbatches <= MAX_MICROBATCHES
        else ([pins.microbatches] if (size // degree) % pins.microbatches == 0 else [])
    )


def legal(choice: Choice, space: Space, routes: bool, sizes: Mapping[str, Array]) -> Array:
    """Which candidates a choice fits that fits their tensor axis, by sizes of mesh axes: the
    sequence divides, and an expert axis has tokens to route, where that has a lowering.
    """
    fits = (
        space.limits.sequence
        % (sizes["tensor"] * sizes["context"] if choice.sequence else sizes["context"])
        == 0
    )
    if space.limits.able.has("experts in sequence") and routes and not choice.sequence:
        fits &= sizes["tensor"] == 1
    if routes:
        return fits & lowered(facts_of_pins(space.pins) | {"routed"}, along(sizes), space.gaps)
    return fits & (sizes["expert"] == 1)
