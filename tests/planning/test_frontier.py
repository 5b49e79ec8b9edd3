"""Colours that no op ties together are independent, and what is worse everywhere is left out."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardlib.planning.frontier import Group, components, nondominated, subsets


def test_components_are_the_classes_of_tied_colours() -> None:
    groups = [Group(frozenset(names)) for names in ({"heads", "head_dim"}, {"head_dim", "rope"}, {"mlp"}, {"vocab", "batch"}, set[str]())]
    assert components(groups, ("vocab", "mlp", "rope", "heads", "head_dim")) == (("vocab",), ("mlp",), ("rope", "heads", "head_dim"))
    assert subsets(("a", "b")) == [(), ("a",), ("b",), ("a", "b")]


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=12))
def test_what_is_kept_is_never_worse_than_what_is_not(rows: list[list[int]]) -> None:
    vectors = [np.array(row, dtype=float) for row in rows]
    kept = nondominated(vectors)
    assert kept
    for i, vector in enumerate(vectors):
        assert i in kept or any((vectors[k] <= vector).all() for k in kept)
    for i, j in itertools.permutations(kept, 2):
        assert not (vectors[i] <= vectors[j]).all()
