"""Which ops of a program run otherwise where its fused dims are interleaved?

Read from the graph of the loss and a plan: the fused dims that the tensor axis shards
(`shardlib.propagation.pieces`), the ops that take them apart, and the ops that do not treat all
positions alike, whose operands are put in the model's order before and whose results are
interleaved after (`shardlib.lowering.reading.fused_dims`). A fused dim that something reads that
lowering has no hand on (a custom gradient, a custom call, a result of the loss) stays
in the model's order everywhere, and is a finding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shardlib.axes import LogicalAxes
from shardlib.graph import Graph, Op
from shardlib.graph.factors import Place
from shardlib.lowering.loss.equation_paths import EquationPaths
from shardlib.lowering.reading.fused_dims import Interleaving, Orders, Reshaped, Sizes, Taken
from shardlib.lowering.reading.parameter_roles import stacked_parameters
from shardlib.planning.plan import Plan
from shardlib.report import Finding
from shardlib.tracing.program import Program

#: Fused dims of one colour and with the same pieces; what is said of one is said of all.
Group = tuple[str, Sizes]


def interleaving(
    graph: Graph,
    pieces: Mapping[tuple[int, int], Sizes],
    names: tuple[LogicalAxes, ...],
    plan: Plan,
    program: Program,
    parameters: int,
) -> Interleaving:
    """What a loss does otherwise under a plan."""
    shards = plan.mesh["tensor"]
    cut = {
        (value, dim): (name, sizes)
        for (value, dim), sizes in pieces.items()
        if (name := names[value][dim]) is not None and "tensor" in plan.rules.axes_of(name)
    }
    groups = {
        group
        for group in cut.values()
        if shards > 1 and not any(size % shards for size in group[1])
    }
    if plan.mesh["stage"] > 1:
        return Interleaving(findings=tuple(map(_finding, sorted(groups))))
    left: set[Group] = set()
    paths, stacked = EquationPaths.of(program), stacked_parameters(program, parameters)
    while groups:
        reading = _Reading(
            graph=graph,
            dims={place: group for place, group in cut.items() if group in groups},
            where=paths,
            stacked=stacked,
            parameters=parameters,
        )
        result = reading.read()
        if not reading.refused:
            return replace(result, ways=shards, findings=tuple(map(_finding, sorted(left))))
        groups -= reading.refused
        left |= reading.refused
    return Interleaving(findings=tuple(map(_finding, sorted(left))))


def _finding(group: Group) -> Finding:
    name, sizes = group
    return Finding(
        code="fused-in-order",
        severity="warning",
        where=name,
        message=(
            f"a dim of {len(sizes)} pieces ({' + '.join(map(str, sizes))}) is sharded over tensor"
            " as a whole and not piece by piece: the plan has stages, or a custom gradient, a"
            " custom call, a loop or a result of the loss reads it. What takes it apart"
            " gathers activations, which the estimate does not count."
        ),
        hint="split it before that, or make its pieces parameters of their own",
    )


@dataclass(kw_only=True)
class _Reading:
    """One reading of a graph.

    Attributes:
        graph: of the loss.
        dims: fused dims that are interleaved, by (value, dim).
        where: paths of equations.
        stacked: path of a slice -> number of the stacked parameter.
        parameters: how many inputs are parameters.
        refused: groups that cannot be interleaved.
    """

    graph: Graph
    dims: Mapping[tuple[int, int], Group]
    where: EquationPaths
    stacked: Mapping[str, int]
    parameters: int
    refused: set[Group] = field(default_factory=set)

    def read(self) -> Interleaving:
        """What is done otherwise; `refused` gains what cannot be."""
        graph = self.graph
        leaves = graph.inputs[: self.parameters]
        taken = {
            value: number
            for number, value in enumerate(leaves)
            if graph.values[value].role == "parameter" and number not in self.stacked.values()
        }
        stored = {value for value in graph.inputs if value not in taken} | {
            value for value, described in enumerate(graph.values) if described.role == "constant"
        }
        slices: dict[str, Orders] = {}
        special: dict[str, Taken | Reshaped] = {}
        operands: dict[str, dict[int, dict[int, tuple[Sizes, bool]]]] = {}
        results: dict[tuple[str, int], Orders] = {}
        for op in graph.ops:
            if not any(self._orders(value) for value in (*op.operands, *op.results)):
                continue
            if op.kind == "enter" and op.path in self.stacked:
                slices[op.path] = self._orders(op.results[0])
                continue
            fresh = {
                position: dict(orders)
                for position, value in enumerate(op.operands)
                if value in stored and (orders := self._orders(value))
            }
            if op.category == "boundary":
                self._refuse(op, fresh)
                continue
            replacement, uneven = self._special(op), self._uneven(op)
            if self.where.is_closed(op.path) or (
                (replacement or uneven or fresh) and op.path not in self.where.run
            ):
                self._refuse(op, range(len(op.operands)), True)
                continue
            if replacement is not None:
                special[op.path] = replacement
                uneven = {place for place in uneven if not self._handled(op, replacement, place)}
            turned: dict[int, dict[int, tuple[Sizes, bool]]] = defaultdict(dict)
            for operand_position, orders in fresh.items():
                turned[operand_position] = {
                    dim: (sizes, True)
                    for dim, sizes in orders.items()
                    if (False, operand_position, dim) not in uneven
                }
            for result, position, dim in uneven:
                sizes = self._orders(op.value(result, position))[dim]
                if result:
                    results[op.path, position] = {
                        **results.get((op.path, position), {}),
                        dim: sizes,
                    }
                elif op.operands[position] not in stored:
                    turned[position][dim] = (sizes, False)
            if any(turned.values()):
                operands[op.path] = dict(turned)
        for value in graph.outputs:
            self.refused |= {self.dims[value, dim] for dim in self._orders(value)}
        return Interleaving(
            parameters={
                number: orders for value, number in taken.items() if (orders := self._orders(value))
            },
            slices=slices,
            special=special,
            operands=operands,
            results=results,
        )

    def _orders(self, value: int) -> Orders:
        return {
            dim: self.dims[value, dim][1]
            for dim in range(len(self.graph.values[value].shape))
            if (value, dim) in self.dims
        }

    def _refuse(self, op: Op, operands: Iterable[int], results: bool = False) -> None:
        for value in (
            *(op.operands[position] for position in operands),
            *(op.results if results else ()),
        ):
            self.refused |= {self.dims[value, dim] for dim in self._orders(value)}

    def _formed(self, op: Op) -> Mapping[Place, Sizes]:
        places = ((place, (op.value(place[0], place[1]), place[2])) for place, _ in op.rule.dims())
        return {place: self.dims[dim][1] for place, dim in places if dim in self.dims}

    def _special(self, op: Op) -> Taken | Reshaped | None:
        formed = self._formed(op)
        windows = op.rule.windows
        if (
            windows
            and windows[0].long in formed
            and op.kind in ("split", "slice", "concatenate", "pad")
        ):
            return Taken(dim=windows[0].long[2], sizes=formed[windows[0].long], windows=windows)
        if op.kind != "reshape" or not op.rule.outer:
            return None
        counting = [
            (place, formed[place])
            for place, dim in op.rule.dims()
            if place in formed and dim[0] in op.rule.outer
        ]
        if (
            len(counting) == 1
            and len(set(counting[0][1])) == 1
            and len(counting[0][1]) == op.rule.sizes[next(iter(op.rule.outer))]
        ):
            (result, _, dim), sizes = counting[0]
            return Reshaped(dim=dim, sizes=sizes, apart=not result)
        return None

    @staticmethod
    def _handled(op: Op, replacement: Taken | Reshaped, place: Place) -> bool:
        return (
            place == op.rule.windows[0].long
            if isinstance(replacement, Taken)
            else place == (not replacement.apart, 0, replacement.dim)
        )

    def _uneven(self, op: Op) -> set[Place]:
        """Interleaved dims that the op does not treat position by position with all others that
        share their index.
        """
        formed, rule = self._formed(op), op.rule
        dims = dict(rule.dims())
        scaled = {
            place: _scaled(sizes, math.prod(rule.sizes[factor] for factor in dims[place][1:]))
            for place, sizes in formed.items()
        }

        def even(place: Place) -> bool:
            factor, sizes = dims[place][0], scaled[place]
            shared = [(neighbour, dim) for neighbour, dim in dims.items() if factor in dim]
            return (
                bool(sizes)
                and factor not in rule.whole
                and all(
                    dim[0] == factor and scaled.get(neighbour) == sizes for neighbour, dim in shared
                )
                and _alike(op, [neighbour for neighbour, _ in shared], factor)
            )

        return {place for place in formed if not even(place)}


def _scaled(sizes: Sizes, inner: int) -> Sizes:
    """Pieces of the major factor of a dim; () where the minor ones are in shards, too."""
    return () if any(size % inner for size in sizes) else tuple(size // inner for size in sizes)


def _alike(op: Op, shared: Iterable[Place], factor: int) -> bool:
    """Whether an op treats all positions of a factor alike: what looks positions up, and what makes
    them from their number, does not.
    """
    read, written = (
        sum(not result for result, _, _ in shared),
        sum(result for result, _, _ in shared),
    )
    if op.category in ("gather", "scatter"):
        return written > 0 and read > (op.category == "scatter")
    if not written:
        return factor in op.rule.summed and op.category in ("matmul", "convolution", "reduction")
    return read > 0 or op.kind == "broadcast_in_dim"
