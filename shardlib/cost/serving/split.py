"""What does a device have of a model where several share every layer?

Keys and values are shared by all of them: by heads, and by the tokens of every page where there are
fewer heads than devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardlib.cost.serving.served_model import Dim, ServedModel, Weight, stored_itemsize


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
class Cached:
    """What a device keeps for calls of attention.

    Attributes:
        bytes: of a token, in all layers of these calls.
        flops: of one token with one key, in all of them.
        window: tokens that a token sees; 0 for all before it.
    """

    bytes: float
    flops: float
    window: int


@dataclass(frozen=True, kw_only=True)
class Split:
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
    cached: tuple[Cached, ...]
    layers: int
    vocab: int

    @property
    def kept(self) -> float:
        """Bytes that a device keeps of one token, in all layers."""
        return sum(entry.bytes for entry in self.cached)


def ways(dims: Iterable[Dim], cut: frozenset[str], tensor: int) -> int:
    """Parts that an array is sharded into: its first dim of a colour that is cut, as far as it
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
) -> Split:
    """What one of several devices has.

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
    return Split(
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
            Cached(
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
