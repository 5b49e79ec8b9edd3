"""A plan as a file of plain JAX that needs no shardlib: tables of layouts, and the text of
`shardlib.lowering.plain`, which carries them out.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax

from shardlib._jax_compat import open_jaxpr, scan_counts
from shardlib.errors import PlanError, raise_all
from shardlib.frontend import marked
from shardlib.frontend.lowered import interleaving_of, placements_of
from shardlib.frontend.model import TracedModel
from shardlib.graph import Problem
from shardlib.jax_types import Jaxpr
from shardlib.layout import INNER_AXES, Layout
from shardlib.lowering import plain
from shardlib.lowering.accumulation import microbatch_of
from shardlib.lowering.contractions import only_scatters
from shardlib.lowering.loss_layouts import ValueLayouts
from shardlib.lowering.mesh import batch_dims, plan_indices
from shardlib.lowering.uses import LossJaxpr, same_program, trace_loss
from shardlib.machines.topology import device_order
from shardlib.matrix_updates import CAUSE
from shardlib.planner.plan import ParameterLayout, Plan, source_of
from shardlib.propagation.colours import Colouring
from shardlib.propagation.contractions import gather_key, gradient_key, use_key
from shardlib.report.elements import seconds_text
from shardlib.tracing import layouts
from shardlib.tracing.program import (
    CUSTOM,
    REMAT,
    Equation,
    Program,
    callee,
    find_repeats,
    flatten,
    result_path,
    with_frozen,
)
from shardlib.tracing.row_kinds import line_of
from shardlib.tracing.steps import TracedStep

#: Primitives that draw random numbers.
_DRAWS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})
#: Path of an operation and index of its result -> what a file calls it, its shape, the user's line.
Values = Mapping[tuple[str, int], tuple[str, tuple[int, ...], str]]


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """A loss that a step marks.

    Attributes:
        path: of its call in the step.
        name: of the user's function.
        model: the loss by itself.
        plan: of the step, as one of the loss alone.
        leaves: where its arrays belong, "params", "frozen" or "batch", and their paths.
    """

    path: str
    name: str
    model: TracedModel
    plan: Plan
    leaves: Sequence[tuple[str, str]]


def plain_text(model: TracedModel, plan: Plan, mode: str) -> str:
    """A plan as a file of plain JAX."""
    frozen = [parameter.path for parameter in plan.parameters if not parameter.trained]
    others = [f"frozen parameters ({', '.join(frozen[:4])})"] if frozen else []
    _require([*_of_plan(plan), *_of_model(model, plan), *others], plan)
    tables = {"LOSSES": _dict({"loss": _loss_layouts(model, plan)})}
    return _written(plan, mode, tables, _OF_LOSS, own=bool(model.traced.layouts))


def plain_step_text(
    traced: TracedStep, losses: Sequence[StepLoss], plan: Plan, colouring: Colouring, mode: str
) -> str:
    """The plan of a step as a file of plain JAX."""
    _require(
        [
            *_of_plan(plan),
            *_of_step(traced, losses),
            *(
                f"in the loss {loss.name}: {what}"
                for loss in losses
                for what in _of_model(loss.model, loss.plan)
            ),
        ],
        plan,
    )
    names = plain.names(plain.flatten(traced.jaxpr))
    marked = {
        names[loss.path]: {
            **_loss_layouts(loss.model, loss.plan),
            "leaves": repr(list(loss.leaves)),
        }
        for loss in losses
    }
    return _written(
        plan,
        mode,
        {"LOSSES": _dict(marked), "STEP": _layouts_text(_step_layouts(traced, plan, colouring))},
        _OF_STEP,
        own=bool(traced.layouts),
    )


def _require(failures: Sequence[str], plan: Plan) -> None:
    if failures:
        raise_all(
            PlanError,
            f"plain JAX cannot express the plan of {plan.model}",
            list(dict.fromkeys(failures)),
            hint="pin decisions away (what the model itself calls stays); or run the plan with"
            " shardlib.compile",
        )


def _of_plan(plan: Plan) -> list[str]:
    """Decisions that a plain `jax.jit` of the loss cannot carry out."""
    facts = {
        f"pipeline stages (stage={plan.mesh['stage']})": plan.mesh["stage"] > 1,
        f"islands (exchange={plan.exchange})": plan.exchange.islands > 1,
        f"a context axis (context={plan.context})": plan.mesh["context"] > 1,
        f"routed experts (experts={plan.experts})": plan.experts != "none",
        f"a kernel of attention (attention={plan.attention})": plan.attention != "traced",
        "collective matmul (collective_matmul=loop)": plan.collective_matmul == "loop",
        f"{CAUSE} made whole (optimizer_layout={plan.optimizer_layout})": CAUSE
        in {collective.cause for collective in plan.estimate.collectives},
        f"memory of the host (offload={list(plan.offload)})": bool(plan.offload),
        f"dtypes of the plan ({dict(plan.dtypes)})": bool(dict(plan.dtypes)),
        "rematerialisation of some layers alone (remat_layers, remat_classes)": bool(
            plan.remat_layers or plan.remat_classes
        ),
    }
    return [what for what, holds in facts.items() if holds]


def _of_model(model: TracedModel, plan: Plan) -> list[str]:
    """Returns what of a model and its loss such a file has no form for."""
    loss, rows = _whole(model), model.traced.problem.rows
    reading = loss.facts(len(jax.tree.leaves(model.model.params)))
    interleaved = interleaving_of(model.traced, plan)
    several = plan.microbatches > 1
    facts = {
        "state of the model beside its parameters, such as statistics and random streams": bool(
            jax.tree.leaves(model.model.state)
        ),
        "calls of shardlib.attention or shardlib.functions": bool(reading.calls),
        "a fused dim whose pieces are interleaved": bool(
            interleaved.parameters or interleaved.slices
        ),
        f"{plan.microbatches} microbatches of a loss that is not a mean over rows": (
            several
            and rows is not None
            and any(dependence.kind not in ("mean", "constant") for _, dependence in rows.all)
        ),
        f"{plan.microbatches} microbatches of a loss that draws random numbers": (
            several and any(equation.name in _DRAWS for equation in _all(loss.program))
        ),
    }
    reasons = [what for what, holds in facts.items() if holds]
    return [*reasons, *_of_program(loss.program, model.traced.problem)]


def _of_step(traced: TracedStep, losses: Sequence[StepLoss]) -> list[str]:
    """Returns what of a step beside its losses such a file has no form for."""
    marks = [name for name, _ in plain.named(plain.flatten(traced.jaxpr)) if name[:5] == "loss."]
    outside = [equation for equation in _all(traced.program) if equation.call is None]
    facts = {
        f"calls of {', '.join(sorted(traced.others))} outside of marked losses": bool(
            traced.others
        ),
        "a marked loss that is differentiated or mapped again, or stands in a branch or a while"
        " loop": len(marks) != len(losses),
        "layouts of its own in a step that marks its losses": bool(traced.layouts and losses),
    }
    reasons = [what for what, holds in facts.items() if holds]
    return [*reasons, *_of_program(outside, traced.problem)]


def _of_program(program: Program | Sequence[Equation], problem: Problem) -> list[str]:
    equations = program if isinstance(program, Sequence) else _all(program)
    grouped = [
        line_of(equation)
        for equation in equations
        if equation.name == "conv_general_dilated"
        and (equation.params["feature_group_count"], equation.params["batch_group_count"]) != (1, 1)
    ]
    facts = {
        f"convolutions in groups ({', '.join(grouped[:4])}), whose gradients XLA gets wrong": bool(
            grouped
        ),
        "reductions over an axis of jax.pmap": any(
            finding.code == "mapped-axis" for finding in problem.forward.findings
        ),
    }
    return [what for what, holds in facts.items() if holds]


def _whole(model: TracedModel) -> LossJaxpr:
    return LossJaxpr(closed_jaxpr=model.traced.closed_jaxpr, out_tree=model.traced.out_tree)


def _loss_of_part(model: TracedModel, plan: Plan) -> LossJaxpr:
    """The loss of one microbatch."""
    batch_loss = _whole(model)
    if plan.microbatches == 1:
        return batch_loss
    part = microbatch_of(model.batch, _rows(model.traced.problem), plan.microbatches)
    bound = model.model.bind(model.loss)
    again = trace_loss(bound, model.model.params, model.model.state, part)
    if not same_program(batch_loss, again):
        _require(["a loss that computes other operations on a microbatch"], plan)
    return again


def _rows(problem: Problem) -> Mapping[str, int | None]:
    return batch_dims({path: axes for path, _, _, axes in problem.batch})


def _loss_layouts(model: TracedModel, plan: Plan) -> dict[str, str]:
    """The layouts of a loss, as fields of `step.Layouts`."""
    loss = _loss_of_part(model, plan)
    names = _names(loss.closed_jaxpr)
    values = _values(loss.program, names)
    placements = placements_of(model.traced, plan, plan.rules)
    runs = find_repeats(with_frozen(loss.program, ())) if plan.remat != "none" else ()
    blocks = [
        (names[loss.program.equations[run.start].path], run.period, run.count) for run in runs
    ]
    return {
        **_arrays(model, plan, loss, values),
        **_value_layouts(plan, placements, values),
        "microbatches": repr(plan.microbatches),
        "remat": repr(plan.remat),
        "blocks": repr(blocks),
    }


def _step_layouts(traced: TracedStep, plan: Plan, colouring: Colouring) -> dict[str, str]:
    """The layouts of a step around its losses, as fields of `step.Layouts`."""
    step_layout = marked.layouts(traced, plan, colouring)
    values = _values(traced.program, _names(traced.jaxpr))
    state = zip(plain.paths(traced.state), step_layout.state, strict=True)
    return {
        "parameters": _rows_text(
            (f"{path!r}: ({_shape(leaf.shape)}, {_spec(plan, layout)})", "")
            for (path, leaf), layout in state
        ),
        **_batch(plan, traced.problem),
        "microbatches": repr(plan.microbatches),
        **_value_layouts(plan, step_layout.values, values, follow=False),
    }


def _all(program: Program) -> Iterator[Equation]:
    """All equations of a program, those of loops, branches and custom derivatives too."""
    for equation in program.equations:
        yield equation
        inner = [equation.params[key] for key in ("jaxpr", "body_jaxpr") if key in equation.params]
        inner += list(equation.params.get("branches", ()))
        if equation.name in CUSTOM:
            inner = [callee(equation.eqn)]
        for jaxpr in inner:
            yield from _all(flatten(jaxpr, f"{equation.path}/"))


def _values(program: Program, names: Mapping[str, str]) -> Values:
    """Returns what a file calls the values that it can reach: those of a loss, or of a step outside
    of its losses, and of layers under a scan or under rematerialisation.
    """
    names_of_values: dict[tuple[str, int], tuple[str, tuple[int, ...], str]] = {}

    def walk(program: Program) -> None:
        for equation in program.equations:
            path = equation.path
            if path not in names:  # of a marked loss
                continue
            name, line = names[path], line_of(equation)
            shapes = [tuple(var.aval.shape) for var in equation.eqn.outvars]
            if equation.name == "scan":
                body = flatten(equation.params["jaxpr"], f"{path}/body/")
                constants, carried = scan_counts(equation.params)
                inner = [tuple(body.avals[number].shape) for number in body.inputs[constants:]]
                for kind, group in (
                    ("carry", inner[:carried]),
                    ("enter", inner[carried:]),
                    ("final", shapes[:carried]),
                    ("exit", shapes[carried:]),
                ):
                    for k, shape in enumerate(group):
                        names_of_values[f"{path}/{kind}/{k}", 0] = f"{name} {kind} {k}", shape, line
                walk(body)
            elif equation.name in REMAT:
                walk(flatten(callee(equation.eqn), f"{path}/"))
            else:
                for k, shape in enumerate(shapes):
                    key = result_path(equation, k) or (path, k)
                    names_of_values[key] = f"{name} {k}" if k else name, shape, line

    walk(program)
    return names_of_values


def _names(closed: Jaxpr) -> Mapping[str, str]:
    return plain.names(plain.flatten(closed))


def _where(plan: Plan) -> dict[str, str]:
    """The mesh, and the order of its devices."""
    sizes = {axis: plan.mesh[axis] for axis in INNER_AXES if plan.mesh[axis] > 1} or {"data": 1}
    order = device_order(plan.mesh, source_of(plan).topology, plan.axis_order)
    numbers = [] if order is None else [int(number) for number in order.reshape(-1)]
    usual = numbers in ([], list(range(len(numbers))))
    return {"MESH": repr(sizes), "DEVICE_ORDER": "None" if usual else repr(numbers)}


def _arrays(model: TracedModel, plan: Plan, loss: LossJaxpr, values: Values) -> dict[str, str]:
    """Layouts of parameters and of the batch."""
    order = plan_indices(plan, model.model.params)
    reading = loss.facts(len(order))
    stacked = set(reading.stacked_slices.values())

    def spec(layout: Layout) -> str:
        return _spec(plan, layout)

    def whole(number: int, parameter: ParameterLayout) -> bool:
        shape = parameter.shape[1:] if number in stacked else parameter.shape
        return number in reading.lookup_tables or tuple(shape) in reading.kernel_shapes

    parameters = [plan.parameters[index] for index in order]
    paths = [param.path for param in plan.parameters]
    return {
        "parameters": _rows_text(
            (
                f"{param.path!r}: ({_shape(param.shape)}, {spec(param.rest)},"
                f" {spec(param.gradient)}, {spec(param.state)})",
                "",
            )
            for param in parameters
        ),
        "gathered": _rows_text(
            (f"{param.path!r}: {spec(param.compute)}", "")
            for number, param in enumerate(parameters)
            if whole(number, param)
        ),
        "layers": _rows_text(
            (f"{values[path, 0][0]!r}: {paths[number]!r}", "")
            for path, number in reading.stacked_slices.items()
            if (path, 0) in values
        ),
        **_batch(plan, model.traced.problem),
    }


def _batch(plan: Plan, problem: Problem) -> dict[str, str]:
    return {
        "batch": _rows_text(
            (f"{_inside(path)!r}: {_spec(plan, layout)}", "") for path, layout in plan.batch_layouts
        ),
        "rows": _rows_text(
            (f"{_inside(path)!r}: {dim}", "") for path, dim in _rows(problem).items()
        ),
    }


def _value_layouts(
    plan: Plan, placements: ValueLayouts, values: Values, *, follow: bool = True
) -> dict[str, str]:
    """Layouts of values and of contractions; with `follow`, results that follow their operands are
    not constrained.
    """
    activations: list[tuple[str, str]] = []
    contractions: list[tuple[str, str]] = []
    cotangents: list[tuple[str, str]] = []
    for key, (name, shape, line) in values.items():
        path = key[0]
        layout = placements.get(key)
        if layout is not None and len(layout) == len(shape):
            activations.append((f"{name!r}: ({_shape(shape)}, {_spec(plan, layout)})", line))
        back = placements.get(gradient_key(path))
        if back is not None and key[1] == 0:
            cotangents.append((f"{name!r}: {_spec(plan, back)}", line))
        count = next((n for n in (3, 2) if use_key(path, n) in placements), None)
        if count is None or key[1]:
            continue
        *operands, result = [placements[use_key(path, index)] for index in range(count + 1)]
        before = [placements.get(gather_key(path, index)) for index in (0, 1)]
        constrain_result = not follow or not only_scatters(layout, operands, result)
        contractions.append(
            (
                f"{name!r}: ({_tuple(_spec(plan, pin) for pin in operands)},"
                f" {_spec(plan, result)}, {constrain_result},"
                f" {_tuple('None' if pin is None else _spec(plan, pin) for pin in before)})",
                line,
            )
        )
    return {
        "activations": _rows_text(activations),
        "contractions": _rows_text(contractions),
        "cotangents": _rows_text(cotangents),
    }


def _dict(losses: Mapping[str, Mapping[str, str]]) -> str:
    """Losses by name, as Python."""
    text = "".join(f"{name!r}: {_layouts_text(layouts)},\n" for name, layouts in losses.items())
    return "{\n" + textwrap.indent(text, "    ") + "}"


def _layouts_text(fields: Mapping[str, str]) -> str:
    text = "".join(f"{name}={value},\n" for name, value in fields.items() if value != "{}")
    return "Layouts(\n" + textwrap.indent(text, "    ") + ")"


def _spec(plan: Plan, layout: Layout) -> str:
    dims = [tuple(axis for axis in dim if plan.mesh[axis] > 1) for dim in layout]
    return (
        "P("
        + ", ".join("None" if not dim else repr(dim[0] if len(dim) == 1 else dim) for dim in dims)
        + ")"
    )


def _shape(shape: Sequence[int]) -> str:
    return repr(tuple(int(size) for size in shape))


def _tuple(items: Iterable[str]) -> str:
    return "(" + "".join(f"{item}, " for item in items).rstrip() + ")"


def _rows_text(rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"    {row}," + (f"  # {line}" if line else "") for row, line in rows]
    return "{\n" + "\n".join(lines) + "\n}" if lines else "{}"


def _inside(path: str) -> str:
    """The path of an array within the batch."""
    return path.partition(".")[2]


#: What a file for a loss has, and one for a step, that the other has no use for.
_OF_LOSS: tuple[Any, ...] = (
    plain.parameter_shardings,
    plain.optimizer_shardings,
    plain.init_optimizer,
    plain.make_step,
)
_OF_STEP: tuple[Any, ...] = (plain.state_shardings, plain.shard_step, plain.value_and_grad)


def _written(
    plan: Plan, mode: str, tables: Mapping[str, str], kept: tuple[Any, ...], *, own: bool
) -> str:
    """The file: what it is, the tables, and what carries them out; with what takes out layouts of
    the user's `own`.
    """
    text = _code(plain)
    for function in {*_OF_LOSS, *_OF_STEP} - {*kept}:
        text = text.replace(inspect.getsource(function) + "\n\n", "")
    options = repr(plan.compiler_options)
    tables = {**_where(plan), "MODE": repr(mode), "COMPILER_OPTIONS": options, **tables}
    if own:
        tables = {**tables, "WITHOUT_LAYOUTS": "lambda function: _freeing()(function)"}
        text += _freeing()
    for name, value in tables.items():
        text, count = re.subn(
            rf"^({name}\b[^=\n]*) = .*$",
            lambda match, value=value: f"{match[1]} = {value}",
            text,
            count=1,
            flags=re.MULTILINE,
        )
        assert count, name
    usage = _USE_OF_LOSS if kept is _OF_LOSS else _USE_OF_STEP
    return f'"""{_head(plan, usage)}"""\n\n# ruff: noqa\n{text}'


def _code(module: ModuleType) -> str:
    """The text of a module without its docstring."""
    text = inspect.getsource(module)
    return text[text.index("from __future__") :]


def _freeing() -> str:
    """The text of `shardlib.tracing.layouts`, with what a file needs of all that it imports."""
    text = _code(layouts).removeprefix("from __future__ import annotations\n")
    text = re.sub(r"^from (shardlib|flax)\S* import .*$", "", text, flags=re.MULTILINE)
    text = _BESIDE + inspect.getsource(open_jaxpr) + text
    text = textwrap.indent(f"{text}\n\nreturn lambda own: layout_free(own, ambient_mesh())", "    ")
    return f"\n\ndef _freeing() -> Any:\n{text}\n"


_BESIDE = f"""
class ShardlibError(ValueError):
    pass

class TracingError(ShardlibError):
    pass

class nn:
    get_logical_axis_rules = staticmethod(tuple)

def form_of(eqn: Any) -> None:
    return None

def user_line(eqn: Any) -> str:
    return ""

MarkedLoss, INNER_AXES = (), {INNER_AXES!r}

"""
#: How a file differs from the programs of this library.
_NOTES = (
    "The step computes on Auto axes: XLA lays out what no constraint names. In explicit mode what"
    " goes in and comes out has its sharding in its type. An axis is one axis of the mesh, also"
    " where it lies along several dims of a torus.",
    "Gradients are reduced by XLA's partitioner, in every microbatch. Programs of shardlib reduce"
    " the partial sums of weights themselves where devices are joined by links, and once per step"
    " with ZeRO 0 and 1.",
    "Inside of while loops, branches and custom derivatives nothing is constrained.",
)


_USE_OF_LOSS = """\
    mesh = make_mesh()
    params = jax.device_put(params, parameter_shardings(params, mesh))
    opt_state = init_optimizer(optimizer, params, mesh)
    step = make_step(loss, optimizer, params, batch, mesh)  # loss: (params, batch) -> scalar
    params, opt_state, metrics = step(params, opt_state, batch)

`params` is a tree of arrays with the paths of `LOSSES`: of Flax NNX, the state of
`graph, params = nnx.split(model)` and a loss of `nnx.merge(graph, params)`."""

_USE_OF_STEP = """\
    mesh = make_mesh()
    state = jax.device_put(state, state_shardings(state, mesh))
    step = shard_step(step, state, batch, mesh)  # (state, batch) -> (new state, metrics)
    state, metrics = step(state, batch)

The step is the one that was planned; where it marks a loss by `shardlib.value_and_grad`,
`value_and_grad` of this file takes the place of that."""


def _head(plan: Plan, usage: str) -> str:
    notes = "\n".join(
        textwrap.fill(note, 98, initial_indent="- ", subsequent_indent="  ") for note in _NOTES
    )
    return f"""The sharding of {plan.model} on {plan.topology} in plain JAX: mesh {plan.mesh}.

Written by shardlib from plan {plan.digest} with JAX {jax.__version__};
{seconds_text(plan.estimate.step_seconds)} per step predicted. It needs jax and optax alone:

{usage} Values are
named by their operation and its number; lines are those of the model. What differs from a
program of shardlib:

{notes}
"""
