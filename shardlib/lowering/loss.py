"""The user's loss with the plan's layouts in it: sharding constraints, replaced custom calls,
remat, interleaved dims.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from shardlib.annotation.names import PureLoss
from shardlib.annotation.trees import Tree
from shardlib.errors import PlanError
from shardlib.findings import Finding
from shardlib.graph import Graph, Op, OpDim
from shardlib.layout import Layout, LogicalAxes
from shardlib.lowering.contractions import (
    FusedDims,
    Interleaving,
    PieceOp,
    PieceReshape,
    PieceSizes,
)
from shardlib.lowering.loss_layouts import LossLayouts, ValueLayouts
from shardlib.lowering.uses import LossFacts, LossJaxpr, stacked_parameters
from shardlib.planner.plan import Plan
from shardlib.planner.workload import names_of_groups
from shardlib.propagation.contractions import layouts_from_inputs
from shardlib.tracing.program import (
    CUSTOM,
    REMAT,
    Equation,
    Program,
    find_repeats,
    has_matmul,
    with_frozen,
)
from shardlib.tracing.rewriting import Walk, as_array, evaluate_program
from shardlib.tracing.trace import graph_from_program

# --------------------------------------------------------------------------------------------------
# Paths of the equations of a loss, by how they are lowered.


_CUSTOM_GRADIENTS = ("custom_vjp_call", "custom_vjp_call_jaxpr")


@dataclass(frozen=True, kw_only=True)
class EquationPaths:
    """Paths of equations.

    Attributes:
        evaluated: equations that are evaluated one by one.
        opaque: custom gradients and custom calls, which are evaluated as a whole; also the
            equations inside of them.
    """

    evaluated: frozenset[str]
    opaque: frozenset[str]

    @staticmethod
    def of(program: Program) -> EquationPaths:
        """Collects the paths of a program and of the bodies that the interpreter enters."""
        evaluated, opaque = set[str](), set[str]()
        for equation in _equations(program):
            if equation.call is not None or equation.name in _CUSTOM_GRADIENTS:
                opaque.add(equation.path)
            elif equation.name not in CUSTOM:
                evaluated.add(equation.path)
        return EquationPaths(evaluated=frozenset(evaluated), opaque=frozenset(opaque))

    def is_opaque(self, path: str) -> bool:
        """True if an op is, or is inside of, an opaque equation."""
        parts = path.split("/")
        return any("/".join(parts[:end]) in self.opaque for end in range(1, len(parts) + 1))


def _equations(program: Program) -> Iterator[Equation]:
    """The equations of a program and of its loops, branches and rematerialised layers."""
    for equation in program.equations:
        yield equation
        if equation.name in (*REMAT, "scan", "while", "cond"):
            for inner in equation.programs:
                yield from _equations(inner)


def propagated_layouts(
    plan: Plan,
    traced: LossJaxpr,
    plan_indices: Sequence[int],
    num_state: int,
    whole_value_layouts: Sequence[Layout] = (),
) -> ValueLayouts:
    """Layouts propagated from the parameters and the batch, for a loss whose equations are not
    those of the plan.
    """
    program = traced.program
    ranks = [len(program.avals[number].shape) for number in program.inputs]
    input_layouts = [plan.parameters[i].compute for i in plan_indices]
    input_layouts += [
        Layout.replicated(rank)
        for rank in ranks[len(input_layouts) : len(input_layouts) + num_state]
    ]
    input_layouts += [*(layout for _, layout in plan.batch_layouts), *whole_value_layouts]
    inputs = [
        layout if len(layout) == rank else Layout.replicated(rank)
        for layout, rank in zip(input_layouts, ranks, strict=True)
    ]
    return layouts_from_inputs(
        graph_from_program(program, [("", "internal")] * len(ranks)), inputs, plan.mesh
    )


# --------------------------------------------------------------------------------------------------
# Operations that change where fused dims are interleaved.
#
# From the graph of the loss and a plan: the fused dims that the tensor axis shards
# (`shardlib.propagation.colours`), the ops that split them, and the ops that do not treat all
# positions alike, whose operands are put in the model's order before and whose results are
# interleaved after (`shardlib.lowering.contractions`). A fused dim that is read by something that
# lowering cannot change (a custom gradient, a custom call, a result of the loss) stays in the
# model's order everywhere, and is a finding.

#: Fused dims of one colour and with the same pieces; they are interleaved together.
FusedGroup = tuple[str, PieceSizes]


def interleaving(
    graph: Graph,
    pieces: Mapping[tuple[int, int], PieceSizes],
    names: tuple[LogicalAxes, ...],
    plan: Plan,
    program: Program,
    num_parameters: int,
) -> Interleaving:
    """The changes to a loss where a plan interleaves fused dims."""
    shards = plan.mesh["tensor"]
    fused = {
        (value, dim): (name, sizes)
        for (value, dim), sizes in pieces.items()
        if (name := names[value][dim]) is not None and "tensor" in plan.rules.axes_of(name)
    }
    groups = {
        group
        for group in fused.values()
        if shards > 1 and not any(size % shards for size in group[1])
    }
    if plan.mesh["stage"] > 1:
        return Interleaving(findings=tuple(map(_finding, sorted(groups))))
    refused: set[FusedGroup] = set()
    paths, stacked = EquationPaths.of(program), stacked_parameters(program, num_parameters)
    while groups:
        interleaving_pass = _InterleavingPass(
            graph=graph,
            dims={place: group for place, group in fused.items() if group in groups},
            paths=paths,
            stacked=stacked,
            num_parameters=num_parameters,
        )
        result = interleaving_pass.run()
        if not interleaving_pass.refused:
            return replace(result, shards=shards, findings=tuple(map(_finding, sorted(refused))))
        groups -= interleaving_pass.refused
        refused |= interleaving_pass.refused
    return Interleaving(findings=tuple(map(_finding, sorted(refused))))


def _finding(group: FusedGroup) -> Finding:
    name, sizes = group
    return Finding(
        code="fused-in-order",
        severity="warning",
        where=name,
        message=(
            f"a dim of {len(sizes)} pieces ({' + '.join(map(str, sizes))}) is sharded over tensor"
            " as a whole and not piece by piece: the plan has stages, or a custom gradient, a"
            " custom call, a loop or a result of the loss reads it. Operations that"
            " split it gather activations, which the estimate does not count."
        ),
        hint="split it before that, or make its pieces separate parameters",
    )


@dataclass(kw_only=True)
class _InterleavingPass:
    """One pass over a graph.

    Attributes:
        dims: fused dims that are interleaved, by (value, dim).
        paths: paths of equations.
        stacked: path of a slice -> number of the stacked parameter.
        num_parameters: number of inputs that are parameters.
        refused: groups that cannot be interleaved.
    """

    graph: Graph
    dims: Mapping[tuple[int, int], FusedGroup]
    paths: EquationPaths
    stacked: Mapping[str, int]
    num_parameters: int
    refused: set[FusedGroup] = field(default_factory=set)

    def run(self) -> Interleaving:
        """The changes for the interleaved dims; adds groups that cannot be interleaved to
        `refused`.
        """
        graph = self.graph
        leaves = graph.inputs[: self.num_parameters]
        parameter_values = {
            value: number
            for number, value in enumerate(leaves)
            if graph.values[value].role == "parameter" and number not in self.stacked.values()
        }
        in_model_order = {value for value in graph.inputs if value not in parameter_values} | {
            value for value, described in enumerate(graph.values) if described.role == "constant"
        }
        slices: dict[str, FusedDims] = {}
        piece_ops: dict[str, PieceOp | PieceReshape] = {}
        operands: dict[str, dict[int, dict[int, tuple[PieceSizes, bool]]]] = {}
        results: dict[tuple[str, int], FusedDims] = {}
        for op in graph.ops:
            if not any(self._fused_dims(value) for value in (*op.operands, *op.results)):
                continue
            if op.kind == "enter" and op.path in self.stacked:
                slices[op.path] = self._fused_dims(op.results[0])
                continue
            to_reorder = {
                position: dict(orders)
                for position, value in enumerate(op.operands)
                if value in in_model_order and (orders := self._fused_dims(value))
            }
            if op.category == "boundary":
                self._refuse(op, to_reorder)
                continue
            replacement, uneven = self._piece_op(op), self._uneven(op)
            if self.paths.is_opaque(op.path) or (
                (replacement or uneven or to_reorder) and op.path not in self.paths.evaluated
            ):
                self._refuse(op, range(len(op.operands)), True)
                continue
            if replacement is not None:
                piece_ops[op.path] = replacement
                uneven = {place for place in uneven if not self._handled(op, replacement, place)}
            reordered: dict[int, dict[int, tuple[PieceSizes, bool]]] = defaultdict(dict)
            for operand_position, orders in to_reorder.items():
                reordered[operand_position] = {
                    dim: (sizes, True)
                    for dim, sizes in orders.items()
                    if (False, operand_position, dim) not in uneven
                }
            for result, position, dim in uneven:
                sizes = self._fused_dims(op.value(result, position))[dim]
                if result:
                    results[op.path, position] = {
                        **results.get((op.path, position), {}),
                        dim: sizes,
                    }
                elif op.operands[position] not in in_model_order:
                    reordered[position][dim] = (sizes, False)
            if any(reordered.values()):
                operands[op.path] = dict(reordered)
        for value in graph.outputs:
            self.refused |= {self.dims[value, dim] for dim in self._fused_dims(value)}
        return Interleaving(
            parameters={
                number: orders
                for value, number in parameter_values.items()
                if (orders := self._fused_dims(value))
            },
            slices=slices,
            piece_ops=piece_ops,
            operands=operands,
            results=results,
        )

    def _fused_dims(self, value: int) -> FusedDims:
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
            self.refused |= {self.dims[value, dim] for dim in self._fused_dims(value)}

    def _pieces_by_place(self, op: Op) -> Mapping[OpDim, PieceSizes]:
        places = ((place, (op.value(place[0], place[1]), place[2])) for place, _ in op.rule.dims())
        return {place: self.dims[dim][1] for place, dim in places if dim in self.dims}

    def _piece_op(self, op: Op) -> PieceOp | PieceReshape | None:
        by_place = self._pieces_by_place(op)
        windows = op.rule.windows
        if (
            windows
            and windows[0].long in by_place
            and op.kind in ("split", "slice", "concatenate", "pad")
        ):
            return PieceOp(dim=windows[0].long[2], sizes=by_place[windows[0].long], windows=windows)
        if op.kind != "reshape" or not op.rule.outer:
            return None
        candidates = [
            (place, by_place[place])
            for place, dim in op.rule.dims()
            if place in by_place and dim[0] in op.rule.outer
        ]
        if (
            len(candidates) == 1
            and len(set(candidates[0][1])) == 1
            and len(candidates[0][1]) == op.rule.sizes[next(iter(op.rule.outer))]
        ):
            (result, _, dim), sizes = candidates[0]
            return PieceReshape(dim=dim, sizes=sizes, splits=not result)
        return None

    @staticmethod
    def _handled(op: Op, replacement: PieceOp | PieceReshape, place: OpDim) -> bool:
        return (
            place == op.rule.windows[0].long
            if isinstance(replacement, PieceOp)
            else place == (not replacement.splits, 0, replacement.dim)
        )

    def _uneven(self, op: Op) -> set[OpDim]:
        """Interleaved dims of the op that do not match all dims of the same factor position by
        position.
        """
        by_place, rule = self._pieces_by_place(op), op.rule
        dims = dict(rule.dims())
        scaled = {
            place: _scaled(sizes, math.prod(rule.sizes[factor] for factor in dims[place][1:]))
            for place, sizes in by_place.items()
        }

        def even(place: OpDim) -> bool:
            factor, sizes = dims[place][0], scaled[place]
            shared = [(neighbour, dim) for neighbour, dim in dims.items() if factor in dim]
            return (
                bool(sizes)
                and factor not in rule.whole
                and all(
                    dim[0] == factor and scaled.get(neighbour) == sizes for neighbour, dim in shared
                )
                and _treats_alike(op, [neighbour for neighbour, _ in shared], factor)
            )

        return {place for place in by_place if not even(place)}


def _scaled(sizes: PieceSizes, inner: int) -> PieceSizes:
    """Pieces of the major factor of a dim; () if the minor ones are sharded, too."""
    return () if any(size % inner for size in sizes) else tuple(size // inner for size in sizes)


def _treats_alike(op: Op, shared: Iterable[OpDim], factor: int) -> bool:
    """True if an op treats all positions of a factor alike, unlike lookups and iotas."""
    read = sum(not result for result, _, _ in shared)
    written = sum(result for result, _, _ in shared)
    if op.category in ("gather", "scatter"):
        return written > 0 and read > (op.category == "scatter")
    if not written:
        return factor in op.rule.summed and op.category in ("matmul", "convolution", "reduction")
    return read > 0 or op.kind == "broadcast_in_dim"


# --------------------------------------------------------------------------------------------------
# Layers that are rematerialised, if a plan distinguishes layer groups.
#
# A plan names layer groups by prefixes of the paths of their parameters, as planning does. Here the
# loops of the traced loss, and unrolled layers, are matched to the same names.


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Layers of one group in a traced loss.

    Attributes:
        path: of their loop, or of the first equation of unrolled layers.
        count: number of layers.
        parameters: the parameters that they use.
    """

    path: str
    count: int
    parameters: frozenset[int]


def layer_policies(
    plan: Plan, program: Program, loss: LossFacts, paths: Sequence[str]
) -> Mapping[str, tuple[str, int]]:
    """Path of layers -> (policy, number of layers that follow it); empty if all follow
    `plan.remat`. With stages, the numbers are of the fullest stage.
    """
    if not plan.remat_layers and not plan.remat_classes:
        return {}
    groups = layer_runs(program, loss)
    if not plan.remat_classes:
        counts = [fullest_stage(plan, group.count) for group in groups]
        fraction = plan.remat_layers / sum(counts)
        return {
            group.path: (plan.remat, math.ceil(fraction * count - 1e-9))
            for group, count in zip(groups, counts, strict=True)
        }
    names = names_of_groups([[paths[i] for i in sorted(group.parameters)] for group in groups])
    classes = {name: (policy, count) for name, policy, count in plan.remat_classes}
    if classes.keys() ^ set(names):
        raise PlanError(
            f"the plan rematerialises by layer group ({', '.join(classes)}), and the loss of"
            f" {plan.model} has the groups {', '.join(names) or 'none'}\nTry: another plan for"
            " this model, or one policy for all layers: remat"
        )
    return {group.path: classes[name] for group, name in zip(groups, names, strict=True)}


def fullest_stage(plan: Plan, count: int) -> int:
    """Number of layers of the fullest stage, of `count` in all; all of them without stages."""
    virtual = plan.virtual_stages if plan.mesh["stage"] > 1 else 1
    return virtual * math.ceil(count / (plan.mesh["stage"] * virtual))


def layer_runs(program: Program, loss: LossFacts) -> list[LayerRun]:
    """The layers of a loss in order, by loop and by run of repeated equations."""
    groups: list[LayerRun] = []
    reads: dict[str, set[int]] = {}
    for entry in loss.equations:
        if entry.program is loss.program:
            reads.setdefault(entry.equation.path, set()).update(
                view.parameter for view in entry.views if view is not None
            )
    runs = {program.equations[run.start].path: run for run in find_repeats(program)}
    unrolled = {
        equation.path
        for run in runs.values()
        for equation in program.equations[run.start : run.stop]
    }
    for equation in program.equations:
        if equation.path in runs:
            run = runs[equation.path]
            used = frozenset(
                i
                for inner in program.equations[run.start : run.stop]
                for i in reads.get(inner.path, ())
            )
            groups.append(LayerRun(path=equation.path, count=run.count, parameters=used))
        elif equation.name == "scan" and equation.path not in unrolled and has_matmul(equation.eqn):
            groups.append(
                LayerRun(
                    path=equation.path,
                    count=equation.params["length"],
                    parameters=frozenset(reads.get(equation.path, ())),
                )
            )
    return [group for group in groups if group.parameters]


# --------------------------------------------------------------------------------------------------
# The traced loss, evaluated with the plan's layouts.
#
# The loss is traced once for the shapes of one microbatch, under the plan's mesh, so that the
# user's own annotations keep their meaning; then it is evaluated again with a constraint on every
# value that the plan places. The gradient of a parameter is resharded for the optimizer where it is
# computed: that of a stacked parameter inside the scan, layer by layer.
#
# Parameters that are stored sharded (ZeRO 3) are gathered by the operations that use them, and
# again in the backward pass, see `lowering/weights.py`.


def loss_in_layouts(
    traced: LossJaxpr, layouts: LossLayouts, change: Callable[[Walk], Walk] = lambda walk: walk
) -> PureLoss:
    """The traced loss with the plan's layouts and rematerialisation, as a function of stored
    parameters.

    Args:
        change: walk -> walk, applied last.

    Returns:
        (params, state, batch) -> (loss, (metrics, state)).
    """
    plan = layouts.plan
    program = with_frozen(
        traced.program,
        [k for k, i in enumerate(layouts.plan_indices) if not layouts.plan.parameters[i].trained],
    )
    policies = layer_policies(
        plan, program, layouts.facts, [plan.parameters[i].path for i in layouts.plan_indices]
    )
    walk = change(
        replace(
            layouts.walk(),
            remat=plan.remat,
            layer_policies=policies,
            offloaded="activations" in plan.offload,
        )
    )

    def loss(params: Tree, state: Tree, batch: Tree) -> Any:
        arguments = [*layouts.parameters(jax.tree.leaves(params)), *jax.tree.leaves((state, batch))]
        results = zip(program.outputs, evaluate_program(program, arguments, walk), strict=True)
        return jax.tree.unflatten(
            traced.out_tree, [as_array(program, number, leaf) for number, leaf in results]
        )

    return loss
