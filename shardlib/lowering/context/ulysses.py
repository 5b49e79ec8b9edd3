"""Keys and values are gathered, or devices exchange parts of the sequence for heads.

Gathered, every device has all keys and values for its own queries. Exchanged (DeepSpeed-Ulysses,
Jacobs et al., arXiv:2309.14509), every device has the whole sequence for its share of the heads:
four all-to-alls of a device's part of the activations, whatever the number of devices. Where there
are fewer groups of keys and values than devices, or devices do not divide them, groups are repeated
first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.errors import LayoutError
from shardlib.jax_types import Index, Value
from shardlib.lowering.context.block import Scores
from shardlib.lowering.context.kernels import Kernels
from shardlib.lowering.context.mask import Offsets, Sight, Tokens
from shardlib.lowering.context.rematerialised import attention
from shardlib.lowering.context.sequence_partition import Cut

BLOCKS = Kernels()


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Attention of a sequence that is sharded, on each of the devices.

    Attributes:
        cut: the sequence over the mesh axis.
        scores: how scores are made, in blocks of which size.
        causal: whether a query sees no later position.
        kernels: what computes it.
    """

    cut: Cut
    scores: Scores
    causal: bool = True
    kernels: Kernels = BLOCKS

    def gathered(
        self,
        query: Value,
        key: Value,
        value: Value,
        segments: Value | None = None,
        *,
        window: Index | None = None,
        offsets: Offsets | None = None,
    ) -> Value:
        """Attention of this device's queries to gathered keys; arguments and result as those of
        `Ring.attention`. A kernel of a vendor applies where all keys are seen, for it knows no
        position of a device.
        """

        sight = Sight(causal=self.causal, window=window, offsets=offsets)

        def whole(array: Value) -> Value:
            return jax.lax.all_gather(array, self.cut.axis, axis=1, tiled=True)

        if self.kernels.kind != "blocks":
            documents = None if segments is None else (segments, whole(segments))
            return self._by_kernel(query, whole(key), whole(value), documents, sight)
        rows = Tokens(
            position=self.cut.positions(self.cut.device(), query.shape[1]), document=segments
        )
        columns = Tokens(
            position=_positions(self.cut, query.shape[1]),
            document=None if segments is None else whole(segments),
        )
        return attention(self.scores, query, whole(key), whole(value), rows, columns, sight)

    def exchanged(
        self,
        query: Value,
        key: Value,
        value: Value,
        segments: Value | None = None,
        *,
        window: Index | None = None,
        offsets: Offsets | None = None,
    ) -> Value:
        """Attention to the whole sequence for this device's share of the heads; arguments and
        result as those of `Ring.attention`. For a kernel of a vendor, the sequence is put in its
        order.
        """
        exchange = Exchange(cut=self.cut, group=self.cut.ways)
        sight = Sight(
            causal=self.causal, window=window, offsets=offsets and exchange.of_heads(offsets)
        )
        arrays, documents = (
            exchange.for_heads(query, key, value),
            (None if segments is None else exchange.whole(segments)),
        )
        if self.kernels.kind == "blocks":
            tokens = Tokens(position=_positions(self.cut, query.shape[1]), document=documents)
            return exchange.for_tokens(attention(self.scores, *arrays, tokens, tokens, sight))
        documents = None if documents is None else (exchange.ordered(documents),) * 2
        query, key, value = map(exchange.ordered, arrays)
        result = self._by_kernel(query, key, value, documents, sight)
        return exchange.for_tokens(exchange.unordered(result))

    def _by_kernel(
        self,
        query: Value,
        key: Value,
        value: Value,
        documents: tuple[Value, ...] | None,
        sight: Sight,
    ) -> Value:
        return self.kernels.attention(query, key, value, documents, scores=self.scores, sight=sight)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Neighbours exchange parts of the sequence for heads.

    Attributes:
        cut: the sequence over the mesh axis.
        group: neighbours that exchange.
    """

    cut: Cut
    group: int

    def for_heads(self, query: Value, key: Value, value: Value) -> tuple[Value, Value, Value]:
        """The positions of all neighbours for a share of the heads: [B, S / N, H, D] -> [B, S group
        / N, H / group, D].

        Args:
            query: [B, S / N, H, D].
            key: [B, S / N, G, D].
            value: [B, S / N, G, V].
        """
        heads, groups, size = query.shape[2], key.shape[2], self.group
        if heads % size:
            axes = (
                f"{self.cut.axis}={size}"
                if size == self.cut.ways
                else f"{size} neighbours of {self.cut.axis}={self.cut.ways}"
            )
            raise LayoutError(
                f"{heads} heads with {groups} groups of keys and values cannot be exchanged over"
                f" {axes}\nTry: a {self.cut.axis} axis that divides the heads, or a ring"
            )
        times = math.lcm(groups, size) // groups
        if times > 1:  # as many groups as heads at most, since both numbers divide the heads
            key, value = (jnp.repeat(array, times, axis=2) for array in (key, value))
        return (
            self._all_to_all(query, 2, 1),
            self._all_to_all(key, 2, 1),
            self._all_to_all(value, 2, 1),
        )

    def of_heads(self, offsets: Offsets) -> Offsets:
        """What distances add to the scores of this device's share of the heads."""
        each = offsets.array.shape[-1] // self.group
        first = jax.lax.axis_index(self.cut.axis) % self.group * each
        local = jax.lax.dynamic_slice_in_dim(offsets.array, first, each, axis=-1)
        return replace(offsets, array=local)

    def for_tokens(self, array: Value) -> Value:
        """The reverse: own positions for all heads."""
        return self._all_to_all(array, 1, 2)

    def whole(self, array: Value) -> Value:
        """What all neighbours have, one after the other: [B, S / N, ...] -> [B, S group / N,
        ...].
        """
        return jax.lax.all_gather(
            array, self.cut.axis, axis=1, tiled=True, axis_index_groups=self._groups
        )

    def ordered(self, array: Value) -> Value:
        """Parts of the neighbours, one after the other, in the order of the sequence: all of the
        first runs, then the second ones from the last neighbour's to the first's.
        """
        if not self.cut.zigzag:
            return array
        runs = array.reshape(array.shape[0], self.group, 2, -1, *array.shape[2:])
        return jnp.concatenate([runs[:, :, 0], runs[:, ::-1, 1]], axis=1).reshape(array.shape)

    def unordered(self, array: Value) -> Value:
        """The reverse of `ordered`."""
        if not self.cut.zigzag:
            return array
        runs = array.reshape(array.shape[0], 2, self.group, -1, *array.shape[2:])
        return jnp.stack([runs[:, 0], runs[:, 1, ::-1]], axis=2).reshape(array.shape)

    def _all_to_all(self, array: Value, split: int, joined: int) -> Value:
        return jax.lax.all_to_all(
            array,
            self.cut.axis,
            split_axis=split,
            concat_axis=joined,
            tiled=True,
            axis_index_groups=self._groups,
        )

    @property
    def _groups(self) -> list[list[int]] | None:
        """Numbers of the devices that exchange; None where all do."""
        return (
            None
            if self.group == self.cut.ways
            else np.arange(self.cut.ways).reshape(-1, self.group).tolist()
        )


def _positions(cut: Cut, local: int) -> Value:
    """Positions of what all devices have, one after the other."""
    return jnp.concatenate([cut.positions(device, local) for device in range(cut.ways)])
