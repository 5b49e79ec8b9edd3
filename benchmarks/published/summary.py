"""Distance of predictions from measurements, per source and in all.

The error of a row is |predicted / measured - 1|; signed, predicted / measured - 1. "In all" is the
mean over sources, so that no large source dominates. A pair of rows of one group is called right
where the plan that was faster is predicted to be faster; pairs measured within `TIE` of each other
say nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.published.cases import Case
from benchmarks.published.pricing import Prediction
from benchmarks.published.software import memory_of

#: Measurements closer than this, as a share, are equal: single steps of one run vary by as much
#: (NVIDIA-NeMo/Megatron-Bridge reports differ by 1% between runs).
TIE = 0.01


@dataclass(frozen=True, kw_only=True)
class Result:
    """A case beside its prediction, in few numbers.

    Attributes:
        id, source, group: of the case.
        predicted_s, measured_s: seconds of a step; None where nothing was measured.
        predicted_bytes, measured_bytes: memory, as the measurement counts it.
        predicted_fits, measured_fits: whether the plan fits into the device; None where the row
            does not say.
        parts: predicted seconds by part.
        memory: predicted bytes by part.
        assumed: what the row does not say.
    """

    id: str
    source: str
    group: str | None
    predicted_s: float
    measured_s: float | None
    predicted_bytes: float
    measured_bytes: float | None
    predicted_fits: bool
    measured_fits: bool
    parts: dict[str, float]
    memory: dict[str, int]
    assumed: tuple[str, ...] = ()

    @property
    def time_error(self) -> float | None:
        """Signed error of the step time."""
        return None if self.measured_s is None else self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        """Signed error of the memory."""
        return (
            None if self.measured_bytes is None else self.predicted_bytes / self.measured_bytes - 1
        )

    def to_json(self) -> dict[str, Any]:
        """The row as plain data."""
        return {
            "id": self.id,
            "source": self.source,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "error": self.time_error,
            "predicted_bytes": self.predicted_bytes,
            "measured_bytes": self.measured_bytes,
            "memory_error": self.memory_error,
            "predicted_fits": self.predicted_fits,
            "measured_fits": self.measured_fits,
            "seconds": self.parts,
            "device_bytes": self.memory,
            "assumed": list(self.assumed),
        }


def compare(case: Case, found: Prediction) -> Result:
    """Puts a prediction beside what was measured."""
    cost = found.plan.estimate
    return Result(
        id=case.id,
        source=case.source,
        group=case.group,
        predicted_s=found.step_s,
        measured_s=case.step_s,
        measured_bytes=case.peak_bytes,
        predicted_bytes=memory_of(found.arrays, case.software.runtime, case.peak_kind),
        predicted_fits=found.fits,
        measured_fits=not case.out_of_memory,
        parts=dict(cost.seconds.__dict__),
        memory=dict(cost.device_bytes.__dict__),
        assumed=case.assumed,
    )


def pairs(results: Iterable[Result]) -> tuple[int, int]:
    """Pairs of competing plans: (called right, all)."""
    right = total = 0
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.group is not None and result.measured_s is not None:
            groups.setdefault(result.group, []).append(result)
    for group in groups.values():
        for one, other in itertools.combinations(group, 2):
            assert one.measured_s is not None and other.measured_s is not None
            if abs(one.measured_s / other.measured_s - 1) > TIE:
                total += 1
                right += (one.measured_s < other.measured_s) == (
                    one.predicted_s < other.predicted_s
                )
    return right, total


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """The figures of some rows; None where no row has the measurement. Shares come with their
    counts, as [right, all].
    """
    times = [error for result in results if (error := result.time_error) is not None]
    memory = [error for result in results if (error := result.memory_error) is not None]
    lost = [result for result in results if not result.measured_fits]
    right, total = pairs(results)
    return {
        "rows": len(results),
        "step_time_median_error": statistics.median(map(abs, times)) if times else None,
        "step_time_p90_error": float(np.quantile(np.abs(times), 0.9)) if times else None,
        "step_time_signed_median": statistics.median(times) if times else None,
        "memory_median_error": statistics.median(map(abs, memory)) if memory else None,
        "memory_signed_median": statistics.median(memory) if memory else None,
        "oom_right": sum(not r.predicted_fits for r in lost) / len(lost) if lost else None,
        "fits_right": share([r.predicted_fits for r in results if r.measured_fits]),
        "rank_right": right / total if total else None,
        "counts": {
            "oom": [sum(not r.predicted_fits for r in lost), len(lost)],
            "rank": [right, total],
            "times": len(times),
            "memory": len(memory),
        },
    }


def share(flags: Sequence[bool]) -> float | None:
    """Part of the flags that are set; None without any."""
    return sum(flags) / len(flags) if flags else None


def overall(by_source: dict[str, dict[str, Any]], results: Sequence[Result]) -> dict[str, Any]:
    """The mean over sources of each figure; out-of-memory rows and pairs are counted over all rows,
    since few sources have any.
    """
    found: dict[str, Any] = {"rows": len(results), "sources": len(by_source)}
    everything = summary(results)
    for name in (
        "step_time_median_error",
        "step_time_p90_error",
        "step_time_signed_median",
        "memory_median_error",
        "memory_signed_median",
    ):
        known = [source[name] for source in by_source.values() if source[name] is not None]
        found[name] = sum(known) / len(known) if known else None
    return found | {
        name: everything[name] for name in ("oom_right", "fits_right", "rank_right", "counts")
    }
