"""Plans that are predicted to take about as long, and how well the order of their predictions is that
of what was found.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from scipy.stats import spearmanr

import shardlib
from shardlib.errors import InfeasibleError, PinError

#: Plans are taken that are predicted to take at most so many times the fastest.
SLACK = 1.2
#: Plans whose times differ by less than this are as fast as each other.
ALIKE = 0.02
Pin = dict[str, Any]


def pins(devices: int) -> Iterator[Pin]:
    """Every mesh over data, fsdp and tensor, with ZeRO stages and microbatches."""
    for tensor in (n for n in (1, 2, 4, 8) if devices % n == 0):
        for fsdp in (n for n in (1, 2, 4, 8, 16) if devices // tensor % n == 0):
            mesh = {"data": devices // tensor // fsdp, "fsdp": fsdp, "tensor": tensor}
            for zero in (1, 3) if fsdp > 1 else (0,):
                for micro in (1, 2):
                    yield {"mesh": mesh, "zero": zero, "microbatches": micro}


def candidates(
    job: Mapping[str, Any], topology: str, tried: Iterable[Pin], most: int
) -> list[tuple[Pin, shardlib.Plan]]:
    """The plans within `SLACK` of the best prediction: the best, and others spread evenly over the
    predictions, at most `most` (at least 2) in all. Pins that allow no plan are passed over.
    """
    found: dict[str, tuple[Pin, shardlib.Plan]] = {}
    for pin in tried:
        try:
            plan = shardlib.plan(**job, topology=topology, pin=pin)
        except (PinError, InfeasibleError):
            continue
        found.setdefault(json.dumps(plan.decisions, sort_keys=True, default=str), (pin, plan))
    ordered = sorted(found.values(), key=lambda one: one[1].estimate.step_seconds)
    least = ordered[0][1].estimate.step_seconds
    near = [one for one in ordered if one[1].estimate.step_seconds <= SLACK * least]
    if len(near) <= most:
        return near
    return [near[round(i * (len(near) - 1) / (most - 1))] for i in range(most)]


def judged(
    predicted: Sequence[float], found: Sequence[float], noise: float = 0.0
) -> dict[str, float | None]:
    """Regret, and the rank correlation where plans differ by more than the relative noise of what
    was found.
    """
    first = min(range(len(predicted)), key=lambda i: predicted[i])
    spread = max(found) / min(found) - 1
    told = spread > max(noise, ALIKE) and len(found) > 2
    return {
        "regret": found[first] / min(found) - 1,
        "predicted_over_measured": predicted[first] / found[first],
        "spread": spread,
        "noise": noise,
        "rank_correlation": float(spearmanr(predicted, found)[0]) if told else None,
    }


def summary(jobs: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """The figures over all jobs, each of which has those of `judged`."""
    rows = [*jobs]
    regrets = [row["regret"] for row in rows]
    told = [row["rank_correlation"] for row in rows if row["rank_correlation"] is not None]
    return {
        "median_regret": statistics.median(regrets),
        "worst_regret": max(regrets),
        "median_rank_correlation": statistics.median(told) if told else None,
    }
