"""The next token of each row, from logits.

Each choice has random numbers of its own, of the seed of its request and of the position, so that
what else is served changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.serving.scheduling.requests import Request


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Choices:
    """How the token of each row is chosen, arrays [R]; see `Sampling`.

    Attributes:
        temperature, top_p, min_p: float32.
        top_k, position: int32.
        seed: uint32.
    """

    temperature: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    top_p: jax.Array | np.ndarray
    min_p: jax.Array | np.ndarray
    seed: jax.Array | np.ndarray
    position: jax.Array | np.ndarray


def choices(rows: Sequence[Request | None]) -> Choices:
    """The choices of requests, one a row; rows without a request take the likeliest."""
    given = [None if row is None else row.asked.sampling for row in rows]

    def array(name: str, dtype: str, default: float) -> np.ndarray:
        return np.asarray([default if one is None else getattr(one, name) for one in given], dtype)

    position = [0 if row is None else row.count for row in rows]
    return Choices(
        temperature=array("temperature", "float32", 0.0),
        top_k=array("top_k", "int32", 0),
        top_p=array("top_p", "float32", 1.0),
        min_p=array("min_p", "float32", 0.0),
        seed=array("seed", "uint32", 0),
        position=np.asarray(position, "int32"),
    )


def choose(logits: jax.Array, how: Choices) -> tuple[jax.Array, jax.Array]:
    """The token of each row, int32 [R], and the logarithm of its probability, float32 [R], before
    any token is left out.

    Args:
        logits: [R, vocab].
        how: of each row.
    """
    logits = logits.astype(jnp.float32)
    greedy = how.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, how.temperature)[:, None]
    order = jnp.argsort(-scaled, axis=-1)
    likely = jnp.take_along_axis(scaled, order, axis=-1)
    kept = jnp.where(_left(likely, how), likely, -jnp.inf)

    def drawn(row: jax.Array, seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.categorical(key, row)

    rank = jnp.where(
        greedy, 0, jax.vmap(drawn)(kept, jnp.asarray(how.seed), jnp.asarray(how.position))
    )
    token = jnp.where(
        greedy,
        jnp.argmax(logits, axis=-1),
        jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0],
    ).astype(jnp.int32)
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]


def _left(likely: jax.Array, how: Choices) -> jax.Array:
    """Which tokens are left to choose from, [R, vocab], of logits in falling order."""
    vocab = likely.shape[-1]
    rank = jnp.arange(vocab)[None]
    odds = jax.nn.softmax(likely, axis=-1)
    before = jnp.cumsum(odds, axis=-1) - odds
    most = jnp.where(how.top_k > 0, how.top_k, vocab)[:, None]
    left = (rank < most) & (before < how.top_p[:, None])
    left &= odds >= how.min_p[:, None] * odds[:, :1]
    return left | (rank == 0)
