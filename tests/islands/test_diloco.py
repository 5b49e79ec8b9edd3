"""Islands that meet, against data parallelism and against a loop over replicas with optax."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.islands.exchanges import TopK
from shardlib.islands.program import IslandMetrics
from tests.islands.replicas import close, diloco
from tests.islands.small import program as small
from tests.islands.small import stepped

STEPS, ROWS, WIDTH, LAYERS = 20, 16, 16, 2
Tree = Any


def weights(key: jax.Array) -> Tree:
    """Embedding, two layers in a loop, a head, and a scalar."""
    keys = jax.random.split(key, 4)
    return {
        "table": jax.random.normal(keys[0], (32, WIDTH)) * 0.5,
        "up": jax.random.normal(keys[1], (LAYERS, WIDTH, 2 * WIDTH)) * WIDTH**-0.5,
        "down": jax.random.normal(keys[2], (LAYERS, 2 * WIDTH, WIDTH)) * (2 * WIDTH) ** -0.5,
        "head": jax.random.normal(keys[3], (WIDTH, 32)) * WIDTH**-0.5,
        "scale": jnp.ones(()),
    }


AXES = {
    "table": ("vocab", "embed"),
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
    "head": ("embed", "vocab"),
    "scale": (),
}


def loss(params: Tree, batch: Tree) -> jax.Array:
    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x = params["table"][batch["inputs"]]
    x, _ = jax.lax.scan(layer, x, {"up": params["up"], "down": params["down"]})
    logits = params["scale"] * x @ params["head"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)
    return -jnp.mean(picked)


def rows(step: int) -> dict[str, np.ndarray]:
    """A batch of all islands."""
    numbers = np.random.default_rng(step).integers(0, 32, (2, ROWS, 8)).astype(np.int32)
    return {"inputs": numbers[0], "targets": numbers[1]}


def compiled(optimizer: optax.GradientTransformation, **pin: Any) -> shardlib.IslandsProgram:
    """Two islands of four devices."""
    program = shardlib.compile(
        shardlib.tree(weights, AXES), loss, optimizer, rows(0), topology="cpu:8", pin=pin
    )
    assert isinstance(program, shardlib.IslandsProgram)
    return program


def trained(program: Any, steps: int = STEPS) -> tuple[list[list[float]], Any]:
    """Losses by step and island, and the state."""
    state, losses = program.init(0), []
    for step in range(steps):
        state, metrics = program.step(state, rows(step))
        assert isinstance(metrics, IslandMetrics)
        losses.append([float(one["loss"]) for one in metrics.islands])
        assert float(metrics["loss"]) == pytest.approx(np.mean(losses[-1]), rel=1e-6)
    return losses, state


def halves(batch: Tree) -> list[Tree]:
    """The rows of each island."""
    half = ROWS // 2
    return [
        jax.tree.map(lambda a: a[:half], batch),
        jax.tree.map(lambda a: a[half:], batch),
    ]


#: Names of parameters in the order of their leaves.
NAMES = sorted(AXES)


def fragments_of(program: Any, like: Tree) -> list[Tree]:
    """For each fragment, trees that are true where a number belongs to it."""
    delayed = program.exchange.delay > 0
    shared = [calls[0][0].about for calls in program.calls] if delayed else None
    masks: list[Tree] = []
    for about in shared or [meeting.about for meeting in program.meetings]:
        rows = {NAMES[parameter.place]: parameter.rows for parameter in about}
        masks.append({name: np.zeros(array.shape, bool) for name, array in like.items()})
        for name, of_stack in rows.items():
            masks[-1][name][... if of_stack is None else slice(of_stack[0], None, of_stack[1])] = 1
    return masks


@pytest.mark.long
@pytest.mark.parametrize(
    ("pin", "more"),
    [
        ({"mesh": {"fsdp": 4}, "zero": 3}, ""),
        ({"mesh": {"fsdp": 2, "tensor": 2}, "zero": 1}, ""),
        ({"mesh": {"data": 2, "fsdp": 2}, "zero": 2, "microbatches": 2}, ""),
        ({"mesh": {"data": 4}, "zero": 0}, ""),
        ({"mesh": {"stage": 2, "data": 2}, "microbatches": 4}, ""),
        ({"mesh": {"fsdp": 2, "tensor": 2}, "zero": 3}, ":fragments=2"),
        ({"mesh": {"fsdp": 4}, "zero": 1}, ":fragments=2"),
        ({"mesh": {"fsdp": 2, "tensor": 2}, "zero": 3}, ":delay=2"),
        ({"mesh": {"fsdp": 4}, "zero": 1}, ":delay=6:mixing=0.25"),
        ({"mesh": {"fsdp": 4}, "zero": 3}, ":fragments=2:delay=3"),
        ({"mesh": {"data": 4}, "zero": 0}, ":fragments=2:delay=1:mixing=0"),
        ({"mesh": {"stage": 2, "data": 2}, "microbatches": 4}, ":fragments=2:delay=2"),
    ],
    ids=str,
)
def test_islands_are_a_loop_over_replicas(pin: dict[str, Any], more: str) -> None:
    """Fragments meet one after the other; with a delay, what is sent arrives some steps later."""
    optimizer = optax.adamw(1e-2, eps=1e-3)  # a gradient of nearly 0 has no sign
    program: Any = compiled(optimizer, exchange=f"diloco:2:6:rate=0.5:momentum=0.8{more}", **pin)
    losses, state = trained(program)
    first = jax.tree.map(np.asarray, program.module(program.init(0)))
    exchange, fragments = program.exchange, fragments_of(program, first)
    assert len(fragments) == exchange.fragments
    for name in NAMES:  # every number is in one of them
        assert (sum(mask[name].astype(int) for mask in fragments) == 1).all()
    expected, outer, replicas = diloco(
        loss,
        first,
        optimizer,
        [halves(rows(step)) for step in range(STEPS)],
        every=6,
        rate=0.5,
        momentum=0.8,
        fragments=fragments,
        delay=exchange.delay,
        mixing=exchange.mixing if exchange.delay else 0.0,
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    close(program.module(state), outer)
    for island, replica in zip(state.islands, replicas, strict=True):
        close(island.params, replica)
    assert state.step == STEPS


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "exchange"),
    [
        (optax.sgd(0.1), shardlib.DiLoCo(every=1, rate=1, momentum=0)),
        (optax.adamw(1e-2, eps=1e-3), shardlib.Compressed(by=TopK(density=1, momentum=0))),
    ],
    ids=["local descent", "all numbers"],
)
def test_what_meets_exactly_in_every_step_is_data_parallel(optimizer: Any, exchange: Any) -> None:
    program = compiled(optimizer, mesh={"fsdp": 4}, zero=3, exchange=exchange)
    losses, state = trained(program)
    given = shardlib.tree(weights, AXES), loss, optimizer, rows(0)
    whole = shardlib.compile(*given, topology="cpu:8", pin={"mesh": {"fsdp": 8}, "zero": 3})
    other, expected = whole.init(0), []
    for step in range(STEPS):
        other, metrics = whole.step(other, rows(step))
        expected.append(float(metrics["loss"]))
    np.testing.assert_allclose(np.mean(losses, axis=1), expected, rtol=1e-6)
    close(program.module(state), whole.module(other))


@pytest.mark.parametrize(
    ("mesh", "exchange"),
    [
        ("zero-3", "diloco:2:2:fragments=2:wire=int8"),
        ("tensor", "diloco:2:2:fragments=2:wire=int8"),
        ("tensor", "diloco:2:2:fragments=2:wire=int4"),
        ("zero-3", "diloco:2:2:delay=1:wire=int8"),
        ("tensor", "diloco:2:2:delay=1:wire=int8"),
    ],
)
def test_replicas_stay_alike(mesh: str, exchange: str) -> None:
    """What crosses in few bits is rounded alike by all devices that hold the same."""
    made: Any = small(mesh, exchange=exchange)
    state = stepped(made, made.init(0), 0, 5)
    trees = (state.exchange, *((one.params, one.opt_state) for one in state.islands))
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        shards = leaf.addressable_shards if isinstance(leaf, jax.Array) else ()
        first: dict[str, np.ndarray] = {}
        for shard in shards:
            mine = np.asarray(shard.data)
            where = f"{jax.tree_util.keystr(path)} {shard.index}"
            np.testing.assert_array_equal(mine, first.setdefault(where, mine), where)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_meeting_moves_what_is_planned_and_steps_move_nothing(zero: int) -> None:
    mesh = {"data": 4} if zero == 0 else {"fsdp": 4}
    program = compiled(optax.adamw(1e-2), mesh=mesh, zero=zero, exchange="diloco:2:10")
    crossing = [c for c in program.plan.estimate.collectives if "island" in c.axes]
    assert [(c.kind, c.every) for c in crossing] == [("all-reduce", 10)]
    text = program.meetings[0].lower().compile().as_text() or ""
    found = re.findall(r"= (\(?[^=]*?\)?) all-reduce(?:-start)?\(", re.sub(r"/\*.*?\*/", "", text))
    sizes = [
        4 * int(np.prod([int(n) for n in dims.split(",") if n], dtype=int))
        for shape in found
        for dims in re.findall(r"f32\[([\d,]*)\]", shape)
    ]
    assert sum(sizes) == crossing[0].bytes
    inside = program.compiled().as_text() or ""
    ids = {
        int(n)
        for one in re.findall(r"replica_groups=\{([^=]*?)\}\}", inside)
        for n in re.findall(r"\d+", one)
    }
    assert max(ids, default=0) < 4  # the program has four devices, all of one island


def test_random_streams_differ_by_island_and_parameters_do_not() -> None:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dense = nnx.Linear(8, 8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dropout(self.dense(x))

    batch = {"x": np.ones((8, 8), np.float32)}
    program: Any = shardlib.compile(
        lambda rngs: Net(rngs),
        lambda model, batch: jnp.sum(model(batch["x"]) ** 2),
        optax.sgd(0.0),
        batch,
        topology="cpu:4",
        pin={"exchange": "diloco:2:5"},
    )
    assert isinstance(program, shardlib.IslandsProgram)
    state = program.init(0)
    jax.tree.map(np.testing.assert_array_equal, *(one.params for one in state.islands))
    state, metrics = program.step(state, batch)
    losses = [float(one["loss"]) for one in metrics.islands]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_of_the_batch_differ_by_island(make: Any) -> None:
    def noisy(params: Tree, batch: Tree) -> jax.Array:
        kept = jax.random.bernoulli(batch["key"], 0.5, batch["x"].shape)
        return jnp.mean((jnp.where(kept, batch["x"], 0) @ params["w"]) ** 2)

    batch = {"x": np.ones((8, 16), np.float32), "key": make(0)}
    axes = {"x": ("batch", None), "key": (None,) * batch["key"].ndim}
    program: Any = shardlib.compile(
        shardlib.tree(lambda key: {"w": jnp.ones((16, 16))}, {"w": ("in", "out")}),
        noisy,
        optax.sgd(0.0),
        batch,
        batch_axes=axes,
        topology="cpu:4",
        pin={"exchange": "diloco:2:5"},
    )
    _, metrics = program.step(program.init(0), batch)
    losses = [float(one["loss"]) for one in metrics.islands]
    assert losses[0] != losses[1]


@pytest.mark.long
def test_fit_trains_islands() -> None:
    program: Any = compiled(optax.adamw(1e-2), exchange="diloco:2:3", **{"mesh.fsdp": 2})
    found = shardlib.fit(program, rows, steps=7)
    losses, state = trained(program, steps=7)
    np.testing.assert_array_equal(found.losses, np.mean(losses, axis=1, dtype=np.float32))
    jax.tree.map(np.testing.assert_array_equal, program.module(found.state), program.module(state))
