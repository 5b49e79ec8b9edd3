"""The price of a step with the collectives that a compiler really made.

The compiler says which collectives a program runs (and, for TPUs, how long its kernels take); the
cost model says what a collective costs on the links. With c the seconds of one collective, latency
+ bytes x seconds per byte (`cost/machine/collectives.py`):

    hidden   = sum of count x c over collectives along data or fsdp, alone or with tensor:
               gathers and reductions of parameters
    blocking = sum of count x c over all others: compute waits for them
    step     = kernels + blocking + max(0, hidden - overlap x kernels) + bubble + optimizer
               + overhead

On TPUs only gathers of parameters that are stored sharded hide (ZeRO 3); reductions and gathers of
updated parameters block, too.

This is the rule of `cost/pricing/exposed_communication.py` with three differences, because a
compiled program does not tell them apart: small sums of activations along data and fsdp count as
hidden here, reductions of gradients along tensor alone as blocking, and kernels from a compiler's
cycles have the optimizer update among them, so that `optimizer` is 0 then. Where the compiler
estimates no time (GPU and CPU), kernels are the predicted ones. A collective whose groups are no
product of mesh axes is priced as one over the whole mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardlib.axes import HIDEABLE_AXES, MeshShape
from shardlib.collective import Collective
from shardlib.cost.estimate import Seconds
from shardlib.cost.machine.collectives import collective_cost
from shardlib.cost.machine.efficiency import efficiency
from shardlib.hardware.placement import Span, place
from shardlib.hardware.topology import Topology


def group_seconds(
    kind: str,
    axes: Sequence[str],
    members: int,
    size: float,
    mesh: MeshShape,
    topology: Topology,
    order: tuple[str, ...] = (),
) -> float:
    """Seconds of one collective of a compiled program.

    Args:
        size: bytes that a device holds of the result.
        order: of the mesh axes on its links, as a plan has it; by default the usual one.
    """
    placed = place(mesh, topology, order)
    assert placed is not None, f"{mesh} does not fit {topology.name}"
    spans = tuple(span for axis in axes or tuple(mesh) for span in placed.get(axis, ()))
    degree = mesh.ways(tuple(axes)) if axes else mesh.devices
    partial = kind != "collective-permute" and members != degree
    return collective_cost(kind, _part(spans, members) if partial else spans, topology).seconds(
        size
    )


def _part(spans: tuple[Span, ...], members: int) -> tuple[Span, ...]:
    """The spans, the inner ones first, that hold a group of so many devices; all of them where none
    do.
    """
    for count in range(1, len(spans) + 1):
        for chosen in itertools.combinations(reversed(spans), count):
            if math.prod(span.ways for span in chosen) == members:
                return chosen
    cut = next((span for span in reversed(spans) if span.ways % members == 0), None)
    return (replace(cut, ways=members),) if cut else spans


def reprice(
    predicted: Seconds,
    priced: Iterable[Collective],
    kernels: float,
    vendor: str,
    *,
    zero: int,
) -> Seconds:
    """The step time with the compiler's figures, by the formula above.

    Args:
        priced: the compiled collectives with the seconds of all their executions.
        kernels: seconds of all kernels by the compiler; 0 where it gives none.
    """
    hidden = blocking = 0.0
    for c in priced:
        hides = vendor != "google" or (zero >= 3 and c.kind == "all-gather")
        if hides and not set(HIDEABLE_AXES).isdisjoint(c.axes):
            hidden += c.seconds
        else:
            blocking += c.seconds
    compute = kernels or predicted.compute
    exposed = blocking + max(0.0, hidden - efficiency(vendor).overlap * compute)
    return replace(
        predicted,
        compute=compute,
        exposed=exposed,
        optimizer=0.0 if kernels else predicted.optimizer,
    )
