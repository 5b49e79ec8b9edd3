"""What `shardlib.cost.pricing.sums.Sums` is made of: arrays whose last dim is candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class _ByCandidate:
    """Arrays whose last dim is candidates."""

    def take(self, which: Array) -> Self:
        """Some of the candidates."""
        return type(self)(
            **{field.name: getattr(self, field.name)[..., which] for field in fields(self)}
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The candidates of several, one after the other."""
        return cls(
            **{
                field.name: np.concatenate([getattr(part, field.name) for part in parts], axis=-1)
                for field in fields(cls)
            }
        )


@dataclass(frozen=True, kw_only=True)
class Point(_ByCandidate):
    """Bytes by segment at a point where memory may peak, arrays [segments, candidates]; names as in
    `shardlib.cost.tables.quantities.Q`.
    """

    saved: Array
    temporary: Array
    gradient: Array
    gradient_cut: Array
    copy: Array
    copy_cut: Array
    cast: Array
    gathered: Array


@dataclass(frozen=True, kw_only=True)
class Kernels(_ByCandidate):
    """What the kernels of a microbatch take.

    Attributes:
        compute: seconds, array [segments, candidates].
        weights: seconds of those of `compute` that make gradients of weights, all segments, array
            [candidates].
        host: seconds that the host takes to launch them, array [segments, candidates].
        flops: all segments, array [candidates].
    """

    compute: Array
    weights: Array
    host: Array
    flops: Array


@dataclass(frozen=True, kw_only=True)
class Collectives(_ByCandidate):
    """Seconds of the collectives of a microbatch by role (`shardlib.cost.machine`), arrays
    [segments, candidates].

    Attributes:
        block, context, keys, ring, exchange, reduce, scatter, gather: of each role.
        routed: those of `reduce` that are gradients of experts on their devices.
        passes: handing activations to the next stage and cotangents back, a chunk; array
            [candidates].
        ends: what all stages do together before and after the layers, array [candidates].
    """

    block: Array
    context: Array
    keys: Array
    ring: Array
    exchange: Array
    reduce: Array
    scatter: Array
    gather: Array
    routed: Array
    passes: Array
    ends: Array


@dataclass(frozen=True, kw_only=True)
class StoredBytes(_ByCandidate):
    """Bytes as they are stored, arrays [segments, candidates]; those that end in `_cut` are sharded
    by ZeRO. Names as in `shardlib.cost.tables.quantities.Q`.
    """

    parameters: Array
    parameters_cut: Array
    frozen: Array
    frozen_cut: Array
    state: Array
    state_cut: Array
    experts: Array
    kept: Array
    kept_cut: Array
