"""Shapes: into how many shards everything is divided; candidates as arrays, and what is left of an
amount on one device.

A *shape* is what the amounts of a step depend on: the sizes of the mesh axes, and the number of
microbatches. It knows nothing of links or stages; many candidates share one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardlib.cost.terms.terms import Amount
from shardlib.propagation.assignment import Cut, has

Array = np.ndarray
#: Keys of rows stay below it.
LARGEST = 2**62


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shapes as arrays of equal length.

    Attributes:
        batch: ways that data, fsdp, expert and microbatches divide the batch.
        context, tensor, expert, fsdp: sizes of these axes.
        parts: one over the number of parts by what divides an amount; filled as they are asked for.
        divides: whether a size divides over the stored axes on top of those that shard it, by
            (size, whether these are an expert's, whether tensor and expert shard it); likewise.
    """

    batch: Array
    context: Array
    tensor: Array
    expert: Array
    fsdp: Array
    parts: dict[tuple[bool, bool, bool, bool], Array] = field(
        default_factory=dict[tuple[bool, bool, bool, bool], Array], compare=False, repr=False
    )
    divides: dict[tuple[int, bool, bool, bool], Array] = field(
        default_factory=dict[tuple[int, bool, bool, bool], Array], compare=False, repr=False
    )

    def __len__(self) -> int:
        return len(self.batch)

    def take(self, which: Array) -> Shapes:
        """Some of the shapes."""
        return Shapes(
            batch=self.batch[which],
            context=self.context[which],
            tensor=self.tensor[which],
            expert=self.expert[which],
            fsdp=self.fsdp[which],
        )

    def and_one(self) -> Shapes:
        """These, and after them the shape of a program on one device."""
        single = np.ones(1, dtype=np.int64)
        return Shapes(
            batch=np.concatenate([self.batch, single]),
            context=np.concatenate([self.context, single]),
            tensor=np.concatenate([self.tensor, single]),
            expert=np.concatenate([self.expert, single]),
            fsdp=np.concatenate([self.fsdp, single]),
        )

    def stored_ways(self, cut: Cut) -> Array:
        """Ways that a parameter is stored sharded beside its sharding in compute: over fsdp,
        context and expert, which experts use up themselves.
        """
        return self.fsdp * self.context * (1 if has(cut, "expert") else self.expert)

    @property
    def ones(self) -> Array:
        """1.0 for each shape."""
        return np.ones(len(self))


def distinct_rows(columns: Sequence[Array]) -> tuple[Array, Array]:
    """The first position of every distinct row of some columns of whole numbers, in ascending order
    of the rows, and the number of the row of each position.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    ends = [int(column.max(initial=0)) + 1 for column in columns]
    small = math.prod(ends) < LARGEST and all(column.min(initial=0) >= 0 for column in columns)
    for column, end in zip(columns, ends, strict=True):
        if small:
            key = key * end + column
        else:
            values, code = np.unique(column, return_inverse=True)
            key = key * len(values) + code.reshape(-1)
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return first, which.reshape(-1)


def local(amount: Amount, shapes: Shapes) -> Array:
    """An amount on one device, per microbatch."""
    key = amount.batch, amount.tensor, amount.context, amount.expert
    if key not in shapes.parts:
        degree = (
            shapes.batch if amount.batch else shapes.expert if amount.expert else 1
        ) * shapes.ones
        degree = degree * shapes.context if amount.context else degree
        shapes.parts[key] = 1.0 / (degree * shapes.tensor if amount.tensor else degree)
    return amount.total * shapes.parts[key]


def divides_stored(
    shape: tuple[int, ...], cut: Cut, frozen: frozenset[int], shapes: Shapes, *, flat: bool = False
) -> Array:
    """Whether some dim that is no stack of layers divides over the stored axes, on top of what
    shards it in compute; vectors are stored replicated.

    A flat buffer of all parameters, padded at its end, is sharded over any number of devices.
    """
    if flat:
        return shapes.stored_ways(cut) > 1
    divides, expert = np.zeros(len(shapes), dtype=bool), has(cut, "expert")
    dims = [dim for dim, size in enumerate(shape) if dim not in frozen and size > 1]
    for dim in dims if len(dims) > 1 else ():
        part = cut[dim] or ""
        divides |= _divides((shape[dim], expert, "tensor" in part, part == "expert"), shapes)
    return divides


def _divides(key: tuple[int, bool, bool, bool], shapes: Shapes) -> Array:
    if key not in shapes.divides:
        size, expert, over_tensor, over_expert = key
        degree = shapes.stored_ways(("expert",) if expert else ())
        inner = (shapes.tensor if over_tensor else 1) * (shapes.expert if over_expert else 1)
        shapes.divides[key] = (size % (degree * inner) == 0) & (degree > 1)
    return shapes.divides[key]
