"""Prices candidates under choices of colours on the places that their axes can have, and says what
they take there at least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardlib.axes import MESH_AXES, MeshShape
from shardlib.cost.pricing.candidates import candidates
from shardlib.cost.pricing.sums import sums
from shardlib.hardware.placement import Placement, place, placements
from shardlib.hardware.topology import Topology
from shardlib.planning.bounds.frontier import Entries
from shardlib.planning.bounds.pairs import Pairs
from shardlib.planning.bounds.step_time import EACH
from shardlib.planning.bounds.step_time_that_fits import Kind
from shardlib.planning.decisions.candidate import Candidate
from shardlib.planning.offers.incumbents import Best, Place, Seen
from shardlib.planning.offers.layer_group_bounds import GroupBounds
from shardlib.planning.offers.layer_group_corners import Corners
from shardlib.planning.offers.offer import Block
from shardlib.planning.offers.price_by_layer_group import GroupPricer
from shardlib.planning.offers.price_uniform import RowPricer
from shardlib.planning.offers.ranking import Ranking
from shardlib.planning.offers.rows import Rows
from shardlib.planning.offers.variants import Variants
from shardlib.planning.space.cost_tables import Account
from shardlib.planning.space.space import Space
from shardlib.planning.space.table_components import Under

Array = np.ndarray
#: Rows (a candidate under a choice) that are priced at once, about.
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Pairs on places, arrays of equal length.

    Attributes:
        block: the candidates.
        at: number of the candidate.
        choices: number of the choice.
        least: a bound of each.
        kinds: bounds of each by kind of plans, as far as they are known.
    """

    block: Block
    at: Array
    choices: Array
    least: Array
    kinds: Mapping[Kind, Array]

    def __len__(self) -> int:
        return len(self.at)

    def take(self, rows: Array) -> Placed:
        """Some of them."""
        return Placed(
            block=self.block,
            at=self.at[rows],
            choices=self.choices[rows],
            least=self.least[rows],
            kinds={kind: bound[rows] for kind, bound in self.kinds.items()},
        )

    def first(self, count: int) -> Placed:
        """So many of them."""
        return self.take(np.arange(min(count, len(self))))

    def after(self, count: int) -> Placed:
        """All but the first so many."""
        return self.take(np.arange(min(count, len(self)), len(self)))

    def alone(self) -> Placed:
        """The same, of a block that has no other candidates."""
        used, positions = np.unique(self.at, return_inverse=True)
        block = replace(
            self.block,
            places=[self.block.places[i] for i in used],
            c=self.block.c.take(used),
        )
        return replace(self, block=block, at=positions.reshape(-1))

    def below(self, limit: float) -> Placed:
        """Those whose bound is below a limit, the least first."""
        order = np.argsort(self.least, kind="stable")
        return self.take(order[: int(np.searchsorted(self.least[order], limit))])


@dataclass(frozen=True, kw_only=True)
class PairPricer:
    """Prices pairs: candidates, each under a choice of colours, on their places.

    Attributes:
        variants: the model, the space and the machine.
        cuttable: colours that some choice shards.
        best: takes the results.
        rows: takes the places, where a ranking speaks of them.
    """

    variants: Variants
    cuttable: tuple[str, ...]
    best: Best
    rows: list[Place]

    @property
    def space(self) -> Space:
        """The space."""
        return self.variants.space

    @property
    def topology(self) -> Topology:
        """The machine."""
        return self.variants.pricer.topology

    def price(
        self,
        entries: Entries,
        pairs: Pairs,
        reach: float,
        ranking: Ranking[Candidate] | None,
        *,
        usual: bool = False,
    ) -> None:
        """Prices pairs on every place that their axes can have, or on the usual one."""
        if (placed := self.placed(entries, pairs, usual=usual)) is not None:
            self.price_placed(entries, placed, reach, ranking)

    def placed(self, entries: Entries, pairs: Pairs, *, usual: bool = False) -> Placed | None:
        """Pairs on every place that their axes can have, or on the usual one; None where they have
        none.
        """
        block, places = self._block(entries, pairs, usual)
        if block is None:
            return None
        which = np.repeat(np.arange(len(pairs)), [len(rows) for rows in places])
        return Placed(
            block=block,
            at=np.array([row for rows in places for row in rows], dtype=np.int64),
            choices=pairs.choices[which],
            least=pairs.least[which],
            kinds={},
        )

    def near(self, entries: Entries, pairs: Pairs) -> Placed | None:
        """Pairs on every place, with bounds that know the links of each, but not the choice, as far
        as they are below the fastest plan, the least first; None where they have no place.
        """
        placed = self.placed(entries, pairs)
        if placed is None or self.space.apart:
            return placed
        bounds = np.maximum(placed.least, entries.seconds_on(placed.block.c)[placed.at])
        return replace(placed, least=bounds).below(self.best.limit).alone()

    def bounded(self, entries: Entries, placed: Placed) -> Placed:
        """Pairs on places with bounds that know the choice, too, as far as they are below the
        fastest plan, the least first.
        """
        if self.space.apart or not len(placed):
            return placed
        placed = placed.alone()
        kinds = entries.on_places(placed.block.c, placed.at, placed.choices)
        bounds = np.minimum.reduce([np.full(len(placed), np.inf), *kinds.values()])
        return replace(placed, least=bounds, kinds=kinds).below(self.best.limit)

    def price_placed(
        self, entries: Entries, placed: Placed, reach: float, ranking: Ranking[Candidate] | None
    ) -> None:
        """Prices pairs on places."""
        seen = Seen(self.best, self.rows, placed.block, self.variants.capacity, reach, ranking)
        self._priced(entries, placed, seen)
        seen.close()

    def _priced(self, entries: Entries, placed: Placed, seen: Seen) -> None:
        """Prices candidates of a block, each under a choice; those under the same choice on the
        same shape have the same quantities.
        """
        order = np.lexsort((placed.block.c.shape[placed.at], placed.choices))
        pricer = self._row_pricer(entries)
        for part in np.split(order, range(ROWS_AT_ONCE, len(order), ROWS_AT_ONCE)):
            pricer.price(self._rows(entries, placed.take(part)), seen)

    def _row_pricer(self, entries: Entries) -> RowPricer:
        """Prices rows of some entries; layer groups apart, where the space has such plans."""
        load, space, pricer = self.variants.load, self.space, self.variants.pricer
        groups = None
        if space.apart:
            bounds = GroupBounds(
                load=load,
                space=space,
                pricer=pricer,
                capacity=self.variants.capacity,
                offloads=self.variants.offloads(),
            )
            corners = Corners(
                load=load,
                policies=space.policies,
                pricer=pricer,
                values=entries.values,
                cuttable=self.cuttable,
            )
            groups = GroupPricer(
                load=load, space=space, pricer=pricer, bounds=bounds, corners=corners
            )
        return RowPricer(
            load=load, space=space, pricer=pricer, variants=self.variants, groups=groups
        )

    def _rows(self, entries: Entries, placed: Placed) -> Rows:
        """Candidates under choices, with their quantities."""
        rows, choices, c = placed.at, placed.choices, placed.block.c.take(placed.at)
        accounts, policies, routes = (
            entries.scope.accounts,
            self.space.policies,
            entries.scope.routes,
        )
        by_group = self.space.apart
        bounds = (*policies, EACH) if by_group else policies
        shapes, shape_of_row = np.unique(c.shape, return_inverse=True)
        keys, column = np.unique(
            np.stack([choices, shape_of_row.reshape(-1)]), axis=1, return_inverse=True
        )
        columns_needed = [
            (entries.choices[int(number)], keys[1, keys[0] == number])
            for number in np.unique(keys[0])
        ]

        def columns(account: Account) -> Array:
            return account.on(entries.values, shapes).columns(columns_needed)

        local, resting = replace(c, shape=column.reshape(-1)), columns(accounts.rest)[0]
        row_choices = Under(entries.scope.chosen, keys[0])
        ticks = {
            policy: entries.bounds.ticks(policy, row_choices, shapes[keys[1]]).take(local.shape)
            for policy in bounds
        }
        saved = (
            {
                policy: columns(
                    self.variants.load.stacks.accounts(self.cuttable).points[policy, routes]
                )[0]
                for policy in policies
            }
            if by_group
            else dict[str, Array]()
        )
        sums_by_policy = {
            policy: sums(
                columns(accounts.work[policy, routes])[0],
                resting,
                list(columns(accounts.points[policy, routes])),
                self.variants.load.model,
                self.variants.pricer,
                local,
                stacks=saved.get(policy),
            )
            for policy in policies
        }
        return Rows(
            candidates=rows,
            choices=choices,
            c=c,
            sums=sums_by_policy,
            ticks=ticks,
            kinds=placed.kinds,
        )

    def _block(
        self, entries: Entries, pairs: Pairs, usual: bool
    ) -> tuple[Block | None, list[list[int]]]:
        """The candidates of some pairs on their places, and the positions of those of each pair;
        nothing where there are none.
        """
        rows_of_entry: dict[int, list[int]] = {}
        places: list[tuple[MeshShape, tuple[str, ...], Placement]] = []
        rows: list[int] = []
        for entry in pairs.entries:
            if int(entry) not in rows_of_entry:
                mesh = MeshShape({axis: int(entries.sizes[axis][entry]) for axis in MESH_AXES})
                options = self._places(mesh, usual)
                rows_of_entry[int(entry)] = list(range(len(rows), len(rows) + len(options)))
                places += [(mesh, order, placement) for order, placement in options]
                rows += [int(entry)] * len(options)
        if not rows:
            return None, []
        c = candidates(
            [(mesh, placement) for mesh, _, placement in places],
            [int(m) for m in entries.sizes["micro"][rows]],
            self.topology,
        )
        block = Block(
            places=places,
            c=replace(c, shapes=entries.values.shapes, shape=entries.shape[rows]),
            choices=[(choice, entries.scope.routes) for choice in entries.choices],
            gaps=self.space.gaps,
        )
        return block, [rows_of_entry[int(entry)] for entry in pairs.entries]

    def _places(self, mesh: MeshShape, usual: bool) -> list[tuple[tuple[str, ...], Placement]]:
        """The places of a mesh; with `usual`, one of them."""
        pinned = self.space.pins.axis_order
        if pinned is not None:
            order = mesh.in_order(pinned)
            placement = place(mesh, self.topology, order)
            return [] if placement is None else [(() if order == tuple(mesh) else order, placement)]
        if usual or not self.space.limits.able.free:
            placement = place(mesh, self.topology)
            return [] if placement is None else [((), placement)]
        return [*placements(mesh, self.topology)]
