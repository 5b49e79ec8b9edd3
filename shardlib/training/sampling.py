"""Text that the trained model writes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlib.models.transformer import Transformer


def generate(
    model: Transformer,
    prompt: bytes,
    count: int,
    *,
    window: int,
    seed: int,
    temperature: float = 0.8,
) -> bytes:
    """Continues a text byte by byte.

    Every byte is predicted from the last `window` bytes, which are run through the model anew each
    time: short, and quick enough for a sample.

    Args:
        prompt: at least one byte; its last `window` bytes count.
        count: bytes to write.
        window: bytes that the model looks at.
        temperature: below 1 prefers likely bytes.
    """
    definition, state = nnx.split(model)
    start = np.zeros((1, window), np.int32)
    used = prompt[-window:]
    start[0, : len(used)] = list(used)

    def write(state: nnx.State, tokens: jax.Array) -> jax.Array:
        def step(
            carry: tuple[jax.Array, jax.Array], key: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            tokens, length = carry
            logits = nnx.merge(definition, state)(tokens)[0, :, :256]
            choice = jax.random.categorical(key, logits[length - 1] / temperature).astype(jnp.int32)
            full = length == window
            tokens = jnp.where(full, jnp.roll(tokens, -1, axis=1), tokens)
            length = jnp.where(full, window, length + 1)
            return (tokens.at[0, length - 1].set(choice), length), choice

        start = (tokens, jnp.asarray(len(used), jnp.int32))
        return jax.lax.scan(step, start, jax.random.split(jax.random.key(seed), count))[1]

    return bytes(np.asarray(jax.jit(write)(state, start)).astype(np.uint8))
