"""What is there to price on some number of devices, and what can it cost at least?

An *entry* is a mesh with microbatches, a *pair* an entry under a choice of colours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardlib.cost.tables.basis_functions import Values
from shardlib.cost.tables.pricer import Pricer
from shardlib.planning.bounds.memory import Footprint, Footprints
from shardlib.planning.bounds.step_time import EACH, Bounds
from shardlib.planning.bounds.step_time_that_fits import Fitting
from shardlib.planning.bounds.tick import Tick
from shardlib.planning.bounds.tick import joined as joined_ticks
from shardlib.planning.space import meshes
from shardlib.planning.space.table_components import Scope

Array = np.ndarray
#: Components of the colours that are added up, one after the other, before all of them are.
FIRST_COMPONENTS = 2
#: The number of a choice, entries that it fits, and their bounds for a microbatch by policy.
Bounded = tuple[int, Array, dict[str, Tick]]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Entries under choices, arrays of equal length.

    Attributes:
        entries: indices of entries.
        choices: numbers of choices.
        least: a bound of each.
    """

    entries: Array
    choices: Array
    least: Array

    def __len__(self) -> int:
        return len(self.entries)

    def take(self, which: Array) -> Pairs:
        """Some of the pairs."""
        return Pairs(
            entries=self.entries[which], choices=self.choices[which], least=self.least[which]
        )

    def below(self, limit: float) -> Pairs:
        """Those whose bound is below a limit, the least first."""
        order = np.argsort(self.least, kind="stable")
        return self.take(order[: int(np.searchsorted(self.least[order], limit))])

    def first(self, count: int) -> Pairs:
        """So many of them."""
        return self.take(np.arange(min(count, len(self))))

    def after(self, count: int) -> Pairs:
        """All but the first so many."""
        return self.take(np.arange(min(count, len(self)), len(self)))

    def firsts(self) -> Pairs:
        """The first pair of every entry."""
        return self.take(np.sort(np.unique(self.entries, return_index=True)[1]))


def joined(parts: Iterable[Pairs]) -> Pairs:
    """The pairs of several, one after the other."""
    listed = [
        Pairs(
            entries=np.zeros(0, dtype=np.int64),
            choices=np.zeros(0, dtype=np.int64),
            least=np.zeros(0),
        ),
        *parts,
    ]
    return Pairs(
        **{
            name: np.concatenate([getattr(part, name) for part in listed])
            for name in ("entries", "choices", "least")
        }
    )


class Entries:
    """Every mesh with microbatches on some number of devices, with experts treated in one way, and
    what bounds say of them.

    Args:
        scope: the choices.
        pricer: the machine.
        fitting: the capacity.
        sizes: of every mesh axis and "micro", by entry (`meshes.sizes`).
        values: measures on the shapes of the entries.
        shape: number of the shape of each entry.
    """

    def __init__(
        self,
        scope: Scope,
        pricer: Pricer,
        fitting: Fitting,
        sizes: Mapping[str, Array],
        values: Values,
        shape: Array,
    ) -> None:
        self.scope, self.sizes, self.values, self.shape = scope, sizes, values, shape
        self.bounds, self._pricer, self._fitting = Bounds(scope, pricer, values), pricer, fitting
        self.choices = [scope.choice(choice) for choice in scope.room.choices]
        self._apart = scope.room.apart  # then the bounds do not know memory
        self._policies = (*scope.room.policies, EACH) if self._apart else scope.room.policies

    def __len__(self) -> int:
        return len(self.shape)

    def at(self, entries: Array) -> dict[str, Array]:
        """Sizes of some entries."""
        return {axis: values[entries] for axis, values in self.sizes.items()}

    def slower(self, limit: float) -> bool:
        """Whether no plan is faster than a limit, seen as soon as what depends on no colour, or
        that with the first component of the colours, adds up to it.
        """

        def seconds(first: int) -> Array:
            return self._fitting.fastest(
                {policy: self.bounds.least(policy, self.shape, first) for policy in self._policies},
                self.sizes,
            )

        return any(
            bool((seconds(first) >= limit).all()) for first in range(FIRST_COMPONENTS)
        ) or bool((self.fastest >= limit).all())

    @cached_property
    def _ticks(self) -> dict[str, Tick]:
        return {policy: self.bounds.least(policy, self.shape) for policy in self._policies}

    @cached_property
    def fastest(self) -> Array:
        """Seconds of a step that no plan beats, by entry, whether it fits or not; infinite where no
        choice fits.
        """
        return self._fitting.fastest(self._ticks, self.sizes)

    def _footprints(self, entries: Array) -> Footprints:
        return Footprints(self.scope, self._pricer, self.values, np.unique(self.shape[entries]))

    def _least(self, entries: Array) -> dict[str, Footprint]:
        """The least that any choice takes, by policy; infinite where no choice fits."""
        found, (_, which) = (
            self._footprints(entries),
            np.unique(self.shape[entries], return_inverse=True),
        )
        rest, points = found.least()
        return {
            policy: found.of(rest[:, which], points[policy][:, which], self.at(entries))
            for policy in self._policies
        }

    def leanest(self, entries: Array) -> Array:
        """Bytes that no plan of some entries undercuts; infinite where no choice fits."""
        if self._apart:
            return np.zeros(len(entries))
        with np.errstate(invalid="ignore"):  # bytes of what does not fit are infinite
            found = self._fitting.leanest(self._least(entries))
        return np.nan_to_num(found, nan=np.inf, posinf=np.inf)

    def seconds(self, entries: Array) -> Array:
        """Seconds of a step that no plan of some entries beats that fits; infinite where none
        fits.
        """
        if self._apart:
            return self.fastest[entries]
        return self._fitting.seconds(
            {policy: tick.take(entries) for policy, tick in self._ticks.items()},
            self._least(entries),
            self.at(entries),
        )

    def pairs(
        self, entries: Array, limit: float = np.inf, *, minimum_memory: bool = False
    ) -> Pairs:
        """Some entries under every choice that fits, with a bound that is below a limit, the least
        first.

        Args:
            entries: indices of entries.
            limit: seconds, or bytes.
            minimum_memory: the bound is that of bytes, and not of seconds.
        """
        found: list[Bounded] = []
        for ways in np.unique(self.sizes["tensor"][entries]):
            mine = entries[self.sizes["tensor"][entries] == ways]
            for number in self._fit(int(ways)):
                found += self._under(number, mine, np.inf if minimum_memory else limit)
        if not found:
            return joined([])
        every = np.concatenate([mine for _, mine, _ in found])
        choices = np.concatenate([np.full(len(mine), number) for number, mine, _ in found])
        ticks = {
            policy: joined_ticks([tick[policy] for _, _, tick in found])
            for policy in self._policies
        }
        if self._apart:
            return Pairs(
                entries=every,
                choices=choices,
                least=(
                    np.zeros(len(every))
                    if minimum_memory
                    else self._fitting.fastest(ticks, self.at(every))
                ),
            ).below(limit)
        footprints = self._of(found, self.at(every))
        least = (
            self._fitting.leanest(footprints)
            if minimum_memory
            else self._fitting.seconds(ticks, footprints, self.at(every))
        )
        return Pairs(entries=every, choices=choices, least=least).below(limit)

    def _fit(self, ways: int) -> list[int]:
        """The choices that fit a size of the tensor axis."""
        colours = self.scope.load.colouring.colours
        return [
            number
            for number, choice in enumerate(self.choices)
            if bool(choice.tensor or choice.sequence) == (ways > 1)
            and all(colours[name].divisor % ways == 0 for name in choice.tensor)
        ]

    def _under(self, number: int, entries: Array, limit: float) -> list[Bounded]:
        """The entries that a choice fits, with the bounds of a microbatch by policy, but for those
        that are not below a limit whatever their memory.
        """
        room, choice = self.scope.room, self.choices[number]
        entries = entries[meshes.legal(choice, room.limits, self.scope.routes, self.at(entries))]
        ticks = {
            policy: self.bounds.tick(policy, choice, self.shape[entries])
            for policy in self._policies
        }
        least = self._fitting.fastest(ticks, self.at(entries))
        below = np.flatnonzero(least < limit)
        return (
            [(number, entries[below], {policy: tick.take(below) for policy, tick in ticks.items()})]
            if len(below)
            else []
        )

    def _of(self, found: list[Bounded], sizes: Mapping[str, Array]) -> dict[str, Footprint]:
        """Footprints by policy."""
        footprints = self._footprints(np.concatenate([mine for _, mine, _ in found]))
        rest, points = list[Array](), defaultdict[str, list[Array]](list)
        for number, mine, _ in found:
            one, others = footprints.total(self.choices[number], self.shape[mine])
            rest.append(one)
            for policy in self._policies:
                points[policy].append(others[policy])
        together = np.concatenate(rest, axis=1)
        return {
            policy: footprints.of(together, np.concatenate(points[policy], axis=1), sizes)
            for policy in self._policies
        }
