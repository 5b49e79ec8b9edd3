"""The one table from primitive name to factor rule; the families are in `rules_*.py`."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.tracing import (
    rules_contraction,
    rules_elementwise,
    rules_indexing,
    rules_linalg,
    rules_movement,
    rules_random,
    rules_reduction,
)
from shardlib.tracing.description import Describe

#: How each primitive that shardlib knows is described. What is missing here is opaque, and a Finding says so.
TABLE: Mapping[str, Describe] = {
    **rules_contraction.TABLE, **rules_elementwise.TABLE, **rules_reduction.TABLE, **rules_movement.TABLE,
    **rules_indexing.TABLE, **rules_random.TABLE, **rules_linalg.TABLE,
}
