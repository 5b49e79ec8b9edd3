"""Which plans are compiled first?

What a compiler keeps for the backward pass is what a cost model knows least about, so the fastest
plan of every remat policy has its turn before a second one of any policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardlib.planning.plan import Ranked

#: Times the seconds of the fastest, up to which a plan has its turn early. Predicted times are up
#: to 19% off the TPU compiler's order (`benchmarks/results/order_by_compiler.json`).
SLACK = 1.25


def one_of_each_policy(ranking: Iterable[Ranked]) -> Iterator[Ranked]:
    """Plans in the order in which they are compiled."""
    plans = iter(ranking)
    fastest, later = dict[str, Ranked](), list[Ranked]()
    for plan in plans:
        policy = plan.candidate.decisions.remat
        if fastest and plan.seconds > SLACK * next(iter(fastest.values())).seconds:
            later.append(plan)
            break
        if policy in fastest:
            later.append(plan)
        else:
            fastest[policy] = plan
    yield from fastest.values()
    yield from later
    yield from plans
