"""How weights and pages are held: in eight bits, with scales that some elements share, and weights
by layers.

A step computes with them as with any others: where an equation multiplies, values are scaled to the
dtype of the model, which compilers do as they read them, so that memory holds and moves bytes.

>>> stored = store(jnp.asarray([[1.0, -127.0], [2.0, 254.0]]), 1, "int8")
>>> stored.values.tolist(), plain(stored).tolist()
([[1, -127], [1, 127]], [[1.0, -127.0], [2.0, 254.0]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Function, Index, Leaf, Value
from shardlib.lowering.serving.held.columns import Columns, whole

#: Dtype and largest value of each way to store.
DTYPES = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Stored:
    """An array of eight bits.

    Attributes:
        values: as they are stored.
        scale: float32, 1 long along the dim whose elements share it.
        dtype: of the array that it stands for.
    """

    values: jax.Array
    scale: jax.Array
    dtype: str = field(metadata={"static": True})


def store(array: Value, dim: int, kind: str) -> Stored:
    """An array in eight bits."""
    dtype, largest = DTYPES[kind]
    wide = array.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=dim, keepdims=True) / largest, 1e-30)
    values = wide / scale
    if kind == "int8":
        values = jnp.round(values)
    return Stored(
        values=jnp.clip(values, -largest, largest).astype(dtype),
        scale=scale,
        dtype=str(array.dtype),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Layered:
    """An array whose rows are arrays of their own: those of the layers that a loop runs over.

    Compilers for CPUs copy the row of a stacked array before they multiply with it.

    Attributes:
        rows: along the first dim, `Stored`, `Columns` or neither.
    """

    rows: tuple[Value | Stored | Columns, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        return (len(self.rows), *_array(self.rows[0]).shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the array that it stands for."""
        return jnp.dtype(self.rows[0].dtype)

    @property
    def sharding(self) -> Sharding:
        """Of the array that it stands for."""
        sharding = _array(self.rows[0]).sharding
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        return sharding


def _array(value: Value | Stored | Columns) -> Value | Columns:
    return value.values if isinstance(value, Stored) else value


def plain(value: Value | Stored | Layered | Columns) -> Value:
    """The array that a value stands for."""
    if isinstance(value, Columns):
        return whole(value)
    if isinstance(value, Layered):
        return jnp.stack([plain(row) for row in value.rows])
    if not isinstance(value, Stored):
        return value
    dtype = jnp.dtype(value.dtype)
    return value.values.astype(dtype) * value.scale.astype(dtype)


def is_stored(value: object) -> bool:
    """Whether a value is an array of eight bits."""
    return isinstance(value, Stored)


def is_held(value: object) -> bool:
    """Whether a value stands for an array, and is none."""
    return isinstance(value, (Stored, Layered, Columns))


def all_plain(tree: Tree) -> Tree:
    """A tree of arrays in place of one with values that stand for them."""
    return jax.tree.map(plain, tree, is_leaf=is_held)


def by_layer(value: Value | Stored) -> Layered:
    """An array with rows of their own, each where the array is."""

    def rows(value: Value | Stored) -> Layered:
        first = jax.tree.leaves(value)[0]
        return Layered(rows=tuple(layer(value, index) for index in range(first.shape[0])))

    def row(leaf: Leaf) -> Sharding:
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
        return sharding

    shardings = jax.tree.map(row, value)
    count = len(jax.tree.leaves(value)[0])
    split = jax.jit(rows, out_shardings=Layered(rows=(shardings,) * count))
    return split(value)


def layer(value: Value | Stored | Layered, index: int) -> Value | Stored | Columns:
    """A row of an array."""
    if isinstance(value, Layered):
        return value.rows[index]
    return jax.tree.map(lambda leaf: leaf[index], value)


def written_out(
    body: Function, carry: Tree, scanned: Sequence[Tree], *, length: int, reverse: bool
) -> tuple[Tree, tuple[Value, ...]]:
    """What `jax.lax.scan` computes, each iteration with the rows that are held for it.

    Args:
        body: (carry, rows) -> (carry, results).
    """
    results: dict[int, tuple[Value, ...]] = {}
    for index in reversed(range(length)) if reverse else range(length):
        carry, results[index] = body(carry, tuple(layer(stack, index) for stack in scanned))
    rows = [results[index] for index in range(length)]
    return carry, tuple(jnp.stack(rows_of_result) for rows_of_result in zip(*rows, strict=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StoredPages:
    """Pages of int8, whose elements of one token and head share a scale.

    Attributes:
        values: [layers, pages, tokens, ..., width].
        scale: float32, without the last dim.
        dtype: of the keys or values that they stand for.
    """

    values: jax.Array
    scale: jax.Array
    dtype: str = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return self.values.shape


#: Pages of keys or of values, in the dtype of the cache or in int8.
Page = jax.Array | StoredPages


def stored_page(page: jax.ShapeDtypeStruct, cache: str) -> jax.ShapeDtypeStruct | StoredPages:
    """What pages are in a cache, without contents."""
    if cache == "model":
        return page
    values = page.update(dtype=DTYPES[cache][0])
    if cache == "fp8":
        return values
    scale = page.update(shape=page.shape[:-1], dtype=jnp.float32)
    return StoredPages(values=values, scale=scale, dtype=str(page.dtype))  # type: ignore[arg-type]


def read_pages(page: Page, layer: Index, numbers: Value) -> Value:
    """Some pages of a layer."""
    if not isinstance(page, StoredPages):
        return page[layer, numbers]
    values = page.values[layer, numbers].astype(jnp.float32)
    return (values * page.scale[layer, numbers][..., None]).astype(page.dtype)


def write_rows(page: Page, index: tuple[Index, Value, Value], rows: Value) -> Page:
    """Pages with keys or values of some tokens.

    Args:
        rows: keys or values, [T, ..., width]. What fp8 cannot hold is the largest that it can.
    """
    if not isinstance(page, StoredPages):
        largest = DTYPES["fp8"][1]
        fits = jnp.clip(rows, -largest, largest) if page.dtype == jnp.float8_e4m3fn else rows
        return page.at[index].set(fits.astype(page.dtype), mode="drop")
    stored = store(rows, rows.ndim - 1, "int8")
    return replace(
        page,
        values=page.values.at[index].set(stored.values, mode="drop"),
        scale=page.scale.at[index].set(stored.scale[..., 0], mode="drop"),
    )
