"""Layouts of a plan's main activations, parameters and batch, and the inputs of the rules of thumb.

Activations are read off the step graph that was priced: the residual stream of every layer group,
operands and results of weight matmuls, and of attention kernels. Gradients of activations are
listed where a collective moves them.

    x [batch, seq_tensor, embed] --all-gather--> [batch, seq, embed]
    x W = h [batch, seq, mlp_tensor]
    h V = partial sums [batch, seq, embed] --reduce-scatter--> [batch, seq_tensor, embed]
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from shardlib.cost.attention import FORWARD, KERNELS
from shardlib.cost.experts import routed_values
from shardlib.cost.facts import Facts
from shardlib.cost.items import fused_parameters, reductions_of
from shardlib.cost.terms import TransferOps
from shardlib.errors import ArgumentError, LayoutError, raise_all
from shardlib.graph import Op, Problem
from shardlib.layout import (
    BATCH_AXES,
    COMPUTE_AXES,
    STORED_AXES,
    TOKEN_AXES,
    Layout,
    LogicalAxes,
    MeshShape,
    Rules,
)
from shardlib.machines.topology import Topology
from shardlib.planner.parts import ActivationLayout, Move, joined_names
from shardlib.planner.plan import ParameterLayout, Plan
from shardlib.propagation.colours import TOKENS, Choice, Spec, axes_of

# --------------------------------------------------------------------------------------------------
# A step graph under a choice on a mesh: the layouts of its values between operations and in use.

#: An activation, and the index of an op that produces or reads it.
OpActivation = tuple[int, ActivationLayout]


@dataclass(frozen=True, kw_only=True)
class StepLayouts:
    """A step graph under a choice on a mesh."""

    facts: Facts
    choice: Choice
    mesh: MeshShape
    context: str

    def layout(self, spec: Spec, shape: Sequence[int]) -> Layout:
        """The layout of a `Spec` (kinds of axes per dim), without axes that do not divide their
        dims.
        """
        dims = (tuple(axis for kind in axes_of(part) for axis in self.axes(kind)) for part in spec)
        return Layout(
            *(
                axes if size % self.mesh.ways(axes) == 0 else ()
                for axes, size in zip(dims, shape, strict=True)
            )
        )

    def axes(self, kind: str) -> tuple[str, ...]:
        """The mesh axes of a kind that the mesh has."""
        names = BATCH_AXES if kind == "batch" else (kind,)
        return tuple(axis for axis in names if axis in self.mesh)

    def between_ops(self, value: int) -> Layout:
        """The layout of a value between operations."""
        return self.layout(self.facts.value_spec(value, self.choice), self.shape(value))

    def shape(self, value: int) -> tuple[int, ...]:
        """Elements per dim."""
        return self.facts.graph.values[value].shape

    def in_op(self, index: int, value: int) -> Layout:
        """The layout of an operand or a result while its op runs."""
        op, spec = self.facts.graph.ops[index], self.facts.op_spec(index, self.choice)
        dims = dict(
            zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)
        )[value]
        majors = [op.rule.major(dim) for dim in dims]
        plain = self.layout(
            tuple(None if major is None else spec[major] for major in majors), self.shape(value)
        )
        exchanged = op.kind in KERNELS and self.context == "ulysses"
        if not exchanged or "context" not in self.between_ops(value).axes:
            return plain
        return self._over_heads(plain, index, majors, self.shape(value))

    def _over_heads(
        self, layout: Layout, index: int, factors: Sequence[int | None], shape: Sequence[int]
    ) -> Layout:
        """The layout of a kernel's operand after the context axis has moved from the sequence to
        the heads; all-gathered along the sequence where there are too few heads.
        """
        dims = [tuple(axis for axis in axes if axis != "context") for axes in layout]
        heads = self.facts.heads[index].factors if index in self.facts.heads else frozenset[int]()
        for dim, factor in enumerate(factors):
            extended = (*dims[dim], "context")
            if factor in heads and shape[dim] % self.mesh.ways(extended) == 0:
                dims[dim] = extended
                break
        return Layout(*dims)

    def weight(self, op: Op) -> str:
        """The parameter that a matmul or a lookup reads; "" where it reads none."""
        for value in op.operands[:2]:
            if value in self.facts.weights and op.category in ("matmul", "convolution", "gather"):
                paths = self.facts.sources[self.facts.weights[value]].paths
                parts = paths[0].split(".")
                many = len(paths) > 1
                return ".".join("*" if many and part.isdigit() else part for part in parts)
        return ""

    @cached_property
    def reductions(self) -> dict[int, list[TransferOps]]:
        """Reductions of activations over tensor and context, by the first op that produces a
        summand.
        """
        reductions: dict[int, list[TransferOps]] = defaultdict(list)
        for transfer, ops in reductions_of(self.facts, self.choice):
            if transfer.purpose in ("tensor", "context"):
                reductions[min(ops)].append((transfer, ops))
        return reductions

    @cached_property
    def reduced_with_earlier(self) -> frozenset[int]:
        """Ops whose results are reduced together with those of an earlier op."""
        needed = (need for group in self.reductions.values() for need in group)
        return frozenset(index for _, ops in needed for index in ops if index != min(ops))

    def activation(self, name: str, value: int, moves: Iterable[Move], index: int) -> OpActivation:
        """The activation of a value, with the index of an op that produces or reads it."""
        tensor = self.facts.graph.values[value]
        region = self.facts.graph.ops[index].region
        return index, ActivationLayout(
            name=name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            colours=tuple("tokens" if c == TOKENS else c for c in self.facts.colours[value]),
            held=self.between_ops(value),
            count=self.facts.trips[region],
            moves=merged(moves),
        )


def backward(op: Op) -> bool:
    return "transpose(" in op.scope and "rematted_computation" not in op.scope


def merged(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Moves with those that differ only in `of` combined."""
    operands: dict[Move, dict[str, None]] = defaultdict(dict)
    for move in moves:
        operands[replace(move, of=())].update(dict.fromkeys(move.of))
    return tuple(replace(move, of=tuple(names)) for move, names in operands.items())


def resharding_before(layout: Layout, read: Layout, of: str) -> Iterator[Move]:
    """The collectives that reshard an operand from its layout to that in which an op reads it."""
    for dim, axes in enumerate(layout):
        for axis in ("tensor", "context"):
            if axis in axes and axis not in read[dim]:
                kind = "all-to-all" if axis in read.axes else "all-gather"
                yield Move(kind=kind, axes=(axis,), of=(of,), layout=read)


# --------------------------------------------------------------------------------------------------
# Operands and results of attention kernels.

#: `Move.of` for attention kernels.
ATTENTION = "attention"


def kernel_activations(step: StepLayouts, index: int, op: Op) -> Iterator[OpActivation]:
    """Lists the operands and results of an attention kernel."""
    for number, value in enumerate(op.operands if op.kind == FORWARD else ()):
        role = _role(number, len(op.operands))
        layout, read = step.between_ops(value), step.in_op(index, value)
        moves = list(resharding_before(layout, read, ATTENTION))
        if step.context == "ring" and "queries" not in role and "context" in layout.axes:
            hop = Move(kind="collective-permute", axes=("context",), of=(ATTENTION,), layout=layout)
            moves = [hop, *(move for move in moves if move.axes != ("context",))]
        yield step.activation(f"{role} of attention", value, moves, index)
    if op.kind == FORWARD:
        value = op.results[0]
        yield step.activation(
            "result of attention", value, _resharding_after(step, index, value), index
        )
        return
    for value, dims in zip(op.results, op.rule.results, strict=True):
        role = _gradient_role(step, index, {factor for dim in dims for factor in dim})
        moves = _resharding_after(step, index, value)
        if (
            role == "keys or values"
            and step.context == "all-gather"
            and "context" in step.between_ops(value).axes
        ):
            partial = step.in_op(index, value)
            axes, of = ("context",), (ATTENTION,)
            moves.append(Move(kind="reduce-scatter", axes=axes, of=of, layout=partial, before=True))
        if moves:
            yield step.activation(f"gradient of the {role} of attention", value, moves, index)


def _role(number: int, operands: int) -> str:
    """The role of an operand of an attention kernel: queries, keys, separate rotary parts of both,
    or values.
    """
    if number == operands - 1:
        return "values"
    name = ("queries", "keys")[number % 2]
    return name if number < 2 else f"rotated part of the {name}"


def _gradient_role(step: StepLayouts, index: int, factors: set[int]) -> str:
    """The operand whose gradient a result of a backward kernel is; keys have no dim of heads within
    one group.
    """
    heads = step.facts.heads.get(index)
    if heads is None or heads.queries_per_group == 1:
        return "operands"
    return "queries" if heads.query_factors & factors else "keys or values"


def _resharding_after(step: StepLayouts, index: int, value: int) -> list[Move]:
    """The collectives that reshard a result of a kernel to its layout between operations."""
    stored, computed = step.between_ops(value), step.in_op(index, value)
    return [
        replace(move, layout=computed, before=True)
        for move in resharding_before(computed, stored, ATTENTION)
    ]


# --------------------------------------------------------------------------------------------------
# The list: residual streams, operands and results of weights, attention, experts.

#: Activations that a plan lists.
MAX_ACTIVATIONS = 64


def activation_layouts(
    facts: Facts, choice: Choice, mesh: MeshShape, context: str, groups: Sequence[str]
) -> tuple[ActivationLayout, ...]:
    """The main activations of a step, in program order, at most `MAX_ACTIVATIONS`."""
    step = StepLayouts(facts=facts, choice=choice, mesh=mesh, context=context)
    layouts: dict[tuple[object, ...], ActivationLayout] = {}
    for _, activation in sorted(
        (*_residuals(step, groups), *_activations_of_weights(step)), key=lambda indexed: indexed[0]
    ):
        key = activation.name, activation.shape, activation.dtype, activation.held
        earlier = layouts.get(key)
        layouts[key] = activation if earlier is None else _joined(earlier, activation)
    return tuple(layouts.values())[:MAX_ACTIVATIONS]


def _joined(first: ActivationLayout, second: ActivationLayout) -> ActivationLayout:
    return replace(
        first, count=first.count + second.count, moves=merged((*first.moves, *second.moves))
    )


def _residuals(step: StepLayouts, groups: Sequence[str]) -> Iterator[OpActivation]:
    """Lists the residual streams that layer groups pass from layer to layer."""
    carried = step.facts.layers.carried
    for group, value in zip(groups, carried, strict=False):
        if value < 0:
            continue
        stages = step.axes("stage") if value == carried[0] else ()
        layout = step.between_ops(value)
        moves = [
            Move(kind="collective-permute", axes=stages, of=("stages",), layout=layout)
            for _ in stages
        ]
        index = step.facts.producers[value]
        yield step.activation(f"residual stream of {group}", value, moves, index)


def _activations_of_weights(step: StepLayouts) -> Iterator[OpActivation]:
    """Lists the operands and results of ops with weights and of attention kernels."""
    readers: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(step.facts.graph.ops):
        if op.kind in KERNELS:
            yield from kernel_activations(step, index, op)
        elif weight := step.weight(op):
            for value in op.operands:
                if _is_activation(step, op, value):
                    readers[value].append(index)
            if op.results[0] not in step.facts.gradients:
                yield from _result(step, index, op, weight)
        elif op.category == "matmul" and op.results[0] in step.facts.gradients:
            for value in op.operands:
                readers[value].append(index)
    for value, ops in readers.items():
        yield from _operand(step, value, ops)
    yield from _routed(step)


def _routed(step: StepLayouts) -> Iterator[OpActivation]:
    """Lists the token rows that are dispatched to their experts and combined again."""
    facts = step.facts
    if not facts.routes or step.choice.expert is None or "expert" not in step.mesh:
        return
    for index, value in routed_values(facts.graph, facts.colours, facts.batch):
        move = Move(
            kind="all-to-all", axes=("expert",), of=("experts",), layout=step.between_ops(value)
        )
        name = (
            "gradient of rows of experts" if backward(facts.graph.ops[index]) else "rows of experts"
        )
        yield step.activation(name, value, [move], index)


def _is_activation(step: StepLayouts, op: Op, value: int) -> bool:
    return (
        value not in step.facts.weights
        and "float" in step.facts.graph.values[value].dtype
        and op.category != "gather"
    )


def _result(step: StepLayouts, index: int, op: Op, weight: str) -> Iterator[OpActivation]:
    """Lists the result of an op with a weight, which may be partial sums."""
    value, is_backward = op.results[0], backward(op)
    if index in step.reduced_with_earlier or (is_backward and index not in step.reductions):
        return
    layout, names = step.in_op(index, value), dict.fromkeys([weight])
    moves: list[Move] = []
    for transfer, ops in step.reductions.get(index, ()):
        of = tuple(name for number in ops if (name := step.weight(step.facts.graph.ops[number])))
        names |= dict.fromkeys(of)
        axes = step.axes(transfer.purpose)
        if axes:
            moves.append(Move(kind=transfer.kind, axes=axes, of=of, layout=layout, before=True))
    if is_backward and not moves:
        return
    name = f"{'gradient of the input' if is_backward else 'output'} of {joined_names(names)}"
    logits = (
        not is_backward and op.category == "matmul" and step.facts.colours[value][-1] == "vocab"
    )
    yield step.activation(f"logits, {name}" if logits else name, value, moves, index)


def _operand(step: StepLayouts, value: int, readers: Sequence[int]) -> Iterator[OpActivation]:
    """Lists a value that ops with weights, or weight gradients, read, where a collective moves
    it.
    """
    layout, moves = step.between_ops(value), list[Move]()
    ops = [(index, step.facts.graph.ops[index]) for index in readers]
    for index, op in ops:
        of = step.weight(op) or "gradients of weights"
        moves += resharding_before(layout, step.in_op(index, value), of)
    named = [(op, weight) for _, op in ops if (weight := step.weight(op))]
    weights = joined_names(weight for _, weight in named)
    if moves and weights:
        is_backward = all(backward(op) for op, _ in named)
        name = f"gradient of the output of {weights}" if is_backward else f"input of {weights}"
        yield step.activation(name, value, moves, readers[0])


# --------------------------------------------------------------------------------------------------
# From decisions to the layout of every parameter and batch array.

#: Rows and columns of a bfloat16 tile in TPU memory, elements (jax-ml/jax
#: docs/pallas/tpu/details.rst: 8 x 128 of 32 bits, 16 x 128 of 16 bits).
TILE_ROWS, TILE_LANES = 16, 128


def stored_layout(
    layout: Layout,
    shape: tuple[int, ...],
    mesh: MeshShape,
    stack_dims: frozenset[int],
    avoided: frozenset[int] = frozenset(),
) -> Layout:
    """Shards one more dim of a parameter over the storage axes: the first unsharded dim that
    divides, else a sharded dim that still divides.

    Shards along the first dim are contiguous in memory, so all-gathering them needs no copies. Dims
    whose shards are not whole tiles come last: a TPU pads them, and trades rows between neighbours
    after every reduce-scatter. Where no other dim has whole tiles, columns that would be whole
    tiles as rows come before rows that would not: the compiler then stores the matrix transposed.

    Vectors (scales of norms, biases) are stored replicated: sharding them saves next to nothing,
    and each would cost two collectives per layer.
    """
    added = tuple(axis for axis in STORED_AXES if axis in mesh and axis not in layout.axes)
    if not added:
        return layout
    ways = mesh.ways(added)
    dims = [dim for dim, size in enumerate(shape) if dim not in stack_dims and size > 1]
    fits = [dim for dim in dims if shape[dim] % (mesh.ways(layout[dim]) * ways) == 0]
    if len(dims) < 2 or not fits:
        return layout
    best = min(
        fits,
        key=lambda dim: (
            dim in avoided,
            bool(layout[dim]),
            _tile_mismatch(dim, shape, shape[dim] // (mesh.ways(layout[dim]) * ways)),
            dim,
        ),
    )
    return Layout(*((*axes, *added) if dim == best else axes for dim, axes in enumerate(layout)))


def _tile_mismatch(dim: int, shape: tuple[int, ...], size: int) -> int:
    """Distance of shards of a size along a dim from whole tiles: 0 where they are whole, 1 where
    they are whole in the transposed matrix, 2 otherwise.
    """
    last = len(shape) - 1
    if dim < last - 1 or size % (TILE_LANES if dim == last else TILE_ROWS) == 0:
        return 0
    transposed = dim == last and size % TILE_ROWS == 0 and shape[last - 1] % TILE_LANES == 0
    return 1 if transposed else 2


def split_rules(rules: Rules, batch: str | None) -> tuple[Rules, Rules | None]:
    """Splits pinned rules into those for compute and those that also say how parameters are stored
    (None where no rule does).

    A rule that shards a colour other than the batch over data or fsdp concerns stored parameters
    only.
    """
    storing = set(BATCH_AXES) - set(COMPUTE_AXES)
    compute = Rules(
        tuple(
            (name, axes if name == batch else tuple(a for a in axes if a in COMPUTE_AXES))
            for name, axes in rules.entries
            if name == batch or set(COMPUTE_AXES) & set(axes) or not axes
        )
    )
    return compute, (
        rules
        if any(name != batch and storing & set(axes) for name, axes in rules.entries)
        else None
    )


def parameter_layouts(
    problem: Problem,
    colours: Mapping[str, LogicalAxes],
    stack_dims: frozenset[tuple[str, int]],
    mesh: MeshShape,
    rules: Rules,
    zero: int,
    stored_rules: Rules | None = None,
) -> tuple[ParameterLayout, ...]:
    """Layouts of every parameter."""
    layouts: list[ParameterLayout] = []
    slices, fused = sliced_dims(problem), fused_parameters(problem)
    for parameter in problem.parameters:
        axes = colours[parameter.path]
        stacks = frozenset(dim for path, dim in stack_dims if path == parameter.path)
        compute = _with_stages(
            rules.resolve(axes, parameter.shape, mesh).layout, parameter.shape, mesh, stacks
        )
        if stored_rules is not None:
            sharded = _with_stages(
                stored_rules.resolve(axes, parameter.shape, mesh).layout,
                parameter.shape,
                mesh,
                stacks,
            )
        else:
            avoided = slices.get(parameter.path, frozenset())
            if "tensor" in compute.axes:
                avoided |= {d for d in fused.get(parameter.path, ()) if not compute[d]}
            sharded = stored_layout(compute, parameter.shape, mesh, stacks, avoided)
        stored = sharded if zero >= 3 else compute
        gradient, state = (
            (sharded if zero >= 2 else compute, sharded if zero >= 1 else compute)
            if parameter.trained
            else (compute, stored)
        )
        layouts.append(
            ParameterLayout(
                path=parameter.path,
                shape=parameter.shape,
                dtype=parameter.dtype,
                colours=axes,
                compute=compute,
                rest=stored,
                gradient=gradient,
                state=state,
                role=parameter.role,
            )
        )
    return tuple(layouts)


def sliced_dims(problem: Problem) -> dict[str, frozenset[int]]:
    """By path, the dims of which every use of a parameter takes a slice, such as the rows of a
    position table that is longer than the sequence. If sharded, such a dim is all-gathered whole,
    not only its slice.
    """
    graph = problem.forward
    uses: dict[int, list[Op]] = defaultdict(list)
    for op in graph.ops:
        for value in op.operands:
            uses[value].append(op)
    sliced: dict[str, frozenset[int]] = {}
    for value in graph.inputs_of("parameter"):
        shape = graph.values[value].shape
        parts = uses[value]
        if parts and all(op.kind in ("slice", "dynamic_slice") for op in parts):
            sliced[graph.values[value].path] = frozenset(
                dim
                for dim, size in enumerate(shape)
                if all(graph.values[op.results[0]].shape[dim] < size for op in parts)
            )
    return sliced


def _with_stages(
    layout: Layout, shape: tuple[int, ...], mesh: MeshShape, stacks: frozenset[int]
) -> Layout:
    """The layout with stacks of layers sharded over stages where they divide; an uneven split has
    no layout.
    """
    return Layout(
        *(
            ("stage",)
            if "stage" in mesh and dim in stacks and not axes and shape[dim] % mesh["stage"] == 0
            else axes
            for dim, axes in enumerate(layout)
        )
    )


def batch_layouts(
    problem: Problem, colours: Mapping[str, LogicalAxes], mesh: MeshShape, rules: Rules
) -> tuple[tuple[str, Layout], ...]:
    """Layout of every batch array: sharded along the batch and over the context axis; the tensor
    axis shards the sequence inside the program.
    """
    outer = Rules(
        tuple(
            (name, tuple(axis for axis in axes if axis != "tensor"))
            for name, axes in rules.entries
            if not axes or set(axes) - {"tensor"}
        )
    )
    return tuple(
        (path, outer.resolve(colours[path], shape, mesh).layout)
        for path, shape, _, _ in problem.batch
    )


# --------------------------------------------------------------------------------------------------
# Inputs of the rules of thumb (`shardlib.planner.findings`): a plan and further facts.


@dataclass(frozen=True, kw_only=True)
class AdviceInputs:
    """A plan, and further facts for the rules of thumb.

    Attributes:
        compute_dtype: dtype of the dominant matmuls.
        itemsize: bytes per element of that dtype.
        weights: number of parameter elements without embeddings.
        has_sequence: True if the model has a sequence dim.
    """

    plan: Plan
    topology: Topology
    compute_dtype: str
    itemsize: int
    weights: int
    has_sequence: bool

    @property
    def device_tokens(self) -> float:
        """Tokens per device and microbatch."""
        plan = self.plan
        return plan.estimate.tokens / plan.microbatches / plan.mesh.ways(TOKEN_AXES)

    @property
    def device_rows(self) -> float:
        """Rows of matmuls with weights per device and microbatch: without a sequence a row of the
        batch, as an image, may have several, by its FLOPs (6 for each weight and row).
        """
        estimate = self.plan.estimate
        once = 6 * estimate.tokens * sum(math.prod(p.shape) for p in self.plan.parameters)
        if self.has_sequence or not once:
            return self.device_tokens
        return self.device_tokens * max(1.0, estimate.model_flops / once)


# --------------------------------------------------------------------------------------------------
# The layouts of a plan as JAX's shardings over a mesh of the user's.

#: A `jax.sharding.NamedSharding`.
NamedSharding = Any


class AxisSizes(Protocol):
    """The attributes read of a `jax.sharding.Mesh` or an abstract one."""

    @property
    def shape(self) -> Mapping[str, int]:
        """Size of every axis by its name."""
        ...


@dataclass(frozen=True, kw_only=True)
class PlanShardings:
    """The shardings of a plan, by path.

    Attributes:
        parameters: of every parameter as it is stored.
        compute: of every parameter while it is used.
        gradients: of the gradient of every trained parameter.
        optimizer: of the optimizer state of every trained parameter, of the arrays that have its
            shape; all others are replicated.
        batch: of every array of the batch; "batch" where it is one array, otherwise "batch.x".
    """

    parameters: Mapping[str, NamedSharding]
    compute: Mapping[str, NamedSharding]
    gradients: Mapping[str, NamedSharding]
    optimizer: Mapping[str, NamedSharding]
    batch: Mapping[str, NamedSharding]


def plan_shardings(plan: Plan, mesh: AxisSizes) -> PlanShardings:
    """The shardings of a plan over a mesh that has its axes."""
    if not isinstance(getattr(mesh, "shape", None), Mapping):
        raise ArgumentError(
            f"mesh is {type(mesh).__name__}; it is a jax.sharding.Mesh\nTry:"
            " plan.shardings(jax.make_mesh((4, 2), ('fsdp', 'tensor')))"
        )
    sizes_of_mesh = dict(mesh.shape)
    wrong = [
        f"{axis} is {size} in the plan and {sizes_of_mesh.get(axis, 'missing')} in the mesh"
        for axis, size in plan.mesh.items()
        if size > 1 and sizes_of_mesh.get(axis) != size
    ]
    if wrong:
        sizes = {axis: size for axis, size in plan.mesh.items() if size > 1}
        raise_all(
            LayoutError,
            f"the mesh {sizes_of_mesh} is not that of the plan, {plan.mesh}",
            wrong,
            hint=f"jax.make_mesh({tuple(sizes.values())}, {tuple(sizes)})",
        )
    sharding: Any = sys.modules["jax"].sharding  # who has a mesh has loaded JAX; planning has not

    def named_sharding(layout: Layout) -> NamedSharding:
        dims = [tuple(axis for axis in dim if plan.mesh[axis] > 1) for dim in layout]
        spec = (None if not dim else dim[0] if len(dim) == 1 else dim for dim in dims)
        return sharding.NamedSharding(mesh, sharding.PartitionSpec(*spec))

    parameters = [parameter for parameter in plan.parameters if parameter.role != "updated"]
    trained = [parameter for parameter in parameters if parameter.trained]
    return PlanShardings(
        parameters={parameter.path: named_sharding(parameter.rest) for parameter in parameters},
        compute={parameter.path: named_sharding(parameter.compute) for parameter in parameters},
        gradients={parameter.path: named_sharding(parameter.gradient) for parameter in trained},
        optimizer={parameter.path: named_sharding(parameter.state) for parameter in trained},
        batch={path: named_sharding(layout) for path, layout in plan.batch_layouts},
    )
