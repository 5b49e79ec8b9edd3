"""The outer update by what has come from all islands, and what an island goes on from."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Value
from shardlib.lowering.islands.delayed.call import Arrays, IslandCall
from shardlib.lowering.islands.delayed.sending import over_all, shards, wire
from shardlib.lowering.islands.meeting import layers
from shardlib.lowering.islands.meeting.updates import outer_update
from shardlib.lowering.islands.meeting.wires import split, unpacked
from shardlib.lowering.mesh.pinning import held


class Arriving(IslandCall):
    """What an island does when the outer gradients of all are there. All islands add them up in the
    same order, so that what is outer stays alike, bit for bit.
    """

    donated = 3

    def arguments(self) -> tuple[list[Tree], ...]:
        """Abstract: parameters, outer parameters, momentum; what every island sent."""
        return self.thetas(), self.wide(), self.wide(), [wire(self)] * self.exchange.islands

    def results(self) -> tuple[list[Tree], ...]:
        """Abstract: what takes the place of the first three."""
        return self.arguments()[:3]

    def function(self, *arguments: Arrays) -> tuple[Arrays, ...]:
        """(parameters, outer parameters, momentum, what all sent) -> the first three afterwards."""
        thetas, outer, momentum, sent = arguments
        taken = layers.taken(self.mesh, thetas, self.rests, self.rows)
        mine = [held(one, state) for one, state in zip(taken, self.states, strict=True)]
        own, row = [one.spec for one in self.states], over_all(self).spec
        after, outer, momentum = jax.shard_map(
            self._updated,
            mesh=self.mesh,
            in_specs=(own, own, own, [row] * len(sent)),
            out_specs=(own,) * 3,
            check_vma=False,
        )(mine, outer, momentum, sent)
        back = [held(one, rest) for one, rest in zip(after, self.rests, strict=True)]
        return layers.put(self.mesh, thetas, back, self.rests, self.rows), outer, momentum

    def _updated(
        self, mine: Arrays, outer: Arrays, momentum: Arrays, sent: Arrays
    ) -> tuple[Arrays, Arrays, Arrays]:
        """On one device."""
        kind, like = self.exchange.wire, [jnp.zeros(shape, jnp.float32) for shape in shards(self)]
        every = [
            split(row if kind == "float32" else unpacked(row, kind), like, kind) for row in sent
        ]
        means = [_mean(list(one)) for one in zip(*every, strict=True)]
        theta, v = outer_update(
            self.exchange,
            means,
            layers.rows_of(self.rows, outer),
            layers.rows_of(self.rows, momentum),
        )
        part = self.exchange.mixing
        after = [
            (part * old.astype(jnp.float32) + (1 - part) * new).astype(old.dtype)
            for old, new in zip(mine, theta, strict=True)
        ]
        return (
            after,
            layers.with_rows(self.rows, outer, theta),
            layers.with_rows(self.rows, momentum, v),
        )


def _mean(arrays: list[Value]) -> Value:
    return sum(arrays[1:], arrays[0]) / len(arrays)
