"""Which run of a chain should each of some unlike devices take, and in which order, so that the
slowest is as fast as can be?

The dynamic program of EdgePipe (arXiv:2110.14895, section IV), exact over all cuts, orders and
subsets of devices. Equal devices are counted, not told apart: a state is how many pieces of the
chain are done, how many devices of each type are used, and the type of the last one. With `b` the
best slowest time of a state,

    b(j, used + v, v) = min over i, u of
                        max(b(i, used, u), message from u to v at i, pieces i..j on v)

since no device waits for another but for the slowest, computation and messages being beside each
other. Among all cuts that are as fast the one with the least time from end to end is taken: the
same program with sums, over runs and messages that are no slower than the slowest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray

#: Times that differ by less than this are equal.
_SAME = 1e-12


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one device takes.

    Attributes:
        device: number of its type.
        first, stop: pieces [first, stop).
    """

    device: int
    first: int
    stop: int


def best_runs(compute: Array, messages: Array, counts: Sequence[int]) -> tuple[Run, ...] | None:
    """The runs of the best cut, in order; None where no cut is allowed.

    Args:
        compute: seconds of pieces [i, j) on a device of type v, array [types, pieces + 1, pieces +
            1]; infinite where that is not allowed.
        messages: seconds of what crosses the cut before piece i from type u to type v, array
            [types, types, pieces + 1].
    """
    slowest, _ = _program(compute, messages, counts, np.maximum)
    if not np.isfinite(slowest):
        return None
    limit = slowest * (1 + _SAME)
    _, runs = _program(
        np.where(compute <= limit, compute, np.inf),
        np.where(messages <= limit, messages, np.inf),
        counts,
        np.add,
    )
    return runs


def furthest(allowed: Array, counts: Sequence[int]) -> int:
    """How many pieces, from the front, the devices can take at most.

    Args:
        allowed: whether a device of type v can take the pieces [i, j), array [types, pieces + 1,
            pieces + 1].
    """
    start = np.zeros(allowed.shape[1], dtype=bool)
    start[0] = True
    reach = {(0,) * len(counts): start}
    for used in _uses(counts):
        reach[used] = np.logical_or.reduce(
            [allowed[v][reach[_less(used, v)]].any(axis=0) for v in range(len(counts)) if used[v]]
        )
    return max(int(np.flatnonzero(reached)[-1]) for reached in reach.values() if reached.any())


def _program(
    compute: Array, messages: Array, counts: Sequence[int], join: Callable[[Array, Array], Array]
) -> tuple[float, tuple[Run, ...]]:
    """The least value of all cuts where `join` says what a run adds, and its runs."""
    types, size = compute.shape[:2]
    start = np.full((types, size), np.inf)
    values: dict[tuple[int, ...], Array] = {(0,) * types: start}
    origins: dict[
        tuple[int, ...], Array
    ] = {}  # [types, pieces + 1, (first piece of the last run, type before it)]
    best, end = np.inf, None
    for used in _uses(counts):
        values_here, origin = (
            np.full((types, size), np.inf),
            np.zeros((types, size, 2), dtype=np.int64),
        )
        for v in range(types):
            if not used[v]:
                continue
            before = _less(used, v)
            if any(before):
                reached = join(values[before], messages[:, v])
                from_type = np.argmin(reached, axis=0)
                left = reached[from_type, np.arange(size)]
            else:
                from_type, left = np.full(size, -1), np.full(size, np.inf)
                left[0] = 0.0
            totals = join(np.asarray(left)[:, None], compute[v])
            first = np.argmin(totals, axis=0)
            values_here[v] = totals[first, np.arange(size)]
            origin[v, :, 0], origin[v, :, 1] = first, from_type[first]
            if values_here[v, -1] < best * (1 - _SAME):
                best, end = float(values_here[v, -1]), (used, v)
        values[used], origins[used] = values_here, origin
    runs: list[Run] = []
    end_piece = size - 1
    while end is not None:
        used, v = end
        first, before = (int(n) for n in origins[used][v, end_piece])
        runs.append(Run(device=v, first=first, stop=end_piece))
        end_piece, end = first, (_less(used, v), before) if before >= 0 else None
    return best, tuple(reversed(runs))


def _uses(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Every number of devices of each type, but none at all, those with the fewest devices
    first.
    """
    return sorted(
        (used for used in itertools.product(*(range(count + 1) for count in counts)) if any(used)),
        key=lambda used: (sum(used), used),
    )


def _less(used: tuple[int, ...], v: int) -> tuple[int, ...]:
    return (*used[:v], used[v] - 1, *used[v + 1 :])
