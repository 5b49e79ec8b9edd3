"""What does the forward pass of one token read, compute and keep?

Sizes are of the whole model. Dims have colours: dims of one colour are sharded together or not at
all (`shardlib.propagation.ties`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardlib.graph.graph import ITEMSIZE

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
    itemsize: int
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
    itemsize: int
    runs: int


@dataclass(frozen=True, kw_only=True)
class Attending:
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
    attention: tuple[Attending, ...]
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
    """Bytes of an element of weights or cache.

    Args:
        dtype: of the model.
    """
    return float(STORED.get(word, ITEMSIZE.get(dtype, 4)))
