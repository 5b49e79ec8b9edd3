"""Quantities that are sums over components of colours, on all shapes of a space.

What a choice costs is a sum over components (`planning/space/cost_tables.py`), so the quantities of
a choice are a sum of arrays that are there already, and the least of all choices is the sum of the
least of every component. What the quantities are says who asks: seconds
(`planning/bounds/step_time.py`) or bytes (`planning/bounds/memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
        load, room: the model and the space.
        cuttable: colours that some choice shards.
        along: the colour that the context axis shards.
        routes: whether tokens of experts are routed.
    """

    load: Workload
    room: Space
    cuttable: tuple[str, ...]
    along: str | None
    routes: bool

    @property
    def accounts(self) -> Accounts:
        """The tallies of the model."""
        return self.load.ledger.accounts(self.cuttable)

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


class Parts:
    """Quantities of one account by component, on some shapes.

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
        self._known: dict[tuple[tuple[str, ...], Choice], Array] = {}
        self._leasts: dict[int | None, Array] = {}

    def total(self, under: Under, at: Array) -> Array:
        """The quantities of choices on some shapes, array [quantities, shapes].

        Choices that shard a component alike are added up together.

        Args:
            under: the choice of each shape.
            at: numbers of shapes.
        """
        found = np.zeros((self._count, len(at)))
        for part in ((), *self._account.parts):
            for choice, where in under.rows(part):
                quantities = self._part(part, choice)
                if where is None:
                    found += quantities[:, at]
                else:
                    found[:, where] += quantities[:, at[where]]
        return found

    def least(self, first: int | None = None) -> Array:
        """The least of each quantity under any choice, array [quantities, shapes]; infinite where
        no choice fits.

        Args:
            first: leave out all but so many components of the colours that the tensor axis may
                shard, which can only be less.
        """
        if first not in self._leasts:
            self._leasts[first] = self._found_least(first)
        return self._leasts[first]

    def _found_least(self, first: int | None) -> Array:
        """See `least`."""
        choices = self._scope.room.choices
        found = np.full((self._count, len(self._tensor)), np.inf)
        for flag in dict.fromkeys(choice.sequence for choice in choices):
            mine = [self._scope.choice(choice) for choice in choices if choice.sequence == flag]
            total = np.where((self._tensor > 1) | (flag is None), self._part((), mine[0]), np.inf)
            for part in self._account.parts[:first]:
                total = total + self._least_of(part, mine)
            found = np.minimum(found, total)
        return np.where(self._legal, found, np.inf)

    def _least_of(self, part: tuple[str, ...], choices: list[Choice]) -> Array:
        """The least of a component over the ways to cut it that fit."""
        fixed = self._scope.room.pins.rules is not None
        options = (
            {tuple(name for name in choice.tensor if name in part) for choice in choices}
            if fixed
            else subsets(part)
        )
        found = np.full((self._count, len(self._tensor)), np.inf)
        for cut in options:
            fits = np.logical_and.reduce(
                [self._fits[name] for name in cut] + [self._tensor > (1 if cut else 0)]
            )
            found = np.minimum(
                found, np.where(fits, self._part(part, replace(choices[0], tensor=cut)), np.inf)
            )
        return found

    def _part(self, part: tuple[str, ...], choice: Choice) -> Array:
        """The quantities of a component under a choice; zeros where the choice makes no sense."""
        (_, restricted), tally = self._account.of(part, choice)
        key = part, restricted
        if key not in self._known:
            sense = (
                (self._tensor > 1)
                if restricted.tensor or restricted.sequence
                else (self._tensor > 0)
            )
            at = np.flatnonzero(sense & self._legal)
            found = np.zeros((self._count, len(self._tensor)))
            found[:, at] = self._measured(tally, at)
            self._known[key] = found
        return self._known[key]
