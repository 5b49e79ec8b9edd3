"""What the distance of a key from a query adds to its score.

    Alibi           a slope of each head times the distance (Press et al., arXiv:2108.12409)
    RelativeBias    a number of each head for each bucket of distances (T5, arXiv:1910.10683,
                    section 2.1)

Both are told by the positions of one query and one key alone, so that devices and caches that have
some of the keys compute what one device would.

>>> Alibi.of(4).slopes.tolist()
[0.25, 0.0625, 0.015625, 0.00390625]
>>> distances = jnp.asarray([-40, -9, -8, -1, 0, 1])
>>> distance_buckets(distances, buckets=8, max_distance=32, both=False).tolist()
[7, 5, 5, 1, 0, 0]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Self

import jax
import jax.numpy as jnp

from shardlib.errors import ModelError, raise_all


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Alibi:
    """A slope of each head times the distance, subtracted from scores.

    Attributes:
        slopes: [N], of each head of queries.
    """

    slopes: jax.Array

    @classmethod
    def of(cls, heads: int) -> Self:
        """The published slopes: a geometric series from 2^(-8/N) on; where N is no power of two,
        those of the next lower one, and then every second of twice as many.
        """
        power = 2 ** math.floor(math.log2(heads))
        series = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
        between = [2.0 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]
        return cls(jnp.asarray([*series, *between], jnp.float32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RelativeBias:
    """A number of each head for each bucket of distances, added to scores.

    Attributes:
        table: [buckets, N]. Where attention is not causal, the second half is for keys after the
            query.
        max_distance: from which on all distances share a bucket.
    """

    table: jax.Array
    max_distance: int = field(default=128, metadata={"static": True})


Bias = Alibi | RelativeBias


@dataclass(frozen=True, kw_only=True)
class BiasForm:
    """How a bias is made of its array.

    Attributes:
        kind: "alibi" or "relative".
        max_distance: see `RelativeBias`; 0 for the other.
        both: whether keys after the query have buckets of their own.
    """

    kind: Literal["alibi", "relative"]
    max_distance: int = 0
    both: bool = False

    def of(self, array: jax.Array, distance: jax.Array) -> jax.Array:
        """What is added to scores, [N, ...] float32.

        Args:
            array: slopes [N], or a table [buckets, N].
        """
        array = array.astype(jnp.float32)
        if self.kind == "alibi":
            return -array.reshape(-1, *[1] * distance.ndim) * jnp.abs(distance)
        bucket_numbers = distance_buckets(
            distance, buckets=array.shape[0], max_distance=self.max_distance, both=self.both
        )
        # A product with rows of ones, as in T5X: of a gather, TPUs pad each row of heads to 128.
        return jnp.einsum(
            "bh,b...->h...",
            array,
            jax.nn.one_hot(bucket_numbers, array.shape[0], axis=0, dtype=jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )


def bias_form(
    bias: Bias | None, *, heads: int, causal: bool
) -> tuple[BiasForm | None, jax.Array | None]:
    """The form of a bias, and its array.

    Args:
        bias: that a call of attention is given; None for none.
    """
    if bias is None:
        return None, None
    if isinstance(bias, Alibi):
        _check(
            [
                (
                    bias.slopes.shape == (heads,),
                    f"slopes are {bias.slopes.shape}; there are {heads} heads",
                )
            ]
        )
        return BiasForm(kind="alibi"), bias.slopes
    if not isinstance(bias, RelativeBias):  # pyright: ignore[reportUnnecessaryIsInstance]
        _check([(False, f"bias is a {type(bias).__name__}; known are Alibi and RelativeBias")])
    shape, far = tuple(bias.table.shape), bias.max_distance
    exact = (shape[0] if causal else shape[0] // 2) // 2 if len(shape) == 2 else 0
    _check(
        [
            (
                len(shape) == 2 and shape[1] == heads and exact > 0,
                f"the table is {shape}; it is [buckets, heads], of {heads} heads"
                f" and {2 if causal else 4} buckets at least",
            ),
            (
                far > exact,
                f"max_distance={far}; {exact} distances have a bucket each, so that it is more",
            ),
        ]
    )
    return BiasForm(kind="relative", max_distance=far, both=not causal), bias.table


def _check(conditions: list[tuple[bool, str]]) -> None:
    messages = [message for fits, message in conditions if not fits]
    if messages:
        raise_all(ModelError, "the bias does not fit attention", messages)


def distance_buckets(
    distance: jax.Array, *, buckets: int, max_distance: int, both: bool
) -> jax.Array:
    """The bucket of every distance: one for each of the short ones, then ever wider ones up to
    `max_distance`, and the last for all beyond.
    """
    first = jnp.where(distance > 0, buckets // 2, 0) if both else 0
    count = buckets // 2 if both else buckets
    far = jnp.abs(distance) if both else jnp.maximum(-distance, 0)
    exact = count // 2
    ratio = jnp.log(jnp.maximum(far, 1).astype(jnp.float32) / exact) / math.log(
        max_distance / exact
    )
    wide = jnp.minimum(exact + (ratio * (count - exact)).astype(jnp.int32), count - 1)
    return first + jnp.where(far < exact, far, wide)
