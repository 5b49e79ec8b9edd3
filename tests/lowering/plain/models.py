"""Models of a user who does not have shardlib, and the run of an emitted file with them.

    python models.py FILE=CASE ...

prints as JSON the losses of five steps, what XLA compiled, and in explicit mode the shardings that
parameters have in a program around the step.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

STEPS = 5
RANDOM = np.random.default_rng(0)
TOKENS = {name: RANDOM.integers(0, 64, (16, 8)).astype(np.int32) for name in ("x", "y")}
ROWS = {name: RANDOM.normal(size=(16, 16)).astype(np.float32) for name in ("x", "y")}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(32, 128, rngs=rngs), nnx.Linear(128, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.down(jax.nn.silu(self.up(x)))  # a custom derivative


class Model(nnx.Module):
    """Layers that are written out."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.head = nnx.Embed(64, 32, rngs=rngs), nnx.Linear(32, 64, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def nnx_loss(model: Model, batch: Any) -> Any:
    logits = model(batch["x"])
    return cross_entropy(logits, batch["y"]), {"largest": jnp.abs(logits).mean()}


def layers(key: jax.Array) -> dict[str, jax.Array]:
    """Layers under a scan; square weights, whose names meet on one mesh axis."""
    first, second, third = jax.random.split(key, 3)
    return {
        "up": jax.random.normal(first, (4, 16, 64)) / 4,
        "down": jax.random.normal(second, (4, 64, 16)) / 8,
        "square": jax.random.normal(third, (16, 16)) / 4,
    }


def scan_loss(params: dict[str, jax.Array], batch: Any) -> jax.Array:
    @jax.checkpoint
    def layer(x: jax.Array, weights: Any) -> Any:
        up, down = weights
        return x + jnp.tanh(x @ up) @ down, None

    x, _ = jax.lax.scan(layer, batch["x"] @ params["square"], (params["up"], params["down"]))
    return jnp.mean((x - batch["y"]) ** 2)


class Convolved(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(64, 32)(tokens)
        x = nn.gelu(nn.Conv(64, (3,))(x))
        return nn.Dense(64)(nn.LayerNorm()(x))


MODULE = Convolved()


def linen_loss(params: Any, batch: Any) -> jax.Array:
    return cross_entropy(MODULE.apply({"params": params}, batch["x"]), batch["y"])


def lookup(key: jax.Array) -> dict[str, jax.Array]:
    first, second, third = jax.random.split(key, 3)
    return {
        "table": jax.random.normal(first, (64, 32)),
        "up": jax.random.normal(second, (32, 64)) / 8,
        "down": jax.random.normal(third, (64, 32)) / 8,
    }


def explicit_loss(params: dict[str, jax.Array], batch: Any) -> jax.Array:
    """Written for a mesh of Explicit axes "x" and "y", with a layout in a custom derivative and a
    `shard_map`.
    """

    @jax.custom_vjp
    def laid(h: jax.Array) -> jax.Array:
        return reshard(h, P("x", None, "y"))

    laid.defvjp(lambda h: (laid(h), None), lambda _, slope: (reshard(slope, P("x", None, "y")),))
    tokens, labels = (reshard(batch[name], P("x", None)) for name in ("x", "y"))
    x = params["table"].at[tokens].get(out_sharding=P("x", None, None))
    hidden = jnp.einsum("btd,df->btf", x, params["up"], out_sharding=P("x", None, "y"))
    hidden = jax.nn.silu(laid(hidden))
    x = x + jax.shard_map(
        lambda hidden, down: jax.lax.psum(hidden @ down, "y"),
        in_specs=(P("x", None, "y"), P("y", None)),
        out_specs=P("x", None, None),
    )(hidden, reshard(params["down"], P("y", None)))
    logits = jnp.einsum("btd,vd->btv", x, params["table"], out_sharding=P("x", None, None))
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 64), -1))


def graph_and_params() -> Any:
    return nnx.split(Model(nnx.Rngs(0)))


def cases() -> dict[str, tuple[Any, Any, Any]]:
    """Case -> params, pure loss, batch."""
    graph, params = graph_and_params()
    return {
        "nnx": (params, lambda some, batch: nnx_loss(nnx.merge(graph, some), batch), TOKENS),
        "scan": (layers(jax.random.key(0)), scan_loss, ROWS),
        "explicit": (lookup(jax.random.key(0)), explicit_loss, TOKENS),
        "linen": (
            MODULE.init(jax.random.key(0), TOKENS["x"])["params"],
            linen_loss,
            TOKENS,
        ),
    }


class Normed(nnx.Module):
    """Has statistics beside its parameters.

    No bias before the normalisation, which would cancel it: Adam makes steps of the rounding error
    of its gradient.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 64, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.norm(self.up(x))))


ADAM = optax.adam(1e-2)


def train_state(key: jax.Array) -> TrainState:
    params = MODULE.init(key, TOKENS["x"])["params"]
    return TrainState.create(apply_fn=MODULE.apply, params=params, tx=ADAM)


def of_train_state(gradients: Any) -> Any:
    """The loss closes over the batch."""

    def step(state: TrainState, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, batch["x"])
            return cross_entropy(logits, batch["y"]), {"largest": jnp.abs(logits).mean()}

        (value, aux), slopes = gradients(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=slopes), {"loss": value, **aux}

    return step


def modules(key: jax.Array) -> Any:
    state = nnx.split(Normed(nnx.Rngs(key)))[1]
    return {"model": state, "optimizer": ADAM.init(nnx.filter_state(state, nnx.Param))}


def of_modules(gradients: Any) -> Any:
    """The loss changes the statistics of its module."""
    graph = nnx.graphdef(Normed(nnx.Rngs(0)))

    def step(state: Any, batch: Any) -> Any:
        model = nnx.merge(graph, state["model"])

        def loss(model: Normed, x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.mean((model(x) - y) ** 2)

        value, slopes = gradients(loss)(model, batch["x"], y=batch["y"])
        params = nnx.state(model, nnx.Param)
        updates, optimizer = ADAM.update(slopes, state["optimizer"], params)
        nnx.update(model, optax.apply_updates(params, updates))
        return {"model": nnx.state(model), "optimizer": optimizer}, {"loss": value}

    return step


def teacher(key: jax.Array) -> Any:
    names = {"teacher": (16, 16), "up": (16, 32), "down": (32, 16), "again": (16, 16)}
    keys = jax.random.split(key, len(names))
    weights = {
        name: jax.random.normal(own, shape) / 4
        for own, (name, shape) in zip(keys, names.items(), strict=True)
    }
    return {**weights, "step": 0}


def of_teacher(gradients: Any) -> Any:
    """Two losses, the second of what the first has trained; frozen weights; a state alone."""

    def step(state: Any, batch: Any) -> Any:
        def student(params: Any, teacher: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x @ teacher) ** 2)

        def second(again: jax.Array) -> jax.Array:
            taught = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
            return jnp.mean((batch["y"] @ again - taught) ** 2)

        params = {name: state[name] for name in ("up", "down")}
        _, slopes = gradients(student)(params, state["teacher"], batch["x"])
        params = jax.tree.map(lambda one, slope: one - 0.1 * slope, params, slopes)
        _, slope = gradients(second)(state["again"])
        return {**state, **params, "again": state["again"] - slope, "step": state["step"] + 1}

    return step


def of_explicit(gradients: Any) -> Any:
    def step(params: Any, batch: Any) -> Any:
        value, slopes = gradients(explicit_loss)(params, batch)
        return jax.tree.map(lambda one, slope: one - 0.1 * slope, params, slopes), {"loss": value}

    return step


#: Case -> key -> state, what takes the gradients -> step, batch, whether the step marks its losses.
STEPPED: dict[str, tuple[Any, Any, Any, bool]] = {
    "train state": (train_state, of_train_state, TOKENS, True),
    "modules": (modules, of_modules, ROWS, True),
    "teacher": (teacher, of_teacher, ROWS, True),
    "unmarked": (teacher, of_teacher, ROWS, False),
    "unmarked, explicit": (lookup, of_explicit, TOKENS, False),
}


def run_step(sharded: Any, case: str) -> dict[str, Any]:
    """Does a step with an emitted file."""
    init, make, batch, marked = STEPPED[case]
    state, mesh = init(jax.random.key(0)), sharded.make_mesh()
    types: list[str] = []
    explicit = sharded.MODE == "explicit"
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        state = jax.device_put(state, sharded.state_shardings(state, mesh))
        own = make(sharded.value_and_grad if marked else jax.value_and_grad)
        step = sharded.shard_step(own, state, batch, mesh)
        text = step.lower(state, batch).compile().as_text()

        @jax.jit
        def around(state: Any, batch: Any) -> Any:
            """A program in explicit mode."""
            found = step(state, batch)
            types[:] = [str(jax.typeof(leaf).sharding.spec) for leaf in jax.tree.leaves(found)]
            return found

        every: list[dict[str, float]] = []
        for _ in range(STEPS):
            results = (around if explicit else step)(state, batch)
            state, metrics = results if isinstance(results, tuple) else (results, {})
            every.append({name: float(value) for name, value in metrics.items()})
    sums = [float(jnp.abs(leaf).sum()) for leaf in jax.tree.leaves(state)]
    return {"metrics": every, "text": text, "types": types, "sums": sums}


def run(file: str, case: str) -> dict[str, Any]:
    """Trains a case with an emitted file."""
    spec = importlib.util.spec_from_file_location("sharded", file)
    assert spec is not None and spec.loader is not None
    sharded = sys.modules["sharded"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sharded)
    if case in STEPPED:
        return run_step(sharded, case)
    params, loss, batch = cases()[case]
    optimizer, mesh = optax.adam(1e-2), sharded.make_mesh()
    params = jax.device_put(params, sharded.parameter_shardings(params, mesh))
    state = sharded.init_optimizer(optimizer, params, mesh)
    step = sharded.make_step(loss, optimizer, params, batch, mesh)
    text = step.lower(params, state, batch).compile().as_text()
    metrics: list[dict[str, float]] = []
    types: dict[str, str] = {}

    @jax.jit
    def around(params: Any, state: Any, batch: Any) -> Any:
        """A program in explicit mode."""
        params, state, found = step(params, state, batch)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        types.update({path[-1].key: str(jax.typeof(leaf).sharding.spec) for path, leaf in leaves})
        return params, state, found

    explicit = sharded.MODE == "explicit"
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        for _ in range(STEPS):
            params, state, found = (around if explicit else step)(params, state, batch)
            metrics.append({name: float(value) for name, value in found.items()})
    return {"metrics": metrics, "text": text, "types": types}


if __name__ == "__main__":
    found: list[dict[str, Any]] = []
    for argument in sys.argv[1:]:
        file, _, case = argument.partition("=")
        found.append(run(file, case))
    try:
        import shardlib  # noqa: F401

        raise SystemExit("shardlib can be imported here")
    except ImportError:
        print(json.dumps(found))
