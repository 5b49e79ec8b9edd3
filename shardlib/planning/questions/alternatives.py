"""What else could have been chosen?

The plans that come next in the order of their predicted time, each with what it decides
differently. Equally fast plans are one entry: the simplest of them stands for all, and says how
many there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from numbers import Integral

from shardlib.errors import ArgumentError
from shardlib.planning.answers.alternative import Alternative
from shardlib.planning.islands.spread import inner_mesh
from shardlib.planning.plan import Plan, Ranked, source_of
from shardlib.planning.questions.counterfactual import changes
from shardlib.planning.units.quantity import TIE
from shardlib.untrusted.shown import shown

#: How far beyond the fastest plan alternatives are looked for, times its time, one after another; a
#: large space is not ranked farther than needed.
SLACKS = (1.02, 1.2, math.inf)
#: How many alternatives can be asked for: each becomes a whole plan, to say what it decides
#: differently, which takes hundredths of a second.
MOST = 1000


def alternatives(plan: Plan, count: int = 10) -> tuple[Alternative, ...]:
    """The best plans that differ from this one, and from each other, in more than a tie."""
    _require_count(count)
    plans: tuple[Alternative, ...] = ()
    for slack in SLACKS:
        plans, complete = _within(plan, count, slack)
        if complete or len(plans) >= count:
            break
    return plans


def _require_count(count: int) -> None:
    """Raises where so many alternatives cannot be asked for."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
        raise ArgumentError(
            f"alternatives: count is {shown(count)}; it is an integer of at least 0, how many plans"
            " are wanted\nTry: plan.alternatives(10)"
        )
    if count > MOST:
        raise ArgumentError(
            f"alternatives: count is {shown(count)}; it is at most {MOST}, as every alternative"
            " becomes a whole plan that is compared with this one, which takes hundredths of a"
            " second\nTry: plan.alternatives(10), and plan.why_not(...) for a plan further down"
        )


def _within(plan: Plan, count: int, slack: float) -> tuple[tuple[Alternative, ...], bool]:
    """Alternatives up to so many times the fastest plan, beyond which the ranking is not complete;
    and whether there are no others.
    """
    source = source_of(plan)
    listed: list[Alternative] = []
    fastest: float | None = None
    for ties in _by_time(source.ranked(source.topology, slack=slack)):
        fastest = ties[0].seconds if fastest is None else fastest
        if len(listed) >= count or ties[0].seconds > slack * fastest:
            return tuple(listed), False
        first, others = _first_other(plan, ties)
        if first is None:
            continue
        alternative = first.make()
        listed.append(
            Alternative(
                place=len(listed) + 1,
                mesh=alternative.mesh,
                summary=first.candidate.summary,
                step_seconds=first.seconds,
                peak_bytes=int(first.peak_bytes),
                ratio=first.seconds / (plan.estimate.step_seconds or 1.0),
                differs=changes(plan, alternative),
                ties=others,
            )
        )
    return tuple(listed), math.isinf(slack)


def _by_time(plans: Iterable[Ranked]) -> Iterator[list[Ranked]]:
    """Runs of equally fast plans."""
    run: list[Ranked] = []
    for entry in plans:
        if run and entry.seconds > run[0].seconds * (1 + TIE):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _first_other(plan: Plan, ties: list[Ranked]) -> tuple[Ranked | None, int]:
    """The simplest of equally fast plans, and how many others there are; nothing where the chosen
    plan is one of them.
    """
    includes_plan = (
        abs(ties[0].seconds - plan.estimate.step_seconds) <= TIE * plan.estimate.step_seconds
    )
    if includes_plan and any(
        entry.candidate.mesh == inner_mesh(plan.mesh) and entry.make().decisions == plan.decisions
        for entry in ties
    ):
        return None, 0
    return ties[0], len(ties) - 1
