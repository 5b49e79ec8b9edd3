"""Attention: a custom call, its biases, and its checks.

Dims in suffixes: B batch, S query position, T key position, N query heads, K key heads, G queries
of a key head, H width of a head. Scores and softmax are float32; the products run in the dtype of
their operands. Where scores are large, queries attend in blocks, with scores rematerialised in the
backward pass (Rabe and Staats, arXiv:2112.05682).

Biases, functions of the distance between a key and a query:

    Alibi           a slope of each head times the distance (Press et al., arXiv:2108.12409)
    RelativeBias    a number of each head for each bucket of distances (T5, arXiv:1910.10683,
                    section 2.1)

Both depend on the two positions alone, so that devices and caches with a part of the keys compute
the same values as one device.

>>> Alibi.of(4).slopes.tolist()
[0.25, 0.0625, 0.015625, 0.00390625]
>>> distances = jnp.asarray([-40, -9, -8, -1, 0, 1])
>>> distance_buckets(distances, buckets=8, max_distance=32, both=False).tolist()
[7, 5, 5, 1, 0, 0]
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol, Self, cast

import jax
import jax.numpy as jnp

from shardlib.errors import ModelError, raise_all
from shardlib.jax_types import Eqn, Function
from shardlib.untrusted.data import Kind, require_kinds

# --------------------------------------------------------------------------------------------------
# Checks of the operands of `shardlib.functions.attention`.


def check(
    queries: Sequence[jax.Array],
    keys: Sequence[jax.Array],
    value: jax.Array,
    *,
    causal: bool,
    window: int,
    block: int,
    segments: jax.Array | None,
    numbers: Mapping[str, float],
) -> None:
    """Raises an error if the operands and options of a call do not fit each other."""
    batch, seq, heads = queries[0].shape[:3]
    length, groups = value.shape[1:3]
    failures = [
        (
            len(queries) == len(keys),
            f"queries are made of {len(queries)} arrays, keys of {len(keys)}",
        ),
        (
            all(query.shape[:3] == (batch, seq, heads) for query in queries),
            (
                "parts of queries differ in batch, sequence or heads:"
                f" {[query.shape for query in queries]}"
            ),
        ),
        (any(key.ndim == 4 for key in keys), "no part of the keys has heads: [B, T, K, H]"),
        (
            all(
                key.shape[:2] == (batch, length) and (key.ndim == 3 or key.shape[2] == groups)
                for key in keys
            ),
            (
                f"keys {[key.shape for key in keys]} and values {value.shape} differ in batch,"
                " sequence or heads"
            ),
        ),
        (
            all(
                query.shape[-1] == key.shape[-1] for query, key in zip(queries, keys, strict=False)
            ),
            (
                f"heads of queries {[query.shape[-1] for query in queries]} and of keys"
                f" {[key.shape[-1] for key in keys]} differ in width"
            ),
        ),
        (
            groups > 0 and heads % groups == 0,
            f"{groups} key heads do not divide {heads} query heads",
        ),
        (
            window >= 0 and (causal or not window),
            f"a window of {window} keys needs causal attention and cannot be negative",
        ),
        (block >= 0, f"block={block} is negative; it is 0 for all queries at once"),
        (
            block <= 0 or seq <= block or seq % block == 0,
            f"a sequence of {seq} is not a multiple of block={block}",
        ),
        (
            segments is None or tuple(segments.shape) == (batch, seq) == (batch, length),
            (
                f"segments are {tuple(getattr(segments, 'shape', ()))}; they must be [batch, seq]"
                f" of queries and keys alike, {(batch, seq)} and {(batch, length)}"
            ),
        ),
        *((not message, message) for message in _no_numbers(numbers)),
    ]
    messages = [message for fits, message in failures if not fits]
    if messages:
        raise_all(ModelError, "attention does not fit its operands", messages)


def _no_numbers(numbers: Mapping[str, float]) -> list[str]:
    """The errors in factors: scale must be a finite number, softcap also non-negative."""
    wrong: list[str] = []
    for name, value in numbers.items():
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        shown = value if isinstance(value, str | int | float) else type(value).__name__
        if not math.isfinite(number):
            wrong.append(
                f"{name} is {shown!r}, which is not a finite number that is known when tracing"
            )
        elif name == "softcap" and number < 0:
            wrong.append(f"softcap={number:g} is negative; it is 0 for none")
    return wrong


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Alibi:
    """A slope of each head times the distance, subtracted from scores.

    Attributes:
        slopes: [N], one per query head.
    """

    slopes: jax.Array

    @classmethod
    def of(cls, heads: int) -> Self:
        """The published slopes: a geometric series starting at 2^(-8/N); if N is not a power of
        two, the series of the next lower one, followed by every second slope of the series twice as
        long.
        """
        power = 2 ** math.floor(math.log2(heads))
        series = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
        between = [2.0 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]
        return cls(jnp.asarray([*series, *between], jnp.float32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RelativeBias:
    """A learned number of each head for each bucket of distances, added to scores.

    Attributes:
        table: [buckets, N]. Without causal masking, the second half is for keys after the query.
        max_distance: distances from this one on share a bucket.
    """

    table: jax.Array
    max_distance: int = field(default=128, metadata={"static": True})


Bias = Alibi | RelativeBias


@dataclass(frozen=True, kw_only=True)
class BiasForm:
    """The computation of a bias from its array.

    Attributes:
        max_distance: see `RelativeBias`; 0 for "alibi".
        both: whether keys after the query have their own buckets.
    """

    kind: Literal["alibi", "relative"]
    max_distance: int = 0
    both: bool = False

    def of(self, array: jax.Array, distance: jax.Array) -> jax.Array:
        """The bias that is added to scores, [N, ...] float32.

        Args:
            array: slopes [N], or a table [buckets, N].
        """
        array = array.astype(jnp.float32)
        if self.kind == "alibi":
            return -array.reshape(-1, *[1] * distance.ndim) * jnp.abs(distance)
        bucket_numbers = distance_buckets(
            distance, buckets=array.shape[0], max_distance=self.max_distance, both=self.both
        )
        # A product with one-hot rows, as in T5X: in a gather, TPUs pad each row of heads to 128.
        return jnp.einsum(
            "bh,b...->h...",
            array,
            jax.nn.one_hot(bucket_numbers, array.shape[0], axis=0, dtype=jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )


def bias_form(
    bias: Bias | None, *, heads: int, causal: bool
) -> tuple[BiasForm | None, jax.Array | None]:
    """The form of a bias, and its array."""
    if bias is None:
        return None, None
    if isinstance(bias, Alibi):
        _check(
            [
                (
                    bias.slopes.shape == (heads,),
                    f"slopes are {bias.slopes.shape}; there are {heads} heads",
                )
            ]
        )
        return BiasForm(kind="alibi"), bias.slopes
    if not isinstance(bias, RelativeBias):  # pyright: ignore[reportUnnecessaryIsInstance]
        _check([(False, f"bias is a {type(bias).__name__}; known are Alibi and RelativeBias")])
    shape, far = tuple(bias.table.shape), bias.max_distance
    exact = (shape[0] if causal else shape[0] // 2) // 2 if len(shape) == 2 else 0
    _check(
        [
            (
                len(shape) == 2 and shape[1] == heads and exact > 0,
                f"the table is {shape}; it is [buckets, heads], of {heads} heads"
                f" and {2 if causal else 4} buckets at least",
            ),
            (
                far > exact,
                f"max_distance={far}; {exact} distances have a bucket each, so that it is more",
            ),
        ]
    )
    return BiasForm(kind="relative", max_distance=far, both=not causal), bias.table


def _check(conditions: list[tuple[bool, str]]) -> None:
    messages = [message for fits, message in conditions if not fits]
    if messages:
        raise_all(ModelError, "the bias does not fit attention", messages)


def distance_buckets(
    distance: jax.Array, *, buckets: int, max_distance: int, both: bool
) -> jax.Array:
    """The bucket of every distance: one for each short distance, then increasingly wide ones up to
    `max_distance`, and the last for all beyond.
    """
    first = jnp.where(distance > 0, buckets // 2, 0) if both else 0
    count = buckets // 2 if both else buckets
    far = jnp.abs(distance) if both else jnp.maximum(-distance, 0)
    exact = count // 2
    ratio = jnp.log(jnp.maximum(far, 1).astype(jnp.float32) / exact) / math.log(
        max_distance / exact
    )
    wide = jnp.minimum(exact + (ratio * (count - exact)).astype(jnp.int32), count - 1)
    return first + jnp.where(far < exact, far, wide)


# --------------------------------------------------------------------------------------------------
# Marks of custom calls, by which lowering recognises them.
#
# A custom call is a call of a jitted function whose name identifies its form: its computation, as a
# frozen value. It stays one equation in a traced program, also under loops and rematerialisation.
#
# JAX keeps the name where it derives other functions from such a call: its derivative, the part
# whose operands are known in advance (Flax Linen's `nn.scan` looks for constants that way), its
# vectorised form (`jax.vmap`). These are not custom calls, and are recognised by their operands,
# which the function was never called with.


class Form(Protocol):
    """The computation of a custom call: a frozen value."""

    @property
    def kind(self) -> str:
        """The name of the custom call in plans."""
        ...


#: Shape and dtype of every operand of a call.
Signature = tuple[tuple[Any, Any], ...]

_FORMS: dict[str, Form] = {}
_CALLED_WITH: dict[str, set[Signature]] = {}


@lru_cache(maxsize=1024)
def marked(form: Form, function: Function) -> Function:
    """A function as a custom call.

    Args:
        function: (form, *arrays) -> arrays.
    """
    digest = hashlib.sha256(repr(form).encode()).hexdigest()[:8]
    name = f"shardlib_{type(form).__name__.lower()}_{digest}"
    _FORMS[name] = form
    called_with = _CALLED_WITH.setdefault(name, set())

    def call(*arrays: Any) -> Any:
        called_with.add(_signature(arrays))
        return function(form, *arrays)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call)


def form_of(eqn: Eqn) -> Form | None:
    """The form of a custom call; None for any other equation."""
    name = str(eqn.params.get("name", ""))
    if name not in _FORMS:
        return None
    operands = _signature([atom.aval for atom in eqn.invars])
    return _FORMS[name] if operands in _CALLED_WITH[name] else None


def _signature(arrays: Sequence[Any]) -> Signature:
    return tuple((tuple(array.shape), array.dtype) for array in arrays)


#: An operand of a call of attention, or its abstract value.
Operand = Any


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The computation of a call of `attention`.

    Attributes:
        scale: factor on the products of queries and keys.
        causal: whether a query attends to no later key.
        window: keys that a query attends to, itself included; 0 for all.
        softcap: scores become cap * tanh(scores / cap); 0 for no cap.
        block: queries per block; 0 for all at once.
        parts: number of arrays of queries, and of keys.
        chosen: whether there is an operand `global_layer`.
        packed: whether there is an operand `segments`.
        bias: form of the bias, whose array is the last operand; None for no bias.
    """

    scale: float
    causal: bool
    window: int
    softcap: float
    block: int
    parts: int
    chosen: bool
    packed: bool
    bias: BiasForm | None = None

    @property
    def kind(self) -> str:
        """The name of the custom call in plans."""
        return "attention"


def attention(
    query: jax.Array | Sequence[jax.Array],
    key: jax.Array | Sequence[jax.Array],
    value: jax.Array,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    global_layer: jax.Array | None = None,
    segments: jax.Array | None = None,
    softcap: float = 0.0,
    bias: Bias | None = None,
    block: int = 0,
) -> jax.Array:
    """Scaled dot-product attention. Under a plan with a context axis it becomes ring attention, or
    another form for sharded sequences.

    Args:
        query: [B, S, N, H]; or several such arrays, whose products with as many keys are added up
            (latent attention, arXiv:2405.04434).
        key: [B, T, K, H], with N a multiple of K; [B, T, H] for one key shared by all heads, among
            several arrays.
        value: [B, T, K, V].
        scale: factor on the products; by default H ** -0.5.
        causal: whether a query attends to no later key.
        window: keys that a causal query attends to, itself included; 0 for all.
        global_layer: a boolean: if true, all keys are visible in spite of the window; for stacks in
            which some of the layers have a window.
        segments: number of the document of every position, int [B, S]: a query attends only to its
            own.
        softcap: scores become cap * tanh(scores / cap); 0 for no cap.
        bias: term that depends on the distance of a key, added after the cap: `Alibi` or
            `RelativeBias` (`shardlib.functions.attention`). Vendors' kernels do not support it.
        block: queries per block; 0 for all at once. Shorter sequences are one block.

    Returns:
        [B, S, N, V], in the dtype of `value`.

    Raises:
        ArgumentError: operands that are not arrays of such ranks.
        ModelError: shapes or options that do not fit each other.
    """
    operands = {"query": query, "key": key, "value": value}
    require_kinds("attention", _KINDS, operands, needed=_KINDS)
    queries, keys = _parts(query), _parts(key)
    check(
        queries,
        keys,
        value,
        causal=causal,
        window=window,
        block=block,
        segments=segments,
        numbers={"scale": 1.0 if scale is None else scale, "softcap": softcap},
    )
    width = sum(part.shape[-1] for part in queries)
    biased, offsets = bias_form(bias, heads=queries[0].shape[2], causal=causal)
    form = Attention(
        scale=float(width**-0.5 if scale is None else scale),
        causal=causal,
        window=window,
        softcap=float(softcap),
        block=block,
        parts=len(queries),
        chosen=global_layer is not None and window > 0,
        packed=segments is not None,
        bias=biased,
    )
    beside = (global_layer, form.chosen), (segments, form.packed), (offsets, biased is not None)
    extra = [operand for operand, present in beside if present]
    return marked(form, attend)(*queries, *keys, value, *extra)


def is_array(value: Any, *ranks: int) -> bool:
    """True for an array of one of the ranks; of any rank from 1 on where none is named."""
    rank = len(value.shape) if hasattr(value, "shape") and hasattr(value, "dtype") else 0
    return rank in ranks if ranks else rank > 0


def _are_arrays(value: Any, *ranks: int) -> bool:
    parts = _parts(value)
    return bool(parts) and all(is_array(part, *ranks) for part in parts)


#: Expected kinds of the operands of `attention`.
_KINDS: Mapping[str, Kind] = {
    "query": (
        lambda value: _are_arrays(value, 4),
        "an array [batch, queries, heads, width], or several such arrays",
        "query=jnp.ones((2, 128, 8, 64))",
    ),
    "key": (
        lambda value: _are_arrays(value, 3, 4),
        "an array [batch, keys, key heads, width], or several such arrays",
        "key=jnp.ones((2, 128, 8, 64))",
    ),
    "value": (
        lambda value: is_array(value, 4),
        "an array [batch, keys, key heads, width]",
        "value=jnp.ones((2, 128, 8, 64))",
    ),
}


def _parts(arrays: jax.Array | Sequence[jax.Array]) -> list[jax.Array]:
    return list(arrays) if isinstance(arrays, (list, tuple)) else [cast(jax.Array, arrays)]


@dataclass(frozen=True, kw_only=True)
class Operands:
    """The arrays of a call by name, see `attention`.

    Attributes:
        bias: the array of the bias.
    """

    queries: tuple[jax.Array, ...]
    keys: tuple[jax.Array, ...]
    value: jax.Array
    global_layer: jax.Array | None
    segments: jax.Array | None
    bias: jax.Array | None = None

    @staticmethod
    def of(form: Attention, arrays: Sequence[Operand]) -> Operands:
        """Assigns the arrays of a custom call to their names."""
        parts, extra = form.parts, list(arrays[2 * form.parts + 1 :])
        return Operands(
            queries=tuple(arrays[:parts]),
            keys=tuple(arrays[parts : 2 * parts]),
            value=arrays[2 * parts],
            global_layer=extra.pop(0) if form.chosen else None,
            segments=extra.pop(0) if form.packed else None,
            bias=extra.pop(0) if form.bias is not None else None,
        )


def attend(form: Attention, *arrays: jax.Array) -> jax.Array:
    """Attention on one device, for the arrays of a custom call."""
    operands = Operands.of(form, arrays)
    groups, (batch, seq, heads) = operands.value.shape[2], operands.queries[0].shape[:3]
    queries = [
        query.reshape(batch, seq, groups, heads // groups, query.shape[3])
        for query in operands.queries
    ]
    columns = jnp.arange(operands.value.shape[1], dtype=jnp.int32)

    def part(
        queries: Sequence[jax.Array], rows: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        scores = (
            sum(
                (_products(query, key) for query, key in zip(queries, operands.keys, strict=True)),
                start=jnp.zeros((), jnp.float32),
            )
            if form.parts > 1
            else _products(queries[0], operands.keys[0])
        )
        documents = (
            None if operands.segments is None or segments is None else (segments, operands.segments)
        )
        return _mixed(
            form,
            scores * form.scale,
            operands.value,
            mask_of(form, rows, columns, operands.global_layer, documents),
            None
            if form.bias is None or operands.bias is None
            else form.bias.of(operands.bias, columns - rows[:, None]),
        )

    rows = jnp.arange(seq, dtype=jnp.int32)
    mixed = (
        part(queries, rows, operands.segments)
        if not form.block or seq <= form.block
        else _in_blocks(form.block, part, queries, rows, operands.segments)
    )
    return mixed.reshape(batch, seq, heads, mixed.shape[-1])


def mask_of(
    form: Attention,
    rows: jax.Array,
    columns: jax.Array,
    global_layer: jax.Array | None,
    documents: tuple[jax.Array, jax.Array] | None,
) -> jax.Array | None:
    """The mask of visible keys, [S, T], or [B, 1, 1, S, T] with documents; None if all are visible.

    Args:
        rows, columns: positions of queries and of keys, [S, T] each.
        documents: numbers of the documents of queries [B, S] and of keys [B, T].
    """
    rows, columns = rows[:, None], columns[None, :]
    seen = columns <= rows if form.causal else None
    if seen is not None and form.window:
        near = seen & (rows - columns < form.window)
        seen = near if global_layer is None else jnp.where(global_layer, seen, near)
    if documents is None:
        return seen
    same = (documents[0][:, :, None] == documents[1][:, None, :])[:, None, None]
    return same if seen is None else seen & same


def _products(query: jax.Array, key: jax.Array) -> jax.Array:
    """Products of queries [B, S, K, G, H] and keys [B, T, K, H] or [B, T, H] in the layout of the
    matmul: [B, K, G, S, T] float32.

    The query is transposed first, since it is small; an einsum would transpose the scores.
    """
    dims = (((4,), (3,)), ((0, 1), (0, 2))) if key.ndim == 4 else (((4,), (2,)), ((0,), (0,)))
    return jax.lax.dot_general(
        query.transpose(0, 2, 3, 1, 4), key, dims, preferred_element_type=jnp.float32
    )


def _mixed(
    form: Attention,
    scores: jax.Array,
    value: jax.Array,
    seen: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """The values [B, T, K, V] weighted by the softmax of scores [B, K, G, S, T] with a bias [N, S,
    T]: [B, S, K, G, V].
    """
    if form.softcap:
        scores = form.softcap * jnp.tanh(scores / form.softcap)
    if bias is not None:
        scores = scores + bias.reshape(scores.shape[1:])
    hidden = (
        scores if seen is None else scores + jnp.where(seen, 0.0, jnp.finfo(jnp.float32).min / 2)
    )
    weights = jax.nn.softmax(hidden, axis=-1)
    return jax.lax.dot_general(
        weights.astype(value.dtype), value, (((4,), (1,)), ((0, 1), (0, 2)))
    ).transpose(0, 3, 1, 2, 4)


def _in_blocks(
    block: int,
    part: Callable[..., jax.Array],
    queries: Sequence[jax.Array],
    rows: jax.Array,
    segments: jax.Array | None,
) -> jax.Array:
    """Attention block by block of queries."""
    seq = rows.shape[0]

    def blocks(array: jax.Array, dim: int) -> jax.Array:
        return jnp.moveaxis(
            array.reshape(*array.shape[:dim], seq // block, block, *array.shape[dim + 1 :]), dim, 0
        )

    def one(
        _: None, blocked: tuple[list[jax.Array], jax.Array, jax.Array | None]
    ) -> tuple[None, jax.Array]:
        return None, part(*blocked)

    blocked = (
        [blocks(query, 1) for query in queries],
        blocks(rows, 0),
        None if segments is None else blocks(segments, 1),
    )
    mixed = jax.lax.scan(jax.checkpoint(one, prevent_cse=False), None, blocked)[1]
    return jnp.moveaxis(mixed, 0, 1).reshape(mixed.shape[1], seq, *mixed.shape[3:])
