"""How parameters are made: drawn, named and counted.

Every parameter carries the logical axes of its dims in the `out_sharding` metadata of Flax.
`eager_sharding=False` lets the model be built outside any mesh: where parameters live is the plan's
business, not the constructor's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.axes import LogicalAxes
from shardlib.models.config import TransformerConfig


def weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: LogicalAxes, std: float, dtype: str
) -> nnx.Param[jax.Array]:
    """Draws a normal weight with standard deviation `std`.

    Args:
        dtype: name of it.
    """
    return nnx.Param(
        std * jax.random.normal(rngs.params(), shape, jnp.dtype(dtype)),
        out_sharding=axes,
        eager_sharding=False,
    )


def constant(
    value: float, shape: tuple[int, ...], axes: LogicalAxes, dtype: str
) -> nnx.Param[jax.Array]:
    """Makes a parameter that starts as `value` everywhere: a bias, or the scale of a norm.

    Args:
        dtype: name of it.
    """
    return nnx.Param(
        jnp.full(shape, value, jnp.dtype(dtype)), out_sharding=axes, eager_sharding=False
    )


class Norm(nnx.Module):
    """RMS norm (arXiv:1910.07467) or layer norm (arXiv:1607.06450) over the last dim, computed in
    float32.

    Args:
        width: elements of the last dim.
        axis: logical axis of that dim.
        config: says which norm, its epsilon, and whether it scales by 1 + weight.
        rms: makes an RMS norm whatever `config.norm` says.
    """

    def __init__(
        self, width: int, axis: str | None, config: TransformerConfig, *, rms: bool = False
    ):
        self.epsilon = config.norm_epsilon
        self.offset = 1.0 if config.norm_offset else 0.0
        self.scale = constant(1.0 - self.offset, (width,), (axis,), config.param_dtype)
        if config.norm == "layer" and not rms:
            self.bias = constant(0.0, (width,), (axis,), config.param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = self.scale[...].astype(jnp.float32) + self.offset
        if hasattr(self, "bias"):
            centred = wide - wide.mean(-1, keepdims=True)
            normal = centred * jax.lax.rsqrt(
                jnp.square(centred).mean(-1, keepdims=True) + self.epsilon
            )
            return (normal * scale + self.bias[...].astype(jnp.float32)).astype(x.dtype)
        return (
            wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon) * scale
        ).astype(x.dtype)
