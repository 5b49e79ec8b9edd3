"""How does a jaxpr become a `Graph`?

Every equation is looked up in the table of factor rules; loops and branches become regions with
boundary ops. All boundary ops of a loop belong to the region of its body; constants of a loop are
read directly, with no op. The "carry" that leaves a while loop also reads the loop's condition, and
the "carry" that joins branches the branch index, so that both stay alive.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core as jex

from shardlib._jax_compat import scan_counts
from shardlib.graph import FactorRule, Graph, Op, Region
from shardlib.graph.check import check
from shardlib.graph.factors import elementwise
from shardlib.jax_types import Aval
from shardlib.tracing.graph_parts import GraphParts, Translated
from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program, callee, flatten
from shardlib.tracing.rules.description import Call, Describe, Description, unknown
from shardlib.tracing.rules.table import TABLE
from shardlib.tracing.trip_counts import literal, stacking


def graph_from_jaxpr(closed_jaxpr: jex.ClosedJaxpr, inputs: Sequence[tuple[str, str]]) -> Graph:
    """The graph of a closed jaxpr.

    Args:
        closed_jaxpr: from `jax.make_jaxpr`.
        inputs: (tree path, role) of each input, in order.

    Returns:
        A checked graph; unknown primitives are opaque ops and findings.
    """
    return graph_from_program(flatten(closed_jaxpr), inputs)


def graph_from_program(program: Program, inputs: Sequence[tuple[str, str]]) -> Graph:
    """The graph of a program; see `graph_from_jaxpr`.

    Args:
        program: what to translate.
        inputs: (path, role) of each of its inputs.

    Returns:
        The graph, checked; what could not be translated is among its findings.
    """
    return translated(program, inputs).graph


def translated(program: Program, inputs: Sequence[tuple[str, str]]) -> Translated:
    """The graph of a program, with its custom calls; see `graph_from_program`.

    Args:
        program: what to translate.
        inputs: (path, role) of each of its inputs.
    """
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


class _Builder(GraphParts):
    """Collects the parts of one graph."""

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
            return self.run(
                flatten(callee(equation.eqn), f"{equation.path}/", equation.scope), operands, region
            )
        results = tuple(self.value(program.avals[number]) for number in equation.outputs)
        described = self.describe(
            equation,
            Call(
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

    def describe(self, equation: Equation, call: Call) -> Description:
        entry: Describe | None = TABLE.get(call.name)
        if entry is None:
            self.note(
                "opaque-primitive",
                "warning",
                f"nothing is known about the dims of {call.name!r}; its operands are gathered"
                " whole",
                equation.scope or f"equation {equation.path}",
                "write the computation with other jax.lax operations",
            )
            return unknown(call)
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
        """A boundary op whose operands of the result's shape are one value at different times;
        others are only read.
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
        program = flatten(equation.params["jaxpr"], f"{path}/body/", scope)
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
        test = flatten(params["cond_jaxpr"], f"{path}/cond/", scope)
        program = flatten(params["body_jaxpr"], f"{path}/body/", scope)
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
        for k, branch in enumerate(equation.params["branches"]):
            regions.append(self.region(region, "branch", 1))
            outputs.append(
                self.run(flatten(branch, f"{path}/branch{k}/", scope), arguments, regions[-1])
            )
        costs = [self.cost(inner, region) for inner in regions]
        for inner in regions:
            if inner != regions[costs.index(max(costs))]:
                self.regions[inner] = Region(parent=region, kind="branch", trips=0)
        return [
            self.carry(f"{path}/join/{k}", (*values, index), var.aval, region, scope)
            for k, (var, *values) in enumerate(zip(equation.eqn.outvars, *outputs, strict=True))
        ]
