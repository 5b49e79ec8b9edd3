"""Logits are changed before a choice: bias, penalties, tokens that are left out.

In the order of vLLM: the bias is added, what has been said is penalised, and then tokens are left
out. The repetition penalty (Keskar et al., arXiv:1909.05858, as `transformers` has it) counts
prompt and answer; the frequency and presence penalties, as OpenAI defines them, the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.serving.scheduling.requests import Asked
from shardlib.serving.scheduling.settings import MOST_BIASED

#: Bits of a word of a mask.
BITS = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Edits:
    """Changes of the logits of each row, arrays [R, ...].

    Attributes:
        any: whether a row has any, a boolean scalar.
        frequency, presence, repetition: float32 [R].
        said: int32 [R, L], tokens before; those past the last are as large as the vocabulary.
        prompt: int32 [R], how many of them are the prompt's.
        biased: int32 [R, B], tokens with a bias, padded likewise.
        bias: float32 [R, B].
        allowed: uint32 [R, W], a bit for each token that may be chosen.
    """

    any: jax.Array | np.ndarray
    frequency: jax.Array | np.ndarray
    presence: jax.Array | np.ndarray
    repetition: jax.Array | np.ndarray
    said: jax.Array | np.ndarray
    prompt: jax.Array | np.ndarray
    biased: jax.Array | np.ndarray
    bias: jax.Array | np.ndarray
    allowed: jax.Array | np.ndarray


def edits(
    rows: Sequence[tuple[Asked, Sequence[int], int] | None],
    *,
    vocab: int,
    longest: int,
    allowed: Mapping[int, np.ndarray],
) -> Edits:
    """The changes that rows ask for."""
    count = len(rows)
    changes = Edits(
        any=np.zeros((), bool),
        frequency=np.zeros(count, np.float32),
        presence=np.zeros(count, np.float32),
        repetition=np.ones(count, np.float32),
        said=np.full((count, longest), vocab, np.int32),
        prompt=np.zeros(count, np.int32),
        biased=np.full((count, min(MOST_BIASED, vocab)), vocab, np.int32),
        bias=np.zeros((count, min(MOST_BIASED, vocab)), np.float32),
        allowed=np.full((count, -(-vocab // BITS)), 0xFFFFFFFF, np.uint32),
    )
    changed = False
    for index, row in enumerate(rows):
        if row is None:
            continue
        request, tokens, answered = row
        sampling, mask = request.sampling, allowed.get(index)
        if sampling.penalises:
            changed = True
            changes.frequency[index], changes.presence[index] = (
                sampling.frequency,
                sampling.presence,
            )
            changes.repetition[index] = sampling.repetition
            changes.said[index, : len(tokens)] = tokens
            changes.prompt[index] = len(tokens) - answered
        if sampling.bias:
            changed = True
            changes.biased[index, : len(sampling.bias)] = list(sampling.bias)
            changes.bias[index, : len(sampling.bias)] = list(sampling.bias.values())
        barred = {*sampling.barred, *(request.stop if answered < request.least else ())}
        if mask is not None:
            changed = True
            changes.allowed[index] = mask
        if barred:
            changed = True
            out = np.zeros(changes.allowed.shape[1] * BITS, bool)
            out[list(barred)] = True
            changes.allowed[index] &= ~bits(out)
    return Edits(**{**vars(changes), "any": np.asarray(changed)})


def bits(which: np.ndarray) -> np.ndarray:
    """Booleans as bits, the first in the lowest of the first word.

    Args:
        which: bool [W times 32].
    """
    return np.packbits(which, bitorder="little").view("<u4").astype(np.uint32)


def edited(logits: jax.Array, edits: Edits) -> jax.Array:
    """Logits after the changes, float32 [R, vocab]; tokens that are left out have minus infinity.

    Args:
        logits: float32 [R, vocab].
    """
    return jax.lax.cond(jnp.asarray(edits.any), _edited, lambda logits, _: logits, logits, edits)


def _edited(logits: jax.Array, edits: Edits) -> jax.Array:
    rows, vocab = logits.shape
    row = jnp.arange(rows)[:, None]
    logits = logits.at[row, edits.biased].add(edits.bias, mode="drop")
    tokens = jnp.asarray(edits.said)
    answer = jnp.arange(tokens.shape[1])[None] >= jnp.asarray(edits.prompt)[:, None]
    nothing = jnp.zeros((rows, vocab), jnp.float32)
    seen = nothing.at[row, tokens].add(1.0, mode="drop") > 0
    counts = nothing.at[row, tokens].add(answer.astype(jnp.float32), mode="drop")
    repetition = jnp.asarray(edits.repetition)[:, None]
    weaker = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, weaker, logits)
    logits -= counts * jnp.asarray(edits.frequency)[:, None]
    logits -= (counts > 0) * jnp.asarray(edits.presence)[:, None]
    token = jnp.arange(vocab)
    words = jnp.asarray(edits.allowed)[:, token // BITS]
    allowed = (words >> (token % BITS).astype(jnp.uint32)[None]) & 1
    return jnp.where(allowed == 1, logits, -jnp.inf)
