"""What does a loss compute, and what does its gradient? The door between JAX and the planner.

`trace` calls the user's loss once on abstract arrays. The jaxpr that comes back is the program that
will run (`Traced.rewrite` evaluates it again, with constraints placed and layers rematerialised);
its graph, and the graphs of value-and-gradient under each remat policy, are what is planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core as jex

from shardlib.annotation.frozen import freeze
from shardlib.annotation.model import Model, PureLoss
from shardlib.annotation.trees.paths import Tree
from shardlib.errors import BatchError, ShardlibError, TracingError, raise_all
from shardlib.functions.attention import Attention
from shardlib.functions.kernels import Wanted
from shardlib.functions.mapped_axes import found_axes, mapped_finding, whole_batch
from shardlib.graph import Graph
from shardlib.graph.check import check
from shardlib.graph.kernels import KINDS
from shardlib.graph.problem import AttentionCalls, InputDim, Problem, StepGraph
from shardlib.graph.prune import prune
from shardlib.graph.rows import Rows
from shardlib.jax_types import Aval
from shardlib.propagation.pieces import in_pieces
from shardlib.tracing.batch import check_counts, describe_batch, require_rows, tokens_of
from shardlib.tracing.held_arrays import require_none
from shardlib.tracing.jaxpr_to_graph import PlacedLayout, graph_from_jaxpr, translated
from shardlib.tracing.parameters import (
    abstract,
    constant_state,
    described_parameters,
    function_name,
    named,
    named_inputs,
)
from shardlib.tracing.program import Program, called, flatten, has_matmul, with_frozen
from shardlib.tracing.rewriting.fold import Folded, fold
from shardlib.tracing.rewriting.interpreter import evaluate_program
from shardlib.tracing.rewriting.remat_policies import check_policy
from shardlib.tracing.rewriting.walk import Place, Walk
from shardlib.tracing.row_proofs import proven_rows
from shardlib.tracing.trip_counts import dtype_name


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
        layouts: those that the loss brings along, with values of `problem.forward`.
    """

    closed_jaxpr: jex.ClosedJaxpr
    program: Program
    in_tree: jax.tree_util.PyTreeDef
    out_tree: jax.tree_util.PyTreeDef
    problem: Problem
    model: Model
    rows_in: Callable[[int], Rows]
    layouts: tuple[PlacedLayout, ...] = ()

    def rewrite(self, place: Place | None = None, remat: str = "none") -> PureLoss:
        """The loss, evaluated again with a hand on every value.

        Returns:
            (params, state, batch) -> (loss, (metrics, new state)), for arrays of the traced shapes.
        """
        walk = Walk(place=place, remat=check_policy(remat))

        def rewritten(params: Tree, state: Tree, batch: Tree) -> Any:
            leaves, tree = jax.tree.flatten((params, state, batch))
            self._check(leaves, tree)
            return jax.tree.unflatten(self.out_tree, evaluate_program(self.program, leaves, walk))

        return rewritten

    def _check(self, leaves: Sequence[Aval], tree: jax.tree_util.PyTreeDef) -> None:
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
    loss: Callable[..., Tree],
    batch: Tree,
    *,
    batch_axes: Tree = None,
    optimizer: optax.GradientTransformation | None = None,
    policies: Sequence[str] = ("none", "full", "dots"),
    rows: str = "prove",
) -> Traced:
    """Traces a loss and its gradient.

    Args:
        batch_axes: pytree of tuples of logical names, like `batch`; by default the leading dim is
            "batch", and the second dim of integer arrays of rank 2 is "seq".
        optimizer: an optax transformation; counts the bytes of its state.
    """
    described = describe_batch(batch, batch_axes)
    require_rows(described)
    shapes = (abstract(model.params), abstract(model.state), abstract(batch))
    model, mapped, closed, out_shape = _trace_loss(model, loss, shapes)
    settled = freeze(model, constant_state(closed, shapes))
    if settled is not model:
        model, shapes = settled, (abstract(settled.params), abstract(settled.state), shapes[2])
        model, _, closed, out_shape = _trace_loss(model, loss, shapes)
    program = flatten(closed)
    inputs = named_inputs(model, shapes)
    translation = translated(program, inputs)
    forward = replace(
        translation.graph, findings=(*translation.graph.findings, *mapped_finding(mapped))
    )
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
            {i for i, (_, role) in enumerate(inputs[:count]) if role == wanted_role}
            for wanted_role in ("parameter", "frozen")
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
    proven = proven_rows(model, loss, shapes, closed, out_shape, described, rows)
    problem = Problem(
        model=model.name,
        forward=forward,
        steps=steps,
        parameters=described_parameters(model, optimizer),
        batch=described,
        state_bytes=sum(forward.values[i].bytes for i in forward.inputs_of("state")),
        tokens=tokens_of(described),
        compute_dtype=_compute_dtype(forward),
        functions=frozenset(form.kind for form, _ in called(closed)),
        attention=_attention_calls(closed),
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
        layouts=translation.layouts,
    )


def _trace_loss(
    model: Model, loss: Callable[..., Tree], shapes: tuple[Tree, Tree, Tree]
) -> tuple[Model, tuple[str, ...], Any, Any]:
    """The model with its mapped axes bound, their names, the jaxpr and the abstract results."""

    def traced(mapped: tuple[str, ...]) -> Any:
        bound = model
        if mapped:
            bound = replace(model, bind=lambda loss: whole_batch(model.bind(loss), mapped))
        return bound, mapped, *jax.make_jaxpr(bound.bind(loss), return_shape=True)(*shapes)

    try:
        bound, mapped, closed, out_shape = found_axes(traced)
    except ShardlibError:
        raise
    except Exception as error:
        if not jax.tree.leaves(shapes[2]):
            raise BatchError(
                f"the batch has no rows: it holds no arrays, and the loss {function_name(loss)} of"
                f" model {model.name!r} could not be traced with it: {type(error).__name__}:"
                f" {error}\nTry: a batch of at least one row"
            ) from error
        arrays = ", ".join(
            f"{path} {dtype_name(leaf)}{list(leaf.shape)}"
            for path, leaf in named(shapes[2], "batch")
        )
        raise TracingError(
            f"the loss {function_name(loss)} of model {model.name!r} could not be traced:"
            f" {type(error).__name__}: {error}\nIt was called with the model and a batch of"
            f" {arrays or 'no arrays'}."
        ) from error
    value = out_shape[0]
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        raise TracingError(
            f"the loss {function_name(loss)} returned {dtype_name(value)}{list(value.shape)};"
            " a loss is one floating-point number\nTry: take the mean, jnp.mean(...)"
        )
    return bound, mapped, require_none(closed, model.name), out_shape


def _attention_calls(closed: jex.ClosedJaxpr) -> AttentionCalls:
    """What the calls of attention ask of kernels."""
    calls = [
        Wanted.by(form, avals) for form, avals in called(closed) if isinstance(form, Attention)
    ]
    return AttentionCalls(
        without=tuple(
            (kind, why)
            for kind in KINDS
            for why in [call.why_not(kind) for call in calls if call.why_not(kind)][:1]
        ),
        width=max((call.widest for call in calls), default=0),
    )


def _step(folded: Folded, inputs: Sequence[tuple[str, str]], policy: str) -> StepGraph:
    """The graph of value-and-gradient under one remat policy."""
    sources = [
        InputDim(paths=tuple(inputs[i][0] for i in positions), stacked=index in folded.stacks)
        for index, positions in enumerate(folded.inputs)
    ]
    roles = [inputs[positions[0]][1] for positions in folded.inputs]
    trained = [index for index, role in enumerate(roles) if role == "parameter"]

    def value(parameters: list[Any], others: list[Any]) -> tuple[Any, list[Any]]:
        ours, theirs = iter(parameters), iter(others)
        args = [next(ours) if role == "parameter" else next(theirs) for role in roles]
        first, *others_results = folded.evaluate(args, remat=policy)
        return first, others_results

    def step(*args: Any) -> tuple[Any, Any]:
        parameters, others = (
            [args[i] for i in trained],
            [arg for arg, role in zip(args, roles, strict=True) if role != "parameter"],
        )
        return jax.value_and_grad(value, has_aux=True)(parameters, others)

    try:
        closed = jax.make_jaxpr(step)(*folded.avals())
    except ShardlibError:
        raise
    except Exception as error:
        raise TracingError(
            f"the gradient of the loss could not be traced: {type(error).__name__}: {error}"
        ) from error
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


def _compute_dtype(graph: Graph) -> str:
    """Dtype of the operands of the matmuls and convolutions with the most FLOPs."""
    flops: Counter[str] = Counter()
    for op in graph.ops:
        if op.category in ("matmul", "convolution"):
            flops[graph.values[op.operands[0]].dtype] += int(op.flops * graph.trips(op.region))
    return flops.most_common(1)[0][0] if flops else "float32"
