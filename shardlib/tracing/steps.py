"""A step that a user wrote, with gradients and optimizers inside, as a problem to be planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, cached_property
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from shardlib._jax_compat import names_alone, scan_counts
from shardlib.annotation.names import of_state
from shardlib.annotation.trees import Tree, path_text, static_difference
from shardlib.errors import BatchError, ShardlibError, StateError, TracingError, raise_all
from shardlib.findings import Finding
from shardlib.functions.experts import found_axes, mapped_finding, whole_batch
from shardlib.functions.losses import MarkedLoss
from shardlib.graph import (
    Dim,
    Dims,
    FactorRule,
    Graph,
    InputDim,
    Op,
    Parameter,
    Problem,
    StepGraph,
    check,
    prune,
)
from shardlib.jax_types import Leaf, Value
from shardlib.layout import LogicalAxes
from shardlib.propagation.ties import Classes, tie_graph
from shardlib.tracing.jaxpr_to_graph import PlacedCall, PlacedLayout, translated
from shardlib.tracing.program import (
    CUSTOM,
    REMAT,
    Call,
    Equation,
    Program,
    called,
    dtype_name,
    flatten,
)
from shardlib.tracing.rewriting import Walk, evaluate_equations
from shardlib.tracing.trace import Described, describe_batch, require_rows, tokens_of

# --------------------------------------------------------------------------------------------------
# The losses that a step marks: where they stand, and which arrays of the state they are given.
#
# An operand of a loss is an array of the state, or made of one element by element, as updated
# weights are: that array is its *root*. Params and weights among the rest are planned and laid out
# as their roots are. What has rows of the batch has no root.
#
# A loss may close over arrays of the step. It cannot be traced by itself then for another number
# of rows: the whole step is, and the loss taken out of that trace. What is as many times as long
# there as the batch are rows.

#: Categories of operations that make something else of an array.
_OTHERS = frozenset({"matmul", "convolution", "scatter", "reduction", "gather"})
#: How many times as many rows the batch has -> the losses that the step marks then, in order.
Again = Callable[[Fraction], Sequence[MarkedLoss]]


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundLoss:
    """A marked loss in a step.

    Attributes:
        call: where it stands.
        form: the loss.
        operands: values of the step's graph, one for each leaf.
        roots: for each leaf the number of the array of the state that it is made of; None for those
            with rows of the batch, and of what is made of no weight.
        number: of the loss among those of the step.
        again: traces the step for other batches.
    """

    call: Call
    form: MarkedLoss
    operands: tuple[int, ...]
    roots: tuple[int | None, ...]
    number: int
    again: Again

    @property
    def trained(self) -> tuple[int, ...]:
        """Positions of the leaves whose gradients are asked for."""
        return tuple(position for position, flag in enumerate(self.form.trained) if flag)

    @property
    def frozen(self) -> tuple[int, ...]:
        """Positions of other leaves that are weights."""
        rooted = {position for position, root in enumerate(self.roots) if root is not None}
        return tuple(sorted(rooted - {*self.trained}))

    @property
    def others(self) -> tuple[int, ...]:
        """Positions of the leaves that are not weights."""
        return tuple(position for position, root in enumerate(self.roots) if root is None)

    @cached_property
    def rows(self) -> Mapping[int, int] | None:
        """Positions of the leaves with rows of the batch -> their dim of rows, by the trace of a
        batch with more rows; None where the step has no such trace.
        """
        ratio = Fraction(2)
        try:
            shapes = [aval.shape for aval in self._other(ratio).shapes]
            pairs = zip([aval.shape for aval in self.form.shapes], shapes, strict=True)
            grown = [
                [
                    dim
                    for dim, (old, new) in enumerate(zip(traced_shape, two, strict=True))
                    if new != old
                ]
                for traced_shape, two in pairs
            ]
        except Exception:  # whatever a user's step raises for another batch
            return None
        return {
            position: dims[0]
            for position, dims in enumerate(grown)
            if dims
            and shapes[position][dims[0]] == ratio * self.form.shapes[position].shape[dims[0]]
        }

    def function(self, leaves: Sequence[Value]) -> tuple[Value, Any]:
        """(value, auxiliary results) of the loss, for any number of rows that it can be traced
        for.
        """
        if not self.form.captured:
            return self.form.function(leaves)
        shapes = [jnp.shape(leaf) for leaf in leaves]
        form = self.form
        if shapes != [aval.shape for aval in form.shapes]:
            form = self._other(self._ratio(shapes))
        if shapes != [aval.shape for aval in form.shapes]:
            raise TracingError(
                f"the loss {form.name} closes over arrays whose sizes do not follow the rows of the"
                " batch"
            )
        closed = jex.ClosedJaxpr(form.jaxpr, list(form.arrays))
        value, *aux = jex.jaxpr_as_fun(closed)(*leaves)
        return value, form.results.unflatten(aux)

    def _ratio(self, shapes: Sequence[tuple[int, ...]]) -> Fraction:
        """Returns how many times as many rows arrays have as those that were traced."""
        return next(
            Fraction(new, old)
            for aval, shape in zip(self.form.shapes, shapes, strict=True)
            for old, new in zip(aval.shape, shape, strict=True)
            if old != new
        )

    def _other(self, ratio: Fraction) -> MarkedLoss:
        """The same loss in a trace of the step for other batches."""
        return self.again(ratio)[self.number]


def found_losses(
    calls: Mapping[str, PlacedCall],
    graph: Graph,
    state: int,
    weights: Collection[int],
    step: str,
    rows: Collection[tuple[int, int]],
    again: Again,
) -> tuple[FoundLoss, ...]:
    """The marked losses of a step, in order."""
    marked = [
        (call, values) for call, values in calls.values() if isinstance(call.form, MarkedLoss)
    ]
    numbers = {
        value: number
        for number, value in enumerate(graph.inputs[:state])
        if "float" in graph.values[value].dtype
    }
    of_rows = {value for value, _ in rows}
    forms = list(dict.fromkeys(call.form for call, _ in marked))
    losses: list[FoundLoss] = []
    for call, values in marked:
        form: MarkedLoss = call.form
        operands = values[form.constants :]
        weight_numbers = {value: number for value, number in numbers.items() if number in weights}
        roots = [
            _first(_root(graph, value, weight_numbers), _root(graph, value, numbers))
            if flag
            else None
            if value in of_rows
            else _root(graph, value, weight_numbers)
            for value, flag in zip(operands, form.trained, strict=True)
        ]
        losses.append(
            FoundLoss(
                call=call,
                form=form,
                operands=operands,
                roots=tuple(roots),
                number=forms.index(form),
                again=again,
            )
        )
    rootless = [
        f"{loss.form.name}: {loss.form.paths[leaf]}, {graph.values[loss.operands[leaf]].dtype}"
        f"{list(graph.values[loss.operands[leaf]].shape)}"
        for loss in losses
        for leaf in loss.trained
        if loss.roots[leaf] is None
    ]
    if rootless:
        raise_all(
            TracingError,
            f"params of a loss of the step {step} are not arrays of the state, nor made of one"
            " element by element",
            rootless,
            hint="params from the state; or jax.value_and_grad, which marks nothing",
        )
    return tuple(losses)


def _first(preferred: int | None, fallback: int | None) -> int | None:
    return fallback if preferred is None else preferred


def _root(graph: Graph, value: int, state: Mapping[int, int]) -> int | None:
    """The nearest array of the state that a value is made of, element by element."""
    shape = graph.values[value].shape
    makers = {result: op for op in graph.ops for result in op.results}
    seen, waiting = {value}, [value]
    while waiting:
        now = waiting.pop(0)
        if now in state:
            return state[now]
        op = makers.get(now)
        if op is None or op.category in _OTHERS:
            continue
        for operand in op.operands:
            if operand not in seen and graph.values[operand].shape == shape:
                seen.add(operand)
                waiting.append(operand)
    return None


# --------------------------------------------------------------------------------------------------
# Rows of the batch that are put side by side, and taken apart again.
#
# `jnp.concatenate([real, fake])` has twice the rows. By its general rule such a dim stays whole;
# here it becomes a dim of equal parts, of which a cut cuts each (`FactorRule.outer`), so that what
# is computed of it keeps the rows of the batch.


def tied_rows(problem: Problem) -> Problem:
    """A problem in whose graphs rows side by side are tied to those of its batch."""
    names = {path: axes for path, _, _, axes in problem.batch}

    def tied(graph: Graph) -> Graph:
        input_axes = [(value, names.get(graph.values[value].path, ())) for value in graph.inputs]
        return tied_parts(graph, rows_of(graph, input_axes))

    return replace(
        problem,
        forward=tied(problem.forward),
        steps={name: replace(step, graph=tied(step.graph)) for name, step in problem.steps.items()},
    )


def rows_of(
    graph: Graph, input_axes: Iterable[tuple[int, LogicalAxes]]
) -> frozenset[tuple[int, int]]:
    """(value, dim) of dims that some operations tie to the rows of the batch."""
    classes = Classes()
    tie_graph(classes, "", graph)
    roots = {
        classes.find(("", value, dim))
        for value, axes in input_axes
        for dim, axis in enumerate(axes)
        if axis == "batch"
    }
    return frozenset(
        (value, dim)
        for value, aval in enumerate(graph.values)
        for dim in range(len(aval.shape))
        if classes.find(("", value, dim)) in roots
    )


def tied_parts(graph: Graph, rows: frozenset[tuple[int, int]]) -> Graph:
    """The graph with rows side by side tied to those of the batch."""
    parts_by_dim = dict.fromkeys(rows, 1)
    ops: list[Op] = []
    for op in graph.ops:
        divided = _joined(graph, op, parts_by_dim) or _parts_taken(graph, op, parts_by_dim)
        ops.append(op if divided is None else divided)
        _spread(graph, ops[-1], parts_by_dim)
    return replace(graph, ops=tuple(ops))


def _joined(graph: Graph, op: Op, parts_by_dim: dict[tuple[int, int], int]) -> Op | None:
    """A concatenation of equal parts along rows."""
    if op.kind != "concatenate":
        return None
    shapes = [graph.values[value].shape for value in op.operands]
    result = graph.values[op.results[0]].shape
    axis = next(dim for dim in range(len(result)) if shapes[0][dim] != result[dim])
    if len({shape[axis] for shape in shapes}) > 1 or not any(
        (value, axis) in parts_by_dim for value in op.operands
    ):
        return None
    return _in_parts(op, axis, len(shapes), shapes[0], joined=True)


def _parts_taken(graph: Graph, op: Op, parts_by_dim: dict[tuple[int, int], int]) -> Op | None:
    """A slice, or a split, of one part of rows that are side by side."""
    if op.kind not in ("slice", "split") or len(op.operands) != 1:
        return None
    full_shape = graph.values[op.operands[0]].shape
    part = graph.values[op.results[0]].shape
    cut = [dim for dim in range(len(full_shape)) if full_shape[dim] != part[dim]]
    parts = parts_by_dim.get((op.operands[0], cut[0]), 1) if len(cut) == 1 else 1
    if parts == 1 or any(
        graph.values[value].shape[cut[0]] * parts != full_shape[cut[0]] for value in op.results
    ):
        return None
    return _in_parts(op, cut[0], parts, part, joined=False)


def _in_parts(op: Op, axis: int, parts: int, shape: tuple[int, ...], *, joined: bool) -> Op:
    counter = len(shape)
    plain: Dims = tuple((dim,) if size > 1 else () for dim, size in enumerate(shape))
    side: Dim = (counter, axis)
    long: Dims = (*plain[:axis], side, *plain[axis + 1 :])
    rule = FactorRule(
        sizes=(*shape, parts),
        operands=(plain,) * len(op.operands) if joined else (long,),
        results=(long,) if joined else (plain,) * len(op.results),
        whole=frozenset({counter}),
        outer=frozenset({counter}),
    )
    return replace(op, rule=rule)


def _spread(graph: Graph, op: Op, parts_by_dim: dict[tuple[int, int], int]) -> None:
    """Dims of the results that are the rows of the operands, and of how many parts."""
    factors: dict[int, int] = {}
    for value, dims in zip(op.operands, op.rule.operands, strict=True):
        for position, dim in enumerate(dims):
            major = op.rule.major(dim)
            if major is not None and (value, position) in parts_by_dim:
                factors[major] = max(
                    factors.get(major, 1), _parts(op, dim, parts_by_dim[value, position])
                )
    for value, dims in zip(op.results, op.rule.results, strict=True):
        for position, dim in enumerate(dims):
            major = op.rule.major(dim)
            if major in factors and graph.values[value].shape[position] > 1:
                outer = [factor for factor in dim if factor in op.rule.outer]
                parts_by_dim[value, position] = op.rule.sizes[outer[0]] if outer else factors[major]


def _parts(op: Op, dim: Dim, parts: int) -> int:
    return 1 if any(factor in op.rule.outer for factor in dim) else parts


# --------------------------------------------------------------------------------------------------
# Roles of the arrays of a step's state, by their use in the step.
#
#     weight     a matmul, a convolution or a lookup uses it beside values that depend on the batch,
#                or it is added to or multiplied with something that has the rows of the batch
#     follower   a float array that only element-wise updates see: moments, averages
#     other      counters, keys, scalars
#
# A weight's *gradient* is what the step makes its new value of: the sum over all contractions, of
# as many elements as the weight, that reach the new value through element-wise operations; where
# loops or branches make it, their result. A weight whose new value depends on none is frozen, as a
# teacher is. One whose new value is made of another weight, which is made without it, follows
# that, as an average that is also used does: it has no gradient of its own.

#: Operations that show the same array in another form.
_VIEWS = frozenset(
    {
        "convert_element_type",
        "transpose",
        "reshape",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "copy",
        "slice",
        "dynamic_slice",
        "rev",
        "enter",
        "carry",
        "reduce_precision",
        "optimization_barrier",
    }
)
_USES = frozenset({"matmul", "convolution", "gather"})
#: Where gradients come from.
_SOURCES = frozenset({"matmul", "convolution", "scatter", "reduction"})
_SUMS = frozenset(
    {"add", "add_any", "convert_element_type", "transpose", "reshape", "exit", "carry"}
)


@dataclass(frozen=True, kw_only=True)
class StateRoles:
    """Roles of the arrays of a state, as numbers of the graph's inputs.

    Attributes:
        weights: that the step computes with.
        gradients: of these, those that have one, and its value in the graph.
        followers: of the other float arrays with a dim.
    """

    weights: tuple[int, ...]
    gradients: Mapping[int, int]
    followers: tuple[int, ...]


def state_roles(graph: Graph, count: int, batch: frozenset[tuple[int, int]]) -> StateRoles:
    """Returns what each array of the state is."""
    state = graph.inputs[:count]
    used = _used(graph, state, batch)
    floats = [
        number
        for number, value in enumerate(state)
        if graph.values[value].shape and "float" in graph.values[value].dtype
    ]
    weights = [number for number in floats if state[number] in used]
    gradients = {
        number: _gradient(graph, state[number], graph.outputs[number]) for number in weights
    }
    numbers = {state[number]: number for number in weights}
    read = {
        number: {numbers[value] for value in values if value in numbers} - {number}
        for number, (_, values) in gradients.items()
    }
    followed = {
        number
        for number in weights
        for other_number in read[number]
        if number not in read[other_number]
    }
    return StateRoles(
        weights=tuple(weights),
        gradients={
            number: value
            for number, (value, _) in gradients.items()
            if value is not None and number not in followed
        },
        followers=tuple(number for number in floats if state[number] not in used),
    )


def _used(
    graph: Graph, state: tuple[int, ...], batch: frozenset[tuple[int, int]]
) -> frozenset[int]:
    """The arrays of the state that the step computes with."""
    views: dict[int, int] = {value: value for value in state}
    rows = {value for value, _ in batch}
    moving = {value for value in graph.inputs if value not in views}
    used: set[int] = set()
    for op in graph.ops:
        shown = [views[value] for value in op.operands if value in views]
        others = [value for value in op.operands if value not in views]
        if op.kind in _VIEWS and shown and not others:
            views.update(dict.fromkeys(op.results, shown[0]))
            continue
        if any(value in moving for value in others):
            moving.update(op.results)
            if (op.category in _USES) or any(value in rows for value in others):
                used.update(shown)
        elif shown:  # of the state alone, such as a key that becomes random numbers
            moving.update(value for value in op.results if op.category in _USES)
    return frozenset(used)


def _gradient(graph: Graph, weight: int, new: int) -> tuple[int | None, set[int]]:
    """The value that is the gradient of a weight, None where its new value depends on none; and the
    values that the new one is made of, element by element.
    """
    if new == weight:
        return None, set()
    size = math.prod(graph.values[weight].shape)
    producers = {value: op for op in graph.ops for value in op.results}
    order = {value: position for position, op in enumerate(graph.ops) for value in op.results}

    def like(value: int) -> bool:
        return math.prod(graph.values[value].shape) == size

    sources: set[int] = set()
    seen, waiting = {new}, [new]
    while waiting:
        value = waiting.pop()
        op = producers.get(value)
        if op is None:
            continue
        if op.category in _SOURCES or op.region != 0 or "/join/" in op.path:
            sources.add(value)
            continue
        for operand in op.operands:
            if operand not in seen and like(operand):
                seen.add(operand)
                waiting.append(operand)
    if not sources:
        return None, seen
    summed = set(sources)
    for op in graph.ops:
        if (
            op.region == 0
            and _adds(op)
            and all(value in summed for value in op.operands if like(value))
        ):
            summed.update(
                value
                for value in op.results
                if value in seen
                and like(value)
                and any(operand in summed for operand in op.operands)
            )
    return max(summed, key=lambda value: order[value]), seen


def _adds(op: Op) -> bool:
    return op.kind in _SUMS


# --------------------------------------------------------------------------------------------------
# The sum of the marked losses of a step, as a function of its weights and of the batch.
#
# Gradients that the step takes otherwise, as with `jax.value_and_grad`, are computed as the step
# computes them, and become a part of the gradients of the sum.
#
# That is what is planned of a marked step. What the losses get is computed as the step computes
# it, and no gradient goes through it; weights that the step has updated are the weights. What no
# loss needs, as updates, is left out.
#
# Loops run their body as often as the step does, from the values that they begin with, and of
# branches those run that have a loss: costs are those of the step, numbers need not be.


def total_loss(
    program: Program,
    arguments: Sequence[Value | None],
    losses: Sequence[FoundLoss],
    weights: Mapping[int, Value],
    unmarked: Mapping[int, int] | None = None,
) -> Value:
    """The sum of the marked losses: float32 scalar.

    Args:
        arguments: for its inputs, the state and the batch; None for what no loss needs.
    """
    total = _Total(losses={loss.call.path: loss for loss in losses}, weights=weights)
    env = {**program.constants, **dict(zip(program.inputs, arguments, strict=True))}
    value = total.run(program, env, frozenset((unmarked or {}).values()))
    for position, number in (unmarked or {}).items():
        value = value + _total_loss_taken(weights[position], env[number])
    return value


@dataclass(frozen=True, kw_only=True)
class _Total:
    losses: Mapping[str, FoundLoss]
    weights: Mapping[int, Value]

    def run(
        self, program: Program, env: dict[int, Any], targets: frozenset[int] = frozenset()
    ) -> Any:
        """The sum of the losses of a program, whose inputs and constants are in `env`; computes
        what is wanted beside it.
        """
        needed, inputs = self._needed(program, targets), {*program.inputs}
        values: list[Any] = []
        done: set[str] = set()
        for position, equation in enumerate(program.equations):
            loss = self._loss(equation)
            if loss is not None:
                if loss.call.path not in done:
                    done.add(loss.call.path)
                    values.append(self._value(loss, env, program))
            elif self._around(equation):
                values.append(self._inside(equation, env))
            elif position in needed:
                if targets:  # no gradient is taken of a gradient
                    env.update(
                        (number, _stopped(env[number]))
                        for number in sorted({*equation.inputs} & inputs)
                    )
                evaluate_equations([equation], env, Walk())
        return sum(values, start=jnp.zeros((), jnp.float32))

    def _loss(self, equation: Equation) -> FoundLoss | None:
        return None if equation.call is None else self.losses.get(equation.call.path)

    def _around(self, equation: Equation) -> bool:
        """Returns whether a loss stands inside of a loop, a branch or the like."""
        return any(path.startswith(f"{equation.path}/") for path in self.losses)

    def _needed(self, program: Program, targets: frozenset[int]) -> set[int]:
        """Positions of the equations that some loss needs, or what is wanted."""
        numbers: set[int] = {*targets}
        positions: set[int] = set()
        for position in reversed(range(len(program.equations))):
            equation = program.equations[position]
            loss = self._loss(equation)
            if loss is not None:
                first = loss.form.constants
                numbers |= {
                    number
                    for number, root in zip(loss.call.inputs[first:], loss.roots, strict=True)
                    if root is None
                } | {*loss.call.inputs[:first]}
            elif self._around(equation):
                numbers |= {*equation.inputs}
            elif not numbers.isdisjoint(equation.outputs):
                positions.add(position)
                numbers |= {*equation.inputs}
        return positions

    def _value(self, loss: FoundLoss, env: dict[int, Any], program: Program) -> Any:
        def taken(number: int) -> Any:  # what a loss is given and does not look at is not there
            value = env[number]
            return _zeros(program.avals[number]) if value is None else value

        first = loss.form.constants
        arguments = [_stopped(taken(number)) for number in loss.call.inputs[:first]]
        for position, (number, root) in enumerate(
            zip(loss.call.inputs[first:], loss.roots, strict=True)
        ):
            value = taken(number) if root is None else self.weights[root]
            arguments.append(value if position in loss.trained else _stopped(value))
        value, *aux = loss.form.evaluated(arguments)
        gradients = [arguments[first + position] for position in loss.trained]
        env.update(zip(loss.call.outputs, [value, *aux, *gradients], strict=True))
        return value.astype(jnp.float32)

    def _inside(self, equation: Equation, env: dict[int, Any]) -> Any:
        arguments = [env[number] for number in equation.inputs]
        if equation.name == "scan":
            value, results = self._scan(equation, arguments)
        elif equation.name == "cond":
            value, results = self._cond(equation, arguments)
        elif equation.name == "while":
            tests, first = (equation.params[f"{kind}_nconsts"] for kind in ("cond", "body"))
            body = equation.inside("body")
            value, _ = self._body(body, arguments[tests:])
            results = arguments[tests + first :]
        else:
            assert equation.name in (*REMAT, *CUSTOM)
            body = equation.inside()
            value, results = self._body(body, arguments)
        env.update(zip(equation.outputs, results, strict=True))
        return value

    def _body(self, program: Program, arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The sum of the losses of a program, and its results where they are known."""
        env = {**program.constants, **dict(zip(program.inputs, arguments, strict=True))}
        value = self.run(program, env)
        return value, [env.get(number, _zeros(program.avals[number])) for number in program.outputs]

    def _scan(self, equation: Equation, arguments: list[Any]) -> tuple[Any, list[Any]]:
        constants, carried = scan_counts(equation.params)
        fixed, sliced = arguments[: constants + carried], arguments[constants + carried :]
        body = equation.inside("body")

        def one(_: None, items: list[Any]) -> tuple[None, Any]:
            return None, self._body(body, [*fixed, *items])[0]

        values = jax.lax.scan(one, None, sliced, length=equation.params["length"])[1]
        stacked = [_zeros(var.aval) for var in equation.eqn.outvars[carried:]]
        return values.sum(), [*fixed[constants:], *stacked]

    def _cond(self, equation: Equation, arguments: list[Any]) -> tuple[Any, list[Any]]:
        value, results = jnp.zeros((), jnp.float32), list[Any]()
        for index, branch in enumerate(equation.programs):
            path = f"{equation.path}/branch{index}/"
            if any(loss_path.startswith(path) for loss_path in self.losses):
                branch_value, results = self._body(branch, arguments[1:])
                value = value + branch_value
        return value, results


@jax.custom_vjp
def _total_loss_taken(weight: Any, gradient: Any) -> Any:
    """Nothing, with a gradient that is known."""
    return jnp.zeros((), jnp.float32)


def _known(weight: Any, gradient: Any) -> tuple[Any, Any]:
    return jnp.zeros((), jnp.float32), gradient.reshape(weight.shape).astype(weight.dtype)


def _as_known(carry: Any, _: Any) -> tuple[Any, None]:
    return carry, None


_total_loss_taken.defvjp(_known, _as_known)


def _stopped(value: Any) -> Any:
    floating = jnp.issubdtype(jnp.asarray(value).dtype, jnp.inexact)
    return jax.lax.stop_gradient(value) if floating else value


def _zeros(aval: Any) -> Any:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)


# --------------------------------------------------------------------------------------------------
# Gradients that a step takes outside of the losses that it marks, as with `jax.value_and_grad`.
#
# They are computed as they are written: on the whole batch, with what the user rematerialises.


@dataclass(frozen=True, kw_only=True)
class UnmarkedGradients:
    """Gradients that a step takes outside of its marked losses.

    Attributes:
        gradients: number of a weight among the state -> the value of the program that is its
            gradient.
        unknown: weights that are trained outside of the losses, where no such value is found: in a
            loop, or a branch, that has a marked loss, too.
    """

    gradients: Mapping[int, int] = field(default_factory=dict[int, int])
    unknown: tuple[int, ...] = ()


def unmarked_gradients(
    program: Program,
    values: Mapping[int, int],
    gradients: Mapping[int, int],
    losses: Sequence[FoundLoss],
    state: int,
) -> UnmarkedGradients:
    """The gradients that a step takes outside of its marked losses; none where it marks none.

    Args:
        values: number of a value of the program -> value of its graph.
        gradients: weight -> the value of the graph that is its gradient.
    """
    if not losses:
        return UnmarkedGradients()
    marked = {root for loss in losses for root in (loss.roots[leaf] for leaf in loss.trained)}
    calls = {loss.call.path for loss in losses}
    makers = {number: equation for equation in program.equations for number in equation.outputs}
    numbers = {value: number for number, value in values.items() if number in makers}
    batch = {*program.inputs[state:]}
    gradient_numbers: dict[int, int] = {}
    for position, value in gradients.items():
        number = numbers.get(value)
        if number is None or _marked(makers[number], calls):
            continue
        if position not in marked or not batch.isdisjoint(_read(number, makers, calls)):
            gradient_numbers[position] = number
    unknown = tuple(
        weight for weight in gradients if weight not in gradient_numbers and weight not in marked
    )
    return UnmarkedGradients(gradients=gradient_numbers, unknown=unknown)


def _marked(equation: Equation, calls: set[str]) -> bool:
    """Returns whether an equation is one of a marked loss, or has one inside."""
    inside = equation.call is not None and equation.call.path in calls
    return inside or any(path.startswith(f"{equation.path}/") for path in calls)


def _read(number: int, makers: Mapping[int, Equation], calls: set[str]) -> set[int]:
    """The values that one is made of, up to marked losses."""
    seen, waiting = {number}, [number]
    while waiting:
        maker = makers.get(waiting.pop())
        if maker is None or _marked(maker, calls):
            continue
        fresh = [operand for operand in maker.inputs if operand not in seen]
        seen.update(fresh)
        waiting.extend(fresh)
    return seen


# --------------------------------------------------------------------------------------------------
# A step as a program, and as a problem like that of a loss.
#
# What a search plans is a loss with its gradients, and an optimizer of so many bytes. A step has
# all of that inside: its weights and their gradients are found by data flow, what the optimizer
# keeps of each weight is counted, and the operations that only the update needs are left out of
# the problem, which prices an update by its bytes. The program that runs is the whole step.

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
    if isinstance(step, FunctionType) and hasattr(step, "lower"):  # of `jax.jit` is not one
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
    """Returns whether a step returns (new state, metrics), and not the new state alone."""
    if isinstance(out, tuple) and len(out) == 2 and not same_form(state, out):
        return True
    if type(out) is not type(state):
        raise TracingError(
            f"the step {name} returns {type(out).__name__}; a step returns the new state, or a"
            " pair (new state, metrics)\nTry: return state, {'loss': loss}"
        )
    return False


def same_form(first: Tree, second: Tree) -> bool:
    """Returns whether two trees have the same form, shapes and dtypes; functions may be made
    anew.
    """
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
