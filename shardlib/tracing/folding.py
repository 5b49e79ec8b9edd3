"""Folding: unrolled layers become a loop over layers.

Each run of equal blocks that `program.search` finds becomes one `jax.lax.scan`. Operands that
differ from layer to layer are stacked; parameters are inputs of the folded program already stacked,
so the step graph of a 126-layer model has the inputs and ops of one layer. This is for planning
only: the program that runs keeps the user's own equations.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib._jax_compat import scan_counts
from shardlib.jax_types import Aval, Value
from shardlib.tracing.program import Equation, Program, Run, by_masking, find_repeats, has_matmul
from shardlib.tracing.rewriting import (
    Walk,
    closure,
    dependence,
    evaluate_equations,
    evaluate_program,
    last_reads,
    positions_of,
    rematerialised,
    results_wanted,
    typed,
)

#: The numbers of one value of the block in each repetition.
Column = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A run of blocks, prepared as a scan.

    Attributes:
        run: the range of equations.
        block: the first repetition, in which stacked and carried operands have new numbers.
        stacked: new number -> the values it has in each repetition.
        carried: new number -> (initial value, number in the block of its next value, number of the
            final value in the last repetition).
        outputs: results of the block that are read after the run, for each repetition; the first
            entry is the number in the block.
        read: the values of `outputs` that are read after the run.
    """

    run: Run
    block: tuple[Equation, ...]
    stacked: dict[int, Column]
    carried: dict[int, tuple[int, int, int]]
    outputs: tuple[Column, ...]
    read: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A program whose unrolled layers are loops.

    Attributes:
        program: the original.
        inputs: for each input of the folded program, the positions of its original inputs; those of
            an input in `stacks`, or of several, are stacked along a new leading dim.
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
        """The results of the program."""
        walk = Walk(remat=remat, run=by_masking)
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
            _fold_scan(loop, self.program, env, stacks, walk)
            position = loop.run.stop
        evaluate_equations(self.program.equations[position:], env, walk)
        return [env[number] for number in self.program.outputs]

    @property
    def _separate(self) -> set[int]:
        """Stacked inputs that are also read outside their own column, for example tied weights."""
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
    """Folds every run of equal blocks that can be a scan; the others stay unrolled."""
    last = last_reads(program)
    loops = tuple(
        loop
        for run in find_repeats(program)
        if (loop := _fold_loop(program, run, last)) is not None
    )
    positions = {
        number: position
        for position, number in enumerate(program.inputs)
        if any(position in group for group in parameters)
    }
    kinds = [{program.inputs[position] for position in group} for group in parameters]
    stacked_inputs: set[int] = set()
    columns: list[Column] = []
    for loop in loops:
        for column in loop.stacked.values():
            if (
                column not in columns
                and any(kind.issuperset(column) for kind in kinds)
                and len(set(column)) == len(column)
                and not stacked_inputs & set(column)
            ):
                columns.append(column)
                stacked_inputs |= set(column)
    first = {column[0]: column for column in columns}
    inputs: list[tuple[int, ...]] = []
    stacks: dict[int, Column] = {}
    for position, number in enumerate(program.inputs):
        if number in first:
            stacks[len(inputs)] = first[number]
            inputs.append(tuple(positions[n] for n in first[number]))
        elif number not in stacked_inputs:
            inputs.append((position,))
    return Folded(program=program, loops=loops, inputs=tuple(inputs), stacks=stacks)


def _fold_loop(program: Program, run: Run, last: dict[int, int]) -> Loop | None:
    """The run as a loop; None if an initial carry has another type than the carry."""
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
    numbers: dict[tuple[Any, ...], int] = {}
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
            origin = ("carried", source, number) if source is not None else ("stacked", column)
            key = numbers.setdefault(origin, len(program.avals) + len(numbers))
            inputs.append(key)
            if source is None:
                stacked[key] = column
            else:
                carried[key] = (number, column[1], reps[-1][source[0]].outputs[source[1]])
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
    outputs = tuple(
        column
        for column in columns
        if any(last.get(n, -1) >= run.stop and n not in finals for n in column)
    )
    read = frozenset(n for column in outputs for n in column if last.get(n, -1) >= run.stop)
    return Loop(
        run=run, block=tuple(block), stacked=stacked, carried=carried, outputs=outputs, read=read
    )


def _same_type(a: Aval, b: Aval) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _fold_scan(
    loop: Loop, program: Program, env: dict[int, Value], stacks: dict[Column, Value], walk: Walk
) -> None:
    """Runs a loop, and adds the values read after it to `env`."""

    def read(number: int) -> Value:
        return typed(env[number], program.avals[number])

    arrays = {
        key: stacks[column] if column in stacks else jnp.stack([read(n) for n in column])
        for key, column in loop.stacked.items()
    }
    init = {key: read(start) for key, (start, _, _) in loop.carried.items()}
    inside = walk.layer() if walk.remat != "none" else walk

    def body(
        carry: dict[int, Value], sliced: dict[int, Value]
    ) -> tuple[dict[int, Value], list[Value]]:
        inner = {**env, **carry, **sliced}
        evaluate_equations(loop.block, inner, inside)
        return {key: inner[after] for key, (_, after, _) in loop.carried.items()}, [
            inner[column[0]] for column in loop.outputs
        ]

    final, results = jax.lax.scan(
        rematerialised(body, walk.remat, prevent_cse=False), init, arrays, length=loop.run.count
    )
    env.update({last: final[key] for key, (_, _, last) in loop.carried.items()})
    for column, values in zip(loop.outputs, results, strict=True):
        env.update(
            {number: values[layer] for layer, number in enumerate(column) if number in loop.read}
        )


# --------------------------------------------------------------------------------------------------
# Split of a program into an early part, which computes some results, and a late part for the
# others.
#
# The early part runs only what the early results need. The late part runs the rest: it reads
# inputs that are still available, and values that the early part passes on. Values that are cheap
# to recompute from available inputs (anything but matrix products) are recomputed rather than
# passed on, and so are views of a value that is passed on.
#
# Loops are split too: the early loop carries what early results need, and stacks the values that
# its iterations pass to those of the late loop. In a backward pass over a stack of layers the chain
# of cotangents is then in the early loop and the weight gradients are in the late one (the split of
# zero-bubble pipelines, arXiv:2401.10241).

#: Ops whose result is a view of an operand that is not larger than the result.
_VIEWS = frozenset(
    {
        "reshape",
        "transpose",
        "broadcast_in_dim",
        "squeeze",
        "expand_dims",
        "sharding_constraint",
        "copy",
    }
)
_INLINED = Walk(inside=True)

Values = dict[int, Any]


@dataclass(frozen=True, kw_only=True)
class SplitLoop:
    """A scan in two parts.

    Attributes:
        body: its body in two parts.
        early, late: positions of the results of each part, carries first.
        stacks: numbers of the stacked values that the early part passes on.
    """

    equation: Equation
    body: Split
    early: tuple[int, ...]
    late: tuple[int, ...]
    stacks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Split:
    """A program in two parts.

    Attributes:
        program: the original.
        first, second: the equations of the early and of the late part.
        early, late: numbers of the results of each.
        passed: numbers of the values that the first part passes to the second.
    """

    program: Program
    first: tuple[Equation | SplitLoop, ...]
    second: tuple[Equation | SplitLoop, ...]
    early: tuple[int, ...]
    late: tuple[int, ...]
    passed: tuple[int, ...]

    def run_first(self, inputs: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """(early results, values passed on) for all inputs."""
        env: Values = {
            **self.program.constants,
            **dict(zip(self.program.inputs, inputs, strict=True)),
        }
        for step in self.first:
            if isinstance(step, SplitLoop):
                _early(step, env)
            else:
                evaluate_equations([step], env, _INLINED)
        return [env[number] for number in self.early], [env[number] for number in self.passed]

    def run_second(self, inputs: Sequence[Value], passed: Sequence[Value]) -> list[Value]:
        """Late results, from the available inputs (any value in place of the others) and the passed
        values.
        """
        env: Values = {
            **self.program.constants,
            **dict(zip(self.program.inputs, inputs, strict=True)),
            **dict(zip(self.passed, passed, strict=True)),
        }
        for step in self.second:
            if isinstance(step, SplitLoop):
                _late(step, env)
            else:
                evaluate_equations([step], env, _INLINED)
        return [env[number] for number in self.late]


def split(
    program: Program, early: Sequence[int], late: Sequence[int], available: Collection[int]
) -> Split:
    """Splits a program."""
    needed_early = results_wanted(program.equations, early)
    labels = dependence(
        program,
        [frozenset() if number in available else frozenset({"gone"}) for number in program.inputs],
    )
    fresh = len(program.avals)
    first: dict[int, Equation | SplitLoop] = {
        position: equation
        for position, equation in enumerate(program.equations)
        if needed_early[position]
    }
    second: list[Equation | SplitLoop] = []
    reads, passed = set(late), set[int]()
    for position in reversed(range(len(program.equations))):
        equation = program.equations[position]
        needed = reads.intersection(equation.outputs)
        early_results = needed.intersection(needed_early[position])
        if not needed:
            continue
        if not needed_early[position] or _is_recomputed(equation, labels):
            second.append(equation)
            reads.update(equation.inputs)
        elif equation.name == "scan" and needed != early_results:
            loop = _split_loop(equation, needed_early[position], needed - early_results, fresh)
            fresh += len(loop.stacks)
            first[position] = loop
            second.append(loop)
            passed.update(early_results, loop.stacks)
            reads.update(_late_operands(loop))
        else:
            passed.update(needed)
    passed |= {number for number in program.inputs if number in reads and number not in available}
    return Split(
        program=program,
        first=tuple(first[position] for position in sorted(first)),
        second=tuple(reversed(second)),
        early=tuple(early),
        late=tuple(late),
        passed=tuple(sorted(passed)),
    )


def _is_recomputed(equation: Equation, labels: dict[int, frozenset[str]]) -> bool:
    """True if the late part recomputes a value of the early part."""
    available = all(not labels[number] for number in equation.inputs)
    return equation.name in _VIEWS or (available and not has_matmul(equation.eqn))


def _split_loop(equation: Equation, early: set[int], late: set[int], fresh: int) -> SplitLoop:
    """A scan in two parts, with the numbers of the results that each has to compute; values passed
    on are numbered from `fresh`.
    """
    constants, carried = scan_counts(equation.params)
    body = equation.inside("body", remat=True)
    first, _ = closure(equation, body, positions_of(equation, early))
    carries = {body.inputs[constants + k]: k for k in range(carried)}
    available = [number for number in body.inputs if carries.get(number) not in first]
    second = positions_of(equation, late) - first
    while True:
        inner = split(
            body,
            [body.outputs[k] for k in sorted(first)],
            [body.outputs[k] for k in sorted(second)],
            available,
        )
        grown = second | {
            k for number, k in carries.items() if k not in first and number in _second_reads(inner)
        }
        if grown == second:
            break
        second = grown
    stacks = tuple(range(fresh, fresh + len(inner.passed)))
    return SplitLoop(
        equation=equation,
        body=inner,
        early=tuple(sorted(first)),
        late=tuple(sorted(second)),
        stacks=stacks,
    )


def _second_reads(inner: Split) -> set[int]:
    """The values that the late part reads."""
    reads = set(inner.late)
    for step in inner.second:
        reads.update(_late_operands(step) if isinstance(step, SplitLoop) else step.inputs)
    return reads


def _late_operands(loop: SplitLoop) -> set[int]:
    """The operands of a loop that its late part reads."""
    reads = _second_reads(loop.body)
    constants, carried = scan_counts(loop.equation.params)
    inside = {k for k, number in enumerate(loop.body.program.inputs) if number in reads}
    inside |= {constants + k for k in loop.late if k < carried}
    inside -= {constants + k for k in loop.early if k < carried}
    return {loop.equation.inputs[k] for k in inside}


def _early(loop: SplitLoop, env: Values) -> None:
    """Runs the early part of a loop."""

    def body(inputs: list[Value]) -> tuple[list[Value], list[Value]]:
        return loop.body.run_first(inputs)

    stacks = _split_scan(loop.equation, loop.early, env, body, ())
    env.update(zip(loop.stacks, stacks, strict=True))


def _late(loop: SplitLoop, env: Values) -> None:
    """Runs the late part of a loop."""

    def body(inputs: list[Value], *passed: Value) -> tuple[list[Value], list[Value]]:
        return loop.body.run_second(inputs, passed), []

    _split_scan(loop.equation, loop.late, env, body, [env[number] for number in loop.stacks])


def _split_scan(
    equation: Equation, results: Sequence[int], env: Values, body: Any, passed: Sequence[Value]
) -> Sequence[Value]:
    """Runs a scan for some of its results; returns the other values that the body returns, stacked.
    Operands missing from `env` are unread and replaced by None.
    """
    constants, carried = scan_counts(equation.params)
    program = equation.inside("body", remat=True)
    carries = [k for k in results if k < carried]
    operands: list[Any] = [env.get(number) for number in equation.inputs]

    def step(
        carry: list[Any], sliced: tuple[list[Any], Sequence[Any]]
    ) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        carries_by_position = dict(zip(carries, carry, strict=True))
        outputs, extra = body(
            [
                *operands[:constants],
                *(carries_by_position.get(k) for k in range(carried)),
                *sliced[0],
            ],
            *sliced[1],
        )
        return outputs[: len(carries)], (outputs[len(carries) :], extra)

    init = [
        typed(operands[constants + k], program.avals[program.inputs[constants + k]])
        for k in carries
    ]
    final, (stacked, extra) = jax.lax.scan(
        step,
        init,
        (operands[constants + carried :], list(passed)),
        length=equation.params["length"],
        reverse=equation.params["reverse"],
    )
    env.update(zip((equation.outputs[k] for k in results), [*final, *stacked], strict=True))
    return extra
