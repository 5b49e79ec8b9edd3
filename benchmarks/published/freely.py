"""The planner's own plan on the machine and with the software of a published run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.published.cases import Case
from benchmarks.published.pricing import Bench, boundless
from shardlib.errors import ShardlibError
from shardlib.planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Better:
    """A published plan beside the planner's own.

    Attributes:
        id: of the case.
        published_s, planned_s: predicted seconds of a step.
        published_bytes, usable_bytes: predicted bytes of the published plan on a device, and those
            that the planner may use there.
        what: what the planner does otherwise, and the parts of the time that it saves by that.
    """

    id: str
    published_s: float
    planned_s: float
    published_bytes: float
    usable_bytes: float
    what: str

    @property
    def published_fits(self) -> bool:
        """Whether the planner may choose the published plan."""
        return self.published_bytes <= self.usable_bytes

    @property
    def faster(self) -> bool:
        """Whether the planner's plan is faster."""
        return self.planned_s < self.published_s * (1 - 1e-6)

    @property
    def slower(self) -> bool:
        """Whether it is slower."""
        return self.planned_s > self.published_s * (1 + 1e-6)


def better(bench: Bench, case: Case) -> Better | None:
    """Plans a case freely; None where nothing that the planner knows fits into memory, by its own
    account.
    """
    published = bench.plan(case, case.pins, boundless(case.topology))
    try:
        planned = bench.plan(case, {}, case.topology)
    except ShardlibError:
        return None
    return Better(
        id=case.id,
        published_s=published.estimate.step_seconds,
        planned_s=planned.estimate.step_seconds,
        published_bytes=float(published.estimate.device_bytes.peak),
        usable_bytes=float(case.topology.chip.usable_bytes),
        what=_difference(published, planned),
    )


def counts(found: Sequence[Better]) -> dict[str, int]:
    """How many of the planner's plans are faster than the published ones, and how many are
    slower.
    """
    return {
        "rows": len(found),
        "planned_faster": sum(one.faster for one in found),
        "planned_slower": sum(one.slower for one in found),
        "planned_slower_though_published_fits": sum(
            one.slower and one.published_fits for one in found
        ),
        "published_fits": sum(one.published_fits for one in found),
    }


def _difference(published: Plan, planned: Plan) -> str:
    words = [
        f"{word} {getattr(published, word)} -> {getattr(planned, word)}"
        for word in ("mesh", "zero", "remat", "microbatches", "schedule", "sequence_parallel")
        if getattr(published, word) != getattr(planned, word)
    ]
    before, after = vars(published.estimate.seconds), vars(planned.estimate.seconds)
    saved = sorted(((before[part] - after[part], part) for part in before), reverse=True)
    words += [f"{part} -{seconds:.3f} s" for seconds, part in saved[:2] if seconds > 0]
    return ", ".join(words) or "the same plan"
