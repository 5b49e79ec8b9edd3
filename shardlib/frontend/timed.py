"""Steps of programs on attached devices, run in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from shardlib.annotation.trees import Tree
from shardlib.errors import TopologyError
from shardlib.lowering.program import Program
from shardlib.machines.topology import Topology, topology
from shardlib.processes.timing import Clock, Pass


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


#: Passes over programs at least and at most, seconds after which they end, and steps of each
#: program in a pass.
LEAST_PASSES, PASSES, SECONDS, STEPS = 2, 8, 30.0, 2


def step_seconds(programs: Sequence[Program]) -> list[float]:
    """Seconds of a step of each of several programs, run in turns, so that whatever else runs on
    the machine slows all of them; the lower quartile, since other work comes in bursts.
    """
    clock = Clock(budget_s=0.0, runs=STEPS)
    for number, program in enumerate(programs):
        make = partial(stepping, program, program.batch)
        clock.seconds(str(number), make, devices=program.plan.mesh.devices)
    end = time.monotonic() + SECONDS
    while clock.count <= LEAST_PASSES or (clock.count <= PASSES and time.monotonic() < end):
        clock.again(1)
    return [lower_quartile(clock.passes[str(number)][1:]) for number in range(len(programs))]


def lower_quartile(passes: Sequence[Pass]) -> float:
    """The lower quartile of the wall times of a program in several passes."""
    walls = sorted(wall for runs in passes for wall in runs.walls)
    return walls[len(walls) // 4]


def is_attached(machine: Topology) -> bool:
    """Whether the devices of a machine are attached to this process, which is alone."""
    try:
        chip = topology(jax.devices()).chip.name
    except TopologyError:  # devices of which no topology is made
        return False
    enough = len(jax.devices()) >= machine.devices
    return enough and chip == machine.chip.name and jax.process_count() == 1
