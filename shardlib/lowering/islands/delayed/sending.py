"""What an island sends of a fragment: outer gradients, and what they are as they cross."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import Tree
from shardlib.exchanges.wires import spaces, wire_bytes
from shardlib.jax_types import Value
from shardlib.lowering.islands.delayed.call import Arrays, IslandCall
from shardlib.lowering.islands.meeting import layers
from shardlib.lowering.islands.meeting.wires import joined, packed
from shardlib.lowering.mesh.pinning import held


class Sending(IslandCall):
    """Outer gradients of an island: outer parameters less its own, in the place of those that it
    sent before.
    """

    donated = 1

    def arguments(self) -> tuple[list[Tree], list[Tree], list[Tree]]:
        """Abstract: what was sent before, parameters, outer parameters."""
        return self.wide(), self.thetas(), self.wide()

    def results(self) -> tuple[list[Tree]]:
        """Abstract: what is sent."""
        return (self.wide(),)

    def function(self, *arguments: Arrays) -> tuple[Arrays]:
        """(sent before, parameters, outer parameters) -> sent now."""
        before, thetas, outer = arguments
        taken = layers.taken(self.mesh, thetas, self.rests, self.rows)
        mine = [held(one, state) for one, state in zip(taken, self.states, strict=True)]
        specs = [one.spec for one in self.states]
        sent = jax.shard_map(
            self._sent, mesh=self.mesh, in_specs=(specs,) * 3, out_specs=specs, check_vma=False
        )(before, mine, outer)
        return (sent,)

    def _sent(self, before: Arrays, mine: Arrays, outer: Arrays) -> Arrays:
        """On one device."""
        pairs = zip(layers.rows_of(self.rows, outer), mine, strict=True)
        gradients = [theta - own.astype(jnp.float32) for theta, own in pairs]
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
        specs = [one.spec for one in self.states]
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
    """How rows of all devices of an island are sharded: each has its own."""
    return NamedSharding(call.mesh, PartitionSpec(tuple(call.mesh.axis_names)))


def wire(call: IslandCall) -> jax.ShapeDtypeStruct:
    """What an island sends of a fragment, abstract."""
    kind = call.exchange.wire
    count = sum(spaces(kind, [math.prod(shape) for shape in shards(call)]))
    dtypes = {"float32": jnp.float32, "bfloat16": jnp.uint16}
    dtype = jnp.dtype(dtypes.get(kind, jnp.uint8))
    size = wire_bytes(kind, count) // dtype.itemsize
    return jax.ShapeDtypeStruct((call.mesh.size, size), dtype, sharding=over_all(call))


def shards(call: IslandCall) -> list[tuple[int, ...]]:
    """Shapes of what a device holds of the parameters of a fragment, sharded as optimizer state is."""
    found: list[tuple[int, ...]] = []
    for one, state in zip(call.about, call.states, strict=True):
        shape = state.shard_shape(one.leaf.shape)
        if one.rows is not None:
            shape = (len(range(one.rows[0], shape[0], one.rows[1])), *shape[1:])
        found.append(shape)
    return found
