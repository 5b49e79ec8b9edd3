"""What does a Flax NNX model look like as a `Model`?

The user's constructor is called abstractly, once, to learn shapes and names. Trained arrays are
what the user's filter says, by default the floating-point `nnx.Param` variables; everything else
(random streams, batch statistics, caches, what is frozen) is model state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib import _jax_compat
from shardlib.annotation.keys import key_of
from shardlib.annotation.model import Free, Model, PureLoss, as_it_is
from shardlib.annotation.names import fitted, optimizer_names, stack_dims, written
from shardlib.annotation.result import loss_and_metrics
from shardlib.annotation.trees.exact import op_by_op
from shardlib.annotation.trees.handed_on import origins
from shardlib.annotation.trees.paths import Tree
from shardlib.annotation.trees.wrt import (
    Filter,
    Predicate,
    base_is_trained,
    nnx_predicate,
    selected,
)
from shardlib.axes import LogicalAxes
from shardlib.errors import AnnotationError, raise_all
from shardlib.jax_types import Index, KeyPath
from shardlib.report import Finding


def _trained(path: KeyPath, value: Any) -> bool:
    return isinstance(value, nnx.Param) and jnp.issubdtype(value.dtype, jnp.inexact)


def from_nnx(
    constructor: Callable[..., nnx.Module], wrt: Filter = None, free: Free = as_it_is
) -> Model:
    """Reads a module class, or a function, that takes `nnx.Rngs`.

    Args:
        wrt: a filter of Flax that says which variables are trained; None for all parameters.
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
    """What is trained, as a filter that goes by paths."""
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
    """The logical axes of floating-point variables by dotted path, and what the user should know of
    them.
    """
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
    """The module, whose attributes that are arrays are data while it is traced, too: Flax (0.12)
    takes those for static that are no concrete arrays yet.
    """
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Module):
            for name, value in tuple(vars(node).items()):
                if isinstance(value, jax.Array) and not nnx.is_data(value):
                    setattr(node, name, nnx.data(value))
    return module


def _is_of_a_key(build: Callable[..., Tree]) -> bool:
    """Whether what fails with streams of nnx makes arrays of a key of JAX."""
    try:
        return bool(jax.tree.leaves(jax.eval_shape(build, jax.random.key(0))))
    except Exception:  # it fails for another reason, which is told
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
        """The variables of `self.paths` of a state as plain arrays; variables that were added since
        are left out.
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
        self.graph, self.params, self.state, self.trained = (
            graph,
            _Form(params),
            _Form(state),
            trained,
        )

    def rebuild(self, params: Tree, state: Tree) -> nnx.Module:
        """The user's module around the given arrays."""
        with _jax_compat.unsharded_variables():
            return nnx.merge(self.graph, self.params.state(params), self.state.state(state))

    def bind(self, loss: Callable[..., Tree]) -> PureLoss:
        """The user's loss as a pure function."""

        def called(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
            """The result of the loss, and its params afterwards."""
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
        """Refuses a loss that assigns to trained parameters, which the step of the optimizer would
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
