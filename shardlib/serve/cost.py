"""Seconds and bytes of serving: what a step of prompts and next tokens costs.

Layers that keep a window of every request need few pages.

Layers that keep the same tokens are a cache group, with pages of its own. Groups are named by their
windows, the furthest first; 0 keeps all tokens.

>>> ordered([1024, 0, 1024], longest=4096), ordered([1024, 0], longest=512)
((0, 1024), (0,))
>>> [group_of(window, (0, 1024, 16)) for window in (0, 1024, 16, 17, 4096)]
[0, 1, 2, 1, 0]
>>> pages_each((0, 8), first=64, slots=2, budget=6, size=4)
(64, 8)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from shardlib.cost.collectives import LinearCost
from shardlib.cost.experts import GROUPED
from shardlib.errors import ArgumentError, raise_all
from shardlib.graph import ITEMSIZE, Graph, Op
from shardlib.machines.chips import Chip
from shardlib.propagation.colours import UnionFind, tie_graph
from shardlib.untrusted.data import JsonObject

# --------------------------------------------------------------------------------------------------
# The figures of serving that were learned from published runs.
#
# They were fitted to rows of four sources by `python -m benchmarks published_serving --fit`, which
# also says how well each source is predicted by figures that were fitted to the others. Rates of
# chips and links are those of the catalogue; a share says how much of one a step reaches.

#: The file beside this one that has them.
FILE = "constants.json"


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Factors between a step and the data sheets of its machine. Shares are above 0 and at most 1.

    Attributes:
        matmul: share of the peak FLOP/s that matmuls of many tokens sustain.
        eight_bit: the same for those in 8-bit formats.
        memory: share of the memory's rate at which weights are read.
        cache: the same for keys and values.
        attention: share of the peak FLOP/s of attention of prompts.
        moved: times that the activations of matmuls are moved, element-wise work beside them
            included.
        latency: times as long as the catalogue says that an all-reduce of nothing takes.
        links: share of the links' rate that all-reduces reach.
        layer_s: fixed seconds of every layer of a step: launches, synchronisation.
        step_s: fixed seconds of a step: launch, sampling, the host.
        row_s: seconds of a step for each request that gets a token: sampling and the host.
    """

    matmul: float
    eight_bit: float
    memory: float
    cache: float
    attention: float
    moved: float
    latency: float
    links: float
    layer_s: float
    step_s: float
    row_s: float

    def __post_init__(self) -> None:
        shares = ("matmul", "eight_bit", "memory", "cache", "attention", "links")
        failures = [
            f"{field.name} is {getattr(self, field.name)!r}"
            for field in fields(self)
            if not 0 < getattr(self, field.name) <= (1 if field.name in shares else 1e6)
        ]
        if failures:
            raise_all(ArgumentError, "constants of serving are not usable", failures)


@lru_cache(maxsize=1)
def learned() -> Constants:
    """The constants that come with shardlib."""
    text = files("shardlib.serve").joinpath(FILE).read_text()
    return Constants(**json.loads(text)["constants"])


def ordered(windows: Iterable[int], *, longest: int) -> tuple[int, ...]:
    """The cache groups of layers, the one that keeps the most tokens first."""
    groups = {window if window < longest else 0 for window in windows} or {0}
    return tuple(sorted(groups, key=lambda window: -window if window else -longest - 1))


def group_of(window: int, windows: Sequence[int]) -> int:
    """Index of the cache group of a layer: the smallest window that covers its own; the first where
    none does.
    """
    enough = (number for number, group in enumerate(windows) if not group or 0 < window <= group)
    return max(enough, default=0)


def needed(*, window: int, budget: int, size: int, slots: int = 1) -> int:
    """Upper bound of the pages that `slots` requests need at a time.

    A request that has n tokens to compute needs the keys of window - 1 + n tokens, which are on
    (window - 1 + n - 2) // size + 2 pages at most; and rounded down, the sum is no less than the
    sum of what is rounded down.
    """
    return max(slots * (window - 3) + budget, 0) // size + 2 * slots


def pages_each(
    windows: Sequence[int], *, first: int, slots: int, budget: int, size: int, drafts: int = 0
) -> tuple[int, ...]:
    """Pages of each cache group: of the first as many as are given, of another no more than all
    slots need at a time.
    """
    return (
        first,
        *(
            min(first, needed(window=window + drafts, budget=budget, size=size, slots=slots))
            for window in windows[1:]
        ),
    )


# --------------------------------------------------------------------------------------------------
# The work of the forward pass of one token: what it reads, computes and keeps.
#
# Sizes are of the whole model. Dims have colours: dims of one colour are sharded together or not
# at all (`shardlib.propagation.colours`).

#: A dim of an array: its size, and its colour; "" where nothing else has it.
Dim = tuple[int, str]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """An array of the model.

    Attributes:
        path: tree path.
        dims: of the array.
        dtype: as it is stored.
        multiplied: whether a matmul reads it; others are looked up or element-wise.
        experts: how many experts it holds, of which a token visits some; 0 for other weights.
    """

    path: str
    dims: tuple[Dim, ...]
    dtype: str
    multiplied: bool = False
    experts: int = 0

    @property
    def elements(self) -> int:
        """Elements of the whole array."""
        return math.prod(size for size, _ in self.dims)

    @property
    def itemsize(self) -> int:
        """Bytes of an element as stored."""
        return ITEMSIZE.get(self.dtype, 4)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matmul of a token with weights.

    Attributes:
        flops: of one token, in all layers that run it.
        dims: colours that cut its work.
        read: dims of what it reads of the token.
        written: dims of its result.
        itemsize: bytes of an element of the result.
        runs: layers that run it.
        summed: colours that leave partial sums where they are sharded.
        added_to: number of the sum of partial results that it is a part of; matmuls that are added
            up before anything else reads them have one number, and one all-reduce.
    """

    flops: float
    dims: tuple[Dim, ...]
    read: tuple[Dim, ...]
    written: tuple[Dim, ...]
    itemsize: float
    runs: int
    summed: tuple[Dim, ...]
    added_to: int


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A row of a table, such as an embedding; a sharded table leaves partial sums.

    Attributes:
        summed: dims of the rows of the table.
        written: dims of the result.
        itemsize: bytes of an element of the result.
        runs: layers that run it.
    """

    summed: tuple[Dim, ...]
    written: tuple[Dim, ...]
    itemsize: float
    runs: int


@dataclass(frozen=True, kw_only=True)
class AttentionLayers:
    """Layers of a call of attention that see as many tokens.

    Attributes:
        layers: that run it.
        heads: of queries.
        width: products of a query with a key and a weight with a value, multiplications a head.
        kept: elements that are kept of a token, for each array: those of a key head, and how many
            key heads there are, 1 where there are none.
        dtype: of what is kept.
        window: tokens that a token sees; 0 for all before it.
    """

    layers: int
    heads: int
    width: int
    kept: tuple[tuple[int, int], ...]
    dtype: str
    window: int = 0

    @property
    def elements(self) -> int:
        """Elements that are kept of a token in one layer."""
        return sum(size * heads for size, heads in self.kept)

    def kept_bytes(self, cache: str) -> float:
        """Bytes that are kept of a token in one layer."""
        scales = 4.0 * sum(heads for _, heads in self.kept) if cache == "int8" else 0.0
        return stored_itemsize(cache, self.dtype) * self.elements + scales


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A forward pass, of one token.

    Attributes:
        name: of the model.
        weights: its arrays.
        products: its matmuls with weights.
        lookups: its rows of tables.
        attention: its calls of attention.
        vocab: logits of a token.
        chosen: experts that a token visits, in a layer that has any.
        dtype: of the matmuls that dominate.
    """

    name: str
    weights: tuple[Weight, ...]
    products: tuple[Product, ...]
    lookups: tuple[Lookup, ...]
    attention: tuple[AttentionLayers, ...]
    vocab: int
    chosen: int = 0
    dtype: str = "bfloat16"

    @property
    def layers(self) -> int:
        """Calls of attention of one token."""
        return sum(call.layers for call in self.attention)

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(weight.elements for weight in self.weights)

    def kept_bytes(self, cache: str, tokens: int = 1) -> float:
        """Bytes that are kept of a request in all layers: of its last tokens, where these have a
        window.
        """
        return float(
            sum(
                call.layers * call.kept_bytes(cache) * min(tokens, call.window or tokens)
                for call in self.attention
            )
        )


#: Words for how weights and cache are stored, and bytes of an element; "model" is as the model has
#: it.
STORED: dict[str, int] = {"bf16": 2, "int8": 1, "fp8": 1}


def stored_itemsize(word: str, dtype: str) -> float:
    """Bytes of an element of weights or cache."""
    return float(STORED.get(word, ITEMSIZE.get(dtype, 4)))


#: Ops that hand a partial sum on as it is.
_THROUGH = frozenset({"convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "copy"})
_ADDED = frozenset({"add", "add_any", "sub"})


def served_model(
    graph: Graph, attention: Sequence[AttentionLayers], *, name: str, vocab: int
) -> ServedModel:
    """Returns what a forward pass reads, computes and keeps per token."""
    return _Reader(graph).model(attention, name, vocab)


class _Reader:
    """Walks over the ops of a graph once."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.classes = graph, UnionFind()
        tie_graph(self.classes, "", graph)
        self.counts: dict[object, int] = {}
        #: Values that are made of weights alone, and which weights these are.
        self.of: dict[int, frozenset[int]] = {
            index: frozenset({index})
            for index in graph.inputs
            if graph.values[index].role in ("parameter", "state")
        }
        self.experts: dict[int, int] = {}
        self.multiplied: set[int] = set()
        self.chosen = 0
        #: Values that are partial sums where something is sharded, and the number of the sum.
        self.partial: dict[int, int] = {}
        self.sums: dict[int, int] = {}
        self.products: list[tuple[Op, int, tuple[Dim, ...], int]] = []
        self.lookups: list[Lookup] = []

    def model(self, attention: Sequence[AttentionLayers], name: str, vocab: int) -> ServedModel:
        for op in self.graph.ops:
            self._visit(op)
        return ServedModel(
            name=name,
            weights=tuple(self._weight(index) for index in self.graph.inputs if index in self.of),
            products=tuple(self._product(*product) for product in self.products),
            lookups=tuple(self.lookups),
            attention=tuple(attention),
            vocab=vocab,
            chosen=self.chosen,
            dtype=self._dtype(),
        )

    def _dtype(self) -> str:
        """The dtype of what most FLOPs read of the token."""
        flops: dict[str, float] = {}
        for op, activation, *_ in self.products:
            dtype = self.graph.values[activation].dtype
            flops[dtype] = flops.get(dtype, 0.0) + op.flops * self.graph.trips(op.region)
        return max(flops, key=lambda dtype: flops[dtype], default="bfloat16")

    def _visit(self, op: Op) -> None:
        weights = [value for value in op.operands if value in self.of]
        others = [value for value in op.operands if value not in self.of]
        activations = [value for value in others if self.graph.values[value].role != "constant"]
        if weights and not activations:
            sources = frozenset[int]().union(*(self.of[value] for value in weights))
            self.of.update(dict.fromkeys(op.results, sources))
            return
        kind = op.kind
        if op.category in ("matmul", "convolution") or kind in GROUPED:
            if weights:
                self._multiply(op, weights)
                return
        elif kind == "gather" and op.operands[0] in self.of:
            self.lookups.append(
                Lookup(
                    summed=self._summed(op),
                    written=self._dims(op.results[0]),
                    itemsize=self.graph.values[op.results[0]].itemsize,
                    runs=self.graph.trips(op.region),
                )
            )
            return
        self._hand_on(op)

    def _multiply(self, op: Op, weights: Sequence[int]) -> None:
        behind = frozenset[int]().union(*(self.of[value] for value in weights))
        self.multiplied |= behind
        if op.kind in GROUPED:
            for value in weights:
                shape = self.graph.values[value].shape
                if len(shape) >= 3:
                    self.experts.update(dict.fromkeys(self.of[value], shape[-3]))
            self.chosen = max(self.chosen, self.graph.values[op.results[0]].shape[0])
        number = len(self.sums)
        self.sums[number] = number
        self.partial[op.results[0]] = number
        activation = next(value for value in op.operands if value not in self.of)
        self.products.append((op, activation, self._summed(op), number))

    def _hand_on(self, op: Op) -> None:
        """Sums stay partial through additions of partial sums, which are added up at once."""
        parts = [self.partial[value] for value in op.operands if value in self.partial]
        if op.kind in _ADDED and len(parts) == len(op.operands) == 2:
            first, second = (self._sum(number) for number in parts)
            self.sums[second] = first
            self.partial[op.results[0]] = first
        elif op.kind in _THROUGH and parts:
            self.partial[op.results[0]] = parts[0]

    def _sum(self, number: int) -> int:
        while self.sums[number] != number:
            number = self.sums[number]
        return number

    def _product(self, op: Op, activation: int, summed: tuple[Dim, ...], number: int) -> Product:
        trips, result = self.graph.trips(op.region), op.results[0]
        return Product(
            flops=op.flops * trips,
            dims=(*summed, *self._dims(result)),
            read=self._dims(activation),
            written=self._dims(result),
            itemsize=self.graph.values[result].itemsize,
            runs=trips,
            summed=summed,
            added_to=self._sum(number),
        )

    def _weight(self, index: int) -> Weight:
        value = self.graph.values[index]
        return Weight(
            path=value.path,
            dims=self._dims(index),
            dtype=value.dtype,
            multiplied=index in self.multiplied,
            experts=self.experts.get(index, 0),
        )

    def _summed(self, op: Op) -> tuple[Dim, ...]:
        """Dims of the operands that the op adds up over."""
        rule = op.rule
        dims: dict[str, Dim] = {}
        for (result, position, index), dim in rule.dims():
            factor = rule.major(dim)
            if not result and factor in rule.summed:
                value = op.operands[position]
                summed = self._dims(value)[index]
                dims.setdefault(summed[1], summed)
        return tuple(dims.values())

    def _dims(self, value: int) -> tuple[Dim, ...]:
        shape = self.graph.values[value].shape
        return tuple(
            (size, self._colour(value, index) if size > 1 else "")
            for index, size in enumerate(shape)
        )

    def _colour(self, value: int, index: int) -> str:
        group = self.classes.find(("", value, index))
        return f"c{self.counts.setdefault(group, len(self.counts))}"


def colours(dims: Iterable[Dim]) -> tuple[str, ...]:
    """The colours of some dims, without those of size 1."""
    return tuple(colour for _, colour in dims if colour)


# --------------------------------------------------------------------------------------------------
# The part of a model on a device where several share every layer.
#
# Keys and values are shared by all of them: by heads, and by the tokens of every page where there
# are fewer heads than devices.


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Weights of experts: a step reads those that its tokens visit.

    Attributes:
        bytes: of all of them on a device.
        count: experts of a layer.
        chosen: that a token visits.
    """

    bytes: float
    count: int
    chosen: int


@dataclass(frozen=True, kw_only=True)
class CachedLayers:
    """Keys and values that a device keeps for calls of attention.

    Attributes:
        bytes: of a token, in all layers of these calls.
        flops: of one token with one key, in all of them.
        window: tokens that a token sees; 0 for all before it.
    """

    bytes: float
    flops: float
    window: int


@dataclass(frozen=True, kw_only=True)
class ModelShard:
    """A model as one of `tensor` devices has it.

    Attributes:
        tensor: devices that share every layer.
        weights: bytes of all weights.
        read: bytes of those weights that every step reads: all but tables and experts.
        experts: weights of experts.
        flops: of one token in matmuls with weights.
        moved: bytes of activations that these read and write, of one token.
        sums: all-reduces of one token: how many, and bytes of each result.
        cached: what is kept.
        layers: calls of attention.
        vocab: logits of a token that a device has.
    """

    tensor: int
    weights: float
    read: float
    experts: tuple[Experts, ...]
    flops: float
    moved: float
    sums: tuple[tuple[int, float], ...]
    cached: tuple[CachedLayers, ...]
    layers: int
    vocab: int

    @property
    def kept(self) -> float:
        """Bytes that a device keeps of one token, in all layers."""
        return sum(entry.bytes for entry in self.cached)


def ways(dims: Iterable[Dim], cut: frozenset[str], tensor: int) -> int:
    """Number of shards of an array: along its first dim of a sharded colour, as far as it
    divides.
    """
    return next((math.gcd(size, tensor) for size, colour in dims if colour in cut), 1)


def split(
    model: ServedModel,
    cut: frozenset[str],
    tensor: int,
    *,
    weights: str,
    cache: str,
    parts: Mapping[str, int] | None = None,
) -> ModelShard:
    """The shard of a model on one of `tensor` devices.

    Args:
        parts: into how many parts each weight is cut, by path; None to follow `cut`.
    """

    def size(weight: Weight) -> float:
        itemsize = stored_itemsize(weights, weight.dtype)
        if not weight.multiplied and weights != "model":  # tables and norms are not quantised
            itemsize = min(2.0, weight.itemsize)
        if parts is not None:
            return weight.elements * itemsize / parts.get(weight.path, 1)
        return weight.elements * itemsize / ways(weight.dims, cut, tensor)

    groups: dict[int, float] = {}
    for weight in model.weights:
        if weight.experts:
            groups[weight.experts] = groups.get(weight.experts, 0.0) + size(weight)
    sums: dict[tuple[int, float], int] = {}
    for number in {product.added_to for product in model.products}:
        added = [product for product in model.products if product.added_to == number]
        last = added[-1]
        if any(ways(product.summed, cut, tensor) > 1 for product in added):
            key = last.runs, _size(last.written, cut, tensor) * last.itemsize
            sums[key] = sums.get(key, 0) + last.runs
    for lookup in model.lookups:
        if ways(lookup.summed, cut, tensor) > 1:
            key = lookup.runs, _size(lookup.written, cut, tensor) * lookup.itemsize
            sums[key] = sums.get(key, 0) + lookup.runs
    return ModelShard(
        tensor=tensor,
        weights=sum(size(weight) for weight in model.weights),
        read=sum(
            size(weight) for weight in model.weights if weight.multiplied and not weight.experts
        ),
        experts=tuple(
            Experts(bytes=nbytes, count=count, chosen=model.chosen)
            for count, nbytes in groups.items()
        ),
        flops=sum(product.flops / ways(product.dims, cut, tensor) for product in model.products),
        moved=sum(
            product.runs
            * product.itemsize
            * (_size(product.read, cut, tensor) + _size(product.written, cut, tensor))
            for product in model.products
        ),
        sums=tuple((count, nbytes) for (_, nbytes), count in sums.items()),
        cached=tuple(
            CachedLayers(
                bytes=call.layers * call.kept_bytes(cache) / tensor,
                flops=2.0 * call.layers * call.heads * call.width / tensor,
                window=call.window,
            )
            for call in model.attention
        ),
        layers=model.layers,
        vocab=model.vocab,
    )


def _size(dims: tuple[Dim, ...], cut: frozenset[str], tensor: int) -> float:
    return math.prod(size for size, _ in dims) / ways(dims, cut, tensor)


# --------------------------------------------------------------------------------------------------
# Dims of the weights that are sharded over the devices that share every layer.
#
# Dims of one colour are sharded together. Two colours of one array exclude each other: an array is
# sharded along one dim. Of all sets of colours to which none can be added the one is taken whose
# step of few tokens takes least: the bytes of weights that a device reads, and the all-reduces.

#: Devices and tokens of the step by which sets are compared; bytes of an all-reduce count as much
#: as so many bytes that are read, and each all-reduce as so many more.
TENSOR, TOKENS, SENT, EACH = 8, 16, 8.0, 8e6
#: Sets that are compared at most.
MOST = 512
#: Colours of less than this share of all parameters stay whole, as a router's and a norm's do.
LEAST = 1e-3


def cuts(model: ServedModel) -> frozenset[str]:
    """The colours of dims that are sharded."""

    def cost(cut: frozenset[str]) -> tuple[float, list[str]]:
        shard = split(model, cut, TENSOR, weights="model", cache="model")
        sums = sum(count * (EACH + SENT * TOKENS * nbytes) for count, nbytes in shard.sums)
        return shard.weights + TOKENS * shard.moved + sums, sorted(cut)

    return min(_sets(model), key=cost)


def _sets(model: ServedModel) -> Iterator[frozenset[str]]:
    """Maximal sets of colours of which no array has two."""
    sizes: dict[str, int] = {}
    beside: dict[str, set[str]] = {}
    layers = _stacked(model)
    for weight in model.weights:
        named = [colour for colour in colours(weight.dims) if colour not in layers]
        for colour in named:
            sizes[colour] = sizes.get(colour, 0) + weight.elements
            beside.setdefault(colour, set()).update(set(named) - {colour})
    order = sorted(
        (colour for colour in sizes if sizes[colour] >= LEAST * model.parameters),
        key=lambda colour: (-sizes[colour], colour),
    )
    candidates: dict[frozenset[str], None] = {}

    def grow(chosen: frozenset[str], left: list[str]) -> None:
        if len(candidates) >= MOST:
            return
        free = [colour for colour in left if not beside[colour] & chosen]
        if not free:
            if not any(not beside[colour] & chosen for colour in order if colour not in chosen):
                candidates.setdefault(chosen)
            return
        first, remaining = free[0], free[1:]
        grow(chosen | {first}, remaining)
        if beside[first] & set(remaining):
            grow(chosen, remaining)

    grow(frozenset(), order)
    yield from candidates or {frozenset[str](): None}


def _stacked(model: ServedModel) -> frozenset[str]:
    """Colours of dims that no matmul and no lookup has: those that count layers or experts."""
    used = {
        colour for product in model.products for colour in colours((*product.dims, *product.read))
    } | {
        colour for lookup in model.lookups for colour in colours((*lookup.summed, *lookup.written))
    }
    return frozenset(
        colour for weight in model.weights for colour in colours(weight.dims) if colour not in used
    )


#: Share of a device's memory that stays free, for what is not counted: the compiler's own, and
#: fragments. Compiled programs of `python -m benchmarks serving_compiled` take up to 0.3 GiB of
#: temporaries beside weights and pages.
MARGIN = 0.03


@dataclass(frozen=True, kw_only=True)
class ServingBytes:
    """Bytes of a device by kind.

    Attributes:
        weights: of the model.
        cache: pages of keys and values.
        temporaries: of a step.
        limit: what there is for all of it.
    """

    weights: float
    cache: float
    temporaries: float
    limit: float

    @property
    def peak(self) -> float:
        """All of it at once."""
        return self.weights + self.cache + self.temporaries

    def to_json(self) -> JsonObject:
        """The parts, with their sum."""
        return {**asdict(self), "peak": self.peak}


def limit(chip: Chip) -> float:
    """Bytes of a device that can be planned with."""
    return chip.usable_bytes - MARGIN * chip.hbm_bytes


def temporaries(split: ModelShard, *, tokens: int, rows: int) -> float:
    """Bytes of a step beside weights and pages: activations of one layer, read and written, and the
    logits, in float32.
    """
    layer = split.moved / max(1, split.layers)
    return tokens * layer + 4.0 * split.vocab * (rows + tokens / split.tensor)


# --------------------------------------------------------------------------------------------------
# Seconds of a step that computes tokens of prompts and next tokens.
#
#     matmuls        the greater of their FLOPs and the bytes of the weights, which every step reads
#     activations    what matmuls read and write of the tokens
#     cache          keys and values of all tokens before, for every next token
#     attention      FLOPs of the tokens of prompts with those before them
#     all-reduces    for each a latency and its bytes over the links
#     fixed          of a layer, of a step, and of every request that gets a token
#
# (Pope et al., "Efficiently Scaling Transformer Inference", arXiv:2211.05102; scaling book,
# inference.md.) What a roofline lacks at few tokens is the latency of all-reduces and the fixed
# time of a layer; both are learned, see `shardlib.serve.cost`.

Numbers = NDArray[np.float64]
#: What a step's seconds consist of, in the order in which they are shown.
PARTS: tuple[str, ...] = (
    "weights",
    "matmuls",
    "activations",
    "cache",
    "attention",
    "all-reduces",
    "fixed",
)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of a step; numbers, or arrays of them that are priced side by side.

    Attributes:
        rows: requests that get a next token, and no more.
        context: tokens before such a token.
        prompt: tokens of prompts.
        before: tokens before such a token.
        ended: prompts that end, whose requests get their first token.
    """

    rows: Numbers | float = 0.0
    context: Numbers | float = 0.0
    prompt: Numbers | float = 0.0
    before: Numbers | float = 0.0
    ended: Numbers | float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """Prices of steps of one split on one machine.

    Attributes:
        split: what a device has.
        chip: the device.
        reduce: an all-reduce over the devices that share a layer.
        constants: what was learned.
        dtype: that matmuls are computed in.
    """

    split: ModelShard
    chip: Chip
    reduce: LinearCost
    constants: Constants
    dtype: str

    def parts(self, load: StepWork) -> Mapping[str, Numbers]:
        """Seconds of a step by what they are for; of "weights" and "matmuls" one is 0, since
        whichever takes longer hides the other.
        """
        split, chip, learned = self.split, self.chip, self.constants
        tokens = np.asarray(load.rows + load.prompt, float)
        eight_bit = self.dtype.startswith("float8") or self.dtype in ("int8", "uint8")
        share = learned.eight_bit if eight_bit else learned.matmul
        compute = split.flops * tokens / (chip.peak(self.dtype) * share)
        read = split.read + sum(visited(experts, tokens) for experts in split.experts)
        streamed = read / (chip.hbm_bytes_per_s * learned.memory)
        cached = sum(
            entry.bytes * np.minimum(load.context, entry.window or np.inf) for entry in split.cached
        )
        scored = sum(
            entry.flops * np.minimum(load.before, entry.window or np.inf) for entry in split.cached
        )
        count = sum(many for many, _ in split.sums)
        sent = sum(many * nbytes for many, nbytes in split.sums) * tokens
        parts: dict[str, Numbers | float] = {
            "weights": np.where(streamed >= compute, streamed, 0.0),
            "matmuls": np.where(streamed >= compute, 0.0, compute),
            "activations": learned.moved
            * split.moved
            * tokens
            / (chip.hbm_bytes_per_s * learned.memory),
            "cache": load.rows * cached / (chip.hbm_bytes_per_s * learned.cache),
            "attention": load.prompt * scored / (chip.peak("bfloat16") * learned.attention),
            "all-reduces": (
                count * learned.latency * self.reduce.latency_s
                + sent * self.reduce.seconds_per_byte / learned.links
            ),
            "fixed": (
                split.layers * learned.layer_s
                + learned.step_s
                + learned.row_s * np.asarray(load.rows + load.ended, float)
            ),
        }
        return {part: np.asarray(seconds, float) for part, seconds in parts.items()}

    def seconds(self, load: StepWork) -> Numbers:
        """Seconds of a step."""
        parts = self.parts(load)
        return np.asarray(sum(parts.values()), float)


def visited(experts: Experts, tokens: Numbers) -> Numbers:
    """Bytes of experts that a step of so many tokens reads, where each token chooses evenly."""
    rarely = 1.0 - experts.chosen / experts.count
    return experts.bytes * (1.0 - rarely**tokens)
