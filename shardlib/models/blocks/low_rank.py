"""Low-rank adapters of a transformer: (x A) B, added to the products with its matrices (Hu et al.,
LoRA, arXiv:2106.09685).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

#: Matrices that adapters change, by module; the dims of each that it multiplies.
MATRICES = {
    "attention": {"query": 1, "key": 1, "value": 1, "out": 2},
    "mlp": {"gate": 1, "up": 1, "down": 1},
}


class LowRank(nnx.Module):
    """What an adapter adds to the products with the matrices of a stack of layers; nothing as long
    as B is zero.

    Args:
        matrix: of the layers, [layers, in..., out...].
        dims: how many are in.
        rank: of the product.
        rngs: A is drawn from `params`.
    """

    def __init__(self, matrix: nnx.Param[jax.Array], dims: int, rank: int, rngs: nnx.Rngs):
        array = matrix[...]
        layers, into, out = array.shape[0], array.shape[1 : 1 + dims], array.shape[1 + dims :]
        names = matrix.get_metadata("out_sharding") or (None,) * array.ndim
        drawn = jax.random.normal(rngs.params(), (layers, *into, rank), array.dtype)
        self.a = nnx.LoRAParam(
            drawn / rank, out_sharding=(*names[: 1 + dims], None), eager_sharding=False
        )
        self.b = nnx.LoRAParam(
            jnp.zeros((layers, rank, *out), array.dtype),
            out_sharding=(names[0], None, *names[1 + dims :]),
            eager_sharding=False,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """(x A) B of one layer, [..., out...] for x [..., in...]."""
        a, b = self.a[...].astype(x.dtype), self.b[...].astype(x.dtype)
        return jnp.tensordot(jnp.tensordot(x, a, axes=a.ndim - 1), b, axes=1)


def adapted(module: nnx.Module, name: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """A product with a matrix, and what an adapter adds to it."""
    low = getattr(module, f"{name}_lora", None)
    return y if low is None else y + low(x)
