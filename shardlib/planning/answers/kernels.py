"""The kernels of a step beside the roofline of their chip.

The *intensity* of a kernel is its FLOPs over the bytes that it moves. Under the ridge, where the
peak rate meets the rate of the memory, memory limits it; above, the matrix units do (Williams,
Waterman, Patterson, CACM 52(4), 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shardlib.compact import compact
from shardlib.planning.units.quantity import (
    clip,
    count_text,
    percent_text,
    seconds_text,
)
from shardlib.planning.units.tables import aligned, and_more
from shardlib.untrusted.json_types import JsonObject

KERNEL_HEAD = ("kernel", "phase", "count", "FLOP", "FLOP/byte", "time", "of roofline")
#: Rows that a text lists.
_MOST = 16


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Equal kernels of a step, on one device.

    Attributes:
        name: where in the model it is, and what it computes.
        kind: JAX's primitive.
        phase: "forward", "backward" or "rematerialised".
        dtype: of its operands.
        count: executions in a step.
        flops: of all of them.
        bytes: that all of them move.
        seconds: predicted, of all of them.
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
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of a step on one device, and the roofline that they are under.

    Attributes:
        chip: its name.
        peak_flops_per_s: by dtype, of the dtypes that kernels have.
        bytes_per_s: of its memory.
        kernels: the slowest first.
    """

    chip: str
    peak_flops_per_s: tuple[tuple[str, float], ...]
    bytes_per_s: float
    kernels: tuple[KernelTime, ...]

    __repr__ = compact

    @property
    def seconds(self) -> float:
        """Of all kernels in a step."""
        return sum(one.seconds for one in self.kernels)

    def bound(self, one: KernelTime) -> float:
        """Seconds of a kernel on the roofline: at the peak, or at the rate of memory."""
        peak = dict(self.peak_flops_per_s)[one.dtype]
        return max(one.flops / peak, one.bytes / self.bytes_per_s)

    def to_json(self) -> JsonObject:
        """The kernels as plain data."""
        return {
            "chip": self.chip,
            "peak_flops_per_s": dict(self.peak_flops_per_s),
            "bytes_per_s": self.bytes_per_s,
            "kernels": [{**asdict(one), "bound_seconds": self.bound(one)} for one in self.kernels],
        }

    def __str__(self) -> str:
        return "\n".join(
            [
                f"Kernels: {seconds_text(self.seconds)} a step on one {self.chip}",
                *aligned([KERNEL_HEAD, *kernel_rows(self, _MOST)], right={2, 3, 4, 5, 6}),
                *and_more(len(self.kernels) - _MOST, "kinds of kernel"),
                "",
            ]
        )


def kernel_rows(found: Kernels, most: int) -> Sequence[tuple[str, ...]]:
    """A row for each of the slowest kernels."""
    return [
        (
            clip(one.name, 36),
            one.phase,
            f"{one.count:,.0f}",
            count_text(one.flops),
            f"{one.intensity:,.0f}",
            seconds_text(one.seconds),
            percent_text(found.bound(one) / one.seconds if one.seconds else 0.0),
        )
        for one in found.kernels[:most]
    ]
