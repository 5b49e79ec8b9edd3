r"""Islands whose outer gradients cross beside their next steps.

    island 0   step 8 | send | step 9   step 10 | arrive | step 11
                          \  copies from island to island  /
    island 1   step 8 | send | step 9   step 10 | arrive | step 11

Each island runs programs of its own alone; what crosses are copies of arrays, which the runtime
makes beside programs. A second program over all devices would hide nothing, since a device runs one
program after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees import Tree
from shardlib.errors import StateError
from shardlib.islands import meeting as layers
from shardlib.islands.exchanges import DiLoCo, spaces, wire_bytes
from shardlib.islands.meeting import (
    Arrays,
    FragmentCall,
    OuterUpdate,
    SharedParameter,
    alike,
    average,
    joined,
    local,
    outer_updates,
    packed,
    replaced,
    shared_of,
    split,
    stacked,
    stacked_shape,
    stacked_sharding,
    unpacked,
    unstacked,
)
from shardlib.islands.outer import mixed
from shardlib.islands.program import (
    InFlightState,
    IslandsProgram,
    IslandsState,
    OuterState,
    require_islands,
    zeros,
)
from shardlib.jax_types import Value
from shardlib.lowering.program import Program
from shardlib.lowering.runtime import TrainState

# --------------------------------------------------------------------------------------------------
# A program of one island other than its step.


class IslandCall(FragmentCall):
    """A program over the devices of one island, about the parameters of a fragment."""

    exchange: DiLoCo


# --------------------------------------------------------------------------------------------------
# Copies of outer gradients, in flight to the other islands.


def delivered(rows: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Returns what every island has of all: each device sends what it holds to the device in its
    place on every other island. Nothing waits for the copies but what uses them.
    """
    places = [_sharding(array) for array in rows]
    return [[_copied(array, place) for array in rows] for place in places]


def _sharding(array: jax.Array) -> NamedSharding:
    assert isinstance(array.sharding, NamedSharding)
    return array.sharding


def _copied(array: jax.Array, place: NamedSharding) -> jax.Array:
    """The array on the devices of another island, shard by shard."""
    source = _sharding(array)
    if source == place:
        return array
    here, there = source.mesh, place.mesh
    assert isinstance(here, Mesh) and isinstance(there, Mesh)
    target = dict(zip(here.devices.flat, there.devices.flat, strict=True))
    shards = list(array.addressable_shards)
    copies = jax.device_put(
        [shard.data for shard in shards], [target[shard.device] for shard in shards]
    )
    return jax.make_array_from_single_device_arrays(array.shape, place, copies)


@dataclass(kw_only=True)
class CopiesInFlight:
    """The copies that are on the way; of a state that comes from elsewhere, none are.

    Attributes:
        sent: an array of the state that they were made for.
        rows: for each island the rows of all.
    """

    sent: Any = None
    rows: list[list[jax.Array]] = field(default_factory=list)

    def start(self, sent: jax.Array, rows: Sequence[jax.Array]) -> None:
        """Starts copies."""
        self.sent, self.rows = sent, delivered(rows)

    def land(self, sent: jax.Array) -> list[list[jax.Array]]:
        """For each island the rows of all; empty where there are no copies for this state."""
        rows = self.rows if self.sent is sent else []
        self.sent, self.rows = None, []
        return rows


# --------------------------------------------------------------------------------------------------
# Outer gradients of a fragment, as they are computed and as they are sent.


class Sending(IslandCall):
    """Outer gradients of an island: outer parameters less its own, in the place of those that it
    sent before.
    """

    donated = (0,)

    def arguments(self) -> tuple[list[Tree], list[Tree], list[Tree]]:
        """Abstract: what was sent before, parameters, outer parameters."""
        return self.wide(), self.thetas(), self.wide()

    def results(self) -> tuple[list[Tree]]:
        """Abstract: what is sent."""
        return (self.wide(),)

    def function(self, *arguments: Arrays) -> tuple[Arrays]:
        """(sent before, parameters, outer parameters) -> sent now."""
        before, thetas, outer = arguments
        specs = [sharding.spec for sharding in self.states]
        sent = jax.shard_map(
            self._sent, mesh=self.mesh, in_specs=(specs,) * 3, out_specs=specs, check_vma=False
        )(before, self.sharded(thetas), outer)
        return (sent,)

    def _sent(self, before: Arrays, thetas: Arrays, outer: Arrays) -> Arrays:
        """On one device."""
        pairs = zip(layers.rows_of(self.rows, outer), thetas, strict=True)
        gradients = [theta - local.astype(jnp.float32) for theta, local in pairs]
        return layers.with_rows(self.rows, before, gradients)


class Packing(IslandCall):
    """Outer gradients as they cross: of every device a row of numbers in the dtype of the wire."""

    def arguments(self) -> tuple[list[Tree]]:
        """Abstract: what is sent."""
        return (self.wide(),)

    def results(self) -> tuple[list[Tree]]:
        """Abstract: the rows."""
        return ([wire(self)],)

    def function(self, *arguments: Arrays) -> tuple[Arrays]:
        """(sent) -> as it crosses."""
        specs = [sharding.spec for sharding in self.states]
        out = over_all(self).spec
        rows = jax.shard_map(
            self._packed, mesh=self.mesh, in_specs=(specs,), out_specs=out, check_vma=False
        )(*arguments)
        return ([rows],)

    def _packed(self, sent: Arrays) -> Value:
        """On one device."""
        kind = self.exchange.wire
        row = joined(layers.rows_of(self.rows, sent), kind, 1)
        return row if kind == "float32" else packed(row, kind)


def over_all(call: IslandCall) -> NamedSharding:
    """Returns how rows of all devices of an island are sharded: each has its own."""
    return NamedSharding(call.mesh, PartitionSpec(tuple(call.mesh.axis_names)))


def wire(call: IslandCall) -> jax.ShapeDtypeStruct:
    """Returns what an island sends of a fragment, abstract."""
    kind = call.exchange.wire
    count = sum(spaces(kind, [math.prod(shape) for shape in shards(call)]))
    dtypes = {"float32": jnp.float32, "bfloat16": jnp.uint16}
    dtype = jnp.dtype(dtypes.get(kind, jnp.uint8))
    size = wire_bytes(kind, count) // dtype.itemsize
    return jax.ShapeDtypeStruct((call.mesh.size, size), dtype, sharding=over_all(call))


def shards(call: IslandCall) -> list[tuple[int, ...]]:
    """Shapes of what a device holds of the parameters of a fragment, sharded as optimizer state
    is.
    """
    shapes: list[tuple[int, ...]] = []
    for parameter, state in zip(call.about, call.states, strict=True):
        shape = state.shard_shape(parameter.leaf.shape)
        if parameter.rows is not None:
            shape = (len(range(parameter.rows[0], shape[0], parameter.rows[1])), *shape[1:])
        shapes.append(shape)
    return shapes


# --------------------------------------------------------------------------------------------------
# The outer update from the outer gradients of all islands, and the parameters from which an island
# goes on.


class Arriving(OuterUpdate, IslandCall):
    """The outer update of an island once the outer gradients of all are there. All islands add them
    up in the same order, so that the outer state stays alike, bit for bit.
    """

    def arguments(self) -> tuple[list[Tree], ...]:
        """Abstract: parameters, outer parameters, momentum; what every island sent."""
        return *super().arguments(), [wire(self)] * self.exchange.islands

    def updated(
        self, thetas: Arrays, outer: Arrays, momentum: Arrays, *sent: Arrays
    ) -> tuple[Arrays, Arrays, Arrays]:
        """On one device."""
        kind, like = self.exchange.wire, [jnp.zeros(shape, jnp.float32) for shape in shards(self)]
        received = [
            split(row if kind == "float32" else unpacked(row, kind), like, kind) for row in sent[0]
        ]
        means = [average(parts_of_parameter) for parts_of_parameter in zip(*received, strict=True)]
        theta, v = outer_updates(self.exchange, means, outer, momentum)
        after = [
            mixed(self.exchange.mixing, old, new).astype(old.dtype)
            for old, new in zip(thetas, theta, strict=True)
        ]
        return after, theta, v


# --------------------------------------------------------------------------------------------------
# The program of islands whose outer gradients cross beside their next steps.

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
            for call in (
                call_of_island for island_calls in calls for call_of_island in island_calls
            ):
                call.prepare()

    @cached_property
    def calls(self) -> tuple[tuple[Calls, ...], ...]:
        """For each fragment what each island runs for it."""
        calls = [calls_of(self.exchange, program, program.mesh) for program in self.programs]
        return tuple(zip(*calls, strict=True))

    @cached_property
    def _flights(self) -> CopiesInFlight:
        return CopiesInFlight()

    def _require(self, state: IslandsState) -> None:
        require_islands(state, len(self.programs))
        in_flight_of(state)

    def _between(self, state: IslandsState, step: int) -> IslandsState:
        """Returns what is done after a step: what has arrived, and what is sent."""
        flying = in_flight_of(state)
        if flying.sent_at and step >= int(flying.sent_at) + self.exchange.delay:
            state = self._arrived(state)
        due = self.exchange.due(step)
        return state if due is None else self._sent(state, due, step)

    def _sent(self, state: IslandsState, fragment: int, step: int) -> IslandsState:
        """The state whose outer gradients of a fragment are on the way."""
        outer, calls = in_flight_of(state), self.calls[fragment]
        places = [parameter.place for parameter in calls[0][0].about]
        before = self._apart(outer.sent, places)
        sent: list[list[jax.Array]] = []
        for number, (sending, _, _) in enumerate(calls):
            parameters = self._trained(state.islands[number])
            theta = self._local(outer.params, places, number)
            (gradients,) = sending(before[number], [parameters[place] for place in places], theta)
            sent.append(gradients)
        together = [stacked(arrays, self.mesh) for arrays in zip(*sent, strict=True)]
        self._flights.start(together[0], self._rows(calls, sent))
        exchange = replace(
            outer, sent=replaced(outer.sent, places, together), sent_at=np.int32(step)
        )
        return replace(state, exchange=exchange)

    def _arrived(self, state: IslandsState) -> IslandsState:
        """The state after what was sent is there; of a state that was saved on the way it is sent
        again.
        """
        outer = in_flight_of(state)
        nothing = replace(outer, sent_at=np.int32(0))
        fragment = self.exchange.due(int(outer.sent_at))
        if fragment is None:  # sent by islands that met after other steps
            return replace(state, exchange=nothing)
        calls = self.calls[fragment]
        places = [parameter.place for parameter in calls[0][0].about]
        rows = self._flights.land(outer.sent[places[0]]) or delivered(
            self._rows(calls, self._apart(outer.sent, places))
        )
        outers = [
            (self._local(outer.params, places, k), self._local(outer.momentum, places, k))
            for k in range(len(calls))
        ]
        results = [
            arriving([parameters[place] for place in places], *outer_arrays, arrived)
            for (_, _, arriving), parameters, outer_arrays, arrived in zip(
                calls, map(self._trained, state.islands), outers, rows, strict=True
            )
        ]
        islands = [
            self._with_trained(island, replaced(self._trained(island), places, thetas))
            for island, (thetas, _, _) in zip(state.islands, results, strict=True)
        ]
        exchange = replace(
            nothing,
            params=replaced(outer.params, places, self._alike(results, 1)),
            momentum=replaced(outer.momentum, places, self._alike(results, 2)),
        )
        return replace(state, islands=tuple(islands), exchange=exchange)

    @staticmethod
    def _rows(calls: Sequence[Calls], sent: Sequence[list[jax.Array]]) -> list[jax.Array]:
        """Returns what each island sends, as it crosses."""
        return [
            packing(gradients)[0][0] for (_, packing, _), gradients in zip(calls, sent, strict=True)
        ]

    def _local(
        self, arrays: Sequence[jax.Array], places: Sequence[int], number: int
    ) -> list[jax.Array]:
        """Returns what an island holds of some arrays that are alike on all."""
        specs = jax.tree.leaves(self.programs[number].parts.param_shardings.state)
        return [local(arrays[place], specs[place]) for place in places]

    def _alike(self, results: Sequence[tuple[Arrays, ...]], place: int) -> list[jax.Array]:
        """One of the results of all islands, which are alike, over the devices of all."""
        copies = zip(*(result[place] for result in results), strict=True)
        return [alike(arrays, self.mesh) for arrays in copies]

    def _apart(self, arrays: Sequence[jax.Array], places: Sequence[int]) -> list[list[jax.Array]]:
        """For each island its arrays of some that are stacked."""
        by_island: list[list[jax.Array]] = [[] for _ in self.programs]
        for place in places:
            like = [self._wide(program, place) for program in self.programs]
            for arrays_of_island, array in zip(
                by_island, unstacked(arrays[place], like), strict=True
            ):
                arrays_of_island.append(array)
        return by_island

    def _wide(self, program: Program, place: int) -> jax.ShapeDtypeStruct:
        leaf = jax.tree.leaves(self._partition(program.state.params))[place]
        sharding = jax.tree.leaves(program.parts.param_shardings.state)[place]
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding)

    def _kept(self) -> InFlightState:
        outer: OuterState = super()._kept()
        islands, replicated = len(self.programs), NamedSharding(self.mesh, PartitionSpec())
        sent = [
            jax.ShapeDtypeStruct(
                stacked_shape(param.shape, islands),
                jnp.float32,
                sharding=stacked_sharding(spec, self.mesh),
            )
            for param, spec in zip(outer.params, self._states, strict=True)
        ]
        sent_at = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
        return InFlightState(**vars(outer), sent=sent, sent_at=sent_at)

    def _first(self, states: tuple[TrainState, ...]) -> InFlightState:
        outer: OuterState = super()._first(states)
        sent = [zeros(leaf) for leaf in self._kept().sent]
        return InFlightState(**vars(outer), sent=sent, sent_at=np.int32(0))


def calls_of(exchange: DiLoCo, program: Program, mesh: Mesh | AbstractMesh) -> tuple[Calls, ...]:
    """Returns what an island runs for each fragment."""

    def made(about: list[SharedParameter]) -> Calls:
        return (
            Sending(exchange=exchange, mesh=mesh, about=about),
            Packing(exchange=exchange, mesh=mesh, about=about),
            Arriving(exchange=exchange, mesh=mesh, about=about),
        )

    return tuple(map(made, shared_of(exchange, program)))


def in_flight_of(state: IslandsState) -> InFlightState:
    """Returns what is outer, and what is on the way."""
    if not isinstance(state.exchange, InFlightState):
        raise StateError(
            "the state has nothing that is on the way between islands, and the program meets with a"
            " delay\nTry: program.init(), or a checkpoint of this exchange"
        )
    return state.exchange
