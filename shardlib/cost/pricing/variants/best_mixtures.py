"""The fastest mixture of remat policies over layer groups that fits.

Of one group with n layers free, time and memory are linear in n
(`shardlib.cost.pricing.variants.mixed_remat`), so its best n is at an end of the range that fits;
the numbers of the other groups are enumerated. That is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardlib.cost.pricing.totals import Totals
from shardlib.cost.pricing.variants.mixed_remat import NONE, Corner, corners

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The best way to share layers between policies, by candidate.

    Attributes:
        pattern: number of the pattern, see `patterns`; -1 where nothing fits.
        numbers: layers that rematerialise, array [classes, candidates].
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
                    ((NONE, policy) if partly else (policy,))
                    for policy, partly in zip(self.corner, self.partly, strict=True)
                )
            )
        )


def patterns(policies: Sequence[str], classes: int) -> list[Pattern]:
    """Every pattern, the ones with the fewest classes in two parts first; corners with one policy
    for all are no mixtures.
    """
    listed = [
        Pattern(corner=corner, partly=partly)
        for corner in corners(policies, classes)
        for partly in itertools.product((False, True), repeat=classes)
        if not any(
            in_part and policy == NONE for policy, in_part in zip(corner, partly, strict=True)
        )
        and (any(partly) or len(set(corner)) > 1)
    ]
    return sorted(listed, key=lambda pattern: sum(pattern.partly))


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
        capacity: usable bytes of a device; infinite to ask for the fastest whatever it takes.
        total: layers that rematerialise, of all classes; None as many as are best.
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
    """Layers that rematerialise and seconds, infinite where it is not to be, for every enumeration
    of all classes in two parts but the one with the most layers.
    """
    active = {corner: prices[corner] for corner in pattern.active()}
    rematerialised = np.stack(
        [
            np.where(policy == NONE, 0.0, count)
            for policy, count in zip(pattern.corner, layers, strict=True)
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
        (k for k, in_part in enumerate(pattern.partly) if in_part),
        key=lambda k: float(layers[k].max()),
    )
    if not partly:
        only = prices[pattern.corner]
        legal = (only.device_bytes["activations"] + others <= capacity) & (
            (total is None) | (rematerialised.sum(0) == (total or 0))
        )
        yield rematerialised, np.where(legal, only.step_seconds, np.inf)
        return
    *outer, last = partly
    space = capacity - others
    for chosen in itertools.product(*(range(1, int(layers[k].max())) for k in outer)):
        numbers = rematerialised.copy()
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
                else _number(few, many, layers[last], space)
            )
            share = numbers[last] / layers[last]
            legal &= (
                (few[1] + (many[1] - few[1]) * share <= space)
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
            for k, in_part in enumerate(pattern.partly):
                if in_part and k != last:
                    weight = weight * (
                        shares[k] if corner[k] == pattern.corner[k] else 1 - shares[k]
                    )
            seconds, saved = (
                seconds + weight * totals.step_seconds,
                saved + weight * totals.device_bytes["activations"],
            )
    return seconds, saved


def _number(
    few: tuple[Array, Array], many: tuple[Array, Array], layers: Array, space: Array
) -> Array:
    """The number of layers, from 1 to one less than all, that is the fastest of those that fit:
    seconds and bytes are linear in it.
    """
    slope = (many[1] - few[1]) / layers
    with np.errstate(divide="ignore", invalid="ignore"):
        limit = np.clip((space - few[1]) / slope, -1.0, layers + 1)
    smallest, largest = np.ones_like(layers), layers - 1
    smallest = np.where(slope < 0, np.maximum(1.0, np.ceil(limit - 1e-9)), smallest)
    largest = np.where(slope > 0, np.minimum(largest, np.floor(limit + 1e-9)), largest)
    smallest += (slope < 0) & (
        few[1] + slope * smallest > space
    )  # where rounding was on the wrong side
    largest -= (slope > 0) & (few[1] + slope * largest > space)
    return np.where(many[0] < few[0], largest, smallest)
