"""In which dtypes does a step keep, multiply, reduce and update things?

The loss computes as it is written: stored parameters in another dtype are cast to the one that it
was traced with where it takes them, in loops slice by slice. The update is computed in the wider of
the two, so that float32 as stored are master weights of a model in 16 bits (arXiv:1710.03740,
section 3.1). Optimizer state is cast around the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import PinError
from shardlib.hardware.topology import topology
from shardlib.lowering.mesh.eight_bit import is_eight_bit, require_qwix
from shardlib.lowering.mesh.owners import owned, shapes_of
from shardlib.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes that a plan decides for; None where they are those of the traced model.

    Attributes:
        rest: of parameters between steps.
        products: of the operands of products of layers' weights.
        kept: of gradients that are added up over microbatches.
        wire: of communicated gradients.
        moments: of optimizer state with a parameter's shape.
    """

    rest: np.dtype | None = None
    products: np.dtype | None = None
    kept: np.dtype | None = None
    wire: np.dtype | None = None
    moments: np.dtype | None = None

    @staticmethod
    def of(plan: Plan) -> Precision:
        """The dtypes of a plan."""
        words: Mapping[str, str] = dict(plan.dtypes)

        def dtype(word: str) -> np.dtype | None:
            return jnp.dtype(words[word]) if word in words else None

        return Precision(
            rest=dtype("param_dtype"),
            products=dtype("matmul_dtype"),
            kept=dtype("gradient_dtype"),
            wire=dtype("reduction_dtype"),
            moments=dtype("moment_dtype"),
        )

    def resting(self, params: Tree) -> Tree:
        """Parameters as they rest: arrays, or abstract ones."""
        return jax.tree.map(
            lambda leaf: (
                _cast(leaf, self.rest) if self.rest is not None and is_real(leaf) else leaf
            ),
            params,
        )

    def updated(self, params: Tree) -> Tree:
        """Abstract parameters in the dtypes that the update is computed in, for those of the traced
        model.
        """
        return jax.tree.map(
            lambda leaf: (
                _cast(leaf, jnp.promote_types(leaf.dtype, self.rest))
                if self.rest is not None and is_real(leaf)
                else leaf
            ),
            params,
        )

    def sums(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which gradients of a dtype are added up: as the plan says, otherwise float32
        at least.
        """
        return (
            self.kept
            if self.kept is not None and jnp.issubdtype(dtype, jnp.floating)
            else jnp.promote_types(dtype, jnp.float32)
        )


def require_products(plan: Plan) -> None:
    """Checks that the products of a plan can be made: those in 8 bits on chips that have them, or
    on simulated devices.
    """
    dtype = Precision.of(plan).products
    if not is_eight_bit(dtype):
        return
    chip = (plan.source.topology if plan.source is not None else topology(plan.topology)).chip
    if chip.vendor != "cpu" and not any(name.startswith("float8") for name, _ in chip.flops_per_s):
        raise PinError(
            f"matmul_dtype={dtype.name!r}: the chip {chip.name} has no products in 8-bit floating"
            " point\nTry: matmul_dtype='bfloat16', or chips that have them, such as h100"
        )
    require_qwix()


def is_real(leaf: Tree) -> bool:
    """Whether an array holds real floating-point numbers."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def like(tree: Tree, target: Tree) -> Tree:
    """A tree with the dtypes of another; leaves that have them already are passed on."""
    return jax.tree.map(
        lambda leaf, model: leaf if leaf.dtype == model.dtype else leaf.astype(model.dtype),
        tree,
        target,
    )


def _cast(leaf: Tree, dtype: Any) -> Any:
    if leaf.dtype == dtype:
        return leaf
    return (
        jax.ShapeDtypeStruct(leaf.shape, dtype)
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else leaf.astype(dtype)
    )


def stored(
    optimizer: optax.GradientTransformation, params: Tree, precision: Precision
) -> optax.GradientTransformation:
    """An optimizer whose state rests in the dtypes of a plan, and is cast to those of its update
    around every update.

    Args:
        precision: the dtypes; where they change nothing, the optimizer is returned as it is.
    """
    at_rest = jax.eval_shape(optimizer.init, params)
    computed = jax.eval_shape(optimizer.init, precision.updated(params))
    if precision.moments is not None:
        shapes = shapes_of(params)
        at_rest = jax.tree_util.tree_map_with_path(
            lambda path, leaf: (
                _cast(leaf, precision.moments)
                if is_real(leaf) and owned(path, leaf, shapes) is not None
                else leaf
            ),
            at_rest,
        )
    if jax.tree.leaves(at_rest) == jax.tree.leaves(computed):  # nodes may have an `==` of their own
        return optimizer
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> Tree:
        return like(inner.init(params), at_rest)

    def update(
        updates: Tree, state: Tree, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, Tree]:
        updates, state = inner.update(updates, like(state, computed), params, **extra)
        return updates, like(state, at_rest)

    return optax.GradientTransformationExtraArgs(init, update)
