"""A step as a program, and as a problem like that of a loss.

What a search plans is a loss with its gradients, and an optimizer of so many bytes. A step has all
of that inside: its weights and their gradients are found by data flow, what the optimizer keeps of
each weight is counted, and the operations that only the update needs are left out of the problem,
which prices an update by its bytes. The program that runs is the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from shardlib._jax_compat import names_alone
from shardlib.annotation.names import of_state
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.annotation.trees.static_parts import static_difference
from shardlib.axes import LogicalAxes
from shardlib.errors import BatchError, ShardlibError, StateError, TracingError, raise_all
from shardlib.functions.losses import MarkedLoss
from shardlib.functions.mapped_axes import found_axes, mapped_finding, whole_batch
from shardlib.graph.check import check
from shardlib.graph.graph import Graph
from shardlib.graph.problem import InputDim, Parameter, Problem, StepGraph
from shardlib.graph.prune import prune
from shardlib.jax_types import Leaf
from shardlib.report import Finding
from shardlib.tracing.batch import Described, describe_batch, require_rows, tokens_of
from shardlib.tracing.jaxpr_to_graph import PlacedLayout, translated
from shardlib.tracing.program import Program, called, flatten
from shardlib.tracing.steps.marked_losses import Again, FoundLoss, found_losses
from shardlib.tracing.steps.parts import rows_of, tied_parts
from shardlib.tracing.steps.state_roles import StateRoles, state_roles
from shardlib.tracing.steps.unmarked import UnmarkedGradients, unmarked_gradients
from shardlib.tracing.trip_counts import dtype_name

_with_paths = jax.tree_util.tree_leaves_with_path
#: (state, batch) -> (new state, metrics), or the new state alone.
Step = Callable[[Tree, Tree], Tree]


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step as a program.

    Attributes:
        name: of the step.
        closed: as it was traced.
        program: with the leaves of the state, then of the batch.
        problem: what is planned; `problem.forward` is the whole step.
        roles: what the arrays of the state are.
        paths: of the arrays of the state.
        state: abstract arrays of the state.
        batch: abstract arrays of the batch.
        metrics: abstract metrics.
        returns_pair: whether the step returns a pair (new state, metrics), and not the new state
            alone.
        losses: those that the step marks, in order; none in a step that marks none.
        unmarked: gradients that are taken outside of them, in a step that marks some.
        others: kinds of the custom calls that stand outside of them.
        layouts: those that the step brings along, with values of `problem.forward`.
        findings: about names of its state.
    """

    name: str
    closed: jex.ClosedJaxpr
    program: Program
    problem: Problem
    roles: StateRoles
    paths: tuple[str, ...]
    state: Tree
    batch: Tree
    metrics: Tree
    returns_pair: bool = True
    losses: tuple[FoundLoss, ...] = ()
    unmarked: UnmarkedGradients = field(default_factory=UnmarkedGradients)
    others: frozenset[str] = frozenset()
    layouts: tuple[PlacedLayout, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def trained(self) -> frozenset[int]:
        """Numbers of the arrays of the state that its marked losses train."""
        return frozenset(
            root
            for loss in self.losses
            for root in (loss.roots[position] for position in loss.trained)
            if root is not None
        )


def trace_step(
    step: Step,
    state: Tree,
    batch: Tree,
    *,
    axes: Tree = None,
    stacks: Sequence[Sequence[int]] = (),
    batch_axes: Tree = None,
    name: str = "step",
) -> TracedStep:
    """Traces a step.

    Args:
        step: (state, batch) -> (new state, metrics), or the new state alone.
    """
    if isinstance(step, FunctionType) and hasattr(step, "lower"):  # of `jax.jit` is no function
        raise TracingError(
            f"the step {name} is under jax.pmap, which has devices of its own\nTry: the function"
            " itself and the whole batch; lax.pmean and the like may stay"
        )
    step = names_alone()(step)
    shapes = jax.tree.map(abstract_leaf, (state, batch))
    described = describe_batch(shapes[1], batch_axes)
    if not described:
        raise BatchError("the batch has no rows: it holds no arrays\nTry: at least one array")
    require_rows(described)
    step, mapped, closed, out = _traced(step, shapes, name)
    pair = _is_pair(shapes[0], out, name)
    new, metrics = out if pair else (out, {})
    paths = tuple(
        path_text(path) or "state" for path, _ in jax.tree_util.tree_leaves_with_path(shapes[0])
    )
    _requiresame_form(shapes[0], new)
    program = flatten(closed)
    inputs = [*((path, "state") for path in paths), *((path, "batch") for path, *_ in described)]
    translation = translated(program, inputs)
    graph, calls = translation.graph, translation.calls
    rows = _rows(graph, len(paths), described)
    graph = tied_parts(graph, rows)
    roles = state_roles(graph, len(paths), _rows(graph, len(paths), described))
    losses = found_losses(
        calls,
        graph,
        len(paths),
        roles.weights,
        name,
        _rows(graph, len(paths), described),
        _again(step, shapes, described),
    )
    unmarked = unmarked_gradients(program, translation.values, roles.gradients, losses, len(paths))
    named, findings = of_state(shapes[0], axes, stacks, roles.weights)
    return TracedStep(
        name=name,
        closed=closed,
        program=program,
        problem=_problem(graph, roles, paths, described, named, name, mapped),
        roles=roles,
        paths=paths,
        state=shapes[0],
        batch=shapes[1],
        metrics=metrics,
        returns_pair=pair,
        losses=losses,
        unmarked=unmarked,
        findings=findings,
        others=frozenset(
            call.form.kind for call, _ in calls.values() if not isinstance(call.form, MarkedLoss)
        ),
        layouts=translation.layouts,
    )


def abstract_leaf(leaf: Leaf) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, or of a number, as JAX takes it: 64-bit numbers of NumPy are 32
    bits wide there.
    """
    array = leaf if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else jnp.asarray(leaf)
    typed_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
    dtype = array.dtype if typed_key else jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.ShapeDtypeStruct(array.shape, dtype)


def _traced(
    step: Step, shapes: tuple[Tree, Tree], name: str
) -> tuple[Step, tuple[str, ...], jex.ClosedJaxpr, Any]:
    """The step with its mapped axes bound, their names, its jaxpr and its abstract results."""

    def traced(mapped: tuple[str, ...]) -> Any:
        bound = whole_batch(step, mapped)
        return bound, mapped, *jax.make_jaxpr(bound, return_shape=True)(*shapes)

    try:
        return found_axes(traced)
    except ShardlibError:
        raise
    except Exception as error:
        raise TracingError(
            f"the step {name} cannot be traced: {type(error).__name__}: {error}"
        ) from error


def _again(step: Step, shapes: tuple[Tree, Tree], described: Sequence[Described]) -> Again:
    """Traces the step for batches of so many times as many rows: the losses that it marks then."""
    leaves, structure = jax.tree.flatten(shapes[1])

    def sized(leaf: jax.ShapeDtypeStruct, axes: LogicalAxes, ratio: Fraction) -> Leaf:
        sizes = [
            size * ratio if axis == "batch" else Fraction(size)
            for size, axis in zip(leaf.shape, axes, strict=True)
        ]
        if any(size.denominator > 1 for size in sizes):
            raise TracingError(f"the batch has not {ratio} times as many rows")
        return jax.ShapeDtypeStruct(tuple(map(int, sizes)), leaf.dtype)

    @cache
    def again(ratio: Fraction) -> tuple[MarkedLoss, ...]:
        pairs = zip(leaves, described, strict=True)
        batch = structure.unflatten([sized(leaf, axes, ratio) for leaf, (*_, axes) in pairs])
        closed = jax.make_jaxpr(step)(shapes[0], batch)
        forms = dict.fromkeys(form for form, _ in called(closed) if isinstance(form, MarkedLoss))
        return tuple(forms)

    return again


def _is_pair(state: Tree, out: Any, name: str) -> bool:
    """Whether a step returns (new state, metrics), and not the new state alone."""
    if isinstance(out, tuple) and len(out) == 2 and not same_form(state, out):
        return True
    if type(out) is not type(state):
        raise TracingError(
            f"the step {name} returns {type(out).__name__}; a step returns the new state, or a"
            " pair (new state, metrics)\nTry: return state, {'loss': loss}"
        )
    return False


def same_form(first: Tree, second: Tree) -> bool:
    """Whether two trees have the same form, shapes and dtypes; functions may be made anew."""
    same = not static_difference(jax.tree.structure(first), jax.tree.structure(second))
    return same and all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


def _requiresame_form(before: Tree, after: Tree) -> None:
    difference = static_difference(jax.tree.structure(before), jax.tree.structure(after))
    if difference:
        was, now = ([path_text(path) for path, _ in _with_paths(tree)] for tree in (before, after))
        failures = [f"{path}: gone after a step" for path in was if path not in now]
        failures += [f"{path}: new after a step" for path in now if path not in was]
        raise_all(
            StateError,
            "the state has another structure after a step",
            failures or [difference],
            hint="return all of the state, changed or not",
        )
    failures = [
        f"{path_text(path)}: {dtype_name(a)}{list(a.shape)} before,"
        f" {dtype_name(b)}{list(b.shape)} after"
        for (path, a), b in zip(_with_paths(before), jax.tree.leaves(after), strict=True)
        if (a.shape, a.dtype) != (b.shape, b.dtype)
    ]
    if failures:
        raise_all(StateError, "the state has other arrays after a step", failures)


def _rows(graph: Graph, count: int, described: tuple[Described, ...]) -> frozenset[tuple[int, int]]:
    """(value, dim) of dims that some operations tie to the rows of the batch."""
    inputs = zip(graph.inputs[count:], described, strict=True)
    return rows_of(graph, [(value, axes) for value, (_, _, _, axes) in inputs])


def _problem(
    graph: Graph,
    roles: StateRoles,
    paths: tuple[str, ...],
    described: tuple[Described, ...],
    axes: Mapping[str, LogicalAxes],
    name: str,
    mapped: Sequence[str],
) -> Problem:
    count = len(paths)
    kind = {
        number: "parameter" if number in roles.gradients else "frozen" for number in roles.weights
    }
    values = list(graph.values)
    for number, role in kind.items():
        values[graph.inputs[number]] = replace(values[graph.inputs[number]], role=role)
    findings = (*graph.findings, *mapped_finding(mapped))
    full_graph = replace(graph, values=tuple(values), findings=findings)
    trained = [number for number in roles.weights if number in roles.gradients]
    gradients = tuple(roles.gradients[number] for number in trained)
    step = prune(replace(full_graph, outputs=(*graph.outputs[count:], *gradients)))
    check(step)
    bytes_per_element = _bytes_kept(full_graph, roles)
    parameters = tuple(
        Parameter(
            path=paths[number],
            shape=full_graph.values[full_graph.inputs[number]].shape,
            dtype=full_graph.values[full_graph.inputs[number]].dtype,
            axes=axes.get(
                paths[number], (None,) * len(full_graph.values[full_graph.inputs[number]].shape)
            ),
            state_bytes_per_element=bytes_per_element.get(number, 0.0),
            state_arrays=round(bytes_per_element.get(number, 0.0) / 4),
            role="trained" if number in roles.gradients else "frozen",
        )
        for number in roles.weights
    )
    inputs = tuple(InputDim(paths=(graph.values[value].path,)) for value in graph.inputs)
    return Problem(
        model=name,
        forward=full_graph,
        steps={"none": StepGraph(graph=step, inputs=inputs, gradients=gradients)},
        parameters=parameters,
        batch=described,
        state_bytes=sum(
            full_graph.values[full_graph.inputs[number]].bytes
            for number in range(count)
            if number not in kind and number not in roles.followers
        ),
        tokens=tokens_of(described),
        compute_dtype=_compute_dtype(step),
    )


def _bytes_kept(graph: Graph, roles: StateRoles) -> Mapping[int, float]:
    """Bytes of followers for each element of a trained weight: of those of its shape, shared
    evenly among the weights of that shape; the rest is spread over all.
    """
    shapes: dict[tuple[int, ...], list[int]] = {}
    for number in roles.gradients:
        shapes.setdefault(graph.values[graph.inputs[number]].shape, []).append(number)
    bytes_per_element: dict[int, float] = dict.fromkeys(roles.gradients, 0.0)
    remaining = 0.0
    for follower in roles.followers:
        value = graph.values[graph.inputs[follower]]
        alike = shapes.get(value.shape, [])
        for number in alike:
            bytes_per_element[number] += value.itemsize / len(alike)
        remaining += 0.0 if alike else value.bytes
    elements = sum(
        graph.values[graph.inputs[number]].bytes / graph.values[graph.inputs[number]].itemsize
        for number in bytes_per_element
    )
    return {
        number: each + (remaining / elements if elements else 0.0)
        for number, each in bytes_per_element.items()
    }


def _compute_dtype(graph: Graph) -> str:
    flops: dict[str, float] = {}
    for op in graph.ops:
        if op.category in ("matmul", "convolution"):
            dtype = graph.values[op.operands[0]].dtype
            flops[dtype] = flops.get(dtype, 0.0) + op.flops * graph.trips(op.region)
    return max(flops, key=lambda one: flops[one], default="float32")
