"""How does a model with layers written out become one with a loop over layers?

Each run of equal blocks that `repeats.py` finds becomes one `jax.lax.scan`. An operand of the block
that differs from layer to layer is stacked; parameters come in stacked already, as one input for
all layers, so that the step graph of a 126-layer model has the inputs and ops of one layer. This is
for planning only: the program that runs keeps the user's own equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.jax_types import Aval, Value
from shardlib.tracing.element_lookup import by_elements
from shardlib.tracing.program import Equation, Program
from shardlib.tracing.rewriting.binding import last_reads, strong
from shardlib.tracing.rewriting.interpreter import evaluate_equations, evaluate_program
from shardlib.tracing.rewriting.remat_policies import rematerialised
from shardlib.tracing.rewriting.repeats import Run, find_repeats
from shardlib.tracing.rewriting.walk import Walk

#: The numbers that one value of the block has, repetition by repetition.
Column = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A run of blocks, ready to be a scan.

    Attributes:
        run: which equations.
        block: the first repetition, its operands renumbered: a stacked operand has the number of
            its slot, a carried one too.
        stacked: slot number -> the values that take its place, repetition by repetition.
        carried: slot number -> (value at the start, number in the block of what the block makes of
            it, number of that in the last repetition).
        kept: results of the block that are read after the run, repetition by repetition; the first
            names it in the block.
        read: the values of `kept` that are read after the run.
    """

    run: Run
    block: tuple[Equation, ...]
    stacked: dict[int, Column]
    carried: dict[int, tuple[int, int, int]]
    kept: tuple[Column, ...]
    read: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A program whose written-out layers are loops.

    Attributes:
        program: the original.
        loops: the loops, in order.
        inputs: for each input of the folded program the positions of the original inputs behind it;
            more than one, or one in `stacks`, means that they are stacked along a new leading dim.
        stacks: input position -> the values (numbers in the original) that it stacks.
    """

    program: Program
    loops: tuple[Loop, ...]
    inputs: tuple[tuple[int, ...], ...]
    stacks: dict[int, Column]

    def stack(self, args: Sequence[Value]) -> list[Value]:
        """Arguments of the folded program, from those of the original."""
        return [
            jnp.stack([args[i] for i in positions]) if index in self.stacks else args[positions[0]]
            for index, positions in enumerate(self.inputs)
        ]

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the folded program's inputs."""
        avals: list[jax.ShapeDtypeStruct] = []
        for index, positions in enumerate(self.inputs):
            aval = self.program.avals[self.program.inputs[positions[0]]]
            lead = (len(positions),) if index in self.stacks else ()
            avals.append(jax.ShapeDtypeStruct((*lead, *aval.shape), aval.dtype))
        return avals

    def evaluate(self, args: Sequence[Value], *, remat: str = "none") -> list[Value]:
        """Results of the program."""
        walk = Walk(remat=remat, run=by_elements)
        if not self.loops:
            return evaluate_program(self.program, args, walk)
        env: dict[int, Any] = dict(self.program.constants)
        stacks: dict[Column, Any] = {}
        separate = self._separate
        for index, positions in enumerate(self.inputs):
            if index in self.stacks:
                stacks[self.stacks[index]] = args[index]
                env.update(
                    {
                        number: args[index][layer]
                        for layer, number in enumerate(self.stacks[index])
                        if number in separate
                    }
                )
            else:
                env[self.program.inputs[positions[0]]] = args[index]
        position = 0
        for loop in self.loops:
            evaluate_equations(self.program.equations[position : loop.run.start], env, walk)
            _scan(loop, self.program, env, stacks, walk)
            position = loop.run.stop
        evaluate_equations(self.program.equations[position:], env, walk)
        return [env[number] for number in self.program.outputs]

    @property
    def _separate(self) -> set[int]:
        """Stacked inputs that something reads outside their own column, tied weights for
        example.
        """
        inside = {
            n
            for loop in self.loops
            for column in loop.stacked.values()
            if column in self.stacks.values()
            for n in column
        }
        others = {
            n
            for loop in self.loops
            for column in loop.stacked.values()
            if column not in self.stacks.values()
            for n in column
        }
        within = {n for loop in self.loops for equation in loop.block for n in equation.inputs}
        starts = {start for loop in self.loops for start, _, _ in loop.carried.values()}
        covered = {index for loop in self.loops for index in range(loop.run.start, loop.run.stop)}
        free = {
            n
            for index, equation in enumerate(self.program.equations)
            if index not in covered
            for n in equation.inputs
        }
        return inside & (others | within | starts | free | set(self.program.outputs))


def fold(program: Program, *parameters: set[int]) -> Folded:
    """Folds every run of equal blocks that can be a scan; others stay written out."""
    last = last_reads(program)
    loops = tuple(
        loop for run in find_repeats(program) if (loop := _loop(program, run, last)) is not None
    )
    positions = {
        number: position
        for position, number in enumerate(program.inputs)
        if any(position in group for group in parameters)
    }
    kinds = [{program.inputs[position] for position in group} for group in parameters]
    taken: set[int] = set()
    columns: list[Column] = []
    for loop in loops:
        for column in loop.stacked.values():
            if (
                column not in columns
                and any(kind.issuperset(column) for kind in kinds)
                and len(set(column)) == len(column)
                and not taken & set(column)
            ):
                columns.append(column)
                taken |= set(column)
    first = {column[0]: column for column in columns}
    inputs: list[tuple[int, ...]] = []
    stacks: dict[int, Column] = {}
    for position, number in enumerate(program.inputs):
        if number in first:
            stacks[len(inputs)] = first[number]
            inputs.append(tuple(positions[n] for n in first[number]))
        elif number not in taken:
            inputs.append((position,))
    return Folded(program=program, loops=loops, inputs=tuple(inputs), stacks=stacks)


def _loop(program: Program, run: Run, last: dict[int, int]) -> Loop | None:
    """The run as a loop; None where an initial carry has another type than the carry."""
    reps = [
        program.equations[run.start + r * run.period : run.start + (r + 1) * run.period]
        for r in range(run.count)
    ]
    producers = [
        {
            n: (index, k)
            for index, equation in enumerate(rep)
            for k, n in enumerate(equation.outputs)
        }
        for rep in reps
    ]
    slots: dict[tuple[Any, ...], int] = {}
    stacked: dict[int, Column] = {}
    carried: dict[int, tuple[int, int, int]] = {}
    block: list[Equation] = []
    for index, equation in enumerate(reps[0]):
        inputs: list[int] = []
        for k, number in enumerate(equation.inputs):
            column = tuple(rep[index].inputs[k] for rep in reps)
            if number in producers[0] or len(set(column)) == 1:
                inputs.append(number)
                continue
            source = producers[0].get(column[1])
            key = ("carried", source, number) if source is not None else ("stacked", column)
            slot = slots.setdefault(key, len(program.avals) + len(slots))
            inputs.append(slot)
            if source is None:
                stacked[slot] = column
            else:
                carried[slot] = (number, column[1], reps[-1][source[0]].outputs[source[1]])
        block.append(
            Equation(
                path=equation.path,
                eqn=equation.eqn,
                inputs=tuple(inputs),
                outputs=equation.outputs,
                scope=equation.scope,
            )
        )
    if any(not _same_type(program.avals[a], program.avals[b]) for a, b, _ in carried.values()):
        return None
    if any(
        not all(_same_type(program.avals[column[0]], program.avals[n]) for n in column)
        for column in stacked.values()
    ):
        return None
    finals = {final for _, _, final in carried.values()}
    columns = [
        tuple(rep[index].outputs[k] for rep in reps)
        for index, equation in enumerate(reps[0])
        for k in range(len(equation.outputs))
    ]
    read_after = tuple(
        column
        for column in columns
        if any(last.get(n, -1) >= run.stop and n not in finals for n in column)
    )
    read = frozenset(n for column in read_after for n in column if last.get(n, -1) >= run.stop)
    return Loop(
        run=run, block=tuple(block), stacked=stacked, carried=carried, kept=read_after, read=read
    )


def _same_type(a: Aval, b: Aval) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _scan(
    loop: Loop, program: Program, env: dict[int, Value], stacks: dict[Column, Value], walk: Walk
) -> None:
    """Runs a loop; `env` gains what is read after it."""

    def read(number: int) -> Value:
        return strong(env[number], program.avals[number])

    arrays = {
        slot: stacks[column] if column in stacks else jnp.stack([read(n) for n in column])
        for slot, column in loop.stacked.items()
    }
    init = {slot: read(start) for slot, (start, _, _) in loop.carried.items()}
    inside = walk.layer() if walk.remat != "none" else walk

    def body(
        carry: dict[int, Value], sliced: dict[int, Value]
    ) -> tuple[dict[int, Value], list[Value]]:
        inner = {**env, **carry, **sliced}
        evaluate_equations(loop.block, inner, inside)
        return {slot: inner[after] for slot, (_, after, _) in loop.carried.items()}, [
            inner[column[0]] for column in loop.kept
        ]

    final, results = jax.lax.scan(
        rematerialised(body, walk.remat, prevent_cse=False), init, arrays, length=loop.run.count
    )
    env.update({last: final[slot] for slot, (_, _, last) in loop.carried.items()})
    for column, values in zip(loop.kept, results, strict=True):
        env.update(
            {number: values[layer] for layer, number in enumerate(column) if number in loop.read}
        )
