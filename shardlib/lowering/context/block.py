"""Attention of one block of queries to one block of keys, and its gradient, as partial results,
and the positions of a sequence on each device.

A part is the result of attention to some of the keys and, for every query, the logarithm of the sum
of exponentials that normalises it (log-sum-exp). Two parts combine into one (online softmax,
Milakov and Gimelshein, arXiv:1805.02867); given the log-sum-exp over all keys, the backward pass of
every part is independent (FlashAttention, arXiv:2205.14135, algorithm 4).

Queries are [B, Q, H, D], keys and values [B, K, G, D] and [B, K, G, V], where each of the G groups
has H / G heads of the queries; all arithmetic is in float32.

Masks and distance biases are computed from the positions and documents of one block of queries and
keys: no array has a dim for all queries and one for all keys.

>>> import jax.numpy as jnp
>>> tokens = Positions(position=jnp.arange(4))
>>> AttentionMask(window=2).visible(tokens, tokens).astype(int).tolist()
[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
>>> bool(AttentionMask().any_visible(tokens[:2], tokens[2:]))
False
>>> bool(AttentionMask().any_visible(tokens[2:], tokens[:2]))
True

A `Cut` gives each device one run of positions or two.

>>> Cut(axis="context", ways=2).order(8).tolist()
[0, 1, 6, 7, 2, 3, 4, 5]
>>> Cut(axis="context", ways=2, zigzag=False).order(8).tolist()
[0, 1, 2, 3, 4, 5, 6, 7]
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.errors import LayoutError
from shardlib.functions.attention import BiasForm
from shardlib.graph import BLOCK
from shardlib.jax_types import Index, Value

#: Larger than any distance between two positions.
FAR = 2**30


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Positions:
    """Positions and documents of some tokens.

    Attributes:
        position: in the sequence, [S].
        document: index of the document, [B, S]; None for a single document.
        is_token: false for padding tokens, [S]; None without padding.
    """

    position: Value
    document: Any = None
    is_token: Any = None

    def __getitem__(self, positions: slice) -> Positions:
        return Positions(
            position=self.position[positions],
            document=None if self.document is None else self.document[:, positions],
            is_token=None if self.is_token is None else self.is_token[positions],
        )


@dataclass(frozen=True, kw_only=True)
class PositionBias:
    """Biases that depend on distance, added to scores.

    Attributes:
        form: the form of the bias.
        array: slopes or buckets, of the heads on this device.
    """

    form: BiasForm
    array: Value

    def of(self, query: Positions, key: Positions) -> Value:
        """The biases, [N, Q, K] float32."""
        return self.form.of(self.array, key.position[None, :] - query.position[:, None])

    def gradient(self, query: Positions, key: Positions, cotangent: Value) -> Value:
        """The gradient of the array, float32.

        Args:
            cotangent: of the biases, [N, Q, K].
        """
        distance = key.position[None, :] - query.position[:, None]
        pull = jax.vjp(lambda array: self.form.of(array, distance), self.array.astype(jnp.float32))
        return pull[1](cotangent)[0]


jax.tree_util.register_dataclass(PositionBias, data_fields=["array"], meta_fields=["form"])


@dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """The mask of attention: the keys that a query attends to.

    Attributes:
        causal: whether later positions are masked.
        window: largest distance plus one: a causal query attends to the last `window` positions,
            itself included, any other to as many on either side. A number or a traced scalar; 0 or
            None for no window.
        bias: distance biases of scores; None for none.
    """

    causal: bool = True
    window: Index | None = None
    bias: PositionBias | None = None

    def biases(self, query: Positions, key: Positions) -> Value | None:
        """The distance biases, [N, Q, K], or None."""
        return None if self.bias is None else self.bias.of(query, key)

    def bias_grad(self, query: Positions, key: Positions, cotangent: Value) -> tuple[Value, ...]:
        """The gradient of the array of distance biases, if there are any.

        Args:
            cotangent: of the biases, [N, Q, K].
        """
        return () if self.bias is None else (self.bias.gradient(query, key, cotangent),)

    @property
    def window_size(self) -> Value | None:
        """The window as a distance; None if there is statically none."""
        if self.window is None or (isinstance(self.window, int | np.integer) and not self.window):
            return None
        return jnp.where(self.window > 0, self.window, FAR)

    def visible(self, query: Positions, key: Positions) -> Value | None:
        """The mask of visible keys, [Q, K], or [B, Q, K] with documents; None if all are
        visible.
        """
        distance = query.position[:, None] - key.position[None, :]
        conditions = [distance >= 0] if self.causal else []
        if self.window_size is not None:
            conditions.append((distance if self.causal else jnp.abs(distance)) < self.window_size)
        if key.is_token is not None:
            conditions.append(key.is_token[None, :])
        if query.document is not None:
            conditions.append(query.document[:, :, None] == key.document[:, None, :])
        return reduce(operator.and_, conditions) if conditions else None

    def any_visible(self, query: Positions, key: Positions) -> Value | None:
        """A scalar that is false only if no query attends to any key, so that the block can be
        skipped; None if that is unknown. Only the ends of the blocks are compared.
        """
        first = query.position.min() - key.position.max()
        last = query.position.max() - key.position.min()
        conditions = [last >= 0] if self.causal else []
        if self.window_size is not None:
            conditions += [first < self.window_size, last > -self.window_size]
        if query.document is not None:
            conditions.append(
                (
                    (query.document.min(1) <= key.document.max(1))
                    & (key.document.min(1) <= query.document.max(1))
                ).any()
            )
        return reduce(operator.and_, conditions) if conditions else None

    @property
    def split(self) -> tuple[int, MaskInputs]:
        """(the window if it is static, otherwise 0; the traced inputs of the mask)."""
        if self.window is None or isinstance(self.window, int | np.integer):
            return int(self.window or 0), MaskInputs(bias=self.bias)
        return 0, MaskInputs(window=jnp.asarray(self.window, jnp.int32), bias=self.bias)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MaskInputs:
    """Traced inputs of a mask.

    Attributes:
        window: see `AttentionMask`; None if it is static.
        bias: see `AttentionMask`.
    """

    window: Value | None = None
    bias: PositionBias | None = None

    def mask(self, window: int, *, causal: bool) -> AttentionMask:
        """The mask with these inputs."""
        return AttentionMask(
            causal=causal, window=window if self.window is None else self.window, bias=self.bias
        )

    def cotangent(self, *gradient: Value) -> MaskInputs | None:
        """The cotangent of these inputs."""
        if self.bias is None:
            return None
        array = gradient[0].astype(self.bias.array.dtype)
        return MaskInputs(bias=replace(self.bias, array=array))


CAUSAL = AttentionMask()


#: Log-sum-exp over no keys: finite, so that differences of two of them are not NaN.
EMPTY_LOG_SUM = -1e30


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scale and soft cap of scores.

    Attributes:
        scale: factor of products of queries and keys.
        softcap: scores become cap * tanh(scores / cap); 0 leaves them.
        block: the most queries, and the most keys, of a block of scores.
    """

    scale: float
    softcap: float = 0.0
    block: int = BLOCK

    def of(self, query: Value, key: Value) -> Value:
        """Scores [B, G, H / G, Q, K].

        Args:
            query: [B, Q, H, D].
            key: [B, K, G, D].
        """
        raw = (
            jnp.einsum(
                "bqghd,bkgd->bghqk",
                grouped(query, key.shape[2]),
                key,
                preferred_element_type=jnp.float32,
            )
            * self.scale
        )
        return self.softcap * jnp.tanh(raw / self.softcap) if self.softcap else raw

    def backward(self, scores: Value, cotangent: Value) -> Value:
        """The cotangent of products of queries and keys, from that of scores."""
        return cotangent * (1 - (scores / self.softcap) ** 2 if self.softcap else 1.0) * self.scale


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionPart:
    """Attention to some keys.

    Attributes:
        result: [B, Q, H, V] in float32; zeros for queries without visible keys.
        lse: log-sum-exp, [B, Q, H].
    """

    result: Any
    lse: Value

    def __add__(self, other: AttentionPart) -> AttentionPart:
        lse = jnp.logaddexp(self.lse, other.lse)
        return AttentionPart(
            result=sum(part.result * jnp.exp(part.lse - lse)[..., None] for part in (self, other)),
            lse=lse,
        )


@dataclass(frozen=True, kw_only=True)
class OutputCotangents:
    """The cotangent of queries' attention to all keys.

    Attributes:
        lse: log-sum-exp, [B, Q, H].
        cotangent: of the result, [B, Q, H, V].
        delta: product of cotangent and result, summed over V: [B, Q, H], float32.
    """

    lse: Value
    cotangent: Value
    delta: Value

    @classmethod
    def of(cls, result: Value, lse: Value, cotangent: Value) -> OutputCotangents:
        """The cotangent together with the values of the forward pass that gradients need.

        Args:
            result: of attention to all keys, [B, Q, H, V].
            lse: log-sum-exp, [B, Q, H].
        """
        return cls(
            lse=lse, cotangent=cotangent, delta=(cotangent.astype(jnp.float32) * result).sum(-1)
        )

    def map(self, function: Callable[[Value], Value]) -> OutputCotangents:
        """The results of a function of each array, for a part of the queries."""
        return OutputCotangents(
            lse=function(self.lse), cotangent=function(self.cotangent), delta=function(self.delta)
        )


@dataclass(frozen=True, kw_only=True)
class QKV:
    """Queries, keys and values with their positions.

    Attributes:
        query, key, value: [B, Q, H, D], [B, K, G, D] and [B, K, G, V].
        q_positions, k_positions: positions and documents of queries and of keys.
    """

    query: Any
    key: Any
    value: Any
    q_positions: Positions
    k_positions: Positions

    def sliced(self, rows: slice, columns: slice) -> QKV:
        """A slice of the queries, and a slice of the keys and values."""
        return QKV(
            query=self.query[:, rows],
            key=self.key[:, columns],
            value=self.value[:, columns],
            q_positions=self.q_positions[rows],
            k_positions=self.k_positions[columns],
        )


def empty_part(query: Value, width: int) -> AttentionPart:
    """Attention of queries [B, Q, H, D] to no keys."""
    return AttentionPart(
        result=jnp.zeros((*query.shape[:3], width), jnp.float32),
        lse=jnp.full(query.shape[:3], EMPTY_LOG_SUM, jnp.float32),
    )


def grouped(query: Value, groups: int) -> Value:
    """Heads by groups: [B, Q, H, D] -> [B, Q, G, H / G, D]."""
    return query.reshape(*query.shape[:2], groups, -1, query.shape[3])


def attend_block(inputs: QKV, mask: AttentionMask, scores: Scores) -> AttentionPart:
    """Attention of queries to keys."""
    query, value = inputs.query, inputs.value
    biases = mask.biases(inputs.q_positions, inputs.k_positions)
    visible = mask.visible(inputs.q_positions, inputs.k_positions)
    logits = _masked(_plus_biases(scores.of(query, inputs.key), biases), visible)
    # For queries without visible keys, all exponentials must be zeros.
    largest = jnp.maximum(logits.max(-1), EMPTY_LOG_SUM / 2)
    exponentials = jnp.exp(logits - largest[..., None])
    sums = exponentials.sum(-1)
    result = jnp.einsum(
        "bghqk,bkgv->bqghv",
        (exponentials / jnp.maximum(sums, 1e-30)[..., None]).astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    log_sums = jnp.where(sums > 0, jnp.log(jnp.maximum(sums, 1e-30)) + largest, EMPTY_LOG_SUM)
    return AttentionPart(
        result=result.reshape(*query.shape[:3], -1),
        lse=jnp.moveaxis(log_sums, 3, 1).reshape(query.shape[:3]),
    )


def attend_block_backward(
    inputs: QKV, mask: AttentionMask, scores: Scores, incoming: OutputCotangents
) -> tuple[Value, ...]:
    """Gradients of queries, keys and values from attention to these keys, and of the array of
    distance biases, if there are any, in float32; operands of matmuls have the dtypes of queries,
    keys and values.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    q_positions, k_positions = inputs.q_positions, inputs.k_positions
    groups = key.shape[2]

    def by_group(array: Value) -> Value:
        """[B, Q, H] -> [B, G, H / G, Q, 1]."""
        return jnp.moveaxis(array.reshape(*array.shape[:2], groups, -1), 1, 3)[..., None]

    raw_scores = scores.of(query, key)
    biases, lse = mask.biases(q_positions, k_positions), by_group(incoming.lse)
    logits = _masked(_plus_biases(raw_scores, biases), mask.visible(q_positions, k_positions))
    probs = jnp.exp(jnp.minimum(logits - lse, 0.0)) * (lse > EMPTY_LOG_SUM / 2)
    d_out = grouped(incoming.cotangent, groups).astype(value.dtype)
    d_value = jnp.einsum(
        "bghqk,bqghv->bkgv", probs.astype(value.dtype), d_out, preferred_element_type=jnp.float32
    )
    d_scores = probs * (
        jnp.einsum("bqghv,bkgv->bghqk", d_out, value, preferred_element_type=jnp.float32)
        - by_group(incoming.delta)
    )
    d_products = scores.backward(raw_scores, d_scores)
    d_query = jnp.einsum(
        "bghqk,bkgd->bqghd", d_products.astype(key.dtype), key, preferred_element_type=jnp.float32
    ).reshape(query.shape)
    d_key = jnp.einsum(
        "bghqk,bqghd->bkgd",
        d_products.astype(query.dtype),
        grouped(query, groups),
        preferred_element_type=jnp.float32,
    )
    if biases is None:
        return d_query, d_key, d_value
    d_biases = d_scores.sum(0).reshape(biases.shape)
    return d_query, d_key, d_value, *mask.bias_grad(q_positions, k_positions, d_biases)


def _plus_biases(scores: Value, biases: Value | None) -> Value:
    return scores if biases is None else scores + biases.reshape(scores.shape[1:])


def _masked(scores: Value, mask: Value | None) -> Value:
    """Scores, large and negative where they are masked.

    A selected constant would be an array like the scores: differentiation moves what does not
    depend on a layer out of the loop over layers, where it lives during the whole step.
    """
    if mask is None:
        return scores
    hidden = jnp.where(mask if mask.ndim == 3 else mask[None], 0.0, EMPTY_LOG_SUM)
    return scores + hidden[:, None, None]


# --------------------------------------------------------------------------------------------------
# Attention over blocks of queries and keys: only the scores of one block of queries and one of keys
# are in memory at a time.
#
# Blocks without visible keys are skipped. Sequences that no block divides are padded with tokens
# that are masked.

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A sequence in equal blocks.

    Attributes:
        length: of the sequence.
        size: of a block.
    """

    length: int
    size: int

    @classmethod
    def of(cls, length: int, limit: int) -> Blocks:
        """The fewest blocks of at most `limit` positions, and the shortest such blocks.

        >>> Blocks.of(10, 4)
        Blocks(length=10, size=4)
        >>> Blocks.of(9, 4).size, Blocks.of(3, 4).size, Blocks.of(9, 4).missing
        (3, 3, 0)
        """
        return cls(length=length, size=-(-length // -(-length // limit)))

    @property
    def count(self) -> int:
        """Number of blocks."""
        return -(-self.length // self.size)

    @property
    def missing(self) -> int:
        """Number of padding positions in the last block."""
        return self.count * self.size - self.length

    def padded(self, array: Value, dim: int = 1) -> Value:
        """An array whose last block is padded with its last value."""
        return (
            jnp.pad(
                array,
                [(0, self.missing if i == dim else 0) for i in range(array.ndim)],
                mode="edge",
            )
            if self.missing
            else array
        )

    def padded_tokens(self, tokens: Positions) -> Positions:
        """Tokens whose last block is padded; padding is not `is_token`."""
        is_token = jnp.arange(self.count * self.size) < self.length if self.missing else None
        return Positions(
            position=self.padded(tokens.position, 0),
            document=None if tokens.document is None else self.padded(tokens.document),
            is_token=is_token,
        )

    def block(self, number: Index, array: Value, dim: int = 1) -> Value:
        """One block of a padded array."""
        return jax.lax.dynamic_slice_in_dim(array, number * self.size, self.size, dim)

    def block_tokens(self, number: Index, tokens: Positions) -> Positions:
        """One block of padded tokens."""
        position = self.block(number, tokens.position, 0)
        is_token = None if tokens.is_token is None else self.block(number, tokens.is_token, 0)
        return Positions(
            position=position,
            document=None if tokens.document is None else self.block(number, tokens.document),
            is_token=is_token,
        )

    def with_added(self, number: Index, array: Value, more: Value) -> Value:
        """A padded array with an array added to one block.

        Args:
            array: [B, positions, ...], padded.
            more: [B, size, ...].
        """
        return jax.lax.dynamic_update_slice_in_dim(
            array, self.block(number, array) + more, number * self.size, 1
        )

    def joined(self, blocks: Value) -> Value:
        """[count, B, size, ...] -> [B, length, ...]."""
        sequence = jnp.moveaxis(blocks, 0, 1)
        return sequence.reshape(sequence.shape[0], -1, *sequence.shape[3:])[:, : self.length]


def attend(inputs: QKV, mask: AttentionMask, scores: Scores) -> AttentionPart:
    """Attention of queries to keys, block by block."""
    blocked = BlockedInputs.of(inputs, scores.block)
    if blocked is None:
        return attend_block(_tied_to_query(inputs), mask, scores)

    def block(_: None, row: Value) -> tuple[None, AttentionPart]:
        def step(part: AttentionPart, column: Value) -> tuple[AttentionPart, None]:
            block = blocked.block(row, column)
            visible = mask.any_visible(block.q_positions, block.k_positions)
            attended = _if_visible(visible, lambda: part + attend_block(block, mask, scores), part)
            return attended, None

        query = blocked.rows.block(row, blocked.inputs.query)
        before = empty_part(query, inputs.value.shape[-1])
        return None, jax.lax.scan(step, before, jnp.arange(blocked.columns.count))[0]

    return jax.tree.map(
        blocked.rows.joined, jax.lax.scan(block, None, jnp.arange(blocked.rows.count))[1]
    )


def attend_backward(
    inputs: QKV, mask: AttentionMask, scores: Scores, incoming: OutputCotangents
) -> tuple[Value, ...]:
    """Gradients of queries, keys and values from attention to these keys, and of the array of
    distance biases, if there are any, in float32.
    """
    blocked = BlockedInputs.of(inputs, scores.block)
    if blocked is None:
        return attend_block_backward(_tied_to_query(inputs), mask, scores, incoming)
    incoming = _padded_cotangents(blocked.rows, incoming)
    arrays = () if mask.bias is None else (mask.bias.array,)

    def block(gradients: tuple[Value, ...], row: Value) -> tuple[tuple[Value, ...], Value]:
        cotangents = incoming.map(lambda array: blocked.rows.block(row, array))

        def step(carry: tuple[Value, ...], column: Value) -> tuple[tuple[Value, ...], None]:
            block = blocked.block(row, column)
            more = _if_visible(
                mask.any_visible(block.q_positions, block.k_positions),
                lambda: attend_block_backward(block, mask, scores, cotangents),
                _zeros(block.query, block.key, block.value, *arrays),
            )
            return (
                carry[0] + more[0],
                blocked.columns.with_added(column, carry[1], more[1]),
                blocked.columns.with_added(column, carry[2], more[2]),
                *(before + addend for before, addend in zip(carry[3:], more[3:], strict=True)),
            ), None

        start = *_zeros(blocked.rows.block(row, blocked.inputs.query)), *gradients
        d_query, *after = jax.lax.scan(step, start, jnp.arange(blocked.columns.count))[0]
        return tuple(after), d_query

    (d_key, d_value, *d_arrays), d_query = jax.lax.scan(
        block,
        _zeros(blocked.inputs.key, blocked.inputs.value, *arrays),
        jnp.arange(blocked.rows.count),
    )
    last = inputs.key.shape[1]
    return blocked.rows.joined(d_query), d_key[:, :last], d_value[:, :last], *d_arrays


@dataclass(frozen=True, kw_only=True)
class BlockedInputs:
    """Inputs of attention in blocks of queries and of keys.

    Attributes:
        inputs: padded.
        rows, columns: the blocks.
    """

    inputs: QKV
    rows: Blocks
    columns: Blocks

    @staticmethod
    def of(inputs: QKV, limit: int) -> BlockedInputs | None:
        """Inputs in blocks of at most `limit` positions; None if a single block is enough."""
        rows = Blocks.of(inputs.query.shape[1], limit)
        columns = Blocks.of(inputs.key.shape[1], limit)
        if rows.count == columns.count == 1:
            return None
        inputs = _tied_to_query(inputs)
        padded = QKV(
            query=rows.padded(inputs.query),
            key=columns.padded(inputs.key),
            value=columns.padded(inputs.value),
            q_positions=rows.padded_tokens(inputs.q_positions),
            k_positions=columns.padded_tokens(inputs.k_positions),
        )
        return BlockedInputs(inputs=padded, rows=rows, columns=columns)

    def block(self, row: Index, column: Index) -> QKV:
        """One block of queries and one of keys."""
        return QKV(
            query=self.rows.block(row, self.inputs.query),
            key=self.columns.block(column, self.inputs.key),
            value=self.columns.block(column, self.inputs.value),
            q_positions=self.rows.block_tokens(row, self.inputs.q_positions),
            k_positions=self.columns.block_tokens(column, self.inputs.k_positions),
        )


def _padded_cotangents(blocks: Blocks, incoming: OutputCotangents) -> OutputCotangents:
    """The cotangent for padded queries: padding has a cotangent of zeros, and so adds nothing to
    gradients of keys.
    """
    cotangent, delta = (
        jnp.pad(array, [(0, 0), (0, blocks.missing), *[(0, 0)] * (array.ndim - 2)])
        for array in (incoming.cotangent, incoming.delta)
    )
    return OutputCotangents(lse=blocks.padded(incoming.lse), cotangent=cotangent, delta=delta)


def _tied_to_query(inputs: QKV) -> QKV:
    """Inputs whose positions have a data dependence on queries: otherwise, when JAX differentiates
    a loop over layers, the masks of all blocks together, which are constants, would be moved out of
    it.
    """
    tied = jax.lax.optimization_barrier((inputs.query, inputs.q_positions, inputs.k_positions))
    return replace(inputs, query=tied[0], q_positions=tied[1], k_positions=tied[2])


def _zeros(*arrays: Value) -> Any:
    return tuple(jnp.zeros(array.shape, jnp.float32) for array in arrays)


def _if_visible(any_visible: Value | None, work: Callable[[], T], otherwise: T) -> T:
    """The result of `work`, or `otherwise` if no query attends to any key."""
    return work() if any_visible is None else jax.lax.cond(any_visible, work, lambda: otherwise)


#: Index of a device: a Python integer, or computed by the program.
DeviceIndex = TypeVar("DeviceIndex", int, jax.Array, Index)


# --------------------------------------------------------------------------------------------------
# The positions of a sequence on each device, contiguous or in zig-zag order.
#
# Contiguous, device i of N has the i-th of N runs. Under a causal mask the last device then does
# most of the work and the first almost none. In zig-zag order a device has the i-th and the (2 N
# - 1 - i)-th of 2 N runs, at equal distances from the two ends, and all devices have the same
# work (Brandon et al., arXiv:2311.09431, balance it by stripes; two runs leave blocks of whole
# rows).


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A sequence sharded over a mesh axis.

    Attributes:
        axis: the mesh axis, or its parts.
        ways: its size.
        zigzag: whether a device has two runs of the sequence.
        device_index: index of the device, inside of a region where it must not be a constant of the
            region (`tied_to`).
    """

    axis: str | tuple[str, ...]
    ways: int
    zigzag: bool = True
    device_index: Value | None = None

    @property
    def runs(self) -> int:
        """Number of runs of the sequence per device."""
        return 2 if self.zigzag else 1

    def order(self, length: int) -> np.ndarray:
        """The position in the sequence of each element of the concatenated parts of all devices,
        [length].
        """
        self.check(length)
        runs = np.arange(length).reshape(self.runs * self.ways, -1)
        return np.concatenate(
            [runs[number] for device in range(self.ways) for number in self.run_indices(device)]
        )

    def check(self, length: int) -> None:
        """Raises if a sequence of this length cannot be sharded."""
        if length % (self.runs * self.ways):
            raise LayoutError(
                f"a sequence of {length} positions cannot be sharded over {self.axis}={self.ways}"
                f" in {self.runs * self.ways} equal runs\nTry: a sequence that is a multiple of"
                f" {self.runs * self.ways}{', or zigzag=False' if self.zigzag else ''}"
            )

    def dealt(self, array: Value, dim: int = 1) -> Value:
        """A replicated array with its sequence reordered to the order of the devices."""
        return jnp.take(array, self.order(array.shape[dim]), axis=dim) if self.zigzag else array

    def collected(self, array: Value, dim: int = 1) -> Value:
        """The reverse of `dealt`."""
        return (
            jnp.take(array, np.argsort(self.order(array.shape[dim])), axis=dim)
            if self.zigzag
            else array
        )

    def dealt_inside(self, array: Value, dim: int = 1) -> Value:
        """A device's part of an array in the order of the sequence -> its part in the order of the
        devices; inside of a region that is manual over the axis.

        Contiguous, a device has the runs 2 i and 2 i + 1. All first runs are one message, and all
        second runs another, since no two of either go to the same device; nothing is gathered.
        """
        if not self.zigzag:
            return array
        even, odd = (
            self._permute(run, self._targets(number))
            for number, run in enumerate(jnp.split(array, 2, axis=dim))
        )
        # Even runs are the first ones of even devices, and the second ones of odd devices.
        return self._by_parity(even, odd, dim)

    def collected_inside(self, array: Value, dim: int = 1) -> Value:
        """The reverse of `dealt_inside`."""
        if not self.zigzag:
            return array
        first, second = jnp.split(array, 2, axis=dim)
        even, odd = jnp.split(self._by_parity(first, second, dim), 2, axis=dim)
        return jnp.concatenate(
            [
                self._permute(run, [(to, source) for source, to in self._targets(number)])
                for number, run in enumerate((even, odd))
            ],
            axis=dim,
        )

    def _targets(self, parity: int) -> list[tuple[int, int]]:
        """(device of a run in contiguous order, device in zig-zag order) of all even runs, or of
        all odd ones.
        """
        runs = [2 * device + parity for device in range(self.ways)]
        return [(device, min(run, 2 * self.ways - 1 - run)) for device, run in enumerate(runs)]

    def _permute(self, array: Value, pairs: list[tuple[int, int]]) -> Value:
        """An array after messages between (source, target) pairs of devices."""
        return jax.lax.ppermute(array, self.axis, pairs)

    def _by_parity(self, even: Value, odd: Value, dim: int) -> Value:
        """Two arrays concatenated on even devices, and in reverse order on odd ones."""
        swapped = self.tied_to(even).device() % 2 == 1
        return jnp.concatenate(
            [jnp.where(swapped, odd, even), jnp.where(swapped, even, odd)], axis=dim
        )

    def all_gathered(self, array: Value) -> Value:
        """The all-gathered parts of all devices: [B, S / N, ...] -> [B, S, ...]."""
        return jax.lax.all_gather(array, self.axis, axis=1, tiled=True)

    def positions(self, device: Index, local: int) -> Value:
        """Positions in the sequence of a device's tokens, [local]."""
        run = jnp.arange(local // self.runs)
        return jnp.concatenate(
            [number * (local // self.runs) + run for number in self.run_indices(device)]
        )

    def device(self) -> Value:
        """Index of the device, inside of a region that is manual over the axis."""
        return jax.lax.axis_index(self.axis) if self.device_index is None else self.device_index

    def tied_to(self, array: Value) -> Cut:
        """The partition with a device index that depends on an array that the region reads.

        Values that depend on the index alone are moved out of a loop around the region, into a
        region without operands, which XLA's partitioner rejects (seen with JAX 0.10.2: "'func.call'
        op expected at least one operand of @xla.sdy.manual_computation_body").
        """
        element = jax.lax.stop_gradient(array)[(0,) * array.ndim]
        return replace(self, device_index=jax.lax.optimization_barrier((self.device(), element))[0])

    def shifted(self, array: Value, hop: int = 1) -> Value:
        """The array of the device whose index is smaller by `hop`."""
        return self._permute(array, [(i, (i + hop) % self.ways) for i in range(self.ways)])

    def run_indices(self, device: DeviceIndex) -> tuple[DeviceIndex, ...]:
        """Indices of the runs of a device."""
        return (device, 2 * self.ways - 1 - device) if self.zigzag else (device,)
