"""The cache of keys and values: pages, their forms on devices, attention over them, and stored
weights.

Layers that keep the same tokens of a request, all of them or those of a window, are a *cache group*
with pages of its own, and a table per request that names them.

`Columns` are a form of weights for CPUs: they stand first in their products, in as many parts as
there are threads.

Of a few rows x [T, K] and weights w [K, N], XLA's products on CPUs copy w into blocks before they
multiply, and one product of so few rows keeps one thread busy. Held as w.T in parts [N / parts, K],
each part is the first operand of a product of its own; the copy is then of the few rows.

>>> held = in_columns(jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), summed=(0,), parts=1)
>>> [part.tolist() for part in held.parts], whole(held).tolist()
([[[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

`Stored` weights and pages are held in eight bits, with scales that several elements share, and
weights by layers.

A step computes with them as with any others: where an equation multiplies, values are scaled to the
dtype of the model, which compilers do as they read them, so that memory holds and moves bytes.

>>> stored = store(jnp.asarray([[1.0, -127.0], [2.0, 254.0]]), 1, "int8")
>>> stored.values.tolist(), plain(stored).tolist()
([[1, -127], [1, 127]], [[1.0, -127.0], [2.0, 254.0]])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from shardlib._jax_compat import scan_counts
from shardlib.annotation.trees import Tree
from shardlib.errors import ArgumentError
from shardlib.functions.attention import Attention, Operands
from shardlib.jax_types import Function, Index, Leaf, Value
from shardlib.serve.cost import group_of
from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program
from shardlib.tracing.rewriting import bind

# --------------------------------------------------------------------------------------------------
# Attention of tokens over the pages that one device has.
#
# Tokens come in sets: of each request one table of pages, and so many tokens that look at it. A
# set reads its pages a few at a time, as far as its last token needs them and no earlier than its
# window (a softmax that is corrected as it goes, Milakov and Gimelshein, arXiv:1805.02867): what a
# step reads follows from its requests, not from the longest that there may be. On a CPU, where a
# turn of a loop costs more than what it reads, short sets read all they need at once.
#
# Suffixes: A set, C token of a set, M page of a request, P token of a page, U token of a few
# pages, K key head, G queries of a key head, H width.

#: Tokens that a set reads at a time: an eighth of the most, within these bounds.
FEWEST, MOST = 64, 512
#: Key heads at most of which scores are computed together: that multiplies so many times as much,
#: and moves no keys.
TOGETHER = 8
_LOW = float(jnp.finfo(jnp.float32).min) / 2


@dataclass(frozen=True, kw_only=True)
class TokenSets:
    """Tokens by what they look at.

    Attributes:
        table: [A, M] pages of each set, page n of its request in column n modulo `columns`.
        columns: of the table that count, a scalar.
        position: [A, C] of each token; -1 for one that is none.
        queries: of each part, [A, C, N, H].
        everywhere: whether tokens see all in spite of the window; None where that is fixed.
        offsets: what distances add to scores, [A, C, N] or [A, C, buckets, N]; None for nothing.
    """

    table: Value
    columns: Index
    position: Value
    queries: Sequence[Value]
    everywhere: Value | None
    offsets: Value | None = None


#: Weighted values [A, C, N, V], the sum of the weights and the largest score, [A, C, N] each.
Partial = tuple[Value, Value, Value]


def over_pages(
    form: Attention,
    sets_of_tokens: TokenSets,
    read: Callable[[Value], tuple[Value, ...]],
    *,
    size: int,
    tokens_per_page: int,
    first: Index,
) -> Partial:
    """Attends from tokens over the pages that a device has.

    Args:
        read: pages [A, B] -> keys of each part [A, B, held, K, H] or [A, B, held, H], and values.
    """
    (sets, pages_per_request), (_, chunk) = (
        sets_of_tokens.table.shape,
        sets_of_tokens.position.shape,
    )
    start, end = _range(form, sets_of_tokens, size)
    needed = jnp.max(end - start, initial=0)

    def some(turn: Index, partial: Partial, few: int, together: bool = False) -> Partial:
        number = start[:, None] + turn * few + jnp.arange(few, dtype=jnp.int32)
        pages = jnp.take_along_axis(sets_of_tokens.table, number % sets_of_tokens.columns, axis=1)
        *keys, values = (
            array.reshape(sets, few * tokens_per_page, *array.shape[3:]) for array in read(pages)
        )
        within = first + jnp.arange(tokens_per_page, dtype=jnp.int32)
        column = (number[..., None] * size + within).reshape(sets, 1, few * tokens_per_page)
        seen, added = _seen(form, sets_of_tokens, column), _added(form, sets_of_tokens, column)
        if together:
            return _attention_together(form, sets_of_tokens.queries, keys, values, seen, added)
        return _more(
            form, sets_of_tokens.queries, keys, values, seen[:, :, None, None], partial, added
        )

    shape = jax.eval_shape(read, jax.ShapeDtypeStruct((sets, 1), sets_of_tokens.table.dtype))[
        -1
    ].shape
    groups, width = shape[3], shape[4]
    heads = sets_of_tokens.queries[0].shape[2]
    shape_of_totals = (sets, chunk, groups, heads // groups)
    nothing = (
        jnp.zeros((*shape_of_totals, width), jnp.float32),
        jnp.zeros(shape_of_totals, jnp.float32),
        jnp.full(shape_of_totals, _LOW, jnp.float32),
    )

    def in_turns() -> Partial:
        few = max(
            1, min(pages_per_request, min(max(pages_per_request * size // 8, FEWEST), MOST) // size)
        )
        turns = -(-needed // few)
        return jax.lax.fori_loop(0, turns, lambda turn, so_far: some(turn, so_far, few), nothing)

    def at_once() -> Partial:
        counts = _at_once(pages_per_request, size)
        which = sum((needed > count).astype(jnp.int32) for count in counts)
        together = chunk == 1 and 1 < groups <= TOGETHER
        branches = [lambda count=count: some(0, nothing, count, together) for count in counts]
        return jax.lax.switch(
            which, branches if counts[-1] >= pages_per_request else [*branches, in_turns]
        )

    mixed, total, highest = jax.lax.platform_dependent(cpu=at_once, default=in_turns)
    return (
        mixed.reshape(sets, chunk, heads, width),
        total.reshape(sets, chunk, heads),
        highest.reshape(sets, chunk, heads),
    )


def _at_once(limit: int, size: int) -> list[int]:
    """Numbers of pages that may be read at once: doubled, up to all of a request or `MOST`
    tokens.
    """
    counts = [max(1, FEWEST // size)]
    while counts[-1] < limit and 2 * counts[-1] * size <= MOST:
        counts.append(2 * counts[-1])
    return [min(count, limit) for count in counts]


def joined(parts: Partial) -> Value:
    """Attention of tokens whose keys are in several places."""
    mixed, total, highest = parts
    factor = jnp.exp(highest - jnp.max(highest, axis=0))
    total_weight = jnp.sum(total * factor, axis=0)
    return jnp.sum(mixed * factor[..., None], axis=0) / jnp.maximum(total_weight, 1e-30)[..., None]


def _range(form: Attention, sets: TokenSets, size: int) -> tuple[Value, Value]:
    """The first page that a set needs, and the one after its last, [A] each."""
    end = jnp.max(sets.position, axis=1) // size + 1
    if not form.window:
        return jnp.zeros_like(end), end
    real = jnp.where(sets.position < 0, jnp.iinfo(jnp.int32).max, sets.position)
    start = jnp.maximum(jnp.min(real, axis=1) - form.window + 1, 0) // size
    if sets.everywhere is not None:
        start = jnp.where(sets.everywhere, 0, start)
    return jnp.minimum(start, end), end


def _seen(form: Attention, sets: TokenSets, column: Value) -> Value:
    """Returns which keys each token sees, [A, C, U]."""
    row = sets.position[..., None]
    seen = column <= row
    if form.window:
        near = seen & (row - column < form.window)
        seen = near if sets.everywhere is None else jnp.where(sets.everywhere, seen, near)
    return seen


def _added(form: Attention, sets: TokenSets, column: Value) -> Value | None:
    """Returns the bias that distances add to scores, [A, C, N, U]; None for nothing."""
    if form.bias is None or sets.offsets is None:
        return None
    distance = column - sets.position[..., None]
    return jax.vmap(jax.vmap(form.bias.of))(sets.offsets, distance)


def _more(
    form: Attention,
    queries: Sequence[Value],
    keys: Sequence[Value],
    values: Value,
    seen: Value,
    partial: Partial,
    added: Value | None,
) -> Partial:
    """With some more keys and values."""
    mixed, total, highest = partial
    grouped = [query.reshape(*mixed.shape[:4], query.shape[-1]) for query in queries]
    scores = sum(
        (_products(query, key) for query, key in zip(grouped, keys, strict=True)),
        start=jnp.zeros((), jnp.float32),
    )
    scores = _scaled(form, scores)
    if added is not None:
        scores = scores + added.reshape(scores.shape)
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.maximum(highest, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - top[..., None])
    before = jnp.exp(highest - top)
    more = jnp.einsum(
        "ackgu,aukv->ackgv",
        weights.astype(queries[-1].dtype),
        values.astype(queries[-1].dtype),
        preferred_element_type=jnp.float32,
    )
    return (
        mixed * before[..., None] + more,
        total * before + jnp.sum(weights, axis=-1),
        top,
    )


def _products(query: Value, key: Value) -> Value:
    """Products of queries [A, C, K, G, H] and keys [A, U, K, H] or [A, U, H]: [A, C, K, G, U]."""
    dims = "aukh" if key.ndim == 4 else "auh"
    return jnp.einsum(
        f"ackgh,{dims}->ackgu", query, key.astype(query.dtype), preferred_element_type=jnp.float32
    )


def _attention_together(
    form: Attention,
    queries: Sequence[Value],
    keys: Sequence[Value],
    values: Value,
    seen: Value,
    added: Value | None,
) -> Partial:
    """Attends from one token of each set over keys and values, without moving them by head: a query
    is zero for the other heads, and of what its weights make of all values it keeps its own head's.
    """
    rows, count, heads, _ = values.shape
    group = queries[0].shape[2] // heads
    same_head = jnp.eye(heads, dtype=queries[0].dtype)[:, None, :, None]

    def products(query: Value, key: Value) -> Value:
        query = query[:, 0]
        if key.ndim == 4:
            grouped = query.reshape(rows, heads, group, -1).swapaxes(2, 3)
            spread = (grouped[..., None, :] * same_head).reshape(rows, -1, heads * group)
        else:
            spread = query.swapaxes(1, 2)
        key = key.astype(query.dtype).reshape(rows, count, -1)
        return jnp.einsum("aux,axn->aun", key, spread, preferred_element_type=jnp.float32)

    scores = sum(map(products, queries, keys), start=jnp.zeros((), jnp.float32))
    scores = _scaled(form, scores)
    if added is not None:
        scores = scores + added[:, 0].swapaxes(1, 2)
    scores = jnp.where(seen.swapaxes(1, 2), scores, -jnp.inf)
    top = jnp.maximum(jnp.max(scores, axis=1), _LOW)
    weights = jnp.exp(scores - top[:, None])
    dtype = queries[-1].dtype
    sums = jnp.einsum(
        "anu,aux->anx",
        jax.lax.optimization_barrier(weights.astype(dtype).swapaxes(1, 2)),
        values.astype(dtype).reshape(rows, count, -1),
        preferred_element_type=jnp.float32,
    ).reshape(rows, heads, group, heads, -1)
    mixed = jnp.sum(sums * same_head.astype(sums.dtype), axis=3)
    shape = (rows, 1, heads, group)
    return mixed[:, None], jnp.sum(weights, axis=1).reshape(shape), top.reshape(shape)


def _scaled(form: Attention, scores: Value) -> Value:
    scores = scores * form.scale
    return form.softcap * jnp.tanh(scores / form.softcap) if form.softcap else scores


# --------------------------------------------------------------------------------------------------
# The devices of a served program, and the work of each.
#
#     data            groups of devices, each with requests, tokens and pages of its own
#     tensor          key heads, with their queries and pages
#     context         the tokens of every page, where there are fewer key heads than devices: every
#                     device attends over its part, and parts are put together by their weights
#                     (Milakov and Gimelshein, arXiv:1805.02867)
#
# Weights move nowhere. A function of what one device holds is made one of whole arrays by
# `jax.shard_map`.

#: Mesh axes that share every layer, as weights are sharded over them.
SHARED = ("tensor", "context")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The devices of a program.

    Attributes:
        mesh: of them; None for one.
    """

    mesh: Mesh | AbstractMesh | None = None

    def ways(self, axes: tuple[str, ...]) -> int:
        """Devices along some axes."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def groups(self) -> int:
        """Groups of devices with requests of their own."""
        return self.ways(("data",))

    def heads(self, count: int) -> tuple[str, ...]:
        """Axes over which so many key heads are cut."""
        return ("tensor",) if count % self.ways(("tensor",)) == 0 else ()

    def tokens(self, count: int) -> tuple[str, ...]:
        """Axes over which the tokens of pages with so many key heads are cut."""
        return tuple(axis for axis in SHARED if axis not in self.heads(count))

    def page_spec(self, page: Tree, heads: int) -> Tree:
        """Returns a spec of the sharding of pages [layers, pages, tokens, ...] for each array that
        they are.
        """
        tokens = self.tokens(heads)
        if page.shape[2] % self.ways(tokens):
            raise ArgumentError(
                f"page is {page.shape[2]}; pages of {heads} key heads are sharded over"
                f" {self.ways(tokens)} devices, which share the tokens of each\nTry: a multiple"
                f" of {self.ways(tokens)}"
            )
        along = self.heads(heads) if len(page.shape) > 4 else ()
        spec = None, "data", tokens or None, along or None
        return jax.tree.map(lambda array: PartitionSpec(*spec[: len(array.shape)]), page)

    def sharding(self, spec: PartitionSpec) -> NamedSharding | None:
        """The sharding of a spec; None on one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def by_group(self, tree: Tree) -> Tree:
        """Shardings of arrays of which each group of devices has its rows, and of scalars."""

        def of(leaf: Leaf) -> NamedSharding | None:
            return self.sharding(PartitionSpec("data") if leaf.ndim else PartitionSpec())

        return jax.tree.map(of, tree)

    def by_row(self, function: Function, logits: Value, beside: Tree) -> Tree:
        """Applies a function to each row of logits, on one device where their number divides over
        all of them, and else on all of its group.

        Args:
            function: (logits, beside) -> arrays with as many rows.
            logits: [D R, vocab].
        """
        if self.mesh is None or self.mesh.size == 1:
            return function(logits, beside)
        rows, vocab = logits.shape
        as_computed = PartitionSpec("data", SHARED if vocab % self.ways(SHARED) == 0 else None)
        # first as they are made, or weights are gathered for single rows
        logits = jax.lax.with_sharding_constraint(logits, NamedSharding(self.mesh, as_computed))
        row = PartitionSpec(("data", *SHARED) if rows % self.mesh.size == 0 else "data")
        specs = jax.tree.map(lambda array: row if array.ndim else PartitionSpec(), beside)
        return self.local(function, (row, specs), row)(logits, beside)

    def local(self, function: Function, arguments: Tree, results: Tree) -> Function:
        """A function of what one device holds as a function of whole arrays."""
        if self.mesh is None or self.mesh.size == 1:
            return function
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=arguments, out_specs=results, check_vma=False
        )

    def first(self, axes: tuple[str, ...], count: int) -> Value | int:
        """The first of the positions that a device has of so many a device; inside of `local`."""
        return jax.lax.axis_index(axes) * count if self.ways(axes) > 1 else 0


#: Elements of a part at least; smaller ones take longer to hand to a thread than to multiply.
LEAST = 2**17
#: Rows that are few.
FEW = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Columns:
    """An array that products sum over the same dims of.

    Attributes:
        parts: [n, k] each: of the other dims, flattened, some; of the summed dims, flattened, all.
        summed: dims that products sum over, ascending.
        shape: of the array that it stands for.
    """

    parts: tuple[Value, ...]
    summed: tuple[int, ...] = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})

    @property
    def dtype(self) -> jnp.dtype:
        """Of the array that it stands for."""
        return jnp.dtype(self.parts[0].dtype)

    @property
    def sharding(self) -> Sharding:
        """Of the array that it stands for: whole on every device."""
        sharding = self.parts[0].sharding
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
        return sharding

    @property
    def free(self) -> tuple[int, ...]:
        """Dims that products keep."""
        return tuple(dim for dim in range(len(self.shape)) if dim not in self.summed)


def in_columns(array: Value, *, summed: tuple[int, ...], parts: int) -> Columns:
    """Holds an array as the first operand of products."""
    free = tuple(dim for dim in range(array.ndim) if dim not in summed)
    rows = math.prod(array.shape[dim] for dim in free)
    flat = array.transpose(*free, *summed).reshape(rows, -1)
    count = max(1, min(parts, array.size // LEAST, rows))
    bounds = [rows * index // count for index in range(count + 1)]
    return Columns(
        parts=tuple(flat[first:last] for first, last in itertools.pairwise(bounds)),
        summed=summed,
        shape=tuple(array.shape),
    )


def whole(columns: Columns) -> Value:
    """The array that columns stand for."""
    order = *columns.free, *columns.summed
    flat = jnp.concatenate(columns.parts).reshape([columns.shape[dim] for dim in order])
    return flat.transpose(*(order.index(dim) for dim in range(len(order))))


def product(equation: Equation, operands: Sequence[Value | Columns]) -> Value:
    """Returns a product with columns."""
    position = 0 if isinstance(operands[0], Columns) else 1
    columns, rows = operands[position], operands[1 - position]
    assert isinstance(columns, Columns) and not isinstance(rows, Columns)
    summed, _ = equation.params["dimension_numbers"]
    pairs = sorted(zip(summed[position], summed[1 - position], strict=True))
    along = [dim for _, dim in pairs]
    free = [dim for dim in range(rows.ndim) if dim not in along]
    sizes = [rows.shape[dim] for dim in free]
    flat = rows.transpose(*free, *along).reshape(math.prod(sizes), -1)
    result = _multiplied(equation, position)(columns.parts, flat)
    free_sizes = [columns.shape[dim] for dim in columns.free]
    return (
        result.reshape(*sizes, *free_sizes)
        if position == 1
        else result.T.reshape(*free_sizes, *sizes)
    )


def _multiplied(equation: Equation, position: int) -> Function:
    """(parts [n, k], rows [m, k]) -> [m, N]; rows of several tokens are one product. What parts
    make of few rows is turned when it has been put together; many rows cost less where they stand
    first than to turn.
    """
    numbers = ((1,), (1,)), ((), ())
    precision = equation.params["precision"]
    pair = precision if isinstance(precision, tuple) else (precision, precision)

    def product(parts: tuple[Value, ...], rows: Value) -> Value:
        few = rows.shape[0] <= FEW
        order = pair if few == (position == 0) else pair[::-1]
        products = [
            bind(
                equation,
                [part, rows] if few else [rows, part],
                dimension_numbers=numbers,
                precision=order if isinstance(precision, tuple) else precision,
            )[0]
            for part in parts
        ]
        return jnp.concatenate(products).T if few else jnp.concatenate(products, axis=1)

    def of_tokens(
        size: int, batched: tuple[tuple[bool, ...], bool], parts: tuple[Value, ...], rows: Value
    ) -> tuple[Value, bool]:
        if any(batched[0]):
            dims = tuple(0 if mapped else None for mapped in batched[0]), 0 if batched[1] else None
            return jax.vmap(product, in_axes=dims)(parts, rows), True
        result = again(parts, rows.reshape(-1, rows.shape[-1]))
        return result.reshape(size, -1, result.shape[-1]), True

    again = custom_vmap(product)
    again.def_vmap(of_tokens)
    return again


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
    """Returns whether a value is an array of eight bits."""
    return isinstance(value, Stored)


def is_held(value: object) -> bool:
    """Returns whether a value stands for an array, and is none."""
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


# --------------------------------------------------------------------------------------------------
# Constants of a program, known before it runs.
#
# A stack of layers of which some have a window tells each by a boolean that a loop over the layers
# hands in. Where that is known, a layer with a window keeps its window and no more.

#: Equations with programs inside, which are not run here.
_WITHIN = frozenset({"scan", "while", "cond", *REMAT, *CUSTOM})


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constant values of a program, or of one iteration of a loop.

    Attributes:
        program: whose they are.
        given: of its inputs, by number: what computes one; None where it is not known.
    """

    program: Program
    given: Mapping[int, Callable[[], Value | None]] = field(
        default_factory=dict[int, Callable[[], "Value | None"]]
    )
    _made: dict[int, Value | None] = field(default_factory=dict[int, "Value | None"])

    def of(self, number: int) -> Value | None:
        """A value; None where it is not known, or follows from the position of the token."""
        if number in self.program.constants:
            return self.program.constants[number]
        if number not in self._made:
            self._made[number] = None  # of what `given` does not know
            if number in self.given:
                self._made[number] = self.given[number]()
            elif (equation := self._equation(number)) is not None:
                self._run(equation)
        return self._made[number]

    def _equation(self, number: int) -> Equation | None:
        for equation in self.program.equations:
            if number in equation.outputs:
                return equation
        return None

    def _run(self, equation: Equation) -> None:
        counts_tokens = equation.name == "iota" and equation.params["shape"] == (1,)
        if equation.name in _WITHIN or counts_tokens:
            return
        operands = [self.of(number) for number in equation.inputs]
        values = [operand for operand in operands if operand is not None]
        if len(values) < len(operands):
            return
        with jax.ensure_compile_time_eval():
            results = bind(equation, values)
        self._made.update(zip(equation.outputs, results, strict=True))

    def iterations(self, loop: Equation, body: Program) -> Iterator[Constants]:
        """The constants of each iteration of a loop, in the order in which they run."""
        fixed, carried = scan_counts(loop.params)
        length, before = loop.params["length"], None
        for turn in range(length):
            row = length - 1 - turn if loop.params["reverse"] else turn
            inputs: dict[int, Callable[[], Value | None]] = {}
            for index, number in enumerate(body.inputs):
                outer = loop.inputs[index]
                if fixed <= index < fixed + carried and before is not None:
                    inputs[number] = _value_of(before, body.outputs[index - fixed])
                elif index < fixed + carried:
                    inputs[number] = _value_of(self, outer)
                else:
                    inputs[number] = _row(self, outer, row)
            before = Constants(program=body, given=inputs)
            yield before

    def inside(self, equation: Equation, body: Program) -> Constants:
        """The constants of a program that an equation runs once."""
        pairs = zip(body.inputs, equation.inputs, strict=True)
        return Constants(
            program=body, given={number: _value_of(self, outer) for number, outer in pairs}
        )


def _value_of(constants: Constants, number: int) -> Callable[[], Value | None]:
    return lambda: constants.of(number)


def _row(constants: Constants, number: int, row: int) -> Callable[[], Value | None]:
    def one() -> Value | None:
        value = constants.of(number)
        return None if value is None else np.asarray(value)[row]

    return one


# --------------------------------------------------------------------------------------------------
# Pages of a layer, and the tables that name them.
#
# The pages of a call whose layers are all in one cache group are [layers, pages, tokens, ...].
# Where a loop runs over layers of several groups, the pages of its layers lie one after another,
# [1, pages of all layers, tokens, ...], since those of different groups have different numbers:
#
#     layers     window    all     window    window    all
#     pages      3         8       3         3         8        = 25, from 0, 3, 11, 14, 17 on
#
# Suffixes: T token, D group of devices, R request, B chunk of a prompt, M page of a request.

#: An array of int32, on a device or not.
Numbers = jax.Array | np.ndarray


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that keep the same tokens.

    Attributes:
        window: how many of a request's last tokens they keep; 0 for all.
        pages: that they have, in a group of devices.
        table: pages that a request has at a time at most.
    """

    window: int
    pages: int
    table: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenPlacement:
    """The places of tokens, int32. Of each group of devices those come first that are the next one
    of a request each, R of them, and then chunks of prompts, all of one length.

    Attributes:
        position: in its request, [T].
        entry: of each cache group, [T] of the pages of its group of devices to which its keys and
            values go, page times size of a page plus place; past the last for a token that is none,
            which writes nothing.
        table: of each cache group, [D R, M] pages of the requests: page n of a request is in
            column n modulo M.
        chunks: of each cache group, [D B, M] pages of the requests of chunks.
        adapter: of its request, from 1 on, [T], 0 for the base; None where there are no adapters.
    """

    position: Numbers
    entry: tuple[Numbers, ...]
    table: tuple[Numbers, ...]
    chunks: tuple[Numbers, ...]
    adapter: Numbers | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerPlacement:
    """The places of tokens in one layer.

    Attributes:
        position, entry, table, chunks: see `TokenPlacement`.
        first: the first page of the layer, a scalar.
        pages: how many it has, a scalar.
        columns: of the tables that count, a scalar.
    """

    position: Value
    entry: Value
    table: Value
    chunks: Value
    first: Index
    pages: Index
    columns: Index

    @staticmethod
    def specs(tokens: PartitionSpec) -> Tree:
        """Specs of the arrays, as a tree like it."""
        many = dict.fromkeys(("position", "entry", "table", "chunks"), tokens)
        replicated = dict.fromkeys(("first", "pages", "columns"), PartitionSpec())
        specs: dict[str, Tree] = {**many, **replicated}
        return LayerPlacement(**specs)


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of a call, and where their pages lie.

    Attributes:
        groups: number of the cache group of each layer.
        pages: of each cache group, in a group of devices.
    """

    groups: tuple[int, ...]
    pages: tuple[int, ...]

    @classmethod
    def of(cls, windows: Sequence[int], groups: Sequence[CacheGroup]) -> Layers:
        """Layers, each in its group (`kept_pages.group_of`)."""
        group_windows = [group.window for group in groups]
        return cls(
            groups=tuple(group_of(window, group_windows) for window in windows),
            pages=tuple(group.pages for group in groups),
        )

    @property
    def alike(self) -> bool:
        """True if all are in one group."""
        return len({*self.groups}) == 1

    @property
    def leading(self) -> tuple[int, int]:
        """The first two dims of the arrays of pages of a group of devices."""
        if self.alike:
            return len(self.groups), self.pages[self.groups[0]]
        return 1, sum(self.pages[group] for group in self.groups)

    def where(self, layer: Index, token: TokenPlacement) -> tuple[Index, LayerPlacement]:
        """The row of the arrays that holds a layer, and where tokens stand in it."""
        if self.alike:
            return layer, _in_group(token, self.groups[0], 0, self.pages)
        firsts = np.cumsum([0, *(self.pages[group] for group in self.groups)], dtype=np.int32)
        if isinstance(layer, int):
            return 0, _in_group(token, self.groups[layer], int(firsts[layer]), self.pages)
        used = sorted({*self.groups})
        which = jnp.asarray([used.index(group) for group in self.groups], jnp.int32)[layer]

        def chosen(arrays: Sequence[Numbers]) -> Value:
            wide = max(arrays[group].shape[-1] for group in used) if arrays[0].ndim > 1 else 0
            return jax.lax.select_n(which, *(_padded(arrays[group], wide) for group in used))

        def number(of: Sequence[int]) -> Value:
            return jnp.asarray([of[group] for group in used], jnp.int32)[which]

        return 0, LayerPlacement(
            position=jnp.asarray(token.position),
            entry=chosen(token.entry),
            table=chosen(token.table),
            chunks=chosen(token.chunks),
            first=jnp.asarray(firsts)[layer],
            pages=number(self.pages),
            columns=number([table.shape[-1] for table in token.table]),
        )


def _padded(array: Numbers, wide: int) -> Value:
    """A table with more columns, which nothing looks at."""
    array = jnp.asarray(array)
    return jnp.pad(array, ((0, 0), (0, wide - array.shape[-1]))) if wide else array


def _in_group(
    token: TokenPlacement, group: int, first: int, pages: Sequence[int]
) -> LayerPlacement:
    """Returns the places of tokens in a layer of a group, whose pages begin at an offset."""
    return LayerPlacement(
        position=jnp.asarray(token.position),
        entry=jnp.asarray(token.entry[group]),
        table=jnp.asarray(token.table[group]),
        chunks=jnp.asarray(token.chunks[group]),
        first=first,
        pages=pages[group],
        columns=token.table[group].shape[-1],
    )


# --------------------------------------------------------------------------------------------------
# Writing keys and values of tokens to pages, and attending over the pages of their requests.
#
# Suffixes: T token, P token of a page, N query head, K key head, H width. An array of pages is
# [layers, pages, P, ...], see `shardlib.serve.cache`.

#: Pages of one call: those of each array of keys, and of values.
Pages = tuple[Page, ...]


#: Which dims of `TokenPlacement` a program of one token is mapped over.
TOKEN_DIMS = TokenPlacement(position=0, entry=0, table=None, chunks=None)  # type: ignore[arg-type]


def attending(
    form: Attention, grid: Grid, shared: int | None = None
) -> Callable[..., tuple[Value, Pages]]:
    """The function (pages, row, where, *operands) -> (mixed, pages) that takes the place of a call
    of attention of one token; mapped over tokens it writes all of them, and then attends.

    Args:
        shared: the part of keys that values are, so that they are kept once; None for none.
    """

    @custom_vmap
    def attend(
        pages: Pages, row: Index, location: LayerPlacement, *operands: Value
    ) -> tuple[Value, Pages]:
        batched = replace(
            location,
            position=location.position[None],
            entry=location.entry[None],
            table=jnp.zeros((1, location.table.shape[1]), jnp.int32),  # any: only shapes count
            chunks=location.chunks[:0],
        )
        mixed, pages = _attend(
            (form, Grid(), shared), pages, row, batched, [each[None] for each in operands]
        )
        return mixed[0], pages

    @attend.def_vmap
    def attend_many(
        size: int,
        mapped: tuple[object, ...],
        pages: Pages,
        row: Index,
        location: LayerPlacement,
        *operands: Value,
    ) -> tuple[tuple[Value, Pages], tuple[bool, object]]:
        assert not any(jax.tree.leaves(mapped[:2])), "all tokens share their pages"
        many = [
            operand if has else jnp.broadcast_to(operand, (size, *operand.shape))
            for operand, has in zip(operands, mapped[3:], strict=True)
        ]
        mixed, pages = _attend((form, grid, shared), pages, row, location, many)
        return (mixed, pages), (True, jax.tree.map(lambda _: False, pages))

    return attend


def _attend(
    call: tuple[Attention, Grid, int | None],
    pages: Pages,
    row: Index,
    location: LayerPlacement,
    operands: list[Value],
) -> tuple[Value, Pages]:
    """Operands [T, 1, 1, ...], one token of one row each; returns [T, 1, 1, N, V]."""
    form, grid, shared = call
    rows = operands[:-1] if form.bias is not None else operands  # that of a bias is [T, ..., N]
    arguments = Operands.of(
        form,
        [
            *(
                operand_array[:, 0, 0] if operand_array.ndim > 1 else operand_array
                for operand_array in rows
            ),
            *operands[len(rows) :],
        ],
    )
    size, groups = pages[0].shape[2], arguments.value.shape[1]
    heads, tokens = grid.heads(groups), grid.tokens(groups)
    devices, count = grid.ways(tokens), arguments.queries[0].shape[1]
    spread = count // grid.ways(heads) % devices == 0

    def local(
        pages: Pages,
        row: Index,
        location: LayerPlacement,
        queries: tuple[Value, ...],
        new: tuple[Value, ...],
        everywhere: Value | None,
        offsets: Value | None,
    ) -> tuple[Value, Pages]:
        tokens_per_page = pages[0].shape[2]
        first = grid.first(tokens, tokens_per_page)
        written = _written(pages, row, location, new, size=size, first=first)
        nobody = location.entry >= location.pages * size
        position = jnp.where(nobody, -1, location.position)

        def read(numbers: Value) -> tuple[Value, ...]:
            arrays = [read_pages(page, row, location.first + numbers) for page in written]
            return tuple(arrays if shared is None else [*arrays, arrays[shared]])

        def mixed(table: Value, start: int, chunk: int) -> Partial:
            here = slice(start, start + table.shape[0] * chunk)
            sets = TokenSets(
                table=table,
                columns=location.columns,
                position=position[here].reshape(-1, chunk),
                queries=[query[here].reshape(-1, chunk, *query.shape[1:]) for query in queries],
                everywhere=None if everywhere is None else everywhere[0],
                offsets=None
                if offsets is None
                else offsets[here].reshape(-1, chunk, *offsets.shape[1:]),
            )
            attended = over_pages(
                form, sets, read, size=size, tokens_per_page=tokens_per_page, first=first
            )
            return jax.tree.map(lambda query: query.reshape(-1, *query.shape[2:]), attended)

        rows, parts = location.table.shape[0], []
        if rows:
            parts.append(mixed(location.table, 0, 1))
        if location.chunks.shape[0]:
            chunk = (position.shape[0] - rows) // location.chunks.shape[0]
            parts.append(mixed(location.chunks, rows, chunk))
        partial = jax.tree.map(lambda *parts_of_leaf: jnp.concatenate(parts_of_leaf), *parts)
        return _pages_together(partial, tokens, devices, spread).astype(
            arguments.value.dtype
        ), written

    data = PartitionSpec("data")
    by_head = PartitionSpec("data", heads or None)

    def operand(array: Value) -> PartitionSpec:
        return by_head if array.ndim == 3 else data

    page_specs = tuple(grid.page_spec(page, groups) for page in pages)
    new = (*arguments.keys, arguments.value)[: len(pages)]
    out = PartitionSpec("data", (*heads, *tokens) if spread else heads or None)
    mixed, written = grid.local(
        local,
        (
            page_specs,
            PartitionSpec(),
            LayerPlacement.specs(data),
            tuple(by_head for _ in arguments.queries),
            tuple(map(operand, new)),
            data,
            None
            if arguments.bias is None
            else PartitionSpec("data", *[None] * (arguments.bias.ndim - 2), heads or None),
        ),
        (out, page_specs),
    )(
        pages,
        jnp.asarray(row),
        location,
        arguments.queries,
        new,
        arguments.global_layer,
        arguments.bias,
    )
    return mixed.reshape(mixed.shape[0], 1, 1, *mixed.shape[1:]), written


def _written(
    pages: Pages,
    row: Index,
    location: LayerPlacement,
    new: tuple[Value, ...],
    *,
    size: int,
    first: Index,
) -> Pages:
    """Pages with the keys and values of tokens, of which a device writes those that it has."""
    tokens_per_page, number, place = (
        pages[0].shape[2],
        location.entry // size,
        location.entry % size - first,
    )
    here = (place >= 0) & (place < tokens_per_page) & (number < location.pages)
    number = jnp.where(here, location.first + number, pages[0].shape[1])
    index = row, number, jnp.where(here, place, 0)
    return tuple(write_rows(page, index, values) for page, values in zip(pages, new, strict=True))


def _pages_together(partial: Partial, axes: tuple[str, ...], devices: int, spread: bool) -> Value:
    """Attention [T, N, V] of what devices have made of their tokens; each then has the heads whose
    weights it has, where those divide.
    """
    if devices == 1:
        return joined(jax.tree.map(lambda array: array[None], partial))
    mixed, total, highest = partial
    rows = jnp.concatenate([mixed, total[..., None], highest[..., None]], axis=-1)
    if spread:
        rows = rows.reshape(rows.shape[0], devices, -1, rows.shape[-1])
        rows = jax.lax.all_to_all(rows, axes, split_axis=1, concat_axis=0)
    else:
        rows = jax.lax.all_gather(rows, axes)
    return joined((rows[..., :-2], rows[..., -2], rows[..., -1]))
