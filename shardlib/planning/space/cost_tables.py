"""What does a program cost under every choice of colours, before shapes and links are known?

Items that depend on the same colours form a group. Colours that no op ties together do not know of
each other: what cutting one costs does not depend on whether another is sharded. So the colours
fall into *components*, every group belongs to one of them or to none, and the tally of a choice is
a sum over components, each of which has few ways to be sharded. Two things follow, and both are
exact:

- the least that a choice can cost is the sum of the least that each component can cost;
- the tallies of all choices are sums of the few tallies of components, which do not depend on
  shapes either: they are made once for a model (`shardlib.cost.tables.basis_functions`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardlib.cost.tables.basis_functions import Book, Values
from shardlib.cost.tables.charged_items import Charged, Entry
from shardlib.cost.tables.coefficients import Tally, tallied
from shardlib.cost.tables.quantities import ROWS
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.terms import Item
from shardlib.propagation.assignment import Choice

Array = np.ndarray


class Group:
    """Items that depend on the same colours of a choice, with the rows of a tally that they add
    to.
    """

    def __init__(self, colours: frozenset[str], charged: Charged) -> None:
        self.colours = colours
        self.items: list[tuple[int, int]] = []
        self._charged = charged
        self._entries: dict[Choice, list[Entry]] = {}

    def entries(self, choice: Choice) -> list[Entry]:
        """What all items add under a choice: (row, number of the measure, amount)."""
        key = choice.restrict(self.colours)
        if key not in self._entries:
            self._entries[key] = list(self._charged.entries(key, self.items))
        return self._entries[key]


def grouped(
    lists: Sequence[Iterable[Item]], relevant: frozenset[str], charged: Charged
) -> tuple[Group, ...]:
    """Items of some lists by the relevant colours that they depend on; the segments of each list
    come after those of the list before.
    """
    groups: dict[frozenset[str], Group] = {}
    for number, items in enumerate(lists):
        for item in items:
            colours = item.colours & relevant
            if colours not in groups:
                groups[colours] = Group(colours, charged)
            groups[colours].items.append((number * charged.segments, charged.number(item)))
    return tuple(groups.values())


def components(
    groups: Iterable[frozenset[str]], colours: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Colours that some group ties together, directly or through others; each component in the
    order of `colours`, and those that can be cut in the fewest ways first.
    """
    found: list[set[str]] = [{name} for name in colours]
    for group in groups:
        tied = [part for part in found if part & group]
        if len(tied) > 1:
            found = [part for part in found if part not in tied] + [set[str]().union(*tied)]
    return tuple(
        sorted(
            (tuple(name for name in colours if name in part) for part in found),
            key=lambda part: (len(part), colours.index(part[0])),
        )
    )


def subsets(colours: Sequence[str]) -> list[tuple[str, ...]]:
    """Every subset, the smallest first."""
    return [
        subset
        for count in range(len(colours) + 1)
        for subset in itertools.combinations(colours, count)
    ]


@dataclass(kw_only=True)
class Account:
    """The tallies of some lists of items under every choice.

    Attributes:
        lists: number of lists.
        segments: of each list.
        groups: of all items.
        parts: components of the colours; `()` stands for what depends on no colour that could be
            sharded over tensor.
    """

    lists: int
    segments: int
    groups: tuple[Group, ...]
    parts: tuple[tuple[str, ...], ...]
    _known: dict[tuple[tuple[str, ...], Choice], Tally] = field(
        default_factory=dict[tuple[tuple[str, ...], Choice], Tally], init=False, repr=False
    )
    _asked: dict[tuple[tuple[str, ...], Choice], tuple[tuple[tuple[str, ...], Choice], Tally]] = (
        field(
            default_factory=dict[
                tuple[tuple[str, ...], Choice], tuple[tuple[tuple[str, ...], Choice], Tally]
            ],
            init=False,
            repr=False,
        )
    )

    def of(
        self, part: tuple[str, ...], choice: Choice
    ) -> tuple[tuple[tuple[str, ...], Choice], Tally]:
        """The tally of a component under a choice, and what it is known by: choices that cut the
        component alike have the same.

        Args:
            part: colours of the component.
            choice: what shards colours.
        """
        asked = part, choice
        if asked not in self._asked:
            key = (
                part,
                replace(choice, tensor=tuple(name for name in choice.tensor if name in part)),
            )
            if key not in self._known:
                cuttable, mine = {name for one in self.parts for name in one}, set(part)
                groups = (
                    group
                    for group in self.groups
                    if (group.colours & mine if mine else not group.colours & cuttable)
                )
                self._known[key] = tallied(
                    entry for group in groups for entry in group.entries(choice)
                )
            self._asked[asked] = key, self._known[key]
        return self._asked[asked]

    def on(self, values: Values, at: Array) -> OnShapes:
        """The account on some shapes."""
        return OnShapes(account=self, values=values, at=at)


@dataclass(kw_only=True)
class OnShapes:
    """An account on some shapes of `values`, by number `at`; components are evaluated once."""

    account: Account
    values: Values
    at: Array
    _known: dict[tuple[tuple[str, ...], Choice], Array] = field(
        default_factory=dict[tuple[tuple[str, ...], Choice], Array], init=False, repr=False
    )

    def total(self, choice: Choice) -> Array:
        """Quantities under a choice: array [lists, segments, rows, shapes]."""
        return self.columns([(choice, np.arange(len(self.at)))])

    def columns(self, wanted: Sequence[tuple[Choice, Array]]) -> Array:
        """Quantities under some choices, each on some of the shapes by position, one after the
        other: array [lists, segments, rows, columns].
        """
        account = self.account
        found = np.zeros(
            (account.lists * account.segments * ROWS, sum(len(where) for _, where in wanted))
        )
        begin = 0
        for choice, where in wanted:
            columns = slice(begin, begin := begin + len(where))
            for part in ((), *account.parts):
                key, tally = account.of(part, choice)
                if key not in self._known:
                    self._known[key] = tally.on(self.values, self.at)
                found[tally.rows, columns] += self._known[key][:, where]
        return found.reshape(account.lists, account.segments, ROWS, -1)


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """The accounts of a model.

    Attributes:
        rest: of what rests.
        work: of computation and communication, by remat policy and by whether tokens are routed.
        points: of memory, one list for each point where it may peak, likewise.
    """

    rest: Account
    work: dict[tuple[str, bool], Account]
    points: dict[tuple[str, bool], Account]


class Ledger:
    """The accounts of a model, made as they are asked for.

    Args:
        work: work items by remat policy and by whether tokens are routed.
        points: gives the memory items of each point, likewise.
        rest: items of stored parameters.
        classes: of layers.
        profile: the software.
        fixed: colours beside those of a choice's tensor axis that items may depend on.
        beside: shares its measures, and the tallies of lists of items that are in both.
    """

    def __init__(
        self,
        work: dict[tuple[str, bool], list[Item]],
        points: Callable[[], dict[tuple[str, bool], tuple[list[Item], ...]]],
        rest: list[Item],
        classes: int,
        profile: FrameworkProfile,
        fixed: frozenset[str],
        beside: Ledger | None = None,
    ) -> None:
        self._work, self._points, self._rest = work, points, rest
        self._segments, self._fixed = classes + 2, fixed
        self._charged = Charged(Book(), profile, classes + 2) if beside is None else beside._charged
        self._groups: dict[
            tuple[frozenset[str], tuple[int, ...]], tuple[Sequence[list[Item]], tuple[Group, ...]]
        ] = {} if beside is None else beside._groups
        self._known: dict[tuple[str, ...], Accounts] = {}

    @property
    def book(self) -> Book:
        """The measures."""
        return self._charged.book

    def uncut(self, key: tuple[str, bool] | None) -> Account:
        """The account of the work of a program where the tensor axis shards nothing, or of what
        rests.

        Args:
            key: remat policy, and whether tokens are routed; None for what rests.
        """
        items = self._rest if key is None else self._work[key]
        groups = self._grouped([items], self._fixed)
        return Account(lists=1, segments=self._segments, groups=groups, parts=())

    def accounts(self, cuttable: tuple[str, ...]) -> Accounts:
        """The accounts where the tensor axis may shard some colours."""
        if cuttable not in self._known:
            relevant = self._fixed | set(cuttable)
            points = self._points()
            lists: list[Sequence[list[Item]]] = [
                [self._rest],
                *([items] for items in self._work.values()),
                *points.values(),
            ]
            groups = [self._grouped(some, relevant) for some in lists]
            parts = components((group.colours for some in groups for group in some), cuttable)
            rest, *others = [
                Account(
                    lists=len(listed),
                    segments=self._segments,
                    groups=some,
                    parts=parts,
                )
                for listed, some in zip(lists, groups, strict=True)
            ]
            self._known[cuttable] = Accounts(
                rest=rest,
                work=dict(zip(self._work, others[: len(self._work)], strict=True)),
                points=dict(zip(points, others[len(self._work) :], strict=True)),
            )
        return self._known[cuttable]

    def _grouped(self, lists: Sequence[list[Item]], relevant: frozenset[str]) -> tuple[Group, ...]:
        """See `grouped`; the same lists are grouped once, and kept, as their identity is what they
        are known by.
        """
        key = relevant, tuple(map(id, lists))
        if key not in self._groups:
            self._groups[key] = lists, grouped(lists, relevant, self._charged)
        return self._groups[key][1]
