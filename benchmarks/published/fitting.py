"""Which few figures of a chip under a software stack explain its published runs?

A group is all cases of one chip and stack. Its figures
(`shardlib.cost.machine.efficiency.Efficiency`) start as the sourced ones of the chip, and are moved
one after the other, each by golden steps, to where the mean over sources of |log(predicted /
measured)| is least, with a small pull back to where they started: a figure that the runs say
nothing about stays. How well that carries over to other runs is measured by leaving out every
second group of runs (`split_group`), fitting to the others, and the other way around.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Figure -> least and largest value that has its physical meaning, and runs that it takes to fit
#: it.
FIGURES: Mapping[str, tuple[float, float, int]] = {
    "matmul": (0.25, 1.0, 2),
    "eight_bit": (0.15, 1.0, 2),
    "unfused": (1.0, 6.0, 4),
    "memory": (0.4, 0.95, 8),
    "attention": (0.15, 0.85, 6),
    "microbatch_s": (0.0, 0.2, 8),
    "dispatch_s": (0.0, 2e-4, 8),
    "gap_s": (0.0, 1e-4, 8),
    "fast": (0.3, 1.2, 8),
    "slow": (0.2, 1.1, 8),
    "misaligned": (0.03, 1.0, 10),
    "grouped": (0.2, 1.0, 4),
}
#: How much a figure's distance from where it started costs, as a share of the error that it must
#: save: log distance 1 costs so much.
PULL = 0.02
#: Error, as a logarithm, from which on a run is another case than the model takes it for (another
#: release, a regression), and pulls a quarter as hard.
FAR = 0.15
#: Factors that are tried around a figure, in rounds.
STEPS: tuple[float, ...] = (1.3, 1.1, 1.03)
#: Most rounds of one step, and the gain of a round below which there is no other.
ROUNDS, GAIN = 3, 1e-3
#: Other places to start from: kernels between the matmuls that take long and a host that is slow;
#: slow links; matmuls of misaligned dims without tensor cores; gaps between kernels that are many.
AWAY: tuple[Mapping[str, float], ...] = (
    {"unfused": 2.5, "dispatch_s": 6e-5},
    {"dispatch_s": 6e-5},
    {"fast": 0.6, "slow": 0.6},
    {"misaligned": 0.07},
    {"gap_s": 4e-5, "misaligned": 0.08, "unfused": 1.7},
)
#: Where the first step of a figure that starts at 0 goes.
FIRST: Mapping[str, float] = {"microbatch_s": 1e-3, "dispatch_s": 1e-5, "gap_s": 5e-6}

Values = Mapping[str, float]
#: Predicted seconds of the runs of a group under some values.
Predict = Callable[[Values], Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of a group.

    Attributes:
        id, source, split: of the row; runs of one `split` are alike.
        measured_s: seconds of a step.
    """

    id: str
    source: str
    split: str
    measured_s: float


def loss(
    samples: Sequence[Sample], predicted: Sequence[float], values: Values, start: Values
) -> float:
    """The mean over sources of the mean |log(predicted / measured)|, what is beyond `FAR` counting
    a quarter, and the pull to the start.
    """
    errors: dict[str, list[float]] = {}
    for sample, seconds in zip(samples, predicted, strict=True):
        errors.setdefault(sample.source, []).append(
            _cost(abs(math.log(seconds / sample.measured_s)))
        )
    pull = sum(abs(math.log((values[name] + 1e-4) / (start[name] + 1e-4))) for name in values)
    return statistics.mean(map(statistics.mean, errors.values())) + PULL * pull / max(
        1, len(values)
    )


def _cost(error: float) -> float:
    return error if error < FAR else FAR + (error - FAR) / 4


def fit(
    samples: Sequence[Sample], predict: Predict, start: Values, names: Sequence[str]
) -> dict[str, float]:
    """Moves the figures `names` to the least loss: from `start` and, because the least loss nearby
    need not be the least of all, from each of `AWAY`.
    """
    origins = [{name: start[name] for name in names}]
    origins += [
        {**origins[0], **{name: away[name] for name in names if name in away}}
        for away in AWAY
        if any(name in away for name in names)
    ]
    found = [_descent(samples, predict, start, origin, STEPS[:1]) for origin in origins]
    values, _ = _descent(samples, predict, start, min(found, key=lambda one: one[1])[0], STEPS[1:])
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def _descent(
    samples: Sequence[Sample],
    predict: Predict,
    start: Values,
    origin: Values,
    steps: Sequence[float],
) -> tuple[dict[str, float], float]:
    """Moves figures from `origin`, one after the other, by each of the steps in rounds until a
    round gains next to nothing: the figures, and their loss.
    """
    values, names = dict(origin), list(origin)
    best = loss(samples, predict(values), values, start)
    for step in steps:
        for _ in range(ROUNDS):
            before = best
            for name in names:
                values[name], best = _moved(name, values, best, step, samples, predict, start)
            if before - best < GAIN:
                break
    return values, best


def _moved(
    name: str,
    values: dict[str, float],
    best: float,
    step: float,
    samples: Sequence[Sample],
    predict: Predict,
    start: Values,
) -> tuple[float, float]:
    """The best value of one figure along steps up and down, and its loss."""
    low, high, _ = FIGURES[name]
    high = (
        start[name] if name in ("matmul", "eight_bit") else high
    )  # nothing is faster than the largest matmuls on a quiet chip
    found = values[name]
    for factor in (step, 1 / step):
        while True:
            tried = min(high, max(low, found * factor if found else FIRST[name]))
            if tried == found:
                break
            cost = loss(samples, predict({**values, name: tried}), {**values, name: tried}, start)
            if cost >= best - 1e-5:
                break
            found, best = tried, cost
    return found, best


def halves(samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """Indices of two halves of the runs; runs that are alike stay together."""
    order = {
        split: number for number, split in enumerate(sorted({sample.split for sample in samples}))
    }
    return (
        [i for i, sample in enumerate(samples) if order[sample.split] % 2 == 0],
        [i for i, sample in enumerate(samples) if order[sample.split] % 2],
    )


def figures_for(samples: Sequence[Sample], kinds: Iterable[str]) -> list[str]:
    """The figures that a group has enough runs to fit, of those that its kernels use."""
    usable = set(kinds)
    return [
        name for name, (_, _, least) in FIGURES.items() if name in usable and len(samples) >= least
    ]


def median_error(samples: Sequence[Sample], predicted: Sequence[float]) -> float:
    """Median of |predicted / measured - 1|."""
    return statistics.median(
        abs(seconds / sample.measured_s - 1)
        for sample, seconds in zip(samples, predicted, strict=True)
    )


def source_error(samples: Sequence[Sample], predicted: Sequence[float]) -> float:
    """The mean over sources of the median error, which a fit must not make worse."""
    by_source: dict[str, list[float]] = {}
    for sample, seconds in zip(samples, predicted, strict=True):
        by_source.setdefault(sample.source, []).append(abs(seconds / sample.measured_s - 1))
    return statistics.mean(map(statistics.median, by_source.values()))


def evidence(
    samples: Sequence[Sample],
    before: Sequence[float],
    after: Sequence[float],
    held_out: float | None,
) -> dict[str, Any]:
    """What a curve file says of its fit."""
    return {
        "rows": [sample.id for sample in samples],
        "median_error_before": round(median_error(samples, before), 4),
        "median_error_after": round(median_error(samples, after), 4),
        "median_error_held_out": held_out if held_out is None else round(held_out, 4),
    }
