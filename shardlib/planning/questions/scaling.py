"""How does a training run scale, and from where on are more devices wasted?

*Strong scaling*: the global batch is fixed, and more devices make the step shorter. *Weak scaling*:
the batch grows with the devices. Each point of a curve is the best plan for so many devices; its
efficiency is its tokens per second and device over those of the smallest machine that holds the
model.

More devices *pay* as long as two things hold:

- The efficiency is at least a half. Eager, Zahorjan and Lazowska ("Speedup versus efficiency in
  parallel systems", IEEE Transactions on Computers 38(3), 1989) choose the number of processors at
  the knee, where efficiency per time is largest, and show that the efficiency there is at least one
  half.
- A doubling makes the run at least a tenth faster. This threshold is ours: at a gain of a tenth,
  nine parts in ten of the added devices are wasted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardlib.errors import InfeasibleError, PinError
from shardlib.hardware.topology import Topology
from shardlib.planning.plan import Plan
from shardlib.planning.units.quantity import (
    bytes_text,
    count_text,
    percent_text,
    ratio_text,
    seconds_text,
)
from shardlib.planning.units.tables import aligned, wrapped
from shardlib.untrusted.json_types import JsonObject

#: Least parallel efficiency, and least speed-up of a doubling, at which more devices pay.
LEAST_EFFICIENCY, LEAST_SPEED_UP = 0.5, 1.1


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best plan for a number of devices.

    Attributes:
        devices: how many there are.
        topology: spelling of the machine.
        plan: the best plan; None where none fits.
        short_bytes: bytes that a device lacks for the leanest plan; 0 where one fits, or where
            memory is not the reason.
        message: why there is no plan.
        share: part of the machine's peak that the devices of the plan have.
        efficiency: tokens per second and device over those of the first point with a plan.
        speed_up: tokens per second over those of the point before, for a doubling of devices; 0 for
            the first.
    """

    devices: int
    topology: str
    plan: Plan | None = field(default=None, repr=False)
    short_bytes: int = 0
    message: str = ""
    share: float = 1.0
    efficiency: float = 0.0
    speed_up: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether going from the point before to this one is worth it."""
        return (
            self.plan is not None
            and self.efficiency >= LEAST_EFFICIENCY
            and (not self.speed_up or self.speed_up >= LEAST_SPEED_UP)
        )

    def to_json(self) -> JsonObject:
        """The point as plain data; "fits" is None where another reason than memory keeps it from
        having a plan.
        """
        data: dict[str, Any] = {
            "devices": self.devices,
            "topology": self.topology,
            "fits": True if self.plan is not None else False if self.short_bytes else None,
        }
        if self.plan is None:
            return {**data, "short_bytes": self.short_bytes, "message": self.message}
        cost = self.plan.estimate
        return {
            **data,
            "mesh": dict(self.plan.mesh),
            "used_devices": self.plan.mesh.devices,
            "step_seconds": cost.step_seconds,
            "tokens": cost.tokens,
            "tokens_per_second": cost.tokens_per_second,
            "mfu": self.mfu,
            "peak_bytes": cost.device_bytes.peak,
            "efficiency": self.efficiency,
            "speed_up": self.speed_up,
            "pays": self.pays,
            "zero": self.plan.zero,
            "remat": self.plan.remat,
            "microbatches": self.plan.microbatches,
            "digest": self.plan.digest,
        }

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of all devices that there are, used or not."""
        return self.plan.estimate.mfu * self.share if self.plan is not None else 0.0


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The best plans of a family of machines.

    Attributes:
        model: name of the model.
        kind: "strong" where the global batch is fixed, "weak" where it grows with the devices.
        points: by number of devices, ascending.
    """

    model: str
    kind: str
    points: tuple[Point, ...]

    @property
    def fitting(self) -> tuple[Point, ...]:
        """The points that have a plan."""
        return tuple(point for point in self.points if point.plan is not None)

    @property
    def enough(self) -> Point | None:
        """The last point up to which every increase pays; None where nothing fits."""
        last: Point | None = None
        for point in self.fitting:
            if not point.pays:
                break
            last = point
        return last

    @property
    def reason(self) -> str:
        """Why the point after `enough` does not pay, or why no point has a plan; empty where all
        pay.
        """
        if not self.fitting:
            return _nothing(self.points)
        last = self.enough
        beyond = [
            point for point in self.fitting if last is not None and point.devices > last.devices
        ]
        if not beyond:
            return ""
        point = beyond[0]
        if point.efficiency < LEAST_EFFICIENCY:
            return (
                f"{point.devices:,} devices would work at an efficiency of"
                f" {percent_text(point.efficiency)}"
            )
        return (
            f"doubling to {point.devices:,} devices would bring {ratio_text(point.speed_up)} the"
            " tokens a second"
        )

    def to_json(self) -> JsonObject:
        """The curve as plain data."""
        return {
            "model": self.model,
            "kind": self.kind,
            "points": [point.to_json() for point in self.points],
            "enough_devices": self.enough.devices if self.enough is not None else None,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        return curve_text(self)


def _nothing(points: Sequence[Point]) -> str:
    """Why no point has a plan."""
    short = [f"{point.devices:,}" for point in points if point.short_bytes]
    if len(short) == len(points):
        return "no machine holds the model"
    lacking = f"memory is why for {', '.join(short)} alone" if short else "memory is not why"
    return f"no number of devices has a plan, and {lacking}"


def curve(
    model: str, kind: str, machines: Iterable[Topology], planned: Callable[[Topology], Plan]
) -> Curve:
    """Plans for every machine."""
    points: list[Point] = []
    first: Point | None = None
    before: Point | None = None
    for machine in sorted(machines, key=lambda machine: machine.devices):
        try:
            plan = planned(machine)
        except (InfeasibleError, PinError) as error:
            points.append(
                Point(
                    devices=machine.devices,
                    topology=machine.name,
                    short_bytes=getattr(error, "short_bytes", 0),
                    message=str(error).splitlines()[0],
                )
            )
            continue
        point = _compared(machine, plan, first, before)
        first, before = first or point, point
        points.append(point)
    return Curve(model=model, kind=kind, points=tuple(points))


def _compared(machine: Topology, plan: Plan, first: Point | None, before: Point | None) -> Point:
    """The point of a plan, compared with the first one and the one before."""
    rate, devices = plan.estimate.tokens_per_second, machine.devices
    efficiency, speed_up = 1.0, 0.0
    if first is not None and first.plan is not None:
        efficiency = rate / devices / (first.plan.estimate.tokens_per_second / first.devices)
    if before is not None and before.plan is not None and devices > before.devices:
        speed_up = (rate / before.plan.estimate.tokens_per_second) ** (
            1 / math.log2(devices / before.devices)
        )
    return Point(
        devices=devices,
        topology=machine.name,
        plan=plan,
        share=_share(machine, plan.mesh.devices),
        efficiency=efficiency,
        speed_up=speed_up,
    )


def _share(machine: Topology, used: int) -> float:
    """Part of a machine's peak that some of its devices have while the others idle."""
    faster = machine.in_use(used).chip.peak("float32") / machine.chip.peak("float32")
    return used * faster / machine.devices


def curve_text(result: Curve) -> str:
    """The curve as a table for people."""
    kinds = {
        "strong": "Strong scaling: the same global batch on more devices",
        "weak": "Weak scaling: a batch that grows with the devices",
    }
    rows = [
        ("devices", "step", "tokens/s", "efficiency", "MFU", "memory", "mesh"),
        *map(_row, result.points),
    ]
    lines = [f"{result.model}", kinds[result.kind], *aligned(rows, right={0, 1, 2, 3, 4, 5})]
    last = result.enough
    if last is None:
        lines += wrapped("  - ", f"{result.reason[0].upper()}{result.reason[1:]}.")
    elif result.reason:
        lines += wrapped("  - ", f"More than {last.devices:,} devices do not pay: {result.reason}.")
    else:
        lines += wrapped("  - ", f"All of them pay, up to {last.devices:,} devices.")
    lines += wrapped(
        "  - ",
        f"Devices pay while the efficiency is at least {percent_text(LEAST_EFFICIENCY)} and a"
        f" doubling brings at least {ratio_text(LEAST_SPEED_UP)}.",
    )
    return "\n".join(lines) + "\n"


def _row(point: Point) -> tuple[str, ...]:
    if point.plan is None:
        lacking = (
            f"lacks {bytes_text(point.short_bytes)} a device"
            if point.short_bytes
            else "no plan: " + point.message
        )
        return (f"{point.devices:,}", "-", "-", "-", "-", "-", lacking)
    cost = point.plan.estimate
    idle = (
        f" ({point.devices - point.plan.mesh.devices:,} idle)"
        if point.plan.mesh.devices < point.devices
        else ""
    )
    return (
        f"{point.devices:,}",
        seconds_text(cost.step_seconds),
        count_text(cost.tokens_per_second),
        percent_text(point.efficiency),
        percent_text(point.mfu),
        bytes_text(cost.device_bytes.peak),
        f"{point.plan.mesh}{idle}",
    )
