"""In which order a worker's elements cross: parameters as the forward pass needs them, gradients
the other way round, as the backward pass makes them.

Each server sends what it owns in that order, so that with several of them over one link what is
needed first comes first of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardlib.exchanges.parts import Part
from shardlib.planning.transfers.buckets import in_buckets
from shardlib.servers.ordering import ORDER_BYTES, Order, order_text
from shardlib.servers.ownership import owned

#: Bytes of an element as it crosses.
FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The order in which elements cross between a worker and one server.

    Attributes:
        order: buckets of elements, counted in whole parameters.
        text: the same as the server counts them, which has a run of each parameter.
    """

    order: Order
    text: str

    @staticmethod
    def of(parts: Iterable[Part], owned_parts: Mapping[str, Part], bucket_bytes: int) -> Crossing:
        """The order of those parts that a server owns.

        Args:
            bucket_bytes: of a bucket.
        """
        here = (_both(part, owned_parts[part.path]) for part in parts if part.path in owned_parts)
        order = in_buckets(
            (part for part in here if part.start < part.stop),
            elements=max(1, bucket_bytes // FLOAT32),
        )
        counted = tuple(
            tuple(_from(owned_parts[part.path], part) for part in bucket) for bucket in order
        )
        return Crossing(order=order, text=order_text(counted))

    def reversed(self, owned_parts: Mapping[str, Part]) -> Crossing:
        """The last buckets first."""
        order = tuple(reversed(self.order))
        counted = tuple(
            tuple(_from(owned_parts[part.path], part) for part in bucket) for bucket in order
        )
        return Crossing(order=order, text=order_text(counted))


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The orders of a worker and all of its servers.

    Attributes:
        fetches: of each server, of parameters.
        pushes: of each server, of gradients.
    """

    fetches: tuple[Crossing, ...]
    pushes: tuple[Crossing, ...]

    @staticmethod
    def of(
        parts: Iterable[Part], sizes: Mapping[str, int], servers: int, bucket_bytes: int
    ) -> Orders:
        """The orders for parameters that are divided among servers.

        Args:
            bucket_bytes: of a bucket.
        """
        all_parts = tuple(parts)
        owns = [{part.path: part for part in parts} for parts in owned(sizes, servers)]
        fetches = tuple(Crossing.of(all_parts, owned_parts, bucket_bytes) for owned_parts in owns)
        if (
            max(len(crossing.text) for crossing in fetches) > ORDER_BYTES // 2
        ):  # rows of very many layers
            whole_parts = [
                Part(path=path, start=0, stop=sizes[path])
                for path in dict.fromkeys(part.path for part in all_parts)
            ]
            fetches = tuple(
                Crossing.of(whole_parts, owned_parts, bucket_bytes) for owned_parts in owns
            )
        pushes = tuple(
            crossing.reversed(owned_parts)
            for crossing, owned_parts in zip(fetches, owns, strict=True)
        )
        return Orders(fetches=fetches, pushes=pushes)


def _both(first: Part, second: Part) -> Part:
    """The elements that both have; none where `stop` is no more than `start`."""
    return Part(
        path=first.path, start=max(first.start, second.start), stop=min(first.stop, second.stop)
    )


def _from(outer: Part, part: Part) -> Part:
    """A part, counted from the first element of another."""
    return Part(path=part.path, start=part.start - outer.start, stop=part.stop - outer.start)
