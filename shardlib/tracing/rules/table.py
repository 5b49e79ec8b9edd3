"""The one table from primitive name to factor rule; the families are in the files beside it."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.tracing.rules import (
    contraction,
    elementwise,
    indexing,
    linalg,
    movement,
    random,
    reduction,
)
from shardlib.tracing.rules.description import Describe

#: How each primitive that shardlib knows is described. What is missing here is opaque, and a
#: Finding says so.
TABLE: Mapping[str, Describe] = {
    **contraction.TABLE,
    **elementwise.TABLE,
    **reduction.TABLE,
    **movement.TABLE,
    **indexing.TABLE,
    **random.TABLE,
    **linalg.TABLE,
}
