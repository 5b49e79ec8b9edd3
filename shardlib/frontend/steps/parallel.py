"""`@shardlib.parallelize`: a function whose first call says for what it is planned."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import overload

import jax
from jax.sharding import AbstractMesh

from shardlib._jax_compat import names_alone
from shardlib.annotation.activations import no_mesh
from shardlib.annotation.trees.paths import Tree
from shardlib.decisions.pins import PinMapping
from shardlib.frontend.machines import machine_of
from shardlib.frontend.own_layouts import require_honour
from shardlib.frontend.steps.compiled import stepping, traced_freed
from shardlib.frontend.steps.step_program import StepProgram, copied
from shardlib.functions.mapped_axes import found_axes, whole_batch
from shardlib.hardware.devices import devices_of
from shardlib.hardware.topology import TopologyLike
from shardlib.tracing.layouts import ambient_mesh, freed, names_axes
from shardlib.tracing.steps.traced_step import abstract_leaf, same_form

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
        """What the function gives, on the devices of its plan."""
        result, program = self._of(state, batch)
        held = jax.tree.map(_placed, state, program.state)
        return result(*program.step(held, batch))

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
    return structure, tuple((one.shape, str(one.dtype)) for one in map(abstract_leaf, leaves))


def _placed(leaf: Tree, asked: jax.ShapeDtypeStruct) -> jax.Array:
    """An array where the program has it; a copy, unless it is there already."""
    if isinstance(leaf, jax.Array) and leaf.sharding == asked.sharding:
        return leaf
    return copied(leaf, asked.sharding)
