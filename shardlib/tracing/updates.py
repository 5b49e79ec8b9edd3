"""The matrix updates of a traced optimizer: the part of an update that multiplies the matrices of
a parameter.

AdamW is elementwise: every device updates the shards that it has. Muon, Shampoo and spectral
clipping multiply whole matrices. The equations of each parameter from the first of its products to
the last are its *matrix update*; the elementwise equations before and after it are not a part of
it. A dim along which nothing is contracted, such as that of stacked layers, is a *stack*: every
matrix along it is updated alone.

    gradient -> momentum -> [ normalise -> X X^T -> ... -> X ] -> learning rate -> update
                              the matrix update
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.lax import linalg

from shardlib.graph import Contraction, Graph, MatrixUpdate, Op, UpdateArray
from shardlib.jax_types import Jaxpr
from shardlib.tracing.program import Equation, Program, has_matmul, subjaxprs

#: Numbers of values.
Numbers = tuple[int, ...]
#: Products of vectors count as reductions.
_SMALLEST = 2
#: Ops that only move their operand, which belong to the matrix update that they follow.
_MOVES = frozenset({"convert_element_type", "reshape", "squeeze", "transpose", "expand_dims"})


@dataclass(frozen=True, kw_only=True)
class Span:
    """The equations of one matrix update.

    Attributes:
        path: the parameter.
        equations: in execution order.
        inputs, outputs: numbers of the values it reads and leaves.
        stacks: for each input, then for each output, the dims that are stacks, in the order of the
            parameter's; () for values that all matrices share.
        facts: the same for the planner.
    """

    path: str
    equations: tuple[Equation, ...]
    inputs: Numbers
    outputs: Numbers
    stacks: tuple[Numbers, ...]
    facts: MatrixUpdate

    def digest(self, program: Program) -> str:
        """A text that is equal for matrix updates of a program that compute the same."""
        numbers: dict[int, str] = {}

        def named(number: int) -> str:
            if number in program.constants and math.prod(np.shape(program.constants[number])) <= 1:
                return f"{program.avals[number]}={program.constants[number]}"
            if number in program.constants:
                return f"constant{id(program.constants[number])}"
            return numbers.setdefault(number, f"{len(numbers)}:{program.avals[number]}")

        lines = [" ".join(map(named, self.inputs))]
        for equation in self.equations:
            parameters = ", ".join(
                f"{key}={equation.params[key]}" for key in sorted(equation.params)
            )
            inputs, outputs = (
                " ".join(map(named, values)) for values in (equation.inputs, equation.outputs)
            )
            lines.append(f"{outputs} = {equation.name}[{parameters}] {inputs}")
        lines.append(" ".join(map(named, self.outputs)))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


#: Primitives of `jax.lax.linalg` that work on whole matrices.
_DECOMPOSITIONS = frozenset(
    getattr(linalg, name).name for name in dir(linalg) if name.endswith("_p")
)


def multiplies(jaxpr: Jaxpr) -> bool:
    """True if a jaxpr, or anything it calls, multiplies or decomposes matrices."""
    return any(
        eqn.primitive.name in _DECOMPOSITIONS
        or has_matmul(eqn)
        or any(multiplies(inner) for inner in subjaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def spans(
    program: Program,
    graph: Graph,
    values: Mapping[int, int],
    owners: Sequence[str | None],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[list[Span], list[str]]:
    """The matrix updates of an optimizer, and the parameters whose products cannot be told apart
    from those of others.

    Args:
        program: (gradients, state, parameters, ...) -> (updates, state).
        graph: the same as a graph.
        values: number of a value -> value of the graph.
        owners: the parameter that each input belongs to; None for others.
        shapes: shapes of the parameters.
    """
    reader = _Reader(program, graph, values, shapes)
    listed: list[Span] = []
    coupled: list[str] = []
    by_owner: dict[frozenset[str], list[int]] = defaultdict(list)
    of_equation = reader.owners(owners)
    for position in range(len(program.equations)):
        if reader.multiplies(position):
            by_owner[of_equation[position]].append(position)
    for owner, products in by_owner.items():
        span = reader.span(next(iter(owner)), products, of_equation) if len(owner) == 1 else None
        if span is None:
            coupled += sorted(owner)
        else:
            listed.append(span)
    return listed, list(dict.fromkeys(coupled))


class _Reader:
    """Reads the matrix updates of one program."""

    def __init__(
        self,
        program: Program,
        graph: Graph,
        values: Mapping[int, int],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.program, self.graph, self.values, self.shapes = program, graph, values, shapes
        self.makers = {
            number: position
            for position, equation in enumerate(program.equations)
            for number in equation.outputs
        }
        self.readers: dict[int, set[int]] = defaultdict(set)
        for position, equation in enumerate(program.equations):
            for number in equation.inputs:
                self.readers[number].add(position)
        by_path = {equation.path: i for i, equation in enumerate(program.equations)}
        self.ops: dict[int, list[Op]] = defaultdict(list)
        for op in graph.ops:
            if (position := _position(op.path, by_path)) is not None:
                self.ops[position].append(op)

    def shape(self, number: int) -> tuple[int, ...]:
        return tuple(getattr(self.program.avals[number], "shape", ()))

    def is_array(self, number: int) -> bool:
        return number not in self.program.constants and math.prod(self.shape(number)) > 1

    def bytes(self, numbers: Iterable[int]) -> int:
        return sum(self.graph.values[self.values[n]].bytes for n in numbers if self.is_array(n))

    def multiplies(self, position: int) -> bool:
        return any(_product(op) for op in self.ops[position])

    def owners(self, inputs: Sequence[str | None]) -> list[frozenset[str]]:
        """The parameters that each equation works for: by what it reads, arrays before scalars;
        equations that read nothing of a parameter, by what reads them.
        """
        no_owner = frozenset[str]()
        owners = {
            number: no_owner if path is None else frozenset({path})
            for number, path in zip(self.program.inputs, inputs, strict=True)
        }
        of_equation: list[frozenset[str]] = []
        for equation in self.program.equations:
            read = [(n, owners.get(n, no_owner)) for n in equation.inputs]
            arrays = no_owner.union(*(owner for n, owner in read if self.is_array(n)))
            of_equation.append(arrays or no_owner.union(*(owner for _, owner in read)))
            owners.update(dict.fromkeys(equation.outputs, of_equation[-1]))
        for position in reversed(range(len(of_equation))):
            if not of_equation[position]:
                readers = {
                    reader
                    for number in self.program.equations[position].outputs
                    for reader in self.readers[number]
                }
                reading = no_owner.union(*(of_equation[reader] for reader in readers))
                if len(reading) == 1:
                    of_equation[position] = reading
        return of_equation

    def span(
        self, path: str, products: Sequence[int], of_equation: Sequence[frozenset[str]]
    ) -> Span | None:
        """The matrix update of a parameter from its products; None where the equations between
        them depend on other parameters, or its stacks are unclear.
        """
        own = frozenset({path})
        chosen = set(products) | (self._after(products) & self._before(products))
        if any(of_equation[position] != own for position in chosen):
            return None
        chosen = self._with_narrowest_inputs(chosen, own, of_equation)
        chosen |= self._moves_after(chosen)
        return self._finished(path, chosen)

    def _after(self, positions: Iterable[int]) -> set[int]:
        reached: set[int] = set()
        pending = list(positions)
        while pending:
            for number in self.program.equations[pending.pop()].outputs:
                new = self.readers[number] - reached
                reached |= new
                pending += new
        return reached

    def _before(self, positions: Iterable[int]) -> set[int]:
        reached: set[int] = set()
        pending = list(positions)
        while pending:
            for number in self.program.equations[pending.pop()].inputs:
                maker = self.makers.get(number)
                if maker is not None and maker not in reached:
                    reached.add(maker)
                    pending.append(maker)
        return reached

    def _inputs(self, chosen: set[int]) -> list[int]:
        results = {n for p in chosen for n in self.program.equations[p].outputs}
        read = [n for p in sorted(chosen) for n in self.program.equations[p].inputs]
        return [n for n in dict.fromkeys(read) if n not in results | self.program.constants.keys()]

    def _outputs(self, chosen: set[int]) -> list[int]:
        results = set(self.program.outputs)
        return [
            n
            for p in sorted(chosen)
            for n in self.program.equations[p].outputs
            if n in results or self.readers[n] - chosen
        ]

    def _with_narrowest_inputs(
        self, chosen: set[int], own: frozenset[str], of_equation: Sequence[frozenset[str]]
    ) -> set[int]:
        """The equations with as many of those before them, read by them alone, as make the arrays
        that they read the smallest.
        """
        results, grown = set(self.program.outputs), set(chosen)
        best, least = chosen, self.bytes(self._inputs(chosen))
        for position in sorted(self._before(chosen) - chosen, reverse=True):
            outputs = self.program.equations[position].outputs
            if of_equation[position] not in (own, frozenset()) or any(
                n in results or self.readers[n] - grown for n in outputs
            ):
                continue
            grown.add(position)
            size = self.bytes(self._inputs(grown))
            if size <= least:
                best, least = set(grown), size
        return best

    def _moves_after(self, chosen: set[int]) -> set[int]:
        moves: set[int] = set()
        while True:
            new = {
                reader
                for n in self._outputs(chosen | moves)
                for reader in self.readers[n]
                if self.program.equations[reader].name in _MOVES
            } - moves
            if not new:
                return moves
            moves |= new

    def _finished(self, path: str, chosen: set[int]) -> Span | None:
        inputs, outputs = self._inputs(chosen), self._outputs(chosen)
        ops = [op for position in sorted(chosen) for op in self.ops[position]]
        stacks = self._stacks(self.shapes[path], ops, (*inputs, *outputs))
        if stacks is None:
            return None
        stack, dims = stacks
        arrays = [
            UpdateArray(
                dtype=str(self.program.avals[number].dtype),
                shape=tuple(n for d, n in enumerate(self.shape(number)) if d not in of),
                replicated=self.shape(number) != self.shapes[path],
            )
            for number, of in zip((*inputs, *outputs), dims, strict=True)
        ]
        return Span(
            path=path,
            equations=tuple(self.program.equations[position] for position in sorted(chosen)),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            stacks=dims,
            facts=MatrixUpdate(
                path=path,
                shape=self.shapes[path],
                stack=stack,
                reads=tuple(arrays[: len(inputs)]),
                writes=tuple(arrays[len(inputs) :]),
                contractions=tuple(self._contractions(ops)),
            ),
        )

    def _stacks(
        self, shape: tuple[int, ...], ops: Sequence[Op], numbers: Numbers
    ) -> tuple[Numbers, tuple[Numbers, ...]] | None:
        """The dims of a parameter that are stacks, and those of each input and output; None
        where one of these has some of them only, or in another order.
        """
        same = [n for n in numbers if self.shape(n) == shape]
        if not same:
            return None
        linked: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        contracted: set[tuple[int, int]] = set()
        for op in ops:
            by_factor: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for (result, position, dim), factors in op.rule.dims():
                value_dim = op.value(result, position), dim
                for factor in factors:
                    by_factor[factor].append(value_dim)
                    if factor in op.rule.summed | op.rule.whole:
                        contracted.add(value_dim)
            for value_dims in by_factor.values():
                for value_dim in value_dims:
                    linked[value_dim].update(value_dims)
        stack: list[int] = []
        touched: dict[int, dict[int, int]] = defaultdict(dict)  # value -> dim -> stack
        for dim, size in enumerate(shape):
            value_dims = _reached((self.values[same[0]], dim), linked) if size > 1 else set()
            if not value_dims or value_dims & contracted:
                continue
            if all(
                [d for value, d in value_dims if value == self.values[n]] == [dim] for n in same
            ):
                stack.append(dim)
                for value, d in value_dims:
                    touched[value][d] = dim
        dims: list[Numbers] = []
        for number in numbers:
            own = touched[self.values[number]]
            own_dims = tuple(sorted(own))
            if own_dims and [own[d] for d in own_dims] != stack:
                return None
            dims.append(own_dims)
        return tuple(stack), tuple(dims)

    def _contractions(self, ops: Iterable[Op]) -> Iterator[Contraction]:
        for op in ops:
            if op.flops and (op.category == "matmul" or _decomposes(op)):
                yield _contraction(self.graph, op)


def _position(path: str, by_path: Mapping[str, int]) -> int | None:
    """The position of the equation of an op, which may be inside of it."""
    while path:
        if path in by_path:
            return by_path[path]
        path = path.rpartition("/")[0]
    return None


def _decomposes(op: Op) -> bool:
    """True for decompositions, which work on whole matrices."""
    return op.category == "opaque" and bool(op.flops) and bool(op.rule.whole)


def _product(op: Op) -> bool:
    """True if an op multiplies or decomposes matrices, and not vectors alone."""
    if _decomposes(op):
        return True
    if op.category != "matmul":
        return False
    contraction = _sides(op)
    return min(contraction) >= _SMALLEST


def _sides(op: Op) -> tuple[int, int, int]:
    """Rows, columns and depth of a product."""
    left, right, out = (
        {f for dim in dims for f in dim} for dims in (*op.rule.operands, op.rule.results[0])
    )
    return (
        _size(op, (left & out) - right),
        _size(op, (right & out) - left),
        _size(op, (left & right) - out),
    )


def _size(op: Op, factors: Iterable[int]) -> int:
    return math.prod(op.rule.sizes[factor] for factor in factors)


def _contraction(graph: Graph, op: Op) -> Contraction:
    trips, dtype = graph.trips(op.region), graph.values[op.operands[0]].dtype
    if op.category != "matmul":
        return Contraction(flops=op.flops, dtype=dtype, trips=trips)
    return Contraction(flops=op.flops, dtype=dtype, trips=trips, sides=_sides(op))


def _reached(
    start: tuple[int, int], linked: Mapping[tuple[int, int], set[tuple[int, int]]]
) -> set[tuple[int, int]]:
    reached, pending = {start}, [start]
    while pending:
        new = linked.get(pending.pop(), set()) - reached
        reached |= new
        pending += new
    return reached


def same_as_unit(
    spans: Sequence[Span], units: Sequence[Span]
) -> tuple[list[tuple[Span, Span]], list[str]]:
    """Each matrix update with that of one matrix, and the parameters for which they differ.

    Args:
        units: the matrix updates of the optimizer of parameters whose stacks have one matrix.
    """
    by_path = {unit.path: unit for unit in units}
    paired = [(span, by_path.get(span.path)) for span in spans]
    return (
        [(span, unit) for span, unit in paired if unit is not None and _same(span, unit)],
        [span.path for span, unit in paired if unit is None or not _same(span, unit)],
    )


def _same(span: Span, unit: Span) -> bool:
    return [e.name for e in span.equations] == [e.name for e in unit.equations] and (
        len(span.inputs),
        len(span.outputs),
    ) == (len(unit.inputs), len(unit.outputs))
