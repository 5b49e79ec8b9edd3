"""Quantities that are sums over components of colours, on all shapes of a space.

What a choice costs is a sum over components (`planning/space/cost_tables.py`), so the quantities of
a choice are a sum of arrays that are there already, and the least of all choices is the sum of the
least of every component. What the quantities are says who asks: seconds
(`planning/bounds/step_time.py`) or bytes (`planning/bounds/memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardlib.cost.tables.coefficients import Tally
from shardlib.cost.terms.local_sizes import Shapes
from shardlib.planning.space.cost_tables import Account, Accounts, subsets
from shardlib.planning.space.space import Space
from shardlib.planning.space.workload import Workload
from shardlib.propagation.assignment import Choice

Array = np.ndarray
#: Turns a tally into quantities on some shapes, by number: array [quantities, shapes].
Measured = Callable[[Tally, Array], Array]


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The choices that bounds speak of.

    Attributes:
        load, space: the model and the space.
        cuttable: colours that some choice shards.
        along: the colour that the context axis shards.
        routes: whether tokens of experts are routed.
    """

    load: Workload
    space: Space
    cuttable: tuple[str, ...]
    along: str | None
    routes: bool

    @cached_property
    def accounts(self) -> Accounts:
        """The tallies of the model."""
        return self.load.ledger.accounts(self.cuttable)

    @cached_property
    def choices(self) -> list[Choice]:
        """The choices of the space."""
        return [self.choice(choice) for choice in self.space.choices]

    @cached_property
    def chosen(self) -> Chosen:
        """Which of them shard a component alike."""
        return Chosen(self.choices)

    @cached_property
    def first(self) -> dict[str | None, Choice]:
        """The first choice with and without sequence parallelism, by the colour of the sequence."""
        return {choice.sequence: choice for choice in reversed(self.choices)}

    def cuts(self, part: tuple[str, ...], sequence: str | None) -> list[Choice]:
        """Choices that shard a component in every way, and nothing else."""
        if (part, sequence) not in self._cuts:
            uncut = self.first[sequence]
            fixed = self.space.pins.rules is not None
            options = (
                {
                    tuple(name for name in choice.tensor if name in part)
                    for choice in self.choices
                    if choice.sequence == sequence
                }
                if fixed
                else subsets(part)
            )
            self._cuts[part, sequence] = [replace(uncut, tensor=cut) for cut in options]
        return self._cuts[part, sequence]

    @cached_property
    def _cuts(self) -> dict[tuple[tuple[str, ...], str | None], list[Choice]]:
        return {}

    def choice(self, choice: Choice) -> Choice:
        """A choice of the space with what the context and expert axes shard."""
        return replace(choice, context=self.along, expert=self.load.expert if self.routes else None)


class Chosen:
    """Some choices, and which of them shard a component alike.

    Args:
        choices: the choices.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices = choices
        self._alike: dict[tuple[str, ...], tuple[Array, list[Choice]]] = {}

    def alike(self, part: tuple[str, ...]) -> tuple[Array, list[Choice]]:
        """A number of each choice that those which shard a component alike share, and the first
        choice of each number.
        """
        if part not in self._alike:
            first: dict[Choice, int] = {}
            numbers = [
                first.setdefault(_within(choice, part), len(first)) for choice in self.choices
            ]
            self._alike[part] = np.array(numbers, dtype=np.int64), list(first)
        return self._alike[part]


def _within(choice: Choice, part: tuple[str, ...]) -> Choice:
    return replace(choice, tensor=tuple(name for name in choice.tensor if name in part))


class Under:
    """The choice of each of some rows.

    Args:
        chosen: the choices.
        numbers: by row.
    """

    def __init__(self, chosen: Chosen, numbers: Array) -> None:
        self._chosen, self._numbers = chosen, numbers
        self._rows: dict[tuple[str, ...], list[tuple[Choice, Array | None]]] = {}

    def rows(self, part: tuple[str, ...]) -> list[tuple[Choice, Array | None]]:
        """Choices that shard a component differently, each with its rows; None for all of them."""
        if part not in self._rows:
            alike, first = self._chosen.alike(part)
            which = alike[self._numbers]
            used = np.flatnonzero(np.bincount(which)).tolist()
            self._rows[part] = [
                (first[number], None if len(used) == 1 else np.flatnonzero(which == number))
                for number in used
            ]
        return self._rows[part]


def alone(choice: Choice, count: int) -> Under:
    """The same choice for so many rows."""
    return Under(Chosen([choice]), np.zeros(count, dtype=np.int64))


class _Filled:
    """Quantities on some shapes, made for those that are asked for.

    Args:
        count: of quantities.
        size: number of shapes.
        make: the quantities on shapes by number, ascending.
    """

    def __init__(self, count: int, size: int, make: Callable[[Array], Array]) -> None:
        self._values, self._used = np.empty((count, 0)), 0
        self._place, self._make = np.full(size, -1), make

    def on(self, shapes: Array) -> Array:
        """The quantities on shapes by number, array [quantities, shapes]; callers leave it as it
        is.
        """
        places = self._place[shapes]
        if places.min(initial=0) < 0:
            new = np.zeros(len(self._place), dtype=bool)
            new[shapes] = True
            self._add(np.flatnonzero(new & (self._place < 0)))
            places = self._place[shapes]
        if len(places) == self._used and np.array_equal(places, np.arange(self._used)):
            return self._values[:, : self._used]
        return self._values[:, places]

    def _add(self, new: Array) -> None:
        """Makes the quantities on shapes by number."""
        end = self._used + len(new)
        if end > self._values.shape[1]:
            more = np.empty((len(self._values), max(end, 2 * self._used)))
            more[:, : self._used] = self._values[:, : self._used]
            self._values = more
        self._values[:, self._used : end] = self._make(new)
        self._place[new] = np.arange(self._used, end)
        self._used = end


class Parts:
    """Quantities of one account by component, on some shapes; what is asked for is kept.

    Args:
        scope: the choices.
        account: the tallies.
        shapes: the shapes.
        measured: the quantities.
        count: their number.
    """

    def __init__(
        self, scope: Scope, account: Account, shapes: Shapes, measured: Measured, count: int
    ) -> None:
        self._scope, self._account, self._measured, self._count = scope, account, measured, count
        self._tensor, self._legal = (
            shapes.tensor,
            (shapes.expert >= 1 if scope.routes else shapes.expert == 1),
        )
        colours = scope.load.colouring.colours
        self._fits = {name: colours[name].divisor % shapes.tensor == 0 for name in scope.cuttable}
        self._known: dict[tuple[tuple[str, ...], Choice], _Filled] = {}
        self._leasts: dict[tuple[tuple[str, ...], str | None], _Filled] = {}
        self._sums: dict[int | None, _Filled] = {}

    def total(self, row_choices: Under, shapes: Array) -> Array:
        """The quantities of choices on some shapes, array [quantities, shapes].

        Choices that shard a component alike are added up together.
        """
        total = np.zeros((self._count, len(shapes)))
        for part in ((), *self._account.parts):
            for choice, positions in row_choices.rows(part):
                quantities = self._part(part, choice)
                if positions is None:
                    total += quantities.on(shapes)
                else:
                    total[:, positions] += quantities.on(shapes[positions])
        return total

    def least(self, shapes: Array, first: int | None = None) -> Array:
        """The least of each quantity under any choice, array [quantities, shapes]; infinite where
        no choice fits.
        """
        if first not in self._sums:
            self._sums[first] = _Filled(
                self._count, len(self._tensor), lambda new: self._found_least(new, first)
            )
        return self._sums[first].on(shapes)

    def _found_least(self, shapes: Array, first: int | None) -> Array:
        """See `least`."""
        minimum = np.full((self._count, len(shapes)), np.inf)
        for flag, choice in self._scope.first.items():
            bare = self._part((), choice).on(shapes)
            total = np.where((self._tensor[shapes] > 1) | (flag is None), bare, np.inf)
            for part in self._account.parts[:first]:
                total += self._least_of(part, flag).on(shapes)
            minimum = np.minimum(minimum, total)
        return np.where(self._legal[shapes], minimum, np.inf)

    def _least_of(self, part: tuple[str, ...], sequence: str | None) -> _Filled:
        """The least of a component over the ways to cut it that fit."""
        key = part, sequence
        if key not in self._leasts:

            def make(shapes: Array) -> Array:
                tensor, minimum = self._tensor[shapes], np.full((self._count, len(shapes)), np.inf)
                for choice in self._scope.cuts(part, sequence):
                    cut = choice.tensor
                    fits = np.logical_and.reduce(
                        [self._fits[name][shapes] for name in cut] + [tensor > (1 if cut else 0)]
                    )
                    fitting = np.flatnonzero(fits)
                    if len(fitting):
                        minimum[:, fitting] = np.minimum(
                            minimum[:, fitting], self._part(part, choice).on(shapes[fitting])
                        )
                return minimum

            self._leasts[key] = _Filled(self._count, len(self._tensor), make)
        return self._leasts[key]

    def _part(self, part: tuple[str, ...], choice: Choice) -> _Filled:
        """The quantities of a component under a choice; zeros where the choice makes no sense."""
        (_, restricted), tally = self._account.of(part, choice)
        key = part, restricted
        if key not in self._known:
            cut = bool(restricted.tensor or restricted.sequence)

            def make(shapes: Array) -> Array:
                sense = (self._tensor[shapes] > (1 if cut else 0)) & self._legal[shapes]
                if sense.all():
                    return self._measured(tally, shapes)
                quantities = np.zeros((self._count, len(shapes)))
                if sense.any():
                    quantities[:, sense] = self._measured(tally, shapes[sense])
                return quantities

            self._known[key] = _Filled(self._count, len(self._tensor), make)
        return self._known[key]
