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
    tied_sets: list[set[str]] = [{name} for name in colours]
    for group in groups:
        tied = [part for part in tied_sets if part & group]
        if len(tied) > 1:
            tied_sets = [part for part in tied_sets if part not in tied] + [set[str]().union(*tied)]
    return tuple(
        sorted(
            (tuple(name for name in colours if name in part) for part in tied_sets),
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
        """
        request = part, choice
        if request not in self._asked:
            key = (
                part,
                replace(choice, tensor=tuple(name for name in choice.tensor if name in part)),
            )
            if key not in self._known:
                cuttable, own_colours = (
                    {name for component in self.parts for name in component},
                    set(part),
                )
                groups = (
                    group
                    for group in self.groups
                    if (
                        group.colours & own_colours if own_colours else not group.colours & cuttable
                    )
                )
                self._known[key] = tallied(
                    entry for group in groups for entry in group.entries(choice)
                )
            self._asked[request] = key, self._known[key]
        return self._asked[request]

    def on(self, values: Values, shapes: Array) -> OnShapes:
        """The account on some shapes."""
        return OnShapes(account=self, values=values, at=shapes)


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

    def columns(self, choices: Sequence[tuple[Choice, Array]]) -> Array:
        """Quantities under some choices, each on some of the shapes by position, one after the
        other: array [lists, segments, rows, columns].
        """
        account = self.account
        quantities = np.zeros(
            (
                account.lists * account.segments * ROWS,
                sum(len(positions) for _, positions in choices),
            )
        )
        begin = 0
        for choice, positions in choices:
            columns = slice(begin, begin := begin + len(positions))
            for part in ((), *account.parts):
                key, tally = account.of(part, choice)
                if key not in self._known:
                    self._known[key] = tally.on(self.values, self.at)
                quantities[tally.rows, columns] += self._known[key][:, positions]
        return quantities.reshape(account.lists, account.segments, ROWS, -1)


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
        resting: list[Item],
        classes: int,
        profile: FrameworkProfile,
        fixed: frozenset[str],
        beside: Ledger | None = None,
    ) -> None:
        self._work, self._points, self._rest = work, points, resting
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
            groups = [self._grouped(items, relevant) for items in lists]
            parts = components((group.colours for items in groups for group in items), cuttable)
            resting, *others = [
                Account(
                    lists=len(listed),
                    segments=self._segments,
                    groups=items,
                    parts=parts,
                )
                for listed, items in zip(lists, groups, strict=True)
            ]
            self._known[cuttable] = Accounts(
                rest=resting,
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
