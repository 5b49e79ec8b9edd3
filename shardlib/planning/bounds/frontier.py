"""What is there to price on some number of devices, and what can it cost at least?

An *entry* is a mesh with microbatches, a *pair* an entry under a choice of colours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from shardlib.axes import MESH_AXES
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.tables.basis_functions import Values
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.terms.local_sizes import distinct_rows
from shardlib.planning.bounds.fastest import Fastest
from shardlib.planning.bounds.memory import Footprint, Footprints
from shardlib.planning.bounds.pairs import Pairs, joined
from shardlib.planning.bounds.step_time import EACH, Bounds
from shardlib.planning.bounds.step_time_that_fits import Fitting, Kind
from shardlib.planning.bounds.traffic import Moved, Traffic
from shardlib.planning.space import meshes
from shardlib.planning.space.table_components import Scope, Under

Array = np.ndarray


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
        self.choices, self._seconds = scope.choices, np.full(len(shape), np.nan)
        self._apart = scope.space.apart  # then the bounds do not know memory
        self._policies = (*scope.space.policies, EACH) if self._apart else scope.space.policies
        self._fastest = Fastest(self.bounds, fitting, self._policies, sizes, shape)

    def __len__(self) -> int:
        return len(self.shape)

    def at(self, entries: Array) -> dict[str, Array]:
        """Sizes of some entries."""
        return {axis: values[entries] for axis, values in self.sizes.items()}

    def below(self, limit: float) -> tuple[Array, Array]:
        """Entries of which a plan may be faster than a limit, whether it fits or not, the least
        bound first, and these bounds; those of which no choice fits are none.
        """
        return self._fastest.below(limit)

    @cached_property
    def fastest(self) -> Array:
        """Seconds of a step that no plan beats, by entry, whether it fits or not; infinite where no
        choice fits.
        """
        return self._fastest.of_all()

    @cached_property
    def _footprints(self) -> Footprints:
        return Footprints(self.scope, self._pricer, self.values)

    @cached_property
    def _mesh(self) -> Array:
        """Number of the mesh of each entry, whatever its microbatches."""
        return distinct_rows([self.sizes[axis] for axis in MESH_AXES])[1]

    @cached_property
    def _traffic(self) -> Traffic:
        """What moves on each mesh behind compute, which is the same for all microbatches, on the
        best links.
        """
        last = np.zeros(self._mesh.max() + 1, dtype=np.int64)
        last[self._mesh] = np.arange(len(self))
        return Traffic(self.scope, self._pricer, self.values, self.shape[last], self.at(last))

    def _traffic_on(self, c: Candidates) -> Traffic:
        sizes = {**c.sizes, "micro": c.micro}
        return Traffic(self.scope, self._pricer, self.values, c.shape, sizes, c.links)

    def _least(self, shape: Array, sizes: Mapping[str, Array]) -> dict[str, Footprint]:
        """The least that any choice takes, by policy; infinite where no choice fits."""
        resting, points = self._footprints.least(shape)
        return {
            policy: self._footprints.of(resting, points[policy], sizes) for policy in self._policies
        }

    @cached_property
    def fewest_bytes(self) -> Array:
        """Bytes that no plan undercuts, by entry; infinite where no choice fits."""
        if self._apart:
            return np.where(np.isfinite(self.fastest), 0.0, np.inf)
        return self.leanest(np.arange(len(self)))

    def leanest(self, entries: Array) -> Array:
        """Bytes that no plan of some entries undercuts; infinite where no choice fits."""
        if self._apart:
            return np.zeros(len(entries))
        with np.errstate(invalid="ignore"):  # bytes of what does not fit are infinite
            minimum_bytes = self._fitting.leanest(
                self._least(self.shape[entries], self.at(entries))
            )
        return np.nan_to_num(minimum_bytes, nan=np.inf, posinf=np.inf)

    def seconds(self, entries: Array) -> Array:
        """Seconds of a step that no plan of some entries beats that fits; infinite where none
        fits.
        """
        if self._apart:
            return self.fastest[entries]
        new = entries[np.isnan(self._seconds[entries])]
        if len(new):
            moved = self._traffic.least(self._mesh[new])
            self._seconds[new] = self._least_seconds(self.shape[new], self.at(new), moved)
        return self._seconds[entries]

    def seconds_on(self, c: Candidates) -> Array:
        """The same of entries on places, whose links are known."""
        moved = self._traffic_on(c).least(np.arange(len(c)))
        return self._least_seconds(c.shape, {**c.sizes, "micro": c.micro}, moved, waits=True)

    def _least_seconds(
        self,
        shape: Array,
        sizes: Mapping[str, Array],
        moved: Mapping[str, Moved],
        *,
        waits: bool = False,
    ) -> Array:
        """See `seconds`."""
        with np.errstate(invalid="ignore"):  # what no choice fits is infinite
            ticks = {policy: self.bounds.least(policy, shape) for policy in self._policies}
            if waits:
                ticks = {p: tick.waiting(moved[p].blocked) for p, tick in ticks.items()}
            return self._fitting.seconds(ticks, self._least(shape, sizes), moved, sizes)

    def pairs(
        self, entries: Array, limit: float = np.inf, *, minimum_memory: bool = False
    ) -> Pairs:
        """Some entries under every choice that fits, with a bound that is below a limit, the least
        first.

        Args:
            limit: seconds, or bytes.
            minimum_memory: the bound is that of bytes, and not of seconds.
        """
        fitting = self._fit(entries)
        if not len(fitting):
            return fitting
        row_choices, shapes, sizes = self._rows(fitting)
        if minimum_memory:
            minimum_bytes = (
                np.zeros(len(fitting))
                if self._apart
                else self._fitting.leanest(self._footprint(row_choices, shapes, sizes))
            )
            return replace(fitting, least=minimum_bytes).below(limit)
        ticks = {
            policy: self.bounds.ticks(policy, row_choices, shapes) for policy in self._policies
        }
        fastest = self._fitting.fastest(ticks, sizes)
        below = np.flatnonzero(fastest < limit)
        fitting_pairs = replace(fitting, least=fastest).take(below)
        if not self._apart and len(fitting_pairs):
            row_choices, shapes, sizes = self._rows(fitting_pairs)
            fitting_pairs = replace(
                fitting_pairs,
                least=self._fitting.seconds(
                    {policy: tick.take(below) for policy, tick in ticks.items()},
                    self._footprint(row_choices, shapes, sizes),
                    self._traffic.total(row_choices, self._mesh[fitting_pairs.entries]),
                    sizes,
                ),
            )
        return fitting_pairs.take(
            np.lexsort((fitting_pairs.choices, self.sizes["tensor"][fitting_pairs.entries]))
        ).below(limit)

    def _rows(self, pairs: Pairs) -> tuple[Under, Array, dict[str, Array]]:
        """Choices, numbers of shapes and sizes of pairs."""
        return (
            Under(self.scope.chosen, pairs.choices),
            self.shape[pairs.entries],
            self.at(pairs.entries),
        )

    def on_places(self, c: Candidates, positions: Array, choices: Array) -> dict[Kind, Array]:
        """Seconds of a step that no plan of a kind beats that fits, on places whose links are
        known.
        """
        sizes, row_choices = {**c.sizes, "micro": c.micro}, Under(self.scope.chosen, choices)
        shape, sizes = c.shape[positions], {axis: size[positions] for axis, size in sizes.items()}
        moved = self._traffic_on(c).total(row_choices, positions)
        return self._fitting.by_kind(
            {
                policy: self.bounds.ticks(policy, row_choices, shape).waiting(moved[policy].blocked)
                for policy in self._policies
            },
            self._footprint(row_choices, shape, sizes),
            moved,
            sizes,
        )

    def _fit(self, entries: Array) -> Pairs:
        """Some entries under every choice that fits them, choice by choice."""
        space, sizes, colours = (
            self.scope.space,
            self.at(entries),
            self.scope.load.colouring.colours,
        )
        tensor, fitted = sizes["tensor"], list[Pairs]()
        divides = {
            name: colours[name].divisor % tensor == 0
            for name in {name for choice in self.choices for name in choice.tensor}
        }
        for number, choice in enumerate(self.choices):
            fits = (tensor > 1) == bool(choice.tensor or choice.sequence)
            for name in choice.tensor:
                fits &= divides[name]
            rows = entries[fits & meshes.legal(choice, space, self.scope.routes, sizes)]
            fitted.append(
                Pairs(entries=rows, choices=np.full(len(rows), number), least=np.zeros(len(rows)))
            )
        return joined(fitted)

    def _footprint(
        self, row_choices: Under, shape: Array, sizes: Mapping[str, Array]
    ) -> dict[str, Footprint]:
        """Footprints of candidates under choices, by policy."""
        resting, points = self._footprints.total(row_choices, shape)
        return {
            policy: self._footprints.of(resting, points[policy], sizes) for policy in self._policies
        }
