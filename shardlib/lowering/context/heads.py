"""Which devices have which heads of a call of attention, and from where on.

Where no axis shards the heads of queries outside, those do that shard the sequence or the width of
a head there, inside of the region alone. Where there are fewer heads of keys than devices, keys and
values are read whole by each; if it is the width of heads that is sharded, they are gathered as
soon as projections have made them, since a rotation by positions pairs dims of a head, and would
move them once more. What is read by heads is rotated by heads, and so is its gradient; it is
exchanged when it is rounded again, and not as the float32 that the rotation makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from shardlib.functions.attention import Attention
from shardlib.graph import Graph
from shardlib.jax_types import Value
from shardlib.layout import Layout
from shardlib.lowering.reading.custom_calls import Site
from shardlib.planning.plan import Plan
from shardlib.propagation.contractions import returned
from shardlib.propagation.head_sharding import shared


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How heads are sharded.

    Attributes:
        axes: mesh axes that shard the heads of queries.
        ways: their number of devices.
        together: whether they shard the heads of keys and values too; those are whole on every
            device otherwise, which picks the ones of its queries.
    """

    axes: tuple[str, ...]
    ways: int
    together: bool

    @staticmethod
    def of(axes: tuple[str, ...], size: int, heads: int, groups: int) -> Heads:
        """Heads sharded over axes where that is possible, and whole otherwise."""
        which = shared(heads=heads, groups=groups, devices=size)
        if which == "none":
            return Heads(axes=(), ways=1, together=True)
        return Heads(axes=axes, ways=size, together=which == "all")

    def own(self, array: Value, heads: int) -> Value:
        """Keys or values [B, T, K, H] of this device's queries, of which there are `heads` in all;
        inside of the region.

        Args:
            array: keys or values, [B, T, K, H].
        """
        if self.together:
            return array
        each = heads // array.shape[2]
        return jax.lax.dynamic_slice_in_dim(
            array, jax.lax.axis_index(self.axes) * (heads // self.ways) // each, 1, axis=2
        )


def computed(site: Site, plan: Plan, placements: Mapping[tuple[str, int], Layout]) -> bool:
    """Whether a call of attention is computed by a program for many devices; else its equations
    are left to automatic partitioning.
    """
    exchanged = plan.context in ("ring", "ulysses")
    return (
        (exchanged or plan.attention != "traced")
        and plan.context != "all-gather"
        and site.key(0) in placements
        and site.avals[0].ndim == 4
    )


def cutting_heads(queries: Layout, plan: Plan) -> tuple[str, ...]:
    """The mesh axes that shard the heads of queries [B, S, N, H] inside of the region.

    Where no axis shards the heads outside, those do that shard the sequence or the width of a head
    there: that is one all-to-all each way, where else every device along them would need the whole
    sequence and compute the same attention. A context axis shards the sequence inside as well, and
    an exchange over it needs the heads for itself.
    """
    batch, rows, heads, width = queries
    if heads or (plan.context == "ulysses" and plan.mesh["context"] > 1):
        return heads
    return tuple(axis for axis in (*rows, *width) if axis != "context" and axis not in batch)


def with_heads(
    placements: Mapping[tuple[str, int], Layout],
    graph: Graph,
    sites: Iterable[Site],
    plan: Plan,
) -> dict[tuple[str, int], Layout]:
    """Placements with what becomes of queries, keys and values that projections make sharded by the
    width of heads: what attention reads whole is gathered as soon as it is made; of what it reads
    by heads, the gradient comes back by heads.
    """
    layouts = dict(placements)
    makers = {(op.path, index): op for op in graph.ops for index in range(len(op.results))}
    for site in sites:
        if not isinstance(site.call.form, Attention) or not computed(site, plan, placements):
            continue
        queries, parts = placements[site.key(0)], site.call.form.parts
        axes, count = cutting_heads(queries, plan), site.avals[0].shape[2]
        groups, size = site.avals[2 * parts].shape[2], plan.mesh.ways(axes)
        which = shared(heads=count, groups=groups, devices=size)
        if queries[2] or which == "none":
            continue
        for index, source in enumerate(site.sources[: 2 * parts + 1]):
            for key in _projections(graph, makers, source) if source in makers else ():
                if key not in layouts or set(layouts[key][-1]) != set(axes):
                    continue
                if index >= parts and which == "queries":
                    layouts[key] = Layout(*layouts[key][:-1], ())
                elif len(layouts[key]) == len(queries):
                    layouts[returned(key[0])] = Layout(*layouts[key][:2], axes, ())
    return layouts


def _projections(
    graph: Graph, makers: Mapping[tuple[str, int], Any], source: tuple[str, int]
) -> list[tuple[str, int]]:
    """The results of contractions that a value is made of without another contraction."""
    by_value = {makers[key].results[key[1]]: key for key in makers}
    results, seen = list[tuple[str, int]](), set[tuple[str, int]]()
    pending = [source]
    while pending:
        key = pending.pop()
        if key in seen:
            continue
        seen.add(key)
        op = makers[key]
        if op.category == "matmul":
            results.append(key)
        elif op.category in ("elementwise", "movement"):
            pending.extend(by_value[value] for value in op.operands if value in by_value)
    return results
