"""Ring attention (Liu et al., arXiv:2310.01889): keys and values are passed around the devices.

Every device keeps its queries. In each of N turns it attends to the keys and values that it has,
and sends them to its neighbour: N - 1 messages per device in the forward pass. In the backward pass
keys and values go around once more with their gradients, which return with the N-th message. Memory
per device does not grow with the number of devices.

Under a causal mask and in zig-zag order, all queries attend to the first run alone of keys from an
earlier device (of lower index); queries of the second run alone attend to all keys from a later
one. Either is half of a block, without a mask, so that all devices have equal work in every turn.

With a statically known window, turns in which no device attends to anything are skipped: keys and
values are sent past those devices in one message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.jax_types import Index, Value
from shardlib.lowering.context.block import (
    CAUSAL,
    QKV,
    AttentionMask,
    AttentionPart,
    MaskInputs,
    OutputCotangents,
    PositionBias,
    Positions,
    Scores,
    attend,
    attend_backward,
    empty_part,
)
from shardlib.lowering.context.sequence_partition import Cut

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
