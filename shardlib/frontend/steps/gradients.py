"""`shardlib.value_and_grad`: a step says which function in it is a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
from flax import nnx
from jax.core import Tracer

from shardlib.annotation.trees.partition import Partition
from shardlib.annotation.trees.paths import Tree, path_parts
from shardlib.annotation.trees.wrt import Filter, frozen_leaves, nnx_predicate
from shardlib.errors import ArgumentError
from shardlib.functions.losses import marked_loss
from shardlib.functions.mean import WeightedMean
from shardlib.jax_types import Value

#: (params, batch, *rest) -> loss, or (loss, auxiliary results).
StepLoss = Callable[..., Tree]


def value_and_grad(
    loss: StepLoss, *, wrt: Filter = None, has_aux: bool = False, rows: str = "prove"
) -> Callable[..., tuple[Tree, Tree]]:
    """`jax.value_and_grad`, by which a step marks its loss.

        def step(state, batch):
            value, gradients = shardlib.value_and_grad(loss)(state["params"], batch)
            ...

    In a step of `shardlib.compile_step` or `shardlib.parallelize` the loss is planned as that of
    `shardlib.compile`: microbatches, rematerialisation, attention, experts and stages are open to
    it, with the numbers of one device. Anywhere else it is `jax.value_and_grad`.

    Args:
        loss: `(params, batch, *rest)` -> float scalar (or a `shardlib.WeightedMean`), or with
            `has_aux` -> (scalar, any pytree of arrays). Rows are dims of `batch` alone; `rest` is
            the same for all rows: reference params, a random key, a temperature. In a step that is
            planned it gets everything that the step computes as an argument. Auxiliary results
            that have rows, or that no sum over rows is, keep the batch in one piece.
        wrt: what is trained, in Flax's words: a predicate (path, leaf) -> bool, or of trees of NNX
            variables a filter such as `nnx.LoRAParam`; all params if left out.
        has_aux: whether the loss returns auxiliary results, too.
        rows: as of `shardlib.compile`: "prove" how the loss depends on the rows of the batch, or
            "mean", with which you say that it and all auxiliary results are means over them.

    Returns:
        Function `(params, batch, *rest)` -> (value, gradients), or ((value, auxiliary results),
        gradients). Gradients are like the params; with `wrt` like the part of them that it
        chooses: dicts and NNX states without the rest, and None for that in other containers.

    Raises:
        ArgumentError: the loss is no function.
        AnnotationError: when called, `wrt` chooses nothing or what has no gradient.
    """
    if not callable(loss):
        raise ArgumentError(
            f"loss is {type(loss).__name__}; it is a function\nTry: def loss(params, batch): ..."
        )

    def function(params: Tree, batch: Tree, *rest: Tree) -> tuple[Value, Tree]:
        result = loss(params, batch, *rest)
        value, aux = result if has_aux else (result, None)
        return value.value() if isinstance(value, WeightedMean) else value, aux

    def gradients(params: Tree, batch: Tree, *rest: Tree) -> tuple[Tree, Tree]:
        arguments = (params, batch, *rest)
        chosen = _trained(params, wrt)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments)):
            name = getattr(loss, "__name__", "loss")
            leaves, inputs = jax.tree.flatten(arguments)
            form, (value, *others) = marked_loss(function, leaves, inputs, chosen.flags, name, rows)
            results = form.results.num_leaves
            aux, found = form.results.unflatten(others[:results]), others[results:]
        else:
            value, aux, found = _plain(function, arguments, chosen)
        return (value, aux) if has_aux else value, _like(params, chosen, found)

    return gradients


def _plain(
    function: Callable[..., tuple[Value, Tree]], arguments: tuple[Any, ...], chosen: Partition
) -> tuple[Value, Tree, list[Value]]:
    """Value, auxiliary results and gradients of arrays that nobody traces."""
    leaves, structure = jax.tree.flatten(arguments[0])

    def of_trained(trained: list[Any]) -> tuple[Value, Tree]:
        fresh = iter(trained)
        given = [
            next(fresh) if flag else leaf for leaf, flag in zip(leaves, chosen.flags, strict=True)
        ]
        return function(structure.unflatten(given), *arguments[1:])

    trained = [leaf for leaf, flag in zip(leaves, chosen.flags, strict=True) if flag]
    (value, aux), found = jax.value_and_grad(of_trained, has_aux=True)(trained)
    return value, aux, found


def _trained(params: Tree, wrt: Filter) -> Partition:
    """Which leaves of params are trained."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable)
    if wrt is None:
        return Partition(flags=(True,) * len(jax.tree.leaves(params)))
    if not any(_is_variable(leaf) for _, leaf in leaves):
        return Partition.of(params, frozen_leaves(wrt, params, "pytree"))
    predicate = nnx_predicate(wrt)
    return Partition(
        flags=tuple(
            flag
            for path, leaf in leaves
            for flag in [bool(predicate(tuple(path_parts(path)), leaf))]
            * len(jax.tree.leaves(leaf))
        )
    )


def _like(params: Tree, chosen: Partition, found: list[Value]) -> Tree:
    """Gradients of the trained leaves as a tree like the trained part of the params."""
    leaves, structure = jax.tree.flatten(params)
    fresh = iter(found)
    every = structure.unflatten(
        [next(fresh) if flag else leaf for leaf, flag in zip(leaves, chosen.flags, strict=True)]
    )
    if chosen.whole or not isinstance(params, nnx.State):
        return chosen.trained(every)
    variables = jax.tree_util.tree_leaves_with_path(every, is_leaf=_is_variable)
    flags, kept = iter(chosen.flags), set[tuple[Any, ...]]()
    for path, leaf in variables:
        if True in [next(flags) for _ in jax.tree.leaves(leaf)]:
            kept.add(tuple(path_parts(path)))
    return cast(Tree, nnx.filter_state(every, lambda path, _: path in kept))


def _is_variable(leaf: object) -> bool:
    return isinstance(leaf, nnx.Variable)
