"""A small model whose step compiles quickly: a table, a loop over layers, a stack of experts'
matrices, and a head. All products are written out, so that they can be written again in other
dtypes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib
from shardlib.annotation.model import read
from shardlib.lowering.program import BuildOptions, build_program
from tests.lowering.hand_plan import hand_plan

LAYERS, EMBED, MLP, VOCAB = 4, 16, 32, 32
AXES = {
    "table": ("vocab", "embed"),
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
    "scale": ("layers", "embed"),
    "parts": ("experts", "embed"),
}
BATCH_AXES = {"tokens": ("batch", "seq"), "weight": ("batch",)}


def values(dtype=jnp.float32):
    """Parameters by a formula."""
    shapes = {
        "table": (VOCAB, EMBED),
        "up": (LAYERS, EMBED, MLP),
        "down": (LAYERS, MLP, EMBED),
        "scale": (LAYERS, EMBED),
        "parts": (4, EMBED),
    }
    made = {
        name: 0.4 * jnp.sin(1.3 * i + 1.7 * jnp.arange(np.prod(shape)).reshape(shape) % 61)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return jax.tree.map(lambda leaf: leaf.astype(dtype), made)


def model(dtype=jnp.float32):
    return shardlib.tree(lambda key: values(dtype), AXES)


def loss(params, batch, product=jnp.matmul, before=lambda loss: loss):
    """Mean loss of the next token, weighted by row; the products of layers may be given in another
    form.
    """
    x = params["table"][batch["tokens"]]

    def layer(x, p):
        return (
            x + product(jnp.tanh(product(x * p["scale"], p["up"])), p["down"]).astype(x.dtype),
            None,
        )

    x, _ = jax.lax.scan(layer, x, {name: params[name] for name in ("up", "down", "scale")})
    x = x * (1 + params["parts"].sum(0))
    scores = jax.nn.log_softmax((x @ params["table"].T).astype(jnp.float32))
    wanted = jnp.take_along_axis(scores, (batch["tokens"][..., None] * 7 + 3) % VOCAB, -1)[..., 0]
    return before(-jnp.mean(wanted.mean(1) * batch["weight"]))


def batch(rows=16, seq=4):
    random = np.random.default_rng(0)
    return {
        "tokens": random.integers(0, VOCAB, (rows, seq)).astype(np.int32),
        "weight": random.uniform(0.5, 1.5, rows).astype(np.float32),
    }


def program(optimizer, pin, loss=loss, dtype=jnp.float32, **given):
    pin = {"remat": "none", "microbatches": 1, **pin}
    return shardlib.compile(
        model(dtype),
        loss,
        optimizer,
        batch(),
        topology="cpu:8",
        pin=pin,
        batch_axes=BATCH_AXES,
        **given,
    )


def built(mesh, optimizer=None, given=None, **decisions):
    """A program of a plan written by hand, under Adam."""
    read_model = read(model())
    return build_program(
        hand_plan(read_model, batch(), mesh, **decisions),
        read_model,
        read_model.bind(loss),
        optimizer or optax.adam(0.01),
        batch(),
        batch_axes={f"batch.{name}": axes for name, axes in BATCH_AXES.items()},
        options=BuildOptions(**(given or {})),
    )


def differences(actual, wanted):
    """Largest difference of each array over its largest element."""

    def relative(a, b):
        a, b = (np.asarray(leaf, np.float64) for leaf in (a, b))
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))

    return jax.tree.map(relative, actual, wanted)


def farthest(actual, wanted):
    """The largest of these."""
    return max(jax.tree.leaves(differences(actual, wanted)))
