"""Answers to questions about a plan, as values: alternatives, constraints, kernels, shadow prices,
the cost of a run, and the move to another machine.

`Shards` maps an array to devices, and so gives what must be sent when the layout changes. A layout
divides every dim of an array into equal shards; the position of a device on the mesh selects its
part of each dim. Two layouts on two sets of devices are compared device by device: a device
receives what it needs and does not have. A part that no surviving device has is lost, and must come
from a checkpoint.

>>> old = Shards((8,), Layout("data"), MeshShape(data=4), np.arange(4))
>>> new = Shards((8,), Layout("data"), MeshShape(data=2), np.arange(2))
>>> [new.ranges(device) for device in (0, 1)], old.ranges(1)
([((0, 4),), ((4, 8),)], ((2, 4),))
>>> moved_elements(old, new, np.arange(2))
array([2, 4])
>>> lost_elements(old, np.arange(2))
4
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardlib.compact import compact, plain_fields
from shardlib.errors import ArgumentError, raise_all
from shardlib.layout import MESH_AXES, Layout, MeshShape
from shardlib.machines.catalog import BOARD_POWER
from shardlib.machines.topology import Topology
from shardlib.planner.plan import RESTART_S, Plan, plan_to_data
from shardlib.report.elements import (
    TIE,
    aligned,
    and_more,
    bytes_text,
    clip,
    count_text,
    percent_text,
    ratio_text,
    seconds_text,
    wrapped,
)
from shardlib.untrusted.data import JsonObject

# --------------------------------------------------------------------------------------------------
# Alternatives: plans that were not chosen, and the decisions in which they differ.


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A plan that was not chosen.

    Attributes:
        place: rank, 1 for the best.
        summary: its decisions other than the mesh, in a few words.
        step_seconds: predicted step time.
        peak_bytes: predicted bytes per device.
        ratio: its step time over the chosen plan's.
        differs: decisions that differ from the chosen plan's, such as "remat dots -> full".
        ties: number of further plans that are predicted to be equally fast.
    """

    place: int
    mesh: MeshShape
    summary: str
    step_seconds: float
    peak_bytes: int
    ratio: float
    differs: tuple[str, ...]
    ties: int = 0

    def to_json(self) -> JsonObject:
        """The alternative as plain data."""
        return plain_fields(self)


def alternatives_text(alternatives: Iterable[Alternative]) -> str:
    """The alternatives as a text table."""
    rows = [("", "step", "time", "memory", "mesh", "other decisions")]
    rows += [
        (
            f"{alternative.place}.",
            seconds_text(alternative.step_seconds),
            ratio_text(alternative.ratio),
            bytes_text(alternative.peak_bytes),
            str(alternative.mesh),
            (alternative.summary or "-")
            + (f" (and {alternative.ties:,} as fast)" if alternative.ties else ""),
        )
        for alternative in alternatives
    ]
    if len(rows) == 1:
        return (
            "\n".join(["Alternatives", *wrapped("  - ", "none: no other plan is legal and fits.")])
            + "\n"
        )
    return "\n".join(["Alternatives, by predicted time", *aligned(rows, right={0, 1, 2, 3})]) + "\n"


# --------------------------------------------------------------------------------------------------
# Constraints of a plan: memory, pins, and sizes that do not divide further.

#: Rows of the table of plans that do not fit.
_MAX_UNFIT_PLANS = 8


@dataclass(frozen=True, kw_only=True)
class UnfitPlan:
    """A faster plan that does not fit.

    No plan that needs less memory is as fast, except ones that rematerialise only some of the
    layers.

    Attributes:
        summary: its decisions other than the mesh, in a few words.
        step_seconds: predicted step time.
        peak_bytes: predicted bytes per device.
        short_bytes: bytes per device that it lacks.
    """

    mesh: MeshShape
    summary: str
    step_seconds: float
    peak_bytes: int
    short_bytes: int

    def to_json(self) -> JsonObject:
        """The plan as plain data."""
        return plain_fields(self)


@dataclass(frozen=True, kw_only=True)
class BindingConstraint:
    """A constraint without which the plan would be faster, or could be.

    Attributes:
        kind: "memory", "pin" or "size".
        what: the memory of the chip, the pin, or the colour whose size it is.
        message: one sentence.
        step_seconds: step time of the best plan without the constraint; 0 where unknown.
    """

    kind: str
    what: str
    message: str
    step_seconds: float = 0.0

    def to_json(self) -> JsonObject:
        """The constraint as plain data."""
        return dict(self.__dict__)


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """The limits that keep a plan from being faster.

    Attributes:
        step_seconds: step time of the plan.
        binding: the constraints, the most expensive first.
        staircase: faster plans that do not fit, by increasing lack of memory; each is faster than
            all before it.
    """

    step_seconds: float
    binding: tuple[BindingConstraint, ...]
    staircase: tuple[UnfitPlan, ...]

    def to_json(self) -> JsonObject:
        """The constraints as plain data."""
        return plain_fields(self)

    def __str__(self) -> str:
        lines = ["What holds the plan back"]
        lines += [
            line for constraint in self.binding for line in wrapped("  - ", constraint.message)
        ] or wrapped("  - ", "nothing: no memory, pin or size stands in the way of a faster plan.")
        if self.staircase:
            rows = [("step", "memory", "lacking", "mesh", "other decisions")]
            rows += [
                (
                    seconds_text(constraint.step_seconds),
                    bytes_text(constraint.peak_bytes),
                    bytes_text(constraint.short_bytes),
                    str(constraint.mesh),
                    constraint.summary or "-",
                )
                for constraint in self.staircase[:_MAX_UNFIT_PLANS]
            ]
            more = len(self.staircase) - _MAX_UNFIT_PLANS
            lines += [
                "",
                "Faster plans that do not fit",
                *aligned(rows, right={0, 1, 2}),
                *([f"  and {more} that lack still more"] if more > 0 else []),
            ]
        return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------
# The kernels of a step on the roofline of their chip.
#
# The *intensity* of a kernel is its FLOPs over the bytes that it moves. Below the ridge point (peak
# FLOP/s over memory bandwidth) a kernel is memory-bound; above it, compute-bound (Williams,
# Waterman, Patterson, CACM 52(4), 2009).

KERNEL_HEAD = ("kernel", "phase", "count", "FLOP", "FLOP/byte", "time", "of roofline")
#: Rows that a text lists.
_MAX_KERNELS = 16


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Equal kernels of a step, on one device.

    Attributes:
        name: place in the model, and what is computed.
        kind: JAX primitive.
        phase: "forward", "backward" or "rematerialised".
        dtype: of the operands.
        count: executions per step.
        flops: of all executions.
        bytes: memory traffic of all executions.
        seconds: predicted, for all executions.
    """

    name: str
    kind: str
    phase: str
    dtype: str
    count: float
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of a step on one device, slowest first, and their roofline.

    Attributes:
        chip: name of the chip.
        peak_flops_per_s: by dtype, for the dtypes of the kernels.
        bytes_per_s: memory bandwidth.
    """

    chip: str
    peak_flops_per_s: tuple[tuple[str, float], ...]
    bytes_per_s: float
    kernels: tuple[KernelTime, ...]

    __repr__ = compact

    @property
    def seconds(self) -> float:
        """Seconds of all kernels per step."""
        return sum(kernel.seconds for kernel in self.kernels)

    def bound(self, kernel: KernelTime) -> float:
        """Roofline seconds of a kernel: at peak FLOP/s or at memory bandwidth, whichever is
        longer.
        """
        peak = dict(self.peak_flops_per_s)[kernel.dtype]
        return max(kernel.flops / peak, kernel.bytes / self.bytes_per_s)

    def to_json(self) -> JsonObject:
        """The kernels as plain data."""
        return {
            "chip": self.chip,
            "peak_flops_per_s": dict(self.peak_flops_per_s),
            "bytes_per_s": self.bytes_per_s,
            "kernels": [
                {**asdict(kernel), "bound_seconds": self.bound(kernel)} for kernel in self.kernels
            ],
        }

    def __str__(self) -> str:
        return "\n".join(
            [
                f"Kernels: {seconds_text(self.seconds)} per step on one {self.chip}",
                *aligned([KERNEL_HEAD, *kernel_rows(self, _MAX_KERNELS)], right={2, 3, 4, 5, 6}),
                *and_more(len(self.kernels) - _MAX_KERNELS, "kinds of kernel"),
                "",
            ]
        )


def kernel_rows(kernels: Kernels, limit: int) -> Sequence[tuple[str, ...]]:
    """A table row for each of the slowest kernels."""
    return [
        (
            clip(kernel.name, 36),
            kernel.phase,
            f"{kernel.count:,.0f}",
            count_text(kernel.flops),
            f"{kernel.intensity:,.0f}",
            seconds_text(kernel.seconds),
            percent_text(kernels.bound(kernel) / kernel.seconds if kernel.seconds else 0.0),
        )
        for kernel in kernels.kernels[:limit]
    ]


Ints = NDArray[np.int64]
#: First and end of a part, elements, for every dim.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Shards:
    """An array that is sharded over devices.

    Attributes:
        shape: elements per dim.
        layout: mesh axes per dim.
        mesh: sizes of the mesh axes.
        order: device number at each mesh position, in row-major order (last axis fastest).
    """

    shape: tuple[int, ...]
    layout: Layout
    mesh: MeshShape
    order: Ints

    def ranges(self, device: int) -> Ranges | None:
        """The shard of a device; None where it is not on the mesh."""
        (positions,) = np.nonzero(self.order == device)
        if not len(positions):
            return None
        numbers = self._shard_numbers()[:, positions[0]]
        sizes = self._sizes()
        return tuple(
            (int(number * size), int((number + 1) * size))
            for number, size in zip(numbers, sizes, strict=True)
        )

    def starts(self, devices: int) -> tuple[Ints, Ints]:
        """First element per dim and device, and the shard size per dim."""
        sizes = np.array(self._sizes(), np.int64)
        first = np.full((len(self.shape), devices), -1, np.int64)
        first[:, self.order] = self._shard_numbers() * sizes[:, None]
        return first, sizes

    def _sizes(self) -> tuple[int, ...]:
        return self.layout.local_shape(self.shape, self.mesh)

    def _shard_numbers(self) -> Ints:
        """Shard number of each dim by mesh position: integers of shape (dims, positions)."""
        sizes = tuple(self.mesh[axis] for axis in MESH_AXES)
        positions = dict(
            zip(MESH_AXES, np.unravel_index(np.arange(math.prod(sizes)), sizes), strict=True)
        )
        return (
            np.stack([self._shard_number(axes, positions) for axes in self.layout])
            if self.layout
            else np.zeros((0, math.prod(sizes)), np.int64)
        )

    def _shard_number(
        self, axes: tuple[str, ...], positions: Mapping[str, NDArray[np.intp]]
    ) -> Ints:
        number = np.zeros(self.mesh.devices, np.int64)
        for axis in axes:  # the major axis first
            number = number * self.mesh[axis] + positions[axis]
        return number


def moved_elements(old: Shards, new: Shards, survivors: Ints) -> Ints:
    """Elements that each device receives when the layout changes."""
    device_count = int(new.order.max()) + 1
    new_starts, new_sizes = new.starts(device_count)
    old_starts, old_sizes = old.starts(max(int(old.order.max()), int(survivors.max(initial=0))) + 1)
    needed = np.zeros(device_count, np.int64)
    needed[new.order] = math.prod(new_sizes.tolist())
    surviving = survivors[:device_count]
    new_of_survivors, old_of_survivors = new_starts[:, : len(surviving)], old_starts[:, surviving]
    common = np.minimum(
        new_of_survivors + new_sizes[:, None], old_of_survivors + old_sizes[:, None]
    ) - np.maximum(new_of_survivors, old_of_survivors)
    overlap = np.prod(np.maximum(common, 0), axis=0)
    present_on_both = np.isin(np.arange(len(surviving)), new.order) & np.isin(surviving, old.order)
    needed[: len(surviving)] -= np.where(present_on_both, overlap, 0)
    return needed


def lost_elements(old: Shards, survivors: Ints) -> int:
    """Elements that no surviving device has."""
    first, sizes = old.starts(max(int(old.order.max()), int(survivors.max(initial=0))) + 1)
    starts = first[:, survivors[np.isin(survivors, old.order)]]
    cells = np.zeros(starts.shape[1], np.int64)
    for start, size, extent in zip(starts, sizes.tolist(), old.shape, strict=True):
        cells = cells * (extent // size) + start // size
    return math.prod(old.shape) - len(np.unique(cells)) * math.prod(sizes.tolist())


# --------------------------------------------------------------------------------------------------
# A plan for another machine, and what must move to get there.

#: Parts that the text lists.
_MAX_ARRAYS = 12


@dataclass(frozen=True, kw_only=True)
class MovedArray:
    """One parameter, or its optimizer state, with its old and new layout.

    Attributes:
        path: tree path of the parameter.
        what: "parameter", "optimizer state" or, with islands, "outer state".
        bytes: bytes of the whole array.
        received_bytes: bytes that all devices together receive.
        most_bytes: the most bytes that one device receives.
        lost_bytes: bytes that no surviving device has.
        before, after: the old and new shards, by device.
    """

    path: str
    what: str
    bytes: int
    old: Layout
    new: Layout
    received_bytes: int
    most_bytes: int
    lost_bytes: int
    before: Shards = field(compare=False, repr=False)
    after: Shards = field(compare=False, repr=False)

    def ranges(self, device: int, survivors: Sequence[int]) -> tuple[Ranges | None, Ranges | None]:
        """The old and new shard of a device of the new machine, (first, end) per dim; None where it
        has none.
        """
        return (
            self.before.ranges(survivors[device]) if device < len(survivors) else None
        ), self.after.ranges(device)

    def to_json(self) -> JsonObject:
        """The part as plain data, without the positions of its shards."""
        return {
            "path": self.path,
            "what": self.what,
            "bytes": self.bytes,
            "old": self.old.to_json(),
            "new": self.new.to_json(),
            "received_bytes": self.received_bytes,
            "most_bytes": self.most_bytes,
            "lost_bytes": self.lost_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class Replan:
    """A plan for another machine, and what must move to get there.

    Attributes:
        old: the plan for the old machine.
        plan: the plan for the new machine.
        survivors: old device numbers of the new devices 0, 1, ..., for those that existed before.
        moved_bytes_per_device: bytes that each device of the new machine receives.
        parts: every parameter and its optimizer state.
        changed: decisions that differ, such as "microbatches 8 -> 16".
        notes: sentences about pins that were dropped and other caveats.
        other_chips: True if its chips are different ones, so that no device has any data yet.
    """

    old: Plan
    plan: Plan
    survivors: tuple[int, ...]
    moved_bytes_per_device: tuple[int, ...]
    parts: tuple[MovedArray, ...]
    changed: tuple[str, ...]
    notes: tuple[str, ...]
    machine: Topology
    other_chips: bool = False

    __repr__ = compact

    @property
    def slowdown(self) -> float:
        """Predicted step time over that of the old plan."""
        return self.plan.estimate.step_seconds / self.old.estimate.step_seconds

    @property
    def lost_bytes(self) -> int:
        """Bytes that no surviving device has."""
        return sum(part.lost_bytes for part in self.parts)

    @property
    def moving_seconds(self) -> float:
        """Time for the device that receives most, if every byte comes over one of the slowest links
        of the machine.
        """
        return max(self.moved_bytes_per_device, default=0) / min(
            tier.reached_bytes_per_s for tier in self.machine.tiers
        )

    @property
    def text(self) -> str:
        """The change as text."""
        return replan_text(self)

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> JsonObject:
        """The change as plain data; the plan is under "plan"."""
        return {
            "plan": plan_to_data(self.plan),
            "old_topology": self.old.topology,
            "old_mesh": dict(self.old.mesh),
            "old_step_seconds": self.old.estimate.step_seconds,
            "slowdown": self.slowdown,
            "changed": list(self.changed),
            "notes": list(self.notes),
            "survivors": len(self.survivors),
            "moved_bytes_per_device": list(self.moved_bytes_per_device),
            "moved_bytes": sum(self.moved_bytes_per_device),
            "lost_bytes": self.lost_bytes,
            "moving_seconds": self.moving_seconds,
            "parts": [part.to_json() for part in self.parts],
            "text": self.text,
        }


def replan_text(change: Replan) -> str:
    """The text of a change of machine."""
    old, new = change.old, change.plan
    moved = np.array(change.moved_bytes_per_device, np.int64)
    lines = [
        f"{new.model}: {old.topology} ({old.mesh}) -> {new.topology} ({new.mesh})",
        f"{seconds_text(old.estimate.step_seconds)} ->"
        f" {seconds_text(new.estimate.step_seconds)} per step, {ratio_text(change.slowdown)}"
        f" the time · {count_text(new.estimate.tokens_per_second)} tokens/s ·"
        f" {bytes_text(new.estimate.device_bytes.peak)} per device",
        "",
        "What changes",
    ]
    lines += [
        line
        for text in (*(change.changed or ("nothing is decided differently",)), *change.notes)
        for line in wrapped("  - ", text)
    ]
    needed = sum(part.bytes for part in change.parts)
    lines += ["", "What moves"]
    lines += wrapped(
        "  - ",
        f"{bytes_text(int(moved.sum()))} in all, at most {bytes_text(int(moved.max(initial=0)))} to"
        f" one device: {seconds_text(change.moving_seconds)} if all of it comes over the slowest"
        " links.",
    )
    lines += wrapped("  - ", _sources_text(change, needed))
    return "\n".join([*lines, *_part_lines(change.parts)]) + "\n"


def _sources_text(change: Replan, needed: int) -> str:
    """The sources of the bytes that the new machine needs, as a sentence."""
    if change.other_chips:
        return (
            f"No device of the new machine holds any of {bytes_text(needed)}: they come from a"
            " checkpoint, or from the old machine while it is still there."
        )
    lost = change.lost_bytes
    if lost:
        return (
            f"{bytes_text(lost)} ({percent_text(lost / needed)} of {bytes_text(needed)}) are on no"
            " surviving device and must come from a checkpoint."
        )
    return (
        f"Every one of {bytes_text(needed)} is on some surviving device: no checkpoint is needed."
    )


def _part_lines(parts: Sequence[MovedArray]) -> list[str]:
    """Text lines for the parts that move most, with equal ones folded."""

    def pattern(path: str) -> str:
        return ".".join("*" if word.isdigit() else word for word in path.split("."))

    groups: dict[tuple[object, ...], list[MovedArray]] = {}
    for part in parts:
        if part.received_bytes:
            groups.setdefault((pattern(part.path), part.what, part.old, part.new), []).append(part)
    if not groups:
        return []

    def size(group: list[MovedArray]) -> int:
        return sum(part.received_bytes for part in group)

    ranked = sorted(groups.values(), key=lambda group: -size(group))
    rows = [("part", "", "received", "per device", "layout")]
    rows += [
        (
            clip(pattern(group[0].path) if len(group) > 1 else group[0].path, 30),
            group[0].what + (f" x{len(group)}" if len(group) > 1 else ""),
            bytes_text(size(group)),
            bytes_text(sum(part.most_bytes for part in group)),
            str(group[0].old) + (f" -> {group[0].new}" if group[0].new != group[0].old else ""),
        )
        for group in ranked[:_MAX_ARRAYS]
    ]
    more = len(ranked) - _MAX_ARRAYS
    return [
        "",
        *aligned(rows, right={2, 3}),
        *([f"  and {more} kinds that receive less"] if more > 0 else []),
    ]


# --------------------------------------------------------------------------------------------------
# The cost of a whole training run: days, devices, money, energy, and failures.
#
# Failures are a Poisson process, M seconds apart on average. A run saves every tau seconds, which
# blocks it for C seconds; a failure costs the restart time R and the work since the last save. The
# expected time of T seconds of work is
#
#     M exp(R / M) (exp((tau + C) / M) - 1) T / tau
#
# (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
# Future Generation Computer Systems 22, 2006, equation 20), and the best tau is where that is
# least: about sqrt(2 C M) (J. W. Young, "A first order approximation to the optimum checkpoint
# interval", CACM 17, 1974).

#: Least seconds between two saves: storage is slow, although writing overlaps with training.
MIN_SAVE_INTERVAL_S = 300.0
DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """Time, money and energy of a training run.

    Attributes:
        work_seconds: all steps, as planned.
        wall_seconds: with saves, failures and restarts.
        save_seconds: time that a save blocks training (copying the state to the host).
        every_seconds: interval between saves; None without failures.
        mtbf_seconds: mean time between failures of the whole machine; None without failures.
        restart_seconds: from a failure to the next step.
        price: per device-hour, in the user's currency; None if not given.
        watts: maximum board power per device; None where the vendor published none.
    """

    tokens: float
    steps: float
    devices: int
    work_seconds: float
    wall_seconds: float
    save_seconds: float
    every_seconds: float | None
    mtbf_seconds: float | None
    restart_seconds: float
    price: float | None
    watts: float | None

    @property
    def goodput(self) -> float:
        """Share of the wall time that is work."""
        return self.work_seconds / self.wall_seconds

    @property
    def device_hours(self) -> float:
        """Device-hours of the run."""
        return self.devices * self.wall_seconds / 3600

    @property
    def money(self) -> float | None:
        """Price of the device-hours; None without a price."""
        return None if self.price is None else self.price * self.device_hours

    @property
    def kilowatt_hours(self) -> float | None:
        """Maximum energy of the boards; None where their power is not published."""
        return None if self.watts is None else self.watts * self.device_hours / 1000

    def to_json(self) -> JsonObject:
        """The cost as plain data."""
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "goodput": self.goodput,
            "device_hours": self.device_hours,
            "money": self.money,
            "kilowatt_hours": self.kilowatt_hours,
        }

    def __str__(self) -> str:
        rows = [
            ["tokens", f"{count_text(self.tokens)} in {count_text(self.steps)} steps"],
            ["work", _time(self.work_seconds)],
            [
                "time",
                _time(self.wall_seconds)
                + (f", {percent_text(self.goodput)} of it work" if self.mtbf_seconds else ""),
            ],
            ["device-hours", f"{count_text(self.device_hours)} of {self.devices} devices"],
        ]
        if self.money is not None:
            rows.append(["cost", f"{self.money:,.0f} at {self.price:g} per device and hour"])
        if self.kilowatt_hours is not None:
            rows.append(
                [
                    "energy",
                    f"up to {self.kilowatt_hours / 1000:,.1f} MWh ({self.watts:g} W a board)",
                ]
            )
        if self.mtbf_seconds is not None and self.every_seconds is not None:
            rows.append(
                [
                    "saves",
                    f"every {_time(self.every_seconds)}, holding it up for"
                    f" {seconds_text(self.save_seconds)}",
                ]
            )
            rows.append(
                [
                    "failures",
                    f"every {_time(self.mtbf_seconds)}, {_time(self.restart_seconds)} to the"
                    f" next step; {self.wall_seconds / self.mtbf_seconds:,.0f} in all",
                ]
            )
        return "\n".join(["Run", *aligned(rows)]) + "\n"


def run_cost(
    plan: Plan,
    topology: Topology,
    *,
    tokens: float,
    price: float | None = None,
    mtbf: float | None = None,
    restart: float = RESTART_S,
) -> RunCost:
    """Time, money and energy of a run of `tokens` tokens.

    Args:
        mtbf: seconds between two failures of the whole machine; None without failures.
        restart: seconds from a failure to the next step.
    """
    arguments: dict[str, object] = {
        "tokens": tokens,
        "price": price,
        "mtbf": mtbf,
        "restart": restart,
    }
    wrong = [
        f"{name} is {value!r}; it is a number above 0"
        for name, value in arguments.items()
        if value is not None
        and (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (value > 0 and math.isfinite(value))
        )
    ]
    if wrong:
        raise_all(ArgumentError, "the cost of the run is not defined", wrong)
    estimate = plan.estimate
    work = tokens / estimate.tokens_per_second
    save, interval, wall = save_seconds(plan, topology), None, work
    if mtbf is not None:
        interval = max(MIN_SAVE_INTERVAL_S, best_interval(save, mtbf))
        wall = expected_seconds(work, interval, save, mtbf, restart)
        if not math.isfinite(wall) or wall > 1e4 * work:
            raise ArgumentError(
                f"with a failure every {_time(mtbf)} and {_time(restart)} to start again no run"
                " ends\nTry: a longer mtbf, a shorter restart, or fewer devices"
            )
    power = BOARD_POWER.get(topology.chip.name)
    return RunCost(
        tokens=float(tokens),
        steps=work / estimate.step_seconds,
        devices=plan.mesh.devices,
        work_seconds=work,
        wall_seconds=wall,
        save_seconds=save,
        every_seconds=interval,
        mtbf_seconds=mtbf,
        restart_seconds=restart,
        price=price,
        watts=None if power is None else power[0],
    )


def save_seconds(plan: Plan, topology: Topology) -> float:
    """Seconds that a save blocks training: each device copies its share of parameters and optimizer
    state to the host; writing overlaps with training (`docs/checkpoints.md`).
    """
    device_bytes = plan.estimate.device_bytes
    rate = topology.chip.host_bytes_per_s or topology.chip.hbm_bytes_per_s
    return (device_bytes.parameters + device_bytes.optimizer) / rate


def expected_seconds(
    work: float, interval: float, save: float, mtbf: float, restart: float
) -> float:
    """Expected seconds of a run (formula above) with `work` seconds of steps and a save after every
    `interval` seconds of work.
    """
    if max(restart, interval + save) / mtbf > 500:
        return math.inf
    return mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf) * work / interval


def best_interval(save: float, mtbf: float) -> float:
    """Seconds of work between two saves that minimise the expected time.

    The derivative of the expected time is 0 where exp(-(tau + C) / M) = 1 - tau / M, which has one
    solution below M.

    Args:
        save: seconds that a save blocks training (C).
        mtbf: seconds between two failures (M).
    """
    low, high = 0.0, mtbf
    for _ in range(200):
        middle = (low + high) / 2
        if math.exp(-(middle + save) / mtbf) < 1 - middle / mtbf:
            low = middle
        else:
            high = middle
    return max((low + high) / 2, 1e-9)


def _time(seconds: float) -> str:
    """Seconds in a readable unit."""
    for size, name in ((DAY, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.3g} {name}"
    return seconds_text(seconds)


# --------------------------------------------------------------------------------------------------
# Shadow prices: the value of one unit more of a resource, and the cost of a wrong figure.


@dataclass(frozen=True, kw_only=True)
class ShadowPrice:
    """The shadow price of a resource.

    Attributes:
        resource: "memory", or the name of a link tier.
        kind: kind of the tier; "hbm" for device memory.
        unit: size of one unit more, in bytes or bytes per second.
        amount: current amount: usable bytes per device, or peak bytes per second.
        saved_seconds: seconds per step that one unit more saves, with the best plan for it.
        break_amount: amount from which on another plan is the best; 0 where there is none.
        break_mesh: mesh of that plan.
        break_changes: decisions in which it differs.
        break_seconds: its step time at the break point.
        limit: for a link, the largest rate that was tried; for memory, an amount at which no other
            plan is faster yet.
    """

    resource: str
    kind: str
    unit: int
    amount: float
    saved_seconds: float
    break_amount: float = 0.0
    break_mesh: MeshShape | None = None
    break_changes: tuple[str, ...] = ()
    break_seconds: float = 0.0
    limit: float = 0.0

    def to_json(self) -> JsonObject:
        """The price as plain data."""
        return plain_fields(self)


@dataclass(frozen=True, kw_only=True)
class Shock:
    """The change of the best plan if a figure of the machine is 10% lower than assumed.

    Attributes:
        what: the figure.
        factor: the share of it that remains.
        plan_seconds: step time of this plan.
        best_seconds: step time of the plan that is best then, on `best_mesh`.
        changes: decisions in which that plan differs; empty where this plan is still the best.
    """

    what: str
    factor: float
    plan_seconds: float
    best_seconds: float
    best_mesh: MeshShape
    changes: tuple[str, ...]

    @property
    def regret_seconds(self) -> float:
        """Seconds per step lost by having chosen this plan."""
        return max(0.0, self.plan_seconds - self.best_seconds)

    def to_json(self) -> JsonObject:
        """The shock as plain data, with the regret."""
        return {**plain_fields(self), "regret_seconds": self.regret_seconds}


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The sensitivity of a plan to changes of its machine.

    Attributes:
        step_seconds: step time of the plan.
        best_seconds: step time of the best plan of the search; the same unless the plan was made in
            another way.
        prices: shadow prices, memory first, then link tiers from the outermost inwards.
        shocks: every figure lowered by a tenth, one at a time.
    """

    step_seconds: float
    best_seconds: float
    prices: tuple[ShadowPrice, ...]
    shocks: tuple[Shock, ...]

    __repr__ = compact

    def to_json(self) -> JsonObject:
        """The sensitivity as plain data."""
        return plain_fields(self)

    def __str__(self) -> str:
        return sensitivity_text(self)


def sensitivity_text(sensitivity: Sensitivity) -> str:
    """The text of prices and shocks."""
    lines = [
        "Value of more memory and faster links",
        *aligned(
            [
                ("", "now", "one more", "saves per step"),
                *(price_row(price) for price in sensitivity.prices),
            ],
            right={1, 2, 3},
        ),
    ]
    lines += [line for price in sensitivity.prices for line in wrapped("  - ", break_text(price))]
    if sensitivity.best_seconds < sensitivity.step_seconds * (1 - TIE):
        lines += wrapped(
            "  - ",
            f"This plan takes {seconds_text(sensitivity.step_seconds)}; the search's best takes"
            f" {seconds_text(sensitivity.best_seconds)}, and prices are for that one.",
        )
    rows = [SHOCK_HEAD, *map(shock_row, sensitivity.shocks)]
    return (
        "\n".join(
            [*lines, "", "If a figure is lower than assumed", *aligned(rows, right={1, 2, 3})]
        )
        + "\n"
    )


SHOCK_HEAD = ("", "this plan", "best plan then", "regret", "its mesh")


def link_name(name: str, kind: str) -> str:
    """The display name of a link tier; host-memory links are told apart from device memory."""
    return f"{name} links" if kind == "memory" else name


def shock_row(shock: Shock) -> tuple[str, ...]:
    """A table row of a shock under `SHOCK_HEAD`."""
    return (
        f"{shock.what} -{percent_text(1 - shock.factor)}",
        seconds_text(shock.plan_seconds),
        seconds_text(shock.best_seconds),
        seconds_text(shock.regret_seconds),
        "the same" if not shock.changes else str(shock.best_mesh),
    )


def price_row(price: ShadowPrice) -> tuple[str, str, str, str]:
    """A table row: resource, current amount, one unit more, and what that saves."""
    if price.kind == "hbm":
        return (
            "memory per device",
            bytes_text(price.amount),
            "1 GB",
            seconds_text(price.saved_seconds),
        )
    return (
        f"{link_name(price.resource, price.kind)} of a device",
        count_text(price.amount, "B/s"),
        "1 GB/s",
        seconds_text(price.saved_seconds),
    )


def break_text(price: ShadowPrice) -> str:
    """A sentence that names the amount at which another plan becomes the best."""

    name = price.resource if price.kind == "hbm" else link_name(price.resource, price.kind)

    def amount(value: float) -> str:
        return bytes_text(value) if price.kind == "hbm" else count_text(value, "B/s")

    if not price.break_amount:
        up_to = f" up to {amount(price.limit)}" if price.limit and price.kind != "hbm" else ""
        return f"{name}: no amount{up_to} changes the plan."
    same_mesh = "" if price.break_mesh is None else f"{price.break_mesh}, "
    return (
        f"{name}: from {amount(price.break_amount)} on another plan is the best,"
        f" {same_mesh}{seconds_text(price.break_seconds)} per step"
        f" ({'; '.join(price.break_changes)})."
    )


# --------------------------------------------------------------------------------------------------
# Answers to several questions about a plan, as one value.


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers to questions about a plan; None for those that were not requested."""

    alternatives: tuple[Alternative, ...] | None = None
    constraints: Constraints | None = None
    sensitivity: Sensitivity | None = None
    kernels: Kernels | None = None

    def to_json(self) -> JsonObject:
        """The answers as plain data, each under its name."""
        data: dict[str, Any] = {}
        if self.alternatives is not None:
            data["alternatives"] = [alternative.to_json() for alternative in self.alternatives]
        if self.constraints is not None:
            data["constraints"] = self.constraints.to_json()
        if self.sensitivity is not None:
            data["sensitivity"] = self.sensitivity.to_json()
        if self.kernels is not None:
            data["kernels"] = self.kernels.to_json()
        return data

    def __str__(self) -> str:
        texts = [alternatives_text(self.alternatives)] if self.alternatives is not None else []
        return "\n".join(
            [
                *texts,
                *(
                    str(answer)
                    for answer in (self.constraints, self.sensitivity, self.kernels)
                    if answer is not None
                ),
            ]
        )
