"""The choice of the next token of each row, and logarithms of probabilities.

Each choice has random numbers of its own, of the seed of its request and of the position, so that
what else is served changes nothing. They belong to tokens (the Gumbel-max trick): two models that
agree nearly, such as one and its draft, choose the same token nearly always under one seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardlib.serving.sampling.choices import Choices
from shardlib.serving.sampling.edits import edited
from shardlib.serving.scheduling.settings import MOST_LISTED


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What is chosen in each row.

    Attributes:
        token: int32 [R].
        logprob: float32 [R], the natural logarithm of its probability under the model itself,
            before temperature and changes.
        likeliest: int32 [R, K], the likeliest tokens in falling order, where asked for.
        logprobs: float32 [R, K], of them.
    """

    token: jax.Array
    logprob: jax.Array
    likeliest: jax.Array
    logprobs: jax.Array


def choose(logits: jax.Array, how: Choices) -> Chosen:
    """Chooses a token for each row.

    Args:
        logits: [R, vocab].
        how: of each row.
    """
    logits = logits.astype(jnp.float32)
    changed = edited(logits, how.edits)
    token = jax.lax.cond(
        jnp.any(jnp.asarray(how.temperature) > 0),
        _drawn,
        lambda changed, _: jnp.argmax(changed, axis=-1).astype(jnp.int32),
        changed,
        how,
    )
    token = jnp.where(jnp.asarray(how.given) >= 0, how.given, token)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    most = min(MOST_LISTED, logits.shape[-1])
    values, likeliest = jax.lax.cond(
        jnp.any(jnp.asarray(how.listed)),
        lambda logprobs: tuple(jax.lax.top_k(logprobs, most)),
        lambda logprobs: (
            jnp.zeros((logprobs.shape[0], most), jnp.float32),
            jnp.zeros((logprobs.shape[0], most), jnp.int32),
        ),
        logprobs,
    )
    return Chosen(
        token=token,
        logprob=jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0],
        likeliest=likeliest,
        logprobs=values,
    )


def left(logits: jax.Array, how: Choices) -> jax.Array:
    """Logits over the temperature, minus infinity where `Sampling` leaves a token out: by top_k,
    then by top_p of what is left, then by min_p, as `transformers` does; tokens as
    likely as the last one stay.

    Args:
        logits: float32 [R, vocab].
        how: of each row.
    """
    temperature = jnp.asarray(how.temperature)
    scaled = logits / jnp.where(temperature == 0, 1.0, temperature)[:, None]
    likely = -jnp.sort(-scaled, axis=-1)
    vocab = likely.shape[-1]
    rank = jnp.arange(vocab)[None]
    most = jnp.where(jnp.asarray(how.top_k) > 0, how.top_k, vocab)[:, None]
    likely = jnp.where(rank < most, likely, -jnp.inf)
    odds = jax.nn.softmax(likely, axis=-1)
    before = jnp.cumsum(odds, axis=-1) - odds
    kept = (rank < most) & (before < jnp.asarray(how.top_p)[:, None])
    kept &= odds >= jnp.asarray(how.min_p)[:, None] * odds[:, :1]
    kept |= rank == 0
    least = jnp.min(jnp.where(kept, likely, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= least, scaled, -jnp.inf)


def _drawn(logits: jax.Array, how: Choices) -> jax.Array:
    def drawn(row: jax.Array, seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.categorical(key, row)

    found = jax.vmap(drawn)(left(logits, how), jnp.asarray(how.seed), jnp.asarray(how.position))
    greedy = jnp.asarray(how.temperature) == 0
    return jnp.where(greedy, jnp.argmax(logits, axis=-1), found).astype(jnp.int32)
