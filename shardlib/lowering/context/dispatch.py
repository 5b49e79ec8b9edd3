"""Attention of a sharded sequence: heads, kernels, and the exchange of keys and values.

All functions are manual over the axis (`jax.shard_map`): arrays are one device's shards. Every form
is exact: results and gradients are those of attention on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardlib.errors import LayoutError, MissingPackageError
from shardlib.functions.attention import Attention, Operands
from shardlib.functions.experts import LANES, Wanted
from shardlib.graph import Graph, Kind
from shardlib.jax_types import Aval, Function, Index, Value
from shardlib.layout import Layout
from shardlib.lowering.collectives import Regions
from shardlib.lowering.context.block import (
    CAUSAL,
    FAR,
    QKV,
    AttentionMask,
    AttentionPart,
    Cut,
    MaskInputs,
    OutputCotangents,
    PositionBias,
    Positions,
    Scores,
    attend,
    attend_backward,
    empty_part,
)
from shardlib.lowering.contractions import ValueLayouts
from shardlib.lowering.mesh import constrain, named_sharding
from shardlib.lowering.uses import CallSite
from shardlib.planner.plan import Plan
from shardlib.propagation.contractions import divided_heads, gradient_key

# --------------------------------------------------------------------------------------------------
# The sharding of heads of a call of attention.
#
# If no axis shards the heads of queries outside, those that shard the sequence or the width of a
# head there shard the heads inside of the region. With fewer heads of keys than devices, keys and
# values are replicated; if the width of heads is sharded, they are gathered right after their
# projections, since rotary embeddings pair dims of a head, and would move them once more. Arrays
# that are read sharded by heads are rotated sharded by heads, and so are their gradients; these are
# exchanged after they are rounded, and not in the float32 of the rotation.


@dataclass(frozen=True, kw_only=True)
class HeadSharding:
    """The sharding of heads.

    Attributes:
        axes: mesh axes that shard the heads of queries.
        ways: their number of devices.
        shards_kv: whether they shard the heads of keys and values too; otherwise these are
            replicated, and every device picks those of its queries.
    """

    axes: tuple[str, ...]
    ways: int
    shards_kv: bool

    @staticmethod
    def of(axes: tuple[str, ...], size: int, heads: int, groups: int) -> HeadSharding:
        """Heads sharded over axes if that is possible, otherwise replicated."""
        divided = divided_heads(heads=heads, groups=groups, devices=size)
        if divided == "none":
            return HeadSharding(axes=(), ways=1, shards_kv=True)
        return HeadSharding(axes=axes, ways=size, shards_kv=divided == "all")

    def local_kv(self, array: Value, heads: int) -> Value:
        """Keys or values of this device's queries; inside of the region.

        Args:
            array: keys or values, [B, K, G, D].
            heads: number of heads of all queries.
        """
        if self.shards_kv:
            return array
        group_size = heads // array.shape[2]
        return jax.lax.dynamic_slice_in_dim(
            array, jax.lax.axis_index(self.axes) * (heads // self.ways) // group_size, 1, axis=2
        )


def is_replaced(site: CallSite, plan: Plan, layouts: ValueLayouts) -> bool:
    """True if a call of attention is replaced by a program for many devices; otherwise its
    equations are left to automatic partitioning.
    """
    exchanged = plan.context in ("ring", "ulysses")
    return (
        (exchanged or plan.attention != "traced")
        and plan.context != "all-gather"
        and site.layout_key(0) in layouts
        and site.avals[0].ndim == 4
    )


def head_axes(queries: Layout, plan: Plan) -> tuple[str, ...]:
    """The mesh axes that shard the heads of queries [B, Q, H, D] inside of the region.

    If no axis shards the heads outside, those that shard the sequence or the width of a head there
    do: one all-to-all each way, where otherwise every device along them would need the whole
    sequence and compute the same attention. A context axis shards the sequence inside as well, and
    an exchange over it shards the heads itself.
    """
    batch, rows, heads, width = queries
    if heads or (plan.context == "ulysses" and plan.mesh["context"] > 1):
        return heads
    return tuple(axis for axis in (*rows, *width) if axis != "context" and axis not in batch)


def with_head_layouts(
    layouts: ValueLayouts, graph: Graph, sites: Iterable[CallSite], plan: Plan
) -> dict[tuple[str, int], Layout]:
    """Adds layouts for queries, keys and values whose projections shard the width of heads: those
    that attention reads replicated are gathered right after their projections; the
    gradients of those that it reads sharded by heads are sharded by heads, too.
    """
    layouts = dict(layouts)
    producers = {(op.path, index): op for op in graph.ops for index in range(len(op.results))}
    for site in sites:
        if not isinstance(site.call.form, Attention) or not is_replaced(site, plan, layouts):
            continue
        queries, parts = layouts[site.layout_key(0)], site.call.form.parts
        axes, count = head_axes(queries, plan), site.avals[0].shape[2]
        groups, size = site.avals[2 * parts].shape[2], plan.mesh.ways(axes)
        divided = divided_heads(heads=count, groups=groups, devices=size)
        if queries[2] or divided == "none":
            continue
        for index, source in enumerate(site.sources[: 2 * parts + 1]):
            for key in _projections(graph, producers, source) if source in producers else ():
                if key not in layouts or set(layouts[key][-1]) != set(axes):
                    continue
                if index >= parts and divided == "queries":
                    layouts[key] = Layout(*layouts[key][:-1], ())
                elif len(layouts[key]) == len(queries):
                    layouts[gradient_key(key[0])] = Layout(*layouts[key][:2], axes, ())
    return layouts


def _projections(
    graph: Graph, producers: Mapping[tuple[str, int], Any], source: tuple[str, int]
) -> list[tuple[str, int]]:
    """The results of contractions from which a value is computed without another contraction."""
    by_value = {producers[key].results[key[1]]: key for key in producers}
    results, seen = list[tuple[str, int]](), set[tuple[str, int]]()
    pending = [source]
    while pending:
        key = pending.pop()
        if key in seen:
            continue
        seen.add(key)
        op = producers[key]
        if op.category == "matmul":
            results.append(key)
        elif op.category in ("elementwise", "movement"):
            pending.extend(by_value[value] for value in op.operands if value in by_value)
    return results


# --------------------------------------------------------------------------------------------------
# Vendors' kernels for attention of arrays on one device, in the order of the sequence.
#
# The caller chooses the kernel (`shardlib.graph`): a program may be compiled for absent machines.

#: The most positions of a block of splash attention; its use of a core's local memory grows with
#: it.
BLOCKS = (512, 256, LANES)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernel that computes attention on one device.

    Attributes:
        kind: one of `shardlib.graph`.
        interpret: run "splash" in interpret mode on any machine, slowly, for tests.
    """

    kind: Kind = "blocks"
    interpret: bool = False

    def why_not(
        self,
        query: Value,
        key: Value,
        value: Value,
        *,
        scores: Scores,
        mask: AttentionMask = CAUSAL,
        documents: bool = False,
    ) -> str:
        """The reason why a kernel cannot be used for arrays of these shapes and dtypes; empty if it
        can.

        Args:
            query, key, value: [B, Q, H, D], [B, K, G, D] and [B, K, G, V] of one device, with a
                shape and a dtype; as many queries as keys, or all keys are visible.
        """
        window = mask.window
        return Wanted(
            queries=query.shape[1],
            keys=key.shape[1],
            width=query.shape[3],
            value_width=value.shape[3],
            dtype=query.dtype,
            causal=mask.causal,
            window=(window or 0) if window is None or isinstance(window, int) else None,
            capped=bool(scores.softcap),
            documents=documents,
            biased=mask.bias is not None,
        ).why_not(self.kind)

    def attention(
        self,
        query: Value,
        key: Value,
        value: Value,
        documents: tuple[Value, ...] | None = None,
        *,
        scores: Scores,
        mask: AttentionMask = CAUSAL,
    ) -> Value:
        """Attention, with gradients, for positions 0, 1, 2, ...; arguments as for `why_not`, and
        documents of queries and keys, [B, Q] and [B, K].

        Returns:
            [B, S, H, V], of the dtype of the values.
        """
        why = self.why_not(
            query, key, value, scores=scores, mask=mask, documents=documents is not None
        )
        if why:
            raise LayoutError(
                f"attention cannot be computed by a kernel of kind {self.kind!r}: {why}\nTry:"
                ' Kernels(kind="blocks")'
            )
        if self.kind == "blocks":
            return _blocks(query, key, value, documents, scores, mask)
        window, causal = mask.window, mask.causal
        assert window is None or isinstance(window, int), "kernels know their window"
        if self.kind == "cudnn":
            return _cudnn(query, key, value, scores.scale, window or 0, causal)
        return _splash(
            query,
            key,
            value,
            documents,
            scores,
            _mask(query.shape[1], key.shape[1], window or 0, causal),
            self.interpret,
        )


def _blocks(
    query: Value,
    key: Value,
    value: Value,
    documents: tuple[Value, ...] | None,
    scores: Scores,
    mask: AttentionMask,
) -> Value:
    rows, columns = (
        Positions(
            position=jnp.arange(array.shape[1], dtype=jnp.int32),
            document=None if documents is None else documents[k],
        )
        for k, array in enumerate((query, key))
    )
    return attention(scores, query, key, value, rows, columns, mask)


def _cudnn(
    query: Value, key: Value, value: Value, scale: float, window: int, causal: bool
) -> Value:
    width = max(query.shape[3], value.shape[3])
    try:
        result = jax.nn.dot_product_attention(
            *(_widened(array, width) for array in (query, key, value)),
            scale=scale,
            is_causal=causal,
            local_window_size=(window - 1, 0) if window else None,
            implementation="cudnn",
        )
        return result[..., : value.shape[3]]
    except NotImplementedError as error:
        raise LayoutError(
            f"attention cannot be computed by cuDNN on this GPU: {error}\nTry: pin"
            " attention='blocks'"
        ) from error
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        raise MissingPackageError(
            f"attention cannot be computed by cuDNN: {error}\nTry: pip install nvidia-cudnn-cu13"
            " jax-cuda13-plugin, with libcudnn.so.9 on LD_LIBRARY_PATH"
        ) from error


def _widened(array: Value, width: int) -> Value:
    """An array [..., width] whose heads are padded with zeros, which add nothing to scores, and add
    columns to the result that are dropped.
    """
    missing = width - array.shape[3]
    return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else array


def _mask(queries: int, keys: int, window: int, causal: bool) -> Any:
    # Imported here: Pallas takes long to load, and few programs are for TPUs.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = queries, keys
    if window:
        return splash.LocalMask(shape, (window - 1, 0 if causal else window - 1), 0)
    return splash.CausalMask(shape) if causal else splash.FullMask(shape)


def _splash(
    query: Value,
    key: Value,
    value: Value,
    documents: tuple[Value, ...] | None,
    scores: Scores,
    mask: Any,
    interpret: bool,
) -> Value:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    rows, columns = (next(size for size in BLOCKS if length % size == 0) for length in mask.shape)
    sizes = splash.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    masks = splash.MultiHeadMask([mask] * query.shape[2])
    kernel: Any = splash.make_splash_mha(
        masks,
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        attn_logits_soft_cap=scores.softcap or None,
        interpret=interpret,
    )
    # The kernel does not scale.
    scaled = (query.astype(jnp.float32) * scores.scale).astype(query.dtype)
    arrays = [jnp.swapaxes(array, 1, 2) for array in (scaled, key, value)]
    segments = None if documents is None else splash.SegmentIds(*documents)
    result: Any = jax.vmap(kernel)(*arrays, segments)
    return jnp.swapaxes(result, 1, 2).astype(value.dtype)


# --------------------------------------------------------------------------------------------------
# Keys and values are gathered, or devices exchange parts of the sequence for heads.
#
# Gathered, every device has all keys and values for its own queries. Exchanged (DeepSpeed-Ulysses,
# Jacobs et al., arXiv:2309.14509), every device has the whole sequence for its share of the heads:
# four all-to-alls of a device's part of the activations, whatever the number of devices. If there
# are fewer groups of keys and values than devices, or devices do not divide them, groups are
# repeated first.

BLOCK_KERNELS = Kernels()


@dataclass(frozen=True, kw_only=True)
class RinglessAttention:
    """Attention of a sharded sequence without a ring.

    Attributes:
        cut: the partition of the sequence.
        scores: how scores are computed.
        causal: whether later positions are masked.
        kernels: the kernel.
    """

    cut: Cut
    scores: Scores
    causal: bool = True
    kernels: Kernels = BLOCK_KERNELS

    def all_gather(
        self,
        query: Value,
        key: Value,
        value: Value,
        segments: Value | None = None,
        *,
        window: Index | None = None,
        bias: PositionBias | None = None,
    ) -> Value:
        """Attention of this device's queries to gathered keys; arguments and result as those of
        `Ring.attention`. Vendors' kernels are used only if all keys are visible, since they do not
        take positions.
        """
        mask = AttentionMask(causal=self.causal, window=window, bias=bias)
        gather = self.cut.all_gathered
        if self.kernels.kind != "blocks":
            documents = None if segments is None else (segments, gather(segments))
            return self._by_kernel(query, gather(key), gather(value), documents, mask)
        tokens = Positions(
            position=self.cut.positions(self.cut.device(), query.shape[1]), document=segments
        )
        all_tokens = Positions(
            position=_positions(self.cut, query.shape[1]),
            document=None if segments is None else gather(segments),
        )
        return attention(self.scores, query, gather(key), gather(value), tokens, all_tokens, mask)

    def ulysses(
        self,
        query: Value,
        key: Value,
        value: Value,
        segments: Value | None = None,
        *,
        window: Index | None = None,
        bias: PositionBias | None = None,
    ) -> Value:
        """Attention to the whole sequence for this device's share of the heads; arguments and
        result as those of `Ring.attention`. For vendors' kernels, tokens are put in the order of
        the sequence.
        """
        exchange = HeadExchange(cut=self.cut)
        mask = AttentionMask(
            causal=self.causal, window=window, bias=bias and exchange.of_heads(bias)
        )
        arrays = exchange.for_heads(query, key, value)
        documents = None if segments is None else self.cut.all_gathered(segments)
        if self.kernels.kind == "blocks":
            tokens = Positions(position=_positions(self.cut, query.shape[1]), document=documents)
            return exchange.for_tokens(attention(self.scores, *arrays, tokens, tokens, mask))
        documents = None if documents is None else (exchange.ordered(documents),) * 2
        query, key, value = map(exchange.ordered, arrays)
        result = self._by_kernel(query, key, value, documents, mask)
        return exchange.for_tokens(exchange.in_device_order(result))

    def _by_kernel(
        self,
        query: Value,
        key: Value,
        value: Value,
        documents: tuple[Value, ...] | None,
        mask: AttentionMask,
    ) -> Value:
        return self.kernels.attention(query, key, value, documents, scores=self.scores, mask=mask)


@dataclass(frozen=True, kw_only=True)
class HeadExchange:
    """The exchange of parts of the sequence for heads.

    Attributes:
        cut: the partition of the sequence.
    """

    cut: Cut

    def for_heads(self, query: Value, key: Value, value: Value) -> tuple[Value, Value, Value]:
        """The whole sequence for a share of the heads: [B, S / N, H, D] -> [B, S, H / N, D];
        likewise keys and values, [B, S / N, G, D].
        """
        heads, groups, size = query.shape[2], key.shape[2], self.cut.ways
        if heads % size:
            raise LayoutError(
                f"{heads} heads with {groups} groups of keys and values cannot be exchanged over"
                f" {self.cut.axis}={size}\nTry: a {self.cut.axis} axis that divides the heads, or a"
                " ring"
            )
        repeats = math.lcm(groups, size) // groups
        if repeats > 1:  # as many groups as heads at most, since both numbers divide the heads
            key, value = (jnp.repeat(array, repeats, axis=2) for array in (key, value))
        return (
            self._all_to_all(query, 2, 1),
            self._all_to_all(key, 2, 1),
            self._all_to_all(value, 2, 1),
        )

    def of_heads(self, bias: PositionBias) -> PositionBias:
        """The distance biases of this device's share of the heads."""
        heads = bias.array.shape[-1] // self.cut.ways
        first = jax.lax.axis_index(self.cut.axis) * heads
        local = jax.lax.dynamic_slice_in_dim(bias.array, first, heads, axis=-1)
        return replace(bias, array=local)

    def for_tokens(self, array: Value) -> Value:
        """The reverse of `for_heads`: own positions for all heads."""
        return self._all_to_all(array, 1, 2)

    def ordered(self, array: Value) -> Value:
        """The concatenated parts of all devices, in the order of the sequence: the first runs of
        all devices, then the second ones from the last device to the first.
        """
        if not self.cut.zigzag:
            return array
        runs = array.reshape(array.shape[0], self.cut.ways, 2, -1, *array.shape[2:])
        return jnp.concatenate([runs[:, :, 0], runs[:, ::-1, 1]], axis=1).reshape(array.shape)

    def in_device_order(self, array: Value) -> Value:
        """The reverse of `ordered`."""
        if not self.cut.zigzag:
            return array
        runs = array.reshape(array.shape[0], 2, self.cut.ways, -1, *array.shape[2:])
        return jnp.stack([runs[:, 0], runs[:, 1, ::-1]], axis=2).reshape(array.shape)

    def _all_to_all(self, array: Value, split: int, joined: int) -> Value:
        return jax.lax.all_to_all(
            array, self.cut.axis, split_axis=split, concat_axis=joined, tiled=True
        )


def _positions(cut: Cut, local: int) -> Value:
    """Positions of the concatenated parts of all devices."""
    return jnp.concatenate([cut.positions(device, local) for device in range(cut.ways)])


# --------------------------------------------------------------------------------------------------
# Ring attention (Liu et al., arXiv:2310.01889): keys and values are passed around the devices.
#
# Every device keeps its queries. In each of N turns it attends to the keys and values that it
# has, and sends them to its neighbour: N - 1 messages per device in the forward pass. In the
# backward pass keys and values go around once more with their gradients, which return with the
# N-th message. Memory per device does not grow with the number of devices.
#
# Under a causal mask and in zig-zag order, all queries attend to the first run alone of keys from
# an earlier device (of lower index); queries of the second run alone attend to all keys from a
# later one. Either is half of a block, without a mask, so that all devices have equal work in
# every turn.
#
# With a statically known window, turns in which no device attends to anything are skipped: keys
# and values are sent past those devices in one message.

#: (slice of own queries, slice of keys, mask) -> anything.
Work = Callable[[slice, slice, AttentionMask], Any]
#: (distance in devices, local state, arrays passed around) -> (local state, arrays passed around).
Turn = Callable[[Any, Any, tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]
ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Attention around a ring.

    Attributes:
        cut: the partition of the sequence.
        scores: how scores are computed.
        causal: whether later positions are masked.
        window: static window, as in `AttentionMask`; 0 for none.
    """

    cut: Cut
    scores: Scores
    causal: bool = True
    window: int = 0

    def attention(
        self,
        query: Value,
        key: Value,
        value: Value,
        segments: Value | None = None,
        *,
        window: Index | None = None,
        bias: PositionBias | None = None,
    ) -> Value:
        """Attention of this device's queries to all keys; inside of a region that is manual over
        the axis.

        Args:
            query: [B, S / N, H, D].
            key, value: [B, S / N, G, D] and [B, S / N, G, V], with H a multiple of G.
            segments: index of the document of every position, [B, S / N]: a query attends to its
                own document alone. None for a single document.

        Returns:
            [B, S / N, H, V], of the dtype of the values.
        """
        mask = AttentionMask(window=self.window if window is None else window, bias=bias)
        static_window, inputs = mask.split
        ring = replace(self, window=static_window)
        return _with_gradients(ring, query, key, value, segments, inputs)

    def forward(
        self, query: Value, key: Value, value: Value, segments: Value | None, inputs: MaskInputs
    ) -> AttentionPart:
        """Attention, before it is cast."""
        ring, local = replace(self, cut=self.cut.tied_to(query)), query.shape[1]

        def turn(
            number: Index, part: AttentionPart, moving: tuple[Any, ...]
        ) -> tuple[AttentionPart, tuple[Any, ...]]:
            all_inputs = QKV(
                query=query,
                key=moving[0],
                value=moving[1],
                q_positions=ring._tokens(0, local, segments),
                k_positions=ring._tokens(number, local, *moving[2:]),
            )

            def work(rows: slice, columns: slice, mask: AttentionMask) -> AttentionPart:
                attended = attend(all_inputs.sliced(rows, columns), mask, ring.scores)
                return jax.tree.map(
                    lambda leaf, of_rows: leaf.at[:, rows].set(of_rows),
                    part,
                    jax.tree.map(lambda leaf: leaf[:, rows], part) + attended,
                )

            return ring._turn(number, local, inputs, work, part), moving

        return ring._all_turns(
            turn, empty_part(query, value.shape[-1]), _moving(key, value, segments), local
        )[0]

    def backward(
        self,
        query: Value,
        key: Value,
        value: Value,
        segments: Value | None,
        inputs: MaskInputs,
        incoming: OutputCotangents,
    ) -> tuple[Value, ...]:
        """Gradients of queries, keys and values, and of the distance biases, in float32."""
        ring, local = replace(self, cut=self.cut.tied_to(query)), query.shape[1]
        arrays = () if inputs.bias is None else (inputs.bias.array,)
        zeros = tuple(jnp.zeros(leaf.shape, jnp.float32) for leaf in (key, value, query, *arrays))

        def turn(number: Index, state: Any, moving: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
            all_inputs = QKV(
                query=query,
                key=moving[2],
                value=moving[3],
                q_positions=ring._tokens(0, local, segments),
                k_positions=ring._tokens(number, local, *moving[4:]),
            )

            def work(rows: slice, columns: slice, mask: AttentionMask) -> tuple[Any, ...]:
                gradients = attend_backward(
                    all_inputs.sliced(rows, columns),
                    mask,
                    ring.scores,
                    incoming.map(lambda array: array[:, rows]),
                )
                slices = rows, columns, columns
                return (
                    *(
                        total.at[:, positions].add(gradient)
                        for total, gradient, positions in zip(sums, gradients, slices, strict=False)
                    ),
                    *(
                        total + gradient
                        for total, gradient in zip(sums[3:], gradients[3:], strict=True)
                    ),
                )

            sums = state[0], *moving[:2], *state[1:]
            d_query, d_key, d_value, *d_arrays = ring._turn(number, local, inputs, work, sums)
            return (d_query, *d_arrays), (d_key, d_value, *moving[2:])

        state, moving = ring._all_turns(
            turn, zeros[2:], (*zeros[:2], *_moving(key, value, segments)), local
        )
        returned = ring._send(moving[:2], ring.cut.ways - ring.turns(local)[-1])
        return state[0], *returned, *state[1:]

    def turns(self, local: int) -> tuple[int, ...]:
        """Distances in devices of the turns in which some device attends to some keys, for `local`
        positions per device.
        """
        return tuple(
            number
            for number in range(self.cut.ways)
            if any(
                self._attends(device, (device - number) % self.cut.ways, local)
                for device in range(self.cut.ways)
            )
        )

    def _attends(self, device: int, owner: int, local: int) -> bool:
        """True if any query of a device attends to any key of another, given their runs."""
        length = local // self.cut.runs
        distances = [
            query_run - key_run
            for query_run in self.cut.run_indices(device)
            for key_run in self.cut.run_indices(owner)
            if query_run >= key_run or not self.causal
        ]
        return any(
            not self.window or not distance or (abs(distance) - 1) * length + 1 < self.window
            for distance in distances
        )

    def _all_turns(
        self, turn: Turn, state: Any, moving: tuple[Any, ...], local: int
    ) -> tuple[Any, tuple[Any, ...]]:
        """All turns, with a message after each but the last."""
        turns = self.turns(local)

        def step(
            carry: tuple[Any, tuple[Any, ...]], number: Index
        ) -> tuple[tuple[Any, tuple[Any, ...]], None]:
            state, moving = turn(number, *carry)
            return (state, self._send(moving)), None

        state, moving = turn(0, state, moving)
        if len(turns) == self.cut.ways > 1:
            (state, moving), _ = jax.lax.scan(
                step, (state, self._send(moving)), jnp.arange(1, self.cut.ways - 1)
            )
            return turn(self.cut.ways - 1, state, moving)
        for last, number in pairwise(turns):
            state, moving = turn(number, state, self._send(moving, number - last))
        return state, moving

    def _send(self, arrays: tuple[Any, ...], hop: int = 1) -> tuple[Any, ...]:
        return (
            tuple(self.cut.shifted(leaf, hop) for leaf in arrays) if hop % self.cut.ways else arrays
        )

    def _tokens(self, number: Index, local: int, segments: Value | None = None) -> Positions:
        """Positions and documents of the tokens that come from `number` devices away."""
        return Positions(
            position=self.cut.positions((self.cut.device() - number) % self.cut.ways, local),
            document=segments,
        )

    def _turn(self, number: Index, local: int, inputs: MaskInputs, work: Work, before: Any) -> Any:
        """The work on keys from `number` devices away (an integer or traced); `before` if no query
        attends to any of them.
        """
        not_causal = inputs.mask(self.window, causal=False)
        if not self.causal:
            return work(ALL, ALL, not_causal)
        if isinstance(number, int) and not number:
            return work(ALL, ALL, replace(not_causal, causal=True))
        device, half = self.cut.device(), local // 2
        # True if the keys come from a device of lower index, and have not wrapped around.
        earlier = number <= device
        if self.cut.zigzag:
            return jax.lax.cond(
                earlier,
                partial(work, ALL, slice(0, half), not_causal),
                partial(work, slice(half, None), ALL, not_causal),
            )
        return jax.lax.cond(earlier, partial(work, ALL, ALL, not_causal), lambda: before)


def _moving(key: Value, value: Value, segments: Value | None) -> tuple[Any, ...]:
    """The arrays that are passed around."""
    return (key, value) if segments is None else (key, value, segments)


# --------------------------------------------------------------------------------------------------
# Attention of arrays on one device, with a backward pass that recomputes scores: nothing of their
# size is saved.


@dataclass(frozen=True, kw_only=True)
class OneDevice:
    """Attention on one device.

    Attributes:
        scores: how scores are computed.
        causal: whether later positions are masked.
        window: static window, as in `AttentionMask`; 0 for none.
    """

    scores: Scores
    causal: bool = True
    window: int = 0

    def forward(
        self,
        query: Value,
        key: Value,
        value: Value,
        tokens: tuple[Positions, Positions],
        inputs: MaskInputs,
    ) -> AttentionPart:
        """Attention, before it is cast."""
        qkv = QKV(query=query, key=key, value=value, q_positions=tokens[0], k_positions=tokens[1])
        return attend(qkv, self._mask(inputs), self.scores)

    def backward(
        self,
        query: Value,
        key: Value,
        value: Value,
        tokens: tuple[Positions, Positions],
        inputs: MaskInputs,
        incoming: OutputCotangents,
    ) -> tuple[Value, ...]:
        """Gradients of queries, keys and values, and of the distance biases, in float32."""
        qkv = QKV(query=query, key=key, value=value, q_positions=tokens[0], k_positions=tokens[1])
        return attend_backward(qkv, self._mask(inputs), self.scores, incoming)

    def _mask(self, inputs: MaskInputs) -> AttentionMask:
        return inputs.mask(self.window, causal=self.causal)


def attention(
    scores: Scores,
    query: Value,
    key: Value,
    value: Value,
    q_positions: Positions,
    k_positions: Positions,
    mask: AttentionMask = CAUSAL,
) -> Value:
    """Attention of queries to keys, with gradients.

    Args:
        scores: how scores are computed.
        query, key, value: [B, Q, H, D], [B, K, G, D] and [B, K, G, V], with H a multiple of G.
        q_positions, k_positions: positions of queries and keys.
        mask: the mask.

    Returns:
        [B, Q, H, V], of the dtype of the values.
    """
    window, inputs = mask.split
    local = OneDevice(scores=scores, causal=mask.causal, window=window)
    return _with_gradients(local, query, key, value, (q_positions, k_positions), inputs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradients(
    method: Ring | OneDevice,
    query: Value,
    key: Value,
    value: Value,
    tokens: Any,
    inputs: MaskInputs,
) -> Value:
    """Attention, of the dtype of the values, with the gradients of the method.

    Args:
        tokens: positions of queries and of keys; for a ring, its segments.
    """
    return method.forward(query, key, value, tokens, inputs).result.astype(value.dtype)


def _forward(method: Ring | OneDevice, *operands: Any) -> tuple[Any, Any]:
    part = method.forward(*operands)
    # The cast result is saved, too: later operations often save it anyway, so that it is stored
    # once.
    result = part.result.astype(operands[2].dtype)
    return result, (*operands, result, part.lse)


def _backward(
    method: Ring | OneDevice, saved: tuple[Any, ...], cotangent: Value
) -> tuple[Any, ...]:
    query, key, value, tokens, inputs, result, lse = saved
    incoming = OutputCotangents.of(result, lse, cotangent)
    gradients = method.backward(query, key, value, tokens, inputs, incoming)
    return (
        *(
            gradient.astype(leaf.dtype)
            for gradient, leaf in zip(gradients[:3], saved, strict=False)
        ),
        None,
        inputs.cotangent(*gradients[3:]),
    )


_with_gradients.defvjp(_forward, _backward)


# --------------------------------------------------------------------------------------------------
# A call of `shardlib.functions.attention` with the sequence sharded.


def lower_attention(
    site: CallSite, plan: Plan, layouts: ValueLayouts, regions: Regions
) -> Callable[..., Sequence[Value]] | None:
    """The replacement of a call of attention; None if it is left to automatic partitioning, which
    gathers keys and values.

    Returns:
        Arrays of the call -> its results.
    """
    form, context = site.call.form, list(regions.physical_axes(("context",)))
    aval = site.avals[0]
    if not is_replaced(site, plan, layouts):
        return None
    groups = site.avals[2 * form.parts].shape[2]
    batch, axes = (layouts[site.layout_key(0)][0], head_axes(layouts[site.layout_key(0)], plan))
    heads = HeadSharding.of(regions.physical_axes(axes), regions.ways(axes), aval.shape[2], groups)
    rows = regions.physical_axes(batch) or None
    context_axis = None if not context else tuple(context) if len(context) > 1 else context[0]
    cut = (
        None
        if context_axis is None
        else Cut(
            axis=context_axis,
            ways=regions.ways(("context",)),
            zigzag=form.causal
            and plan.context == "ring"
            and aval.shape[1] % (2 * regions.ways(("context",))) == 0,
        )
    )
    spec = PartitionSpec(rows, context_axis, heads.axes or None, None)
    groups_spec = spec if heads.shards_kv else PartitionSpec(rows, context_axis, None, None)

    def keys(aval: Aval) -> PartitionSpec:
        return groups_spec if aval.ndim == 4 else PartitionSpec(rows, context_axis, None)

    other_specs = [
        *([PartitionSpec()] if form.chosen else []),
        *([PartitionSpec(rows, context_axis)] if form.packed else []),
        *([] if form.bias is None else [_bias_spec(site.avals[-1], heads)]),
    ]
    specs = (
        *[spec] * form.parts,
        *map(keys, site.avals[form.parts : 2 * form.parts]),
        groups_spec,
        *other_specs,
    )
    local = AttentionCall(
        form=form,
        ring=plan.context == "ring",
        cut=cut,
        heads=heads,
        num_heads=aval.shape[2],
        kernels=Kernels(
            kind=cast(Kind, plan.attention if plan.attention != "traced" else "blocks")
        ),
    )
    region = replicated_region(regions, local, specs, spec)
    shardings = _exchanged_layouts(site, layouts, heads, regions)

    def run(*arrays: Value) -> Sequence[Value]:
        constrained = [
            array if sharding is None else constrain(array, sharding)
            for array, sharding in zip(arrays, shardings, strict=True)
        ]
        return [region(*constrained)]

    return run


def _bias_spec(aval: Aval, heads: HeadSharding) -> PartitionSpec:
    """The spec of distance biases, whose last dim is that of the heads of queries."""
    return PartitionSpec(*[None] * (aval.ndim - 1), heads.axes or None)


def _exchanged_layouts(
    site: CallSite, layouts: ValueLayouts, heads: HeadSharding, regions: Regions
) -> list[NamedSharding | None]:
    """The layouts of operands whose sequence is exchanged for heads; None for others.

    Left to the partitioner, the gradient of queries may stay sharded by heads through rotary
    embeddings in float32, and twice the bytes are exchanged. Operands that are sharded by the width
    of heads are exchanged by projections (`with_head_layouts`).
    """
    parts, used_axes = site.call.form.parts, set(heads.axes)
    by_heads = {*range(2 * parts + 1 if heads.shards_kv else parts)}

    def sharding(index: int) -> NamedSharding | None:
        layout = layouts.get(site.layout_key(index))
        if index not in by_heads or layout is None or len(layout) < 4:
            return None
        return named_sharding(regions.mesh, layout) if used_axes & {*layout[1]} else None

    return [sharding(index) for index in range(len(site.avals))]


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The computation of one device.

    Attributes:
        form: the form of attention.
        ring: whether keys and values are passed around.
        cut: the partition of the sequence; None if it is not sharded.
        heads: the sharding of heads.
        num_heads: number of heads of queries, of all devices.
        kernels: the kernel for arrays on one device; a ring has its own.
    """

    form: Attention
    ring: bool
    cut: Cut | None
    heads: HeadSharding
    num_heads: int
    kernels: Kernels

    def __call__(self, *arrays: Value) -> Value:
        """Attention of one device's shards of the arrays of a call."""
        call_operands = Operands.of(self.form, arrays)
        value = self.heads.local_kv(call_operands.value, self.num_heads)
        key = _joined([self._key(key, value.shape[2]) for key in call_operands.keys])
        operands = [
            _joined(call_operands.queries),
            key,
            value,
            *([] if call_operands.segments is None else [call_operands.segments]),
        ]
        bias = (
            None
            if self.form.bias is None or call_operands.bias is None
            else PositionBias(form=self.form.bias, array=call_operands.bias)
        )
        if call_operands.global_layer is None:
            return self._attend(operands, self.form.window or None, bias)
        if self.ring or self.kernels.kind == "blocks":
            window = jnp.where(call_operands.global_layer, FAR, self.form.window).astype(jnp.int32)
            return self._attend(operands, window, bias)
        # A kernel for each.
        return jax.lax.cond(
            call_operands.global_layer,
            lambda: self._attend(operands, None, bias),
            lambda: self._attend(operands, self.form.window, bias),
        )

    def _key(self, key: Value, groups: int) -> Value:
        return (
            self.heads.local_kv(key, self.num_heads)
            if key.ndim == 4
            else jnp.broadcast_to(key[:, :, None], (*key.shape[:2], groups, key.shape[2]))
        )

    def _attend(
        self, operands: Sequence[Value], window: Index | None, bias: PositionBias | None
    ) -> Value:
        scores = Scores(scale=self.form.scale, softcap=self.form.softcap)
        if self.cut is None:
            query, key, value, *documents = operands
            return self.kernels.attention(
                query,
                key,
                value,
                (*documents, *documents) if documents else None,
                scores=scores,
                mask=AttentionMask(causal=self.form.causal, window=window, bias=bias),
            )
        if not self.ring:
            return RinglessAttention(
                cut=self.cut, scores=scores, causal=self.form.causal, kernels=self.kernels
            ).ulysses(*operands, window=window, bias=bias)
        ring = Ring(cut=self.cut, scores=scores, causal=self.form.causal)
        return self.cut.collected_inside(
            ring.attention(*map(self.cut.dealt_inside, operands), window=window, bias=bias)
        )


def _joined(parts: Sequence[Value]) -> Value:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


# --------------------------------------------------------------------------------------------------
# A manual region that all devices along some axes compute equally, whose gradients need not be
# summed.
#
# JAX assumes that every device contributes to the gradient of an argument that such a region reads
# replicated: the gradient is divided by the number of devices and all-reduced, though each device
# has all of it. Here the copies are the rows of an array [devices, ...] inside of the region; rows
# are made and read without communication, forward and backward.


def replicated_region(
    regions: Regions, function: Function, in_specs: Sequence[PartitionSpec], out_spec: PartitionSpec
) -> Function:
    """`Regions.manual` for a function that gives the same on all devices along the axes that shard
    neither its arguments nor its result.
    """
    named = {name for spec in (*in_specs, out_spec) for name in _names(spec)}
    axes = tuple(
        name
        for name, kind in zip(regions.mesh.axis_names, regions.mesh.axis_types, strict=True)
        if kind != AxisType.Manual and regions.mesh.shape[name] > 1 and name not in named
    )
    if not axes:
        return regions.manual(function, tuple(in_specs), out_spec)

    def with_copies(*arrays: Value) -> Value:
        differentiable = [_differentiable(array) for array in arrays]

        def local(*shards: Value) -> Value:
            return function(
                *(
                    shard[0] if row else shard
                    for shard, row in zip(shards, differentiable, strict=True)
                )
            )[None]

        region = regions.manual(
            local,
            tuple(
                PartitionSpec(axes, *spec) if row else spec
                for spec, row in zip(in_specs, differentiable, strict=True)
            ),
            PartitionSpec(axes, *out_spec),
        )
        rows = [
            _copies_as_rows(regions, axes, spec)(array) if row else array
            for array, spec, row in zip(arrays, in_specs, differentiable, strict=True)
        ]
        return _row_as_copies(regions, axes, out_spec)(region(*rows))

    return with_copies


def _names(spec: PartitionSpec) -> set[str]:
    return {name for dim in spec for name in ([dim] if isinstance(dim, str) else dim or ())}


def _differentiable(array: Value) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _copies_as_rows(regions: Regions, axes: tuple[str, ...], spec: PartitionSpec) -> Function:
    """Each device's copy of an array as its own row; the gradient is the device's own row."""
    return _with_backward(*_row_conversions(regions, axes, spec))


def _row_as_copies(regions: Regions, axes: tuple[str, ...], spec: PartitionSpec) -> Function:
    """The array whose copies are the rows of the devices; the gradient is copied to every row."""
    return _with_backward(*reversed(_row_conversions(regions, axes, spec)))


def _row_conversions(
    regions: Regions, axes: tuple[str, ...], spec: PartitionSpec
) -> tuple[Function, Function]:
    rows = PartitionSpec(axes, *spec)
    return (
        regions.manual(lambda array: array[None], (spec,), rows),
        regions.manual(lambda copies: copies[0], (rows,), spec),
    )


def _with_backward(forward: Function, backward: Function) -> Function:
    """A function whose backward pass is another function."""
    run = jax.custom_vjp(forward)
    run.defvjp(lambda array: (forward(array), None), lambda _, cotangent: (backward(cotangent),))
    return run
