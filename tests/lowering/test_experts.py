"""Experts on many devices compute what they compute on one, with its gradients and drops, however
skewed the routing is; rows of features travel four times a step and nothing else does.
"""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.errors import LayoutError
from shardlib.functions.experts import ExpertForm, visit
from shardlib.layout import MeshShape
from shardlib.lowering.collectives import Regions
from shardlib.lowering.experts import (
    OVERFLOW,
    ExpertCall,
    ExpertMatrix,
    ExpertSharding,
    Grouped,
    permuted,
    routed,
)
from shardlib.tracing.rewriting import recomputed as computed_again
from shardlib.tracing.rewriting import saving_intermediates
from shardlib.verification.traffic import read_traffic

BATCH, SEQ, WIDTH, INNER, COUNT, CHOICES = 8, 12, 6, 8, 8, 2
BLOCKS = Grouped(kind="blocks", block=16)


def arrays(seq=SEQ, count=COUNT, gated=True, batch=BATCH):
    draw = np.random.default_rng(0)
    shapes = {
        "x": (batch, seq, WIDTH),
        "weights": (batch, seq, CHOICES),
        "up": (count, WIDTH, INNER),
        "down": (count, INNER, WIDTH),
        **({"gate": (count, WIDTH, INNER)} if gated else {}),
    }
    return {
        name: jnp.asarray(draw.normal(size=shape), jnp.float32) for name, shape in shapes.items()
    }


def choices(skew, seq=SEQ, count=COUNT, batch=BATCH):
    """Two experts a token; with a skew of 50 the last two for all tokens."""
    noise = np.random.default_rng(1).gumbel(size=(batch, seq, count))
    return jnp.asarray(
        np.argsort(-(noise + skew * np.arange(count)), axis=-1)[..., :CHOICES].astype(np.int32)
    )


def one_expert(batch=BATCH, seq=SEQ):
    """All choices of all tokens are one expert."""
    return jnp.asarray(np.full((batch, seq, CHOICES), 5, np.int32))


def on_devices(axes, form, *, exchange="dense", grouped=BLOCKS, slack=1.25):
    """The function of whole arrays, for mesh axes by size: e and f share the experts, t cuts
    them.
    """
    expert, tensor = (
        tuple(axis for axis in axes if axis in "ef"),
        tuple(axis for axis in axes if axis == "t"),
    )
    every = tuple(axis for axis in axes if axis != "t")
    where = ExpertSharding(
        expert=expert,
        ways=math.prod(axes[axis] for axis in expert),
        tensor=tensor,
        every=every,
        exchange=exchange,
        grouped=grouped,
        slack=slack,
    )
    mesh = Mesh(
        np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values())),
        tuple(axes),
    )
    tokens, inner, outer = (
        PartitionSpec(every or None),
        PartitionSpec(expert or None, None, tensor or None),
        PartitionSpec(expert or None, tensor or None),
    )
    specs = (tokens, tokens, tokens, inner, outer, *([inner] if form.gated else []))
    run = jax.shard_map(
        functools.partial(routed, form, where),
        mesh=mesh,
        in_specs=specs,
        out_specs=(tokens, PartitionSpec()),
        check_vma=False,
    )
    return run, mesh, specs


def slopes(run, given, chosen):
    """(results, drops, gradients) of a function of (x, weights, chosen, ...)."""
    weight = jnp.sin(jnp.arange(given["x"].size, dtype=jnp.float32)).reshape(given["x"].shape)

    def loss(given):
        result, dropped = run(
            given["x"],
            given["weights"],
            chosen,
            *(given[name] for name in ("up", "down", "gate") if name in given),
        )
        return jnp.sum(result * weight), (result, dropped)

    back, (result, dropped) = jax.grad(loss, has_aux=True)(given)
    return result, dropped, back


def same(found, true):
    for name, one, other in zip(
        ("result", *sorted(true[2])),
        jax.tree.leaves((found[0], found[2])),
        jax.tree.leaves((true[0], true[2])),
        strict=True,
    ):
        np.testing.assert_allclose(
            one, other, rtol=1e-5, atol=1e-5 * float(jnp.abs(other).max()), err_msg=name
        )
    assert int(found[1]) == int(true[1])


ROUTINGS = {
    "even": choices(0.0),
    "skewed": choices(1.0),
    "two experts": choices(50.0),
    "one expert": one_expert(),
}
MESHES = [
    ({"e": 2, "d": 4}, None),
    ({"d": 2, "e": 2, "t": 2}, None),
    ({"d": 2, "e": 2, "t": 2}, 1.0),
    ({"e": 4, "t": 2}, 1.0),
    ({"d": 2, "e": 4}, None),
    ({"d": 2, "e": 4}, 1.0),
    ({"e": 8}, None),
    ({"e": 2, "d": 2, "f": 2}, 1.0),
    ({"d": 4, "t": 2}, None),
]


@functools.lru_cache
def on_one_device(form, routing):
    run = functools.partial(visit, activation=form.activation, capacity=form.capacity)
    return jax.jit(functools.partial(slopes, run))(arrays(gated=form.gated), ROUTINGS[routing])


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(("axes", "capacity"), MESHES, ids=str)
def test_results_gradients_and_drops_are_those_of_one_device(axes, capacity):
    form = ExpertForm(activation="gelu", gated="t" in axes, capacity=capacity)
    many = jax.jit(functools.partial(slopes, on_devices(axes, form)[0]))
    for routing, chosen in ROUTINGS.items():
        true = on_one_device(form, routing)
        same(many(arrays(gated=form.gated), chosen), true)
        assert (int(true[1]) > 0) == (capacity is not None)


def emulated(rows, out, home, sent, landing, taken, *, axis_name):
    """What `jax.lax.ragged_all_to_all` is documented to do, by gathering everything; NaN where the
    sizes contradict each other, or a row is written twice or outside.
    """
    everywhere = [jax.lax.all_gather(array, axis_name) for array in (rows, home, sent, landing)]
    me, place, written = (
        jax.lax.axis_index(axis_name),
        jnp.arange(out.shape[0]),
        jnp.zeros(out.shape[0], jnp.int32),
    )
    for rows, home, sent, landing in zip(*everywhere, strict=True):
        here = (place >= landing[me]) & (place < landing[me] + sent[me])
        out, written = (
            jnp.where(
                here[:, None],
                jnp.take(rows, home[me] + place - landing[me], axis=0, mode="clip"),
                out,
            ),
            written + here,
        )
    good = (
        (taken == everywhere[2][:, me]).all()
        & (written.sum() == taken.sum())
        & (written <= 1).all()
    )
    return jnp.where(good, out, jnp.nan)


@pytest.mark.long
@pytest.mark.parametrize(
    ("axes", "slack", "capacity"),
    [({"d": 2, "e": 2, "t": 2}, 0.5, None), ({"e": 4}, 1.25, 1.0)],
    ids=str,
)
def test_a_ragged_exchange_does_the_same(monkeypatch, axes, slack, capacity):
    """The CPU has no such collective, so that an emulation stands in for it."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    form = ExpertForm(activation="gelu", gated=False, capacity=capacity)
    many = jax.jit(
        functools.partial(slopes, on_devices(axes, form, exchange="ragged", slack=slack)[0])
    )
    for routing, chosen in ROUTINGS.items():
        same(many(arrays(gated=False), chosen), on_one_device(form, routing))


@pytest.mark.long
@pytest.mark.parametrize("grouped", [Grouped(), BLOCKS], ids=["ragged", "blocks"])
def test_half_precision_adds_up_in_single(grouped):
    given = {name: array.astype(jnp.bfloat16) for name, array in arrays().items()}
    found, _ = jax.jit(on_devices({"e": 4, "d": 2}, ExpertForm(), grouped=grouped)[0])(
        given["x"], given["weights"], ROUTINGS["skewed"], given["up"], given["down"], given["gate"]
    )
    true, _ = visit(
        *(
            array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array
            for array in (
                given["x"],
                given["weights"],
                ROUTINGS["skewed"],
                given["up"],
                given["down"],
                given["gate"],
            )
        )
    )
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        found.astype(jnp.float32), true, atol=0.02 * float(jnp.abs(true).max())
    )


@pytest.mark.parametrize("kind", ["ragged", "blocks"])
@pytest.mark.parametrize(
    "sizes",
    [(5, 0, 17, 8), (0, 0, 0, 30), (0, 0, 0, 0), (1, 1, 1, 1), (16, 16, 5, 0), (11,)],
    ids=str,
)
def test_grouped_matmuls_are_one_matmul_for_every_group(kind, sizes):
    draw = np.random.default_rng(3)
    rows, weights, ways = (
        draw.normal(size=(37, 6)),
        draw.normal(size=(len(sizes), 6, 5)),
        draw.normal(size=(37, 5)),
    )
    true, ends = np.zeros((37, 5)), np.cumsum(sizes)
    back_rows, back_weights = np.zeros_like(rows), np.zeros_like(weights)
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        mine = slice(end - size, end)
        true[mine], back_rows[mine], back_weights[group] = (
            rows[mine] @ weights[group],
            ways[mine] @ weights[group].T,
            rows[mine].T @ ways[mine],
        )
    matmul = functools.partial(
        Grouped(kind=kind, block=8).matmul, sizes=jnp.asarray(sizes, jnp.int32)
    )
    given = (
        jnp.where(jnp.arange(37)[:, None] < sum(sizes), jnp.asarray(rows, jnp.float32), jnp.nan),
        jnp.asarray(weights, jnp.float32),
    )
    found, back = jax.jit(
        lambda *given: (lambda made, pull: (made, pull(jnp.asarray(ways, jnp.float32))))(
            *jax.vjp(matmul, *given)
        )
    )(*given)
    for one, other in zip((found, *back), (true, back_rows, back_weights), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_moved_rows_come_home_by_gathers():
    rows, there, back = (
        jnp.arange(6.0).reshape(3, 2),
        jnp.asarray([3, -1, 0, 4, 2]),
        jnp.asarray([2, -1, 4, 0, 3, -1]),
    )
    places, pull = jax.vjp(lambda rows: permuted(2, rows, there, back), rows)
    assert places.tolist() == [[2, 3], [0, 0], [0, 1], [4, 5], [2, 3]]
    assert pull(jnp.arange(10.0).reshape(5, 2))[0].tolist() == [[4, 5], [8, 10], [6, 7]]
    assert "scatter" not in str(jax.make_jaxpr(pull)(places))


def compiled(axes, count, seq=64, gated=True):
    run, mesh, specs = on_devices(axes, ExpertForm(gated=gated))
    given, chosen = arrays(seq=seq, count=count, gated=gated), choices(0.0, seq=seq, count=count)
    placed = {
        name: NamedSharding(mesh, spec)
        for name, spec in zip(("x", "weights", "", "up", "down", "gate"), specs, strict=False)
        if name
    }
    step = jax.jit(
        lambda given, chosen: slopes(run, given, chosen)[2],
        in_shardings=(placed, NamedSharding(mesh, specs[0])),
        out_shardings=placed,
    )
    return step.lower(given, chosen).compile()


@pytest.mark.long
def test_rows_travel_four_times_in_messages_of_the_room_for_them():
    axes = {"d": 2, "e": 4}
    text = compiled(axes, COUNT).as_text()
    found = read_traffic(text, MeshShape(data=2, expert=4))
    first = [c for c in found.collectives if c.kind == "all-to-all"]
    room = math.ceil(1.25 * 64 * CHOICES / 4)  # of the 64 tokens of a device for one of four
    assert {c.axes for c in first} == {("expert",)} and sum(
        c.count for c in first
    ) == 4  # there and home, forward and backward
    assert sum(c.total_bytes for c in first) == 4 * 4 * room * WIDTH * 4
    assert (
        not found.problems
        and OVERFLOW in text
        and not any(OVERFLOW in c.cause for c in found.collectives)
    )  # the loop of skewed routing is there, and does not run here
    others = [c for c in found.collectives if c.kind not in ("all-to-all",) and c.axes != ("data",)]
    assert all(c.bytes <= 4 * COUNT * 4 for c in others), (
        others
    )  # loads of experts, and the number of rounds


@pytest.mark.long
def test_the_memory_of_a_device_does_not_grow_with_devices():
    few, many = (
        compiled({"e": ways}, 2 * ways, seq=16 * ways, gated=False)
        .memory_analysis()
        .temp_size_in_bytes
        for ways in (2, 8)
    )
    assert many <= 1.1 * few


@pytest.mark.parametrize(
    ("around", "recomputed"),
    [(lambda run: run, False), (saving_intermediates, False), (computed_again, True)],
    ids=["alone", "kept", "recomputed"],
)
def test_what_the_backward_pass_finds(around, recomputed):
    """Rows as they are multiplied, the two products that the activation reads and results at home;
    whole matrices where the layer is computed again anyway, of which only one is then in memory.
    """
    axes = {"fsdp": 2, "expert": 4}
    machine = Regions(mesh=Mesh(np.array(jax.devices()).reshape(2, 4), tuple(axes)), torus=False)
    matrices = ExpertMatrix(stored={0: ("expert",), 1: ("fsdp",)}, gathered={1: ("fsdp",)})
    where = ExpertSharding(expert=("expert",), ways=4, every=tuple(axes), grouped=BLOCKS)
    placed = ExpertCall(
        form=ExpertForm(),
        sharding=where,
        tokens=(tuple(axes), ()),
        hidden=(),
        scattered=False,
        matrices=(matrices,) * 3,
    )
    tokens, rest = PartitionSpec(tuple(axes)), machine.spec(matrices.stored, 3)
    run = machine.manual(
        functools.partial(placed.local, machine),
        (tokens,) * 3 + (rest,) * 3,
        (tokens, PartitionSpec()),
    )
    run = around(run)
    given = arrays()
    pull = jax.eval_shape(
        lambda x, weights, *parameters: jax.vjp(
            lambda *arrays: run(*arrays[:2], ROUTINGS["even"], *arrays[2:])[0],
            x,
            weights,
            *parameters,
        )[1],
        *(given[name] for name in ("x", "weights", "up", "down", "gate")),
    )
    rows = 8 * 4 * where.message_rows(BATCH * SEQ * CHOICES // 8)  # of all devices, from four each
    found = sorted(
        leaf.size for leaf in jax.tree.leaves(pull) if jnp.issubdtype(leaf.dtype, jnp.floating)
    )
    tokens_in, matrix = [BATCH * SEQ * WIDTH, BATCH * SEQ * CHOICES], COUNT * WIDTH * INNER
    matrices_in = 3 * [
        2 * matrix if recomputed else matrix
    ]  # whole on each of the two that share the pieces
    assert found == sorted(
        [
            *tokens_in,
            *matrices_in,
            rows * WIDTH,
            rows * INNER,
            rows * INNER,
            BATCH * SEQ * CHOICES * WIDTH,
        ]
    )


@pytest.mark.parametrize(
    "around",
    [lambda run: run, lambda run: jax.checkpoint(computed_again(run))],
    ids=["alone", "recomputed"],
)
def test_tokens_are_gathered_three_times(around):
    """Where tensor shards the sequence of tokens and the width of experts: forward, for the
    gradients, and as the gradient of the result, whether the layer is computed again or not.
    """
    axes = {"expert": 2, "tensor": 4}
    machine = Regions(mesh=Mesh(np.array(jax.devices()).reshape(2, 4), tuple(axes)), torus=False)
    widths = [
        ExpertMatrix(stored={0: ("expert",), dim: ("tensor",)}, gathered={}) for dim in (2, 1, 2)
    ]
    placed = ExpertCall(
        form=ExpertForm(),
        sharding=ExpertSharding(expert=("expert",), ways=2, every=("expert",), grouped=BLOCKS),
        tokens=(("expert",), ()),
        hidden=("tensor",),
        scattered=True,
        matrices=tuple(widths),
    )
    tokens = PartitionSpec("expert", "tensor"), PartitionSpec("expert"), PartitionSpec("expert")
    run = around(
        machine.manual(
            functools.partial(placed.local, machine),
            (*tokens, *(machine.spec(one.stored, 3) for one in widths)),
            (tokens[0], PartitionSpec()),
        )
    )
    given = tuple(arrays().values())
    slope = jax.grad(
        lambda x, weights, *rest: (run(x, weights, ROUTINGS["even"], *rest)[0] ** 2).sum(),
        argnums=tuple(range(len(given))),
    )
    gathers = re.findall(r"all_gather\[[^\]]*'tensor'", str(jax.make_jaxpr(slope)(*given)))
    assert len(gathers) == 3


def test_the_gradient_of_a_sum_over_tensor_is_not_summed():
    """Sums over tensor are those of the result, of the tokens' gradient, and of the weights'."""
    run, _, _ = on_devices({"e": 2, "t": 4}, ExpertForm())
    given = tuple(arrays().values())
    slope = jax.grad(
        lambda x, weights, *rest: (run(x, weights, ROUTINGS["even"], *rest)[0] ** 2).sum(),
        argnums=tuple(range(len(given))),
    )
    sums = re.findall(r"psum\w*\[[^\]]*'t'", str(jax.make_jaxpr(slope)(*given)))
    assert len(sums) == 3


def test_what_does_not_fit():
    with pytest.raises(
        LayoutError, match="experts on the axes \\('expert',\\) are not sharded 1 ways"
    ):
        ExpertSharding(expert=("expert",), ways=1)
    with pytest.raises(LayoutError, match="exchange 'sparse' is not known\nTry: dense or ragged"):
        ExpertSharding(expert=(), ways=1, exchange="sparse")
    with pytest.raises(LayoutError, match="slack 0\\.0 leaves no room"):
        ExpertSharding(expert=(), ways=1, slack=0.0)
    with pytest.raises(
        LayoutError,
        match=(
            "6 experts cannot be sharded over expert=4 devices\nTry: an expert axis whose size"
            " divides 6"
        ),
    ):
        ExpertSharding(expert=("expert",), ways=4).local(6)
    with pytest.raises(LayoutError, match="rows cannot be grouped as 'dense'"):
        Grouped(kind="dense")
