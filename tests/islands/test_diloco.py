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
from shardlib.islands.program import IslandMetrics
from tests.islands.replicas import diloco

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


@pytest.mark.parametrize(
    "pin",
    [
        {"mesh": {"fsdp": 4}, "zero": 3},
        {"mesh": {"fsdp": 2, "tensor": 2}, "zero": 1},
        {"mesh": {"data": 2, "fsdp": 2}, "zero": 2, "microbatches": 2},
        {"mesh": {"data": 4}, "zero": 0},
        {"mesh": {"stage": 2, "data": 2}, "microbatches": 4},
    ],
    ids=str,
)
def test_islands_are_a_loop_over_replicas(pin: dict[str, Any]) -> None:
    optimizer = optax.adamw(1e-2, eps=1e-3)  # a gradient of nearly 0 has no sign
    program = compiled(optimizer, exchange="diloco:2:6:rate=0.5:momentum=0.8", **pin)
    losses, state = trained(program)
    first = jax.tree.map(np.asarray, program.module(program.init(0)))
    expected, outer, replicas = diloco(
        loss,
        first,
        optimizer,
        [halves(rows(step)) for step in range(STEPS)],
        every=6,
        rate=0.5,
        momentum=0.8,
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for found, wanted in (
        (program.module(state), outer),
        *((one.params, mine) for one, mine in zip(state.islands, replicas, strict=True)),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted
        )
    assert state.step == STEPS


def test_local_descent_that_meets_in_every_step_is_data_parallel() -> None:
    optimizer = optax.sgd(0.1)
    program = compiled(
        optimizer, mesh={"fsdp": 4}, zero=3, exchange=shardlib.DiLoCo(every=1, rate=1, momentum=0)
    )
    losses, state = trained(program)
    whole = shardlib.compile(
        shardlib.tree(weights, AXES),
        loss,
        optimizer,
        rows(0),
        topology="cpu:8",
        pin={"mesh": {"fsdp": 8}, "zero": 3},
    )
    other, expected = whole.init(0), []
    for step in range(STEPS):
        other, metrics = whole.step(other, rows(step))
        expected.append(float(metrics["loss"]))
    np.testing.assert_allclose(np.mean(losses, axis=1), expected, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        program.module(state),
        whole.module(other),
    )


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


def test_fit_trains_islands() -> None:
    program: Any = compiled(optax.adamw(1e-2), exchange="diloco:2:3", **{"mesh.fsdp": 2})
    found = shardlib.fit(program, rows, steps=7)
    losses, state = trained(program, steps=7)
    np.testing.assert_array_equal(found.losses, np.mean(losses, axis=1, dtype=np.float32))
    jax.tree.map(np.testing.assert_array_equal, program.module(found.state), program.module(state))
