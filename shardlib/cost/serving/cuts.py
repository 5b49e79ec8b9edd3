"""Which dims of the weights are sharded over the devices that share every layer?

Dims of one colour are sharded together. Two colours of one array exclude each other: an array is
sharded along one dim. Of all sets of colours to which none can be added the one is taken whose step
of few tokens takes least: the bytes of weights that a device reads, and the all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardlib.cost.serving.reading_graph import colours
from shardlib.cost.serving.served_model import ServedModel
from shardlib.cost.serving.split import split

#: Devices and tokens of the step by which sets are compared; bytes of an all-reduce count as much
#: as so many bytes that are read, and each all-reduce as so many more.
TENSOR, TOKENS, SENT, EACH = 8, 16, 8.0, 8e6
#: Sets that are compared at most.
MOST = 512
#: Colours of less than this share of all parameters stay whole, as a router's and a norm's do.
LEAST = 1e-3


def cuts(model: ServedModel) -> frozenset[str]:
    """The colours of dims that are sharded."""

    def cost(cut: frozenset[str]) -> tuple[float, list[str]]:
        shard = split(model, cut, TENSOR, weights="model", cache="model")
        sums = sum(count * (EACH + SENT * TOKENS * nbytes) for count, nbytes in shard.sums)
        return shard.weights + TOKENS * shard.moved + sums, sorted(cut)

    return min(_sets(model), key=cost)


def _sets(model: ServedModel) -> Iterator[frozenset[str]]:
    """Sets of colours of which no array has two, and to which none can be added."""
    sizes: dict[str, int] = {}
    beside: dict[str, set[str]] = {}
    layers = _stacked(model)
    for weight in model.weights:
        named = [colour for colour in colours(weight.dims) if colour not in layers]
        for colour in named:
            sizes[colour] = sizes.get(colour, 0) + weight.elements
            beside.setdefault(colour, set()).update(set(named) - {colour})
    order = sorted(
        (colour for colour in sizes if sizes[colour] >= LEAST * model.parameters),
        key=lambda colour: (-sizes[colour], colour),
    )
    candidates: dict[frozenset[str], None] = {}

    def grow(chosen: frozenset[str], left: list[str]) -> None:
        if len(candidates) >= MOST:
            return
        free = [colour for colour in left if not beside[colour] & chosen]
        if not free:
            if not any(not beside[colour] & chosen for colour in order if colour not in chosen):
                candidates.setdefault(chosen)
            return
        first, remaining = free[0], free[1:]
        grow(chosen | {first}, remaining)
        if beside[first] & set(remaining):
            grow(chosen, remaining)

    grow(frozenset(), order)
    yield from candidates or {frozenset[str](): None}


def _stacked(model: ServedModel) -> frozenset[str]:
    """Colours of dims that no matmul and no lookup has: those that count layers or experts."""
    used = {
        colour for product in model.products for colour in colours((*product.dims, *product.read))
    } | {
        colour for lookup in model.lookups for colour in colours((*lookup.summed, *lookup.written))
    }
    return frozenset(
        colour for weight in model.weights for colour in colours(weight.dims) if colour not in used
    )
