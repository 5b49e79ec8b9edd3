"""Steps of the user's own: `compile_step`, `parallelize`, and evaluation of their states."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from shardlib import _jax_compat
from shardlib._jax_compat import names_alone
from shardlib.annotation.model import no_mesh
from shardlib.annotation.names import (
    Seed,
    UserLoss,
    key_of,
    loss_and_metrics,
    read_seed_or_key,
    stack_dims,
)
from shardlib.annotation.trees import Tree, static_difference
from shardlib.checkpointing.store import Checkpoints, steps_of_first
from shardlib.checkpointing.tree import fitted, raw_abstract
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import (
    ArgumentError,
    BatchError,
    CheckpointError,
    ModelError,
    PlanError,
    TracingError,
)
from shardlib.findings import Finding
from shardlib.frontend.choice import machine_of
from shardlib.frontend.marked import (
    InPlace,
    LoweredLosses,
    MarkedStep,
    SingleLoss,
    StepLayouts,
    layouts,
    loss_plan,
    lower_losses,
    marked_pins,
    step_pins,
)
from shardlib.frontend.model import layout_findings, layout_pins, require_arguments, require_honour
from shardlib.functions.experts import found_axes, whole_batch
from shardlib.jax_types import Metrics, Value
from shardlib.layout import Layout
from shardlib.lowering.checks import own_state, require_batch, require_own_state
from shardlib.lowering.contractions import (
    ContractionShardings,
    ModelContraction,
    with_manual_groups,
)
from shardlib.lowering.mesh import (
    abstract_mesh,
    constrain,
    device_mesh,
    named_sharding,
    physical_parts,
)
from shardlib.lowering.program import Options
from shardlib.lowering.runtime import (
    call_arguments,
    put_batch,
    require_not_donated,
    shapes_of_batch,
)
from shardlib.lowering.uses import LossJaxpr
from shardlib.machines.topology import Topology, TopologyLike, devices_of
from shardlib.planner.plan import Plan
from shardlib.planner.search import PlanSource, search
from shardlib.processes.progress import Progress
from shardlib.processes.values import in_every_process, read, shapes_stored
from shardlib.propagation.colours import Colouring, colour
from shardlib.propagation.contractions import use_key
from shardlib.report.text import plan_card, plan_line
from shardlib.tracing.layouts import (
    NO_MESH,
    ambient_mesh,
    brings_layouts,
    has_layout,
    has_mesh_or_rules,
    layout_free,
)
from shardlib.tracing.program import Equation
from shardlib.tracing.rewriting import Walk, bind, evaluate_program
from shardlib.tracing.steps import Step, TracedStep, same_form, trace_step
from shardlib.tracing.trace import abstract, abstract_leaf, describe_batch, rows_of
from shardlib.verification.isolation import (
    Limits,
    compile_apart,
    exported,
    require_compiler,
    target,
)
from shardlib.verification.report import Verification
from shardlib.verification.verify import judge

# --------------------------------------------------------------------------------------------------
# A step, compiled for the mesh of a plan.
#
#     program = build_step(traced, plan, colouring, first=first, devices=devices)
#     state = program.init(seed=0)
#     state, metrics = program.step(state, batch)     # donates `state`

#: Seed -> the state before the first step.
First = Callable[[jax.Array], Tree]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProgram:
    """A compiled step and what belongs to it.

    Attributes:
        plan: the decisions.
        topology: the machine of the plan.
        traced: the step as it was traced.
        mesh: of its devices; without devices where it is only compiled.
        layouts: of the state, the batch and the values of the step.
        first: key -> the state before the first step; None where the user gave a state.
        given: the user's own state; None where there is `first`.
        donate: whether a step takes the arrays of the state over.
        findings: what the user should know.
        calls: what takes the place of marked losses, by the paths of their calls.
    """

    plan: Plan
    topology: Topology
    traced: TracedStep
    mesh: Mesh | AbstractMesh
    layouts: StepLayouts
    first: First | None
    given: Tree
    donate: bool = True
    findings: tuple[Finding, ...] = ()
    calls: Mapping[str, InPlace] = field(default_factory=dict[str, InPlace])
    _compiled: list[jax.stages.Compiled] = field(default_factory=list[jax.stages.Compiled])

    def __repr__(self) -> str:
        return plan_line(self.plan, type(self).__name__)

    def _repr_html_(self) -> str:
        return plan_card(self.plan)

    @cached_property
    def state(self) -> Tree:
        """Abstract arrays of the state, with their shardings."""
        return _abstract(self.traced.state, self.layouts.state, self.mesh)

    @cached_property
    def batch(self) -> Tree:
        """Abstract arrays of the batch, with their shardings."""
        return _abstract(self.traced.batch, self.layouts.batch, self.mesh)

    @property
    def rows(self) -> Tree:
        """Abstract global batch, each leaf with its sharding."""
        return self.batch

    @cached_property
    def source(self) -> LossJaxpr:
        """The whole step as it was traced."""
        traced = self.traced
        structure = jax.tree.structure((traced.state, traced.metrics))
        return LossJaxpr(closed_jaxpr=traced.jaxpr, out_tree=structure)

    @property
    def loss_program(self) -> None:
        """There is none: the step has the model, the loss and the optimizer inside."""

    @property
    def metrics(self) -> Tree:
        """Abstract metrics of a step."""
        return self.traced.metrics

    def learned(self, state: Tree) -> Tree:
        """The state itself."""
        return state

    def evaluation(
        self, loss: UserLoss | None = None, *, batch_axes: Tree = None
    ) -> StepEvaluation:
        """An evaluation of a loss of the state; rows are those by convention."""
        if loss is None:
            raise ModelError(
                "a step of your own does not say what a validation computes\nTry:"
                " Validation(data=..., loss=lambda state, batch: ...)"
            )
        return StepEvaluation(program=self, loss=loss)

    def init(self, seed: Seed = 0) -> Tree:
        """The state before the first step, each array where it will stay."""
        self.require_devices()
        number = read_seed_or_key(seed)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        if self.first is None:
            return jax.tree.map(copied, self.given, shardings)
        # a state that is made anew has static parts that are made anew: its form is the traced one
        first = jax.jit(
            lambda number: jax.tree.leaves(self._first(number)),
            out_shardings=jax.tree.leaves(shardings),
        )
        with no_mesh():
            return jax.tree.structure(self.state).unflatten(first(number))

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        """Does one step."""
        require_batch(batch, self.batch)
        state, run = self.required("step", state), self._run_step
        with own_state("step", state, self.state):
            state, metrics = run(state, call_arguments(batch, self.batch))
        return state, in_every_process(metrics)

    def prepare(self) -> None:
        """Compiles the step, if that has not been done."""
        self.compiled()

    def memory(self) -> dict[str, int]:
        """Bytes per device of the compiled step: "arguments", "outputs", "aliased", "temporaries"
        and "peak".
        """
        return _jax_compat.compiled_memory(self.compiled())

    def compiled(self) -> jax.stages.Compiled:
        """The program, compiled at its first use."""
        self.require_devices()
        if not self._compiled:
            with Progress("compiling the step"):
                self._compiled.append(self.lowered().compile())
        return self._compiled[0]

    def lowered(self) -> jax.stages.Lowered:
        """The program as it goes to the compiler."""
        with no_mesh():
            return self._jitted.lower(self.state, self.batch)

    def verify(
        self, *, limits: Limits | None = None, options: Options | None = None
    ) -> Verification:
        """Compiles the step for the machine of its plan, which need not be here, and compares what
        the compiler made with the plan.
        """
        machine = target(self.topology, self.plan.mesh, self.plan.axis_order)
        require_compiler(machine.platform)

        def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
            return self.function(state, batch)

        step.__name__ = step.__qualname__ = "shardlib_step"
        program = exported(
            step,
            (self.state, self.batch),
            results=jax.tree.leaves(self.state),
            mesh=self.mesh,
            platform=machine.platform,
            what=f"the step {self.traced.name}",
        )
        return judge(
            self.plan,
            self.topology,
            machine,
            program,
            compile_apart(program, machine, limits, options),
        )

    def save(self, folder: str | Path, state: Tree) -> None:
        """Writes a state to a folder without checkpoints, as the only one of
        `shardlib.checkpointing.store.Checkpoints`, which has room for several.
        """
        state = jax.tree.map(_placed, self.required("save", state), self.state)
        with Checkpoints(folder) as checkpoints:
            if steps := steps_of_first(checkpoints.steps()):
                raise CheckpointError(
                    f"there are checkpoints in {folder}, of steps {list(steps)[-4:]}; save writes"
                    " one to a folder of its own\nTry: another folder, or"
                    " Checkpoints(folder).save(step, state, plan=program.plan) for several"
                )
            checkpoints.save(0, state, plan=self.plan, wait=True)

    def restore(self, folder: str | Path) -> Tree:
        """A state that a program of the same step has saved, on any mesh, where this one has it."""
        if (Path(folder) / "_METADATA").is_file():
            return self._restored_by_number(Path(folder))
        with Checkpoints(folder, read_only=True) as checkpoints:
            return checkpoints.restore(self).state

    def _restored_by_number(self, folder: Path) -> Tree:
        """A state as 0.1.0 wrote it: arrays by their number."""
        leaves, structure = jax.tree.flatten(self.state)
        stored = {str(number): raw_abstract(leaf) for number, leaf in enumerate(leaves)}
        shapes = shapes_stored(folder.absolute())
        if shapes != {number: leaf.shape for number, leaf in stored.items()}:
            raise CheckpointError(
                f"{folder} has the state of another step: arrays of"
                f" {sorted(shapes.values())}\nTry: the step that saved it"
            )
        arrays = read(folder.absolute(), stored)
        return structure.unflatten(
            [fitted(arrays[str(number)], leaf) for number, leaf in enumerate(leaves)]
        )

    @cached_property
    def _jitted(self) -> jax.stages.Wrapped:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        return jax.jit(
            self.function,
            out_shardings=(shardings, None),
            donate_argnums=(0,) if self.donate else (),
        )

    @cached_property
    def _run_step(self) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
        def run(*arguments: Tree) -> tuple[Tree, Tree]:
            with no_mesh():
                return self._jitted(*arguments)

        return _jax_compat.runnable(run, self.compiled(), (self.state, self.batch), None)

    def function(self, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        """The step with its layouts, to be traced."""
        leaves = jax.tree.leaves((state, batch))
        results = evaluate_program(
            self.traced.program, leaves, Walk(on_value=self._place, run=self._run, calls=self.calls)
        )
        count = len(self.traced.paths)
        new = [
            constrain(leaf, named_sharding(self.mesh, layout))
            for leaf, layout in zip(results[:count], self.layouts.state, strict=True)
        ]
        return (
            jax.tree.unflatten(jax.tree.structure(self.traced.state), new),
            jax.tree.unflatten(jax.tree.structure(self.traced.metrics), results[count:]),
        )

    def _first(self, number: jax.Array) -> Tree:
        assert self.first is not None
        return self.first(key_of(number))

    def _place(self, path: str, index: int, value: Value) -> Value:
        layout = self.layouts.values.get((path, index))
        if layout is None or jnp.ndim(value) != len(layout):
            return value
        return constrain(value, named_sharding(self.mesh, layout))

    def _run(self, equation: Equation, operands: Sequence[Value]) -> list[Value] | None:
        """A contraction with its operands in the layouts in which it runs."""
        values = self.layouts.values
        pins = [values.get(use_key(equation.path, index)) for index in range(len(operands) + 1)]
        if not any(pins) or len(equation.outputs) != 1:
            return None
        placed = [
            operand if pin is None or jnp.ndim(operand) != len(pin) else self._held(operand, pin)
            for operand, pin in zip(operands, pins, strict=False)
        ]
        (result,) = self._bound(equation, placed, pins)
        last = pins[-1]
        if last is None or jnp.ndim(result) != len(last):
            return [result]
        return [self._held(result, last)]

    def _bound(
        self, equation: Equation, operands: list[Value], layouts: Sequence[Layout | None]
    ) -> list[Value]:
        """An operation, of operands that are laid out as it reads them."""
        shardings = [named_sharding(self.mesh, layout) for layout in layouts if layout is not None]
        if len(shardings) < len(layouts):
            return bind(equation, operands)
        planned = ContractionShardings(
            operands=tuple(shardings[:-1]), result=shardings[-1], constrains_result=False
        )
        return [
            with_manual_groups(ModelContraction(equation=equation), equation, planned).run(operands)
        ]

    def _held(self, value: Value, layout: Layout) -> Value:
        return constrain(value, named_sharding(self.mesh, layout))

    def required(self, caller: str, state: Tree) -> Tree:
        """The state in the form that was traced; refuses states of other programs, and what is no
        longer there.
        """
        leaves, structure = jax.tree.flatten(state)
        expected = jax.tree.structure(self.state)
        if static_difference(structure, expected):
            require_own_state(caller, state, self.state)
        require_not_donated(caller, state)
        return expected.unflatten(leaves)

    def require_devices(self) -> None:
        """Raises for a program that is only explained and verified."""
        if isinstance(self.mesh, AbstractMesh):
            raise PlanError(
                "the program has no devices: it was made with abstract=True\nTry:"
                " shardlib.compile_step(init, step, batch), or program.verify()"
            )


def build_step(
    traced: TracedStep,
    plan: Plan,
    colouring: Colouring,
    topology: Topology,
    *,
    first: First | None,
    state: Tree = None,
    devices: Sequence[jax.Device] | None = None,
    donate: bool = True,
    losses: LoweredLosses | None = None,
) -> StepProgram:
    """The program of a step under a plan.

    Args:
        first: key -> the state before the first step.
        devices: to run on; None for none, where it is only compiled.
    """
    losses = losses or LoweredLosses()
    if devices is None:
        mesh, of_devices = abstract_mesh(plan), ()
    else:
        mesh, of_devices = device_mesh(
            plan.mesh,
            devices,
            topology=plan.topology,
            axis_order=plan.axis_order,
            parts=physical_parts(plan),
        )
    return StepProgram(
        plan=plan,
        topology=topology,
        traced=traced,
        mesh=mesh,
        layouts=layouts(traced, plan, colouring),
        first=first,
        given=state,
        donate=donate,
        findings=tuple(dict.fromkeys((*plan.findings, *of_devices, *losses.findings))),
        calls=losses.calls,
    )


def _abstract(tree: Tree, layouts: Sequence[object], mesh: Mesh | AbstractMesh) -> Tree:
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(
        [
            jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=named_sharding(mesh, layout),  # pyright: ignore[reportArgumentType]
            )
            for leaf, layout in zip(leaves, layouts, strict=True)
        ]
    )


def copied(leaf: Value, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array where it will stay; a copy, since a step donates it."""
    return jax.device_put(jnp.array(leaf, copy=True), sharding)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEvaluation:
    """A loss to be evaluated on batches of any number of rows, with a state of a step.

    Arrays of the state stay as the plan shards them, and rows are sharded over those axes of the
    plan's batch that divide them; the rest is left to the compiler.

    Attributes:
        program: the step.
        loss: (state, batch) -> scalar or (scalar, metrics).
        programs: those that have been compiled, by structure, shapes and dtypes of the batch.
    """

    program: StepProgram
    loss: Callable[[Tree, Tree], Tree]
    programs: dict[Any, tuple[Callable[..., dict[str, Any]], Tree]] = field(default_factory=dict)

    @property
    def pure(self) -> tuple[Callable[..., Any], Tree, Tree]:
        """(state, (), batch) -> (loss, (metrics, ())), and the abstract first two."""

        def loss(state: Tree, _: Tree, batch: Tree) -> Tree:
            value, metrics = self.metrics(state, batch)
            return value, (metrics, ())

        return loss, self.program.traced.state, ()

    def metrics(self, state: Tree, batch: Tree) -> tuple[Value, Metrics]:
        """The loss and the user's own metrics, to be traced; layouts of their own are left out."""
        return loss_and_metrics(layout_free(self.loss, NO_MESH)(state, batch))

    def evaluate(self, state: Tree, batch: Tree) -> dict[str, Tree]:
        """The metrics of a batch: "loss", and the user's own. The state stays usable."""
        self.program.require_devices()
        state = self.program.required("evaluate", state)
        shapes = shapes_of_batch(batch)
        leaves, structure = jax.tree.flatten(shapes)
        key = (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self.programs:
            self.programs[key] = self._compiled(shapes)
        call, abstract_batch = self.programs[key]
        rows = put_batch(batch, abstract_batch)
        with own_state("evaluate", state, self.program.state):
            return in_every_process(call(state, rows))

    def _compiled(self, shapes: Tree) -> tuple[Callable[..., dict[str, Any]], Tree]:
        dims, sizes = rows_of(describe_batch(shapes))
        if not sizes or not all(sizes):
            raise BatchError("a batch to evaluate has no rows\nTry: at least one row")
        mesh, axes = self.program.mesh, self._axes(sizes)
        leaves, structure = jax.tree.flatten(shapes)
        abstract_batch = structure.unflatten(
            [
                jax.ShapeDtypeStruct(
                    leaf.shape,
                    leaf.dtype,
                    sharding=named_sharding(
                        mesh, Layout(*(axes if index == dim else () for index in range(leaf.ndim)))
                    ),
                )
                for leaf, dim in zip(leaves, dims, strict=True)
            ]
        )

        def evaluate(state: Tree, batch: Tree) -> dict[str, Any]:
            value, metrics = self.metrics(state, batch)
            return {"loss": value, **metrics}

        with _jax_compat.in_mesh(mesh):
            call = jax.jit(evaluate, out_shardings=named_sharding(mesh, Layout()))
            compiled = call.lower(self.program.state, abstract_batch).compile()
        arguments = (self.program.state, abstract_batch)
        return _jax_compat.runnable(call, compiled, arguments, mesh), abstract_batch

    def _axes(self, sizes: tuple[int, ...]) -> tuple[str, ...]:
        """Those axes of the plan's batch that divide all numbers of rows the most ways."""
        plan = self.program.plan
        batch_axes = max(
            (dim for _, layout in plan.batch_layouts for dim in layout), key=len, default=()
        )
        subsets = [
            subset
            for count in range(len(batch_axes), -1, -1)
            for subset in itertools.combinations(batch_axes, count)
            if all(size % plan.mesh.ways(subset) == 0 for size in sizes)
        ]
        return max(subsets, key=plan.mesh.ways)


# --------------------------------------------------------------------------------------------------
# Any step that a user wrote, planned and compiled for a mesh.

#: key -> state, () -> state, or a state.
InitState = Callable[..., Tree] | Tree


def compile_step(
    init: InitState,
    step: Step,
    batch: Tree,
    *,
    topology: TopologyLike | None = None,
    pin: PinMapping | None = None,
    axes: Tree = None,
    batch_axes: Tree = None,
    devices: Sequence[jax.Device] | None = None,
    name: str | None = None,
    abstract: bool = False,
    honour: str = "hints",
) -> StepProgram:
    """Plans and compiles a step that has everything inside: gradients, several losses, several
    optimizers, several models.

    What the arrays of the state are is found by what the step does with them: weights, and what
    follows them, as moments and averages do. The mesh, layouts of weights and of what follows them,
    and ZeRO are planned as for a loss. What needs the loss apart from its update - microbatches,
    pipeline stages, rematerialisation other than the user's own - is not.

    Args:
        init: key -> state, with which `program.init(seed)` makes it where it will stay; or () ->
            state; or a state.
        step: (state, batch) -> (new state, metrics), or the new state alone; jittable. The new
            state has the structure, shapes and dtypes of the state.
        batch: pytree of arrays or `jax.ShapeDtypeStruct` of the global batch.
        topology: the machine, see `plan`; all devices of this one if left out.
        pin: "mesh", "mesh.AXIS", "rules", "sequence_parallel", "zero" or "axis_order", see
            `docs/pins.md`.
        axes: logical names in the places of arrays in a pytree like the state, or like a part of
            it, as `nn.get_partition_spec` and `nnx.get_partition_spec` make it, or by dotted path.
            What boxes of Linen and variables of NNX in the state say is read, too; a model without
            names is planned all the same.
        batch_axes: as of `shardlib.plan`.
        devices: to run on; by default the first of JAX's.
        name: what to call the step; its own name by default.
        abstract: whether to leave devices out: such a program is explained and verified, and does
            not run.
        honour: what layouts of the program are, "hints" or "pins", as of `shardlib.plan`.

    Raises:
        ArgumentError: arguments of another kind than is asked for.
        TracingError: `init` or `step` cannot be traced, or `step` returns no state.
        StateError: the new state is not like the state.
        AnnotationError: names do not fit the arrays of the state.
        BatchError: `batch_axes` do not fit the batch, or it has no rows.
        TopologyError: the topology does not parse, or there are fewer devices.
        PinError: a pin is misspelt, out of range, or needs the loss apart.
        InfeasibleError: nothing fits the memory of a device.
    """
    if not callable(step):
        raise ArgumentError(
            f"step is {type(step).__name__}; it is a function\nTry: def step(state, batch): ..."
        )
    require_arguments(
        "compile_step", batch=batch, topology=topology, pin=pin, name=name, devices=devices
    )
    require_honour(honour)
    ambient = ambient_mesh()
    with no_mesh():
        first, state, shapes, stacks = _state_of(init, ambient)
        machine = machine_of(topology)
        traced = traced_layout_free(
            step,
            shapes,
            batch,
            ambient,
            axes=axes,
            stacks=stacks,
            batch_axes=batch_axes,
            name=name or getattr(step, "__name__", "step"),
        )
        return stepping(
            traced,
            machine,
            pin,
            first=first,
            state=state,
            devices=devices if devices is not None else devices_of(topology),
            abstract=abstract,
            honour=honour,
        )


def traced_layout_free(
    step: Step,
    state: Tree,
    batch: Tree,
    ambient: AbstractMesh,
    *,
    axes: Tree = None,
    stacks: Sequence[Sequence[int]] = (),
    batch_axes: Tree = None,
    name: str,
) -> TracedStep:
    """A traced step; that of the same step without layouts where it brings some."""

    def run(step: Step) -> TracedStep:
        return trace_step(
            step, state, batch, axes=axes, stacks=stacks, batch_axes=batch_axes, name=name
        )

    if not has_mesh_or_rules(ambient):
        try:
            traced = run(step)
        except TracingError as error:
            if error.__cause__ is None:
                raise
        else:
            if not brings_layouts(traced.jaxpr):
                return traced
    return run(layout_free(step, ambient))


def stepping(
    traced: TracedStep,
    machine: Topology,
    pin: PinMapping | None,
    *,
    first: Callable[..., Tree] | None,
    state: Tree,
    devices: Sequence[jax.Device] | None = None,
    abstract: bool = False,
    donate: bool = True,
    honour: str = "hints",
) -> StepProgram:
    """The program of a traced step."""
    marked = MarkedStep.of(traced) if traced.losses else None
    problem = traced.problem if marked is None else marked.traced.problem

    def pins(user_pins: PinMapping | Pins | None) -> PinMapping:
        plain_pins = user_pins.to_json() if isinstance(user_pins, Pins) else user_pins
        if marked is None:
            return step_pins(plain_pins)
        return marked_pins(plain_pins, marked.unstaged, marked.unsharded)

    def searched(user_pins: Pins) -> Plan:
        return search(problem if marked is None else marked.problem, machine, pins(user_pins))

    user_pins = pin
    if honour == "pins":
        pins_of_layouts = layout_pins(traced.layouts, problem, pin, searched)
        user_pins = (
            pins_of_layouts.to_json() if isinstance(pins_of_layouts, Pins) else pins_of_layouts
        )
    if marked is not None:
        marked, plan = marked.searched(machine, user_pins)
        traced, colouring = marked.traced, marked.colouring
    else:
        plan = search(traced.problem, machine, step_pins(user_pins))
        colouring = (
            plan.source.workload.colouring if plan.source is not None else colour(traced.problem)
        )
    plan = plan.with_findings(
        *layout_findings(traced.layouts, problem, plan, pin, honour, searched)
    )
    plan = plan.with_findings(*traced.findings)
    plan = _with_written(plan, traced, () if marked is None else marked.losses, colouring)
    count = plan.mesh.devices
    chosen = None if abstract else list(jax.devices() if devices is None else devices)[:count]
    losses = None if marked is None else lower_losses(marked, plan, chosen)
    return build_step(
        traced,
        plan,
        colouring,
        machine,
        first=first,
        state=state,
        devices=chosen,
        donate=donate,
        losses=losses,
    )


def _with_written(
    plan: Plan, traced: TracedStep, losses: Sequence[SingleLoss], colouring: Colouring
) -> Plan:
    """The plan of a step, which writes itself as plain JAX."""
    if not isinstance(plan.source, PlanSource):
        return plan

    def written(plan: Plan, mode: str) -> str:
        from shardlib.frontend.plain_jax import StepLoss, plain_step_text

        marked = [
            StepLoss(
                path=loss.found.call.path,
                name=loss.found.form.name,
                model=loss.model,
                plan=loss_plan(plan, loss),
                leaves=loss.leaves,
            )
            for loss in losses
        ]
        return plain_step_text(traced, marked, plan, colouring, mode)

    return replace(plan, source=replace(plan.source, plain_jax=written))


def _state_of(
    init: InitState, ambient: AbstractMesh
) -> tuple[Callable[..., Tree] | None, Tree, Tree, Sequence[Sequence[int]]]:
    """(key -> state, state, abstract state, dims of its arrays that a transform has added and not
    named); one of the first two is None.
    """
    if not callable(init):
        return None, init, init, ()
    make = names_alone()(cast("Callable[..., Tree]", init))
    if has_mesh_or_rules(ambient):
        make = layout_free(make, ambient)
    key = jax.eval_shape(lambda: jax.random.key(0))
    first = make
    try:
        shapes = jax.eval_shape(make, key)
    except TypeError as error:
        try:
            shapes = jax.eval_shape(make)
        except TypeError:
            raise _untraced(error) from error

        def first(_: jax.Array) -> Tree:
            return make()
    except Exception as error:
        raise _untraced(error) from error
    if any(map(has_layout, jax.tree.leaves(shapes))):
        return _state_of(layout_free(init, NO_MESH), ambient)
    return first, None, shapes, stack_dims(lambda: first(jax.random.key(0)), shapes)


def _untraced(error: Exception) -> TracingError:
    """Whatever a user's initialiser raises, as an error of ours."""
    return TracingError(
        f"init cannot be traced: {type(error).__name__}: {error}\nTry: init=lambda key: state, or a"
        " state; of an NNX model, lambda key: Model(nnx.Rngs(key))"
    )


# --------------------------------------------------------------------------------------------------
# `@shardlib.parallelize`: a function whose first call says for what it is planned.

#: (*states, batch) -> new states, and what else; of NNX, changed in place; or anything.
Function = Callable[..., Tree]
#: (state, new state, results) of a program -> what the user's function returns.
Result = Callable[[Tree, Tree, Tree], Tree]


class Parallel:
    """A function of states and a batch, its last argument, planned and compiled for each shape that
    it is called with.

    A function is a step if it returns what is like its states, alone or first in a tuple, or
    changes modules of NNX in place, as `nnx.jit` has it: the arrays of its states are taken over by
    the next call. Any other is inference: it gets params and a batch, and the params stay.

    Args:
        function: the user's own.
        topology, pin, batch_axes, honour: see `shardlib.compile_step`.
    """

    def __init__(
        self,
        function: Function,
        *,
        topology: TopologyLike | None = None,
        pin: PinMapping | None = None,
        batch_axes: Tree = None,
        honour: str = "hints",
    ) -> None:
        require_honour(honour)
        functools.update_wrapper(self, function)
        self._function, self._topology, self._pin = function, topology, pin
        self._batch_axes, self._honour = batch_axes, honour
        self._programs: dict[object, tuple[Result, StepProgram]] = {}

    def program(self, *arguments: Tree) -> StepProgram:
        """The program for states and a batch of such shapes, which are not computed with."""
        return self._of(*arguments)[1]

    def __call__(self, *arguments: Tree) -> Tree:
        """Calls the function, of states and a batch, on the devices of its plan."""
        result, program = self._of(*arguments)
        *states, batch = arguments
        state = states[0] if len(states) == 1 else tuple(states)
        on_mesh = jax.tree.map(_placed, state, program.state)
        return result(state, *program.step(on_mesh, batch))

    def _of(self, *arguments: Tree) -> tuple[Result, StepProgram]:
        if len(arguments) < 2:
            raise ArgumentError(
                f"{getattr(self._function, '__name__', 'the function')} was called with"
                f" {len(arguments)} argument(s); parallelize takes functions of states and a batch"
                "\nTry: step(state, batch), or step(model, optimizer, batch)"
            )
        key = _shapes(arguments)
        if key not in self._programs:
            *states, batch = arguments
            self._programs[key] = (
                self._made(self._function, states[0], batch)
                if len(states) == 1
                else self._made(lambda state, batch: self._function(*state, batch), states, batch)
            )
        return self._programs[key]

    def _made(self, function: Function, state: Tree, batch: Tree) -> tuple[Result, StepProgram]:
        ambient, changed = ambient_mesh(), list[bool]()
        several = isinstance(state, list)
        state = tuple(state) if several else state
        modules = modules_of(state)
        if several:
            require_own_variables(state)

        def watched(state: Tree, batch: Tree) -> Tree:
            before = jax.tree.leaves(state)
            out = function(state, batch)
            after = jax.tree.leaves(state)
            changed.append(any(a is not b for a, b in itertools.zip_longest(before, after)))
            return out

        def infer(params: Tree, batch: Tree) -> tuple[Tree, Tree]:
            return params, function(params, batch)

        def first_in_tuple(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
            out = function(state, batch)
            return out[: len(state)], out[len(state) :]

        with no_mesh(), names_alone():
            shapes = abstract((state, batch))
            out = self._results(watched, shapes, ambient)
            count = len(state) if several else 1
            tupled = isinstance(out, tuple) and len(out) >= count
            steps, step, result = True, function, _both
            if same_form(out, shapes[0]):
                result = _state_alone
            elif several and tupled and same_form(out[:count], shapes[0]):
                step, result = first_in_tuple, _one_tuple
            elif tupled and len(out) == 2 and same_form(out[0], shapes[0]):
                pass
            elif modules and changed[-1]:
                step, result = infer, _in_place
            else:
                steps, step, result = False, infer, _results_alone
            traced = traced_layout_free(
                step,
                shapes[0],
                shapes[1],
                ambient,
                batch_axes=self._batch_axes,
                name=getattr(self._function, "__name__", "function"),
            )
            return result, stepping(
                traced,
                machine_of(self._topology),
                self._pin,
                first=None,
                state=state,
                devices=devices_of(self._topology),
                donate=steps,
                honour=self._honour,
            )

    def _results(
        self, function: Function, shapes: tuple[Tree, Tree], ambient: AbstractMesh
    ) -> Tree:
        """Abstract results of the function."""

        def results(function: Function) -> Tree:
            return found_axes(lambda names: jax.eval_shape(whole_batch(function, names), *shapes))

        if not has_mesh_or_rules(ambient):
            with contextlib.suppress(Exception):  # of meshes, or `layout_free` raises it, too
                return results(function)
        return results(layout_free(function, ambient))


@overload
def parallelize(function: Function) -> Parallel: ...
@overload
def parallelize(
    *,
    topology: TopologyLike | None = None,
    pin: PinMapping | None = None,
    batch_axes: Tree = None,
    honour: str = "hints",
) -> Callable[[Function], Parallel]: ...
def parallelize(
    function: Function | None = None,
    *,
    topology: TopologyLike | None = None,
    pin: PinMapping | None = None,
    batch_axes: Tree = None,
    honour: str = "hints",
) -> Parallel | Callable[[Function], Parallel]:
    """Plans and compiles a function at its first call, for the shapes that it is called with.

        @shardlib.parallelize
        def step(state, batch): ...
        state, metrics = step(state, batch)

    Args:
        function: (state, batch) -> (new state, metrics) or the new state; (params, batch) ->
            anything; or of several states before the batch, which it returns first in a tuple, or
            which are modules of NNX that it changes in place.
        topology: the machine; all devices of this one if left out.
        pin: see `shardlib.compile_step`.
        batch_axes: as of `shardlib.plan`.
        honour: what layouts of the function are, "hints" or "pins", as of `shardlib.plan`.
    """

    def wrapped(function: Function) -> Parallel:
        return Parallel(function, topology=topology, pin=pin, batch_axes=batch_axes, honour=honour)

    return wrapped if function is None else wrapped(function)


def _both(_: Tree, state: Tree, results: Tree) -> Tree:
    return state, results


def _one_tuple(_: Tree, states: Tree, results: Tree) -> Tree:
    return (*states, *results)


def _state_alone(_: Tree, state: Tree, results: Tree) -> Tree:
    return state


def _results_alone(_: Tree, state: Tree, results: Tree) -> Tree:
    return results


def _in_place(arguments: Tree, state: Tree, results: Tree) -> Tree:
    for module, changed in zip(modules_of(arguments), modules_of(state), strict=True):
        nnx.update(module, nnx.state(changed))
    return results


def modules_of(tree: Tree) -> list[nnx.Pytree]:
    """Modules, optimizers and metrics of NNX in a tree."""
    return _of_kind(tree, nnx.Pytree)


def require_own_variables(states: Tree) -> None:
    """Raises if several states share a variable of NNX."""
    variables = _of_kind(states, nnx.Variable)
    if len({id(variable) for variable in variables}) < len(variables):
        raise ArgumentError(
            "the arguments share variables of NNX, of which each would have its own afterwards"
            "\nTry: nnx.Optimizer(model, tx, wrt=nnx.Param), which does not hold the model"
        )


def _of_kind(tree: Tree, kind: type) -> list[Any]:
    parts = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, kind))
    return [leaf for leaf in parts if isinstance(leaf, kind)]


def _shapes(tree: Tree) -> object:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in map(abstract_leaf, leaves))


def _placed(leaf: Tree, target: jax.ShapeDtypeStruct) -> jax.Array:
    """An array where the program has it; a copy, unless it is there already."""
    if isinstance(leaf, jax.Array) and leaf.sharding == target.sharding:
        return leaf
    return copied(leaf, target.sharding)
