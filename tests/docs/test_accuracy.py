"""The page of accuracy is that of the stored results, and no unseen group has become worse."""

from __future__ import annotations

import pytest

from benchmarks import accuracy
from benchmarks.environment import table


def test_the_page_has_the_stored_figures() -> None:
    text = accuracy.PAGE.read_text(encoding="utf-8")
    assert accuracy.page(text) == text, "old; make it again: python -m benchmarks accuracy"


def test_the_interval_is_that_of_the_readme() -> None:
    text = accuracy.PAGE.read_text(encoding="utf-8")
    shown = text.partition("```\n  - Of ")[2].partition("```")[0]
    assert shown and shown in (accuracy.ROOT / "README.md").read_text(encoding="utf-8")


def test_no_error_on_unseen_groups_is_worse_by_more_than_a_tenth() -> None:
    accepted, now = table("accuracy"), accuracy.figures()
    assert {*accepted["at most"], *accepted["at least"]} == {*now}
    assert not accuracy.worse(now, accepted)


@pytest.mark.parametrize(
    ("name", "value"),
    [("JAX on GPUs, median", 0.16), ("measured plans, precision of what does not fit", 0.79)],
)
def test_a_figure_that_is_worse_is_noticed(name: str, value: float) -> None:
    now = {**accuracy.figures(), name: value}
    (line,) = accuracy.worse(now, table("accuracy"))
    assert line.startswith(f"{name}: {value:.4f}")
