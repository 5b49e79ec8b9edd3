"""What would the planner do on the machine and with the software of a published run?"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.published.cases import Case
from benchmarks.published.pricing import Bench, boundless
from shardlib.errors import ShardlibError
from shardlib.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Better:
    """A published plan beside the planner's own.

    Attributes:
        id: of the case.
        published_s, planned_s: predicted seconds of a step.
        what: what the planner does otherwise, and the parts of the time that it saves by that.
    """

    id: str
    published_s: float
    planned_s: float
    what: str


def better(bench: Bench, case: Case) -> Better | None:
    """Plans a case freely; None where nothing that the planner knows fits into memory, by its own account."""
    published = bench.plan(case, case.pins, boundless(case.topology))
    try:
        planned = bench.plan(case, {}, case.topology)
    except ShardlibError:
        return None
    return Better(id=case.id, published_s=published.estimate.step_seconds, planned_s=planned.estimate.step_seconds, what=_difference(published, planned))


def _difference(published: Plan, planned: Plan) -> str:
    words = [f"{word} {getattr(published, word)} -> {getattr(planned, word)}" for word in ("mesh", "zero", "remat", "microbatches", "schedule", "sequence_parallel")
             if getattr(published, word) != getattr(planned, word)]
    before, after = vars(published.estimate.seconds), vars(planned.estimate.seconds)
    saved = sorted(((before[part] - after[part], part) for part in before), reverse=True)
    words += [f"{part} -{seconds:.3f} s" for seconds, part in saved[:2] if seconds > 0]
    return ", ".join(words) or "the same plan"
