"""Figures of chips under frameworks, fitted level by level, each pulled to the one above.

Few pairs of a chip and a framework have enough published runs for a fit of their own, and a run of a
new source often is of a pair that has none. So figures are fitted three times: for all frameworks on
one vendor's chips (what frameworks reach of what the chip alone does), for one framework on all
chips, and for the pair. Each starts where the level above ends and pays for the distance from there,
less the more rows there are; a level with fewer than `ROWS_A_FIGURE` rows a figure moves fewer
figures, and none where it has fewer than that, so that what nobody has measured is as the framework
elsewhere, or as frameworks in general.

Shares are fitted as parts of the chip's sourced figures, so that they carry over to other chips.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.environment import table
from benchmarks.published.unseen.runs import Figures, Run

#: Figure -> least and largest value with its physical meaning. Shares of the matrix unit: half of
#: what the chip's own largest matmuls sustain is left where a framework's shapes and kernels are
#: poor (arXiv:2402.15627, figure 1 and table 2: 43 to 60% of the peak in whole steps, with
#: everything else in them), and none is more. `unfused`: perfectly fused, to a kernel for each of
#: four ops of a chain. `memory`: STREAM on HBM reaches 0.92; a half where kernels are short.
#: Launches: 2 to 20 microseconds of a host's time for an op of PyTorch or a launch of CUDA
#: (pytorch.org/blog/accelerating-pytorch-with-cuda-graphs). `fast`, `slow`: a third of the link,
#: where pieces are small or ports shared, to a tenth above the catalogue's share of it. Matmuls of
#: misaligned dims: cuBLAS before 11 without tensor cores, an eighth (NVIDIA, Matrix Multiplication
#: Background User's Guide, 3.1).
RANGES: Mapping[str, tuple[float, float]] = table("published_ranges")
#: Figures that are not shares: their own values are fitted, not parts of the chip's.
ABSOLUTE: frozenset[str] = frozenset({"unfused", "dispatch_s", "gap_s", "microbatch_s"})
#: Rows that a figure takes.
ROWS_A_FIGURE = 3
#: What log distance 1 from the level above costs, as a share of the error that it must save, where
#: a level has `ROWS` rows; more with fewer.
PULL, ROWS = 0.02, 8
#: Error, as a logarithm, from which on a run counts a quarter: another release, or a regression.
FAR = 0.15
#: A figure moves along powers of this; numbers of powers that are tried around it at once.
POWER = 1.04
TRIED: tuple[int, ...] = (-8, -4, -2, -1, 1, 2, 4, 8)
#: Most rounds over all figures, and the gain of a round below which there is no other.
ROUNDS, GAIN = 4, 1e-3
#: Where the first steps of a figure that starts at 0 go.
FIRST: Mapping[str, tuple[float, ...]] = {
    "microbatch_s": (1e-3, 5e-3),
    "dispatch_s": (5e-6, 1e-5, 2e-5),
    "gap_s": (4e-6, 1e-5),
}
#: Most runs of one source and pair that a level above the pair is fitted to, and most of a pair.
MOST_OF_PAIR, MOST = 1, 16

#: Values of a level: parts of the chip's sourced figures, and figures of their own (`ABSOLUTE`).
Level = dict[str, float]
#: The level of chips alone.
SOURCED: Level = {name: (1.0 if name == "unfused" else 0.0) for name in ABSOLUTE} | {
    name: 1.0 for name in RANGES if name not in ABSOLUTE
}


def figures_of(level: Level, run: Run) -> Figures:
    """The figures of a run's chip at a level: only those that its framework has."""
    used = set(run.priced.figures())
    found: Figures = {}
    for name in used & level.keys():
        low, high = RANGES[name]
        start = run.start[name]
        if name in ("matmul", "eight_bit"):
            high = start  # nothing is faster than the largest matmuls on a quiet chip
        value = level[name] if name in ABSOLUTE else start * level[name]
        found[name] = float(f"{min(high, max(min(low, start), value)):.4g}")
    return found


def spread(runs: Sequence[Run], most: int, each: int | None = None) -> list[Run]:
    """At most `most` runs, one of each source, pair and `split` in turn, and at most `each` of one
    source and pair.
    """
    by_split: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in runs:
        own = by_split.setdefault((run.sample.source, run.group), {})
        own.setdefault(run.sample.split, []).append(run)
    chosen: list[list[Run]] = []
    for own in by_split.values():
        turns = [
            entries[turn]
            for turn in range(max(map(len, own.values())))
            for entries in own.values()
            if turn < len(entries)
        ]
        chosen.append(turns[:each])
    ordered = [
        some[turn]
        for turn in range(max(map(len, chosen), default=0))
        for some in chosen
        if turn < len(some)
    ]
    return ordered[:most]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A level, how many rows it rests on, the figures that may have moved, and the rows' names."""

    level: Level
    rows: int
    fitted: tuple[str, ...]
    ids: tuple[str, ...] = ()


def fitted(runs: Sequence[Run], above: Level) -> Fit:
    """The level of some runs below another: figures are moved one after the other, each to the best
    of some values around it, in rounds until a round gains next to nothing.
    """
    names, ids = names_for(runs), tuple(run.sample.id for run in runs)
    if not names:
        return Fit(level=above, rows=len(runs), fitted=(), ids=ids)
    level = dict(above)
    best = losses(runs, [level], above, names)[0]
    for _ in range(ROUNDS):
        before = best
        for name in names:
            tried = [{**level, name: value} for value in around(name, level[name])]
            costs = losses(runs, tried, above, names)
            least = min(range(len(tried)), key=costs.__getitem__)
            if costs[least] < best - 1e-5:
                level, best = tried[least], costs[least]
        if before - best < GAIN:
            break
    return Fit(level=level, rows=len(runs), fitted=tuple(names), ids=ids)


def around(name: str, value: float) -> list[float]:
    """Values that are tried beside one of a figure."""
    low, high = RANGES[name] if name in ABSOLUTE else (0.2, 2.0)
    tried = [value * POWER**power for power in TRIED] if value else []
    tried += [0.0, *FIRST[name]] if name in FIRST else []
    return sorted({min(high, max(low, one)) for one in tried} - {value})


def names_for(runs: Sequence[Run]) -> list[str]:
    """The figures that so many rows can say something about, the most telling first."""
    found: list[str] = []
    for name in RANGES:
        rows = sum(name in run.priced.figures() for run in runs)
        if rows >= ROWS_A_FIGURE and ROWS_A_FIGURE * (len(found) + 1) <= len(runs):
            found.append(name)
    return found


def losses(
    runs: Sequence[Run], levels: Sequence[Level], above: Level, names: Sequence[str]
) -> list[float]:
    """For each level the mean over sources of |log(predicted / measured)|, what is beyond `FAR`
    counting a quarter, and the pull to the level above.
    """
    errors: dict[str, list[list[float]]] = {}
    for run in runs:
        found = run.many([figures_of(level, run) for level in levels])
        logs = [abs(math.log(seconds / run.sample.measured_s)) for seconds in found]
        errors.setdefault(run.sample.source, []).append(
            [one if one < FAR else FAR + (one - FAR) / 4 for one in logs]
        )
    pull = PULL * max(1.0, ROWS / len(runs)) / len(names)
    return [
        statistics.mean(statistics.mean(own[i] for own in listed) for listed in errors.values())
        + pull * sum(abs(math.log((level[n] + FLOOR) / (above[n] + FLOOR))) for n in names)
        for i, level in enumerate(levels)
    ]


#: Keeps logarithms of figures that start at 0 finite.
FLOOR = 1e-5


def by_level(runs: Sequence[Run], wanted: set[str]) -> dict[str, tuple[Fit, Fit, Fit]]:
    """For every wanted pair of chip and framework, by name, the fits of its vendor, its framework
    and of the pair itself, to the runs that have a time.
    """
    timed = [run for run in runs if run.sample.measured_s]
    above: dict[str, Fit] = {}
    found: dict[str, tuple[Fit, Fit, Fit]] = {}
    for name in sorted(wanted):
        stack = name.split(".", 1)[1]
        vendor = "google" if stack == "maxtext-tpu" else "nvidia"
        if vendor not in above:
            every = spread([run for run in timed if run.vendor == vendor], 999, MOST_OF_PAIR)
            above[vendor] = fitted(every, SOURCED)
        if stack not in above:
            same = spread([run for run in timed if run.stack == stack], 2 * MOST, MOST // 2)
            above[stack] = fitted(same, above[vendor].level)
        pair = spread([run for run in timed if run.group == name], MOST)
        found[name] = above[vendor], above[stack], fitted(pair, above[stack].level)
    return found
