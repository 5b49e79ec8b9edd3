"""Conversion of a jaxpr to a `Graph`.

Every equation is described by its factor rule; loops and branches become regions with boundary
ops. All boundary ops of a loop belong to the region of its body; constants of a loop are read
directly, without an op. The "carry" at the exit of a while loop also reads the loop's condition,
and the "carry" that joins branches reads the branch index, so that both stay live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend import core as jex

from shardlib._jax_compat import open_jaxpr, scan_counts
from shardlib.findings import Finding
from shardlib.graph import FactorRule, Graph, Op, Region, Value, check, elementwise, opaque
from shardlib.jax_types import Aval
from shardlib.tracing.layouts import OwnLayout
from shardlib.tracing.primitives import TABLE
from shardlib.tracing.program import (
    CUSTOM,
    REMAT,
    Call,
    Equation,
    Program,
    dtype_name,
    flatten,
    literal,
    stacking,
)
from shardlib.tracing.rules import Call as Described
from shardlib.tracing.rules import Description

#: A custom call, and the graph values of its operands.
PlacedCall = tuple[Call, tuple[int, ...]]


#: A layout written in a program, and the graph value that has it.
PlacedLayout = tuple[OwnLayout, int]


@dataclass(frozen=True, kw_only=True)
class Translated:
    """A program as a graph.

    Attributes:
        calls: the custom calls by path, loops and branches included, with the values of their
            operands.
        values: number of a value of the program, outside of loops and branches -> value of the
            graph.
        layouts: layouts written in the program, with the values that have them.
    """

    graph: Graph
    calls: Mapping[str, PlacedCall]
    values: Mapping[int, int]
    layouts: tuple[PlacedLayout, ...] = ()


def graph_from_jaxpr(closed_jaxpr: jex.ClosedJaxpr, inputs: Sequence[tuple[str, str]]) -> Graph:
    """The graph of a closed jaxpr."""
    return graph_from_program(flatten(closed_jaxpr), inputs)


def graph_from_program(program: Program, inputs: Sequence[tuple[str, str]]) -> Graph:
    """The graph of a program."""
    return translated(program, inputs).graph


def translated(program: Program, inputs: Sequence[tuple[str, str]]) -> Translated:
    """The graph of a program, with its custom calls."""
    builder = _Builder()
    arguments = [
        builder.value(program.avals[number], path=path, role=role)
        for number, (path, role) in zip(program.inputs, inputs, strict=True)
    ]
    outputs = builder.run(program, arguments, 0, builder.numbers)
    graph = Graph(
        values=tuple(builder.values),
        ops=tuple(builder.ops),
        regions=tuple(builder.regions),
        inputs=tuple(arguments),
        outputs=tuple(outputs),
        findings=tuple(builder.findings.values()),
    )
    check(graph)
    return Translated(
        graph=graph,
        calls=builder.calls,
        values=builder.numbers,
        layouts=tuple(builder.layouts),
    )


class _Builder:
    """Collects the parts of one graph."""

    def __init__(self) -> None:
        self.calls: dict[str, PlacedCall] = {}
        self.numbers: dict[int, int] = {}
        self.layouts: list[PlacedLayout] = []
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.regions: list[Region] = [Region(parent=-1, kind="root")]
        self.findings: dict[tuple[str, str, str], Finding] = {}

    def value(self, aval: Aval, path: str = "", role: str = "internal") -> int:
        """Adds a value to the graph."""
        self.values.append(
            Value(
                shape=tuple(getattr(aval, "shape", ())),
                dtype=dtype_name(aval),
                path=path,
                role=role,
            )
        )
        return len(self.values) - 1

    def shapes(self, values: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(self.values[value].shape for value in values)

    def region(self, parent: int, kind: str, trips: int) -> int:
        """Adds a region."""
        self.regions.append(Region(parent=parent, kind=kind, trips=trips))
        return len(self.regions) - 1

    def note(self, code: str, severity: str, message: str, location: str, hint: str = "") -> None:
        """Adds a finding, unless the same finding exists for the same place."""
        finding = Finding(code=code, severity=severity, message=message, where=location, hint=hint)
        self.findings.setdefault((code, message, location), finding)

    def trips(self, equation: Equation, first: int) -> int:
        """The trip count of a while loop; 1 with a finding if it is unknown."""
        count = counted_trips(equation, first)
        if count is None:
            self.note(
                "unknown-trip-count",
                "warning",
                "a while loop runs an unknown number of times; its cost is counted once",
                equation.scope or f"equation {equation.path}",
                "use jax.lax.scan or jax.lax.fori_loop with constant bounds",
            )
        return 1 if count is None else count

    def cost(self, region: int, above: int) -> float:
        """FLOPs of a region and everything inside it, per run of the region `above`."""
        total = 0.0
        for op in self.ops:
            trips, ancestor = 1.0, op.region
            while ancestor not in (above, -1) and ancestor != region:
                trips *= self.regions[ancestor].trips
                ancestor = self.regions[ancestor].parent
            total += op.flops * trips if ancestor == region else 0.0
        return total

    def run(
        self,
        program: Program,
        arguments: Sequence[int],
        region: int,
        numbers: dict[int, int] | None = None,
    ) -> list[int]:
        """Adds the ops of a program; returns its results."""
        numbers = {} if numbers is None else numbers
        numbers.update(zip(program.inputs, arguments, strict=True))
        for number in program.constants:
            numbers[number] = self.value(
                program.avals[number], path=literal(program.constants[number]), role="constant"
            )
        for equation in program.equations:
            operands = tuple(numbers[number] for number in equation.inputs)
            call = equation.call
            if call is not None and call.path not in self.calls:
                self.calls[call.path] = call, tuple(map(numbers.__getitem__, call.inputs))
            outputs = self.equation(program, equation, operands, region)
            numbers.update(zip(equation.outputs, outputs, strict=True))
        self.layouts += [(layout, numbers[number]) for layout, number in program.layouts]
        return [numbers[number] for number in program.outputs]

    def equation(
        self, program: Program, equation: Equation, operands: tuple[int, ...], region: int
    ) -> Sequence[int]:
        if equation.name == "scan":
            return self.scan(equation, operands, region)
        if equation.name == "while":
            return self.loop(equation, operands, region)
        if equation.name == "cond":
            return self.branches(equation, operands, region)
        if equation.name in (*REMAT, *CUSTOM):
            return self.run(equation.inside(), operands, region)
        results = tuple(self.value(program.avals[number]) for number in equation.outputs)
        described = self.describe(
            equation,
            Described(
                name=equation.name,
                operands=self.shapes(operands),
                results=self.shapes(results),
                params=equation.params,
            ),
        )
        self.ops.append(
            Op(
                kind=equation.name,
                operands=operands,
                results=results,
                rule=described.rule,
                category=described.category,
                flops=described.flops,
                region=region,
                path=equation.path,
                scope=equation.scope,
            )
        )
        return results

    def describe(self, equation: Equation, call: Described) -> Description:
        primitive = TABLE.get(call.name)
        entry = None if primitive is None else primitive.factors
        if entry is None:
            self.note(
                "opaque-primitive",
                "warning",
                f"nothing is known about the dims of {call.name!r}; its operands are gathered"
                " whole",
                equation.scope or f"equation {equation.path}",
                "write the computation with other jax.lax operations",
            )
            return Description(opaque(call.operands, call.results), "opaque")
        return entry(call)

    def boundary(
        self,
        kind: str,
        path: str,
        operands: tuple[int, ...],
        result: int,
        rule: FactorRule,
        region: int,
        scope: str,
    ) -> int:
        self.ops.append(
            Op(
                kind=kind,
                operands=operands,
                results=(result,),
                rule=rule,
                category="boundary",
                region=region,
                path=path,
                scope=scope,
            )
        )
        return result

    def carry(
        self, path: str, operands: tuple[int, ...], aval: Aval, region: int, scope: str
    ) -> int:
        """Adds a boundary op: its operands of the result's shape are one value at different times,
        the others are only read.
        """
        result = self.value(aval)
        shape = self.values[result].shape
        rule = elementwise(
            [shape if self.values[value].shape == shape else () for value in operands], shape
        )
        dims = tuple(
            (
                ((),) * len(self.values[value].shape)
                if self.values[value].shape != shape
                else described
            )
            for value, described in zip(operands, rule.operands, strict=True)
        )
        return self.boundary(
            "carry",
            path,
            operands,
            result,
            FactorRule(sizes=rule.sizes, operands=dims, results=rule.results),
            region,
            scope,
        )

    def scan(self, equation: Equation, operands: tuple[int, ...], region: int) -> list[int]:
        constants, carried = scan_counts(equation.params)
        path, scope = equation.path, equation.scope
        program = equation.inside("body")
        body = self.region(region, "scan", int(equation.params["length"]))
        avals = [program.avals[number] for number in program.inputs]
        arguments = list(operands[:constants])
        for k, (init, aval) in enumerate(
            zip(operands[constants : constants + carried], avals[constants:], strict=False)
        ):
            arguments.append(self.carry(f"{path}/carry/{k}", (init,), aval, body, scope))
        for k, (stack, aval) in enumerate(
            zip(operands[constants + carried :], avals[constants + carried :], strict=True)
        ):
            item = self.value(aval)
            stacked_dims, part = stacking(self.values[stack].shape)
            rule = FactorRule(
                sizes=self.values[stack].shape,
                operands=(stacked_dims,),
                results=(part,),
                whole=frozenset({0}),
            )
            arguments.append(
                self.boundary("enter", f"{path}/enter/{k}", (stack,), item, rule, body, scope)
            )
        outputs = self.run(program, arguments, body)
        results = [
            self.carry(
                f"{path}/final/{k}",
                (arguments[constants + k], outputs[k]),
                equation.eqn.outvars[k].aval,
                body,
                scope,
            )
            for k in range(carried)
        ]
        for k, output in enumerate(outputs[carried:]):
            stack = self.value(equation.eqn.outvars[carried + k].aval)
            stacked_dims, part = stacking(self.values[stack].shape)
            rule = FactorRule(
                sizes=self.values[stack].shape,
                operands=(part,),
                results=(stacked_dims,),
                whole=frozenset({0}),
            )
            results.append(
                self.boundary("exit", f"{path}/exit/{k}", (output,), stack, rule, body, scope)
            )
        return results

    def loop(self, equation: Equation, operands: tuple[int, ...], region: int) -> list[int]:
        params, path, scope = equation.params, equation.path, equation.scope
        tests, constants = params["cond_nconsts"], params["body_nconsts"]
        initial = operands[tests + constants :]
        inner = self.region(region, "while", self.trips(equation, tests + constants))
        test = equation.inside("cond")
        program = equation.inside("body")
        avals = [program.avals[number] for number in program.inputs[constants:]]
        state = [
            self.carry(f"{path}/carry/{k}", (init,), aval, inner, scope)
            for k, (init, aval) in enumerate(zip(initial, avals, strict=True))
        ]
        (going,) = self.run(test, [*operands[:tests], *state], inner)
        outputs = self.run(program, [*operands[tests : tests + constants], *state], inner)
        return [
            self.carry(f"{path}/final/{k}", (before, after, going), aval, inner, scope)
            for k, (before, after, aval) in enumerate(zip(state, outputs, avals, strict=True))
        ]

    def branches(self, equation: Equation, operands: tuple[int, ...], region: int) -> list[int]:
        index, *arguments = operands
        path, scope = equation.path, equation.scope
        outputs: list[list[int]] = []
        regions: list[int] = []
        for branch in equation.programs:
            regions.append(self.region(region, "branch", 1))
            outputs.append(self.run(branch, arguments, regions[-1]))
        costs = [self.cost(inner, region) for inner in regions]
        for inner in regions:
            if inner != regions[costs.index(max(costs))]:
                self.regions[inner] = Region(parent=region, kind="branch", trips=0)
        return [
            self.carry(f"{path}/join/{k}", (*values, index), var.aval, region, scope)
            for k, (var, *values) in enumerate(zip(equation.eqn.outvars, *outputs, strict=True))
        ]


def counted_trips(equation: Equation, first: int) -> int | None:
    """Trip count of a while loop that counts an integer from one literal to another by ones; None
    for any other loop.
    """
    condition, _ = open_jaxpr(equation.params["cond_jaxpr"])
    body, _ = open_jaxpr(equation.params["body_jaxpr"])
    tests, constants = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    if (
        len(condition.eqns) != 1
        or condition.eqns[0].primitive.name != "lt"
        or condition.outvars[0] is not condition.eqns[0].outvars[0]
    ):
        return None
    starts = {var: equation.eqn.invars[first + k] for k, var in enumerate(condition.invars[tests:])}
    starts.update({var: equation.eqn.invars[k] for k, var in enumerate(condition.invars[:tests])})
    ends = [
        getattr(starts.get(atom, atom), "val", None) if not hasattr(atom, "val") else atom.val
        for atom in condition.eqns[0].invars
    ]
    counter = next(
        (k for k, var in enumerate(condition.invars[tests:]) if var is condition.eqns[0].invars[0]),
        None,
    )
    limit = next(
        (k for k, var in enumerate(condition.invars[tests:]) if var is condition.eqns[0].invars[1]),
        None,
    )
    begin, end = ends
    if counter is None or begin is None or end is None:
        return None
    steps = [
        e for e in body.eqns if e.outvars[0] is body.outvars[counter] and e.primitive.name == "add"
    ]
    by_ones = any(
        e.invars[0] is body.invars[constants + counter] and getattr(e.invars[1], "val", None) == 1
        for e in steps
    )
    fixed = limit is None or body.outvars[limit] is body.invars[constants + limit]
    return max(0, int(end) - int(begin)) if by_ones and fixed else None
