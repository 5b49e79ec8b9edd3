"""Steps of the user's own: `compile_step`, `parallelize`, and evaluation of their states."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast, overload

import jax
from jax.sharding import AbstractMesh

from shardlib._jax_compat import names_alone
from shardlib.annotation.names import stack_dims
from shardlib.annotation.tree import no_mesh
from shardlib.annotation.trees import Tree
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import ArgumentError, TracingError
from shardlib.frontend import own_layouts
from shardlib.frontend.choice import machine_of
from shardlib.frontend.marked import (
    MarkedStep,
    SingleLoss,
    loss_plan,
    lower_losses,
    marked_pins,
    step_pins,
)
from shardlib.frontend.model import require_arguments
from shardlib.frontend.own_layouts import require_honour
from shardlib.frontend.step_program import StepProgram, build_step, copied
from shardlib.functions.experts import found_axes, whole_batch
from shardlib.machines.topology import Topology, TopologyLike, devices_of
from shardlib.planner.plan import Plan
from shardlib.planner.planner import Prepared, search
from shardlib.propagation.colours import Colouring, colour
from shardlib.tracing.layouts import (
    NO_MESH,
    ambient_mesh,
    brings_layouts,
    freed,
    has_layout,
    names_axes,
)
from shardlib.tracing.steps import Step, TracedStep, abstract_leaf, same_form, trace_step

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
            given=state,
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

    def pins(user_pins: PinMapping | Pins | None) -> PinMapping:
        plain_pins = user_pins.to_json() if isinstance(user_pins, Pins) else user_pins
        if marked is None:
            return step_pins(plain_pins)
        return marked_pins(plain_pins, marked.unstaged, marked.unsharded)

    def searched(user_pins: Pins) -> Plan:
        return search(problem if marked is None else marked.problem, machine, pins(user_pins))

    user_pins = pin
    if honour == "pins":
        pins_of_layouts = own_layouts.pinned(traced.layouts, problem, pin, searched)
        user_pins = (
            pins_of_layouts.to_json() if isinstance(pins_of_layouts, Pins) else pins_of_layouts
        )
    if marked is not None:
        marked, plan = marked.searched(machine, user_pins)
        traced, colouring = marked.traced, marked.colouring
    else:
        plan = search(traced.problem, machine, step_pins(user_pins))
        colouring = (
            plan.source.load.colouring if plan.source is not None else colour(traced.problem)
        )
    plan = plan.with_findings(
        *own_layouts.findings(traced.layouts, problem, plan, pin, honour, searched)
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
        from shardlib.frontend.plain_jax import (
            StepLoss,
            plain_step_text,  # needed by few
        )

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

    return replace(plan, source=replace(plan.source, written=written))


def _state_of(
    init: InitState, ambient: AbstractMesh
) -> tuple[Callable[..., Tree] | None, Tree, Tree, Sequence[Sequence[int]]]:
    """(key -> state, state, abstract state, dims of its arrays that a transform has added and not
    named); one of the first two is None.
    """
    if not callable(init):
        return None, init, init, ()
    make = names_alone()(cast("Callable[..., Tree]", init))
    if names_axes(ambient):
        make = freed(make, ambient)
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
        return _state_of(freed(init, NO_MESH), ambient)
    return first, None, shapes, stack_dims(lambda: first(jax.random.key(0)), shapes)


def _untraced(error: Exception) -> TracingError:
    """Whatever a user's initialiser raises, as an error of ours."""
    return TracingError(
        f"init cannot be traced: {type(error).__name__}: {error}\nTry: init=lambda key: state, or a"
        " state; of an NNX model, lambda key: Model(nnx.Rngs(key))"
    )


# --------------------------------------------------------------------------------------------------
# `@shardlib.parallelize`: a function whose first call says for what it is planned.

#: (state, batch) -> (new state, metrics) or the new state, or (params, batch) -> anything.
Function = Callable[[Tree, Tree], Tree]
#: (new state, the rest) of a program -> what the user's function returns.
Result = Callable[[Tree, Tree], Tree]


class Parallel:
    """A function of a state and a batch, planned and compiled for each shape that it is called
    with.

    A function that returns what is like the state, or a pair whose first part is, is a step: its
    state is taken over by the next call. Any other is inference: it gets params and a batch, and
    the params stay.

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

    def program(self, state: Tree, batch: Tree) -> StepProgram:
        """The program for a state and a batch of such shapes, which are not computed with."""
        return self._of(state, batch)[1]

    def __call__(self, state: Tree, batch: Tree) -> Tree:
        """Calls the function on the devices of its plan."""
        result, program = self._of(state, batch)
        on_mesh = jax.tree.map(_placed, state, program.state)
        return result(*program.step(on_mesh, batch))

    def _of(self, state: Tree, batch: Tree) -> tuple[Result, StepProgram]:
        key = _shapes((state, batch))
        if key not in self._programs:
            self._programs[key] = self._made(state, batch)
        return self._programs[key]

    def _made(self, state: Tree, batch: Tree) -> tuple[Result, StepProgram]:
        ambient = ambient_mesh()
        with no_mesh(), names_alone():
            shapes = jax.tree.map(abstract_leaf, (state, batch))
            out = self._results(shapes, ambient)
            alone = same_form(out, shapes[0])
            pair = isinstance(out, tuple) and len(out) == 2 and same_form(out[0], shapes[0])
            steps = alone or pair

            def infer(params: Tree, batch: Tree) -> tuple[Tree, Tree]:
                return params, self._function(params, batch)

            traced = traced_freed(
                self._function if steps else infer,
                shapes[0],
                shapes[1],
                ambient,
                batch_axes=self._batch_axes,
                name=getattr(self._function, "__name__", "function"),
            )
            result = _state_alone if alone else _both if pair else _rest
            return result, stepping(
                traced,
                machine_of(self._topology),
                self._pin,
                first=None,
                given=state,
                devices=devices_of(self._topology),
                donate=steps,
                honour=self._honour,
            )

    def _results(self, shapes: tuple[Tree, Tree], ambient: AbstractMesh) -> Tree:
        """Abstract results of the function."""

        def results(function: Function) -> Tree:
            return found_axes(lambda names: jax.eval_shape(whole_batch(function, names), *shapes))

        if not names_axes(ambient):
            with contextlib.suppress(Exception):  # of meshes, or `freed` raises it, too
                return results(self._function)
        return results(freed(self._function, ambient))


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
        function: (state, batch) -> (new state, metrics) or the new state, or (params, batch) ->
            anything.
        topology: the machine; all devices of this one if left out.
        pin: see `shardlib.compile_step`.
        batch_axes: as of `shardlib.plan`.
        honour: what layouts of the function are, "hints" or "pins", as of `shardlib.plan`.
    """

    def wrapped(function: Function) -> Parallel:
        return Parallel(function, topology=topology, pin=pin, batch_axes=batch_axes, honour=honour)

    return wrapped if function is None else wrapped(function)


def _both(state: Tree, rest: Tree) -> Tree:
    return state, rest


def _state_alone(state: Tree, _: Tree) -> Tree:
    return state


def _rest(_: Tree, rest: Tree) -> Tree:
    return rest


def _shapes(tree: Tree) -> object:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in map(abstract_leaf, leaves))


def _placed(leaf: Tree, target: jax.ShapeDtypeStruct) -> jax.Array:
    """An array where the program has it; a copy, unless it is there already."""
    if isinstance(leaf, jax.Array) and leaf.sharding == target.sharding:
        return leaf
    return copied(leaf, target.sharding)
