"""Stages in one program or as per-stage programs, where a pin leaves that open.

`pipeline="any"` searches both and takes the faster; a tie goes to one program. Per-stage programs
take one process that has all devices, so nobody gets them without having asked: a plan that was
tried on simulated devices would not be what several hosts run.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from shardlib.cost.terms.framework_profiles import XLA
from shardlib.decisions.entry import ANY
from shardlib.decisions.pins import Pins
from shardlib.errors import InfeasibleError, PinError
from shardlib.planning.plan import Plan, Ranked
from shardlib.planning.space.workload import Workload
from shardlib.report import Finding

T = TypeVar("T")
#: What whoever leaves the form open should know of per-stage programs.
ONE_PROCESS = Finding(
    code="one-process",
    severity="info",
    where="pipeline=programs",
    message="per-stage programs are called by one process, which has to have all devices",
    hint="pipeline=lockstep, which runs in any number of processes",
)
#: What stages may be, the simpler first.
FORMS = ("lockstep", "programs")


def left_open(load: Workload, pins: Pins) -> bool:
    """Whether the planner decides how stages run: only where shardlib makes the programs."""
    return pins.pipeline == ANY and load.profile.name == XLA.name


def fastest_form(pins: Pins, search: Callable[[Pins], Plan]) -> Plan:
    """The faster of the best plans of both forms, with a certificate over both."""
    plans = _of_both(pins, search)
    chosen = min(plans, key=lambda plan: plan.estimate.step_seconds)
    counts = Counter[str]()
    for plan in plans:
        counts.update(dict(plan.search.counts))
    bound = min(plan.estimate.step_seconds * (1 - plan.search.gap) for plan in plans)
    certificate = replace(
        chosen.search,
        evaluations=sum(plan.search.evaluations for plan in plans),
        candidates=sum(plan.search.candidates for plan in plans),
        seconds=sum(plan.search.seconds for plan in plans),
        lower_bound=min(plan.search.lower_bound for plan in plans),
        gap=max(0.0, 1 - bound / chosen.estimate.step_seconds),
        counts=tuple(sorted(counts.items())),
    )
    faster = replace(chosen, search=certificate)
    return faster.with_findings(*([ONE_PROCESS] if faster.pipeline == "programs" else []))


def forms_in_order(
    pins: Pins,
    ranked: Callable[[Pins], Iterator[Ranked]],
    *,
    slack: float = math.inf,
    front: bool = False,
) -> Iterator[Ranked]:
    """Plans of both forms, the fastest first.

    Args:
        slack: up to how many times the seconds of the fastest.
    """
    fewest_bytes, limit = math.inf, math.inf
    for entry in heapq.merge(*_of_both(pins, ranked), key=lambda entry: entry.seconds):
        limit = min(limit, slack * entry.seconds)
        if entry.seconds > limit:
            return
        if not front or entry.peak_bytes < fewest_bytes:
            yield entry
        fewest_bytes = min(fewest_bytes, entry.peak_bytes)


def _of_both(pins: Pins, ask: Callable[[Pins], T]) -> list[T]:
    """The answers for both forms, or for the one that has any."""
    answers: list[T] = []
    refused: list[PinError | InfeasibleError] = []
    for form in FORMS:
        try:
            answers.append(ask(pins.changed(Pins.parse({"pipeline": form}))))
        except (PinError, InfeasibleError) as error:
            refused.append(error)
    if not answers:
        raise refused[0]
    return answers
