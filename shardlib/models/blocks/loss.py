"""The loss of a language model."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
    """Mean cross entropy in nats of float32 logits [batch, seq, vocab], by weights [batch, seq]
    where there are some.

    The target's logit is a masked sum over the vocabulary, which XLA fuses and which may be sharded
    over devices; a gather (`take_along_axis`) there would bring the logits together on every
    device.

    Args:
        logits: [batch, seq, vocab].
        targets: numbers of tokens, int [batch, seq].
        weights: float [batch, seq]; None where all positions count alike.
    """
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    vocabulary = jax.lax.broadcasted_iota(targets.dtype, shifted.shape, 2)
    target = jnp.where(vocabulary == targets[..., None], shifted, 0.0).sum(-1)
    entropy = jnp.log(jnp.exp(shifted).sum(-1)) - target
    return (
        entropy.mean()
        if weights is None
        else (entropy * weights).sum() / jnp.maximum(weights.sum(), 1.0)
    )
