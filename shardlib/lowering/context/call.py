"""A call of `shardlib.functions.attention`, over devices that have parts of the sequence each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib.functions.attention import Attention, Operands
from shardlib.layout import Layout
from shardlib.lowering.calls import Site
from shardlib.lowering.context.block import Scores
from shardlib.lowering.context.cut import Cut
from shardlib.lowering.context.exchange import exchanged
from shardlib.lowering.context.ring import Ring
from shardlib.lowering.context.sight import FAR
from shardlib.lowering.machine import Machine
from shardlib.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How heads are cut.

    Attributes:
        axes: mesh axes that cut the heads of queries.
        ways: their number of devices.
        together: whether they cut the heads of keys and values too; those are whole on every device otherwise, which picks the ones of its queries.
    """

    axes: tuple[str, ...]
    ways: int
    together: bool

    @staticmethod
    def of(axes: tuple[str, ...], ways: int, heads: int, groups: int) -> Heads:
        """Heads cut over axes where that is possible, and whole otherwise."""
        local = heads // ways
        if heads % ways == 0 and (groups % ways == 0 or (heads // groups) % local == 0):
            return Heads(axes=axes, ways=ways, together=groups % ways == 0)
        return Heads(axes=(), ways=1, together=True)

    def own(self, array: Any, heads: int) -> Any:
        """Keys or values [B, T, K, H] of this device's queries, of which there are `heads` in all; inside of the region."""
        if self.together:
            return array
        each = heads // array.shape[2]
        return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(self.axes) * (heads // self.ways) // each, 1, axis=2)


def around_devices(site: Site, plan: Plan, placements: Mapping[tuple[str, int], Layout], machine: Machine) -> Callable[..., Sequence[Any]] | None:
    """What takes the place of a call of attention; None where that is left to automatic partitioning, which gathers keys and values."""
    form, context = site.call.form, list(machine.parts(("context",)))
    aval = site.avals[0]
    if plan.context in ("none", "all-gather") or (site.key(0) not in placements) or aval.ndim != 4:
        return None
    batch, _, cut, _ = placements[site.key(0)]
    groups = site.avals[2 * form.parts].shape[2]
    heads = Heads.of(machine.parts(cut), machine.ways(cut), aval.shape[2], groups)
    rows, at = machine.parts(batch) or None, tuple(context) if len(context) > 1 else context[0]
    along = Cut(axis=at, ways=machine.ways(("context",)), zigzag=form.causal and plan.context == "ring" and aval.shape[1] % (2 * machine.ways(("context",))) == 0)
    whole = PartitionSpec(rows, at, heads.axes or None, None)
    groups_spec = whole if heads.together else PartitionSpec(rows, at, None, None)

    def keys(aval: Any) -> PartitionSpec:
        return groups_spec if aval.ndim == 4 else PartitionSpec(rows, at, None)

    extra = [*([PartitionSpec()] if form.chosen else []), *([PartitionSpec(rows, at)] if form.packed else [])]
    specs = (*[whole] * form.parts, *map(keys, site.avals[form.parts:2 * form.parts]), groups_spec, *extra)
    local = partial(_local, form, plan.context, along, heads, aval.shape[2])
    return lambda *arrays: [machine.manual(local, specs, whole)(*arrays)]


def _local(form: Attention, strategy: str, along: Cut, heads: Heads, count: int, *arrays: Any) -> Any:
    """What one device does."""
    given = Operands.of(form, arrays)
    value = heads.own(given.value, count)
    groups = value.shape[2]
    key = _joined([heads.own(key, count) if key.ndim == 4 else jnp.broadcast_to(key[:, :, None], (*key.shape[:2], groups, key.shape[2])) for key in given.keys])
    query, scores = _joined(given.queries), Scores(scale=form.scale, softcap=form.softcap)
    operands = [query, key, value, *([] if given.segments is None else [given.segments])]
    window = form.window or None
    if given.global_layer is not None:
        window = jnp.where(given.global_layer, FAR, form.window).astype(jnp.int32)
    if strategy == "ulysses":
        return exchanged(along, scores, *operands, causal=form.causal, window=window)
    ring = Ring(cut=along, scores=scores, causal=form.causal)
    return along.collected_inside(ring.attention(*map(along.dealt_inside, operands), window=window))


def _joined(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
