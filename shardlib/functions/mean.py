"""A loss that is a ratio of two sums over the batch.

def loss(model, batch):
    each = cross_entropy(model(batch["x"]), batch["y"])
    total = jnp.sum(each * batch["weight"])
    return shardlib.WeightedMean(total=total, weight=jnp.sum(batch["weight"]))
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from shardlib.functions.marks import marked


@dataclass(frozen=True, kw_only=True)
class WeightedMeanForm:
    """What a weighted mean computes."""

    kind: str = "weighted-mean"


@dataclass(frozen=True)
class WeightedMean:
    """A loss or a metric: a sum over the rows of the batch, divided by another one.

    Shardlib proves of most losses how they depend on the rows of the batch. Where it cannot see
    through one, this says it: for a part of the batch, `total` and `weight` are those of its rows,
    and those of all parts add up to those of the whole. Then the batch can be worked through in
    parts; the sums are divided once. A term that depends on parameters alone is added as `total +
    penalty * weight`.

    Attributes:
        total: float scalar, a sum over rows.
        weight: scalar, a sum over rows. No gradient flows through it.
    """

    total: jax.Array
    weight: jax.Array

    def value(self) -> jax.Array:
        """`total` / `weight`, the weight without a gradient.

        Returns:
            Float scalar in the dtype of `total`.
        """
        return marked(WeightedMeanForm(), _divided)(self.total, jax.lax.stop_gradient(self.weight))


jax.tree_util.register_dataclass(WeightedMean, data_fields=["total", "weight"], meta_fields=[])


def _divided(_: WeightedMeanForm, total: jax.Array, weight: jax.Array) -> jax.Array:
    return total / weight.astype(total.dtype)
