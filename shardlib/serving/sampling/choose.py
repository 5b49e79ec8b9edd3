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


def choose(logits: jax.Array, choices: Choices) -> Chosen:
    """Chooses a token for each row.

    Args:
        logits: [R, vocab].
    """
    logits = logits.astype(jnp.float32)
    changed = edited(logits, choices.edits)
    token = jax.lax.cond(
        jnp.any(jnp.asarray(choices.temperature) > 0),
        _drawn,
        lambda changed, _: jnp.argmax(changed, axis=-1).astype(jnp.int32),
        changed,
        choices,
    )
    token = jnp.where(jnp.asarray(choices.given) >= 0, choices.given, token)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    count = min(MOST_LISTED, logits.shape[-1])
    values, likeliest = jax.lax.cond(
        jnp.any(jnp.asarray(choices.listed)),
        lambda logprobs: tuple(jax.lax.top_k(logprobs, count)),
        lambda logprobs: (
            jnp.zeros((logprobs.shape[0], count), jnp.float32),
            jnp.zeros((logprobs.shape[0], count), jnp.int32),
        ),
        logprobs,
    )
    return Chosen(
        token=token,
        logprob=jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0],
        likeliest=likeliest,
        logprobs=values,
    )


def left(logits: jax.Array, choices: Choices) -> jax.Array:
    """Logits over the temperature, minus infinity where `Sampling` leaves a token out: by top_k,
    then by top_p of what is left, then by min_p, as `transformers` does; tokens as
    likely as the last one stay.

    Args:
        logits: float32 [R, vocab].
    """
    temperature = jnp.asarray(choices.temperature)
    scaled = logits / jnp.where(temperature == 0, 1.0, temperature)[:, None]
    likely = -jnp.sort(-scaled, axis=-1)
    vocab = likely.shape[-1]
    rank = jnp.arange(vocab)[None]
    limit = jnp.where(jnp.asarray(choices.top_k) > 0, choices.top_k, vocab)[:, None]
    likely = jnp.where(rank < limit, likely, -jnp.inf)
    odds = jax.nn.softmax(likely, axis=-1)
    before = jnp.cumsum(odds, axis=-1) - odds
    retained = (rank < limit) & (before < jnp.asarray(choices.top_p)[:, None])
    retained &= odds >= jnp.asarray(choices.min_p)[:, None] * odds[:, :1]
    retained |= rank == 0
    threshold = jnp.min(jnp.where(retained, likely, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= threshold, scaled, -jnp.inf)


def _drawn(logits: jax.Array, choices: Choices) -> jax.Array:
    def drawn(row: jax.Array, seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.categorical(key, row)

    sampled = jax.vmap(drawn)(
        left(logits, choices), jnp.asarray(choices.seed), jnp.asarray(choices.position)
    )
    greedy = jnp.asarray(choices.temperature) == 0
    return jnp.where(greedy, jnp.argmax(logits, axis=-1), sampled).astype(jnp.int32)
