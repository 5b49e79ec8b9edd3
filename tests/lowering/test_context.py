"""Attention over a sequence that is cut over devices is attention, with its gradients; a ring moves keys and values once around, and holds no more on many devices."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardlib.axes import MeshShape
from shardlib.errors import LayoutError
from shardlib.lowering.context.block import Scores
from shardlib.lowering.context.cut import Cut
from shardlib.lowering.context.exchange import exchanged, gathered
from shardlib.lowering.context.ring import Ring
from shardlib.verification.traffic import read_traffic

SEQ, WIDTH, VALUES = 32, 8, 6


def arrays(heads, groups, seq=SEQ, batch=2):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (batch, seq, heads, WIDTH), (batch, seq, groups, WIDTH), (batch, seq, groups, VALUES), (batch, seq, heads, VALUES)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def documents(batch=2, seq=SEQ):
    return jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (batch, seq)), axis=1).astype(np.int32))


def on_one_device(query, key, value, *, causal, segments, softcap):
    """Attention as it is written in papers."""
    key, value = (jnp.repeat(array, query.shape[2] // key.shape[2], axis=2) for array in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(WIDTH)
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    seen = jnp.tril(jnp.ones((query.shape[1],) * 2, bool)) if causal else jnp.ones((query.shape[1],) * 2, bool)
    seen = seen[None] if segments is None else seen[None] & (segments[:, :, None] == segments[:, None, :])
    return jnp.einsum("bhqk,bkhv->bqhv", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), -1), value)


def on_devices(form, cut, *, causal, softcap, segments):
    """The same over a mesh axis, as a function of whole arrays in the order of the sequence."""
    scores = Scores(scale=1 / np.sqrt(WIDTH), softcap=softcap)
    run = {"ring": Ring(cut=cut, scores=scores, causal=causal).attention, "gathered": functools.partial(gathered, cut, scores, causal=causal),
           "exchanged": functools.partial(exchanged, cut, scores, causal=causal)}[form]
    mesh, spec = Mesh(np.array(jax.devices()[:cut.ways]), (cut.axis,)), PartitionSpec(None, cut.axis)
    given = [] if segments is None else [cut.dealt(segments)]
    manual = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * (3 + len(given)), out_specs=spec, check_vma=False)
    return lambda *qkv: cut.collected(manual(*map(cut.dealt, qkv), *given))


FORMS = [
    *(("ring", 2, *rest) for rest in itertools.product((True, False), repeat=3)), *(("ring", 4, True, *rest) for rest in itertools.product((True, False), repeat=2)),
    ("ring", 8, True, True, False), ("ring", 8, False, True, True), *((form, 4, True, *rest) for form, rest in itertools.product(("gathered", "exchanged"), itertools.product((True, False), repeat=2))),
]  # form, devices, zig-zag, causal, several documents
HEADS = [(8, 8), (8, 4), (8, 1), (8, 2)]  # of queries, and groups of keys and values


@pytest.mark.parametrize(("form", "ways", "zigzag", "causal", "packed"), FORMS, ids=str)
def test_results_and_gradients_are_those_of_one_device(form, ways, zigzag, causal, packed):
    heads, groups = HEADS[(ways + zigzag + 2 * causal + packed) % len(HEADS)]
    softcap, segments = 5.0 if packed else 0.0, documents() if packed else None
    query, key, value, cotangent = arrays(heads, groups)
    split = on_devices(form, Cut(axis="context", ways=ways, zigzag=zigzag), causal=causal, softcap=softcap, segments=segments)
    true, pull = jax.vjp(functools.partial(on_one_device, causal=causal, segments=segments, softcap=softcap), query, key, value)
    found, back = jax.jit(lambda *qkv: (lambda result, pull: (result, pull(cotangent)))(*jax.vjp(split, *qkv)))(query, key, value)
    for one, other in zip((true, *pull(cotangent)), (found, *back), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * float(jnp.abs(one).max()))


def compiled(ways, local=64):
    cut = Cut(axis="context", ways=ways)
    ring = Ring(cut=cut, scores=Scores(scale=1.0))
    mesh, spec = Mesh(np.array(jax.devices()[:ways]), ("context",)), PartitionSpec(None, "context")
    query, key, value, _ = arrays(4, 2, seq=ways * local)
    manual = jax.shard_map(ring.attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    step = jax.jit(jax.grad(lambda *qkv: (manual(*qkv) ** 2).sum(), argnums=(0, 1, 2)), in_shardings=(jax.NamedSharding(mesh, spec),) * 3)
    return step.lower(query, key, value).compile(), (key.nbytes + value.nbytes) // ways


def test_a_ring_moves_keys_and_values_around_and_gathers_nothing():
    program, each = compiled(4)
    found = read_traffic(program.as_text(), MeshShape(context=4)).collectives
    assert {(c.kind, c.axes) for c in found} == {("collective-permute", ("context",))}
    # Forward 3 messages, backward 4 of keys, values and their gradients in float32.
    assert sum(c.total_bytes for c in found) == pytest.approx((3 + 4 + 4) * each, rel=0.02)


def test_the_memory_of_a_device_does_not_grow_with_the_ring():
    few, many = (compiled(ways)[0].memory_analysis().temp_size_in_bytes for ways in (2, 8))
    assert many <= 1.02 * few


def test_zigzag_deals_two_runs_to_every_device_and_collects_them():
    cut = Cut(axis="context", ways=4)
    assert [cut.positions(device, 4).tolist() for device in range(4)] == cut.order(16).reshape(4, 4).tolist()
    rows = jnp.arange(2 * 16).reshape(2, 16)
    assert (cut.collected(cut.dealt(rows)) == rows).all()
    work = [sum(int(position) + 1 for position in cut.positions(device, 4)) for device in range(4)]
    assert len(set(work)) == 1  # keys that a device's queries see


def test_what_cannot_be_cut():
    with pytest.raises(LayoutError, match="a sequence of 20 positions cannot be cut over context=4 in 8 equal runs"):
        Cut(axis="context", ways=4).order(20)
    with pytest.raises(LayoutError, match="6 heads with 2 groups of keys and values cannot be exchanged over context=4"):
        on_devices("exchanged", Cut(axis="context", ways=4), causal=True, softcap=0.0, segments=None)(*arrays(6, 2)[:3])
