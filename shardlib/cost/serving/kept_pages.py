"""How many pages do layers need that keep a window of every request?

Layers that keep the same tokens are a cache group, with pages of its own. Groups are named by their
windows, the furthest first; 0 keeps all tokens.

>>> ordered([1024, 0, 1024], longest=4096), ordered([1024, 0], longest=512)
((0, 1024), (0,))
>>> [group_of(window, (0, 1024, 16)) for window in (0, 1024, 16, 17, 4096)]
[0, 1, 2, 1, 0]
>>> pages_each((0, 8), first=64, slots=2, budget=6, size=4)
(64, 8)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def ordered(windows: Iterable[int], *, longest: int) -> tuple[int, ...]:
    """The cache groups of layers, the one that keeps the most tokens first."""
    groups = {window if window < longest else 0 for window in windows} or {0}
    return tuple(sorted(groups, key=lambda window: -window if window else -longest - 1))


def group_of(window: int, windows: Sequence[int]) -> int:
    """Number of the cache group of a layer: the one that keeps what it sees and the least beside;
    the first where none keeps all of it.
    """
    enough = (number for number, group in enumerate(windows) if not group or 0 < window <= group)
    return max(enough, default=0)


def needed(*, window: int, budget: int, size: int, slots: int = 1) -> int:
    """Pages of some requests at a time at most.

    A request that has n tokens to compute needs the keys of window - 1 + n tokens, which are on
    (window - 1 + n - 2) // size + 2 pages at most; and rounded down, the sum is no less than the
    sum of what is rounded down.
    """
    return max(slots * (window - 3) + budget, 0) // size + 2 * slots


def pages_each(
    windows: Sequence[int], *, first: int, slots: int, budget: int, size: int, drafts: int = 0
) -> tuple[int, ...]:
    """Pages of each cache group: of the first as many as are given, of another no more than all
    slots need at a time.
    """
    return (
        first,
        *(
            min(first, needed(window=window + drafts, budget=budget, size=size, slots=slots))
            for window in windows[1:]
        ),
    )
