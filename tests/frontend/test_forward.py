"""Forward passes of unlike models under `shardlib.parallelize` give what one device gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardlib
from tests.frontend.equality import plain
from tests.frontend.examples import ROWS, drawn, lm, lm_init, tokens

PINS: dict[str, dict[str, Any]] = {
    "tensor4": {"mesh": {"data": 2, "tensor": 4}},
    "zero3": {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3},
    "planned": {},
}
#: (params, batch) -> results, params, batch.
Forward = tuple[Callable[[Any, Any], Any], Any, Any]


def convolutional() -> Forward:
    """Linen, with a tree of results."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
            x = nn.avg_pool(nn.relu(nn.Conv(16, (3, 3))(x)), (2, 2), (2, 2))
            x = nn.relu(nn.Conv(32, (3, 3))(x)).mean((1, 2))
            return {"logits": nn.Dense(10)(x), "norm": jnp.linalg.norm(x, axis=-1)}

    model, batch = Model(), {"image": drawn(0, ROWS, 8, 8, 3)}
    params = model.init(jax.random.key(0), batch["image"])
    return lambda params, batch: model.apply(params, batch["image"]), params, batch


def recurrent() -> Forward:
    """NNX, with cells whose keys are among the arrays."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layer = nnx.RNN(nnx.LSTMCell(12, 32, rngs=rngs))
            self.head = nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(jnp.asarray(self.layer(x))[:, -1])

    graph, params = nnx.split(Model(nnx.Rngs(0)))
    return lambda params, x: nnx.merge(graph, params)(x), params, drawn(1, ROWS, 6, 12)


def transformer() -> Forward:
    """A dict of arrays, layers under a scan."""
    return (
        lambda params, ids: jax.nn.softmax(lm(params, ids)),
        lm_init(jax.random.key(0)),
        tokens(0),
    )


@pytest.mark.matrix
@pytest.mark.parametrize("pin", PINS)
@pytest.mark.parametrize("model", [convolutional, recurrent, transformer])
def test_a_forward_pass_gives_what_one_device_gives(model: Callable[[], Forward], pin: str):
    function, params, batch = model()
    forward = shardlib.parallelize(topology="cpu:8", pin=PINS[pin])(function)
    found, wanted = forward(params, batch), jax.jit(function)(params, batch)
    for mine, theirs in zip(plain(found), plain(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    for mine, again in zip(plain(found), plain(forward(params, batch)), strict=True):
        np.testing.assert_array_equal(mine, again)  # params are still there
    held = jax.tree.leaves(forward.program(params, batch).state)
    assert pin == "planned" or not all(leaf.sharding.is_fully_replicated for leaf in held)
