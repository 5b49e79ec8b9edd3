"""Which choices of colours can be part of a best plan?

Colours that no op ties together do not know of each other: what cutting one costs does not depend on whether another is cut. So the colours fall into *components*,
and the quantities of a choice are a sum over components. Two things follow, and both are exact:

- the least that a choice can cost is the sum of the least that each component can cost;
- of the subsets of one component, those that need at least as much as another in every quantity (time of kernels, bytes and count of every collective, bytes of memory),
  for every shape and under every remat policy, cannot make a plan faster or smaller. What is left is a *frontier*, usually a handful of subsets, and the choices to price are
  the products of the frontiers of all components.

That holds because a plan's time and memory never fall when a quantity grows (`cost/pricing.py`; tested). The one exception is the time of gradients of weights, which a
zero-bubble schedule hides: it counts as kernels less twice that time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from shardlib.cost.shapes import Shapes
from shardlib.cost.tally import ROWS, Pricer, Q
from shardlib.cost.terms import Item, Term
from shardlib.propagation.assignment import Choice

Array = np.ndarray
#: One in so many quantities is compared before all are.
_SAMPLE = 61


class Group:
    """Items that depend on the same colours of a choice, with their terms under the choices that were asked for."""

    def __init__(self, colours: frozenset[str]) -> None:
        self.colours = colours
        self.items: list[Item] = []
        self._terms: dict[Choice, tuple[tuple[int, Term], ...]] = {}

    def terms(self, choice: Choice) -> tuple[tuple[int, Term], ...]:
        """(segment, term) of all items under a choice that is restricted to the colours."""
        if choice not in self._terms:
            self._terms[choice] = tuple((item.segment, term) for item in self.items for term in item.terms(choice))
        return self._terms[choice]


def grouped(items: list[Item], relevant: frozenset[str]) -> tuple[Group, ...]:
    """Items by the relevant colours that they depend on."""
    groups: dict[frozenset[str], Group] = {}
    for item in items:
        colours = item.colours & relevant
        groups.setdefault(colours, Group(colours)).items.append(item)
    return tuple(groups.values())


class Table:
    """Sums of groups of items for some shapes, kept by the part of the choice that they depend on."""

    def __init__(self, groups: tuple[Group, ...], pricer: Pricer, shapes: Shapes, classes: int, cuttable: frozenset[str], kinds: tuple[type[Term], ...] = ()) -> None:
        self._cuttable = cuttable
        self._groups, self._pricer, self._shapes, self._classes, self._kinds = groups, pricer, shapes, classes, kinds
        self._known: dict[tuple[int, Choice], tuple[Array, Array]] = {}

    def total(self, choice: Choice, among: frozenset[str] | None = None) -> Array:
        """Quantities under a choice: array [segments, rows, shapes].

        Args:
            choice: what is cut.
            among: count only items that depend on some of these colours; or, if empty, on no colour that could be cut over tensor. All by default.
        """
        total = np.zeros((self._classes + 2, ROWS, len(self._shapes)))
        for number, group in enumerate(self._groups):
            if among is None or (group.colours & among if among else not group.colours & self._cuttable):
                rows, values = self.part(number, choice)
                for at, row in enumerate(rows):
                    total[:, row] += values[:, at]
        return total

    def part(self, number: int, choice: Choice) -> tuple[Array, Array]:
        """Quantities of one group under a choice: the rows that are not zero, and array [segments, those rows, shapes]."""
        key = number, choice.restrict(self._groups[number].colours)
        if key not in self._known:
            tally = self._pricer.tally_terms(self._groups[number].terms(key[1]), self._shapes, self._classes, self._kinds)
            filled = np.flatnonzero(tally.any(axis=(0, 2)))
            self._known[key] = filled, tally[:, filled]
        return self._known[key]


def components(groups: Iterable[Group], colours: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Colours that some group ties together, directly or through others; each component in the order of `colours`."""
    found: list[set[str]] = [{name} for name in colours]
    for group in groups:
        tied = [part for part in found if part & group.colours]
        if len(tied) > 1:
            found = [part for part in found if part not in tied] + [set[str]().union(*tied)]
    return tuple(sorted((tuple(name for name in colours if name in part) for part in found), key=lambda part: colours.index(part[0])))


def subsets(colours: Sequence[str]) -> list[tuple[str, ...]]:
    """Every subset, the smallest first."""
    return [subset for count in range(len(colours) + 1) for subset in itertools.combinations(colours, count)]


def nondominated(vectors: Sequence[Array]) -> list[int]:
    """Numbers of the vectors that no other is nowhere above; of equal ones the first."""
    order = sorted(range(len(vectors)), key=lambda i: (float(vectors[i].sum()), i))
    kept: list[int] = []
    for i in order:
        limit = vectors[i] * (1 + 1e-12)
        sample = limit[::_SAMPLE]
        if not any(bool((vectors[j][::_SAMPLE] <= sample).all()) and bool((vectors[j] <= limit).all()) for j in kept):
            kept.append(i)
    return sorted(kept)


def on_frontier(cuts: Sequence[Sequence[tuple[str, ...]]], vectors: Sequence[Mapping[tuple[str, ...], Array]]) -> list[bool]:
    """Which choices can be part of a best plan.

    A choice is kept if the subset of every component is on that component's frontier. A tensor axis must cut something, so those that cut one component alone are kept, too,
    if no other way to cut that component is better: cutting nothing might be, and may not be there.

    Args:
        cuts: for each choice the subset of every component that it cuts.
        vectors: for each component the quantities of its subsets.
    """
    frontiers: list[set[tuple[str, ...]]] = []
    alone: list[set[tuple[str, ...]]] = []
    for options in vectors:
        names = list(options)
        frontiers.append({names[i] for i in nondominated([options[name] for name in names])})
        cutting = [name for name in names if name]
        alone.append({cutting[i] for i in nondominated([options[name] for name in cutting])} if cutting else set())
    kept: list[bool] = []
    for cut in cuts:
        parts = [i for i, subset in enumerate(cut) if subset]
        kept.append(all(subset in frontier for subset, frontier in zip(cut, frontiers, strict=True)) or (len(parts) == 1 and cut[parts[0]] in alone[parts[0]]))
    return kept


def quantities(options: Sequence[Sequence[Array]]) -> list[Array]:
    """For each option one vector of everything in its tallies that a plan's time or memory grows with, and in which options differ.

    Args:
        options: for each option its tallies, arrays [segments, rows, shapes], in the same order.
    """
    parts: list[Array] = []
    for tallies in zip(*options, strict=True):
        stack = np.stack(tallies)
        stack[:, :, Q.WEIGHTS] = np.maximum(0.0, stack[:, :, Q.COMPUTE] - 2 * stack[:, :, Q.WEIGHTS])
        stack[:, :, Q.FLOPS] = 0.0
        parts.append(stack[:, (stack != stack[:1]).any(axis=(0, 3))].reshape(len(options), -1))
    joined: Array = np.concatenate(parts, axis=1)
    return [joined[i] for i in range(len(options))]
