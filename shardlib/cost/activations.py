"""Rewrites of a step graph for a framework profile: 8-bit and half-precision products, attention as
kernels, and the values saved for the backward pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardlib.cost.attention import BACKWARD, FORWARD, Core, FactorClasses, causal_share, cores
from shardlib.cost.experts import GROUPED, capacity_layers, has_capacity, row_count
from shardlib.cost.facts import Facts, LayerSearch, leaves_loop, named_results
from shardlib.cost.framework import FrameworkProfile
from shardlib.cost.terms import OUTSIDE_LAYERS
from shardlib.formats import FORMATS
from shardlib.graph import FactorRule, Graph, Op, StepGraph, check, elementwise, prune
from shardlib.layout import LogicalAxes
from shardlib.propagation.colours import Choice, Spec

# --------------------------------------------------------------------------------------------------
# A step whose layers multiply weights in an 8-bit format.
#
# Every operand of such a product is cast: its largest element is found, in a separate pass with
# *current* scaling, or taken from earlier steps with *delayed* scaling (NVIDIA/TransformerEngine
# user guide, "Using FP8"; pytorch/ao float8 calls the first dynamic), then it is read, scaled and
# written in one byte per element. With a scale per *row*, products that contract different dims
# cast the same operand separately (torchao/float8/README.md, "rowwise"). The casts are ops like any
# other: producers are fused into them, and a weight that is stored sharded is gathered in the
# narrower dtype.
#
# The products are those of two operands, one of which is a weight or whose result is a weight
# gradient, inside a loop over layers and in a 16-bit format: not the head, not the router, which is
# float32, and not the core of attention. A cast to 16 or 32 bits has no scale and no largest
# element to find.

_PRODUCTS: frozenset[str] = frozenset({"dot_general", "ragged_dot_general"})
_HALF: frozenset[str] = frozenset({"bfloat16", "float16"})


def quantised(
    step: StepGraph,
    colours: tuple[LogicalAxes, ...],
    dtype: str,
    *,
    delayed: bool,
    rows: bool = False,
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step with products of layer weights in another dtype.

    Args:
        dtype: dtype of the operands of those products.
    """
    graph, weights, gradients = step.graph, step.weights(), step.gradient_like()
    scaled = FORMATS[dtype].scaled
    inputs = _HALF if scaled else {"float32", *_HALF} - {dtype}
    casts = _Casts(graph, colours, searched=scaled and not delayed)
    for index, op in enumerate(graph.ops):
        wide = all(graph.values[value].dtype in inputs for value in op.operands[:2])
        trained = any(value in weights for value in op.operands[:2]) or any(
            value in gradients for value in op.results
        )
        if op.kind in _PRODUCTS and wide and trained and graph.trips(op.region) > 1:
            cast = (casts.cast(value, dtype, op, index if rows else 0) for value in op.operands[:2])
            op = replace(op, operands=(*cast, *op.operands[2:]))
        casts.ops.append(op)
    return casts.applied(step)


class _Casts:
    """Ops of a step, including casts of operands, one per region and operand; with `searched`, each
    cast is preceded by a search for the largest element.
    """

    def __init__(
        self, graph: Graph, colours: tuple[LogicalAxes, ...], *, searched: bool = False
    ) -> None:
        self.values, self.colours, self.ops = list(graph.values), list(colours), list[Op]()
        self._graph, self._original_colours, self._searched = graph, colours, searched
        self._cast_of: dict[tuple[int, int, int], int] = {}

    def applied(self, step: StepGraph) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
        """The step with the casts, and the colours of its values."""
        if not self._cast_of:
            return step, self._original_colours
        changed = replace(self._graph, values=tuple(self.values), ops=tuple(self.ops))
        check(changed)
        return replace(step, graph=changed), tuple(self.colours)

    def cast(self, value: int, dtype: str, op: Op, variant: int = 0) -> int:
        """The cast of a value for the op that reads it."""
        key = value, op.region, variant
        if key not in self._cast_of:
            self._cast_of[key] = self._cast(value, dtype, op)
        return self._cast_of[key]

    def _cast(self, value: int, dtype: str, op: Op) -> int:
        shape = self._graph.values[value].shape
        operands, shapes = (value,), [shape]
        if self._searched:
            largest = self._new((), "float32", ())
            dims = tuple((factor,) for factor in range(len(shape)))
            rule = FactorRule(sizes=shape, operands=(dims,), results=((),))
            self._add(op, "reduce_max", "reduction", operands, largest, rule)
            operands, shapes = (value, largest), [shape, ()]
        result = self._new(shape, dtype, self.colours[value])
        rule = elementwise(shapes, shape)
        self._add(op, "convert_element_type", "elementwise", operands, result, rule)
        return result

    def _new(self, shape: tuple[int, ...], dtype: str, colours: LogicalAxes) -> int:
        like = self._graph.values[0]
        self.values.append(replace(like, shape=shape, dtype=dtype, path="", role="internal"))
        self.colours.append(colours)
        return len(self.values) - 1

    def _add(
        self,
        op: Op,
        kind: str,
        category: str,
        operands: tuple[int, ...],
        result: int,
        rule: FactorRule,
    ) -> None:
        """Inserts an op that reads one value at the position of another op."""
        self.ops.append(
            Op(
                kind=kind,
                operands=operands,
                results=(result,),
                category=category,
                flops=float(math.prod(self._graph.values[operands[0]].shape)),
                region=op.region,
                path=op.path,
                scope=op.scope,
                rule=rule,
            )
        )


# --------------------------------------------------------------------------------------------------
# A step whose products run in half precision throughout.
#
# JAX's autodiff multiplies a float32 cotangent with a half-precision operand in float32: the
# gradients of float32 logits and of float32 scores. Hand-written layers return gradients in the
# dtype of the value, so that these products also run in half precision (NVIDIA/Megatron-LM
# megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication;
# PyTorch's autograd of a cast).
#
# A product with one operand in half precision gets the other one cast. The router, all of whose
# operands are float32, is unchanged.


def in_half_precision(
    step: StepGraph, colours: tuple[LogicalAxes, ...]
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step with float32 operands cast if the other operand of the product is in half
    precision.
    """
    graph = step.graph
    casts = _Casts(graph, colours)
    for op in graph.ops:
        dtypes = [graph.values[value].dtype for value in op.operands[:2]]
        half = next((dtype for dtype in dtypes if dtype in _HALF), None)
        if op.kind in _PRODUCTS and half and "float32" in dtypes:
            cast = (
                casts.cast(value, half, op) if dtype == "float32" else value
                for value, dtype in zip(op.operands, dtypes, strict=False)
            )
            op = replace(op, operands=(*cast, *op.operands[2:]))
        casts.ops.append(op)
    return casts.applied(step)


# --------------------------------------------------------------------------------------------------
# Values that one loop saves for another.
#
# A loop over layers in the forward pass saves a value (`exit`), and the loop of the backward pass
# reads it (`enter`). `SavedValueRewrite` drops some of these pairs and clones the ops that
# recompute the values.

#: Categories whose results are rematerialised.
RECOMPUTABLE: frozenset[str] = frozenset({"elementwise", "movement"})
#: Saved values below this share of the bytes that a loop saves are ignored: row statistics.
_NEGLIGIBLE = 0.005


@dataclass(frozen=True, kw_only=True)
class SavedPair:
    """A value that one loop saves and another reads; `exit` and `enter` are op indices."""

    value: int
    exit: int
    enter: int


def saved_pairs(graph: Graph) -> list[SavedPair]:
    exits = {op.results[0]: index for index, op in enumerate(graph.ops) if op.kind == "exit"}
    return [
        SavedPair(
            value=graph.ops[exits[op.operands[0]]].operands[0],
            exit=exits[op.operands[0]],
            enter=index,
        )
        for index, op in enumerate(graph.ops)
        if op.kind == "enter" and op.operands[0] in exits
    ]


#: Saved results of element-wise ops that are recomputed: none, those that no matmul reads in the
#: other loop, or all.
Elementwise = Literal["none", "but operands", "all"]


class SavedValueRewrite:
    """Rewrites the values that one loop saves for another."""

    def __init__(
        self,
        step: StepGraph,
        colours: tuple[LogicalAxes, ...],
        forward: int,
        backward: int,
        recomputed: frozenset[int],
        elementwise: Elementwise,
        named: frozenset[int],
        by_quotient: bool,
    ) -> None:
        graph = step.graph
        self._graph = graph
        self._weights = frozenset(step.weights())
        self._forward = forward
        self._backward = backward
        self._by_quotient = by_quotient
        self._rematerialised, self._elementwise, self._named = (recomputed, elementwise, named)
        self._values, self._colours = list(graph.values), list(colours)
        self._producers = graph.producers()
        pairs = [
            pair
            for pair in saved_pairs(graph)
            if (graph.ops[pair.exit].region, graph.ops[pair.enter].region) == (forward, backward)
        ]
        self._saved = {pair.value: graph.ops[pair.enter].results[0] for pair in pairs}
        total = sum(graph.values[pair.value].bytes for pair in pairs)
        dropped = [pair for pair in pairs if self._replaceable(pair, total * _NEGLIGIBLE)]
        self._still_saved = {
            value: loaded
            for value, loaded in self._saved.items()
            if value not in {pair.value for pair in dropped}
        }
        self._dropped = dropped
        self._exits: list[Op] = []
        self._clones: list[Op] = []
        self._copies: dict[int, int] = {}

    def _replaceable(self, pair: SavedPair, small: float) -> bool:
        """True if the other loop recomputes a saved value."""
        maker = self._producers.get(pair.value)
        if (
            maker is None
            or pair.value in self._named
            or self._graph.values[pair.value].bytes < small
        ):
            return False
        op = self._graph.ops[maker]
        if maker in self._rematerialised:
            return True
        if pair.value in self._weights:
            return False
        return (
            self._elementwise != "none"
            and op.category in RECOMPUTABLE
            and op.region == self._forward
            and (
                self._elementwise == "all"
                or not self._feeds_matmul(self._graph.ops[pair.enter].results[0])
            )
        )

    def _feeds_matmul(self, value: int) -> bool:
        """True if a matmul or an attention kernel reads a value, directly or through views and
        casts.
        """
        views = {value}
        for op in self._graph.ops:
            if op.region == self._backward and views.intersection(op.operands):
                if op.category in ("matmul", "opaque", "convolution"):
                    return True
                if op.category == "movement" or op.kind == "convert_element_type":
                    views.update(op.results)
        return False

    def rewritten(self) -> tuple[Graph, tuple[LogicalAxes, ...]]:
        """The graph and the names of its values; unchanged if the rewrite saves nothing or does not
        apply.
        """
        before = self._graph, tuple(self._colours)
        swapped = {
            self._graph.ops[pair.enter].results[0]: self._in_backward(pair.value)
            for pair in self._dropped
        }
        removed = sum(self._graph.values[pair.value].bytes for pair in self._dropped)
        if not swapped or sum(self._values[op.operands[0]].bytes for op in self._exits) >= removed:
            return before
        removed_ops = {index for pair in self._dropped for index in (pair.exit, pair.enter)}
        last_exit = max(pair.exit for pair in self._dropped)
        first_enter = min(pair.enter for pair in self._dropped)
        ops: list[Op] = []
        for index, op in enumerate(self._graph.ops):
            if index == first_enter:
                entering = [clone for clone in self._clones if clone.kind == "enter"]
                ops += entering
            if index not in removed_ops:
                ops.append(
                    replace(op, operands=tuple(swapped.get(value, value) for value in op.operands))
                )
            if index == last_exit:
                ops += self._exits
        computed = [clone for clone in self._clones if clone.kind != "enter"]
        position = (
            max(
                index
                for index, op in enumerate(ops)
                if op.kind == "enter" and op.region == self._backward
            )
            + 1
        )
        graph = prune(
            replace(
                self._graph,
                values=tuple(self._values),
                ops=(*ops[:position], *computed, *ops[position:]),
            )
        )
        check(graph)
        return graph, tuple(self._colours)

    def _in_backward(self, value: int) -> int:
        """The index of a value in the other loop, saved or rematerialised."""
        if value in self._still_saved:
            return self._still_saved[value]
        maker = self._producers.get(value)
        if maker is None or self._result_region(self._graph.ops[maker]) != self._forward:
            return value
        if value not in self._copies:
            op = self._graph.ops[maker]
            if op.region != self._forward:  # of a loop inside
                self._save(value, op)
            elif (
                self._by_quotient
                and maker not in self._rematerialised
                and (quotient := self._quotient(value)) is not None
            ):
                self._compute_from_quotient(value, quotient)
            elif op.category in RECOMPUTABLE or maker in self._rematerialised:
                self._compute(op)
            elif op.kind == "enter":
                self._copies[value] = self._new(value)
                self._clones.append(
                    replace(op, results=(self._copies[value],), region=self._backward)
                )
            else:
                self._save(value, op)
        return self._copies[value]

    def _result_region(self, op: Op) -> int:
        """The region that the results of an op belong to."""
        return self._graph.regions[op.region].parent if leaves_loop(op) else op.region

    def _compute(self, op: Op) -> None:
        operands = tuple(self._in_backward(operand) for operand in op.operands)
        results = tuple(self._new(result) for result in op.results)
        self._copies.update(zip(op.results, results, strict=True))
        self._clones.append(replace(op, operands=operands, results=results, region=self._backward))

    def _quotient(self, value: int) -> tuple[Op, int] | None:
        """A division of a value whose result, or a cast of it, is saved: a softmax, whose result
        the backward kernel reads.
        """
        for op in self._graph.ops:
            if op.kind == "div" and op.region == self._forward and op.operands[0] == value:
                casts = [
                    cast.results[0]
                    for cast in self._graph.ops
                    if cast.kind == "convert_element_type" and cast.operands == op.results
                ]
                results = (*op.results, *casts)
                saved = next((result for result in results if result in self._still_saved), None)
                if saved is not None:
                    return op, saved
        return None

    def _compute_from_quotient(self, value: int, quotient: tuple[Op, int]) -> None:
        """Recomputes a value as quotient times divisor."""
        division, saved = quotient
        divisor = self._in_backward(division.operands[1])
        self._copies[value] = self._new(value)
        self._clones.append(
            replace(
                division,
                kind="mul",
                operands=(self._still_saved[saved], divisor),
                results=(self._copies[value],),
                region=self._backward,
            )
        )

    def _save(self, value: int, op: Op) -> None:
        """Saves a value: a new stack that the first loop fills and the other reads."""
        shape = self._graph.values[value].shape
        trips = self._graph.regions[self._forward].trips
        stacked = len(self._values)
        self._values.append(replace(self._graph.values[value], shape=(trips, *shape)))
        self._colours.append((None, *self._colours[value]))
        loaded = self._copies[value] = self._new(value)
        slices = tuple((factor,) for factor in range(1, len(shape) + 1))
        stack = ((0,), *slices)
        sizes = (trips, *shape)
        self._exits.append(
            Op(
                kind="exit",
                operands=(value,),
                results=(stacked,),
                category="boundary",
                region=self._forward,
                path=op.path,
                scope=op.scope,
                rule=FactorRule(
                    sizes=sizes, operands=(slices,), results=(stack,), whole=frozenset({0})
                ),
            )
        )
        self._clones.append(
            Op(
                kind="enter",
                operands=(stacked,),
                results=(loaded,),
                category="boundary",
                region=self._backward,
                path=op.path,
                scope=op.scope,
                rule=FactorRule(
                    sizes=sizes, operands=(stack,), results=(slices,), whole=frozenset({0})
                ),
            )
        )

    def _new(self, value: int) -> int:
        self._values.append(replace(self._graph.values[value], role="internal", path=""))
        self._colours.append(self._colours[value])
        return len(self._values) - 1


# --------------------------------------------------------------------------------------------------
# Memory according to a framework, in addition to, or in place of, that of the program.
#
# Facts of a `FrameworkProfile` about memory that do not rewrite the program: extra copies of the
# attention kernel, layer results offloaded to host memory, matmul inputs that stay gathered along
# the sequence, and logits of a loss that is computed op by op.

#: Layers whose saved results are in transit to or from host memory: one is written or read while
#: the next is computed.
_IN_TRANSIT = 2


@dataclass(frozen=True, kw_only=True)
class LiveRange:
    """The live range of a value.

    Attributes:
        value: index of the value.
        part: see `Resident`.
        birth: index of the first op of the live range.
        death: index of the last.
        ratio: bytes of memory over those of the value.
        kernel: the attention kernel inside which the value exists, with the heads of one device;
            None for values outside of kernels.
        all_heads: True if the value exists only if the heads do not divide among the devices, so
            that each device has all of them.
        readers: indices of the matmuls that have the value with all rows of the sequence, if tensor
            shards it along the sequence elsewhere: as an operand, gathered, or as partial sums of
            their result. (): the value in its own sharding.
        over_tensor: True if the value exists only if tensor shards its last dim, False if it does
            only where tensor does not.
    """

    value: int
    part: str
    birth: int
    death: int
    ratio: float = 1.0
    kernel: int | None = None
    all_heads: bool = False
    readers: tuple[int, ...] = ()
    over_tensor: bool | None = None


def filled_shares(
    graph: Graph, colours: Sequence[LogicalAxes], batch: str | None
) -> dict[int, float]:
    """Dispatched rows -> the share of them that can be filled: operands and results of grouped
    matmuls over tokens, element-wise functions of them, and those of them that loops save.
    """

    def of_tokens(value: int) -> bool:
        return any(batch in (colour or "").split("+") for colour in colours[value])

    shares: dict[int, float] = {}
    pending: list[tuple[int, float]] = []
    capped = capacity_layers(graph)
    for op in graph.ops:
        if op.kind in GROUPED:
            rows = [
                value
                for value in (*op.operands, *op.results)
                if "float" in graph.values[value].dtype and of_tokens(value)
            ]
            pending += [
                (
                    value,
                    (
                        capped[op.region].assignments / row_count(graph, value)
                        if op.region in capped
                        else 1.0
                    ),
                )
                for value in rows
            ]
    neighbours: dict[int, list[int]] = defaultdict(list)
    for op in graph.ops:
        if op.category == "elementwise" or op.kind in ("enter", "exit"):
            same_rows = [
                value
                for value in (*op.operands, *op.results)
                if op.category != "elementwise"
                or graph.values[value].shape == graph.values[op.results[0]].shape
            ]
            for value in same_rows:
                neighbours[value] += same_rows
    while pending:
        value, share = pending.pop()
        if value not in shares:
            shares[value] = share
            pending += [(neighbour, share) for neighbour in neighbours[value]]
    return shares


class ProfileMemory:
    """The memory of values under a framework profile."""

    def __init__(self, facts: Facts, profile: FrameworkProfile) -> None:
        self._facts, self._profile = facts, profile
        self._filled_shares = (
            filled_shares(facts.graph, facts.colours, facts.batch) if facts.routes else {}
        )
        self._shares: dict[int, float] = {}
        self._gathered: set[int] = set()
        self._zeros = (
            frozenset(_zeros(facts.graph)) if profile.saves != "traced" else frozenset[int]()
        )
        exits = [op for op in facts.graph.ops if op.kind == "exit"]
        if not (profile.offloaded or profile.attention_copies or profile.gathered_inputs == "kept"):
            return
        for region in sorted({op.region for op in exits if facts.layers.segment(op.region) >= 0}):
            results = named_results(facts.graph, region, facts.weights)
            offloaded = frozenset[int]().union(*(results[name] for name in profile.offloaded))
            statistics = {
                op.results[1]
                for op in facts.graph.ops
                if op.kind == FORWARD and op.region == region
            }
            inputs = (
                set(LayerSearch(facts.graph, region, frozenset(facts.weights)).matmuls.values())
                if profile.gathered_inputs == "kept"
                else set[int]()
            )
            for op in (op for op in exits if op.region == region):
                (inside,) = op.operands
                if inside in offloaded:
                    self._shares[op.results[0]] = min(1.0, _IN_TRANSIT / facts.trips[region])
                elif inside in results["context"] - statistics:
                    self._shares[op.results[0]] = 1.0 + profile.attention_copies
                if inside in inputs:
                    self._gathered.add(op.results[0])

    def spec(self, value: int, choice: Choice) -> Spec:
        """The sharding of a saved value."""
        return self._facts.value_spec(
            value, replace(choice, sequence=None) if value in self._gathered else choice
        )

    def is_unchanged(self, value: int) -> bool:
        """True if a value is saved in its own sharding and takes exactly its bytes."""
        return value not in self._gathered and value not in self._filled_shares

    def padding(self, value: int, choice: Choice) -> float:
        """Memory of a value over its bytes; more than 1 for dispatched rows, whose messages are
        padded.
        """
        return (
            self._facts.token_exchange.padding * self._filled_shares[value]
            if choice.expert is not None and value in self._filled_shares
            else 1.0
        )

    def live_ranges(self, live_ranges: Sequence[LiveRange]) -> list[LiveRange]:
        """The live ranges, adjusted by the profile."""
        shared = [
            replace(live, ratio=live.ratio * self._shares.get(live.value, 1.0))
            for live in live_ranges
            if live.value not in self._zeros
        ]
        return (
            shared
            if self._profile.logit_bytes is None
            else self._with_loss(shared, self._profile.logit_bytes)
        )

    def _with_loss(self, live_ranges: Sequence[LiveRange], size: float) -> list[LiveRange]:
        """Live ranges in which logits and values of equal size, outside of the layers, take `size`
        bytes per element until the head's backward pass begins, and afterwards only their gradient.
        """
        graph, roots = self._facts.graph, self._facts.fusion.roots
        producers = graph.producers()

        def elements(live: LiveRange) -> int:
            return math.prod(graph.values[live.value].shape)

        outside = [
            live
            for live in live_ranges
            if live.part in ("saved", "temporary")
            and live.value in producers
            and graph.values[live.value].shape
            and self._facts.layers.segment(graph.ops[producers[live.value]].region)
            == OUTSIDE_LAYERS
        ]
        matmuls = [
            live for live in outside if graph.ops[producers[live.value]].category == "matmul"
        ]
        if not matmuls:
            return list(live_ranges)
        logits = max(matmuls, key=elements)
        logit_sized = [live for live in outside if elements(live) == elements(logits)]
        large, last = {live.value for live in logit_sized}, max(live.death for live in logit_sized)
        readers = [
            (i, op)
            for i, op in enumerate(graph.ops)
            if op.category == "matmul"
            and any(large.intersection(roots[value]) for value in op.operands)
        ]
        backward_start = min((i for i, _ in readers), default=last + 1)
        narrow = min(
            (graph.values[value].itemsize for _, op in readers for value in op.operands), default=0
        )
        value = graph.values[logits.value]
        retained = replace(
            logits,
            part="temporary",
            birth=min(live.birth for live in logit_sized),
            death=backward_start - 1,
            ratio=size / value.itemsize,
        )
        gradient = replace(
            retained, birth=backward_start, death=last, ratio=min(size, narrow) / value.itemsize
        )
        return [
            *(live for live in live_ranges if live not in logit_sized),
            retained,
            *([gradient] if last >= backward_start else []),
        ]


def _zeros(graph: Graph) -> list[int]:
    """Results of ops that broadcast a constant: zeros that gradients are added to, which
    hand-written layers fill on demand.
    """
    return [
        op.results[0]
        for op in graph.ops
        if op.kind == "broadcast_in_dim"
        and all(graph.values[value].role == "constant" for value in op.operands)
    ]


# --------------------------------------------------------------------------------------------------
# Values that hand-written layers save for the backward pass.
#
# JAX's autodiff saves every value that a derivative reads, including each step of a norm.
# Hand-written layers save the operands of their matmuls and the inputs of their non-linear
# functions, and recompute the rest inside their backward kernels: for a layer of a GPT that is the
# list of arXiv:2205.05198, section 4.1, which adds up to s b h (34 + 5 a s / h) bytes with dropout.
#
# `save_operands` does that to a step whose layers are loops: a saved result of element-wise ops
# that no matmul reads in the backward pass is rematerialised from results of matmuls, row
# statistics and the layer's input, which are saved in its place if they are not yet. Nothing
# changes if these would take as much memory. The backward pass of a softmax reads its result, not
# the exponentials.
#
# If no compiler fuses chains (`eager`), the product of two branches saves both operands, as every
# op of PyTorch's autograd does; norms and rotary embeddings are library kernels there. XLA does the
# same to layers that are written one after the other (`written_out`), as nothing stacks what they
# save: and where matmuls compute element-wise operands, it saves no operands either. The backward
# pass of a softmax then reads the scores, of which it computes the exponentials again. `save_named`
# goes further: it saves only the named results of a layer (`shardlib.cost.facts`), and
# rematerialises the rest.


def save_operands(
    step: StepGraph, colours: tuple[LogicalAxes, ...], *, eager: bool = False
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step with operands of matmuls and inputs of non-linear functions saved, and no other
    results of element-wise ops.
    """
    for forward, backward in _loop_pairs(step.graph):
        operands = _branch_operands(step.graph, forward) if eager else frozenset[int]()
        step, colours = _rebuilt(
            step, colours, forward, backward, elementwise="but operands", named=operands
        )
    return step, colours


def written_out(
    step: StepGraph, colours: tuple[LogicalAxes, ...], *, fuses_operands: bool
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step with what the compiler saves of layers that are written one after the other.

    Their stacks are not written, so what is cheap is recomputed where it is read
    (`benchmarks/written_layers.py` has such a decoder beside both compilers).

    Args:
        fuses_operands: as in `CompilerTraits`.
    """
    graph = step.graph
    stacks = {value for value, dim in zip(graph.inputs, step.inputs, strict=True) if dim.stacked}
    regions = {op.region for op in graph.ops if op.kind == "enter" and op.operands[0] in stacks}
    for forward, backward in _loop_pairs(graph):
        if forward in regions:
            elementwise = "all" if fuses_operands else "but operands"
            step, colours = _rebuilt(
                step, colours, forward, backward, elementwise=elementwise, by_quotient=False
            )
    return step, colours


def save_named(
    step: StepGraph, colours: tuple[LogicalAxes, ...], saved: Collection[str]
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step that saves only the named results of a layer, and its input."""
    for forward, backward in _loop_pairs(step.graph):
        results = named_results(step.graph, forward, step.weights())
        named = frozenset(value for name in saved for value in results[name])
        recomputed = frozenset(
            i
            for i, op in enumerate(step.graph.ops)
            if op.region == forward
            and op.category != "boundary"
            and not named.intersection(op.results)
        )
        step, colours = _rebuilt(step, colours, forward, backward, recomputed, named=named)
    return step, colours


def remat_rows(
    step: StepGraph, colours: tuple[LogicalAxes, ...]
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step with activations of routed experts rematerialised in the backward pass from the
    results of their matmuls, as `shardlib.lowering.experts` does.
    """
    for forward, backward in _loop_pairs(step.graph):
        recomputed = _after_grouped(step.graph, forward)
        if recomputed:
            step, colours = _rebuilt(step, colours, forward, backward, recomputed)
    return step, colours


def _after_grouped(graph: Graph, region: int) -> frozenset[int]:
    """Indices of the cheap ops of a loop that read results of grouped matmuls, and of those that
    broadcast masks of slots.
    """
    indices, descendants = set[int](), set[int]()
    for index, op in enumerate(graph.ops):
        if op.region != region:
            continue
        if op.kind in GROUPED:
            descendants.update(op.results)
        elif op.category in RECOMPUTABLE and (
            descendants.intersection(op.operands)
            or (has_capacity(op) and graph.values[op.results[0]].dtype == "bool")
        ):
            indices.add(index)
            descendants.update(op.results)
    return frozenset(indices)


def rematerialise_attention(
    step: StepGraph, colours: tuple[LogicalAxes, ...]
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step with attention scores and their softmax rematerialised in the backward pass:
    selective recomputation (arXiv:2205.05198, section 5).
    """
    for forward, backward in _loop_pairs(step.graph):
        recomputed = frozenset(i for core in cores(step) for i in (*core.scores, *core.chain))
        step, colours = _rebuilt(step, colours, forward, backward, recomputed)
    return step, colours


def _rebuilt(
    step: StepGraph,
    colours: tuple[LogicalAxes, ...],
    forward: int,
    backward: int,
    recomputed: frozenset[int] = frozenset(),
    *,
    elementwise: Elementwise = "none",
    named: frozenset[int] = frozenset(),
    by_quotient: bool = True,
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """The step after a rewrite by `SavedValueRewrite`."""
    rewrite = SavedValueRewrite(
        step, colours, forward, backward, recomputed, elementwise, named, by_quotient
    )
    graph, colours = rewrite.rewritten()
    return replace(step, graph=graph), colours


def _loop_pairs(graph: Graph) -> list[tuple[int, int]]:
    """Pairs of regions of loops, of which the first saves values for the second."""
    return sorted(
        {(graph.ops[pair.exit].region, graph.ops[pair.enter].region) for pair in saved_pairs(graph)}
    )


def _branch_operands(graph: Graph, region: int) -> frozenset[int]:
    """Operands of the products of two branches in a loop: values made from different matmuls by
    element-wise ops.
    """
    makers = {value: op for op in graph.ops if op.region == region for value in op.results}

    def branch(value: int) -> frozenset[int]:
        pending, seen, sources = [value], set[int](), set[int]()
        while pending:
            current = pending.pop()
            op = makers.get(current)
            if current not in seen and op is not None:
                seen.add(current)
                if op.category in RECOMPUTABLE:
                    pending.extend(op.operands)
                else:
                    sources.add(current)
        return frozenset(
            value for value in sources if makers[value].category in ("matmul", "opaque")
        )

    operands = set[int]()
    for op in graph.ops:
        if op.kind == "mul" and op.region == region:
            left, right = (branch(value) for value in op.operands)
            if left and right and not left & right:
                operands.update(op.operands)
    return frozenset(operands)


# --------------------------------------------------------------------------------------------------
# A step as a training framework runs it.
#
# A framework with fused attention runs different kernels from the traced program, and one with
# hand-written layers saves different values for the backward pass. Both are rewrites of the step
# graph, so that kernels, live ranges and layouts are computed as for any graph.


def fused(step: StepGraph, block: int = 128) -> StepGraph:
    """The step with every core of attention as one forward kernel, and one backward kernel per set
    of dims that gradients are summed over.
    """
    tried: set[int] = set()
    while True:
        graph = step.graph
        core = next(
            (core for core in cores(step) if graph.ops[core.sinks[0]].results[0] not in tried), None
        )
        if core is None:
            return step
        tried.add(graph.ops[core.sinks[0]].results[0])
        step = _with_kernels(step, core, block) or step


def _with_kernels(step: StepGraph, core: Core, block: int) -> StepGraph | None:
    """The step with one core as kernels; None if an op outside needs values that they do not
    write.
    """
    graph = step.graph
    kernels = _kernels(graph, core, block)
    if kernels is None:
        return None
    results = {value for ops in kernels.values() for op in ops for value in op.results}
    kernel_operands = {operand for ops in kernels.values() for op in ops for operand in op.operands}
    producers = graph.producers()
    removed_ops = {*core.activation_matmuls, *core.chain, *core.sinks}
    for value in kernel_operands:  # the exit and enter ops of the statistic stay
        while (maker := producers.get(value)) in core.chain and value not in results:
            removed_ops.discard(maker)
            (value,) = graph.ops[maker].operands
    ops = [
        op
        for index, old in enumerate(graph.ops)
        for op in kernels.get(index, () if index in removed_ops else (old,))
    ]
    rewritten = prune(replace(graph, ops=tuple(ops)))
    try:
        check(rewritten, before=graph)
    except AssertionError:
        return None
    return replace(step, graph=rewritten)


def _kernels(graph: Graph, core: Core, block: int) -> dict[int, tuple[Op, ...]] | None:
    """The kernels of a core, by the index of the op that they replace; None if the statistic does
    not reach the gradients.
    """
    matmuls = core.activation_matmuls
    joined = FactorClasses(graph, {*matmuls, *core.chain, *core.sinks})
    rows = joined.classes(core.sums, graph.ops[core.sums].rule.summed)
    keys = math.prod(joined.size(index) for index in rows)
    share = causal_share(keys, block, core.window) if core.causal else 1.0
    inner = {value for i in (*matmuls, *core.chain) for value in graph.ops[i].results}
    mixing, gradients = core.sinks[0], core.sinks[1:]
    statistic, statistic_read = _statistic(graph, core, {graph.ops[i].region for i in gradients})
    if statistic_read is None and gradients:
        return None
    contracted = rows.union(*(joined.classes(i, graph.ops[i].rule.summed) for i in matmuls))

    def kernel(
        kind: str,
        position: int,
        reading: Iterable[int],
        counted: Iterable[int],
        results: tuple[int, ...],
        extra: tuple[int, ...],
        summed: frozenset[int],
    ) -> Op:
        operands = dict.fromkeys(
            [value for i in reading for value in graph.ops[i].operands if value not in inner]
        )
        operands |= dict.fromkeys((*extra, *(core.side_inputs if kind == FORWARD else ())))
        return replace(
            graph.ops[position],
            kind=kind,
            category="opaque",
            operands=tuple(operands),
            results=results,
            rule=joined.rule(tuple(operands), results, summed=summed, unsharded=contracted),
            flops=share * sum(graph.ops[i].flops for i in counted),
        )

    forward = kernel(
        FORWARD,
        mixing,
        (*core.scores, mixing),
        (*core.scores, mixing),
        (graph.ops[mixing].results[0], statistic),
        (),
        frozenset(),
    )
    kernels: dict[int, tuple[Op, ...]] = {mixing: (forward,)}
    groups: dict[frozenset[int], list[int]] = {}
    for sink in gradients:
        groups.setdefault(joined.classes(sink, graph.ops[sink].rule.summed), []).append(sink)
    for number, (summed, sinks) in enumerate(groups.items()):
        assert statistic_read is not None
        results = tuple(graph.ops[i].results[0] for i in sinks)
        op = kernel(
            BACKWARD,
            sinks[0],
            (*(i for i in matmuls if i not in core.scores), *gradients),
            (*sinks, *(matmuls if number == 0 else ())),
            results,
            (statistic_read,),
            summed,
        )
        kernels[gradients[0]] = (*kernels.get(gradients[0], ()), op)
    return kernels


def _statistic(graph: Graph, core: Core, regions: set[int]) -> tuple[int, int | None]:
    """The value of the row sums where it is computed, and the value that the gradients read."""
    (row_sum,) = graph.ops[core.sums].results
    home = graph.ops[core.sums].region
    if not regions or regions == {home}:
        return row_sum, row_sum
    for index in core.chain:
        op = graph.ops[index]
        if op.kind == "exit" and _descends(graph, core, op.operands[0], row_sum):
            for entry in core.chain:
                if (
                    graph.ops[entry].kind == "enter"
                    and graph.ops[entry].operands == op.results
                    and graph.ops[entry].region in regions
                ):
                    return op.operands[0], graph.ops[entry].results[0]
    return row_sum, None


def _descends(graph: Graph, core: Core, value: int, source: int) -> bool:
    """True if a value is a view of another."""
    producers = graph.producers()
    while value != source:
        maker = producers.get(value)
        if maker not in core.chain or graph.ops[maker].category != "movement":
            return False
        value = graph.ops[maker].operands[0]
    return True


def rewritten(
    step: StepGraph,
    colours: tuple[LogicalAxes, ...],
    profile: FrameworkProfile,
    *,
    policy: str = "none",
    fuses_operands: bool = False,
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """A step graph under a remat policy as a framework runs it, and the colours of its values."""
    if profile.attention in ("fused", "blocks"):
        step = fused(step, profile.attention_block)
    if profile.attention == "rematerialised":
        step, colours = rematerialise_attention(step, colours)
    if profile.kept or profile.offloaded:
        step, colours = save_named(step, colours, (*profile.kept, *profile.offloaded))
    elif profile.saves in ("operands", "eager"):
        step, colours = save_operands(step, colours, eager=profile.saves == "eager")
    elif profile.layers == "written" and policy == "none":
        step, colours = written_out(step, colours, fuses_operands=fuses_operands)
    if profile.products == "half":
        step, colours = in_half_precision(step, colours)
    if profile.matmul_dtype:
        step, colours = quantised(
            step,
            colours,
            profile.matmul_dtype,
            delayed=profile.scaling == "delayed",
            rows=profile.scaling == "rows",
        )
    return step, colours
