"""A call of `shardlib.functions.attention`, over devices that have parts of the sequence each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib.functions.attention import Attention, Operands
from shardlib.graph.kernels import Kind
from shardlib.layout import Layout
from shardlib.lowering.context.block import Scores
from shardlib.lowering.context.kernels import Kernels
from shardlib.lowering.context.mask import FAR
from shardlib.lowering.context.ring import Ring
from shardlib.lowering.context.sequence_partition import Cut
from shardlib.lowering.context.ulysses import exchanged
from shardlib.lowering.mesh.collectives import Machine
from shardlib.lowering.reading.custom_calls import Site
from shardlib.planning.plan import Plan
from shardlib.propagation.head_sharding import shared


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How heads are cut.

    Attributes:
        axes: mesh axes that cut the heads of queries.
        ways: their number of devices.
        together: whether they cut the heads of keys and values too; those are whole on every device
            otherwise, which picks the ones of its queries.
    """

    axes: tuple[str, ...]
    ways: int
    together: bool

    @staticmethod
    def of(axes: tuple[str, ...], ways: int, heads: int, groups: int) -> Heads:
        """Heads sharded over axes where that is possible, and whole otherwise."""
        which = shared(heads=heads, groups=groups, ways=ways)
        if which == "none":
            return Heads(axes=(), ways=1, together=True)
        return Heads(axes=axes, ways=ways, together=which == "all")

    def own(self, array: Any, heads: int) -> Any:
        """Keys or values [B, T, K, H] of this device's queries, of which there are `heads` in all;
        inside of the region.
        """
        if self.together:
            return array
        each = heads // array.shape[2]
        return jax.lax.dynamic_slice_in_dim(
            array, jax.lax.axis_index(self.axes) * (heads // self.ways) // each, 1, axis=2
        )


def around_devices(
    site: Site, plan: Plan, placements: Mapping[tuple[str, int], Layout], machine: Machine
) -> Callable[..., Sequence[Any]] | None:
    """What takes the place of a call of attention; None where that is left to automatic
    partitioning, which gathers keys and values.
    """
    form, context = site.call.form, list(machine.parts(("context",)))
    aval = site.avals[0]
    apart = plan.context in ("ring", "ulysses")
    if (
        not (apart or plan.attention != "traced")
        or plan.context == "all-gather"
        or site.key(0) not in placements
        or aval.ndim != 4
    ):
        return None
    groups = site.avals[2 * form.parts].shape[2]
    batch, cut = placements[site.key(0)][0], _cutting_heads(placements[site.key(0)], plan)
    heads = Heads.of(machine.parts(cut), machine.ways(cut), aval.shape[2], groups)
    rows, at = (
        machine.parts(batch) or None,
        (None if not context else tuple(context) if len(context) > 1 else context[0]),
    )
    along = (
        None
        if at is None
        else Cut(
            axis=at,
            ways=machine.ways(("context",)),
            zigzag=form.causal
            and plan.context == "ring"
            and aval.shape[1] % (2 * machine.ways(("context",))) == 0,
        )
    )
    whole = PartitionSpec(rows, at, heads.axes or None, None)
    groups_spec = whole if heads.together else PartitionSpec(rows, at, None, None)

    def keys(aval: Any) -> PartitionSpec:
        return groups_spec if aval.ndim == 4 else PartitionSpec(rows, at, None)

    extra = [
        *([PartitionSpec()] if form.chosen else []),
        *([PartitionSpec(rows, at)] if form.packed else []),
    ]
    specs = (
        *[whole] * form.parts,
        *map(keys, site.avals[form.parts : 2 * form.parts]),
        groups_spec,
        *extra,
    )
    local = Local(
        form=form,
        ring=plan.context == "ring",
        along=along,
        heads=heads,
        count=aval.shape[2],
        kernels=Kernels(
            kind=cast(Kind, plan.attention if plan.attention != "traced" else "blocks")
        ),
    )
    return lambda *arrays: [machine.manual(local, specs, whole)(*arrays)]


def _cutting_heads(queries: Layout, plan: Plan) -> tuple[str, ...]:
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


@dataclass(frozen=True, kw_only=True)
class Local:
    """What one device does.

    Attributes:
        form: what is computed.
        ring: whether keys and values go around.
        along: how the sequence is cut; None where it is whole.
        heads: how heads are cut.
        count: heads of queries, of all devices.
        kernels: what computes attention of what a device has; a ring has its own.
    """

    form: Attention
    ring: bool
    along: Cut | None
    heads: Heads
    count: int
    kernels: Kernels

    def __call__(self, *arrays: Any) -> Any:
        """Attention of the arrays of a marked call, as a device has them."""
        given = Operands.of(self.form, arrays)
        value = self.heads.own(given.value, self.count)
        key = _joined([self._key(key, value.shape[2]) for key in given.keys])
        operands = [
            _joined(given.queries),
            key,
            value,
            *([] if given.segments is None else [given.segments]),
        ]
        if given.global_layer is None:
            return self._attend(operands, self.form.window or None)
        if self.ring or self.kernels.kind == "blocks":
            return self._attend(
                operands, jnp.where(given.global_layer, FAR, self.form.window).astype(jnp.int32)
            )
        return jax.lax.cond(
            given.global_layer,
            lambda: self._attend(operands, None),
            lambda: self._attend(operands, self.form.window),
        )  # a kernel for each

    def _key(self, key: Any, groups: int) -> Any:
        return (
            self.heads.own(key, self.count)
            if key.ndim == 4
            else jnp.broadcast_to(key[:, :, None], (*key.shape[:2], groups, key.shape[2]))
        )

    def _attend(self, operands: Sequence[Any], window: Any) -> Any:
        scores = Scores(scale=self.form.scale, softcap=self.form.softcap)
        if self.along is None:
            query, key, value, *documents = operands
            return self.kernels.attention(
                query,
                key,
                value,
                (*documents, *documents) if documents else None,
                scores=scores,
                window=window,
                causal=self.form.causal,
            )
        if not self.ring:
            return exchanged(
                self.along,
                scores,
                *operands,
                causal=self.form.causal,
                window=window,
                kernels=self.kernels,
            )
        ring = Ring(cut=self.along, scores=scores, causal=self.form.causal)
        return self.along.collected_inside(
            ring.attention(*map(self.along.dealt_inside, operands), window=window)
        )


def _joined(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
