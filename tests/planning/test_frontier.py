"""Colours that no op ties together are independent, and what is worse everywhere is left out."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardlib.planning.frontier import Group, components, nondominated, on_frontier, subsets


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


@given(st.data())
def test_the_best_choice_is_among_those_that_are_kept(data: st.DataObject) -> None:
    """Under every cost that grows with all quantities, with and without the choice that cuts nothing."""
    sizes = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    parts = [[f"{i}{j}" for j in range(n)] for i, n in enumerate(sizes)]
    options = [subsets(part) for part in parts]
    number = st.integers(0, 4)
    vectors = [{subset: np.array(data.draw(st.lists(number, min_size=3, max_size=3)), dtype=float) for subset in part} for part in options]
    every = list(itertools.product(*options))
    weights = np.array(data.draw(st.lists(st.floats(0.01, 3), min_size=3, max_size=3)))
    for cuts in (every, [cut for cut in every if any(cut)]):
        def cost(cut: tuple[tuple[str, ...], ...]) -> float:
            total = sum(values[subset] for values, subset in zip(vectors, cut, strict=True))
            return float(weights @ total + np.max(total))

        kept = [cut for cut, keep in zip(cuts, on_frontier(cuts, vectors), strict=True) if keep]
        assert min(map(cost, kept)) <= min(map(cost, cuts)) * (1 + 1e-9)
