"""Kinds of bytes that lower bounds of memory tell apart, and how tallies add up to them."""

from __future__ import annotations

import numpy as np

from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.tables.quantities import ROWS, Q
from shardlib.planning.space.cost_tables import Account

Array = np.ndarray
#: What is stored, by quantity: with all that ZeRO may shard sharded, and whole.
RESTING = (
    Q.PARAMETERS_CUT,
    Q.STATE_CUT,
    Q.KEPT_CUT,
    Q.PARAMETERS,
    Q.STATE,
    Q.KEPT,
)
#: Trained parameters, whole: what stages hold beside shards that they gather once for a step.
TRAINED = len(RESTING)
#: Frozen parameters rest beside the others.
_FROZEN = {Q.PARAMETERS_CUT: Q.FROZEN_CUT, Q.PARAMETERS: Q.FROZEN}
#: What occupies memory at a point, by what divides it: stacks that the forward pass saves for every
#: microbatch in flight, what else layers have, the ends, and what every stage has; and how many
#: bytes of stacks there are fewer than at the point that has the most, below zero.
STACKS, LAYERS, OUTSIDE_LAYERS, EVERYWHERE, LACKING = KINDS = range(5)


def resting(segments: int) -> Array:
    """Coefficients that turn a tally of what is stored into `RESTING` and `TRAINED` in layers and
    in embedding and head: array [2 x 7, rows].
    """
    coefficients = np.zeros((2, len(RESTING) + 1, segments, ROWS))
    for kind, quantity in enumerate(RESTING):
        for stored in (quantity, _FROZEN.get(quantity, quantity)):
            coefficients[0, kind, :-1, stored] = coefficients[1, kind, -1, stored] = 1.0
    coefficients[0, TRAINED, :-1, Q.PARAMETERS] = coefficients[1, TRAINED, -1, Q.PARAMETERS] = 1.0
    return coefficients.reshape(2 * (len(RESTING) + 1), -1)


def occupying(account: Account, pricer: Pricer) -> Array:
    """Coefficients that turn a tally of memory into the `KINDS` of every point: array [points x 5,
    rows].
    """
    factors, layers = pricer.corrected(np.ones((ROWS, 1)))[:, 0], account.segments - 2
    coefficients = np.zeros((account.lists, len(KINDS), account.lists, account.segments, ROWS))
    for point in range(account.lists):
        for quantity in (
            Q.SAVED,
            Q.TEMPORARY,
            Q.COPY_CUT,
            *(() if pricer.profile.gradient_buffer else (Q.GRADIENT_CUT,)),
        ):
            factor = factors[quantity]
            coefficients[
                point, STACKS if quantity == Q.SAVED else LAYERS, point, :layers, quantity
            ] = factor
            coefficients[point, EVERYWHERE, point, layers, quantity] = coefficients[
                point, OUTSIDE_LAYERS, point, layers + 1, quantity
            ] = factor
    return coefficients.reshape(account.lists * len(KINDS), -1)


def with_lacking(points: Array) -> Array:
    """Quantities with how many bytes of stacks each point has fewer than that with the most: all
    points together need at least what those of one would, less the most stacks.
    """
    by_point = points.reshape(len(points) // len(KINDS), len(KINDS), points.shape[-1])
    by_point[:, LACKING] = by_point[:, STACKS] - by_point[:, STACKS].max(0)
    return points
