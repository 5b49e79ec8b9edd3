"""What a user holds of islands whose outer gradients cross beside their next steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.errors import StateError
from shardlib.exchanges.diloco import DiLoCo
from shardlib.lowering.islands.checks import require_islands
from shardlib.lowering.islands.delayed.arriving import Arriving
from shardlib.lowering.islands.delayed.call import IslandCall
from shardlib.lowering.islands.delayed.flights import Flights, delivered
from shardlib.lowering.islands.delayed.sending import Packing, Sending
from shardlib.lowering.islands.meeting.meeting import Shared
from shardlib.lowering.islands.meeting.meetings import replaced, shared_of
from shardlib.lowering.islands.program import IslandsProgram
from shardlib.lowering.islands.stacked import (
    local,
    over_islands,
    stacked,
    stacked_shape,
    stacked_sharding,
    unstacked,
)
from shardlib.lowering.islands.start import zeros
from shardlib.lowering.islands.state import FlyingState, IslandsState, OuterState
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState

#: Of a fragment: outer gradients, as they cross, and the outer update.
Calls = tuple[Sending, Packing, Arriving]


@dataclass(frozen=True, kw_only=True, eq=False)
class DelayedProgram(IslandsProgram):
    """The programs of islands that meet by outer gradients which arrive some steps after they were
    sent.
    """

    exchange: DiLoCo

    def meet(self, state: IslandsState, meeting: int = 0) -> IslandsState:
        """Refused: a meeting begins after one step, and ends after another."""
        raise StateError(
            f"islands under {self.exchange} meet by their steps: what they send arrives"
            f" {self.exchange.delay} steps later"
        )

    def prepare(self) -> None:
        """Compiles all that steps run, if that has not been done."""
        for program in self.programs:
            program.prepare()
        for calls in self.calls:
            for call in (one for mine in calls for one in mine):
                call.prepare()

    @cached_property
    def calls(self) -> tuple[tuple[Calls, ...], ...]:
        """For each fragment what each island runs for it."""
        every = [calls_of(self.exchange, program, program.mesh) for program in self.programs]
        return tuple(zip(*every, strict=True))

    @cached_property
    def _flights(self) -> Flights:
        return Flights()

    def _require(self, state: IslandsState) -> None:
        require_islands(state, len(self.programs))
        flying_of(state)

    def _between(self, state: IslandsState, step: int) -> IslandsState:
        """What is done after a step: what has arrived, and what is sent."""
        flying = flying_of(state)
        if flying.sent_at and step >= int(flying.sent_at) + self.exchange.delay:
            state = self._arrived(state)
        due = self.exchange.due(step)
        return state if due is None else self._sent(state, due, step)

    def _sent(self, state: IslandsState, fragment: int, step: int) -> IslandsState:
        """The state whose outer gradients of a fragment are on the way."""
        outer, calls = flying_of(state), self.calls[fragment]
        places = [one.place for one in calls[0][0].about]
        before = self._apart(outer.sent, places)
        sent: list[list[jax.Array]] = []
        for number, (sending, _, _) in enumerate(calls):
            mine = self._trained(state.islands[number])
            theta = self._local(outer.params, places, number)
            (found,) = sending(before[number], [mine[place] for place in places], theta)
            sent.append(found)
        together = [stacked(one, self.mesh) for one in zip(*sent, strict=True)]
        self._flights.start(together[0], self._rows(calls, sent))
        exchange = replace(
            outer, sent=replaced(outer.sent, places, together), sent_at=np.int32(step)
        )
        return replace(state, exchange=exchange)

    def _arrived(self, state: IslandsState) -> IslandsState:
        """The state after what was sent is there; of a state that was saved on the way it is sent
        again.
        """
        outer = flying_of(state)
        nothing = replace(outer, sent_at=np.int32(0))
        fragment = self.exchange.due(int(outer.sent_at))
        if fragment is None:  # sent by islands that met after other steps
            return replace(state, exchange=nothing)
        calls = self.calls[fragment]
        places = [one.place for one in calls[0][0].about]
        rows = self._flights.land(outer.sent[places[0]]) or delivered(
            self._rows(calls, self._apart(outer.sent, places))
        )
        outers = [
            (self._local(outer.params, places, k), self._local(outer.momentum, places, k))
            for k in range(len(calls))
        ]
        found = [
            arriving([mine[place] for place in places], *own, arrived)
            for (_, _, arriving), mine, own, arrived in zip(
                calls, map(self._trained, state.islands), outers, rows, strict=True
            )
        ]
        islands = [
            self._with_trained(one, replaced(self._trained(one), places, thetas))
            for one, (thetas, _, _) in zip(state.islands, found, strict=True)
        ]
        exchange = replace(
            nothing,
            params=replaced(outer.params, places, self._alike([one[1] for one in found])),
            momentum=replaced(outer.momentum, places, self._alike([one[2] for one in found])),
        )
        return replace(state, islands=tuple(islands), exchange=exchange)

    @staticmethod
    def _rows(calls: Sequence[Calls], sent: Sequence[list[jax.Array]]) -> list[jax.Array]:
        """What each island sends, as it crosses."""
        return [packing(own)[0][0] for (_, packing, _), own in zip(calls, sent, strict=True)]

    def _local(
        self, arrays: Sequence[jax.Array], places: Sequence[int], number: int
    ) -> list[jax.Array]:
        """What an island holds of some arrays that are alike on all."""
        specs = jax.tree.leaves(self.programs[number].parts.params.state)
        return [local(arrays[place], specs[place]) for place in places]

    def _alike(self, arrays: Sequence[list[jax.Array]]) -> list[jax.Array]:
        """Arrays of islands, which are alike, over the devices of all."""
        return [over_islands(one, self.mesh) for one in zip(*arrays, strict=True)]

    def _apart(self, arrays: Sequence[jax.Array], places: Sequence[int]) -> list[list[jax.Array]]:
        """For each island its arrays of some that are stacked."""
        found: list[list[jax.Array]] = [[] for _ in self.programs]
        for place in places:
            like = [self._wide(program, place) for program in self.programs]
            for mine, array in zip(found, unstacked(arrays[place], like), strict=True):
                mine.append(array)
        return found

    def _wide(self, program: Program, place: int) -> jax.ShapeDtypeStruct:
        leaf = jax.tree.leaves(self._partition(program.state.params))[place]
        sharding = jax.tree.leaves(program.parts.params.state)[place]
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding)

    def _kept(self) -> FlyingState:
        outer: OuterState = super()._kept()
        islands, whole = len(self.programs), NamedSharding(self.mesh, PartitionSpec())
        sent = [
            jax.ShapeDtypeStruct(
                stacked_shape(one.shape, islands),
                jnp.float32,
                sharding=stacked_sharding(spec, self.mesh),
            )
            for one, spec in zip(outer.params, self._states, strict=True)
        ]
        at = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
        return FlyingState(**vars(outer), sent=sent, sent_at=at)

    def _first(self, states: tuple[TrainState, ...]) -> FlyingState:
        outer: OuterState = super()._first(states)
        sent = [zeros(one) for one in self._kept().sent]
        return FlyingState(**vars(outer), sent=sent, sent_at=np.int32(0))


def calls_of(exchange: DiLoCo, program: Program, mesh: Mesh | AbstractMesh) -> tuple[Calls, ...]:
    """What an island runs for each fragment."""

    def made(about: list[Shared]) -> Calls:
        return (
            Sending(exchange=exchange, mesh=mesh, about=about),
            Packing(exchange=exchange, mesh=mesh, about=about),
            Arriving(exchange=exchange, mesh=mesh, about=about),
        )

    return tuple(map(made, shared_of(exchange, program)))


def checked_calls(exchange: DiLoCo, program: Program) -> tuple[IslandCall, ...]:
    """What an island runs beside steps and what its devices could communicate in, abstract."""
    every = calls_of(exchange, program, program.mesh)
    return tuple(one for sending, _, arriving in every for one in (sending, arriving))


def flying_of(state: IslandsState) -> FlyingState:
    """What is outer, and what is on the way."""
    if not isinstance(state.exchange, FlyingState):
        raise StateError(
            "the state has nothing that is on the way between islands, and the program meets with a"
            " delay\nTry: program.init(), or a checkpoint of this exchange"
        )
    return state.exchange
