"""Models as users bring them, and the same models trained without shardlib.

A `Case` holds what is handed to shardlib (`init`, `loss`, a batch) and `plain`, the same model
trained by its own library and optax on one device. No line of shardlib is in the numbers of
`plain`.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import shardlib

Tree = Any
#: (params, what no gradient changes, batch) -> (loss, the same of the next step).
Value = Callable[[Tree, Tree, Tree], tuple[jax.Array, Tree]]
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, as a user hands it over.

    Attributes:
        package: its name on PyPI.
        model: class or function of the package.
        framework: what its modules are made of.
        wrapper: how shardlib is told of it.
        init: first argument of `shardlib.compile`.
        loss: second argument of `shardlib.compile`.
        batch: pytree of NumPy arrays.
        batch_axes: logical axes of the batch, where rows are not its leading dims.
        plain: () -> (params, rest, value), by the model's own library alone.
        learning_rate: of the comparison.
        double: whether it is compared in float64, as its batch is. Where rectifiers of deep nets
            are so near to zero that rounding alone switches some, float32 compares chances.
    """

    package: str
    model: str
    framework: str
    wrapper: str
    init: Any
    loss: Loss
    batch: Tree
    plain: Callable[[], tuple[Tree, Tree, Value]]
    batch_axes: Tree = None
    learning_rate: float = 0.05
    double: bool = False

    @property
    def lines(self) -> int:
        """Lines of the loss: what a user writes of the model beside the wrapper's one."""
        return len(textwrap.dedent(inspect.getsource(self.loss)).strip().splitlines())


def optimizer(case: Case) -> optax.GradientTransformation:
    """Clipped gradients and momentum: updates are linear in gradients, so that a gradient that is
    zero on paper stays rounding noise, which Adam would divide by itself.
    """
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(case.learning_rate, momentum=0.9))


def of_nnx(
    package: str, model: str, build: Callable[[nnx.Rngs], nnx.Module], loss: Loss, batch: Tree,
    **options: Any,
) -> Case:  # fmt: skip
    """A Flax NNX model."""

    def plain() -> tuple[Tree, Tree, Value]:
        with nnx.use_eager_sharding(False):
            graph, params, rest = nnx.split(build(nnx.Rngs(0)), nnx.Param, ...)

        def value(params: Tree, rest: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
            module = nnx.merge(graph, params, rest, copy=True)
            result = loss(module, batch)
            return result, nnx.split(module, nnx.Param, ...)[2]

        return params, rest, value

    named = {"package": package, "model": model, "loss": loss, "batch": batch, **options}
    return Case(framework="Flax NNX", wrapper="none", init=build, plain=plain, **named)


def of_linen(
    package: str, module: nn.Module, inputs: tuple[Any, ...], loss: Loss, batch: Tree,
    kwargs: Mapping[str, Any] | None = None, model: str = "", **options: Any,
) -> Case:  # fmt: skip
    """A Flax Linen model; its loss takes params, or variables where there are other collections,
    and returns updates of these, too.
    """
    kwargs = dict(kwargs or {})

    def plain() -> tuple[Tree, Tree, Value]:
        variables = nn.meta.unbox(module.init(jax.random.key(0), *inputs, **kwargs))
        rest = {name: tree for name, tree in variables.items() if name != "params"}

        def value(params: Tree, rest: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
            result = loss({"params": params, **rest} if rest else params, batch)
            total, updates = result if isinstance(result, tuple) else (result, {})
            return total, {**rest, **updates}

        return variables["params"], rest, value

    named = {
        "package": package,
        "model": model or type(module).__name__,
        "loss": loss,
        "batch": batch,
        **options,
    }
    return Case(
        framework="Flax Linen",
        wrapper="shardlib.linen(module, *inputs)",
        init=shardlib.linen(module, *inputs, **kwargs),
        plain=plain,
        **named,
    )


def of_tree(
    package: str, model: str, framework: str, build: Callable[[jax.Array], Tree], loss: Loss,
    batch: Tree, **options: Any,
) -> Case:  # fmt: skip
    """A pytree, or a module that is one; floating-point arrays of it are trained."""

    def plain() -> tuple[Tree, Tree, Value]:
        made = build(jax.random.key(0))
        leaves, structure = jax.tree.flatten(made)
        trained = [
            isinstance(leaf, (jax.Array, np.ndarray)) and jnp.issubdtype(leaf.dtype, jnp.inexact)
            for leaf in leaves
        ]

        def value(params: Tree, rest: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
            mine = iter(params)
            whole = [next(mine) if own else leaf for own, leaf in zip(trained, leaves, strict=True)]
            return loss(jax.tree.unflatten(structure, whole), batch), rest

        return [leaf for own, leaf in zip(trained, leaves, strict=True) if own], (), value

    named = {"package": package, "model": model, "loss": loss, "batch": batch, **options}
    return Case(
        framework=framework,
        wrapper="shardlib.tree(init)",
        init=shardlib.tree(build),
        plain=plain,
        **named,
    )


def of_stateful(
    package: str,
    model: str,
    framework: str,
    build: Callable[[jax.Array], Tree],
    loss: Loss,
    batch: Tree,
    **options: Any,
) -> Case:
    """A pair of params, or a module, and state; its loss returns the next state last."""

    def plain() -> tuple[Tree, Tree, Value]:
        made, state = build(jax.random.key(0))
        leaves, structure = jax.tree.flatten(made)
        trained = [hasattr(leaf, "dtype") and leaf.dtype.kind == "f" for leaf in leaves]
        kept, kinds = jax.tree.flatten(state)
        arrays = [hasattr(leaf, "dtype") for leaf in kept]

        def value(params: Tree, rest: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
            mine, others = iter(params), iter(rest)
            whole = [next(mine) if own else leaf for own, leaf in zip(trained, leaves, strict=True)]
            before = [next(others) if own else leaf for own, leaf in zip(arrays, kept, strict=True)]
            result = loss(
                (jax.tree.unflatten(structure, whole), jax.tree.unflatten(kinds, before)), batch
            )
            after = jax.tree.leaves(result[-1])
            return result[0], [x for own, x in zip(arrays, after, strict=True) if own]

        return (
            [leaf for own, leaf in zip(trained, leaves, strict=True) if own],
            [leaf for own, leaf in zip(arrays, kept, strict=True) if own],
            value,
        )

    named = {"package": package, "model": model, "loss": loss, "batch": batch, **options}
    return Case(
        framework=framework,
        wrapper="shardlib.tree(init, stateful=True)",
        init=shardlib.tree(build, stateful=True),
        plain=plain,
        **named,
    )


def normals(seed: int, *shape: int) -> np.ndarray:
    """Standard normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def integers(seed: int, limit: int, *shape: int) -> np.ndarray:
    """int32 numbers in [0, limit)."""
    return np.random.default_rng(seed).integers(0, limit, shape).astype(np.int32)


def next_token(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of each next token, nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()
