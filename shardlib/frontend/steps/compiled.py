"""Any step that a user wrote, planned and compiled for a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import jax
from jax.sharding import AbstractMesh

from shardlib._jax_compat import names_alone
from shardlib.annotation.activations import no_mesh
from shardlib.annotation.names import stack_dims
from shardlib.annotation.trees.paths import Tree
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import ArgumentError, TracingError
from shardlib.frontend import own_layouts
from shardlib.frontend.arguments import require_arguments
from shardlib.frontend.machines import machine_of
from shardlib.frontend.own_layouts import require_honour
from shardlib.frontend.steps.marked.lowered import loss_plan, lower_losses
from shardlib.frontend.steps.marked.planned import MarkedStep
from shardlib.frontend.steps.marked.single import SingleLoss
from shardlib.frontend.steps.pins import marked_pins, step_pins
from shardlib.frontend.steps.step_program import StepProgram, build_step
from shardlib.hardware.devices import devices_of
from shardlib.hardware.topology import Topology, TopologyLike
from shardlib.planning.plan import Plan
from shardlib.planning.planner import Prepared, search
from shardlib.propagation.colours import Colouring, colour
from shardlib.tracing.layouts import (
    NO_MESH,
    ambient_mesh,
    brings_layouts,
    freed,
    has_layout,
    names_axes,
)
from shardlib.tracing.steps.traced_step import Step, TracedStep, trace_step

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
        first, given, shapes, stacks = _state_of(init, ambient)
        machine = machine_of(topology)
        traced = traced_freed(
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
            given=given,
            devices=devices if devices is not None else devices_of(topology),
            abstract=abstract,
            honour=honour,
        )


def traced_freed(
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

    if not names_axes(ambient):
        try:
            traced = run(step)
        except TracingError as error:
            if error.__cause__ is None:
                raise
        else:
            if not brings_layouts(traced.closed):
                return traced
    return run(freed(step, ambient))


def stepping(
    traced: TracedStep,
    machine: Topology,
    pin: PinMapping | None,
    *,
    first: Callable[..., Tree] | None,
    given: Tree,
    devices: Sequence[jax.Device] | None = None,
    abstract: bool = False,
    donate: bool = True,
    honour: str = "hints",
) -> StepProgram:
    """The program of a traced step."""
    marked = MarkedStep.of(traced) if traced.losses else None
    problem = traced.problem if marked is None else marked.traced.problem

    def pins(own: PinMapping | Pins | None) -> PinMapping:
        given = own.to_json() if isinstance(own, Pins) else own
        if marked is None:
            return step_pins(given)
        return marked_pins(given, marked.unstaged, marked.unsharded)

    def searched(own: Pins) -> Plan:
        return search(problem if marked is None else marked.problem, machine, pins(own))

    own = pin
    if honour == "pins":
        found = own_layouts.pinned(traced.layouts, problem, pin, searched)
        own = found.to_json() if isinstance(found, Pins) else found
    if marked is not None:
        marked, plan = marked.searched(machine, own)
        traced, known = marked.traced, marked.colouring
    else:
        plan = search(traced.problem, machine, step_pins(own))
        known = plan.source.load.colouring if plan.source is not None else colour(traced.problem)
    plan = plan.with_findings(
        *own_layouts.findings(traced.layouts, problem, plan, pin, honour, searched)
    )
    plan = plan.with_findings(*traced.findings)
    plan = _with_written(plan, traced, () if marked is None else marked.losses, known)
    count = plan.mesh.devices
    chosen = None if abstract else list(jax.devices() if devices is None else devices)[:count]
    losses = None if marked is None else lower_losses(marked, plan, chosen)
    return build_step(
        traced,
        plan,
        known,
        machine,
        first=first,
        given=given,
        devices=chosen,
        donate=donate,
        losses=losses,
    )


def _with_written(
    plan: Plan, traced: TracedStep, losses: Sequence[SingleLoss], colouring: Colouring
) -> Plan:
    """The plan of a step, which writes itself as plain JAX."""
    if not isinstance(plan.source, Prepared):
        return plan

    def written(plan: Plan, mode: str) -> str:
        from shardlib.frontend.plain_jax import StepLoss, plain_step_text  # needed by few

        marked = [
            StepLoss(
                path=one.found.call.path,
                name=one.found.form.name,
                model=one.model,
                plan=loss_plan(plan, one),
                leaves=one.leaves,
            )
            for one in losses
        ]
        return plain_step_text(traced, marked, plan, colouring, mode)

    return replace(plan, source=replace(plan.source, written=written))


def _state_of(
    init: InitState, ambient: AbstractMesh
) -> tuple[Callable[..., Tree] | None, Tree, Tree, Sequence[Sequence[int]]]:
    """(key -> state, state, abstract state, dims of its arrays that a transform has added and not
    named); one of the first two is None.
    """
    if not callable(init):
        return None, init, init, ()
    made = names_alone()(cast("Callable[..., Tree]", init))
    if names_axes(ambient):
        made = freed(made, ambient)
    key = jax.eval_shape(lambda: jax.random.key(0))
    first = made
    try:
        shapes = jax.eval_shape(made, key)
    except TypeError as error:
        try:
            shapes = jax.eval_shape(made)
        except TypeError:
            raise _untraced(error) from error

        def first(_: jax.Array) -> Tree:
            return made()
    except Exception as error:
        raise _untraced(error) from error
    if any(map(has_layout, jax.tree.leaves(shapes))):
        return _state_of(freed(init, NO_MESH), ambient)
    return first, None, shapes, stack_dims(lambda: first(jax.random.key(0)), shapes)


def _untraced(error: Exception) -> TracingError:
    """Whatever a user's initialiser raises, as an error of ours."""
    return TracingError(
        f"init cannot be traced: {type(error).__name__}: {error}\nTry: init=lambda key: state, or a"
        " state; of an NNX model, lambda key: Model(nnx.Rngs(key))"
    )
