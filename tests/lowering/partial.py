"""Models of which a part is trained, and the same steps with Flax and optax alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from shardlib._jax_compat import unsharded_variables
from shardlib.annotation.trees import path_text
from tests.zoo.case import leaves_by_path

OPTIMIZER = optax.adamw(1e-2)
STEPS, ROWS, EMBED = 5, 16, 16


def batch():
    random = np.random.default_rng(0)
    return {name: random.normal(size=(ROWS, EMBED)).astype(np.float32) for name in ("x", "y")}


class Lora(nnx.Module):
    """Two linear layers with adapters."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.LoRALinear(
            EMBED, 32, lora_rank=4, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=rngs
        )
        self.down = nnx.LoRALinear(
            32, EMBED, lora_rank=4, kernel_metadata={"out_sharding": ("mlp", "embed")}, rngs=rngs
        )
        for layer in (
            self.up,
            self.down,
        ):  # the second factor begins with zeros, which would hide the gradient of the first
            layer.lora.lora_b[...] = layer.lora.lora_b[...] + 0.1

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


class Teacher(nnx.Variable):
    """A moving average of a parameter."""


class Student(nnx.Module):
    """A layer, a moving average of its weights, statistics of its inputs, and a buffer."""

    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(
            EMBED,
            EMBED,
            use_bias=False,
            kernel_metadata={"out_sharding": ("embed", "mlp")},
            rngs=rngs,
        )
        self.teacher = Teacher(self.layer.kernel[...] * 0.5, out_sharding=("embed", "mlp"))
        self.fixed = nnx.Variable(jnp.eye(EMBED) * 0.3)
        self.seen = nnx.BatchStat(jnp.zeros((EMBED,)))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))


def distilled(model, batch):
    """The loss against a teacher that the loss moves towards the student."""
    student = model.layer(batch["x"] @ model.fixed[...])
    target = jax.lax.stop_gradient(batch["x"] @ model.teacher[...])
    model.teacher[...] = 0.9 * model.teacher[...] + 0.1 * jax.lax.stop_gradient(
        model.layer.kernel[...]
    )
    model.seen[...] = 0.5 * model.seen[...] + 0.5 * batch["x"].mean(0)
    model.calls[...] = model.calls[...] + 1
    return jnp.mean((student - batch["y"]) ** 2) + jnp.mean((student - target) ** 2)


class Backbone(nnx.Module):
    """Layers under a scan, and a head."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.split_rngs(splits=4)(
            nnx.vmap(
                lambda rngs: nnx.Linear(EMBED, EMBED, rngs=rngs),
                transform_metadata={nnx.PARTITION_NAME: "layers"},
            )
        )(rngs)
        self.head = nnx.Linear(EMBED, EMBED, rngs=rngs)

    def __call__(self, x):
        graph, params = nnx.split(self.layers)
        return self.head(
            jax.lax.scan(
                lambda x, layer: (x + jnp.tanh(nnx.merge(graph, layer)(x)), None), x, params
            )[0]
        )


class LinenModel(nn.Module):
    """Two dense layers, the first with names."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(
            32,
            kernel_init=nn.with_logical_partitioning(
                nn.initializers.lecun_normal(), ("embed", "mlp")
            ),
            name="backbone",
        )(x)
        return nn.Dense(EMBED, name="head")(nn.gelu(x))


def linen_loss(params, batch):
    return jnp.mean((LinenModel().apply({"params": params}, batch["x"]) - batch["y"]) ** 2)


def tree_init(key):
    """Stacks of layers with adapters, an embedding, and a table of integers."""
    keys = jax.random.split(key, 5)
    return {
        "embed": 0.3 * jax.random.normal(keys[0], (EMBED, EMBED)),
        "gain": jnp.ones((EMBED,)),
        "order": jnp.arange(EMBED)[::-1],
        "head": 0.3 * jax.random.normal(keys[4], (EMBED, EMBED)),
        "layers": {
            "w": 0.3 * jax.random.normal(keys[1], (4, EMBED, EMBED)),
            "a": 0.3 * jax.random.normal(keys[2], (4, EMBED, 4)),
            "b": 0.3 * jax.random.normal(keys[3], (4, 4, EMBED)),
        },
    }


def tree_loss(params, batch):
    def layer(x, p):
        return x + jnp.tanh((x @ p["w"] + x @ p["a"] @ p["b"]) * params["gain"]), None

    x, _ = jax.lax.scan(layer, (batch["x"] @ params["embed"])[:, params["order"]], params["layers"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def by_flax(constructor, loss, wrt, optimizer=OPTIMIZER):
    """Losses of five steps, and all variables after them, with `nnx.value_and_grad` and optax,
    unsharded.
    """
    with unsharded_variables():
        return _by_flax(constructor(rngs=nnx.Rngs(0)), loss, wrt, optimizer, batch())


def _by_flax(model, loss, wrt, optimizer, batch):
    state = optimizer.init(nnx.state(model, wrt))

    @nnx.jit
    def step(model, state):
        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model, batch)
        updates, state = optimizer.update(gradients, state, nnx.state(model, wrt))
        nnx.update(model, optax.apply_updates(nnx.state(model, wrt), updates))
        return value, state

    losses = []
    for _ in range(STEPS):
        value, state = step(model, state)
        losses.append(float(value))
    return losses, variables(model)


def variables(model):
    """Numbers of all variables of a module, random streams apart."""
    found = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState)))
    return {".".join(map(str, path)): np.asarray(variable[...]) for path, variable in found}


def by_optax(params, loss, trained, optimizer=OPTIMIZER):
    """The same for a tree, of which the top-level or second-level keys in `trained` are trained."""
    paths = [
        path
        for path in leaves_by_path(params)
        if path.split(".")[-1] in trained or path.split(".")[0] in trained
    ]
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    names = [path_text(path) for path, _ in leaves]

    def joined(some):
        return structure.unflatten(
            [some.get(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]
        )

    some = {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True) if name in paths}
    state, losses = optimizer.init(some), []

    @jax.jit
    def step(some, state):
        value, gradients = jax.value_and_grad(lambda some: loss(joined(some), batch()))(some)
        updates, state = optimizer.update(gradients, state, some)
        return value, optax.apply_updates(some, updates), state

    for _ in range(STEPS):
        value, some, state = step(some, state)
        losses.append(float(value))
    return losses, leaves_by_path(joined(some))


def trains_like(program, reference, numbers=None):
    """Requires losses and arrays after five steps to be those of a reference, and returns the state;
    `numbers` gives the arrays of a state, those of its module when left out.
    """
    state, losses = program.init(0), []
    for _ in range(STEPS):
        state, metrics = program.step(state, batch())
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, reference[0], rtol=1e-5)
    close((numbers or (lambda state: variables(program.module(state))))(state), reference[1])
    return state


def close(found, wanted, limit=1e-5):
    assert found.keys() == wanted.keys()
    for path, array in wanted.items():
        assert np.abs(
            found[path].astype(np.float64) - array.astype(np.float64)
        ).max() <= limit * max(np.abs(array).max(), 1), path
