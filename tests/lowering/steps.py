"""Steps of transformers and of other models on several devices, beside those on one."""

from __future__ import annotations

import jax
import numpy as np
import optax

import shardlib
from shardlib.models.config import TransformerConfig

ROWS, SEQ = 8, 32
DENSE = TransformerConfig(
    name="dense",
    vocab_size=64,
    layers=2,
    embed=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=32,
    compute_dtype="float32",
)


def token_batch(rows=ROWS, seq=SEQ, vocabulary=DENSE.vocab_size, names=("inputs", "targets")):
    draw = np.random.default_rng(0)
    return {name: draw.integers(0, vocabulary, (rows, seq)).astype(np.int32) for name in names}


def trained(init, loss, data, topology, pin, *, steps=1, rate=0.1, batch_axes=None):
    """(losses of some steps of plain descent, parameters after them), and the program."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), data)
    program = shardlib.compile(
        init, loss, optax.sgd(rate), shapes, topology=topology, pin=pin, batch_axes=batch_axes
    )
    state, losses = program.init(0), []
    for _ in range(steps):
        state, metrics = program.step(state, data)
        losses.append(float(metrics["loss"]))
    return (losses, jax.tree.leaves(state.params)), program


def equal(actual, wanted, relative=1e-5):
    """Requires losses and parameters to be equal, to this share of the largest element."""
    np.testing.assert_allclose(actual[0], wanted[0], rtol=1e-5)
    for mine, theirs in zip(actual[1], wanted[1], strict=True):
        np.testing.assert_allclose(
            mine, theirs, rtol=relative, atol=relative * float(np.abs(theirs).max())
        )
