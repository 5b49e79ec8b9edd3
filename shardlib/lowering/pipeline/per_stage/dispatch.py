"""One step: the programs called in the order of the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from shardlib import _jax_compat
from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Metrics
from shardlib.lowering.pipeline.per_stage.around import Arriving, Update, in_turn
from shardlib.lowering.pipeline.per_stage.chunk_work import First
from shardlib.lowering.pipeline.per_stage.compiling import ChunkPrograms
from shardlib.lowering.pipeline.per_stage.prologue import Opened, Summed
from shardlib.lowering.pipeline.per_stage.shards import Places
from shardlib.lowering.pipeline.shared.partition import Arrays, Values
from shardlib.lowering.runtime.executable import Executable
from shardlib.schedules.orders import BACKWARD, FORWARD, WEIGHTS, Task

#: (stage, what it does), in an order in which every task comes after what it reads.
Turns = tuple[tuple[int, Task], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """What one stage needs beside the programs of its chunks.

    Attributes:
        zeros: program that makes the first sums: `First`.
        indices: the number of each microbatch.
    """

    zeros: jax.stages.Compiled
    indices: tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatch:
    """All programs of a step.

    Attributes:
        places: the devices of the stages.
        opening: parameters, model state, batch -> `Opened`.
        opened: structure of that.
        stacks: number of stacked parameters.
        kept: of every chunk the values made from parameters that it reads.
        outside: of every chunk those whose gradients it sums up beside those of layers.
        chunks: programs of every chunk.
        stages: of every stage.
        entering, back: of every chunk, shardings of what enters it, and of cotangents of what
            leaves it.
        turns: what is done, one after the other.
        update: makes the next state.
    """

    places: Places
    opening: Executable
    opened: Any
    stacks: int
    kept: tuple[tuple[int, ...], ...]
    outside: tuple[tuple[int, ...], ...]
    chunks: tuple[ChunkPrograms, ...]
    stages: tuple[Stage, ...]
    entering: tuple[list[Any], ...]
    back: tuple[list[Any], ...]
    turns: Turns
    update: Update

    def memory(self) -> dict[str, int]:
        """Bytes per device of the program that needs the most."""
        calls = (
            self.opening.call,
            *(program.call for chunk in self.chunks for program in chunk.all),
        )
        return max(
            (*map(_jax_compat.compiled_memory, calls), self.update.memory()),
            key=lambda sizes: sizes["peak"],
        )

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, Metrics]:
        """(state, metrics) after a step; the state is donated."""
        opened: Opened = jax.tree.unflatten(
            self.opened, self.opening(jax.tree.leaves((state.params, state.inputs, batch)))
        )
        run = Step(self, opened)
        for turn in self.turns:
            run.do(*turn)
        return self.update.step(state, (opened.after, run.summed()))

    def begun(self, params: Tree, inputs: Tree, batch: Tree, arriving: Arriving) -> Step:
        """All work of a step whose parameters are on their way, queued; nothing is updated."""
        leaves = jax.tree.leaves((params, inputs, batch))
        run = Step(self, jax.tree.unflatten(self.opened, self.opening(leaves)), arriving)
        in_turn(self.turns, run.ready, run.do, arriving)
        return run


class Step:
    """What is under way in one step. Arrays are let go of when the last program that reads them is
    queued.

    Attributes:
        opened: what all microbatches work with.
        early, late: of each chunk, what it has summed.
    """

    def __init__(
        self, programs: Dispatch, opened: Opened, arriving: Arriving | None = None
    ) -> None:
        self.programs, self.ways = programs, len(programs.stages)
        self.opened, self._arriving = opened, arriving
        self._held, self._shards = dict[int, Arrays](), dict[int, tuple[jax.Array, ...]]()
        self.first: list[First] = [stage.zeros() for stage in programs.stages]
        self.early, self.late = dict[int, Arrays](), dict[int, Arrays]()
        for number in range(len(programs.chunks)):
            early, late = self.first[number % self.ways].chunks[number // self.ways]
            self.early[number], self.late[number] = jax.tree.leaves(early), jax.tree.leaves(late)
        self.entering, self.left, self.saved, self.back = (
            dict[tuple[int, int], Arrays]() for _ in range(4)
        )
        self.work = {FORWARD: self._forward, BACKWARD: self._backward, WEIGHTS: self._weights}

    def do(self, stage: int, task: Task) -> None:
        """Queues a task."""
        self.work[task.kind](task.chunk * self.ways + stage, task.microbatch)

    def ready(self, stage: int, task: Task) -> bool:
        """Whether neighbours have made what a task reads."""
        chunk = task.chunk * self.ways + stage
        program, unit = self.programs.chunks[chunk], (chunk, task.microbatch)
        if task.kind == FORWARD or (task.kind == BACKWARD and program.both is not None):
            nothing = task.kind == FORWARD and program.forward is None
            return nothing or not chunk or unit in self.entering
        last = chunk == len(self.programs.chunks) - 1
        return task.kind == WEIGHTS or last or unit in self.back

    def summed(self) -> Summed:
        """What the stages have summed, over all devices."""
        programs, join = self.programs, self.programs.places.join
        turns = [
            range(start, start + self.ways) for start in range(0, len(programs.chunks), self.ways)
        ]
        stacks, last = programs.stacks, len(programs.chunks) - 1
        late = [
            [
                join(leaves)
                for leaves in zip(*(self._reduced(number) for number in turn), strict=True)
            ]
            for turn in turns
        ]
        sums: list[Values] = [
            dict(stage_sums.outside) for stage_sums in self.first
        ]  # of every stage, zeros where it sums nothing up
        for number in (0, last):
            sums[number % self.ways].update(
                zip(programs.outside[number], self.early[number], strict=False)
            )
        outside = {number: join([values[number] for values in sums]) for number in sorted(sums[0])}
        totals = zip(
            *(stage_sums.totals for stage_sums in self.first[:-1]),
            self.early[last][len(programs.outside[last]) :],
            strict=True,
        )
        return Summed(
            stacks=[[leaves[k] for leaves in late] for k in range(stacks)],
            shared=[[leaves[k] for leaves in late] for k in range(stacks, len(late[0]))],
            outside=outside,
            totals=[join(leaves) for leaves in totals],
        )

    def held(self, chunk: int) -> Arrays:
        """What a chunk works with, in the order of `Held`."""
        if chunk not in self._held:
            turn, stage = divmod(chunk, self.ways)
            opened, gather = self.opened, self.programs.chunks[chunk].gather
            leaves = [
                *(parts[turn] for parts in opened.stacks),
                *(opened.kept[number] for number in sorted(self.programs.kept[chunk])),
                *opened.states,
                *opened.parts,
            ]
            shards = [self._shard(leaf, stage) for leaf in leaves]
            self._held[chunk] = shards if gather is None else [*shards, *gather(shards)]
        return self._held[chunk]

    def _shard(self, array: jax.Array, stage: int) -> jax.Array:
        """What a stage has of an array."""
        came = None if self._arriving is None else self._arriving.part(array, stage)
        if came is not None:
            return came
        if id(array) not in self._shards:
            self._shards[id(array)] = self.programs.places.split(array)
        return self._shards[id(array)][stage]

    def _reduced(self, chunk: int) -> Arrays:
        """Gradients of stacked parameters, and of those that all layers use."""
        reduce, late = self.programs.chunks[chunk].reduce, self.late[chunk]
        return late if reduce is None else reduce([*self.held(chunk), *late])

    def _given(self, chunk: int, micro: int) -> Arrays:
        return [*self.held(chunk), self.programs.stages[chunk % self.ways].indices[micro]]

    def _forward(self, chunk: int, micro: int) -> None:
        program, unit = self.programs.chunks[chunk], (chunk, micro)
        if program.forward is None:
            return  # the backward pass does it
        results = program.forward([*self._given(*unit), *self.entering.pop(unit, ())])
        left, self.saved[unit] = results[: len(program.left)], results[len(program.left) :]
        if chunk + 1 < len(self.programs.chunks):
            self.entering[chunk + 1, micro] = jax.device_put(
                left, self.programs.entering[chunk + 1]
            )
        else:
            self.left[unit] = left

    def _backward(self, chunk: int, micro: int) -> None:
        program, unit = self.programs.chunks[chunk], (chunk, micro)
        sums = [*self.early[chunk], *(self.late[chunk] if program.weights is None else ())]
        if program.both is not None:
            results = program.both([*self._given(*unit), *self.entering.pop(unit, ()), *sums])
        else:
            assert program.backward is not None
            saved = self.saved.pop(unit)
            results = program.backward(
                [
                    *self._given(*unit),
                    *self.left.pop(unit, ()),
                    *saved,
                    *self.back.pop(unit, ()),
                    *sums,
                ]
            )
        early, count = len(self.early[chunk]), len(sums)
        self.early[chunk] = results[:early]
        if chunk:
            self.back[chunk - 1, micro] = jax.device_put(
                results[count : count + program.entered], self.programs.back[chunk - 1]
            )
        if program.weights is None:
            self.late[chunk] = results[early:count]
        elif program.both is not None:
            self.saved[unit] = results[count + program.entered :]
        else:
            self.saved[unit] = [
                *(saved[k] for k in program.stashed),
                *results[count + program.entered :],
            ]

    def _weights(self, chunk: int, micro: int) -> None:
        program, unit = self.programs.chunks[chunk], (chunk, micro)
        assert program.weights is not None
        self.late[chunk] = program.weights(
            [*self._given(*unit), *self.saved.pop(unit), *self.late[chunk]]
        )
