"""Reduce-scatters that the TPU compiler carries out inside of the matmul before them.

Where the partial sums of a matmul are scattered, the partitioner may compute them window by window
and pass them on in both directions of a ring meanwhile (its windowed einsum, openxla/xla
`xla/service/spmd/dot_handler.cc`). Over n devices, n a multiple of 4, these are n permutes of a
shard, half of them each way, and one that brings the two halves together. They do what one
reduce-scatter does, which is what they are counted as.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from shardlib.axes import MeshShape
from shardlib.verification.hlo.found import Found

#: How the operation is called that these permutes are of.
_MATMUL = "dot_general"


def as_reduce_scatters(collectives: tuple[Found, ...], mesh: MeshShape) -> tuple[Found, ...]:
    """Collectives, with the permutes of windowed matmuls as reduce-scatters.

    Permutes of a matmul that are of one size, over one axis, and no multiple of those of one
    reduce-scatter are left as they are.
    """
    alike: dict[tuple[tuple[str, ...], int, tuple[str, ...], str], list[Found]] = defaultdict(list)
    for collective in collectives:
        if (
            collective.kind == "collective-permute"
            and len(collective.axes) == 1
            and mesh[collective.axes[0]] % 4 == 0
            and collective.op_name.endswith(_MATMUL)
        ):
            alike[collective.axes, collective.bytes, collective.dtypes, collective.op_name].append(
                collective
            )
    windows, scatters = set[int](), list[Found]()
    for (axes, *_), permutes in alike.items():
        members = mesh[axes[0]]
        times, left = divmod(sum(permute.count for permute in permutes), members + 1)
        if not left:
            windows |= {id(permute) for permute in permutes}
            scatters.append(
                replace(permutes[0], kind="reduce-scatter", members=members, count=times)
            )
    return (*(collective for collective in collectives if id(collective) not in windows), *scatters)
