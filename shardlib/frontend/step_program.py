"""A step, compiled for the mesh of a plan.

program = build_step(traced, plan, colouring, first=first, devices=devices)
state = program.init(seed=0)
state, metrics = program.step(state, batch)     # donates `state`
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from shardlib import _jax_compat
from shardlib.annotation.names import (
    Seed,
    UserLoss,
    key_of,
    loss_and_metrics,
    read_seed_or_key,
)
from shardlib.annotation.tree import no_mesh
from shardlib.annotation.trees import Tree, path_text, static_difference
from shardlib.errors import BatchError, ModelError, PlanError, StateError, raise_all
from shardlib.findings import Finding
from shardlib.jax_types import Metrics, Value
from shardlib.layout import Layout
from shardlib.lowering.checks import require
from shardlib.lowering.contractions import AsWritten, Pins, by_groups
from shardlib.lowering.mesh import abstract_mesh, device_mesh, held, named_sharding, physical_parts
from shardlib.lowering.program import Options
from shardlib.lowering.random_keys import implementation, is_key
from shardlib.lowering.runtime import given, placed, shapes_of_batch
from shardlib.lowering.steps import InPlace, LoweredLosses, StepLayouts, layouts
from shardlib.lowering.uses import LossJaxpr
from shardlib.machines.topology import Topology
from shardlib.planner.plan import Plan
from shardlib.processes.values import in_every_process
from shardlib.propagation.colours import Colouring
from shardlib.propagation.contractions import used
from shardlib.report.text import plan_card, plan_line
from shardlib.tracing.layouts import NO_MESH, freed
from shardlib.tracing.program import Equation
from shardlib.tracing.rewriting import Walk, bind, evaluate_program
from shardlib.tracing.steps import TracedStep
from shardlib.tracing.trace import describe_batch, rows_of
from shardlib.verification.isolation import (
    Limits,
    compile_apart,
    exported,
    require_compiler,
    target,
)
from shardlib.verification.report import Verification
from shardlib.verification.verify import judge

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
        return LossJaxpr(closed_jaxpr=traced.closed, out_tree=structure)

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
        require(batch, self.batch)
        state = self._required(state)
        state, metrics = self._run_step(state, given(batch, self.batch))
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
        if isinstance(self.mesh, AbstractMesh):
            raise PlanError(
                "the program has no devices: it was made with abstract=True\nTry:"
                " shardlib.compile_step(init, step, batch), or program.verify()"
            )
        if not self._compiled:
            self._compiled.append(self.lowered().compile())
        return self._compiled[0]

    def lowered(self) -> jax.stages.Lowered:
        """The program as it goes to the compiler."""
        with no_mesh():
            return self._jitted.lower(self.state, self.batch)

    def verify(
        self,
        *,
        limits: Limits | None = None,
        options: Options | None = None,
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
        """Writes a state to a folder that is not there yet, with Orbax."""
        from shardlib.processes import values as shards

        shards.save(Path(folder).absolute(), _plain(state))

    def restore(self, folder: str | Path) -> Tree:
        """A state that a program of the same step has saved, on any mesh, where this one has it."""
        from shardlib.processes import values as shards

        arrays = shards.read(Path(folder).absolute(), _plain(self.state))
        leaves, structure = jax.tree.flatten(self.state)
        return structure.unflatten(
            [_keyed(leaf, arrays[str(number)]) for number, leaf in enumerate(leaves)]
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
            self.traced.program,
            leaves,
            Walk(place=self._place, run=self._run, calls=self.calls),
        )
        count = len(self.traced.paths)
        new = [
            held(leaf, named_sharding(self.mesh, layout))
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
        return held(value, named_sharding(self.mesh, layout))

    def _run(self, equation: Equation, operands: Sequence[Value]) -> list[Value] | None:
        """A contraction with its operands in the layouts in which it runs."""
        values = self.layouts.values
        pins = [values.get(used(equation.path, index)) for index in range(len(operands) + 1)]
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
        pins = Pins(operands=tuple(shardings[:-1]), result=shardings[-1], settles=False)
        return [by_groups(AsWritten(equation=equation), equation, pins).run(operands)]

    def _held(self, value: Value, layout: Layout) -> Value:
        return held(value, named_sharding(self.mesh, layout))

    def _required(self, state: Tree) -> Tree:
        """The state in the form that was traced; refuses states of other programs."""
        leaves, structure = jax.tree.flatten(state)
        expected = jax.tree.structure(self.state)
        if difference := static_difference(structure, expected):
            theirs = [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
            paths = self.traced.paths
            raise_all(
                StateError,
                "this is no state of the program",
                [
                    *(f"{path}: not there" for path in paths if path not in theirs),
                    *(f"{path}: not of the program" for path in theirs if path not in paths),
                ]
                or [difference],
                hint="program.init(seed), or what program.step returned",
            )
        gone = [
            path
            for path, leaf in zip(self.traced.paths, leaves, strict=True)
            if isinstance(leaf, jax.Array) and leaf.is_deleted()
        ]
        if gone:
            raise StateError(
                f"arrays of the state were donated to a step before: {', '.join(gone[:4])}\nTry:"
                " state, metrics = program.step(state, batch)"
            )
        return expected.unflatten(leaves)


def build_step(
    traced: TracedStep,
    plan: Plan,
    colouring: Colouring,
    topology: Topology,
    *,
    first: First | None,
    given: Tree = None,
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
            order=plan.axis_order,
            parts=physical_parts(plan),
        )
    return StepProgram(
        plan=plan,
        topology=topology,
        traced=traced,
        mesh=mesh,
        layouts=layouts(traced, plan, colouring),
        first=first,
        given=given,
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


def _plain(tree: Tree) -> Tree:
    """A tree with random keys as the integers that they are made of."""

    def leaf(array: jax.Array | jax.ShapeDtypeStruct) -> object:
        if not is_key(array):
            return array
        if isinstance(array, jax.Array):
            return jax.random.key_data(array)
        raw = jax.eval_shape(jax.random.key_data, array)
        return jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=array.sharding)

    leaves = jax.tree.leaves(tree)
    return {str(number): leaf(array) for number, array in enumerate(leaves)}


def _keyed(target: jax.ShapeDtypeStruct, array: jax.Array) -> jax.Array:
    if is_key(target):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=implementation(target.dtype))
    return array


# --------------------------------------------------------------------------------------------------
# A loss of a state of the user's own step, on any number of rows, with nothing updated.


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
        return loss_and_metrics(freed(self.loss, NO_MESH)(state, batch))

    def evaluate(self, state: Tree, batch: Tree) -> dict[str, Tree]:
        """The metrics of a batch: "loss", and the user's own. The state stays usable."""
        shapes = shapes_of_batch(batch)
        leaves, structure = jax.tree.flatten(shapes)
        key = (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self.programs:
            self.programs[key] = self._compiled(shapes)
        call, abstract_batch = self.programs[key]
        return in_every_process(call(state, placed(batch, abstract_batch)))

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
