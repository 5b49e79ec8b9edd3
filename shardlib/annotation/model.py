"""The user's model read as a `Model`: of Flax, Linen and NNX, or a pytree, with or without state.

`module.apply(..., mutable=["batch_stats"])` returns updates: a mapping from collections to their
new variables. They are distinguished from metrics by structure alone: an entry with the name of a
collection of the model, and its variables, is an update; metrics are arrays. Anything else raises
an error, so that no statistics are lost silently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, unfreeze
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardlib import _jax_compat
from shardlib.annotation.names import (
    Free,
    Model,
    PureLoss,
    as_it_is,
    fitted,
    key_of,
    loss_and_metrics,
    names_of_leaves,
    optimizer_names,
    scalar_and_metrics,
    stack_dims,
    written,
)
from shardlib.annotation.trees import (
    Filter,
    Predicate,
    SplitTree,
    Tree,
    base_is_trained,
    frozen_leaves,
    is_array,
    nnx_predicate,
    op_by_op,
    origins,
    path_text,
    selected,
)
from shardlib.errors import AnnotationError, TracingError, raise_all
from shardlib.findings import Finding
from shardlib.jax_types import Index, KeyPath, Metrics, Value
from shardlib.layout import INNER_AXES, LogicalAxes

#: Results that a loss may return; (metrics, updates) may also be in the other order.
FORMS = (
    "loss",
    "(loss, metrics)",
    "(loss, updates)",
    "(loss, metrics, updates)",
    "(loss, (metrics, updates))",
    '(loss, {"metrics": metrics, **updates})',
    "(loss, {**metrics, **updates})",
)


def loss_metrics_and_updates(
    result: Tree, state: Tree, unboxed: Callable[[Tree], Tree]
) -> tuple[Tree, dict[str, Tree], dict[str, Tree]]:
    """The value, metrics and updates of a Linen loss."""
    value, *parts = result if isinstance(result, tuple) else (result,)
    if len(parts) == 1 and isinstance(parts[0], tuple):
        parts = list(parts[0])
    if len(parts) > 2 or not all(isinstance(part, Mapping) for part in parts):
        _refused(result, state, [f"found {_described(result)}"])
    metrics: dict[str, Any] = {}
    updates: dict[str, Tree] = {}
    failures: list[str] = []
    kinds: list[str] = []
    for part in parts:
        named_metrics, collections, wrong = _sorted(part, state, unboxed)
        failures += wrong + [
            f"{name!r} is returned twice"
            for name in (*named_metrics, *collections)
            if name in metrics or name in updates
        ]
        kinds += (
            ["both" if named_metrics and collections else "metrics" if named_metrics else "updates"]
            if named_metrics or collections
            else []
        )
        metrics, updates = {**metrics, **named_metrics}, {**updates, **collections}
    if len(parts) == 2 and kinds in (
        ["updates", "updates"],
        ["metrics", "metrics"],
        ["both", "both"],
    ):
        failures.append(f"two mappings of {kinds[0]}")
    if failures:
        _refused(result, state, failures)
    return *scalar_and_metrics(value, metrics, result), updates


def _sorted(
    part: Mapping[str, Any], state: Tree, unboxed: Callable[[Tree], Tree]
) -> tuple[dict[str, Any], dict[str, Tree], list[str]]:
    """(metrics, updates, errors) of one mapping."""
    metrics: dict[str, Any] = {}
    updates: dict[str, Tree] = {}
    wrong: list[str] = []
    for name, entry in part.items():
        if name in state:
            updates[name] = unboxed(
                unfreeze(entry) if isinstance(entry, (FrozenDict, dict)) else entry
            )
            wrong += _misfits(name, updates[name], state[name])
        elif name == "metrics" and isinstance(entry, Mapping):
            metrics.update(entry)
        elif name == "params":
            wrong.append("'params' are what the optimizer trains; a loss cannot return them")
        elif isinstance(entry, Mapping) and state:
            wrong.append(
                f"{name!r} holds variables and is not a collection that the model is initialised"
                " with"
            )
        else:
            metrics[name] = entry
    wrong += [
        f"the metric {name!r} is a {type(entry).__name__}"
        for name, entry in metrics.items()
        if isinstance(entry, (tuple, list))
    ]
    return metrics, updates, wrong


def _misfits(name: str, returned: Tree, expected: Tree) -> list[str]:
    """The differences between a returned collection and that of the model."""

    def spelt(tree: Tree) -> dict[str, str]:
        return {
            path_text((jax.tree_util.DictKey(name), *path)): (
                f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__
            )
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    ours, theirs = spelt(expected), spelt(returned)
    return [
        f"{path}: {theirs.get(path, 'nothing')} returned, the model has"
        f" {ours.get(path, 'no such variable')}"
        for path in sorted({*ours, *theirs})
        if ours.get(path) != theirs.get(path)
    ]


def _described(result: Tree) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(map(_described, result))})"
    return (
        f"mapping of {', '.join(map(str, result)) or 'nothing'}"
        if isinstance(result, Mapping)
        else type(result).__name__
    )


def _refused(result: Tree, state: Tree, failures: list[str]) -> NoReturn:
    names = ", ".join(map(repr, state)) or "none beside 'params'"
    raise_all(
        TracingError,
        "the loss returned what is neither metrics nor updated collections of the Linen model (it"
        f" has {names})",
        failures,
        hint=(
            f"one of {'; '.join(FORMS)}, with metrics a dict of scalars and updates what"
            " module.apply(..., mutable=[...]) returns, of collections that the model has from its"
            " initialisation"
        ),
    )


# --------------------------------------------------------------------------------------------------
# A Flax Linen model as a `Model`.
#
# Boxes are read (see `names.py`) and removed. The collection "params" is trained; other collections
# ("batch_stats", ...) are model state. The user's loss takes the params tree; for a model with
# state it takes the whole variables dict, and also returns the mutated collections; see `linen`.


@dataclass(frozen=True, kw_only=True)
class LinenInit:
    """A Linen module and the inputs of its call; made by `linen`."""

    module: nn.Module
    inputs: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


def linen(module: nn.Module, *sample_inputs: Tree, **options: object) -> LinenInit:
    """Describes how a Linen model is initialised.

    A loss takes the params, or, if the model has other collections, the whole variables dict.
    Collections that change in a training step (statistics of `nn.BatchNorm`) are returned by the
    loss and become the state of the next step:

        def loss(variables, batch):
            logits, updates = module.apply(
                variables, batch["x"], train=True, mutable=["batch_stats"]
            )
            return cross_entropy(logits, batch["y"]), updates

    It may return `loss`, `(loss, metrics)`, `(loss, updates)`, `(loss, metrics, updates)`, `(loss,
    (metrics, updates))` or one mapping for both, `(loss, {"metrics": metrics, **updates})` or
    `(loss, {**metrics, **updates})`. An entry with the name of a collection of the model must have
    exactly its variables and is an update; metrics are arrays under other names; anything else is
    an error. Collections that are not returned stay unchanged.

    Args:
        module: the module, unbound.
        sample_inputs: positional arguments of its call, arrays or `jax.ShapeDtypeStruct`; only
            their shapes and dtypes matter.
        options: keyword arguments of the module's call, e.g. `train=False`; kept static.

    Returns:
        The description, for `init` of `shardlib.plan`, `compile` and the like; nothing is
        initialised yet.

    Raises:
        AnnotationError: `module` is not a Linen module.
    """
    if not isinstance(module, nn.Module):
        raise AnnotationError(
            f"shardlib.linen needs a flax.linen.Module, found {type(module).__name__}"
        )
    return LinenInit(module=module, inputs=sample_inputs, options=options)


@_jax_compat.unsharded_variables()
def from_linen(described: LinenInit, wrt: Filter = None, free: Free = as_it_is) -> Model:
    """Reads a Linen model.

    Args:
        wrt: predicate over paths of the collection "params" that selects the trained ones; None for
            all.
    """
    name = described.module.name or type(described.module).__name__

    @free
    def boxed(seed: Index) -> dict[str, Any]:
        inputs = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x,
            described.inputs,
        )
        return unfreeze(described.module.init(key_of(seed), *inputs, **described.options))

    @_jax_compat.unsharded_variables()
    def init(seed: Index) -> tuple[Tree, Tree]:
        variables = nn.unbox(boxed(seed))
        return variables.pop("params"), variables

    try:
        abstract = jax.eval_shape(lambda: boxed(0))
    except Exception as error:
        raise AnnotationError(
            f"Linen module {name!r} failed to initialise on {len(described.inputs)} sample inputs: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not abstract.get("params"):
        raise AnnotationError(
            f"Linen module {name!r} has no params; collections found:"
            f" {', '.join(abstract) or 'none'}"
        )
    boxes = dict(abstract)
    boxed_params = boxes.pop("params")
    params, state = nn.unbox(boxed_params), nn.unbox(boxes)
    axes, findings = fitted(params, written(boxed_params))
    state_axes, others = fitted(state, written(boxes))
    return Model(
        name=name,
        init=op_by_op(init),
        params=params,
        state=state,
        axes=axes,
        bind=_binder(bool(jax.tree.leaves(state))),
        rebuild=lambda params, state: (
            {"params": params, **state} if jax.tree.leaves(state) else params
        ),
        findings=(*findings, *others),
        frozen=frozen_leaves(wrt, params, "Linen"),
        state_axes=state_axes,
    )


def _binder(stateful: bool) -> Callable[[Callable[..., Tree]], PureLoss]:
    def bind(loss: Callable[..., Tree]) -> PureLoss:
        @_jax_compat.unsharded_variables()
        def pure(params: Tree, state: Tree, batch: Tree) -> Tree:
            result = loss({"params": params, **state} if stateful else params, batch)
            value, metrics, updates = loss_metrics_and_updates(result, state, nn.unbox)
            return value, (metrics, {**state, **updates})

        return pure

    return bind


# --------------------------------------------------------------------------------------------------
# A Flax NNX model as a `Model`.
#
# The user's constructor is called abstractly, once, for shapes and names. The user's filter selects
# the trained arrays, by default the floating-point `nnx.Param` variables; everything else (random
# streams, batch statistics, caches, frozen parameters) is model state.


def _trained(path: KeyPath, value: Any) -> bool:
    return isinstance(value, nnx.Param) and jnp.issubdtype(value.dtype, jnp.inexact)


def from_nnx(
    constructor: Callable[..., nnx.Module], wrt: Filter = None, free: Free = as_it_is
) -> Model:
    """Reads a module class, or a function, that takes `nnx.Rngs`.

    Args:
        wrt: a Flax filter that selects the trained variables; None for all parameters.
    """
    name = getattr(constructor, "__name__", type(constructor).__name__)
    build = _with_rngs(constructor, name)
    with _jax_compat.unsharded_variables():
        graph, variables = _abstract(build, name, free)
        trained = _chosen(variables, wrt)
        params, state = nnx.split_state(variables, trained, ...)
    stacks = dict(
        zip(
            (path for path, _ in nnx.to_flat_state(variables)),
            stack_dims(lambda: nnx.state(_with_arrays(build(nnx.Rngs(0)))), variables),
            strict=True,
        )
    )
    trees = _Trees(graph, params, state, trained)
    axes, findings = _names(params, trees.params, stacks)
    state_axes, others = _names(state, trees.state, stacks)
    adapter_findings = base_is_trained(dict(nnx.to_flat_state(params))) if wrt is None else ()

    def init(seed: Index) -> tuple[Tree, Tree]:
        with _jax_compat.unsharded_variables():
            module = _with_arrays(build(nnx.Rngs(key_of(seed))))
            _, *parts = nnx.split(module, trained, ...)
        return trees.params.plain(parts[0]), trees.state.plain(parts[1])

    return Model(
        name=name,
        init=op_by_op(free(init)),
        params=trees.params.abstract,
        state=trees.state.abstract,
        axes=axes,
        bind=trees.bind,
        rebuild=trees.rebuild,
        findings=(*findings, *others, *adapter_findings, *optimizer_names(params)),
        state_axes=state_axes,
        evaluating=_in_eval_mode,
    )


def _in_eval_mode(module: nnx.Module) -> nnx.Module:
    """The module with `deterministic` and `use_running_average` set wherever it has them."""
    module.eval()
    return module


def _chosen(state: nnx.State, wrt: Filter) -> Predicate:
    """The filter of trained variables, as a predicate over paths."""
    if wrt is None:
        return _trained
    variables = dict(nnx.to_flat_state(state))
    selected_paths = selected(
        nnx_predicate(wrt),
        variables,
        {path: type(variable).__name__ for path, variable in variables.items()},
    )
    return lambda path, value: path in selected_paths


def _names(
    state: nnx.State, form: _Form, stacks: Mapping[KeyPath, tuple[int, ...]]
) -> tuple[dict[str, LogicalAxes], tuple[Finding, ...]]:
    """The logical axes of floating-point variables by dotted path, and findings about them."""
    names = [
        entry if jnp.issubdtype(leaf.dtype, jnp.inexact) else None
        for entry, leaf in zip(written(state), jax.tree.leaves(state), strict=True)
    ]
    return fitted(form.abstract, names, [stacks[path] for path in form.paths])


def _with_rngs(constructor: Callable[..., Tree], name: str) -> Callable[[nnx.Rngs], Tree]:
    try:  # the metaclass of nnx modules hides the constructor's own signature
        described = constructor.__init__ if inspect.isclass(constructor) else constructor
        parameters = dict(inspect.signature(described).parameters)
    except (TypeError, ValueError):
        return constructor
    if inspect.isclass(constructor):
        parameters.pop(next(iter(parameters)), None)
    required = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    others = [parameter for parameter in required if parameter != "rngs"]
    if others and required != others[:1]:
        raise AnnotationError(
            f"init {name!r} needs {', '.join(required)}; shardlib calls it with nnx.Rngs alone\n"
            f"Try: lambda rngs: {name}({', '.join(f'{parameter}=...' for parameter in others)},"
            " rngs=rngs)"
        )
    rngs = parameters.get("rngs")
    if rngs is not None and rngs.kind is not rngs.POSITIONAL_ONLY:
        return lambda streams: constructor(rngs=streams)  # pyright: ignore[reportCallIssue]
    return constructor


def _abstract(
    build: Callable[[nnx.Rngs], Tree], name: str, free: Free
) -> tuple[nnx.GraphDef[Any], nnx.State]:
    """The module as its graph and an abstract state: variables, and arrays that are attributes."""
    seen: list[nnx.GraphDef[Any]] = []

    def checked() -> nnx.State:
        module = build(nnx.Rngs(0))
        if not isinstance(module, nnx.Module):
            raise AnnotationError(
                f"init {name!r} returned {type(module).__name__}, expected an nnx.Module\nTry:"
                " shardlib.linen(module, *sample_inputs) for Linen, shardlib.tree(init, axes) for"
                " plain pytrees and modules of Equinox"
            )
        graph, state = nnx.split(_with_arrays(module))
        seen.append(graph)
        return state

    try:
        state = jax.eval_shape(free(checked))
        return seen[-1], state
    except AnnotationError:
        raise
    except Exception as error:
        hint = (
            f"\nTry: shardlib.tree({name}), as it takes a key and makes a tree of arrays"
            if _is_of_a_key(build)
            else ""
        )
        raise AnnotationError(
            f"init {name!r} failed when called with nnx.Rngs(0): {type(error).__name__}:"
            f" {error}{hint}"
        ) from error


def _with_arrays(module: nnx.Module) -> nnx.Module:
    """The module with array attributes marked as data while it is traced: Flax (0.12) treats
    attributes that are not yet concrete arrays as static.
    """
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Module):
            for name, value in tuple(vars(node).items()):
                if isinstance(value, jax.Array) and not nnx.is_data(value):
                    setattr(node, name, nnx.data(value))
    return module


def _is_of_a_key(build: Callable[..., Tree]) -> bool:
    """True if a constructor that fails with nnx streams works with a JAX key."""
    try:
        return bool(jax.tree.leaves(jax.eval_shape(build, jax.random.key(0))))
    except Exception:  # it fails for another reason, which is reported
        return False


class _Form:
    """An `nnx.State` and its plain form, nested dicts of arrays with the same leaves in the same
    order.
    """

    def __init__(self, state: nnx.State):
        self.structure = jax.tree.structure(state)
        self.paths = tuple(path for path, _ in nnx.to_flat_state(state))
        self.abstract: Tree = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.to_pure_dict(state)
        )
        flat = tuple(
            tuple(key.key for key in path)
            for path, _ in jax.tree_util.tree_leaves_with_path(self.abstract)
        )
        assert flat == self.paths, (flat, self.paths)

    def state(self, plain: Tree) -> nnx.State:
        """The plain tree as an `nnx.State`."""
        return jax.tree.unflatten(self.structure, jax.tree.leaves(plain))

    def plain(self, state: nnx.State) -> Tree:
        """The variables of `self.paths` of a state as plain arrays; variables added since are left
        out.
        """
        variables = dict(nnx.to_flat_state(state))
        lost = [".".join(map(str, path)) for path in self.paths if path not in variables]
        if lost:
            raise AnnotationError(f"the loss removed variables of the model: {', '.join(lost)}")
        return jax.tree.unflatten(
            jax.tree.structure(self.abstract),
            [jax.tree.leaves(variables[path])[0] for path in self.paths],
        )


class _Trees:
    """A split module: the static graph and the two forms of its variables."""

    def __init__(
        self, graph: nnx.GraphDef[Any], params: nnx.State, state: nnx.State, trained: Predicate
    ):
        self.graph = graph
        self.params = _Form(params)
        self.state = _Form(state)
        self.trained = trained

    def rebuild(self, params: Tree, state: Tree) -> nnx.Module:
        """The user's module around the given arrays."""
        with _jax_compat.unsharded_variables():
            return nnx.merge(self.graph, self.params.state(params), self.state.state(state))

    def bind(self, loss: Callable[..., Tree]) -> PureLoss:
        """The user's loss as a pure function."""

        def called(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
            """The result of the loss, and the params after it."""
            module = self.rebuild(params, state)
            with _jax_compat.unsharded_variables():
                value, metrics = loss_and_metrics(loss(module, batch))
                _, assigned, after = nnx.split(module, self.trained, ...)
            return (value, (metrics, self.state.plain(after))), self.params.plain(assigned)

        @_jax_compat.unsharded_variables()
        def pure(params: Tree, state: Tree, batch: Tree) -> Tree:
            result, assigned = called(params, state, batch)
            pairs = zip(jax.tree.leaves(params), jax.tree.leaves(assigned), strict=True)
            if not all(before is after for before, after in pairs):
                self._require_handed_on(called, (params, state, batch))
            return result

        return pure

    def _require_handed_on(self, called: Callable[..., Tree], inputs: Tree) -> None:
        """Raises an error for a loss that assigns to trained parameters, which the optimizer would
        overwrite.
        """
        traced = jax.make_jaxpr(lambda *inputs: called(*inputs)[1])(
            *jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)
        )
        changed = [
            ".".join(map(str, path))
            for number, (path, origin) in enumerate(
                zip(self.params.paths, origins(traced), strict=True)
            )
            if origin != number
        ]
        if changed:
            raise_all(
                AnnotationError,
                "the loss assigns to trained parameters, and what it assigns would be lost",
                [f"{path}: another value after the loss than before" for path in changed],
                hint="keep what the forward pass computes in a variable of another type"
                " (nnx.BatchStat); or bring the whole step: shardlib.compile_step",
            )


# --------------------------------------------------------------------------------------------------
# A pytree model with params and state, as a `Model`.
#
# Haiku's `hk.transform_with_state(f).init` makes `(params, state)`, Equinox's
# `eqx.nn.make_with_state(Module)` makes `(module, state)`. The first is trained, the second is
# changed by the training step itself: batch statistics, averages, counters. The loss takes the
# pair, and returns the state of the next step last.

#: Results that a loss of such a model may return.
STATEFUL_FORMS = "(loss, state) or (loss, metrics, state)"


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """A model and its state, each with the positions of its arrays.

    Attributes:
        model: the leaves of the model.
        state: the leaves of its state, of which all arrays may change.
    """

    model: SplitTree
    state: SplitTree

    @staticmethod
    def of(initialised: Tree, name: str) -> Pair:
        """Reads the result of an initialiser."""
        if not isinstance(initialised, tuple) or len(initialised) != 2:
            raise AnnotationError(
                f"initialiser {name!r} made a {type(initialised).__name__}; with stateful=True it"
                " makes a pair (params, state)\nTry: what hk.transform_with_state(f).init and"
                " eqx.nn.make_with_state(Module) make"
            )
        pair = Pair(model=SplitTree.of(initialised[0]), state=SplitTree.of(initialised[1]))
        if not pair.model.trained:
            raise AnnotationError(
                f"initialiser {name!r} made no floating-point arrays as the first of its pair, of"
                f" {len(pair.model.paths)} leaves\nTry: (params, state), in this order"
            )
        if not pair.arrays:
            raise AnnotationError(
                f"initialiser {name!r} made a state without arrays\nTry: shardlib.tree without"
                " stateful=True"
            )
        return pair

    @property
    def arrays(self) -> tuple[int, ...]:
        """Positions of the arrays of the state among its leaves."""
        return tuple(sorted(self.state.trained + self.state.fixed))

    def split(self, pair: Tree) -> tuple[Tree, Tree]:
        """(trained params, all other arrays by path)."""
        params, constants = self.model.split(pair[0])
        return params, {"model": constants, "state": self._by_path(pair[1])}

    def _by_path(self, state: Tree) -> dict[str, Tree]:
        leaves = jax.tree.leaves(state)
        return {self.state.paths[index]: leaves[index] for index in self.arrays}

    def whole(self, params: Tree, state: Tree) -> Tree:
        """The pair rebuilt from trained params and all other arrays."""
        leaves = [
            self.state.kept[index] if index in self.state.kept else state["state"][path]
            for index, path in enumerate(self.state.paths)
        ]
        return (
            self.model.whole(params, state["model"]),
            jax.tree.unflatten(self.state.structure, leaves),
        )

    def after(self, result: Tree, state: Tree) -> tuple[Value, Metrics, Tree]:
        """The value, metrics and new state of a loss."""
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            returned = (
                f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            )
            raise TracingError(
                f"the loss of a model with state returned {returned}; expected"
                f" {STATEFUL_FORMS}\nTry: return"
                " the new state last, in an evaluation, too"
            )
        self._require_like(result[-1], state["state"])
        value, metrics = loss_and_metrics(result[:-1] if len(result) == 3 else result[0])
        return value, metrics, {**state, "state": self._by_path(result[-1])}

    def _require_like(self, after: Tree, before: dict[str, Tree]) -> None:
        if jax.tree.structure(after) != self.state.structure:
            raise TracingError(
                "the loss returned a state of another structure than it was given:"
                f" {jax.tree.structure(after)}, and not {self.state.structure}\nTry:"
                f" {STATEFUL_FORMS}, with"
                " the state that apply or the module returns"
            )
        arrays = self._by_path(after)
        wrong = [
            f"{path}: {_spelt(arrays[path])}, and not {_spelt(array)}"
            for path, array in before.items()
            if not is_array(arrays[path]) or _spelt(arrays[path]) != _spelt(array)
        ]
        if wrong:
            raise_all(
                TracingError,
                "the loss returned a state whose arrays are not like those it was given",
                wrong,
                hint="the state of every step has the shapes and dtypes of the first",
            )


def _spelt(array: Tree) -> str:
    return f"{array.dtype}{list(array.shape)}" if is_array(array) else type(array).__name__


def bound(pair: Pair) -> Callable[[Callable[..., Tree]], Callable[..., Tree]]:
    """A function from the user's loss to a pure loss."""

    def bind(loss: Callable[..., Tree]) -> Callable[..., Tree]:
        @_jax_compat.unsharded_variables()
        def pure(params: Tree, state: Tree, batch: Tree) -> Tree:
            value, metrics, after = pair.after(loss(pair.whole(params, state), batch), state)
            return value, (metrics, after)

        return pure

    return bind


# --------------------------------------------------------------------------------------------------
# A plain pytree of parameters as a `Model`, and `read`, for an initialiser of any kind.


@dataclass(frozen=True, kw_only=True)
class TreeInit:
    """An initialiser and the names of its arrays; made by `tree`."""

    initialise: Callable[[jax.Array], Tree]
    axes: Tree = None
    stateful: bool = False


def tree(
    initialise: Callable[[jax.Array], Tree], axes: Tree = None, *, stateful: bool = False
) -> TreeInit:
    """Describes a model that is a plain pytree, or a module that is a pytree, like those of
    Equinox.

        shardlib.tree(
            lambda key: eqx.nn.MLP(64, 8, 256, 2, key=key), {"layers.0.weight": ("mlp", "embed")}
        )

    Leaves that are not arrays (activation functions, flags) stay as the initialiser makes them, and
    the loss takes the whole module; in a tree with such leaves, only floating-point arrays are
    trained (`shardlib.annotation.trees`).

    A model with state, as made by `hk.transform_with_state` and `eqx.nn.make_with_state`:

        model = hk.transform_with_state(forward)

        def loss(pair, batch):
            params, state = pair
            logits, state = model.apply(params, state, None, batch["x"])
            return cross_entropy(logits, batch["y"]), state

        shardlib.tree(lambda key: model.init(key, batch["x"]), stateful=True)

    Args:
        initialise: PRNG key -> params, or a module; with `stateful`, a pair (params, state).
        axes: tuples of logical axes, or `PartitionSpec`s, for some of the arrays: a pytree like the
            params, or a mapping from dotted paths. Names in boxes and variables of Flax are read,
            too. With `stateful`, only for the params.
        stateful: whether the initialiser makes a pair (params, state). The loss takes this pair,
            and returns `(loss, state)` or `(loss, metrics, state)` with the state of the next step.

    Returns:
        The description, for `init` of `shardlib.plan`, `compile` and the like; nothing is
        initialised yet.

    Raises:
        AnnotationError: `initialise` is not callable.
    """
    if not callable(initialise):
        raise AnnotationError(
            f"shardlib.tree needs a function key -> params, found {type(initialise).__name__}"
        )
    return TreeInit(initialise=initialise, axes=axes, stateful=stateful)


def from_tree(described: TreeInit, wrt: Filter = None, free: Free = as_it_is) -> Model:
    """Reads a plain pytree model.

    Args:
        wrt: predicate over paths that selects the trained arrays; None for all.
    """
    name = getattr(described.initialise, "__name__", "tree")
    described = replace(
        described, initialise=_jax_compat.unsharded_variables()(free(described.initialise))
    )

    try:
        initialised = made_abstractly(described.initialise)
    except Exception as error:
        raise AnnotationError(
            f"initialiser {name!r} failed when called with jax.random.key(0):"
            f" {type(error).__name__}: {error}"
        ) from error
    shapes = tree = initialised
    if described.stateful:
        pair = Pair.of(initialised, name)
        tree, parts, binding, more = initialised[0], pair, bound(pair), pair.model.findings
    elif not is_plain(jax.tree.leaves(initialised)):
        parts = SplitTree.of(initialised)
        binding, more = _binding(parts.whole), parts.findings
        if not parts.trained:
            raise AnnotationError(
                f"initialiser {name!r} made no floating-point arrays, of {len(parts.paths)} leaves"
            )
    else:
        shapes = tree = (
            jax.eval_shape(lambda: initialised)
            if not jax.tree.leaves(initialised)
            else jax.tree.map(_abstract_leaf, initialised)
        )
        _check_trainable(tree, name, all_trained=wrt is None)
        parts, binding, more = _Whole(), _binding(_Whole().whole), ()
    params, state = parts.split(shapes)

    def init(seed: Index) -> tuple[Tree, Tree]:
        return parts.split(described.initialise(key_of(seed)))

    axes, findings = _named(params, tree, described.axes)
    return Model(
        name=name,
        init=op_by_op(init),
        params=params,
        state=state,
        axes=axes,
        bind=binding,
        rebuild=parts.whole,
        findings=(*findings, *more),
        frozen=frozen_leaves(wrt, params, "pytree"),
    )


class _Whole:
    """A tree of arrays, all of which are parameters."""

    def split(self, tree: Tree) -> tuple[Tree, Tree]:
        """The parameters, and an empty state."""
        return tree, {}

    def whole(self, params: Tree, state: Tree) -> Tree:
        """The tree, which has no other leaves."""
        return params


def _named(
    params: Tree, tree: Tree, axes: Tree
) -> tuple[Mapping[str, LogicalAxes], tuple[Finding, ...]]:
    """The names of the trained arrays: from `axes`, or from boxes and variables of the whole
    tree.
    """
    pairs = zip(names_of_leaves(tree, axes, "params"), written(tree), strict=True)
    names = dict(
        zip(
            (path for path, _ in jax.tree_util.tree_leaves_with_path(tree)),
            (
                written_name if beside_name is None else beside_name
                for beside_name, written_name in pairs
            ),
            strict=True,
        )
    )
    return fitted(params, [names[path] for path, _ in jax.tree_util.tree_leaves_with_path(params)])


def _abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    return (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if is_array(leaf)
        else jax.eval_shape(lambda: jnp.asarray(leaf))
    )


def _check_trainable(params: Tree, name: str, *, all_trained: bool) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise AnnotationError(f"initialiser {name!r} made no arrays")
    fixed = [
        f"{path_text(path)} has dtype {leaf.dtype}"
        for path, leaf in leaves
        if not jax.dtypes.issubdtype(leaf.dtype, jax.numpy.inexact)
    ]
    if fixed and all_trained:
        raise_all(
            AnnotationError,
            f"initialiser {name!r} made arrays that cannot be trained",
            fixed,
            hint="keep constants out of the params (functions may close over them), or say what is"
            " trained with wrt",
        )


def _binding(rebuild: Callable[[Tree, Tree], Tree]) -> Callable[[Callable[..., Tree]], PureLoss]:
    def bind(loss: Callable[..., Tree]) -> PureLoss:
        @_jax_compat.unsharded_variables()
        def pure(params: Tree, state: Tree, batch: Tree) -> Tree:
            value, metrics = loss_and_metrics(loss(rebuild(params, state), batch))
            return value, (metrics, state)

        return pure

    return bind


# --------------------------------------------------------------------------------------------------
# Dispatch to the front end of each kind of model.

#: A callable `nnx.Rngs -> nnx.Module`, a description by `shardlib.linen` or `shardlib.tree`, or a
#: `Model`.
Init = Callable[..., Any] | LinenInit | TreeInit | Model


def _built(init: Any) -> str | None:
    """The class name of a module passed in place of its initialiser; None for an initialiser."""
    built = (
        not isinstance(init, type)
        and not jax.tree_util.all_leaves([init])
        and any(map(is_array, jax.tree.leaves(init)))
    )
    return type(init).__name__ if built and callable(init) else None


def read(init: Init, wrt: Filter = None, *, free: Free = as_it_is) -> Model:
    """Reads a model in any form of `init` that `shardlib.compile` accepts.

    Args:
        wrt: selection of trained arrays, see `shardlib.annotation.trees`; None for all parameters.
    """
    if isinstance(init, Model):
        if wrt is not None:
            raise AnnotationError(
                "init is a model that has been read already, and what it trains with it\nTry: wrt"
                " where the model is read"
            )
        return init
    if isinstance(init, LinenInit):
        return from_linen(init, wrt, free)
    if isinstance(init, TreeInit):
        return from_tree(init, wrt, free)
    if isinstance(init, nn.Module):
        raise AnnotationError(
            f"init is the Linen module {type(init).__name__}, which needs sample inputs\nTry:"
            " shardlib.linen(module, *sample_inputs)"
        )
    if isinstance(init, nnx.Module):
        kind = type(init).__name__
        raise AnnotationError(
            f"init is a {kind} that is built already; shardlib builds it sharded from the"
            f" start\nTry: lambda rngs: {kind}(..., rngs=rngs)"
        )
    if (kind := _built(init)) is not None:
        raise AnnotationError(
            f"init is a {kind} that is built already; shardlib builds it sharded from the"
            f" start\nTry: shardlib.tree(lambda key: {kind}(..., key=key)); its functions and flags"
            " stay as they are (eqx.partition is not needed), and the loss gets the whole module"
        )
    if callable(init):
        return from_nnx(init, wrt, free)  # pyright: ignore[reportArgumentType]
    raise AnnotationError(
        f"init is a {type(init).__name__}; expected a callable nnx.Rngs -> nnx.Module, "
        "shardlib.linen(module, *sample_inputs) or shardlib.tree(key_to_params, axes)"
    )


# --------------------------------------------------------------------------------------------------
# Flax's logical constraints on activations are ignored silently if no rules are set, which is
# reported as a finding. Other layouts: `shardlib.tracing.layouts`.


def no_mesh() -> AbstractContextManager[object]:
    """Unsets any mesh that the caller has set: a plan has its own, and an outer one would leak into
    the trace.
    """
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


def planning_mesh() -> AbstractContextManager[object]:
    """A mesh of one device with all six mesh axes."""
    return jax.sharding.use_abstract_mesh(
        AbstractMesh(
            (1,) * len(INNER_AXES), INNER_AXES, axis_types=(AxisType.Auto,) * len(INNER_AXES)
        )
    )


def is_plain(leaves: Sequence[Tree]) -> bool:
    """True if all leaves are arrays or floats; then all of them are trained."""
    return all(is_array(leaf) or isinstance(leaf, float) for leaf in leaves)


def made_abstractly(initialise: Callable[[jax.Array], Tree]) -> Tree:
    """The result of an initialiser with `jax.ShapeDtypeStruct` for arrays, all other leaves
    unchanged.
    """
    seen: list[tuple[Any, list[Any]]] = []

    def arrays() -> list[Any]:
        leaves, structure = jax.tree.flatten(initialise(jax.random.key(0)))
        seen.append((structure, [None if is_array(leaf) else leaf for leaf in leaves]))
        return [leaf for leaf in leaves if is_array(leaf)]

    abstract = iter(jax.eval_shape(arrays))
    structure, leaves = seen[-1]
    return jax.tree.unflatten(
        structure, [next(abstract) if leaf is None else leaf for leaf in leaves]
    )
