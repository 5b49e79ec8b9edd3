"""Prices of steps whose layer groups follow different remat policies.

A *corner* names one policy for every group, followed by all its layers. Its kernels and collectives
are those of each group under its policy; its memory at a moment of the step is that of the group
whose loop runs, with what the others have saved under theirs (`shardlib.cost.step.phases`).

Between corners, where n of the L layers of a group follow a policy and the others rematerialise
nothing, each group is linear in n / L, as in
`shardlib.cost.pricing.variants.offload_and_partial_remat.mix`: the price is the multilinear
interpolation of the corners, with the largest of the parts of memory that are no saved activations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardlib.cost.pricing.totals import Totals
from shardlib.cost.terms.terms import OUTSIDE_LAYERS

Array = np.ndarray


#: The policy of each layer group.
Corner = tuple[str, ...]
#: For each class the policy and how many layers of the fullest stage follow it; ("none", 0) where
#: none rematerialise.
Each = tuple[tuple[str, int], ...]
#: The policy that rematerialises nothing.
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
    """The tallies of a corner: of work, and of memory at each point where it may peak."""
    work = sum(
        (
            parts[policy].work * (count / sum(counts))
            for policy, count in zip(corner, counts, strict=True)
        ),
        np.zeros_like(parts[corner[0]].work),
    )
    for k, policy in enumerate(corner):
        work[k] = parts[policy].work[k]
    points: list[Array] = []
    for number, segment in enumerate(moments):
        for peak_policy in (
            dict.fromkeys(corner) if segment == OUTSIDE_LAYERS else (corner[segment],)
        ):
            for point in parts[peak_policy].points[number]:
                point = point.copy()
                for k, policy in enumerate(corner):
                    if policy != peak_policy:
                        point[k] = parts[policy].stacks[number][k]
                points.append(point)
    return work, points


def corners(policies: Sequence[str], classes: int) -> list[Corner]:
    """Every corner: a remat policy for each layer group."""
    return list(itertools.product(policies, repeat=classes))


def blended(weighed: Sequence[tuple[Array, Totals]]) -> Totals:
    """Prices between corners: averages by weight, but of memory that is no saved activation the
    largest.
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
    """The price of candidates whose classes follow policies in part."""
    options: list[list[tuple[str, Array]]] = []
    for (policy, number), count in zip(each, layers, strict=True):
        share = number / count
        weighted = (
            [(policy, share), (NONE, 1 - share)]
            if policy != NONE
            else [(NONE, np.ones_like(share))]
        )
        options.append([(name, weight) for name, weight in weighted if weight.any()])
    weighed = [
        (
            np.multiply.reduce([weight for _, weight in combination]),
            price(tuple(name for name, _ in combination)),
        )
        for combination in itertools.product(*options)
    ]
    return blended(weighed)
