"""Steps of programs on attached devices, run in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from shardlib.annotation.trees import Tree
from shardlib.errors import TopologyError
from shardlib.lowering.program import Program
from shardlib.machines.topology import Topology, topology
from shardlib.processes.timing import Clock


def stepping(program: Program, batch: Tree) -> Callable[[], object]:
    """A function that trains a program by one more step and returns what the step returns."""
    placed = program.put(example(batch))
    state = [program.init(0)]

    def step() -> object:
        state[0], metrics = program.step(state[0], placed)
        return state[0], metrics

    return step


def example(batch: Tree) -> Tree:
    """A batch with values where it is abstract: small integers, which are indices of any table, and
    normal numbers.
    """
    numbers = np.random.default_rng(0)

    def filled(leaf: object) -> object:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if np.issubdtype(leaf.dtype, np.integer) or leaf.dtype == np.bool_:
            return numbers.integers(0, 2, leaf.shape).astype(leaf.dtype)
        return numbers.standard_normal(leaf.shape, np.float32).astype(leaf.dtype)

    return jax.tree.map(filled, batch)


#: Passes over programs, and steps of each in a pass.
PASSES, STEPS = 4, 2


def step_seconds(programs: Sequence[Program]) -> list[float]:
    """Median seconds of a step of each of several programs, run in turns: whatever else runs on the
    machine slows all of them.
    """
    clock = Clock(budget_s=0.0, runs=STEPS)
    for number, program in enumerate(programs):
        make = partial(stepping, program, program.batch)
        clock.seconds(str(number), make, devices=program.plan.mesh.devices)
    clock.again(PASSES)
    return [
        statistics.median(wall for runs in clock.passes[str(number)][1:] for wall in runs.walls)
        for number in range(len(programs))
    ]


def is_attached(machine: Topology) -> bool:
    """Whether the devices of a machine are attached to this process, which is alone."""
    try:
        chip = topology(jax.devices()).chip.name
    except TopologyError:  # devices of which no topology is made
        return False
    enough = len(jax.devices()) >= machine.devices
    return enough and chip == machine.chip.name and jax.process_count() == 1
