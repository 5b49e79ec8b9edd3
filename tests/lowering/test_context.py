"""Attention over a sequence that is cut over devices is attention, with its gradients; it holds no
more on many devices, and nothing of the size of all scores.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardlib._jax_compat import open_jaxpr
from shardlib.errors import LayoutError
from shardlib.layout import MeshShape
from shardlib.lowering.context.block import Cut, Positions, Scores
from shardlib.lowering.context.dispatch import Ring, RinglessAttention, attention
from shardlib.tracing.program import subjaxprs
from shardlib.verification.traffic import read_traffic

SEQ, WIDTH, VALUES = 32, 8, 6


def arrays(heads, groups, seq=SEQ, batch=2):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (
        (batch, seq, heads, WIDTH),
        (batch, seq, groups, WIDTH),
        (batch, seq, groups, VALUES),
        (batch, seq, heads, VALUES),
    )
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def documents(batch=2, seq=SEQ):
    return jnp.asarray(
        np.sort(np.random.default_rng(1).integers(0, 3, (batch, seq)), axis=1).astype(np.int32)
    )


def on_one_device(query, key, value, *, causal, segments, softcap, window=0):
    """Attention as it is written in papers."""
    key, value = (
        jnp.repeat(array, query.shape[2] // key.shape[2], axis=2) for array in (key, value)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(WIDTH)
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    seen = jnp.ones((query.shape[1],) * 2, bool)
    seen = jnp.tril(seen) if causal else seen
    seen = jnp.triu(jnp.tril(seen, window - 1), 1 - window) if window else seen
    seen = (
        seen[None]
        if segments is None
        else seen[None] & (segments[:, :, None] == segments[:, None, :])
    )
    return jnp.einsum(
        "bhqk,bkhv->bqhv", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), -1), value
    )


def on_devices(form, cut, *, causal, softcap, segments, window=0, traced=False, block=1024):
    """The same over a mesh axis, as a function of whole arrays in the order of the sequence."""
    scores = Scores(scale=1 / np.sqrt(WIDTH), softcap=softcap, block=block)
    collected = RinglessAttention(cut=cut, scores=scores, causal=causal)
    run = {
        "ring": Ring(cut=cut, scores=scores, causal=causal).attention,
        "gathered": collected.all_gather,
        "exchanged": collected.ulysses,
    }[form]
    mesh, spec = (
        Mesh(np.array(jax.devices()[: cut.ways]), (cut.axis,)),
        PartitionSpec(None, cut.axis),
    )

    def manual(window, *arrays):
        return run(*arrays, window=window)

    def whole(*qkv, window=window):
        arrays = [*qkv, *([] if segments is None else [segments])]
        specs = ((PartitionSpec(),) if traced else ()) + (spec,) * len(arrays)
        region = jax.shard_map(
            manual if traced else functools.partial(manual, window),
            mesh=mesh,
            in_specs=specs,
            out_specs=spec,
            check_vma=False,
        )
        return cut.collected(
            region(*([jnp.int32(window)] if traced else []), *map(cut.dealt, arrays))
        )

    return whole


@dataclass(frozen=True, kw_only=True)
class Case:
    form: str = "ring"
    ways: int = 4
    zigzag: bool = True
    causal: bool = True
    packed: bool = False
    window: int = 0
    traced: bool = False
    block: int = 1024
    heads: tuple[int, int] | None = None  # and groups of keys and values

    def __str__(self):
        return "-".join(str(value) for value in vars(self).values())


BOTH = (True, False)
CASES = [
    Case(ways=2, zigzag=False, packed=True),
    Case(ways=2, zigzag=False, causal=False),
    Case(ways=2, packed=True),
    Case(ways=8),
    Case(ways=8, zigzag=False),
    Case(causal=False, packed=True, block=5),
    *(
        Case(form=form, causal=causal, packed=causal, block=5 if causal else 1024)
        for form, causal in itertools.product(("gathered", "exchanged"), BOTH)
    ),
    # Windows that leave out turns, in both orders: within a run, and over several; given to the
    # program; in blocks that divide nothing.
    Case(ways=8, window=2),
    Case(ways=8, window=7, causal=False),
    Case(ways=8, zigzag=False, window=6),
    Case(window=5, traced=True, block=3, packed=True),
    Case(form="gathered", window=5, block=3),
    Case(form="exchanged", window=0, traced=True, block=3, packed=True, zigzag=False),
    # Groups that the devices do not divide.
    Case(form="exchanged", ways=2, heads=(6, 3)),
    Case(form="exchanged", heads=(12, 6), packed=True, zigzag=False),
]
HEADS = [(8, 8), (8, 4), (8, 1), (8, 2)]  # of queries, and groups of keys and values


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_are_those_of_one_device(case):
    heads, groups = (
        case.heads or HEADS[(case.ways + case.zigzag + 2 * case.causal + case.packed) % len(HEADS)]
    )
    how = {
        "causal": case.causal,
        "softcap": 5.0 if case.packed else 0.0,
        "segments": documents() if case.packed else None,
        "window": case.window,
    }
    query, key, value, cotangent = arrays(heads, groups)
    split = on_devices(
        case.form,
        Cut(axis="context", ways=case.ways, zigzag=case.zigzag),
        traced=case.traced,
        block=case.block,
        **how,
    )
    true, pull = jax.vjp(functools.partial(on_one_device, **how), query, key, value)
    found, back = jax.jit(
        lambda *qkv: (lambda result, pull: (result, pull(cotangent)))(*jax.vjp(split, *qkv))
    )(query, key, value)
    for one, other in zip((true, *pull(cotangent)), (found, *back), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * float(jnp.abs(one).max()))


@pytest.mark.parametrize(
    ("zigzag", "causal", "window", "turns"),
    [
        (True, True, 2, {0, 1, 7}),
        (True, True, 3, {0, 1, 7}),
        (True, True, 4, {0, 1, 2, 6, 7}),
        (False, True, 5, {0, 1}),
        (False, True, 6, {0, 1, 2}),
        (False, False, 5, {0, 1, 7}),
        (False, True, 0, set(range(8))),
    ],
)
def test_a_ring_leaves_out_turns_in_which_nobody_sees_anything(zigzag, causal, window, turns):
    cut = Cut(axis="context", ways=8, zigzag=zigzag)
    ring, local = Ring(cut=cut, scores=Scores(scale=1.0), causal=causal, window=window), 4
    places = [np.asarray(cut.positions(device, local)) for device in range(8)]
    far = {
        number: np.concatenate(
            [places[i][:, None] - places[(i - number) % 8][None, :] for i in range(8)]
        )
        for number in range(8)
    }
    needed = {
        number
        for number, found in far.items()
        if (((found >= 0) | (not causal)) & ((abs(found) < window) | (not window))).any()
    }
    assert set(ring.turns(local)) == needed == turns


def compiled(form="ring", ways=4, local=64, block=1024):
    cut = Cut(axis="context", ways=ways)
    scores, spec = Scores(scale=1.0, block=block), PartitionSpec(None, "context")
    collected = RinglessAttention(cut=cut, scores=scores)
    run = {
        "ring": Ring(cut=cut, scores=scores).attention,
        "gathered": collected.all_gather,
        "exchanged": collected.ulysses,
    }[form]
    mesh = Mesh(np.array(jax.devices()[:ways]), ("context",))
    query, key, value, _ = (
        jax.ShapeDtypeStruct(array.shape, array.dtype)
        for array in jax.eval_shape(lambda: arrays(4, 4, seq=ways * local, batch=1))
    )
    manual = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    step = jax.jit(
        jax.grad(lambda *qkv: (manual(*qkv) ** 2).sum(), argnums=(0, 1, 2)),
        in_shardings=(jax.NamedSharding(mesh, spec),) * 3,
    )
    return step.lower(query, key, value).compile(), 4 * (key.size + value.size) // ways


def test_a_ring_moves_keys_and_values_around_and_gathers_nothing():
    program, each = compiled(ways=4)
    found = read_traffic(program.as_text(), MeshShape(context=4)).collectives
    assert {(c.kind, c.axes) for c in found} == {("collective-permute", ("context",))}
    # Forward 3 messages, backward 3 of keys and values (the first of which is that of the forward
    # pass, in one program) and 4 of their gradients in float32.
    assert sum(c.total_bytes for c in found) == pytest.approx((3 + 2 + 4) * each, rel=0.02)


def test_the_memory_of_a_device_does_not_grow_with_the_ring():
    few, many = (compiled(ways=ways)[0].memory_analysis().temp_size_in_bytes for ways in (4, 8))
    assert many <= 1.02 * few


@pytest.mark.long
@pytest.mark.parametrize("form", ["ring", "gathered", "exchanged"])
def test_the_memory_of_a_device_does_not_grow_with_the_square_of_the_sequence(form):
    short, long = (
        compiled(form, ways=2, local=local, block=64)[0].memory_analysis().temp_size_in_bytes
        for local in (512, 2048)
    )
    assert long <= 4.1 * short
    assert (
        compiled(form, ways=2, local=512, block=4096)[0].memory_analysis().temp_size_in_bytes
        > 4 * short
    )  # that much are the scores of one block


def test_zigzag_deals_two_runs_to_every_device_and_collects_them():
    cut = Cut(axis="context", ways=4)
    assert [cut.positions(device, 4).tolist() for device in range(4)] == cut.order(16).reshape(
        4, 4
    ).tolist()
    rows = jnp.arange(2 * 16).reshape(2, 16)
    assert (cut.collected(cut.dealt(rows)) == rows).all()
    work = [sum(int(position) + 1 for position in cut.positions(device, 4)) for device in range(4)]
    assert len(set(work)) == 1  # keys that a device's queries see


@pytest.mark.parametrize("ways", [4, 8, 1])
def test_devices_deal_their_parts_among_themselves(ways):
    cut = Cut(axis="context", ways=ways)
    mesh, spec = (
        Mesh(np.array(jax.devices()[:ways]), ("context",)),
        PartitionSpec(None, "context"),
    )
    rows = np.arange(2 * 4 * ways).reshape(2, -1)
    inside, back = (
        jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))
        for run in (cut.dealt_inside, cut.collected_inside)
    )
    dealt = np.asarray(cut.dealt(jnp.arange(2 * 4 * ways).reshape(2, -1)))
    np.testing.assert_array_equal(inside(rows), dealt)
    np.testing.assert_array_equal(back(dealt), rows)
    weight = jnp.arange(rows.size, dtype=jnp.float32).reshape(rows.shape)
    np.testing.assert_array_equal(
        jax.grad(lambda rows: (inside(rows) * weight).sum())(rows.astype(np.float32)), back(weight)
    )
    found = read_traffic(
        inside.lower(weight).compile().as_text(), MeshShape(context=ways)
    ).collectives
    assert {c.kind for c in found} <= {"collective-permute"} and sum(
        c.total_bytes for c in found
    ) <= rows.nbytes // 2 // ways


def test_what_cannot_be_cut():
    with pytest.raises(
        LayoutError,
        match="a sequence of 20 positions cannot be sharded over context=4 in 8 equal runs",
    ):
        Cut(axis="context", ways=4).order(20)
    with pytest.raises(
        LayoutError,
        match="6 heads with 2 groups of keys and values cannot be exchanged over context=4",
    ):
        on_devices(
            "exchanged", Cut(axis="context", ways=4), causal=True, softcap=0.0, segments=None
        )(*arrays(6, 2)[:3])


def test_masks_of_all_blocks_are_never_there_together():
    """JAX takes what depends on known positions alone out of a loop that it differentiates: no
    array of a program may have the elements of all scores.
    """
    length, heads, scores = 64, 4, Scores(scale=0.5, block=8)
    tokens = Positions(position=jnp.arange(length), document=None)

    def loss(query, key, value):
        def layer(query, _):
            return query + attention(scores, query, key, value, tokens, tokens), None

        return jax.lax.scan(layer, query, None, length=3)[0].sum()

    def sizes(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (math.prod(var.aval.shape) for var in eqn.outvars)
            for inner in subjaxprs(eqn):
                yield from sizes(open_jaxpr(inner)[0])

    given = [jax.ShapeDtypeStruct((1, length, count, 8), jnp.float32) for count in (heads, 2, 2)]
    made = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*given)
    assert max(sizes(made.jaxpr)) < heads * length * length
