"""Did the number of rows choose the mesh, rather than speed?

A batch of 255 rows on 256 chips leaves every axis that splits it at 1: the chips share the sequence
or the layers, or stay idle. Batches about as large that divide better are priced by the same
graphs, whose amounts are those of the rows that were traced.

>>> nearby(255, 256), nearby(100, 64), nearby(512, 256), nearby(64, 3)
((256,), (96,), (), (63,))
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardlib.decisions.pins import Pins
from shardlib.errors import PinError
from shardlib.hardware.placement import divisors
from shardlib.hardware.topology import Topology
from shardlib.planning.plan import Plan
from shardlib.planning.search.priced_space import priced_space
from shardlib.planning.space.limits import batch_size
from shardlib.planning.space.workload import Workload
from shardlib.planning.units.quantity import ratio_text
from shardlib.report import Finding, diagnostic

#: Batches that are tried have at most so much more or less than the batch, as a part of it.
NEAR = 0.25
#: How many are tried, and the most of the time per row that a step with one may take to be faster.
MOST, FASTER = 2, 0.9
#: Divisors of the number of devices above this are not looked at.
LARGEST = 1 << 20


def nearby(rows: int, devices: int) -> tuple[int, ...]:
    """Batches near one that divide over more devices, the nearest first, each further one over
    still more.
    """
    divided, best = math.gcd(rows, devices), list[int]()
    candidates = {
        multiple * degree
        for degree in divisors(devices, LARGEST)
        if degree > divided
        for multiple in (rows // degree, rows // degree + 1)
        if 0 < abs(multiple * degree - rows) <= NEAR * rows and multiple
    }
    for candidate in sorted(candidates, key=lambda n: (abs(n - rows), -math.gcd(n, devices))):
        if math.gcd(candidate, devices) > divided:
            divided = math.gcd(candidate, devices)
            best.append(candidate)
    return tuple(best)


@diagnostic
def divided_badly(
    plan: Plan, load: Workload, topology: Topology, pins: Pins
) -> tuple[Finding, ...]:
    """A finding where the batch does not divide over the devices, and one near it is faster."""
    rows = batch_size(load.problem, load.colouring)
    if pins.mesh is not None or rows == 1:
        return ()
    for candidate in nearby(rows, topology.devices)[:MOST]:
        try:
            best = priced_space(_with_rows(load, rows, candidate), topology, pins).best
        except PinError:
            continue
        ratio = best.seconds * max(1.0, rows / candidate) / plan.estimate.step_seconds
        if best.fastest is None or ratio > FASTER:
            continue
        left = topology.devices - plan.mesh.devices
        return (
            Finding(
                code="batch-divides-badly",
                severity="warning",
                where=f"batch of {rows}",
                message=(
                    f"divisibility, not speed, chose the mesh {plan.mesh}"
                    + (f" and left {left} devices idle" if left else "")
                    + f": {rows} rows divide over {math.gcd(rows, topology.devices)} of"
                    f" {topology.devices} devices at most. With {candidate} a step would take about"
                    f" {ratio_text(ratio)} the time per row ({best.fastest.mesh})"
                ),
                hint=f"a batch of {candidate} rows",
            ),
        )
    return ()


def _with_rows(load: Workload, rows: int, new_rows: int) -> Workload:
    """The problem with the limits of a batch of other rows, and the amounts of its own."""
    name = load.colouring.batch_colour

    def shape(path: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
        axes = load.colouring.batch[path]
        return tuple(
            size // rows * new_rows if axis == name else size
            for size, axis in zip(sizes, axes, strict=True)
        )

    batch = tuple(
        (path, shape(path, sizes), dtype, axes) for path, sizes, dtype, axes in load.problem.batch
    )
    return replace(load, problem=replace(load.problem, batch=batch))
