"""Texts as vectors: the mean of a model's last hidden states, of length 1."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.annotation.model import Tree
from shardlib.errors import ModelError
from shardlib.lowering.serving.adapted import base_of
from shardlib.lowering.serving.program import Forward
from shardlib.lowering.serving.stored import all_plain
from shardlib.serving.engine import Engine


class Embedder:
    """Embeds with the weights that an engine serves; in the engine's thread.

    A token sees only those before it, so that a text may be followed by anything: there is one
    program for texts of a quarter of the longest, and one for all others.

    Args:
        engine: whose weights.
        hidden: (model, int32 tokens [batch, seq]) -> states [batch, seq, width].
    """

    def __init__(self, engine: Engine, hidden: Forward) -> None:
        self._engine, model = engine, engine.forward.model

        def embed(weights: tuple[Tree, Tree], tokens: jax.Array, count: jax.Array) -> jax.Array:
            states = hidden(model.evaluating(model.rebuild(*all_plain(weights))), tokens[None])[0]
            counted = jnp.arange(len(tokens))[:, None] < count
            mean = jnp.where(counted, states.astype(jnp.float32), 0).sum(axis=0) / count
            return mean / jnp.maximum(jnp.linalg.norm(mean), 1e-12)

        self._embed = jax.jit(embed)
        self._programs: dict[int, jax.stages.Compiled] = {}

    def warm_up(self) -> None:
        """Compiles the programs."""
        longest = self._engine.capacity.longest
        self._compile(longest)
        with contextlib.suppress(ModelError):  # a model may want whole blocks of tokens
            self._compile(-(-longest // 4))

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        """The vector of a text, float32 [width]."""
        size = min(size for size in self._programs if size >= len(tokens))
        row = np.zeros(size, np.int32)
        row[: len(tokens)] = tokens
        weights = base_of(self._engine.compute.weights)
        vector = self._programs[size](weights, row, np.float32(len(tokens)))
        return np.asarray(vector)

    def _compile(self, size: int) -> None:
        weights = base_of(self._engine.compute.weights)
        beside = np.zeros(size, np.int32), np.float32(1)
        self._programs[size] = self._embed.lower(weights, *beside).compile()
