"""The meshes of a space, with every number of microbatches, and which choices fit them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from shardlib.axes import BATCH_AXES, MESH_AXES, STORED_AXES, TENSOR
from shardlib.decisions.lowerings import along, facts_of_pins, lowered
from shardlib.decisions.pins import Pins
from shardlib.planning.space.limits import MAX_MICROBATCHES, Limits, divisors
from shardlib.planning.space.space import Space
from shardlib.propagation.assignment import Choice
from shardlib.propagation.colours import Colouring

Array = np.ndarray
#: Where the tensor axis stands among the axes, and those that split the batch.
_TENSOR = MESH_AXES.index(TENSOR.name)
_BATCH: tuple[int, ...] = tuple(MESH_AXES.index(axis) for axis in BATCH_AXES)


def sizes(room: Space, colouring: Colouring, devices: int) -> dict[str, Array]:
    """Every mesh of some number of devices, with every number of microbatches.

    Args:
        room: the space that is searched.
        colouring: which dims divide by what.
        devices: number of devices, all of which are used.

    Returns:
        The sizes of every mesh axis and "micro", arrays of equal length.
    """
    limits, pins = room.limits, room.pins
    cuttable = [
        colouring.colours[name].divisor
        for name in {*room.tensor, *(name for choice in room.choices for name in choice.tensor)}
    ] + [limits.sequence]
    rows: list[tuple[int, ...]] = []
    microbatches: dict[int, list[int]] = {}
    for mesh in meshes(room, devices):
        ways = mesh[_TENSOR]
        if ways > 1 and all(size % ways for size in cuttable):
            continue
        parts = math.prod(mesh[at] for at in _BATCH)
        if parts not in microbatches:
            microbatches[parts] = (
                _microbatches(limits.batch, parts, pins)
                if limits.splits
                else [1] * (limits.batch % parts == 0)
            )
        rows += [
            (*mesh, micro)
            for micro in microbatches[parts]
            if limits.able.free or _able(limits, dict(zip(MESH_AXES, mesh, strict=True)), micro)
        ]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(MESH_AXES) + 1)
    every = dict(zip((*MESH_AXES, "micro"), table.T, strict=True))
    fits = lowered(facts_of_pins(pins), along(every), room.gaps)
    return {name: column[fits] for name, column in every.items()}


def meshes(room: Space, devices: int) -> Iterator[tuple[int, ...]]:
    """Sizes of the axes, in the order of `MESH_AXES`, of every factorisation of a device count that
    pins and model allow.

    Args:
        room: the space that is searched.
        devices: number of devices, all of which are used.
    """
    pins, limits, contexts = room.pins, room.limits, room.strategy.contexts
    if pins.mesh is not None:
        if pins.mesh.devices == devices and contexts in (None, pins.mesh["context"] > 1):
            yield tuple(pins.mesh[axis] for axis in MESH_AXES)
        return
    fixed = dict(pins.axes)
    beyond = {"stage": limits.layers, "expert": limits.experts, "context": limits.sequence}
    piped = pins.staged  # who asks for a schedule and the like asks for stages

    def allowed(axis: str, left: int) -> list[int]:
        if axis not in limits.able.axes:
            return [] if axis == "context" and contexts else [1]
        if axis in fixed:
            return (
                [fixed[axis]]
                if left % fixed[axis] == 0
                and (axis != "context" or contexts in (None, fixed[axis] > 1))
                else []
            )
        if (axis == "stage" and pins.unstaged) or (axis == "expert" and True not in room.routes):
            return [1]
        most = max(1, beyond.get(axis, left))
        wanted = contexts if axis == "context" else None
        return [
            n
            for n in divisors(left, most)
            if wanted in (None, n > 1)
            and (axis == "stage" or axis not in beyond or most % n == 0)
            and not (axis == "stage" and piped and n == 1)
        ]

    def extend(sizes: tuple[int, ...], left: int) -> Iterator[tuple[int, ...]]:
        axis = MESH_AXES[len(sizes)]
        if len(sizes) == len(MESH_AXES) - 1:
            if fixed.get(axis, left) == left and (left == 1 or axis in limits.able.axes):
                yield (*sizes, left)
            return
        for size in allowed(axis, left):
            yield from extend((*sizes, size), left // size)

    yield from extend((), devices)


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


def _microbatches(size: int, ways: int, pins: Pins) -> list[int]:
    if size % ways:
        return []
    allowed = [
        n for n in divisors(size // ways, MAX_MICROBATCHES) if n % (pins.accumulation or 1) == 0
    ]
    return (
        [n for n in allowed if pins.microbatches in (None, n)]
        if pins.microbatches is None or pins.microbatches <= MAX_MICROBATCHES
        else ([pins.microbatches] if (size // ways) % pins.microbatches == 0 else [])
    )


def legal(choice: Choice, room: Space, routes: bool, sizes: Mapping[str, Array]) -> Array:
    """Which candidates a choice fits that fits their tensor axis, by sizes of mesh axes: the
    sequence divides, and an expert axis has tokens to route, where that has a lowering.

    Args:
        choice: what shards colours.
        room: the space that is searched.
        routes: whether tokens can be routed over an expert axis.
        sizes: of mesh axes, arrays [candidates].

    Returns:
        Boolean array [candidates].
    """
    fits = (
        room.limits.sequence
        % (sizes["tensor"] * sizes["context"] if choice.sequence else sizes["context"])
        == 0
    )
    if room.limits.able.has("experts in sequence") and routes and not choice.sequence:
        fits &= sizes["tensor"] == 1
    if routes:
        return fits & lowered(facts_of_pins(room.pins) | {"routed"}, along(sizes), room.gaps)
    return fits & (sizes["expert"] == 1)
