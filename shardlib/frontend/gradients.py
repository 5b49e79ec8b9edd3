"""`shardlib.value_and_grad`, which marks a function of a step as a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from shardlib.annotation.trees import (
    Filter,
    Partition,
    Tree,
    frozen_leaves,
    nnx_predicate,
    path_parts,
    path_text,
)
from shardlib.errors import ArgumentError
from shardlib.functions.losses import FlatLoss, WeightedMean, marked_loss
from shardlib.jax_types import Value

#: Any arguments -> loss, or (loss, auxiliary results).
StepLoss = Callable[..., Tree]
#: What is differentiated: a position among the arguments, that and a filter, or several of these.
Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]


def value_and_grad(
    loss: StepLoss | None = None,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    wrt: Filter = None,
    rows: str = "prove",
) -> Callable[..., Any]:
    """`jax.value_and_grad` and `nnx.value_and_grad`, by which a step marks its loss.

        def step(state, batch):
            def loss_fn(params):
                return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

            value, gradients = shardlib.value_and_grad(loss_fn)(state.params)
            ...

    In a step of `shardlib.compile_step` or `shardlib.parallelize` the loss is planned as that of
    `shardlib.compile`: microbatches, rematerialisation, attention, experts and stages are open to
    it, with the numbers of one device. Anywhere else it is the function of JAX or of Flax.

    Which arguments, and which of the arrays that the loss closes over, have rows of the batch is
    found in the trace of the step; all others are the same for all rows.

    Args:
        loss: any arguments -> float scalar (or a `shardlib.WeightedMean`), or with `has_aux` ->
            (scalar, any pytree of arrays). It may close over what the step computes. Auxiliary
            results that have rows, or that no sum over rows is, keep the batch in one piece. What
            it changes in NNX modules among its arguments stays changed. None for a decorator with
            the other arguments.
        argnums: which arguments are differentiated: positions, or `nnx.DiffState`; of NNX modules
            by default their `nnx.Param`.
        has_aux: whether the loss returns auxiliary results, too.
        holomorphic, allow_int: as of `jax.value_and_grad`; such a loss is not marked.
        wrt: what is trained of the argument, in Flax's words: a predicate (path, leaf) -> bool, of
            NNX variables a filter such as `nnx.LoRAParam`, or an `nnx.DiffState` in the place of
            `argnums`.
        rows: as of `shardlib.compile`: "prove" how the loss depends on the rows of the batch, or
            "mean", with which you say that it and all auxiliary results are means over them.

    Returns:
        Function of the arguments of the loss -> (value, gradients), or ((value, auxiliary results),
        gradients). Gradients are like the argument, a tuple of them where `argnums` are several;
        with a filter like the part of it that is chosen: dicts and NNX states without the rest, and
        None for that in other containers.

    Raises:
        ArgumentError: the loss is not a function, or there are too few arguments.
        AnnotationError: when called, `wrt` chooses nothing or what has no gradient.
    """
    if loss is None:
        return functools.partial(
            value_and_grad, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic,
            allow_int=allow_int, wrt=wrt, rows=rows,
        )  # fmt: skip
    if not callable(loss):
        raise ArgumentError(
            f"loss is {type(loss).__name__}; it is a function\nTry: def loss(params, batch): ..."
        )
    selections = _chosen(argnums, wrt)
    several = isinstance(argnums, Sequence)

    @functools.wraps(loss)
    def gradients(*args: Tree, **kwargs: Tree) -> Any:
        chosen = tuple(
            nnx.DiffState(selection.argnum + len(args), selection.filter)
            if selection.argnum < 0
            else selection
            for selection in selections
        )
        for selection, place in zip(selections, chosen, strict=True):
            if not 0 <= place.argnum < len(args):
                raise ArgumentError(
                    f"the loss {_name(loss)} is differentiated by argument {selection.argnum}, and"
                    f" is called with {len(args)}\nTry: argnums from 0 to {len(args) - 1}"
                )
        objects = any(map(_has_objects, (*args, *kwargs.values())))
        call = (_of_objects if objects else _of_trees)(loss, args, kwargs, chosen, has_aux)
        if holomorphic or allow_int or not any(isinstance(leaf, Tracer) for leaf in call.leaves):
            value, aux, leaf_grads = call.plain(holomorphic, allow_int)
        else:
            value, aux, leaf_grads = marked_loss(
                call.function, call.leaves, call.paths, call.trained, _name(loss), rows
            )
        aux = call.after(aux)
        grads = call.like(leaf_grads)
        return (value, aux) if has_aux else value, grads if several else grads[0]

    return gradients


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of a loss, over flat arrays.

    Attributes:
        function: leaves -> (value, auxiliary results).
        leaves: arrays among the arguments.
        paths: of the leaves.
        trained: for each leaf, whether it is differentiated.
        after: auxiliary results -> those of the user; does what the loss did to NNX modules.
        like: gradients of the trained leaves -> one tree for each differentiated argument.
    """

    function: FlatLoss
    leaves: list[Any]
    paths: tuple[str, ...]
    trained: tuple[bool, ...]
    after: Callable[[Tree], Tree]
    like: Callable[[Sequence[Value]], tuple[Tree, ...]]

    def plain(self, holomorphic: bool, allow_int: bool) -> tuple[Value, Tree, list[Value]]:
        """Value, auxiliary results and gradients as JAX has them."""

        def of_trained(trained: list[Any]) -> tuple[Value, Tree]:
            fresh = iter(trained)
            pairs = zip(self.leaves, self.trained, strict=True)
            return self.function([next(fresh) if flag else leaf for leaf, flag in pairs])

        trained = [leaf for leaf, flag in zip(self.leaves, self.trained, strict=True) if flag]
        (value, aux), grads = jax.value_and_grad(
            of_trained, has_aux=True, holomorphic=holomorphic, allow_int=allow_int
        )(trained)
        return value, aux, grads


def _chosen(argnums: Argnums, wrt: Filter) -> tuple[nnx.DiffState, ...]:
    """Returns what is differentiated, and of each argument the filter; None for all."""
    if isinstance(wrt, nnx.DiffState):
        return (wrt,)
    selections = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    return tuple(
        selection if isinstance(selection, nnx.DiffState) else nnx.DiffState(int(selection), wrt)
        for selection in selections
    )


def _results(result: Any, has_aux: bool) -> tuple[Value, Tree]:
    value, aux = result if has_aux else (result, None)
    return value.value() if isinstance(value, WeightedMean) else value, aux


def _of_trees(
    loss: StepLoss, args: Sequence[Tree], kwargs: Any, chosen: Sequence[nnx.DiffState], aux: bool
) -> _Call:
    """A call whose arguments are pytrees. Leaves that are not arrays, such as True, stay what they
    are.
    """
    counts = [len(jax.tree.leaves(argument)) for argument in args]
    parts = {
        selection.argnum: _trained(args[selection.argnum], selection.filter) for selection in chosen
    }
    flags = [
        flag
        for number, count in enumerate(counts)
        for flag in (parts[number].flags if number in parts else (False,) * count)
    ]
    flags += [False] * len(jax.tree.leaves(kwargs))
    named = jax.tree_util.tree_leaves_with_path((*args, kwargs) if kwargs else tuple(args))
    all_leaves = [leaf for _, leaf in named]
    structure = jax.tree.structure((tuple(args), kwargs))
    taken = [index for index, leaf in enumerate(all_leaves) if flags[index] or _is_array(leaf)]

    def function(leaves: Sequence[Value]) -> tuple[Value, Tree]:
        replaced = list(all_leaves)
        for index, leaf in zip(taken, leaves, strict=True):
            replaced[index] = leaf
        positional, named = structure.unflatten(replaced)
        return _results(loss(*positional, **named), aux)

    def like(grads: Sequence[Value]) -> tuple[Tree, ...]:
        fresh = dict(zip([index for index in taken if flags[index]], grads, strict=True))
        trees: list[Tree] = []
        for selection in chosen:
            first = sum(counts[: selection.argnum])
            gradients = [fresh.get(first + index) for index in range(counts[selection.argnum])]
            trees.append(_like(args[selection.argnum], parts[selection.argnum], gradients))
        return tuple(trees)

    return _Call(
        function=function,
        leaves=[all_leaves[index] for index in taken],
        paths=tuple(path_text(named[index][0]) for index in taken),
        trained=tuple(flags[index] for index in taken),
        after=lambda aux: aux,
        like=like,
    )


def _of_objects(
    loss: StepLoss, args: Sequence[Tree], kwargs: Any, chosen: Sequence[nnx.DiffState], aux: bool
) -> _Call:
    """A call some of whose arguments are NNX objects, or have some: they share variables, and the
    loss may change them.
    """
    objects = (list(args), dict(kwargs))
    graph, state = nnx.split(objects)
    leaves, structure = jax.tree.flatten(state)
    variables = dict(nnx.to_flat_state(state))
    places = {id(variable): path for path, variable in variables.items() if _is_variable(variable)}
    selected: dict[Any, None] = {}
    templates: list[Any] = []
    for selection in chosen:
        kind = nnx.Param if selection.filter is None else selection.filter
        tree = jax.tree.map(
            lambda node, kind=kind: nnx.state(node, kind) if _is_object(node) else node,
            args[selection.argnum],
            is_leaf=_is_object,
        )
        templates.append((selection.argnum, tree))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable):
            selected[_place(places, selection.argnum, path, leaf)] = None
    spots = [
        (path, path_text(inner))
        for path, variable in variables.items()
        for inner, _ in jax.tree_util.tree_leaves_with_path(variable)
    ]
    flags = tuple(path in selected for path, _ in spots)
    changed: list[tuple[int, ...]] = []

    def function(values: Sequence[Value]) -> tuple[Value, Tree]:
        positional, named = nnx.merge(graph, structure.unflatten(values))
        value, results = _results(loss(*positional, **named), aux)
        after = jax.tree.leaves(nnx.split((positional, named))[1])
        pairs = zip(values, after, strict=True)
        updated = tuple(index for index, (old, new) in enumerate(pairs) if old is not new)
        changed[:] = [updated]
        return value, (results, [after[index] for index in updated])

    def finish(results: Tree) -> Tree:
        aux, fresh = results
        new = list(leaves)
        for index, leaf in zip(changed[0], fresh, strict=True):
            new[index] = leaf
        if changed[0]:
            after = dict(nnx.to_flat_state(structure.unflatten(new)))
            for path in {spots[index][0] for index in changed[0]}:
                variables[path].update_from_state(after[path])
        return aux

    def like(gradients: Sequence[Value]) -> tuple[Tree, ...]:
        grads = iter(gradients)
        by_place: dict[Any, list[Value]] = {}
        for (path, _), flag in zip(spots, flags, strict=True):
            if flag:
                by_place.setdefault(path, []).append(next(grads))
        return tuple(_filled(argnum, tree, places, by_place) for argnum, tree in templates)

    return _Call(
        function=function,
        leaves=leaves,
        paths=tuple(".".join(filter(None, (*map(str, path[1:]), text))) for path, text in spots),
        trained=flags,
        after=finish,
        like=like,
    )


def _place(places: dict[int, Any], argnum: int, path: Any, leaf: Any) -> Any:
    """Returns where a leaf of an argument is in the state of all arguments."""
    return places.get(id(leaf), (0, argnum, *path_parts(path)))


def _filled(argnum: int, tree: Tree, places: dict[int, Any], grads: dict[Any, list[Value]]) -> Tree:
    """An argument with gradients in the places of its leaves."""
    named, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)
    leaves: list[Any] = []
    for path, leaf in named:
        gradients = grads[_place(places, argnum, path, leaf)]
        leaves.append(jax.tree.unflatten(jax.tree.structure(leaf), gradients))
    return structure.unflatten(leaves)


def _trained(params: Tree, wrt: Filter) -> Partition:
    """Returns which leaves of params are trained."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable)
    if wrt is None:
        return Partition(flags=(True,) * len(jax.tree.leaves(params)))
    if not any(_is_variable(leaf) for _, leaf in leaves):
        arrays = jax.tree.map(lambda leaf: leaf if _is_array(leaf) else jnp.asarray(leaf), params)
        return Partition.of(params, frozen_leaves(wrt, arrays, "pytree"))
    predicate = nnx_predicate(wrt)
    return Partition(
        flags=tuple(
            flag
            for path, leaf in leaves
            for flag in [bool(predicate(tuple(path_parts(path)), leaf))]
            * len(jax.tree.leaves(leaf))
        )
    )


def _like(params: Tree, chosen: Partition, grads: Sequence[Value | None]) -> Tree:
    """Gradients as a tree like the trained part of the params; None for what is not trained."""
    leaves, structure = jax.tree.flatten(params)
    filled = structure.unflatten(
        [leaf if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
    )
    if chosen.whole or not isinstance(params, nnx.State):
        return chosen.trained(filled)
    variables = jax.tree_util.tree_leaves_with_path(filled, is_leaf=_is_variable)
    flags, trained = iter(chosen.flags), set[tuple[Any, ...]]()
    for path, leaf in variables:
        if True in [next(flags) for _ in jax.tree.leaves(leaf)]:
            trained.add(tuple(path_parts(path)))
    return cast(Tree, nnx.filter_state(filled, lambda path, _: path in trained))


def _name(loss: StepLoss) -> str:
    return getattr(loss, "__name__", "loss")


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _is_variable(leaf: object) -> bool:
    return isinstance(leaf, nnx.Variable)


def _is_object(node: object) -> bool:
    return isinstance(node, nnx.Pytree)


def _has_objects(tree: Tree) -> bool:
    return any(map(_is_object, jax.tree.leaves(tree, is_leaf=_is_object)))
