"""A training step written by the user, with gradients and optimizer inside, as a planning
problem.
"""

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
from shardlib.propagation.colours import UnionFind, tie_graph
from shardlib.tracing.program import (
    CUSTOM,
    REMAT,
    CustomCall,
    Equation,
    Program,
    dtype_name,
    flatten,
    forms_of,
)
from shardlib.tracing.rewriting import Walk, evaluate_equations
from shardlib.tracing.trace import (
    BatchArray,
    CallOperands,
    LayoutOfValue,
    abstract,
    compute_dtype,
    describe_batch,
    require_rows,
    tokens_of,
    translated,
)

# --------------------------------------------------------------------------------------------------
# The losses that a step marks: their paths, and the arrays of the state among their operands.
#
# An operand of a loss is an array of the state, or computed from one element by element, as updated
# weights are: that array is its *root*. Params and other weights are planned and laid out like
# their roots. Operands with rows of the batch have no root.
#
# A loss may close over arrays of the step, and then cannot be traced by itself for another number
# of rows: the whole step is, and the loss is taken from that trace. Dims that grow there in
# proportion to the batch are rows.

#: Categories of operations after which a value is no longer an element-wise form of an array.
_NOT_ELEMENTWISE = frozenset({"matmul", "convolution", "scatter", "reduction", "gather"})
#: Factor on the number of rows of the batch -> the losses that the step marks then, in order.
Retrace = Callable[[Fraction], Sequence[MarkedLoss]]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLoss:
    """A marked loss in a step.

    Attributes:
        call: its call.
        form: the loss.
        operands: values of the step's graph, one for each leaf.
        roots: for each leaf, the number of the state array that it is computed from; None for
            leaves with rows of the batch or computed from no weight.
        number: index among the losses of the step.
        retrace: traces the step for other batches.
    """

    call: CustomCall
    form: MarkedLoss
    operands: tuple[int, ...]
    roots: tuple[int | None, ...]
    number: int
    retrace: Retrace

    @property
    def trained(self) -> tuple[int, ...]:
        """Positions of the leaves whose gradients are requested."""
        return tuple(position for position, flag in enumerate(self.form.trained) if flag)

    @property
    def frozen(self) -> tuple[int, ...]:
        """Positions of the other leaves that are weights."""
        rooted = {position for position, root in enumerate(self.roots) if root is not None}
        return tuple(sorted(rooted - {*self.trained}))

    @property
    def others(self) -> tuple[int, ...]:
        """Positions of the leaves that are not weights."""
        return tuple(position for position, root in enumerate(self.roots) if root is None)

    @cached_property
    def rows(self) -> Mapping[int, int] | None:
        """Positions of the leaves with rows of the batch -> their row dim, from the trace of a
        larger batch; None if the step cannot be traced for one.
        """
        ratio = Fraction(2)
        try:
            shapes = [aval.shape for aval in self._retraced(ratio).shapes]
            pairs = zip([aval.shape for aval in self.form.shapes], shapes, strict=True)
            grown = [
                [
                    dim
                    for dim, (old, new) in enumerate(zip(traced_shape, other_shape, strict=True))
                    if new != old
                ]
                for traced_shape, other_shape in pairs
            ]
        except Exception:  # the user's step can raise any error for another batch
            return None
        return {
            position: dims[0]
            for position, dims in enumerate(grown)
            if dims
            and shapes[position][dims[0]] == ratio * self.form.shapes[position].shape[dims[0]]
        }

    def function(self, leaves: Sequence[Value]) -> tuple[Value, Any]:
        """(value, auxiliary results) of the loss, for any number of rows for which it can be
        traced.
        """
        if not self.form.captured:
            return self.form.function(leaves)
        shapes = [jnp.shape(leaf) for leaf in leaves]
        form = self.form
        if shapes != [aval.shape for aval in form.shapes]:
            form = self._retraced(self._ratio(shapes))
        if shapes != [aval.shape for aval in form.shapes]:
            raise TracingError(
                f"the loss {form.name} closes over arrays whose sizes do not follow the rows of the"
                " batch"
            )
        jaxpr = jex.ClosedJaxpr(form.jaxpr, list(form.arrays))
        value, *aux = jex.jaxpr_as_fun(jaxpr)(*leaves)
        return value, form.results.unflatten(aux)

    def _ratio(self, shapes: Sequence[tuple[int, ...]]) -> Fraction:
        """Factor on the number of rows, compared with the trace."""
        return next(
            Fraction(new, old)
            for aval, shape in zip(self.form.shapes, shapes, strict=True)
            for old, new in zip(aval.shape, shape, strict=True)
            if old != new
        )

    def _retraced(self, ratio: Fraction) -> MarkedLoss:
        """The same loss in a trace of the step for another batch."""
        return self.retrace(ratio)[self.number]


def step_losses(
    calls: Mapping[str, CallOperands],
    graph: Graph,
    state: int,
    weights: Collection[int],
    step: str,
    rows: Collection[tuple[int, int]],
    retrace: Retrace,
) -> tuple[StepLoss, ...]:
    """The marked losses of a step, in order."""
    marked = [
        (call, values) for call, values in calls.values() if isinstance(call.form, MarkedLoss)
    ]
    numbers = {
        value: number
        for number, value in enumerate(graph.inputs[:state])
        if "float" in graph.values[value].dtype
    }
    with_rows = {value for value, _ in rows}
    forms = list(dict.fromkeys(call.form for call, _ in marked))
    losses: list[StepLoss] = []
    for call, values in marked:
        form: MarkedLoss = call.form
        operands = values[form.constants :]
        weight_numbers = {value: number for value, number in numbers.items() if number in weights}
        roots = [
            _first(_root(graph, value, weight_numbers), _root(graph, value, numbers))
            if flag
            else None
            if value in with_rows
            else _root(graph, value, weight_numbers)
            for value, flag in zip(operands, form.trained, strict=True)
        ]
        losses.append(
            StepLoss(
                call=call,
                form=form,
                operands=operands,
                roots=tuple(roots),
                number=forms.index(form),
                retrace=retrace,
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
    """The nearest state array that a value is computed from, element by element."""
    shape = graph.values[value].shape
    makers = {result: op for op in graph.ops for result in op.results}
    seen, waiting = {value}, [value]
    while waiting:
        current = waiting.pop(0)
        if current in state:
            return state[current]
        op = makers.get(current)
        if op is None or op.category in _NOT_ELEMENTWISE:
            continue
        for operand in op.operands:
            if operand not in seen and graph.values[operand].shape == shape:
                seen.add(operand)
                waiting.append(operand)
    return None


# --------------------------------------------------------------------------------------------------
# Rows of several batches that are concatenated and split again.
#
# `jnp.concatenate([real, fake])` has twice the rows. By its general rule such a dim stays
# unsharded; here it becomes a dim of equal parts, each of which is sharded (`FactorRule.outer`), so
# that values computed from it keep the rows of the batch.


def tied_rows(problem: Problem) -> Problem:
    """A problem in whose graphs concatenated rows are tied to those of the batch."""
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
    classes = UnionFind()
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
    """The graph with concatenated rows tied to those of the batch."""
    parts_by_dim = dict.fromkeys(rows, 1)
    ops: list[Op] = []
    for op in graph.ops:
        divided = _concatenated(graph, op, parts_by_dim) or _split_parts(graph, op, parts_by_dim)
        ops.append(op if divided is None else divided)
        _spread(graph, ops[-1], parts_by_dim)
    return replace(graph, ops=tuple(ops))


def _concatenated(graph: Graph, op: Op, parts_by_dim: dict[tuple[int, int], int]) -> Op | None:
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


def _split_parts(graph: Graph, op: Op, parts_by_dim: dict[tuple[int, int], int]) -> Op | None:
    """A slice, or a split, of one part of concatenated rows."""
    if op.kind not in ("slice", "split") or len(op.operands) != 1:
        return None
    full_shape = graph.values[op.operands[0]].shape
    part = graph.values[op.results[0]].shape
    dims = [dim for dim in range(len(full_shape)) if full_shape[dim] != part[dim]]
    parts = parts_by_dim.get((op.operands[0], dims[0]), 1) if len(dims) == 1 else 1
    if parts == 1 or any(
        graph.values[value].shape[dims[0]] * parts != full_shape[dims[0]] for value in op.results
    ):
        return None
    return _in_parts(op, dims[0], parts, part, joined=False)


def _in_parts(op: Op, axis: int, parts: int, shape: tuple[int, ...], *, joined: bool) -> Op:
    counter = len(shape)
    plain: Dims = tuple((dim,) if size > 1 else () for dim, size in enumerate(shape))
    joined_dim: Dim = (counter, axis)
    long: Dims = (*plain[:axis], joined_dim, *plain[axis + 1 :])
    rule = FactorRule(
        sizes=(*shape, parts),
        operands=(plain,) * len(op.operands) if joined else (long,),
        results=(long,) if joined else (plain,) * len(op.results),
        whole=frozenset({counter}),
        outer=frozenset({counter}),
    )
    return replace(op, rule=rule)


def _spread(graph: Graph, op: Op, parts_by_dim: dict[tuple[int, int], int]) -> None:
    """Propagates to the results: their dims that are rows, and the number of concatenated parts."""
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
#     weight     a matmul, convolution or lookup combines it with values that depend on the batch,
#                or it is added to or multiplied with a value that has the rows of the batch
#     follower   a float array that only element-wise updates read: moments, averages
#     other      counters, keys, scalars
#
# The *gradient* of a weight is the value from which the step computes the new weight: the sum over
# all contractions, of as many elements as the weight, that reach the new value through element-wise
# operations; if a loop or branch computes them, its result. A weight whose new value depends on
# none is frozen, like a teacher. One whose new value is computed from another weight, which is
# computed without it, follows that weight, like an average that is also used: it has no gradient.

#: Operations whose result is the same array in another form.
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
#: Categories of operations that compute gradients.
_SOURCES = frozenset({"matmul", "convolution", "scatter", "reduction"})
_SUMS = frozenset(
    {"add", "add_any", "convert_element_type", "transpose", "reshape", "exit", "carry"}
)


@dataclass(frozen=True, kw_only=True)
class StateRoles:
    """Roles of the arrays of a state, as numbers of the graph's inputs.

    Attributes:
        weights: arrays that the forward computation reads.
        gradients: weight -> the graph value of its gradient, for trained weights.
        followers: other float arrays of rank at least 1.
    """

    weights: tuple[int, ...]
    gradients: Mapping[int, int]
    followers: tuple[int, ...]


def state_roles(graph: Graph, count: int, batch: frozenset[tuple[int, int]]) -> StateRoles:
    """The role of each array of the state."""
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
    """The state arrays that the step computes with."""
    views: dict[int, int] = {value: value for value in state}
    rows = {value for value, _ in batch}
    moving = {value for value in graph.inputs if value not in views}
    used: set[int] = set()
    for op in graph.ops:
        viewed = [views[value] for value in op.operands if value in views]
        others = [value for value in op.operands if value not in views]
        if op.kind in _VIEWS and viewed and not others:
            views.update(dict.fromkeys(op.results, viewed[0]))
            continue
        if any(value in moving for value in others):
            moving.update(op.results)
            if (op.category in _USES) or any(value in rows for value in others):
                used.update(viewed)
        elif viewed:  # of the state alone, such as a key from which random numbers are drawn
            moving.update(value for value in op.results if op.category in _USES)
    return frozenset(used)


def _gradient(graph: Graph, weight: int, new: int) -> tuple[int | None, set[int]]:
    """The gradient of a weight, None if its new value depends on none; and the values that the new
    value is computed from, element by element.
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
            and op.kind in _SUMS
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


# --------------------------------------------------------------------------------------------------
# The sum of the marked losses of a step, as a function of its weights and of the batch: the problem
# that is planned for a marked step.
#
# The inputs of the losses are computed as in the step, without gradients; weights that the step has
# updated count as the weights. Equations that no loss needs, such as updates, are left out.
# Gradients that the step takes otherwise, as with `jax.value_and_grad`, are computed as in the
# step, and added to the gradients of the sum.
#
# Loops run as many iterations as in the step, each from the initial values, and only branches with
# a loss run: costs are those of the step, values need not be.


def total_loss(
    program: Program,
    arguments: Sequence[Value | None],
    losses: Sequence[StepLoss],
    weights: Mapping[int, Value],
    unmarked: Mapping[int, int] | None = None,
) -> Value:
    """The sum of the marked losses: float32 scalar.

    Args:
        arguments: the state and the batch; None for arrays that no loss needs.
    """
    total = _Total(losses={loss.call.path: loss for loss in losses}, weights=weights)
    env = {**program.constants, **dict(zip(program.inputs, arguments, strict=True))}
    value = total.run(program, env, frozenset((unmarked or {}).values()))
    for position, number in (unmarked or {}).items():
        value = value + _zero_with_gradient(weights[position], env[number])
    return value


@dataclass(frozen=True, kw_only=True)
class _Total:
    losses: Mapping[str, StepLoss]
    weights: Mapping[int, Value]

    def run(
        self, program: Program, env: dict[int, Any], targets: frozenset[int] = frozenset()
    ) -> Any:
        """The sum of the losses of a program, whose inputs and constants are in `env`; also
        computes the targets.
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
            elif self._contains_loss(equation):
                values.append(self._inside(equation, env))
            elif position in needed:
                if targets:  # no second-order gradient
                    env.update(
                        (number, _stopped(env[number]))
                        for number in sorted({*equation.inputs} & inputs)
                    )
                evaluate_equations([equation], env, Walk())
        return sum(values, start=jnp.zeros((), jnp.float32))

    def _loss(self, equation: Equation) -> StepLoss | None:
        return None if equation.call is None else self.losses.get(equation.call.path)

    def _contains_loss(self, equation: Equation) -> bool:
        """True if a loss is inside of a loop or branch."""
        return any(path.startswith(f"{equation.path}/") for path in self.losses)

    def _needed(self, program: Program, targets: frozenset[int]) -> set[int]:
        """Positions of the equations that a loss or a target needs."""
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
            elif self._contains_loss(equation):
                numbers |= {*equation.inputs}
            elif not numbers.isdisjoint(equation.outputs):
                positions.add(position)
                numbers |= {*equation.inputs}
        return positions

    def _value(self, loss: StepLoss, env: dict[int, Any], program: Program) -> Any:
        def operand(number: int) -> Any:  # operands that a loss does not read may be missing
            value = env[number]
            return _zeros(program.avals[number]) if value is None else value

        first = loss.form.constants
        arguments = [_stopped(operand(number)) for number in loss.call.inputs[:first]]
        for position, (number, root) in enumerate(
            zip(loss.call.inputs[first:], loss.roots, strict=True)
        ):
            value = operand(number) if root is None else self.weights[root]
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
            conds, constants = (equation.params[f"{kind}_nconsts"] for kind in ("cond", "body"))
            body = equation.inside("body")
            value, _ = self._body(body, arguments[conds:])
            results = arguments[conds + constants :]
        else:
            assert equation.name in (*REMAT, *CUSTOM)
            body = equation.inside()
            value, results = self._body(body, arguments)
        env.update(zip(equation.outputs, results, strict=True))
        return value

    def _body(self, program: Program, arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The sum of the losses of a program, and its results as far as they are computed."""
        env = {**program.constants, **dict(zip(program.inputs, arguments, strict=True))}
        value = self.run(program, env)
        return value, [env.get(number, _zeros(program.avals[number])) for number in program.outputs]

    def _scan(self, equation: Equation, arguments: list[Any]) -> tuple[Any, list[Any]]:
        constants, carried = scan_counts(equation.params)
        fixed, sliced = arguments[: constants + carried], arguments[constants + carried :]
        body = equation.inside("body")

        def iteration(_: None, items: list[Any]) -> tuple[None, Any]:
            return None, self._body(body, [*fixed, *items])[0]

        values = jax.lax.scan(iteration, None, sliced, length=equation.params["length"])[1]
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
def _zero_with_gradient(weight: Any, gradient: Any) -> Any:
    """Zero, with a given gradient."""
    return jnp.zeros((), jnp.float32)


def _zero_forward(weight: Any, gradient: Any) -> tuple[Any, Any]:
    return jnp.zeros((), jnp.float32), gradient.reshape(weight.shape).astype(weight.dtype)


def _zero_backward(carry: Any, _: Any) -> tuple[Any, None]:
    return carry, None


_zero_with_gradient.defvjp(_zero_forward, _zero_backward)


def _stopped(value: Any) -> Any:
    floating = jnp.issubdtype(jnp.asarray(value).dtype, jnp.inexact)
    return jax.lax.stop_gradient(value) if floating else value


def _zeros(aval: Any) -> Any:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)


# --------------------------------------------------------------------------------------------------
# Gradients that a step takes outside of its marked losses, as with `jax.value_and_grad`.
#
# They are computed as written: on the whole batch, with the user's own rematerialisation.


@dataclass(frozen=True, kw_only=True)
class UnmarkedGradients:
    """Gradients that a step takes outside of its marked losses.

    Attributes:
        gradients: number of a weight in the state -> the program value of its gradient.
        unknown: weights trained outside of the losses whose gradient cannot be identified, because
            it is in a loop or branch together with a marked loss.
    """

    gradients: Mapping[int, int] = field(default_factory=dict[int, int])
    unknown: tuple[int, ...] = ()


def unmarked_gradients(
    program: Program,
    values: Mapping[int, int],
    gradients: Mapping[int, int],
    losses: Sequence[StepLoss],
    state: int,
) -> UnmarkedGradients:
    """The gradients that a step takes outside of its marked losses; empty if it marks none.

    Args:
        values: number of a value of the program -> value of its graph.
        gradients: weight -> the graph value of its gradient.
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
    """True if an equation belongs to a marked loss or contains one."""
    inside = equation.call is not None and equation.call.path in calls
    return inside or any(path.startswith(f"{equation.path}/") for path in calls)


def _read(number: int, makers: Mapping[int, Equation], calls: set[str]) -> set[int]:
    """The values that a value depends on, up to marked losses."""
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
# A step as a program, and as a planning problem like that of a loss.
#
# The planner expects a loss with its gradients, and bytes of optimizer state. In a step, weights
# and gradients are found by data flow, the optimizer state per weight is counted, and operations
# that only the update needs are left out of the problem, which prices an update by its bytes. The
# program that runs is the whole step.

_with_paths = jax.tree_util.tree_leaves_with_path
#: (state, batch) -> (new state, metrics), or the new state alone.
Step = Callable[[Tree, Tree], Tree]


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step as a program.

    Attributes:
        name: name of the step.
        jaxpr: its jaxpr, with its constants.
        program: the program over the leaves of the state, then of the batch.
        problem: the planning problem; `problem.forward` is the whole step.
        roles: roles of the state arrays.
        paths: paths of the state arrays.
        state, batch, metrics: abstract arrays.
        returns_pair: whether the step returns (new state, metrics) rather than the new state alone.
        losses: marked losses, in order.
        unmarked: gradients taken outside of marked losses, in a step that marks some.
        others: kinds of the custom calls outside of marked losses.
        layouts: layouts written in the step, with values of `problem.forward`.
        findings: findings about names of its state.
    """

    name: str
    jaxpr: jex.ClosedJaxpr
    program: Program
    problem: Problem
    roles: StateRoles
    paths: tuple[str, ...]
    state: Tree
    batch: Tree
    metrics: Tree
    returns_pair: bool = True
    losses: tuple[StepLoss, ...] = ()
    unmarked: UnmarkedGradients = field(default_factory=UnmarkedGradients)
    others: frozenset[str] = frozenset()
    layouts: tuple[LayoutOfValue, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def trained(self) -> frozenset[int]:
        """Numbers of the state arrays that its marked losses train."""
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
    if isinstance(step, FunctionType) and hasattr(
        step, "lower"
    ):  # functions under `jax.jit` are not FunctionType
        raise TracingError(
            f"the step {name} is under jax.pmap, which has devices of its own\nTry: the function"
            " itself and the whole batch; lax.pmean and the like may stay"
        )
    step = names_alone()(step)
    shapes = abstract((state, batch))
    described = describe_batch(shapes[1], batch_axes)
    if not described:
        raise BatchError("the batch has no rows: it holds no arrays\nTry: at least one array")
    require_rows(described)
    step, mapped, jaxpr, out = _traced(step, shapes, name)
    pair = _is_pair(shapes[0], out, name)
    new, metrics = out if pair else (out, {})
    paths = tuple(
        path_text(path) or "state" for path, _ in jax.tree_util.tree_leaves_with_path(shapes[0])
    )
    _require_same_form(shapes[0], new)
    program = flatten(jaxpr)
    inputs = [*((path, "state") for path in paths), *((path, "batch") for path, *_ in described)]
    translation = translated(program, inputs)
    graph, calls = translation.graph, translation.calls
    graph = tied_parts(graph, _rows(graph, len(paths), described))
    rows = _rows(graph, len(paths), described)
    roles = state_roles(graph, len(paths), rows)
    retrace = _retrace(step, shapes, described)
    losses = step_losses(calls, graph, len(paths), roles.weights, name, rows, retrace)
    unmarked = unmarked_gradients(program, translation.values, roles.gradients, losses, len(paths))
    named, findings = of_state(shapes[0], axes, stacks, roles.weights)
    return TracedStep(
        name=name,
        jaxpr=jaxpr,
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


def _retrace(step: Step, shapes: tuple[Tree, Tree], described: Sequence[BatchArray]) -> Retrace:
    """A function that traces the step for a larger batch and returns the losses that it marks."""
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
    def retrace(ratio: Fraction) -> tuple[MarkedLoss, ...]:
        pairs = zip(leaves, described, strict=True)
        batch = structure.unflatten([sized(leaf, axes, ratio) for leaf, (*_, axes) in pairs])
        jaxpr = jax.make_jaxpr(step)(shapes[0], batch)
        forms = dict.fromkeys(form for form, _ in forms_of(jaxpr) if isinstance(form, MarkedLoss))
        return tuple(forms)

    return retrace


def _is_pair(state: Tree, out: Any, name: str) -> bool:
    """True if a step returns (new state, metrics) rather than the new state alone."""
    if isinstance(out, tuple) and len(out) == 2 and not same_form(state, out):
        return True
    if type(out) is not type(state):
        raise TracingError(
            f"the step {name} returns {type(out).__name__}; a step returns the new state, or a"
            " pair (new state, metrics)\nTry: return state, {'loss': loss}"
        )
    return False


def same_form(first: Tree, second: Tree) -> bool:
    """True if two trees have the same structure, shapes and dtypes; static functions may be
    recreated.
    """
    same = not static_difference(jax.tree.structure(first), jax.tree.structure(second))
    return same and all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


def _require_same_form(before: Tree, after: Tree) -> None:
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


def _rows(graph: Graph, count: int, arrays: tuple[BatchArray, ...]) -> frozenset[tuple[int, int]]:
    """(value, dim) of dims that some operations tie to the rows of the batch."""
    inputs = zip(graph.inputs[count:], arrays, strict=True)
    return rows_of(graph, [(value, axes) for value, (_, _, _, axes) in inputs])


def _problem(
    graph: Graph,
    roles: StateRoles,
    paths: tuple[str, ...],
    described: tuple[BatchArray, ...],
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
    bytes_per_element = _state_bytes_per_element(full_graph, roles)
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
        compute_dtype=compute_dtype(step),
    )


def _state_bytes_per_element(graph: Graph, roles: StateRoles) -> Mapping[int, float]:
    """Bytes of followers per element of a trained weight: those of its shape, shared evenly among
    the weights of that shape; the rest is spread over all.
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
        number: of_shape + (remaining / elements if elements else 0.0)
        for number, of_shape in bytes_per_element.items()
    }
