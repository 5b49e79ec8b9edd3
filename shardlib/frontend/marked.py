"""A step of the user's own under a plan: losses that it marks with `shardlib.value_and_grad`
planned and lowered as models, and the layouts of its state and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from shardlib.annotation.model import no_mesh
from shardlib.annotation.names import Model, PureLoss
from shardlib.annotation.trees import Tree, path_text
from shardlib.decisions.pins import PinMapping, full_names
from shardlib.decisions.table import PinValue
from shardlib.errors import PinError, raise_all
from shardlib.findings import Finding, diagnostic
from shardlib.frontend.lowered import lower
from shardlib.frontend.model import Loss, TracedModel
from shardlib.graph import Dependence, Parameter, Problem, Rows
from shardlib.jax_types import Value
from shardlib.layout import INNER_AXES, Layout, LogicalAxes
from shardlib.lowering.collectives import cast_like
from shardlib.lowering.mesh import constrain_tree
from shardlib.lowering.program import Program
from shardlib.machines.topology import Topology
from shardlib.planner.layouts import stored_layout
from shardlib.planner.plan import ParameterLayout, Plan
from shardlib.planner.search import search
from shardlib.propagation.colours import Colouring, colour
from shardlib.propagation.contractions import layout_constraints
from shardlib.tracing.steps import StepLoss, TracedStep, tied_rows, total_loss
from shardlib.tracing.trace import trace

# --------------------------------------------------------------------------------------------------
# One marked loss as a model with a loss, as `shardlib.compile` has them.
#
# Its params are those that the step gives it, and the weights among the rest, which are frozen;
# its batch is all else. Dims have the names that the step's colouring gave them, so that the rules
# of the step's plan are rules of the loss.

#: Of a loss that gets parts of the batch of a fixed number of rows, or nothing of it.
_ROWLESS = Dependence(
    kind="coupled", why="none of its arrays grows with the rows of the batch", fixed=True
)


@dataclass(frozen=True, kw_only=True)
class SingleLoss:
    """A marked loss as a model with a loss.

    Attributes:
        found: where it stands in the step.
        model: the model, the loss, and their trace.
        params: (path, position among the leaves of the loss) of the params of the model, in the
            order of its tree.
        batch: the same of the arrays of its batch.
        names: of the dims of each array of the batch, by path.
    """

    found: StepLoss
    model: TracedModel
    params: tuple[tuple[str, int], ...]
    batch: tuple[tuple[str, int], ...]
    names: dict[str, LogicalAxes]

    @property
    def leaves(self) -> tuple[tuple[str, str], ...]:
        """Returns where its arrays belong, to the "params", the "frozen" params or the "batch", and
        their paths there.
        """
        frozen = self.model.model.frozen
        places = {
            position: ("frozen" if path in frozen else "params", path)
            for path, position in self.params
        }
        places |= {position: ("batch", path) for path, position in self.batch}
        return tuple(places[position] for position in range(len(places)))

    def arguments(self, leaves: Sequence[Value]) -> tuple[dict[str, Value], dict[str, Value]]:
        """(params, batch) of the model for the leaves of the loss."""
        return (
            {path: leaves[position] for path, position in self.params},
            {path: leaves[position] for path, position in self.batch},
        )


def single_loss(traced: TracedStep, marked: StepLoss, colouring: Colouring) -> SingleLoss:
    """A marked loss of a step by itself."""
    names, form = colouring.forward, marked.form
    shapes = form.shapes
    weights = [*marked.trained, *marked.frozen]
    params = _unique([(traced.paths[_root(marked, position)], position) for position in weights])
    batch = _unique([(form.paths[position], position) for position in marked.others])
    sizes = _rows(traced), marked.rows
    axes = {
        path: _single_named(
            names[marked.operands[position]], shapes[position].shape, position, *sizes
        )
        for path, position in batch
    }
    loss = _pure(marked, params, batch)
    model = Model(
        name=form.name,
        init=lambda seed: ({}, {}),
        params={path: shapes[position] for path, position in params},
        state={},
        axes={path: _once(names[marked.operands[position]]) for path, position in params},
        bind=lambda loss: loss,
        rebuild=lambda params, state: params,
        frozen=frozenset(path for path, position in params if position in marked.frozen),
    )
    abstract_batch = {path: shapes[position] for path, position in batch}
    with no_mesh():
        read = trace(
            model, loss, abstract_batch, batch_axes=axes, policies=("none",), rows=form.rows
        )
    problem = tied_rows(read.problem)
    if not any("batch" in names_of_array for names_of_array in axes.values()) and any(
        "batch" in names_of_array for *_, names_of_array in traced.problem.batch
    ):
        problem = replace(problem, rows=Rows(loss=_ROWLESS))
    read = replace(read, problem=problem)
    return SingleLoss(
        found=marked,
        model=TracedModel(
            model=model,
            traced=read,
            loss=cast(Loss, loss),
            optimizer=optax.identity(),
            batch=abstract_batch,
        ),
        params=params,
        batch=batch,
        names={path: axes for path, _, _, axes in read.problem.batch},
    )


def _pure(
    marked: StepLoss, params: Sequence[tuple[str, int]], batch: Sequence[tuple[str, int]]
) -> PureLoss:
    """(params, state, batch) -> (loss, (auxiliary results by name, state))."""

    def loss(params_given: Tree, state: Tree, rows: Tree) -> Any:
        leaves: list[Any] = [None] * len(marked.operands)
        for values, paths in ((params_given, params), (rows, batch)):
            for path, position in paths:
                leaves[position] = values[path]
        value, aux = marked.function(leaves)
        return value, ({name: jnp.asarray(leaf) for name, leaf in _results(aux)}, state)

    return loss


def written_name(name: str) -> str:
    """The name of an auxiliary result as the user wrote it; "" of the only one."""
    return name.partition(".")[2]


def _results(aux: Tree) -> list[tuple[str, Any]]:
    """The auxiliary results by name, in an order that sorting keeps."""
    leaves = jax.tree_util.tree_leaves_with_path(aux)
    return [
        (f"{number:04}.{path_text(path)}".rstrip("."), leaf)
        for number, (path, leaf) in enumerate(leaves)
    ]


def _root(marked: StepLoss, position: int) -> int:
    root = marked.roots[position]
    assert root is not None
    return root


def _unique(named: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """(path, position) with other paths for what comes twice, in the order of a dict's leaves."""
    seen: dict[str, int] = {}
    for path, position in named:
        while path in seen:
            path += "'"
        seen[path] = position
    return tuple(sorted(seen.items()))


def _rows(traced: TracedStep) -> int | None:
    """The number of rows of the batch; None where arrays of it have different numbers."""
    sizes = {
        size
        for _, shape, _, names in traced.problem.batch
        for size, name in zip(shape, names, strict=True)
        if name == "batch"
    }
    return sizes.pop() if len(sizes) == 1 else None


def _single_named(
    names: LogicalAxes,
    shape: tuple[int, ...],
    position: int,
    count: int | None,
    rows: Mapping[int, int] | None,
) -> LogicalAxes:
    """The names of an array beside the params.

    Args:
        count: rows of the batch, None where it has several numbers.
        rows: dims of rows by position; None where they are read off names and sizes.
    """
    once = _once(names)
    if rows is not None:
        dim = rows.get(position)
        return tuple(
            "batch" if index == dim else None if name == "batch" else name
            for index, name in enumerate(once)
        )
    if "batch" in once or not shape or shape[0] != count or once[0] is not None:
        return once
    return ("batch", *once[1:])


def _once(names: LogicalAxes) -> LogicalAxes:
    """Names of which each stands once."""
    return tuple(None if name in names[:index] else name for index, name in enumerate(names))


# --------------------------------------------------------------------------------------------------
# All marked losses of a step as one problem: what the search plans.

#: Begins the names of arrays of the state that a loss needs and that are not weights.
STATE = "state:"


def total_problem(traced: TracedStep) -> Problem:
    """The sum of the marked losses of a step as a problem; how it depends on rows is not known."""
    weights = {
        index: path
        for index, path in enumerate(traced.paths)
        if index in {*traced.roles.weights, *_roots(traced)}
    }
    trained = {*traced.trained, *traced.roles.gradients}
    leaves = jax.tree.leaves(traced.state)
    described = traced.problem.batch
    batch = {
        _key(path): leaf
        for (path, *_), leaf in zip(described, jax.tree.leaves(traced.batch), strict=True)
    }
    others = {
        f"{STATE}{path}": leaves[index]
        for index, path in enumerate(traced.paths)
        if index not in weights
    }

    def loss(params: dict[str, Value], arrays: dict[str, Value]) -> Value:
        values = {index: params[path] for index, path in weights.items()}
        arguments = [
            values[index] if index in values else arrays.get(f"{STATE}{path}")
            for index, path in enumerate(traced.paths)
        ]
        rows = [arrays[_key(path)] for path, *_ in described]
        return total_loss(
            traced.program, [*arguments, *rows], traced.losses, values, traced.unmarked.gradients
        )

    named: dict[str, LogicalAxes] = {
        parameter.path: parameter.axes for parameter in traced.problem.parameters
    }
    model = _model(
        traced.name,
        {path: leaves[index] for index, path in weights.items()},
        named,
        frozenset(path for index, path in weights.items() if index not in trained),
    )
    axes = {_key(path): names for path, _, _, names in described}
    needed = _needed(loss, model.params, batch, others)
    with no_mesh():
        total = trace(
            model,
            loss,
            {**batch, **needed},
            batch_axes={**axes, **{key: (None,) * leaf.ndim for key, leaf in needed.items()}},
            rows="mean",
        ).problem
    total = tied_rows(total)
    originals = {parameter.path: parameter for parameter in traced.problem.parameters}
    return replace(
        total,
        forward=replace(
            total.forward,
            findings=(
                *total.forward.findings,
                *(
                    parameter
                    for parameter in traced.problem.forward.findings
                    if parameter.code == "mapped-axis"
                ),
                *_uncounted(traced),
            ),
        ),
        parameters=tuple(
            _with_state(parameter, originals.get(parameter.path)) for parameter in total.parameters
        ),
        state_bytes=traced.problem.state_bytes,
        tokens=traced.problem.tokens,
    )


@diagnostic
def _uncounted(traced: TracedStep) -> tuple[Finding, ...]:
    """Returns what the problem leaves out."""
    if not traced.unmarked.unknown:
        return ()
    return (
        Finding(
            code="unmarked-gradient",
            severity="warning",
            message=(
                "gradients are taken outside of the marked losses, in a loop or a branch that has"
                " a marked loss, too; the step computes them, and their time and bytes are not"
                " counted"
            ),
            where=", ".join(traced.paths[index] for index in traced.unmarked.unknown[:4]),
            hint="shardlib.value_and_grad for their loss, too",
        ),
    )


def _roots(traced: TracedStep) -> set[int]:
    return {root for loss in traced.losses for root in loss.roots if root is not None}


def _key(path: str) -> str:
    """The path of an array of the batch without the word in front, which `trace` adds again."""
    return path.removeprefix("batch").removeprefix(".")


def _model(
    name: str, params: Tree, axes: Mapping[str, LogicalAxes], frozen: frozenset[str]
) -> Model:
    """A model whose loss is (params, batch) -> scalar."""

    def bind(loss: Any) -> Any:
        return lambda params, state, batch: (loss(params, batch), ({}, state))

    return Model(
        name=name,
        init=lambda seed: (params, {}),
        params=params,
        state={},
        axes=axes,
        bind=bind,
        rebuild=lambda params, state: params,
        frozen=frozen,
    )


def _needed(
    loss: Callable[..., Value], params: Tree, batch: dict[str, Value], others: dict[str, Value]
) -> dict[str, Value]:
    """Those of the other arrays of the state that the losses are computed from."""
    closed = jax.make_jaxpr(loss)(params, {**batch, **others})
    read = {id(atom) for eqn in closed.jaxpr.eqns for atom in eqn.invars}
    keys = sorted({**batch, **others})
    inputs = closed.jaxpr.invars[len(params) :]
    return {
        key: others[key]
        for key, var in zip(keys, inputs, strict=True)
        if key in others and id(var) in read
    }


def _with_state(parameter: Parameter, original: Parameter | None) -> Parameter:
    """A parameter with what the step keeps for it."""
    if original is None or not parameter.trained:
        return parameter
    return replace(
        parameter,
        state_bytes_per_element=original.state_bytes_per_element,
        state_arrays=original.state_arrays,
    )


# --------------------------------------------------------------------------------------------------
# Decisions that can be fixed by hand for a step, and those that are fixed for every step.

#: Decisions that a step leaves open.
OPEN: frozenset[str] = frozenset({"mesh", "rules", "sequence_parallel", "zero", "axis_order"})
#: Mesh axes of a step.
STEP_AXES: tuple[str, ...] = ("data", "fsdp", "tensor")
#: The others, which need the loss apart from its gradients and its update.
FIXED: PinMapping = {
    "microbatches": 1,
    "remat": "none",
    "attention": "traced",
    "collective_matmul": "none",
    "offload": [],
}
#: Decisions about what a marked step has outside of its losses, as they are for every one.
CLOSED: PinMapping = {
    "offload": [],
    "pipeline": "lockstep",
    "exchange": "exact",
    "dtypes": {},
    "allow": {},
    **dict.fromkeys(
        ("param_dtype", "gradient_dtype", "reduction_dtype", "moment_dtype", "matmul_dtype"), None
    ),
}


def step_pins(pin: PinMapping | None) -> PinMapping:
    """The pins of a search for a step."""
    pins = full_names(pin or {})
    refused = [
        word
        for word in pins
        if word.split(".")[0] not in OPEN and not (word in FIXED and pins[word] == FIXED[word])
    ]
    if refused:
        raise PinError(
            f"{', '.join(refused)}: a step has its loss, its gradients and its update inside, and"
            f" this needs them apart\nTry: shardlib.value_and_grad(loss) in the step, which marks"
            f" it; of a step that does not, {', '.join(sorted(OPEN))} can be pinned"
        )
    others = [axis for axis in INNER_AXES if axis not in STEP_AXES]
    sizes = _sizes(pins)
    wrong = [axis for axis in others if sizes.get(axis, 1) not in (None, 1)]
    if wrong:
        raise PinError(
            f"the mesh of a step has no axis {', '.join(wrong)}: it needs the loss apart from its"
            f" update\nTry: {', '.join(STEP_AXES)}; or shardlib.value_and_grad(loss) in the step"
        )
    trivial = {} if pins.get("mesh") is not None else {f"mesh.{axis}": 1 for axis in others}
    return {**FIXED, **trivial, **pins}


def marked_pins(pin: PinMapping | None, unstaged: str, unsharded: str) -> PinMapping:
    """The pins of a search for a step that marks its losses."""
    pins = full_names(pin or {})
    refused = [word for word in pins if word in CLOSED and pins[word] != CLOSED[word]]
    if refused:
        raise PinError(
            f"{', '.join(refused)}: a step updates its state itself, in dtypes and memories of its"
            " own\nTry: shardlib.compile(init, loss, optimizer, batch)"
        )
    why = {
        **({"stage": unstaged} if unstaged else {}),
        **({"context": unsharded, "expert": unsharded} if unsharded else {}),
    }
    sizes = _sizes(pins)
    wrong = [
        f"{axis}: {reason}" for axis, reason in why.items() if sizes.get(axis, 1) not in (None, 1)
    ]
    if wrong:
        raise_all(
            PinError,
            "the mesh of this step has no such axes",
            wrong,
            hint="one marked loss that gets all weights and has all calls",
        )
    trivial = {} if "mesh" in pins else {f"mesh.{axis}": 1 for axis in why}
    return {**{word: CLOSED[word] for word in ("offload", "pipeline")}, **trivial, **pins}


def _sizes(pins: Mapping[str, PinValue]) -> dict[str, PinValue]:
    """Pinned sizes of mesh axes, None where one is left open."""
    mesh = pins.get("mesh")
    return {
        **{
            word.removeprefix("mesh."): size
            for word, size in pins.items()
            if word.startswith("mesh.")
        },
        **({str(axis): size for axis, size in mesh.items()} if isinstance(mesh, Mapping) else {}),
    }


# --------------------------------------------------------------------------------------------------
# A step that marks its losses, as it is planned.
#
# step -> its losses -> their sum, a problem -> names of all dims -> each loss by itself -> rows
#                       search -> plan -> each loss lowered as `shardlib.compile` lowers one


@dataclass(frozen=True, kw_only=True)
class MarkedStep:
    """A step that marks its losses.

    Attributes:
        traced: the step; its problem has the names of the plan.
        colouring: of that problem.
        problem: what is planned.
        losses: each by itself.
    """

    traced: TracedStep
    colouring: Colouring
    problem: Problem
    losses: tuple[SingleLoss, ...]

    @staticmethod
    def of(traced: TracedStep) -> MarkedStep:
        """A traced step as it is planned."""
        problem = total_problem(traced)
        named = _planned_named(traced, problem)
        colouring = colour(named.problem)
        losses = tuple(single_loss(named, loss, colouring) for loss in named.losses)
        rows = _together([loss.model.traced.problem.rows for loss in losses], losses)
        return MarkedStep(
            traced=named, colouring=colouring, problem=replace(problem, rows=rows), losses=losses
        )

    @property
    def unstaged(self) -> str:
        """Returns why the step has no pipeline stages; "" where it may have some."""
        if len(self.losses) > 1:
            return f"it marks {len(self.losses)} losses"
        [loss] = list(self.losses)
        if any(kind in loss.found.call.path for kind in ("/body/", "/branch")):
            return "its loss stands in a loop or a branch"
        if self.problem.rows.by_row:
            listed = ", ".join(name for name, _ in self.problem.rows.by_row)
            return f"its loss returns values for every row, {listed}"
        passed = {path for path, _ in loss.params}
        unpassed = sorted({parameter.path for parameter in self.problem.parameters} - passed)
        if unpassed:
            return f"it computes with weights that its loss does not get: {', '.join(unpassed[:4])}"
        return ""

    @property
    def unsharded(self) -> str:
        """Returns why the step has no context and expert axes; "" where it may have them."""
        if not self.traced.others:
            return ""
        return f"{', '.join(sorted(self.traced.others))} is called outside of the marked losses"

    def searched(self, machine: Topology, pin: PinMapping | None) -> tuple[MarkedStep, Plan]:
        """The plan, and the step with what the search taught of its rows."""
        pins = marked_pins(pin, self.unstaged, self.unsharded)
        plan = search(self.problem, machine, pins)
        if plan.microbatches > 1:
            rows_of_losses = [loss.model.traced.rows_in(plan.microbatches) for loss in self.losses]
            rows = _together(rows_of_losses, self.losses)
            if not rows.splits:
                step = replace(self, problem=replace(self.problem, rows=rows))
                return step, search(step.problem, machine, pins)
        return self, replace(plan, findings=(*plan.findings, *self._in_one_piece(plan)))

    @diagnostic
    def _in_one_piece(self, plan: Plan) -> tuple[Finding, ...]:
        """Returns what the plan counts in microbatches, and the step does for the whole batch."""
        taken = [self.traced.paths[index] for index in self.traced.unmarked.gradients]
        if plan.microbatches == 1 or not taken:
            return ()
        return (
            Finding(
                code="unmarked-gradient",
                severity="warning",
                message=(
                    "gradients are taken outside of the marked losses, of the whole batch at once;"
                    f" the activations kept for them are counted as those of one of"
                    f" {plan.microbatches} microbatches"
                ),
                where=", ".join(taken[:4]),
                hint="shardlib.value_and_grad for their loss, too",
            ),
        )


def _planned_named(traced: TracedStep, problem: Problem) -> TracedStep:
    """The step with the names that the colouring of the planned problem gives."""
    colouring = colour(problem)
    return replace(
        traced,
        problem=replace(
            traced.problem,
            parameters=tuple(
                replace(parameter, axes=colouring.parameters.get(parameter.path, parameter.axes))
                for parameter in traced.problem.parameters
            ),
            batch=tuple(
                (path, shape, dtype, colouring.batch.get(path, names))
                for path, shape, dtype, names in traced.problem.batch
            ),
        ),
    )


def _together(rows_of_losses: list[Rows], losses: tuple[SingleLoss, ...]) -> Rows:
    """Returns how several losses depend on the rows of the batch, as one: the first is the loss,
    all else are metrics.
    """
    several = len(losses) > 1
    dependences: list[tuple[str, Dependence]] = []
    for loss, rows in zip(losses, rows_of_losses, strict=True):
        name = loss.found.form.name
        dependences.append((name, rows.loss))
        dependences += [
            (
                " ".join(filter(None, (name if several else "", written_name(path)))) or "aux",
                dependence,
            )
            for path, dependence in rows.metrics
        ]
    return Rows(
        loss=dependences[0][1],
        metrics=tuple(dependences[1:]),
        asserted=all(rows.asserted for rows in rows_of_losses),
    )


# --------------------------------------------------------------------------------------------------
# The marked losses of a step as programs, in the places of their calls.


def lower_losses(
    step: MarkedStep, plan: Plan, devices: Sequence[jax.Device] | None
) -> LoweredLosses:
    """Lowers the marked losses of a step.

    Args:
        devices: to run on; None for none, where it is only compiled.
    """
    programs = [
        lower(
            loss.model,
            loss_plan(plan, loss),
            **({"abstract": True} if devices is None else {"devices": devices}),
        )
        for loss in step.losses
    ]
    return LoweredLosses(
        calls={
            loss.found.call.path: _in_place(loss, program)
            for loss, program in zip(step.losses, programs, strict=True)
        },
        findings=tuple(
            dict.fromkeys(finding for program in programs for finding in program.findings)
        ),
    )


def loss_plan(plan: Plan, loss: SingleLoss) -> Plan:
    """The plan of a step as one of a marked loss alone."""
    planned = {layout.path: layout for layout in plan.parameters}
    shapes = {path: shape for path, shape, _, _ in loss.model.traced.problem.batch}
    frozen = loss.model.model.frozen
    return replace(
        plan,
        parameters=tuple(
            _as_given(planned[path.rstrip("'")], path, path in frozen) for path, _ in loss.params
        ),
        batch_layouts=tuple(
            (path, plan.rules.resolve(loss.names[path], shape, plan.mesh).layout)
            for path, shape in shapes.items()
        ),
        source=None,
    )


def _as_given(layout: ParameterLayout, path: str, frozen: bool) -> ParameterLayout:
    """The layouts of a weight as a parameter of a loss."""
    if not frozen:
        return replace(layout, path=path)
    return replace(layout, path=path, role="frozen", gradient=layout.compute, state=layout.rest)


def _in_place(loss: SingleLoss, program: Program) -> InPlace:
    """Returns what takes the place of the call of a loss: operands -> value, auxiliary results,
    gradients of the trained leaves.
    """
    parts, form = program.parts, loss.found.form
    trained = [path for path, position in loss.params if position in loss.found.trained]
    positions = dict(loss.params)

    def run(*operands: Value) -> list[Value]:
        params, batch = loss.arguments(operands[form.constants :])
        (value, (metrics, _)), grads = parts.run.gradients(params, {}, batch)
        stored = cast_like(
            constrain_tree(grads, parts.param_shardings.gradient), parts.update_params
        )
        gradients = {positions[path]: stored[path] for path in trained}
        traced = [var.aval for var in loss.model.traced.closed_jaxpr.jaxpr.outvars]
        results = [value, *(metrics[name] for name in sorted(metrics))]
        return [
            *(_in_dtype(result, aval.dtype) for result, aval in zip(results, traced, strict=False)),
            *(gradients[position] for position in loss.found.trained),
        ]

    return run


def _in_dtype(value: Value, dtype: jnp.dtype) -> Value:
    """A mean over microbatches in the dtype of the result."""
    if value.dtype == dtype:
        return value
    return (value if jnp.issubdtype(dtype, jnp.inexact) else jnp.round(value)).astype(dtype)


# --------------------------------------------------------------------------------------------------
# Shardings of a step's state, and of the values of the step.
#
# Weights have the plan's stored sharding. Arrays of state that follow a weight, such as moments,
# have its shape and colours, and the plan's sharding of optimizer state. Activations and operands
# of contractions are constrained as in a loss (`shardlib.propagation.contractions`), and gradients,
# which are ordinary values of a step, to the plan's sharding of gradients.

#: Layouts of values, by the path of the equation that makes them and the index of the result.
Pinned = Mapping[tuple[str, int], Layout]


@dataclass(frozen=True, kw_only=True)
class StepLayouts:
    """Layouts of a step.

    Attributes:
        state: stored layout of each array of the state.
        batch: layout of each array of the batch.
        values: layouts of values of the step, see `shardlib.propagation.contractions`.
    """

    state: tuple[Layout, ...]
    batch: tuple[Layout, ...]
    values: Pinned


def layouts(traced: TracedStep, plan: Plan, colouring: Colouring) -> StepLayouts:
    """The layouts of a step under a plan."""
    graph, names = traced.problem.forward, colouring.forward
    planned = {parameter.path: parameter for parameter in plan.parameters}
    state: list[Layout] = []
    alike: dict[tuple[tuple[int, ...], LogicalAxes], Layout] = {}
    for path, value in zip(traced.paths, graph.inputs, strict=False):
        if path in planned and planned[path].trained:
            alike.setdefault((graph.values[value].shape, names[value]), planned[path].state)
    followers = set(traced.roles.followers)
    for index, path in enumerate(traced.paths):
        value = graph.inputs[index]
        shape = graph.values[value].shape
        if path in planned:
            state.append(planned[path].rest)
        elif index in followers:
            layout = alike.get((shape, names[value]))
            state.append(_follower(plan, names[value], shape) if layout is None else layout)
        else:
            state.append(Layout.replicated(len(shape)))
    batch = dict(plan.batch_layouts)
    return StepLayouts(
        state=tuple(state),
        batch=tuple(batch[path] for path, *_ in traced.problem.batch),
        values={
            **layout_constraints(graph, names, plan.rules, plan.mesh, colouring.batch_colour),
            **_gradients(traced, plan),
        },
    )


def _follower(plan: Plan, names: LogicalAxes, shape: tuple[int, ...]) -> Layout:
    layout = plan.rules.resolve(names, shape, plan.mesh).layout
    return stored_layout(layout, shape, plan.mesh, frozenset()) if plan.zero else layout


def _gradients(traced: TracedStep, plan: Plan) -> Pinned:
    """The layouts of gradients of weights, at the equations that make them."""
    graph = traced.problem.forward
    producers = {
        value: (op.path, index) for op in graph.ops for index, value in enumerate(op.results)
    }
    planned = {parameter.path: parameter for parameter in plan.parameters}
    return {
        producers[value]: planned[traced.paths[index]].gradient
        for index, value in traced.roles.gradients.items()
    }


#: Operands of a call -> value, auxiliary results, gradients of the trained leaves.
InPlace = Callable[..., Sequence[Value]]


@dataclass(frozen=True, kw_only=True)
class LoweredLosses:
    """The marked losses of a step, lowered; empty if a step marks none.

    Attributes:
        calls: replacement of each call, by its path.
        findings: findings of their lowering.
    """

    calls: Mapping[str, InPlace] = field(default_factory=dict[str, InPlace])
    findings: tuple[Finding, ...] = ()
