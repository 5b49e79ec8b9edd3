"""A call of `shardlib.functions.attention`, over devices that have parts of the sequence each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.functions.attention import Attention, Operands
from shardlib.graph.kernels import Kind
from shardlib.jax_types import Aval, Index, Value
from shardlib.layout import Layout
from shardlib.lowering.context.block import Scores
from shardlib.lowering.context.heads import Heads, computed, cutting_heads
from shardlib.lowering.context.kernels import Kernels
from shardlib.lowering.context.mask import FAR, Offsets, Sight
from shardlib.lowering.context.ring import Ring
from shardlib.lowering.context.sequence_partition import Cut
from shardlib.lowering.context.ulysses import Collected
from shardlib.lowering.mesh.alike import alike
from shardlib.lowering.mesh.collectives import Machine
from shardlib.lowering.mesh.pinning import held
from shardlib.lowering.mesh.shardings import named_sharding
from shardlib.lowering.reading.custom_calls import Site
from shardlib.planning.plan import Plan


def around_devices(
    site: Site, plan: Plan, placements: Mapping[tuple[str, int], Layout], machine: Machine
) -> Callable[..., Sequence[Value]] | None:
    """What takes the place of a call of attention; None where that is left to automatic
    partitioning, which gathers keys and values.

    Returns:
        Arrays of the call -> its results.
    """
    form, context = site.call.form, list(machine.parts(("context",)))
    aval = site.avals[0]
    if not computed(site, plan, placements):
        return None
    groups = site.avals[2 * form.parts].shape[2]
    batch, cut = placements[site.key(0)][0], cutting_heads(placements[site.key(0)], plan)
    heads = Heads.of(machine.parts(cut), machine.ways(cut), aval.shape[2], groups)
    rows, context_axis = (
        machine.parts(batch) or None,
        (None if not context else tuple(context) if len(context) > 1 else context[0]),
    )
    along = (
        None
        if context_axis is None
        else Cut(
            axis=context_axis,
            ways=machine.ways(("context",)),
            zigzag=form.causal
            and plan.context == "ring"
            and aval.shape[1] % (2 * machine.ways(("context",))) == 0,
        )
    )
    spec = PartitionSpec(rows, context_axis, heads.axes or None, None)
    groups_spec = spec if heads.together else PartitionSpec(rows, context_axis, None, None)

    def keys(aval: Aval) -> PartitionSpec:
        return groups_spec if aval.ndim == 4 else PartitionSpec(rows, context_axis, None)

    extra = [
        *([PartitionSpec()] if form.chosen else []),
        *([PartitionSpec(rows, context_axis)] if form.packed else []),
        *([] if form.bias is None else [_offset_spec(site.avals[-1], heads)]),
    ]
    specs = (
        *[spec] * form.parts,
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
    region = alike(machine, local, specs, spec)
    pins = _exchanged(site, placements, heads, machine)

    def run(*arrays: Value) -> Sequence[Value]:
        pinned = [
            array if pin is None else held(array, pin)
            for array, pin in zip(arrays, pins, strict=True)
        ]
        return [region(*pinned)]

    return run


def _offset_spec(aval: Aval, heads: Heads) -> PartitionSpec:
    """Of what distances add, whose last dim is that of the heads of queries."""
    return PartitionSpec(*[None] * (aval.ndim - 1), heads.axes or None)


def _exchanged(
    site: Site, placements: Mapping[tuple[str, int], Layout], heads: Heads, machine: Machine
) -> list[NamedSharding | None]:
    """The layouts that operands come in of which devices exchange the sequence for heads; None for
    others.

    Left to the partitioner, the gradient of queries may come back sharded by heads as far as a
    rotation by positions in float32, and twice the bytes are exchanged. What is sharded by the
    width of heads is exchanged by projections (`with_heads`).
    """
    parts, taken = site.call.form.parts, set(heads.axes)
    by_heads = {*range(2 * parts + 1 if heads.together else parts)}

    def pin(index: int) -> NamedSharding | None:
        layout = placements.get(site.key(index))
        if index not in by_heads or layout is None or len(layout) < 4:
            return None
        return named_sharding(machine.mesh, layout) if taken & {*layout[1]} else None

    return [pin(index) for index in range(len(site.avals))]


@dataclass(frozen=True, kw_only=True)
class Local:
    """What one device does.

    Attributes:
        form: what is computed.
        ring: whether keys and values go around.
        along: how the sequence is sharded; None where it is whole.
        heads: how heads are sharded.
        count: heads of queries, of all devices.
        kernels: what computes attention of what a device has; a ring has its own.
    """

    form: Attention
    ring: bool
    along: Cut | None
    heads: Heads
    count: int
    kernels: Kernels

    def __call__(self, *arrays: Value) -> Value:
        """Attention of the arrays of a marked call, as a device has them."""
        operands_of_call = Operands.of(self.form, arrays)
        value = self.heads.own(operands_of_call.value, self.count)
        key = _joined([self._key(key, value.shape[2]) for key in operands_of_call.keys])
        operands = [
            _joined(operands_of_call.queries),
            key,
            value,
            *([] if operands_of_call.segments is None else [operands_of_call.segments]),
        ]
        offsets = (
            None
            if self.form.bias is None or operands_of_call.bias is None
            else Offsets(form=self.form.bias, array=operands_of_call.bias)
        )
        if operands_of_call.global_layer is None:
            return self._attend(operands, self.form.window or None, offsets)
        if self.ring or self.kernels.kind == "blocks":
            window = jnp.where(operands_of_call.global_layer, FAR, self.form.window).astype(
                jnp.int32
            )
            return self._attend(operands, window, offsets)
        return jax.lax.cond(
            operands_of_call.global_layer,
            lambda: self._attend(operands, None, offsets),
            lambda: self._attend(operands, self.form.window, offsets),
        )  # a kernel for each

    def _key(self, key: Value, groups: int) -> Value:
        return (
            self.heads.own(key, self.count)
            if key.ndim == 4
            else jnp.broadcast_to(key[:, :, None], (*key.shape[:2], groups, key.shape[2]))
        )

    def _attend(
        self, operands: Sequence[Value], window: Index | None, offsets: Offsets | None
    ) -> Value:
        scores = Scores(scale=self.form.scale, softcap=self.form.softcap)
        if self.along is None:
            query, key, value, *documents = operands
            return self.kernels.attention(
                query,
                key,
                value,
                (*documents, *documents) if documents else None,
                scores=scores,
                sight=Sight(causal=self.form.causal, window=window, offsets=offsets),
            )
        if not self.ring:
            return Collected(
                cut=self.along, scores=scores, causal=self.form.causal, kernels=self.kernels
            ).exchanged(*operands, window=window, offsets=offsets)
        ring = Ring(cut=self.along, scores=scores, causal=self.form.causal)
        return self.along.collected_inside(
            ring.attention(*map(self.along.dealt_inside, operands), window=window, offsets=offsets)
        )


def _joined(parts: Sequence[Value]) -> Value:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
