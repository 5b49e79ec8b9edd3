"""Rows of tables of arrays: taken, and joined."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace

import numpy as np
import pytest

from shardlib.cost.terms import SHARED_BY_ROWS, Array, ArrayTable, LazyTable
from shardlib.planner import priced  # noqa: F401  it defines or imports all tables


@dataclass(frozen=True, kw_only=True)
class Inner(LazyTable):
    rows: Array


@dataclass(frozen=True, kw_only=True)
class Outer(LazyTable):
    plain: Array
    grid: Array
    words: list[str]
    inner: Inner
    by_name: dict[str, Inner]
    several: tuple[Array, ...]
    shared: Array = field(metadata=SHARED_BY_ROWS)
    number: int
    cache: dict[str, Array] = field(default_factory=dict[str, Array], init=False)


def table() -> Outer:
    rows = np.arange(6.0)
    return Outer(
        plain=rows,
        grid=np.stack([rows, 10 * rows]),
        words=list("abcdef"),
        inner=Inner(rows=rows),
        by_name={"x": Inner(rows=-rows)},
        several=(rows, rows + 1),
        shared=np.arange(3),
        number=7,
    )


@pytest.mark.parametrize("lazy", [True, False])
def test_the_rows_of_all_fields_are_taken(lazy: bool) -> None:
    some = table().take(np.array([4, 1])) if lazy else table().copied(np.array([4, 1]))
    assert some.plain.tolist() == [4, 1] and some.grid.tolist() == [[4, 1], [40, 10]]
    assert some.words == ["e", "b"] and some.inner.rows.tolist() == [4, 1]
    assert some.by_name["x"].rows.tolist() == [-4, -1] and some.several[1].tolist() == [5, 2]
    assert some.shared.tolist() == [0, 1, 2] and some.number == 7


def test_rows_of_rows_are_those_of_the_first_table() -> None:
    mask = np.array([False, True, True, False, True, True])
    last = table().take(mask).take(np.array([3, 0, 2])).take(np.array([True, False, True]))
    assert last.plain.tolist() == [5, 4] and last.grid.tolist() == [[5, 4], [50, 40]]
    with pytest.raises(AttributeError, match="Outer has no rate"):
        last.rate  # type: ignore[attr-defined]  # noqa: B018


def test_what_was_changed_after_it_was_taken_is_taken_again() -> None:
    some = table().take(np.array([1, 2, 3]))
    some.by_name["x"].rows[0] = 100
    assert some.take(np.array([0, 2])).by_name["x"].rows.tolist() == [100, -3]
    assert replace(some, number=1).take(np.array([0])).number == 1


def test_caches_are_taken_along() -> None:
    whole = table()
    whole.cache["sum"] = np.arange(6)
    assert whole.take(np.array([2])).cache["sum"].tolist() == [2]
    assert whole.copied(np.array([2])).cache == {}


def tables(kind: type[ArrayTable]) -> list[type[ArrayTable]]:
    return [kind, *(leaf for inner in kind.__subclasses__() for leaf in tables(inner))]


@pytest.mark.parametrize("kind", tables(LazyTable), ids=lambda kind: kind.__name__)
def test_fields_of_lazy_tables_have_no_defaults(kind: type[ArrayTable]) -> None:
    """A default would stand for the field before it is taken."""
    assert all(f.default is MISSING for f in fields(kind))
