"""Colours: classes of dims, over all arrays of a program, that are sharded together.

A *colour* is a class of (value, dim) pairs that some op ties together: sharding one of them without
the others costs a reshard. Classes are found by union-find over the factors of every op, over all
graphs of a problem at once; dims with the same logical name share a colour. Colours without a name
are named after the first input that has them ("mlp.up.kernel:1"), so that the plan of a model
without annotations is readable. The same dims of unrolled repeated layers are one colour
(`tie_repeated_layers`).

A colour may occur twice in one value: the query and the key dim of attention scores are both the
sequence. It then shards the first of the two (`Rules.resolve`; `Colouring.conflicts` lists them).

A `Choice` says which colours are sharded, and hence the `Spec` of every value and op. Pricing needs
no sizes for this: a spec says which dim the *batch* axes shard (data, fsdp and expert together),
which the *context* axis, which the *tensor* axis, and which dim of a weight the *expert* axis. The
tensor axis follows the priority semantics of `shardlib.layout.Rules`: the colours of `tensor` in
order, then, with sequence parallelism, the sequence colour.

>>> choice = Choice(tensor=("mlp",), batch="batch", sequence="seq")
>>> choice.spec(("batch", "seq", "mlp"))
('batch', None, 'tensor')
>>> choice.spec(("batch", "seq", "embed"))
('batch', 'tensor', None)

A dim that two axes shard names both, the major one first. The expert axis shards the batch of every
value that has one, and the experts of weights:

>>> choice = Choice(tensor=("mlp",), batch="batch", sequence="seq", context="seq", expert="expert")
>>> choice.spec(("batch", "seq", "embed"))
('batch', 'context+tensor', None)
>>> choice.spec(("expert", "embed", "mlp"))
('expert', None, 'tensor')

Classes of dims are found by union-find:

>>> classes = UnionFind()
>>> classes.join([("forward", 0, 1), ("forward", 2, 0)])
>>> classes.find(("forward", 0, 1)) == classes.find(("forward", 2, 0))
True
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from shardlib.findings import Finding, diagnostic
from shardlib.graph import Dim, Dims, FactorRule, Graph, Op, OpDim, Problem, Window
from shardlib.layout import BATCH_AXES, EXPERT, LogicalAxes, Rules

# --------------------------------------------------------------------------------------------------
# Ties between dims: classes of (value, dim) pairs that some op, input or name ties together.


class UnionFind:
    """Union-find with path halving."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, node: Hashable) -> Hashable:
        parent = self.parent
        if node not in parent:
            parent[node] = node
            return node
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def join(self, nodes: Iterable[Hashable]) -> None:
        roots = [self.find(node) for node in nodes]
        self.parent |= dict.fromkeys(roots, next(iter(roots), None))


def tie_graph(classes: UnionFind, program: str, graph: Graph) -> None:
    """Joins the dims that the ops of a graph tie to one index.

    Args:
        program: "forward", or the remat policy of a step graph.
    """
    for op in graph.ops:
        rule = op.rule
        members: dict[int, list[Hashable]] = defaultdict(list)
        for values, all_dims in ((op.operands, rule.operands), (op.results, rule.results)):
            for value, dims in zip(values, all_dims, strict=True):
                for dim, factors in enumerate(dims):
                    major = rule.major(factors)
                    if major is not None:
                        members[major].append((program, value, dim))
        for nodes in members.values():
            if len(nodes) > 1:
                classes.join(nodes)


def tie_inputs(classes: UnionFind, problem: Problem) -> None:
    """Joins the dims of inputs in the graphs of all remat policies with those of the parameters and
    the batch.
    """
    for index in problem.forward.inputs:
        value = problem.forward.values[index]
        for dim in range(len(value.shape)):
            classes.join([("input", value.path, dim), ("forward", index, dim)])
    for policy, step in problem.steps.items():
        for index, source in zip(step.graph.inputs, step.inputs, strict=True):
            for dim in range(len(step.graph.values[index].shape) - source.stacked):
                classes.join(
                    [
                        *(("input", path, dim) for path in source.paths),
                        (policy, index, dim + source.stacked),
                    ]
                )
        for gradient, index in zip(step.gradients, step.graph.inputs_of("parameter"), strict=True):
            for dim in range(len(step.graph.values[index].shape)):
                classes.join([(policy, index, dim), (policy, gradient, dim)])


@dataclass(frozen=True, kw_only=True)
class Part:
    """The run of positions of a dim of a batch array that a loss reads, such as the tokens but the
    last of `tokens[:, :-1]`.

    Attributes:
        nodes: dims of values, by program, that have these positions alone.
        size: their number.
    """

    nodes: tuple[Hashable, ...]
    size: int


#: (path, dim) of batch arrays of which a loss reads parts alone.
Parts = Mapping[tuple[str, int], Part]


def read_parts(classes: UnionFind, problem: Problem) -> Parts:
    """Sequences of batch arrays that reach matmuls and lookups not whole, but in slices: inputs and
    targets of a next-token loss. The longest slices have their name.
    """
    graphs = _graphs(problem)
    slices: dict[Hashable, list[tuple[int, Hashable]]] = defaultdict(list)
    for program, op, window in _windows(graphs):
        if not window.long[0] and window.short is not None:
            (long,), (short,) = _nodes(program, op, window.long), _nodes(program, op, window.short)
            slices[classes.find(long)].append((window.size, short))
    used = {
        classes.find((program, value, dim))
        for program, graph in graphs.items()
        for op in graph.ops
        if op.category in ("matmul", "convolution", "gather")
        for value in (*op.operands, *op.results)
        for dim in range(len(graph.values[value].shape))
    }
    parts: dict[tuple[str, int], Part] = {}
    for path, _, _, axes in problem.batch:
        for dim, name in enumerate(axes):
            root = classes.find(("input", path, dim))
            if name not in SEQUENCE_NAMES or root not in slices or root in used:
                continue
            size = max(size for size, _ in slices[root])
            nodes = tuple(node for length, node in slices[root] if length == size)
            if used & {classes.find(node) for node in nodes}:
                parts[path, dim] = Part(nodes=nodes, size=size)
    return parts


def _graphs(problem: Problem) -> dict[str, Graph]:
    """The graphs of a problem by program: "forward", or the remat policy of a step."""
    return {
        "forward": problem.forward,
        **{policy: step.graph for policy, step in problem.steps.items()},
    }


def tie_names(classes: UnionFind, problem: Problem, parts: Parts) -> tuple[str, ...]:
    """Joins the dims with the same logical name. A parameter whose names would tie two dims that
    are separate in other parameters keeps none of its names: for example the one of four attention
    kernels, all named (embed, heads), whose first dim counts heads.
    """
    for part in parts.values():
        classes.join(part.nodes)
    arrays = [
        (
            path,
            [
                (name, _input_node(path, dim, parts))
                for dim, name in enumerate(axes)
                if name is not None
            ],
        )
        for path, axes in named_dims(problem)
    ]
    support: dict[tuple[str, Hashable], int] = defaultdict(int)
    distinct: set[frozenset[str]] = set()
    for _, dims in arrays:
        for position, (name, node) in enumerate(dims):
            support[name, classes.find(node)] += 1
            distinct |= {
                frozenset((name, other_name))
                for other_name, other_node in dims[:position]
                if other_name != name and classes.find(other_node) != classes.find(node)
            }
    batch = {path for path, *_ in problem.batch}

    def certainty(dims: Sequence[tuple[str, Hashable]]) -> int:
        return min((support[name, classes.find(node)] for name, node in dims), default=0)

    ranked = sorted(arrays, key=lambda array: (array[0] not in batch, -certainty(array[1])))
    names: dict[Hashable, frozenset[str]] = {}
    ignored: list[str] = []
    for path, dims in ranked:
        joined: dict[Hashable, frozenset[str]] = {}
        for name, node in dims:
            roots = {classes.find(node), classes.find(("name", name))}
            merged = frozenset({name}).union(
                *(names.get(root, frozenset()) | joined.get(root, frozenset()) for root in roots)
            )
            joined |= dict.fromkeys(roots, merged)
        if path not in batch and any(
            frozenset((name, other_name)) in distinct
            for merged in joined.values()
            for name in merged
            for other_name in merged
        ):
            ignored.append(path)
            continue
        for name, node in dims:
            roots = {classes.find(node), classes.find(("name", name))}
            merged = frozenset({name}).union(*(names.pop(r, frozenset()) for r in roots))
            classes.join([("name", name), node])
            names[classes.find(node)] = merged
    return tuple(path for path, _ in arrays if path in ignored)


def _input_node(path: str, dim: int, parts: Parts) -> Hashable:
    """The dim that has the name and the colour of a dim of an input."""
    return parts[path, dim].nodes[0] if (path, dim) in parts else ("input", path, dim)


def named_dims(problem: Problem) -> tuple[tuple[str, LogicalAxes], ...]:
    """(path, logical axes) of every parameter and batch array."""
    return (
        *((p.path, p.axes) for p in problem.parameters),
        *((path, axes) for path, _, _, axes in problem.batch),
    )


def tie_repeated_layers(
    classes: UnionFind,
    problem: Problem,
    dims: Mapping[str, tuple[tuple[str, int], ...]],
    values: Iterable[LogicalAxes],
) -> bool:
    """Joins colours that shard parameters of the same shapes along the same dims, like heads and
    widths of unrolled layers. Two colours of one value, like the widths of two layers in the weight
    between them, stay separate: in such a chain every second one is tied.

    Args:
        dims: colour -> the (path, dim) of all inputs that have it, for colours that may be tied.
        values: colours of every value.

    Returns:
        True if some colours were joined.
    """
    shapes = {p.path: p.shape for p in problem.parameters} | {
        path: shape for path, shape, _, _ in problem.batch
    }
    neighbours: dict[str, set[str]] = defaultdict(set)
    for axes in {frozenset(axes) for axes in values}:
        axis_names = {name for name in axes if name is not None and name in dims}
        for name in axis_names:
            neighbours[name] |= axis_names
    groups: dict[Hashable, list[list[str]]] = defaultdict(list)
    for name, inputs in dims.items():
        same_shapes = groups[frozenset((shapes[path], dim) for path, dim in inputs)]
        candidates = (group for group in same_shapes if neighbours[name].isdisjoint(group))
        group = next(candidates, None)
        if group is None:
            same_shapes.append([name])
        else:
            group.append(name)
    tied = [group for same_shapes in groups.values() for group in same_shapes if len(group) > 1]
    for group in tied:
        classes.join(("input", *dims[name][0]) for name in group)
    return bool(tied)


def stack_dims(problem: Problem) -> set[tuple[str, int]]:
    """(path, dim) of parameters whose dim counts layers: a scan takes one slice of it per
    iteration.
    """
    dims: set[tuple[str, int]] = set()
    for step in problem.steps.values():
        sources = dict(zip(step.graph.inputs, step.inputs, strict=True))
        for op in step.graph.ops:
            if (
                op.kind == "enter"
                and (source := sources.get(op.operands[0]))
                and not source.stacked
            ):
                dims |= {(path, 0) for path in source.paths}
    return dims


# --------------------------------------------------------------------------------------------------
# Choices of sharded colours.

#: Per dim the kinds of mesh axes that shard it, joined by "+" with the major one first, or None: a
#: `PartitionSpec` without sizes. "batch" stands for data, fsdp and expert together.
Spec = tuple[str | None, ...]

#: Sharding of a dim that merges batch and sequence, like the tokens of a mixture of experts: batch
#: and context axes shard it together.
TOKENS = "batch+context"
#: Kinds of axes in a `Spec`.
AXIS_KINDS = ("batch", "tensor", "context", "expert")


@lru_cache(maxsize=1 << 14)
def sharded_by(spec: Spec, kind: str) -> bool:
    """True if some dim is sharded over a kind of axis."""
    return any(kind in axes for axes in spec if axes)


@lru_cache(maxsize=1 << 14)
def dividing_axes(spec: Spec) -> tuple[bool, bool, bool, bool]:
    """A flag for each of `AXIS_KINDS`: True if it shards an array."""
    batch, tensor, context, expert = (sharded_by(spec, kind) for kind in AXIS_KINDS)
    return batch, tensor, context, expert


def axes_of(entry: str | None) -> tuple[str, ...]:
    """The kinds of axes in one entry of a `Spec`, the major one first."""
    return tuple(entry.split("+")) if entry else ()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The colours that the mesh axes shard.

    Attributes:
        tensor: colours that the tensor axis shards, in order of priority.
        batch: the colour that data, fsdp and expert shard; None if the batch has none.
        sequence: the colour that the tensor axis shards in values without a colour of `tensor`;
            None without sequence parallelism.
        context: the colour that the context axis shards, if any.
        expert: the colour of experts, which the expert axis shards in values without a batch, if
            any.
    """

    tensor: tuple[str, ...] = ()
    batch: str | None = None
    sequence: str | None = None
    context: str | None = None
    expert: str | None = None

    @cached_property
    def _hash(self) -> int:
        return hash((self.tensor, self.batch, self.sequence, self.context, self.expert))

    def __hash__(self) -> int:
        return self._hash  # search tables look up the same choices very often

    def spec(
        self, colours: LogicalAxes, unsharded: Iterable[int] = (), sequence_dim: int | None = None
    ) -> Spec:
        """The sharding of the dims of a value, or of the factors of an op, with these colours.

        Args:
            sequence_dim: which of several dims along the sequence is sharded (queries and keys of
                attention); by default the first.
        """
        result: list[str | None] = [None] * len(colours)
        excluded = set(unsharded)

        def shard(name: str | None, axis: str, major: str | None = None) -> bool:
            if name is None or name not in colours:
                return False
            for dim, colour in enumerate(colours):
                if colour == name and dim not in excluded and result[dim] in (None, major):
                    result[dim] = f"{major}+{axis}" if result[dim] else axis
                    return True
            return False

        tokens = TOKENS in colours and shard(TOKENS, TOKENS if self.context else "batch")
        has_batch = tokens or shard(self.batch, "batch")
        if self.context and not tokens:
            if sequence_dim is not None and result[sequence_dim] is None:
                result[sequence_dim] = "context"
            elif sequence_dim is None:
                shard(self.context, "context")
        if not has_batch:
            shard(self.expert, "expert")
        if any(shard(name, "tensor") for name in self.tensor):
            return tuple(result)
        major = "context" if self.sequence == self.context else None
        if (
            sequence_dim is not None
            and result[sequence_dim] in (None, major)
            and colours[sequence_dim] == self.sequence
        ):
            result[sequence_dim] = f"{major}+tensor" if result[sequence_dim] else "tensor"
        else:
            shard(self.sequence, "tensor", major)
        return tuple(result)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    def restrict(self, colours: frozenset[str]) -> Choice:
        """The part of the choice that affects values with only these colours."""
        tensor = tuple(c for c in self.tensor if c in colours)
        sequence = self.sequence if self.sequence in colours else None
        if tensor == self.tensor and sequence == self.sequence:
            return self
        return Choice(
            tensor=tensor,
            batch=self.batch,
            sequence=sequence,
            context=self.context,
            expert=self.expert,
        )

    def rules(self) -> Rules:
        """The choice as sharding rules over mesh axes."""
        batch_axes = tuple(a for a in BATCH_AXES if self.expert or a != EXPERT.name)
        entries: list[tuple[str, tuple[str, ...]]] = (
            [(self.batch, batch_axes)] if self.batch else []
        )
        if self.expert:
            entries.append((self.expert, ("expert",)))
        entries += [(name, ("tensor",)) for name in self.tensor]
        sequence_axes = (("context",) if self.context else ()) + (
            ("tensor",) if self.sequence else ()
        )
        if sequence_axes:
            name = self.sequence or self.context
            assert name is not None
            # The second entry applies where tensor shards another dim already.
            entries += [
                (name, sequence_axes),
                *([(name, ("context",))] if len(sequence_axes) > 1 else []),
            ]
        return Rules(tuple(entries))


# --------------------------------------------------------------------------------------------------
# Fused dims: several dims concatenated into one, of which every piece is sharded.
#
# The kernel of a fused projection makes queries, keys and values at once, [embed, 3 heads]; that
# of an LSTM makes four gates. A split, slices or a reshape to [3, heads] separate the result. To
# shard such a dim without a gather, every *piece* of it is sharded: a device has its shard of the
# queries, of the keys and of the values (Megatron-LM stores such weights so). In a rule the major
# factor of the dim counts the pieces and is outer, and the next one is sharded (Shardy's compound
# factors, openxla/shardy `docs/propagation.md`, with the major one blocked):
#
#     split      [embed*3] -> [embed] [embed] [embed]       outer 3
#     reshape    [3*heads*width] -> [3] [heads] [width]     outer 3
#
# The boundaries of pieces follow from the ops: they are the starts and ends of all windows
# (`shardlib.graph.Window`) into a dim, and into every dim tied to it position by position. Pieces
# may differ in size; they are sharded by whatever divides all of them.
#
# Dims of the batch and of the sequence are excluded: a shard of two concatenated batches is not the
# same shard of each.

#: A fused dim is at most this many times the greatest common divisor of its pieces; others are a
#: padded vocabulary or a shift by one.
MAX_PIECES = 64


def with_fused_dims(problem: Problem) -> Problem:
    """The problem with rules that shard every piece of a fused dim, and with the pieces of every
    fused dim of its forward graph.
    """
    graphs = {
        "forward": problem.forward,
        **{policy: step.graph for policy, step in problem.steps.items()},
    }
    if not _windows(graphs):  # all boundaries come from windows
        return problem
    fused = _fused_dims(problem, graphs)
    if not fused.sizes:
        return problem
    changed = {
        program: replace(graph, ops=tuple(fused.rewritten(program, op) for op in graph.ops))
        for program, graph in graphs.items()
    }
    dims = (
        (index, dim)
        for index, value in enumerate(problem.forward.values)
        for dim in range(len(value.shape))
    )
    pieces = {key: sizes for key in dims if (sizes := fused.pieces("forward", *key))}
    return replace(
        problem,
        forward=changed["forward"],
        steps={
            policy: replace(step, graph=changed[policy]) for policy, step in problem.steps.items()
        },
        pieces=pieces,
    )


@dataclass(frozen=True, kw_only=True)
class _FusedDims:
    """The fused dims of some graphs.

    Attributes:
        same_index: classes of dims that are the same index in every value, position by position.
        sizes: root of a class of fused dims -> the sizes of its pieces.
    """

    same_index: UnionFind
    sizes: Mapping[Hashable, tuple[int, ...]]

    def pieces(self, program: str, value: int, dim: int) -> tuple[int, ...]:
        """The pieces of a dim; () if it is not fused."""
        return self.sizes.get(self.same_index.find((program, value, dim)), ())

    def rewritten(self, program: str, op: Op) -> Op:
        """An op with the rule that shards every piece."""
        rule = op.rule
        windows = rule.windows
        if windows and (sizes := self._pieces_of(program, op, windows[0].long)):
            return replace(op, rule=_piecewise_rule(rule, math.gcd(*sizes)))
        outer = frozenset(
            major
            for major, op_dim in major_factors(rule)
            if len(sizes := self._pieces_of(program, op, op_dim)) > 1
            and self._counts_pieces(rule, major, sizes, _factors(rule, op_dim))
        )
        return (
            replace(op, rule=replace(rule, outer=outer, whole=rule.whole | outer)) if outer else op
        )

    def _pieces_of(self, program: str, op: Op, op_dim: OpDim) -> tuple[int, ...]:
        result, position, dim = op_dim
        return self.pieces(program, op.value(result, position), dim)

    @staticmethod
    def _counts_pieces(rule: FactorRule, major: int, sizes: tuple[int, ...], dim: Dim) -> bool:
        """True if a factor counts the pieces of a dim, rather than being sharded itself."""
        inner = math.prod(rule.sizes[factor] for factor in dim if factor != major)
        return (
            all(size % inner == 0 for size in sizes)
            and math.gcd(*(size // inner for size in sizes)) == 1
        )


def major_factors(rule: FactorRule) -> Iterator[tuple[int, OpDim]]:
    """Major factors of dims with several factors, each with such a dim; among ops that keep the
    order of elements only reshapes have them.
    """
    for op_dim, dim in rule.dims():
        if len(dim) > 1 and dim[0] not in rule.summed:
            yield dim[0], op_dim


def _factors(rule: FactorRule, op_dim: OpDim) -> Dim:
    result, position, dim = op_dim
    return (rule.results if result else rule.operands)[position][dim]


def _piecewise_rule(rule: FactorRule, piece: int) -> FactorRule:
    """The rule of an op with windows into one dim: `piece`, the common divisor of all pieces, is a
    factor of the long dim and of every window; the factor that counts the pieces is outer.
    """
    sizes, outer = list(rule.sizes), set[int]()
    sizes.append(piece)
    common = len(sizes) - 1
    dims: dict[OpDim, Dim] = dict(rule.dims())

    def split(op_dim: OpDim, size: int) -> None:
        if size > piece:
            sizes.append(size // piece)
            outer.add(len(sizes) - 1)
            dims[op_dim] = (len(sizes) - 1, common)
        else:
            dims[op_dim] = (common,)

    long = rule.windows[0].long
    split(long, math.prod(rule.sizes[factor] for factor in dims[long]))
    for window in rule.windows:
        if window.short is not None:
            split(window.short, window.size)

    def side(result: bool, values: tuple[Dims, ...]) -> tuple[Dims, ...]:
        return tuple(
            tuple(dims[result, position, dim] for dim in range(len(value)))
            for position, value in enumerate(values)
        )

    return replace(
        rule,
        sizes=tuple(sizes),
        operands=side(False, rule.operands),
        results=side(True, rule.results),
        whole=rule.whole | outer,
        outer=frozenset(outer),
    )


def _fused_dims(problem: Problem, graphs: Mapping[str, Graph]) -> _FusedDims:
    same_index, tied = UnionFind(), UnionFind()
    for classes in (same_index, tied):
        tie_inputs(classes, problem)
    for program, graph in graphs.items():
        tie_graph(tied, program, graph)
        _tie_positions(same_index, program, graph)
    parts = read_parts(tied, problem)
    tie_names(tied, problem, parts)
    excluded = {
        tied.find(_input_node(path, dim, parts))
        for path, shape, _, _ in problem.batch
        for dim in range(len(shape))
    }
    boundaries = _piece_boundaries(same_index, graphs)
    pieces = {
        root: tuple(b - a for a, b in pairwise(sorted(positions)))
        for root, positions in boundaries.items()
    }
    fused = {
        root: sizes
        for root, sizes in pieces.items()
        if len(sizes) > 1
        and (divisor := math.gcd(*sizes)) > 1
        and divisor * MAX_PIECES >= sum(sizes)
    }
    for program, op, window in _windows(graphs):
        long, short = (_nodes(program, op, op_dim) for op_dim in (window.long, window.short))
        if any(tied.find(node) in excluded for node in (*long, *short)):
            fused.pop(same_index.find(long[0]), None)
    for program, op, window in sorted(
        _windows(graphs), key=lambda window: -_long_size(*window[1:])
    ):  # a piece of a fused dim is not fused itself
        if (
            window.short is not None
            and same_index.find(_nodes(program, op, window.long)[0]) in fused
        ):
            fused.pop(same_index.find(_nodes(program, op, window.short)[0]), None)
    return _FusedDims(same_index=same_index, sizes=fused)


def _windows(graphs: Mapping[str, Graph]) -> list[tuple[str, Op, Window]]:
    return [
        (program, op, window)
        for program, graph in graphs.items()
        for op in graph.ops
        for window in op.rule.windows
    ]


def _nodes(program: str, op: Op, op_dim: OpDim | None) -> list[Hashable]:
    return [] if op_dim is None else [(program, op.value(op_dim[0], op_dim[1]), op_dim[2])]


def _long_size(op: Op, window: Window) -> int:
    return math.prod(op.rule.sizes[factor] for factor in _factors(op.rule, window.long))


def _tie_positions(same_index: UnionFind, program: str, graph: Graph) -> None:
    """Ties dims that an op maps to the same index, position by position."""
    for op in graph.ops:
        members: dict[int, list[Hashable]] = defaultdict(list)
        for (result, position, axis), dim in op.rule.dims():
            if len(dim) == 1 and dim[0] not in op.rule.whole:
                members[dim[0]].append((program, op.value(result, position), axis))
        for nodes in members.values():
            same_index.join(nodes)


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """The end of the contiguous range from 0 that spans cover.

    >>> _covered([(0, 2), (4, 8), (2, 3)])
    3
    """
    end = 0
    for start, stop in sorted(spans):
        end = max(end, stop) if start <= end else end
    return end


def _piece_boundaries(
    same_index: UnionFind, graphs: Mapping[str, Graph]
) -> dict[Hashable, set[int]]:
    """The positions at which windows divide each class of dims, both ends included; for a dim that
    a reshape merges from several, those of the major one.

    A dim that windows do not cover completely (the best few of all experts) is not fused.
    """
    boundaries: dict[Hashable, set[int]] = defaultdict(set)
    windows: dict[Hashable, set[tuple[int, int]]] = defaultdict(set)
    for program, op, window in _windows(graphs):
        root = same_index.find(_nodes(program, op, window.long)[0])
        boundaries[root] |= {0, window.start, window.start + window.size, _long_size(op, window)}
        windows[root].add((window.start, window.start + window.size))
    for root, spans in windows.items():
        if _covered(spans) < max(boundaries[root]):
            del boundaries[root]
    for program, graph in graphs.items():
        for op in graph.ops:
            if op.rule.windows:
                continue
            for major, op_dim in major_factors(op.rule):
                counting = [
                    same_index.find((program, op.value(result, position), dim_position))
                    for (result, position, dim_position), dim in op.rule.dims()
                    if dim == (major,)
                ]
                inner = math.prod(op.rule.sizes[factor] for factor in _factors(op.rule, op_dim)[1:])
                for positions in [boundaries[root] for root in counting if root in boundaries]:
                    boundaries[same_index.find(_nodes(program, op, op_dim)[0])] |= {
                        position * inner for position in positions
                    }
    return dict(boundaries)


# --------------------------------------------------------------------------------------------------
# The colour of every factor of every op: that of the dims that contain the factor.


def all_factor_colours(
    graph: Graph, colours: tuple[LogicalAxes, ...], weights: Set[int]
) -> tuple[LogicalAxes, ...]:
    """Colour of every factor of every op.

    A mesh axis shards one dim of a value. If two dims of a weight have one colour (the matrix of a
    recurrence, [embed, embed]), it is the first; ops that read the weight, or make its gradient,
    use its stored sharding, and their other factor of that colour is not sharded.
    """
    transposes = {
        value: op
        for op in graph.ops
        if op.kind == "transpose"
        for value in (*op.operands, *op.results)
        if value in weights
    }
    return tuple(
        _as_weights_are_sharded(op, factor_colours(op, colours), colours, weights, transposes)
        for op in graph.ops
    )


def _as_weights_are_sharded(
    op: Op,
    of_factors: LogicalAxes,
    colours: tuple[LogicalAxes, ...],
    weights: Set[int],
    transposes: Mapping[int, Op],
) -> LogicalAxes:
    twice = {
        colour for colour, count in Counter(of_factors).items() if colour is not None and count > 1
    }
    if not twice or op.category != "matmul":
        return of_factors
    for value, dims in (
        *zip(op.operands, op.rule.operands, strict=True),
        *zip(op.results, op.rule.results, strict=True),
    ):
        if value not in weights:
            continue
        dim_order = _dims_of_parameter(value, transposes.get(value), len(dims))
        for colour in twice:
            factors = [
                op.rule.major(dims[dim]) for dim in dim_order if colours[value][dim] == colour
            ]
            if len(factors) > 1:
                of_factors = tuple(
                    None if factor_colour == colour and factor != factors[0] else factor_colour
                    for factor, factor_colour in enumerate(of_factors)
                )
    return of_factors


def _dims_of_parameter(value: int, transpose: Op | None, rank: int) -> Sequence[int]:
    """The dims of a transposed form of a parameter, in the order of the parameter's own."""
    if transpose is None:
        return range(rank)
    (before,), (after,) = transpose.rule.operands, transpose.rule.results
    form_dims, parameter_dims = (before, after) if value in transpose.operands else (after, before)
    return [form_dims.index(factors) for factors in parameter_dims]


def factor_colours(op: Op, colours: tuple[LogicalAxes, ...]) -> LogicalAxes:
    """Colour of every factor of an op: the colour of a dim of which it is the major factor; None if
    no dim has one.
    """
    result: list[str | None] = [None] * len(op.rule.sizes)
    for values, all_dims in ((op.operands, op.rule.operands), (op.results, op.rule.results)):
        for value, dims in zip(values, all_dims, strict=True):
            for dim, factors in enumerate(dims):
                major = op.rule.major(factors)
                if major is not None and result[major] is None:
                    result[major] = colours[value][dim]
    return tuple(result)


# --------------------------------------------------------------------------------------------------
# Dims of carries over layers, and dims that loops iterate over.


def carried_dims(
    classes: UnionFind, problem: Problem, sequences: Collection[Hashable]
) -> set[Hashable]:
    """Roots of the dims that a loop carries in a value that also has the sequence; for a model
    without a sequence, of all dims that loops carry.
    """
    carried: set[Hashable] = set()
    for policy, step in problem.steps.items():
        for value in (value for op in step.graph.ops if op.kind == "carry" for value in op.results):
            roots = {
                classes.find((policy, value, dim))
                for dim in range(len(step.graph.values[value].shape))
            }
            carried |= roots if not sequences or roots & set(sequences) else set()
    return carried


def iterated_dims(classes: UnionFind, problem: Problem) -> set[Hashable]:
    """Roots of the dims over which a loop iterates, one position per iteration."""
    return {
        classes.find((policy, op.operands[0], 0))
        for policy, step in problem.steps.items()
        for op in step.graph.ops
        if op.kind == "enter"
    }


#: Names for the batch and the sequence in MaxText, T5X and Flax examples.
BATCH_NAMES: tuple[str, ...] = ("batch", "activation_batch")
SEQUENCE_NAMES: tuple[str, ...] = ("seq", "length", "sequence", "activation_length")


@dataclass(frozen=True, kw_only=True)
class Colour:
    """One class of dims.

    Attributes:
        name: its name in rules and plans.
        aliases: other logical names that the program ties to it.
        divisor: largest number of shards that divides every parameter and matmul dim of this
            colour.
        inputs: (path, dim) of every parameter and batch array that has it, or whose parts have it.
        sizes: for each, how long it is where it has this colour (`read_parts`).
        matmuls: number of matmuls and convolutions of the step that contain it.
        flops: FLOPs of these, unsharded.
        carried: whether a loop carries it from layer to layer in a value with the sequence, like
            the residual stream; carries of a recurrence from position to position do not count.
        iterated: whether a loop iterates over it, as a recurrence does over the sequence: if
            sharded, every iteration would gather the operand that it slices.
    """

    name: str
    aliases: tuple[str, ...]
    divisor: int
    inputs: tuple[tuple[str, int], ...]
    sizes: tuple[int, ...]
    matmuls: int
    flops: float
    carried: bool
    iterated: bool


@dataclass(frozen=True, kw_only=True)
class Colouring:
    """Colours of every dim of every graph of a problem.

    Attributes:
        forward: colour name per dim for each value of the forward graph.
        steps: the same for each step graph, by remat policy.
        parameters: colour name per dim for each parameter path.
        batch: colour name per dim for each batch path.
        findings: names that the program ties together, and the like.
    """

    colours: Mapping[str, Colour]
    forward: tuple[LogicalAxes, ...]
    steps: Mapping[str, tuple[LogicalAxes, ...]]
    parameters: Mapping[str, LogicalAxes]
    batch: Mapping[str, LogicalAxes]
    findings: tuple[Finding, ...]

    def canonical(self, name: str) -> str | None:
        """The colour of a logical name; None if no dim has it."""
        if name in self.colours:
            return name
        return next(
            (colour.name for colour in self.colours.values() if name in colour.aliases), None
        )

    @property
    def batch_colour(self) -> str | None:
        """The colour that data parallelism shards."""
        return next((colour for name in BATCH_NAMES if (colour := self.canonical(name))), None)

    @property
    def sequence_colour(self) -> str | None:
        """The colour that sequence parallelism shards; None if a loop iterates over it."""
        colour = self.named_sequence
        return None if colour is None or self.colours[colour].iterated else colour

    @property
    def named_sequence(self) -> str | None:
        """The colour of the sequence, whether it can be sharded or not."""
        return next((colour for name in SEQUENCE_NAMES if (colour := self.canonical(name))), None)

    @property
    def shardable(self) -> tuple[Colour, ...]:
        """Colours that the tensor axis may shard.

        The colour of the residual stream is excluded if the sequence can be sharded instead: both
        cost the same collectives, and along the sequence the normalisation needs none.
        """
        excluded = {self.batch_colour, self.named_sequence}
        return tuple(
            c
            for c in self.colours.values()
            if c.matmuls
            and c.divisor > 1
            and c.name not in excluded
            and not c.iterated
            and not (c.carried and self.sequence_colour)
        )

    def conflicts(self, colours: tuple[LogicalAxes, ...]) -> tuple[tuple[int, str], ...]:
        """(value, colour) for every value that has one colour twice."""
        return tuple(
            (index, name)
            for index, axes in enumerate(colours)
            for name in sorted({a for a in axes if a and axes.count(a) > 1})
        )


def _readable_name(path: str, dim: int) -> str:
    """A readable colour name from a tree path: the last parts, without layer numbers."""
    parts = [part for part in path.split(".") if not re.fullmatch(r"\d+", part)]
    return f"{'.'.join(parts[-3:])}:{dim}"


def colour(problem: Problem) -> Colouring:
    """Finds the colours of a problem."""
    classes = UnionFind()
    tie_inputs(classes, problem)
    for program, graph in _graphs(problem).items():
        tie_graph(classes, program, graph)
    parts = read_parts(classes, problem)
    misnamed = _misnamed(tie_names(classes, problem, parts), problem)
    colouring = _coloured(classes, problem, parts)
    named = {n for _, axes in named_dims(problem) for n in axes}
    unnamed = {c.name: c.inputs for c in colouring.shardable if c.name not in named}
    values = (
        axes for graph_axes in (colouring.forward, *colouring.steps.values()) for axes in graph_axes
    )
    if tie_repeated_layers(classes, problem, unnamed, values):
        colouring = _coloured(classes, problem, parts)
    return replace(colouring, findings=(*colouring.findings, *misnamed))


@diagnostic
def _misnamed(paths: tuple[str, ...], problem: Problem) -> tuple[Finding, ...]:
    """A finding for parameters whose names are ignored."""
    if not paths:
        return ()
    axes = dict(named_dims(problem))
    return (
        Finding(
            code="names-contradict",
            severity="warning",
            where=", ".join(paths[:4]),
            message=(
                "names are left out that would tie dims which other parameters tell apart: "
                + "; ".join(f"{path} {axes[path]}" for path in paths[:4])
                + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
            ),
            hint="name each dim for what it counts, such as (heads, head_dim, embed)",
        ),
    )


def _coloured(classes: UnionFind, problem: Problem, parts: Parts) -> Colouring:
    """The colouring of a problem whose dims have been tied."""
    stacks = stack_dims(problem)
    shapes = {p.path: p.shape for p in problem.parameters} | {
        path: shape for path, shape, _, _ in problem.batch
    }
    inputs: dict[Hashable, list[tuple[str, int]]] = defaultdict(list)
    for path, shape in shapes.items():
        for dim, size in enumerate(shape):
            if size > 1 and (path, dim) not in stacks:
                inputs[classes.find(_input_node(path, dim, parts))].append((path, dim))
    sizes = {
        (path, dim): parts[path, dim].size if (path, dim) in parts else size
        for path, shape in shapes.items()
        for dim, size in enumerate(shape)
    }
    names = {root: _names_of(classes, root, problem) for root in inputs}
    chosen, findings = _choose_names(inputs, names)
    divisors, matmuls, flops = _divisors_and_flops(classes, problem, inputs, sizes)
    carried = carried_dims(
        classes,
        problem,
        {root for root, class_names in names.items() if set(class_names) & set(SEQUENCE_NAMES)},
    )
    iterated = iterated_dims(classes, problem)
    colours = {
        chosen[root]: Colour(
            name=chosen[root],
            aliases=tuple(n for n in names[root] if n != chosen[root]),
            divisor=divisors[root],
            inputs=tuple(members),
            sizes=tuple(sizes[member] for member in members),
            matmuls=matmuls[root],
            flops=flops[root],
            carried=root in carried,
            iterated=root in iterated,
        )
        for root, members in inputs.items()
    }

    def axes(program: str, graph: Graph) -> tuple[LogicalAxes, ...]:
        return tuple(
            tuple(
                chosen.get(classes.find((program, index, dim))) if size > 1 else None
                for dim, size in enumerate(value.shape)
            )
            for index, value in enumerate(graph.values)
        )

    def of_inputs(paths: Iterable[str]) -> dict[str, LogicalAxes]:
        return {
            path: tuple(
                chosen.get(classes.find(("input", path, dim)))
                if size > 1 and (path, dim) not in stacks
                else None
                for dim, size in enumerate(shapes[path])
            )
            for path in paths
        }

    return Colouring(
        colours=colours,
        forward=axes("forward", problem.forward),
        steps={policy: axes(policy, step.graph) for policy, step in problem.steps.items()},
        parameters=of_inputs(p.path for p in problem.parameters),
        batch=of_inputs(path for path, *_ in problem.batch),
        findings=findings,
    )


def _names_of(classes: UnionFind, root: Hashable, problem: Problem) -> list[str]:
    names = [name for _, axes in named_dims(problem) for name in axes if name]
    return [name for name in dict.fromkeys(names) if classes.find(("name", name)) == root]


def _choose_names(
    inputs: Mapping[Hashable, list[tuple[str, int]]], names: Mapping[Hashable, list[str]]
) -> tuple[dict[Hashable, str], tuple[Finding, ...]]:
    chosen: dict[Hashable, str] = {}
    findings: list[Finding] = []
    used_names: set[str] = set()
    for root, members in inputs.items():
        candidates = names[root]
        conventional = [name for name in candidates if name in BATCH_NAMES + SEQUENCE_NAMES]
        name = (conventional or candidates or [_readable_name(*members[0])])[0]
        base, number = name, 2
        while name in used_names:
            name, number = f"{base}#{number}", number + 1
        used_names.add(name)
        chosen[root] = name
        if len(candidates) > 1:
            findings.append(
                Finding(
                    code="names-tied",
                    severity="info",
                    where=f"{members[0][0]} dim {members[0][1]}",
                    message=(
                        f"the program ties the logical axes {', '.join(candidates)} together; they"
                        f" are sharded alike, under the name {name!r}"
                    ),
                )
            )
    return chosen, tuple(findings)


def _divisors_and_flops(
    classes: UnionFind,
    problem: Problem,
    inputs: Mapping[Hashable, list[tuple[str, int]]],
    sizes: Mapping[tuple[str, int], int],
) -> tuple[dict[Hashable, int], dict[Hashable, int], dict[Hashable, float]]:
    divisors = {
        root: math.gcd(*(sizes[member] for member in members)) for root, members in inputs.items()
    }
    matmuls, flops = dict.fromkeys(inputs, 0), dict.fromkeys(inputs, 0.0)
    for policy, step in problem.steps.items():
        for op in step.graph.ops:
            if op.category not in ("matmul", "convolution", "gather") and not op.rule.outer:
                continue
            touched: dict[Hashable, int] = {}
            for values, all_dims in (
                (op.operands, op.rule.operands),
                (op.results, op.rule.results),
            ):
                for value, dims in zip(values, all_dims, strict=True):
                    for dim, factors in enumerate(dims):
                        major = op.rule.major(factors)
                        if major is None or major in op.rule.whole:
                            continue
                        root = classes.find((policy, value, dim))
                        if root in divisors:
                            touched[root] = math.gcd(touched.get(root, 0), op.rule.sizes[major])
            for root, size in touched.items():
                divisors[root] = math.gcd(divisors[root], size)
                counts = op.category in ("matmul", "convolution") and policy == next(
                    iter(problem.steps)
                )
                matmuls[root] += counts
                flops[root] += op.flops * step.graph.trips(op.region) if counts else 0.0
    return divisors, matmuls, flops
