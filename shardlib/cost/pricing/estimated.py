"""Turns the arrays of priced candidates into the estimate of one."""

from __future__ import annotations

import math
from dataclasses import replace

from shardlib.axes import MeshShape
from shardlib.collective import Collective
from shardlib.cost.estimate import DeviceBytes, Estimate, Seconds
from shardlib.cost.machine.corrections import applied
from shardlib.cost.pricing.totals import Totals
from shardlib.hardware.topology import Topology


def estimate(
    totals: Totals,
    index: int,
    *,
    listed: tuple[Collective, ...],
    tokens: int,
    model_flops: float,
    mesh: MeshShape,
    peak_flops_per_s: float,
) -> Estimate:
    """The estimate of one priced candidate."""
    return Estimate(
        seconds=Seconds(**{name: float(values[index]) for name, values in totals.seconds.items()}),
        device_bytes=DeviceBytes(
            **{name: math.ceil(values[index]) for name, values in totals.device_bytes.items()}
        ),
        collectives=listed,
        tokens=tokens,
        model_flops=model_flops,
        hardware_flops=float(totals.flops[index]) * mesh.devices,
        peak_flops_per_s=peak_flops_per_s * mesh.devices,
    )


def with_corrections(cost: Estimate, topology: Topology) -> Estimate:
    """The estimate with the factors that it was multiplied by."""
    return replace(cost, corrections=applied(topology))
