"""Rotary positions: the angle that turns each pair of a head at each position.

Rotary position embedding (arXiv:2104.09864) in the half-split form of Llama: dim i is paired with
dim i + half. DeepSeek's published checkpoints interleave the pairs; that is the same model with the
rows of its projections permuted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.models.config_parts import RopeScaling


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Cosine and sine of every angle, [seq, half] each, float32."""

    cos: jax.Array
    sin: jax.Array

    def turn(self, x: jax.Array) -> jax.Array:
        """Turns the pairs of `x` [batch, seq, ..., 2 * half]."""
        shape = (self.cos.shape[0], *(1,) * (x.ndim - 3), self.cos.shape[1])
        cos, sin = self.cos.reshape(shape), self.sin.reshape(shape)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate(
            [first * cos - second * sin, second * cos + first * sin], axis=-1
        ).astype(x.dtype)


def rotary(seq: int, dim: int, theta: float, scaling: RopeScaling | None) -> Rotary:
    """Tables for positions 0 to seq - 1 and heads whose turned part has `dim` dims.

    Args:
        scaling: how wavelengths are stretched; None for not at all.

    Returns:
        Cosines and sines, float32 [seq, dim / 2] each.
    """
    positions = jax.lax.broadcasted_iota(jnp.float32, (seq, dim // 2), 0)
    angles = positions * jnp.asarray(frequencies(dim, theta, scaling), jnp.float32)
    return Rotary(cos=jnp.cos(angles), sin=jnp.sin(angles))


def frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians a position for each pair, [dim / 2], stretched as `scaling` says.

    Args:
        scaling: how wavelengths are stretched; None for not at all.
    """
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    unscaled_share = (
        _kept_llama3(plain, scaling)
        if scaling.kind == "llama3"
        else _kept_yarn(dim, theta, scaling)
    )
    return plain * unscaled_share + plain / scaling.factor * (1 - unscaled_share)


def scores_scale(scaling: RopeScaling | None) -> float:
    """Factor on the attention scores that YaRN asks for (arXiv:2309.00071, section 3.4, as DeepSeek
    V3 applies it).
    """
    if scaling is None or scaling.kind != "yarn" or not scaling.scores_factor:
        return 1.0
    return (0.1 * scaling.scores_factor * math.log(scaling.factor) + 1.0) ** 2


def _kept_llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Share of each frequency that stays as it is: 1 for short waves, 0 for long ones (Llama 3.1
    reference code).
    """
    turns = scaling.original_seq * plain / (2 * math.pi)
    return np.clip(
        (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency), 0.0, 1.0
    )


def _kept_yarn(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """The same for YaRN: a ramp over the pairs, between those that turn `high_frequency` and
    `low_frequency` times.
    """

    def pair(turns: float) -> float:
        return dim * math.log(scaling.original_seq / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(scaling.high_frequency)), 0)
    high = min(math.ceil(pair(scaling.low_frequency)), dim - 1)
    return 1 - np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
