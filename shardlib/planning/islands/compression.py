"""What compressed gradients are in bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from shardlib.axes import MESH_AXES, MeshShape
from shardlib.exchanges.compressed import Compressed
from shardlib.exchanges.compressors import PowerSGD, Quantised, Sign, TopK
from shardlib.exchanges.wires import padded, wire_bytes
from shardlib.planning.plan import ParameterLayout

FLOAT32 = 4
#: (kind, mesh axes, bytes, what for) of a collective.
Moved = tuple[str, tuple[str, ...], int, str]
#: Passes that orthonormalise P, each with the products of its columns.
PASSES = 2


def split(shape: tuple[int, ...], stacked: bool) -> int:
    """Where the dims of rows of a matrix end and those of columns begin: where rows and columns
    together are fewest.

    >>> split((3, 3, 64, 128), stacked=False), split((12, 12, 64, 768), stacked=True)
    (3, 3)

    Args:
        shape: of the whole.
        stacked: whether the first dim is one of layers.
    """
    places = range(int(stacked) + 1, len(shape))
    return min(
        places,
        key=lambda position: (
            math.prod(shape[int(stacked) : position]) + math.prod(shape[position:])
        ),
        default=len(shape),
    )


def low_rank(shape: tuple[int, ...], stacked: bool, rank: int) -> bool:
    """Whether a gradient is smaller as a matrix of some rank."""
    row_dims = split(shape, stacked)
    rows, columns = math.prod(shape[int(stacked) : row_dims]), math.prod(shape[row_dims:])
    return row_dims < len(shape) and rank * (rows + columns) < rows * columns


def stacked(parameter: ParameterLayout) -> bool:
    """Whether the first dim of a parameter is one of layers: it has no colour, and others follow."""
    return len(parameter.shape) > 1 and parameter.colours[0] is None


def moved(
    parameters: Iterable[ParameterLayout], inner: MeshShape, exchange: Compressed, stage: int
) -> list[Moved]:
    """What a device moves in an exchange."""
    trained, by, over = list(parameters), exchange.by, ("island",)
    sizes = [
        math.prod(parameter.state.local_shape(parameter.shape, inner)) for parameter in trained
    ]
    islands = exchange.islands
    if isinstance(by, PowerSGD):
        return list(_low_rank(trained, inner, by.rank))
    if isinstance(by, TopK):
        sent = sum(by.sent(size, stage) for size in sizes)
        return [("all-gather", over, islands * sent * 2 * FLOAT32, "largest numbers and places")]
    if isinstance(by, Quantised):
        size = wire_bytes(by.dtype, padded(by.dtype, sizes, islands, by.block), by.block)
        return [("all-to-all", over, size, "gradients"), ("all-gather", over, size, "gradients")]
    assert isinstance(by, Sign)
    scales: Counter[tuple[str, ...]] = Counter()
    for parameter in trained:
        scales[_over(parameter.state.axes)] += FLOAT32
    inside = [("all-reduce", axes, size, "scales") for axes, size in scales.items() if axes]
    size = islands * (sum(-(-size // 8) for size in sizes) + FLOAT32 * len(sizes))
    return [("all-gather", over, size, "signs"), *inside]


def _low_rank(trained: Iterable[ParameterLayout], inner: MeshShape, rank: int) -> Iterator[Moved]:
    sizes: Counter[tuple[tuple[str, ...], str]] = Counter()
    for parameter in trained:
        local = parameter.state.local_shape(parameter.shape, inner)
        first = int(stacked(parameter))
        if not low_rank(parameter.shape, bool(first), rank):
            sizes[("island",), "gradients"] += math.prod(local) * FLOAT32
            continue
        layers = math.prod(local[:first])
        row_dims = split(parameter.shape, bool(first))
        rows, columns = math.prod(local[first:row_dims]), math.prod(local[row_dims:])
        factors = layers * rank * FLOAT32
        sizes[("island",), "factors of gradients"] += factors * (rows + columns)
        along = _over(axis for dim in parameter.state[row_dims:] for axis in dim)
        across = _over(axis for dim in parameter.state[first:row_dims] for axis in dim)
        sizes[along, "factors of gradients"] += factors * rows
        sizes[across, "factors of gradients"] += factors * (columns + PASSES * rank + 1)
    for (axes, cause), size in sizes.items():
        if axes:
            yield "all-reduce", axes, size, cause


def _over(axes: Iterable[str]) -> tuple[str, ...]:
    names = set(axes)
    return tuple(axis for axis in MESH_AXES if axis in names)


def kept(parameters: Iterable[ParameterLayout], inner: MeshShape, exchange: Compressed) -> int:
    """Bytes that a device keeps from step to step, and holds between the halves of a step: the
    residual (two of them under `TopK`), Q of every matrix, and the mean of the gradients.
    """
    by, size = exchange.by, 0
    for parameter in parameters:
        local = parameter.state.local_shape(parameter.shape, inner)
        size += math.prod(local) * FLOAT32 * (3 if isinstance(by, TopK) else 2)
        first = int(stacked(parameter))
        if isinstance(by, PowerSGD) and low_rank(parameter.shape, bool(first), by.rank):
            row_dims = split(parameter.shape, bool(first))
            size += math.prod((*local[:first], *local[row_dims:], by.rank)) * FLOAT32
    return size
