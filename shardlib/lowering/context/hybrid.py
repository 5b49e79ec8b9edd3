"""Exchange within neighbours, a ring between them (unified sequence parallelism, Fang and Zhao,
arXiv:2405.07719).

A context axis of N devices is N / U groups of U neighbours. Neighbours exchange their parts of the
sequence for heads, so that each has all positions of its group for its share of the heads; then
keys and values go around a ring of the groups, between devices with the same heads. The exchange
needs U to divide the heads, and the ring has messages N / U times, so that it goes on where heads
run out.

In zig-zag order the parts of a group are, put in order, what a device has in the zig-zag order of N
/ U devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardlib.errors import LayoutError
from shardlib.lowering.context.block import Scores
from shardlib.lowering.context.ring import Ring
from shardlib.lowering.context.sequence_partition import Cut
from shardlib.lowering.context.ulysses import Exchange


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """Attention by an exchange in groups of neighbours and a ring of the groups.

    Attributes:
        cut: the sequence over the whole mesh axis.
        scores: how scores are made.
        ulysses: devices of a group; one that is all of the axis leaves no ring, 1 no exchange.
        causal: whether a query sees no later position.
        window: how far it sees, as in `Sight`; 0 for all.

    Raises:
        LayoutError: the groups do not divide the axis.
    """

    cut: Cut
    scores: Scores
    ulysses: int
    causal: bool = True
    window: int = 0

    def __post_init__(self) -> None:
        if self.ulysses < 1 or self.cut.ways % self.ulysses:
            raise LayoutError(
                f"groups of {self.ulysses} neighbours do not divide"
                f" {self.cut.axis}={self.cut.ways}\nTry: ulysses=one of"
                f" {[n for n in range(1, self.cut.ways + 1) if not self.cut.ways % n]}"
            )

    @property
    def ring(self) -> Ring:
        """The ring of the groups."""
        cut = Cut(
            axis=self.cut.axis,
            ways=self.cut.ways // self.ulysses,
            zigzag=self.cut.zigzag,
            stride=self.cut.stride * self.ulysses,
        )
        return Ring(cut=cut, scores=self.scores, causal=self.causal, window=self.window)

    def attention(
        self, query: Any, key: Any, value: Any, segments: Any = None, *, window: Any = None
    ) -> Any:
        """Attention of this device's queries to all keys; arguments and result as those of
        `Ring.attention`.

        Raises:
            LayoutError: the neighbours do not divide the heads.
        """
        exchange = Exchange(cut=self.cut, group=self.ulysses)
        query, key, value = map(exchange.ordered, exchange.for_heads(query, key, value))
        documents = None if segments is None else exchange.ordered(exchange.whole(segments))
        return exchange.for_tokens(
            exchange.unordered(self.ring.attention(query, key, value, documents, window=window))
        )
