"""What a user holds of several islands: their programs, and their meetings.

program = shardlib.compile(..., pin={"exchange": shardlib.DiLoCo(islands=2, every=100)})
state, metrics = program.step(program.init(seed=0), batch)  # meets after every 100th step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardlib.annotation.keys import Seed
from shardlib.annotation.model import UserModule
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.exchanges.compressed import Compressed
from shardlib.exchanges.values import Meets, Several
from shardlib.lowering.islands.checks import require_islands
from shardlib.lowering.islands.meeting.meeting import Meeting
from shardlib.lowering.islands.meeting.meetings import mean_parameters, meetings_of, replaced
from shardlib.lowering.islands.rows import IslandBatches, of_all, parts, placed_parts
from shardlib.lowering.islands.stacked import local, mesh_of_all, stacked, unstacked
from shardlib.lowering.islands.start import abstract_outer, bytes_of, first_outer, streams_of
from shardlib.lowering.islands.state import IslandMetrics, IslandsState, outer_of, require_arrived
from shardlib.lowering.program.checks.other_batch import require
from shardlib.lowering.program.program import Options, Program, Verifier, verified_by
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.lowering.runtime.donated import require_present
from shardlib.lowering.runtime.random_keys import BatchDims, Fold
from shardlib.lowering.runtime.state import TrainState
from shardlib.planning.plan import Plan
from shardlib.report import Finding


@dataclass(frozen=True, kw_only=True, eq=False)
class IslandsProgram:
    """The programs of islands that train apart and meet.

    Attributes:
        plan: of all islands.
        exchange: how they meet.
        programs: of the islands, alike but for their devices.
        dims: the batch dim of each array of the batch, by path; a `Fold` for a key of the whole
            batch.
        retraced: traces the loss for the batch of all islands.
        verifier: see `Program`.
    """

    plan: Plan
    exchange: Several
    programs: tuple[Program, ...]
    dims: BatchDims
    retraced: Callable[[], LossJaxpr]
    verifier: Verifier | None = None

    @property
    def state(self) -> IslandsState:
        """Abstract training state, each leaf with its sharding."""
        return IslandsState(
            islands=tuple(program.state for program in self.programs),
            exchange=self._kept(),
            trained=self.trained,
        )

    @property
    def batch(self) -> IslandBatches:
        """Abstract batches, one for each island, each leaf with its sharding."""
        return IslandBatches(islands=tuple(program.batch for program in self.programs))

    @property
    def rows(self) -> Tree:
        """Abstract batch of all islands, each leaf sharded over the islands, and then as on one."""
        return of_all(self.programs[0].batch, self.dims, self.mesh)

    @cached_property
    def source(self) -> LossJaxpr:
        """The loss traced for the batch of all islands."""
        return self.retraced()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the plan has to say, and what lowering noticed."""
        return tuple(dict.fromkeys((*self.plan.findings, *self.programs[0].findings)))

    def init(self, seed: Seed = 0) -> IslandsState:
        """Makes the state before the first step: alike on all islands, but for random streams.

        Args:
            seed: see `Program.init`.

        Raises:
            ArgumentError: the seed is neither an integer from 0 to 2**31 - 1 nor a key.
        """
        return self.begun(tuple(program.init(seed) for program in self.programs))

    def begun(self, states: tuple[TrainState, ...]) -> IslandsState:
        """The state before the first step: models get random streams of their own.

        Args:
            states: of the islands, alike; they are taken over.
        """
        own = tuple(streams_of(number, state) for number, state in enumerate(states))
        return IslandsState(islands=own, exchange=self._first(own), trained=self.trained)

    def step(self, state: IslandsState, batch: Tree) -> tuple[IslandsState, IslandMetrics]:
        """Does one step on every island, and a meeting after every so many.

        Args:
            state: from `init` or the step before; its buffers are donated.
            batch: of all islands, host arrays, arrays sharded as `rows`, or what `put` gave.

        Returns:
            The next state, and metrics: means over islands.

        Raises:
            StateError: the state is none of islands, or was donated.
            BatchError: the batch is not the one that the program was compiled for.
        """
        self._require(state)
        mine = batch.islands if isinstance(batch, IslandBatches) else self._parts(batch)
        done = [
            program.step(one, rows)
            for program, one, rows in zip(self.programs, state.islands, mine, strict=True)
        ]
        count = np.int32(int(state.exchange.step) + 1)
        after = replace(
            state,
            islands=tuple(one for one, _ in done),
            exchange=replace(state.exchange, step=count),
        )
        metrics = IslandMetrics(tuple(metrics for _, metrics in done))
        return self._between(after, int(count)), metrics

    def meet(self, state: IslandsState, meeting: int = 0) -> IslandsState:
        """Does a meeting now; `step` does it when it is due.

        Args:
            state: of this program; its parameters and what is outer are donated.
            meeting: which, where there are several: 0 to `exchange.meetings` - 1.
        """
        require_islands(state, len(self.programs))
        held, outer = self.meetings[meeting], outer_of(state)
        trained = [self._trained(one) for one in state.islands]
        places = [one.place for one in held.about]
        kept = places if self.exchange.keeps else []
        together, params, momentum = held(
            [stacked([mine[place] for mine in trained], self.mesh) for place in places],
            [outer.params[place] for place in kept],
            [outer.momentum[place] for place in kept],
        )
        like = [jax.tree.leaves(self._partition(p.state.params)) for p in self.programs]
        for place, array in zip(places, together, strict=True):
            apart = unstacked(array, [leaves[place] for leaves in like])
            for mine, own in zip(trained, apart, strict=True):
                mine[place] = own
        exchange = replace(
            outer,
            params=replaced(outer.params, kept, params),
            momentum=replaced(outer.momentum, kept, momentum),
        )
        islands = tuple(map(self._with_trained, state.islands, trained))
        return replace(state, islands=islands, exchange=exchange)

    def put(self, batch: Tree) -> IslandBatches:
        """Places the rows of every island on its devices.

        Args:
            batch: of all islands.

        Raises:
            BatchError: it is not the one that the program was compiled for.
        """
        mine = zip(self.programs, self._parts(batch), strict=True)
        return IslandBatches(islands=tuple(program.put(rows) for program, rows in mine))

    def evaluate(self, state: IslandsState, batch: Tree) -> dict[str, jax.Array]:
        """The metrics of rows with the outer parameters, on one island; see `Program.evaluate`.

        Args:
            state: of this program; it stays usable.
            batch: the rows.
        """
        return self.programs[0].evaluate(self.outer(state), batch)

    def module(self, state: IslandsState) -> UserModule:
        """The user's own model with the outer parameters, on the first island.

        Args:
            state: of this program; it stays usable.
        """
        return self.programs[0].module(self.outer(state))

    def outer(self, state: IslandsState) -> TrainState:
        """The state of the first island with the outer parameters: those of the last meeting; where
        nothing is outer, with the mean of the islands' parameters.

        Args:
            state: of this program; it stays usable.
        """
        require_islands(state, len(self.programs))
        require_present("outer", ([one.inference for one in state.islands], outer_of(state).params))
        like = jax.tree.leaves(self._partition(self.programs[0].state.params))
        outer = outer_of(state).params if self.exchange.keeps else self._means(state)
        found = [
            jax.device_put(local(array, spec).astype(leaf.dtype), leaf.sharding)
            for array, leaf, spec in zip(outer, like, self._states, strict=True)
        ]
        return self._with_trained(state.islands[0], found)

    def prepare(self) -> None:
        """Compiles all that steps and meetings run, if that has not been done."""
        for program in self.programs:
            program.prepare()
        for meeting in self.meetings:
            meeting.prepare()

    def compiled(self) -> jax.stages.Compiled:
        """The compiled step of the first island."""
        return self.programs[0].compiled()

    def verify(self, *, limits: Any = None, options: Options | None = None) -> Any:
        """The step of an island and the meetings of all against the plan, see `Program.verify`.

        Args:
            limits, options: see `Program.verify`.
        """
        return verified_by(self.verifier, self, limits, options)

    def timeline(self) -> str:
        """The schedule of the pipeline of an island, see `Program.timeline`."""
        return self.programs[0].timeline()

    def memory(self) -> dict[str, int]:
        """Bytes per device of an island's compiled step, and "exchange", of what is outer."""
        found, kept = self.programs[0].memory(), bytes_of(self.state.exchange)
        return {**found, "exchange": kept, "peak": found["peak"] + kept}

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Paths of the trained parameters."""
        leaves = jax.tree_util.tree_leaves_with_path(self._partition(self.programs[0].state.params))
        return tuple(path_text(path) for path, _ in leaves)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of all islands."""
        return mesh_of_all([p.mesh for p in self.programs if isinstance(p.mesh, Mesh)])

    @cached_property
    def meetings(self) -> tuple[Meeting, ...]:
        """The meetings of the islands that differ: about a fragment each, or at a distance."""
        return meetings_of(self._meets, self.programs[0], self.mesh)

    @property
    def _meets(self) -> Meets:
        """How islands that train apart meet."""
        assert not isinstance(self.exchange, Compressed)
        return self.exchange

    def _require(self, state: IslandsState) -> None:
        """Refuses a state of another exchange, before a step takes it over."""
        require_islands(state, len(self.programs))
        require_arrived(outer_of(state))

    def _between(self, state: IslandsState, step: int) -> IslandsState:
        """The state after what islands do between a step and the next."""
        due = self._meets.due(step)
        return state if due is None else self.meet(state, due)

    def _kept(self) -> Any:
        """Abstract: what is outer."""
        trained = jax.tree.leaves(self._partition(self.programs[0].state.params))
        return abstract_outer(self.mesh, self._states, trained if self.exchange.keeps else [])

    def _first(self, states: tuple[TrainState, ...]) -> Any:
        """What is outer before the first step."""
        trained = [self._trained(one) for one in states] if self.exchange.keeps else []
        return first_outer(self.mesh, self._states, trained)

    @property
    def _states(self) -> list[NamedSharding]:
        """Shardings of optimizer state on the first island."""
        return jax.tree.leaves(self.programs[0].parts.params.state)

    def _means(self, state: IslandsState) -> list[jax.Array]:
        """The mean of the islands' parameters, alike on all."""
        trained = zip(*map(self._trained, state.islands), strict=True)
        return mean_parameters(self.meetings[0], [stacked(one, self.mesh) for one in trained])

    def _parts(self, batch: Tree) -> tuple[Tree, ...]:
        require(batch, self.rows)
        folded = any(isinstance(dim, Fold) for dim in self.dims.values())
        placed = () if folded else placed_parts(batch, self.rows, self.batch)
        return placed or parts(batch, self.dims, len(self.programs))

    def _partition(self, params: Tree) -> Tree:
        return self.programs[0].model.partition.trained(params)

    def _trained(self, state: TrainState) -> list[jax.Array]:
        return jax.tree.leaves(self._partition(state.params))

    def _with_trained(self, state: TrainState, arrays: list[jax.Array]) -> TrainState:
        partition = self.programs[0].model.partition
        structure = jax.tree.structure(partition.trained(state.params))
        params = partition.joined(jax.tree.unflatten(structure, arrays), state.params)
        return replace(state, params=params)
