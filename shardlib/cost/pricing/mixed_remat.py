"""What does a step cost whose classes of layers follow different remat policies?

A *corner* names one policy for every class, followed by all its layers. Its kernels and collectives
are those of each class under its policy; its memory at a moment of the step is that of the class
whose loop runs, with what the others have saved under theirs (`shardlib.cost.step.phases`).

Between corners, where n of the L layers of a class follow a policy and the others recompute
nothing, each class is linear in n / L, as in `shardlib.cost.pricing.offload_and_partial_remat.mix`:
the price is the multilinear interpolation of the corners, with the largest of the parts of memory
that are no saved activations. Of one class with n free, time and memory are linear in n, so its
best n is at an end of the range that fits; the others are enumerated. That is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardlib.cost.pricing.step_time import Totals
from shardlib.cost.terms.terms import ENDS

Array = np.ndarray
#: The policy of each class of layers.
Corner = tuple[str, ...]
#: For each class the policy and how many layers of the fullest stage follow it; ("none", 0) where
#: none recompute.
Each = tuple[tuple[str, int], ...]
#: The policy that recomputes nothing.
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Tallies:
    """The tallies of one policy's program.

    Attributes:
        work: array [segments, rows, shapes].
        points: by moment, the tallies of the points of that moment.
        stacks: by moment, the tally of what loops have saved.
    """

    work: Array
    points: tuple[tuple[Array, ...], ...]
    stacks: tuple[Array, ...]


def composed(
    corner: Corner, parts: Mapping[str, Tallies], moments: Sequence[int], counts: Sequence[int]
) -> tuple[Array, list[Array]]:
    """The tallies of a corner: of work, and of memory at each point where it may peak.

    Args:
        corner: the policies.
        parts: tallies by policy.
        moments: class of each moment, or `ENDS`.
        counts: layers of each class; what lies outside of all layers is between the policies in
            proportion to them.
    """
    work = sum(
        (
            parts[policy].work * (count / sum(counts))
            for policy, count in zip(corner, counts, strict=True)
        ),
        np.zeros_like(parts[corner[0]].work),
    )
    for k, policy in enumerate(corner):
        work[k] = parts[policy].work[k]
    found: list[Array] = []
    for number, segment in enumerate(moments):
        for one in dict.fromkeys(corner) if segment == ENDS else (corner[segment],):
            for point in parts[one].points[number]:
                point = point.copy()
                for k, policy in enumerate(corner):
                    if policy != one:
                        point[k] = parts[policy].stacks[number][k]
                found.append(point)
    return work, found


def corners(policies: Sequence[str], classes: int) -> list[Corner]:
    """Every corner."""
    return list(itertools.product(policies, repeat=classes))


def blended(weighed: Sequence[tuple[Array, Totals]]) -> Totals:
    """Prices between corners: averages by weight, but of memory that is no saved activation the
    largest.

    Args:
        weighed: weight of each corner by candidate, all above 0 where a corner is listed, and its
            price.
    """

    def average(value: Callable[[Totals], Array]) -> Array:
        return sum(
            (weight * value(totals) for weight, totals in weighed),
            np.zeros_like(weighed[0][1].flops),
        )

    first = weighed[0][1]
    memory = {
        name: (
            average(lambda totals, name=name: totals.device_bytes[name])
            if name == "activations"
            else np.maximum.reduce([totals.device_bytes[name] for _, totals in weighed])
        )
        for name in first.device_bytes
    }
    return Totals(
        seconds={
            name: average(lambda totals, name=name: totals.seconds[name]) for name in first.seconds
        },
        device_bytes=memory,
        flops=average(lambda totals: totals.flops),
        stacks=average(lambda totals: totals.stacks),
        held=first.held,
    )


def between(
    each: Sequence[tuple[str, Array | int]],
    layers: Sequence[Array],
    price: Callable[[Corner], Totals],
) -> Totals:
    """The price of candidates whose classes follow policies in part.

    Args:
        each: policy of every class, and how many of its layers follow it, all of them at most; by
            candidate where they differ.
        layers: of the fullest stage, by class and candidate.
        price: of a corner.
    """
    options: list[list[tuple[str, Array]]] = []
    for (policy, number), most in zip(each, layers, strict=True):
        share = number / most
        ways = (
            [(policy, share), (NONE, 1 - share)]
            if policy != NONE
            else [(NONE, np.ones_like(share))]
        )
        options.append([(name, weight) for name, weight in ways if weight.any()])
    weighed = [
        (np.multiply.reduce([weight for _, weight in ways]), price(tuple(name for name, _ in ways)))
        for ways in itertools.product(*options)
    ]
    return blended(weighed)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The best way to share layers between policies, by candidate.

    Attributes:
        pattern: number of the pattern, see `patterns`; -1 where nothing fits.
        numbers: layers that recompute, array [classes, candidates].
        seconds: of a step; infinite where nothing fits.
    """

    pattern: Array
    numbers: Array
    seconds: Array


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A policy for each class, and which classes follow it with some of their layers only."""

    corner: Corner
    partly: tuple[bool, ...]

    def active(self) -> list[Corner]:
        """The corners between which it lies."""
        return list(
            itertools.product(
                *(
                    ((NONE, policy) if some else (policy,))
                    for policy, some in zip(self.corner, self.partly, strict=True)
                )
            )
        )


def patterns(policies: Sequence[str], classes: int) -> list[Pattern]:
    """Every pattern, the ones with the fewest classes in two parts first; corners with one policy
    for all are no mixtures.
    """
    found = [
        Pattern(corner=corner, partly=partly)
        for corner in corners(policies, classes)
        for partly in itertools.product((False, True), repeat=classes)
        if not any(some and policy == NONE for policy, some in zip(corner, partly, strict=True))
        and (any(partly) or len(set(corner)) > 1)
    ]
    return sorted(found, key=lambda pattern: sum(pattern.partly))


def best_mixture(
    prices: Mapping[Corner, Totals],
    choices: Sequence[Pattern],
    layers: Sequence[Array],
    capacity: float,
    *,
    total: int | None = None,
) -> Mixture:
    """The fastest mixture that fits, by candidate.

    Args:
        prices: of every corner.
        choices: patterns.
        layers: of the fullest stage, by class and candidate.
        capacity: usable bytes of a device; infinite to ask for the fastest whatever it takes.
        total: layers that recompute, of all classes; None as many as are best.
    """
    size = len(layers[0])
    best = Mixture(
        pattern=np.full(size, -1),
        numbers=np.zeros((len(layers), size)),
        seconds=np.full(size, np.inf),
    )
    for number, pattern in enumerate(choices):
        for numbers, seconds in _of_pattern(pattern, prices, layers, capacity, total):
            better = seconds < best.seconds * (1 - 1e-12)
            best.seconds[better], best.pattern[better] = seconds[better], number
            best.numbers[:, better] = numbers[:, better]
    return best


def _of_pattern(
    pattern: Pattern,
    prices: Mapping[Corner, Totals],
    layers: Sequence[Array],
    capacity: float,
    total: int | None,
) -> Iterator[tuple[Array, Array]]:
    """Layers that recompute and seconds, infinite where it is not to be, for every enumeration of
    all classes in two parts but the one with the most layers.
    """
    active = {corner: prices[corner] for corner in pattern.active()}
    whole = np.stack(
        [
            np.where(policy == NONE, 0.0, most)
            for policy, most in zip(pattern.corner, layers, strict=True)
        ]
    )
    names = [name for name in next(iter(active.values())).device_bytes if name != "activations"]
    others = sum(
        (
            np.maximum.reduce([totals.device_bytes[name] for totals in active.values()])
            for name in names
        ),
        np.zeros(len(layers[0])),
    )
    partly = sorted(
        (k for k, some in enumerate(pattern.partly) if some), key=lambda k: float(layers[k].max())
    )
    if not partly:
        only = prices[pattern.corner]
        legal = (only.device_bytes["activations"] + others <= capacity) & (
            (total is None) | (whole.sum(0) == (total or 0))
        )
        yield whole, np.where(legal, only.step_seconds, np.inf)
        return
    *outer, last = partly
    room = capacity - others
    for chosen in itertools.product(*(range(1, int(layers[k].max())) for k in outer)):
        numbers = whole.copy()
        for k, count in zip(outer, chosen, strict=True):
            numbers[k] = count
        legal = np.logical_and.reduce([numbers[k] < layers[k] for k in outer] + [layers[last] > 1])
        if legal.any():
            few, many = (
                _at_end(active, pattern, numbers / layers, last, policy)
                for policy in (NONE, pattern.corner[last])
            )
            numbers[last] = (
                total - np.delete(numbers, last, axis=0).sum(0)
                if total is not None
                else _number(few, many, layers[last], room)
            )
            share = numbers[last] / layers[last]
            legal &= (
                (few[1] + (many[1] - few[1]) * share <= room)
                & (numbers[last] >= 1)
                & (numbers[last] < layers[last])
            )
            yield numbers, np.where(legal, few[0] + (many[0] - few[0]) * share, np.inf)


def _at_end(
    active: Mapping[Corner, Totals], pattern: Pattern, shares: Array, last: int, policy: str
) -> tuple[Array, Array]:
    """Seconds and bytes of activations with all layers of class `last` following a policy, and
    shares of the other classes in two parts.
    """
    seconds, saved = np.zeros(shares.shape[1]), np.zeros(shares.shape[1])
    for corner, totals in active.items():
        if corner[last] == policy:
            weight = np.ones(shares.shape[1])
            for k, some in enumerate(pattern.partly):
                if some and k != last:
                    weight = weight * (
                        shares[k] if corner[k] == pattern.corner[k] else 1 - shares[k]
                    )
            seconds, saved = (
                seconds + weight * totals.step_seconds,
                saved + weight * totals.device_bytes["activations"],
            )
    return seconds, saved


def _number(few: tuple[Array, Array], many: tuple[Array, Array], most: Array, room: Array) -> Array:
    """The number of layers, from 1 to one less than all, that is the fastest of those that fit:
    seconds and bytes are linear in it.
    """
    slope = (many[1] - few[1]) / most
    with np.errstate(divide="ignore", invalid="ignore"):
        limit = np.clip((room - few[1]) / slope, -1.0, most + 1)
    least, largest = np.ones_like(most), most - 1
    least = np.where(slope < 0, np.maximum(1.0, np.ceil(limit - 1e-9)), least)
    largest = np.where(slope > 0, np.minimum(largest, np.floor(limit + 1e-9)), largest)
    least += (slope < 0) & (few[1] + slope * least > room)  # where rounding was on the wrong side
    largest -= (slope > 0) & (few[1] + slope * largest > room)
    return np.where(many[0] < few[0], largest, least)
