"""What does a loss compute, and what does its gradient? The door between JAX and the planner.

`trace` calls the user's loss once on abstract arrays. The jaxpr that comes back is the program that
will run (`Traced.rewrite` evaluates it again, with constraints placed and layers rematerialised);
its graph, and the graphs of value-and-gradient under each remat policy, are what is planned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.annotation.frozen import freeze
from shardlib.annotation.model import Model, PureLoss
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.axes import LogicalAxes
from shardlib.errors import AnnotationError, ShardlibError, TracingError, raise_all
from shardlib.functions.attention import Attention
from shardlib.functions.kernels import Wanted
from shardlib.graph import Graph
from shardlib.graph.check import check
from shardlib.graph.kernels import KINDS
from shardlib.graph.problem import STATE, InputDim, Parameter, Problem, StepGraph
from shardlib.graph.prune import prune
from shardlib.graph.rows import Dependence, Rows
from shardlib.propagation.pieces import in_pieces
from shardlib.tracing.batch import check_counts, describe_batch, require_rows, tokens_of
from shardlib.tracing.jaxpr_to_graph import dtype_name, graph_from_jaxpr, graph_from_program
from shardlib.tracing.program import Program, called, flatten, has_matmul, with_frozen
from shardlib.tracing.rewriting.fold import Folded, fold
from shardlib.tracing.rewriting.interpreter import Place, Walk, check_policy, evaluate_program
from shardlib.tracing.rows.proof import Inputs, Names, prove, prove_parts
from shardlib.tracing.unchanged import unchanged


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A loss as a program.

    Attributes:
        closed_jaxpr: the `PureLoss` over the leaves of params, then state, then batch.
        program: the same with jit calls inlined and values numbered.
        in_tree: structure of (params, state, batch).
        out_tree: structure of (loss, (metrics, new state)).
        problem: what is to be planned.
        model: what was traced: the given model, with state that its loss does not change among its
            parameters.
        rows_in: number of microbatches -> how the results depend on the rows, by the trace of one
            of them. Traces.
    """

    closed_jaxpr: Any
    program: Program
    in_tree: Any
    out_tree: Any
    problem: Problem
    model: Model
    rows_in: Callable[[int], Rows]

    def rewrite(self, place: Place | None = None, remat: str = "none") -> PureLoss:
        """The loss, evaluated again with a hand on every value.

        Args:
            place: see `interpreter.evaluate`; the paths are those of the ops of `problem.forward`.
            remat: "none", "full" or "dots".

        Returns:
            (params, state, batch) -> (loss, (metrics, new state)), for arrays of the traced shapes.

        Raises:
            TracingError: the policy is unknown; when called, the trees or shapes are not those that
                were traced.
        """
        walk = Walk(place=place, remat=check_policy(remat))

        def rewritten(params: Tree, state: Tree, batch: Tree) -> Any:
            leaves, tree = jax.tree.flatten((params, state, batch))
            self._check(leaves, tree)
            return jax.tree.unflatten(self.out_tree, evaluate_program(self.program, leaves, walk))

        return rewritten

    def _check(self, leaves: Sequence[Any], tree: Any) -> None:
        if tree != self.in_tree:
            raise TracingError(
                "the loss was traced for (params, state, batch) of structure\n "
                f" {self.in_tree}\nand called with\n  {tree}"
            )
        values = [self.problem.forward.values[index] for index in self.problem.forward.inputs]
        failures = [
            f"{value.path}: {value.dtype}{list(value.shape)} traced,"
            f" {dtype_name(leaf)}{list(jnp.shape(leaf))} given"
            for value, leaf in zip(values, leaves, strict=True)
            if (value.shape, value.dtype) != (jnp.shape(leaf), dtype_name(leaf))
        ]
        if failures:
            raise_all(
                TracingError,
                "arrays differ from those that the loss was traced for",
                failures,
                hint="trace again for the new shapes",
            )


def trace(
    model: Model,
    loss: Callable[..., Any],
    batch: Tree,
    *,
    batch_axes: Tree = None,
    optimizer: Any = None,
    policies: Sequence[str] = ("none", "full", "dots"),
    rows: str = "prove",
) -> Traced:
    """Traces a loss and its gradient.

    Args:
        model: from a front end in `annotation/`.
        loss: the user's loss, as `model.bind` takes it.
        batch: pytree of arrays or `jax.ShapeDtypeStruct`, global sizes.
        batch_axes: pytree of tuples of logical names, like `batch`; by default the leading dim is
            "batch", and the second dim of integer arrays of rank 2 is "seq".
        optimizer: an optax transformation; counts the bytes of its state.
        rows: "prove" how the loss depends on the rows of the batch, or take it to be their "mean".
        policies: remat policies to make step graphs for; those other than "none" are left out where
            no layer repeats.

    Raises:
        BatchError: names or leading sizes do not fit the batch, or an array has more elements than
            can be counted.
        AnnotationError: the model names dims of a parameter that it does not have.
        TracingError: the loss does not trace, or is no float scalar.
    """
    described = describe_batch(batch, batch_axes)
    require_rows(described)
    shapes = (abstract(model.params), abstract(model.state), abstract(batch))
    closed, out_shape = _trace_loss(model, loss, shapes)
    program = flatten(closed)
    settled = freeze(model, _constant_state(program, shapes))
    if settled is not model:
        model, shapes = settled, (abstract(settled.params), abstract(settled.state), shapes[2])
        closed, out_shape = _trace_loss(model, loss, shapes)
        program = flatten(closed)
    inputs = _inputs(model, shapes)
    forward = graph_from_program(program, inputs)
    check_counts(
        (value.path or f"a value of {model.name}", value.shape) for value in forward.values
    )
    count = len(jax.tree.leaves(shapes[0]))
    program = with_frozen(
        program, [i for i, trained in enumerate(model.partition.flags) if not trained]
    )
    folded = fold(
        program,
        *(
            {i for i, (_, role) in enumerate(inputs[:count]) if role == one}
            for one in ("parameter", "frozen")
        ),
    )
    repeated = bool(folded.loops) or any(
        e.name == "scan" and has_matmul(e.eqn) for e in program.equations
    )
    steps = {
        policy: _step(folded, inputs, policy)
        for policy in map(check_policy, policies)
        if policy == "none" or repeated
    }
    proven = _rows(model, loss, shapes, closed, out_shape, described, rows)
    problem = Problem(
        model=model.name,
        forward=forward,
        steps=steps,
        parameters=_parameters(model, optimizer),
        batch=described,
        state_bytes=sum(forward.values[i].bytes for i in forward.inputs_of("state")),
        tokens=tokens_of(described),
        compute_dtype=_compute_dtype(forward),
        functions=frozenset(form.kind for form, _ in called(closed)),
        without_kernel=_without_kernel(closed),
        rows=proven(1),
    )
    return Traced(
        closed_jaxpr=closed,
        program=program,
        in_tree=jax.tree.structure(shapes),
        out_tree=jax.tree.structure(out_shape),
        problem=in_pieces(problem),
        model=model,
        rows_in=proven,
    )


def rows_of(described: tuple[Any, ...]) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """For each array of a described batch its dim of rows, None where it has none; and the numbers
    of rows that there are.
    """
    dims = tuple(axes.index("batch") if "batch" in axes else None for _, _, _, axes in described)
    return dims, tuple(
        sorted(
            {
                shape[dim]
                for dim, (_, shape, _, _) in zip(dims, described, strict=True)
                if dim is not None
            }
        )
    )


def result_names(out_shape: Any) -> Names:
    """What the results of a loss are called, for (loss, (metrics, state))."""
    _, (metrics, state) = out_shape
    return Names(
        metrics=tuple(path for path, _ in named(metrics, "")),
        states=tuple(path for path, _ in named(state, "")),
    )


def _rows(
    model: Model,
    loss: Callable[..., Any],
    shapes: tuple[Tree, Tree, Tree],
    closed: Any,
    out_shape: Any,
    described: tuple[Any, ...],
    how: str,
) -> Callable[[int], Rows]:
    """How the loss depends on the rows of the batch: for a number of microbatches, by the trace of
    one of them, and for 1, by that of another batch.
    """
    if how not in ("prove", "mean"):
        raise TracingError(
            f"rows={how!r} is not known\nTry: 'prove', or 'mean' for a loss that is the mean over"
            " the rows of a batch, which then is not checked"
        )
    dims, sizes = rows_of(described)
    if how == "mean" or len(sizes) == 0:
        return lambda _: Rows(loss=Dependence(kind="mean"), asserted=True)
    if len(sizes) > 1:
        return lambda _: Rows(
            loss=Dependence(
                kind="coupled",
                why=(
                    "arrays of the batch have different numbers of rows,"
                    f" {', '.join(map(str, sizes))}"
                ),
            )
        )
    (size,), (params, state, batch) = sizes, shapes
    inputs, names = (
        Inputs(
            parameters=len(jax.tree.leaves(params)), states=len(jax.tree.leaves(state)), dims=dims
        ),
        result_names(out_shape),
    )

    def at(number: int) -> Any:
        return jax.make_jaxpr(model.bind(loss))(params, state, with_rows(batch, dims, number))

    return lambda parts: (
        prove(closed, at, inputs, names, size).rows
        if parts == 1
        else prove_parts(closed, at, inputs, names, size, parts)
    )


def with_rows(batch: Tree, dims: Sequence[int | None], number: int) -> Tree:
    """A batch with another number of rows."""
    leaves, structure = jax.tree.flatten(batch)

    def sized(leaf: Any, dim: int | None) -> Any:
        return (
            leaf
            if dim is None
            else jax.ShapeDtypeStruct(
                (*leaf.shape[:dim], number, *leaf.shape[dim + 1 :]), leaf.dtype
            )
        )

    return structure.unflatten([sized(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)])


def _constant_state(program: Program, shapes: tuple[Tree, Tree, Tree]) -> frozenset[str]:
    """Paths of floating-point arrays of the model state that the loss hands on as they came."""
    leaves, first = named(shapes[1], ""), len(jax.tree.leaves(shapes[0]))
    kept = unchanged(
        program,
        range(first, first + len(leaves)),
        range(len(program.outputs) - len(leaves), len(program.outputs)),
    )
    return frozenset(
        path for i, (path, leaf) in enumerate(leaves) if first + i in kept and trainable(leaf)
    )


def abstract(tree: Tree) -> Tree:
    """Shapes and dtypes of a tree of arrays, without shardings."""

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        x = x if hasattr(x, "dtype") else jnp.asarray(x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    return jax.tree.map(leaf, tree)


def _trace_loss(
    model: Model, loss: Callable[..., Any], shapes: tuple[Tree, Tree, Tree]
) -> tuple[Any, Any]:
    try:
        closed, out_shape = jax.make_jaxpr(model.bind(loss), return_shape=True)(*shapes)
    except ShardlibError:
        raise
    except Exception as error:
        arrays = ", ".join(
            f"{path} {dtype_name(leaf)}{list(leaf.shape)}"
            for path, leaf in named(shapes[2], "batch")
        )
        raise TracingError(
            f"the loss {_name(loss)} of model {model.name!r} could not be traced:"
            f" {type(error).__name__}: {error}\nIt was called with the model and a batch of"
            f" {arrays or 'no arrays'}."
        ) from error
    value = out_shape[0]
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        raise TracingError(
            f"the loss {_name(loss)} returned {dtype_name(value)}{list(value.shape)}; a loss is one"
            " floating-point number\nTry: take the mean, jnp.mean(...)"
        )
    return closed, out_shape


def _without_kernel(closed: Any) -> tuple[tuple[str, str], ...]:
    """Kernels of attention that cannot compute some call of it, and why not."""
    wanted = [
        Wanted.by(form, avals) for form, avals in called(closed) if isinstance(form, Attention)
    ]
    return tuple(
        (kind, why)
        for kind in KINDS
        for why in [one.why_not(kind) for one in wanted if one.why_not(kind)][:1]
    )


def _name(function: Callable[..., Any]) -> str:
    return repr(getattr(function, "__qualname__", type(function).__name__))


def named(tree: Tree, prefix: str) -> list[tuple[str, Any]]:
    """(dotted path, leaf) in tree order; `prefix` goes before every path."""
    return [
        (".".join(filter(None, (prefix, path_text(path)))), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _inputs(model: Model, shapes: tuple[Tree, Tree, Tree]) -> list[tuple[str, str]]:
    """(path, role) of every input: parameters go by their own path, state and batch behind these
    words. State that is floating-point is used as frozen parameters are.
    """
    params, state, batch = shapes
    found = [
        (path or "params", "parameter" if trained else "frozen")
        for (path, _), trained in zip(named(params, ""), model.partition.flags, strict=True)
    ]
    found += [
        (path, "frozen" if trainable(leaf) else "state") for path, leaf in named(state, STATE)
    ]
    return found + [(path, "batch") for path, _ in named(batch, "batch")]


def trainable(leaf: Any) -> bool:
    """Whether a leaf could have a gradient."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _step(folded: Folded, inputs: Sequence[tuple[str, str]], policy: str) -> StepGraph:
    """The graph of value-and-gradient under one remat policy."""
    sources = [
        InputDim(paths=tuple(inputs[i][0] for i in positions), stacked=at in folded.stacks)
        for at, positions in enumerate(folded.inputs)
    ]
    roles = [inputs[positions[0]][1] for positions in folded.inputs]
    trained = [at for at, role in enumerate(roles) if role == "parameter"]

    def value(parameters: list[Any], others: list[Any]) -> tuple[Any, list[Any]]:
        ours, theirs = iter(parameters), iter(others)
        args = [next(ours) if role == "parameter" else next(theirs) for role in roles]
        first, *rest = folded.evaluate(args, remat=policy)
        return first, rest

    def step(*args: Any) -> tuple[Any, Any]:
        parameters, others = (
            [args[i] for i in trained],
            [arg for arg, role in zip(args, roles, strict=True) if role != "parameter"],
        )
        return jax.value_and_grad(value, has_aux=True)(parameters, others)

    closed = jax.make_jaxpr(step)(*folded.avals())
    graph = prune(
        graph_from_jaxpr(
            closed, [(source.paths[0], role) for source, role in zip(sources, roles, strict=True)]
        )
    )
    check(graph)
    return StepGraph(
        graph=graph,
        inputs=tuple(sources),
        gradients=graph.outputs[len(graph.outputs) - len(trained) :],
    )


def _parameters(model: Model, optimizer: Any) -> tuple[Parameter, ...]:
    leaves = [(path or "params", leaf) for path, leaf in named(abstract(model.params), "")]
    roles = ["trained" if trained else "frozen" for trained in model.partition.flags]
    extra, arrays = _state_bytes(
        model,
        optimizer,
        [leaf for leaf, role in zip(leaves, roles, strict=True) if role == "trained"],
    )
    updated = [
        (path, leaf) for path, leaf in named(abstract(model.state), STATE) if trainable(leaf)
    ]
    named_axes = {
        **model.axes,
        **{f"{STATE}.{path}": axes for path, axes in model.state_axes.items()},
    }
    failures: list[str] = []
    found: list[Parameter] = []
    for (path, leaf), role in zip(
        [*leaves, *updated], [*roles, *["updated"] * len(updated)], strict=True
    ):
        axes: LogicalAxes = tuple(named_axes.get(path, (None,) * len(leaf.shape)))
        if len(axes) != len(leaf.shape):
            failures.append(f"{path}: {len(axes)} names {axes} for shape {tuple(leaf.shape)}")
            continue
        found.append(
            Parameter(
                path=path,
                shape=tuple(leaf.shape),
                dtype=dtype_name(leaf),
                axes=axes,
                state_bytes_per_element=extra.get(path, 0) / max(1, math.prod(leaf.shape)),
                state_arrays=arrays[path],
                role=role,
            )
        )
    if failures:
        raise_all(
            AnnotationError,
            "logical axes do not fit the parameters",
            failures,
            hint="give one name, or None, per dim",
        )
    return tuple(found)


def _state_bytes(
    model: Model, optimizer: Any, leaves: Sequence[tuple[str, Any]]
) -> tuple[Counter[str], Counter[str]]:
    """Bytes and number of arrays of optimizer state of a parameter's shape, per parameter: state
    leaves whose path ends with the parameter's.
    """
    total: Counter[str] = Counter()
    arrays: Counter[str] = Counter()
    if optimizer is None:
        return total, arrays
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves}
    for path, leaf in named(
        jax.eval_shape(optimizer.init, model.partition.trained(abstract(model.params))), ""
    ):
        parts = path.split(".")
        owner = next(
            (
                tail
                for i in range(len(parts))
                if shapes.get(tail := ".".join(parts[i:])) == tuple(leaf.shape)
            ),
            None,
        )
        if owner is not None:
            total[owner] += math.prod(leaf.shape) * leaf.dtype.itemsize
            arrays[owner] += 1
    return total, arrays


def _compute_dtype(graph: Graph) -> str:
    """Dtype of the operands of the matmuls and convolutions with the most FLOPs."""
    flops: Counter[str] = Counter()
    for op in graph.ops:
        if op.category in ("matmul", "convolution"):
            flops[graph.values[op.operands[0]].dtype] += int(op.flops * graph.trips(op.region))
    return flops.most_common(1)[0][0] if flops else "float32"
