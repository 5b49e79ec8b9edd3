"""Whether a batch may be worked through in parts, and the reasons against it."""

from __future__ import annotations

import pytest

from shardlib.graph import ROWS_KINDS, Dependence, Rows

COUPLED = Dependence(kind="coupled", why="rows meet other rows", where="dot_general at loss.py:12")


def test_only_what_couples_rows_is_in_the_way() -> None:
    for kind in ROWS_KINDS:
        rows = Rows(loss=Dependence(kind="mean"), metrics=(("share", Dependence(kind=kind)),))
        assert rows.splits == (kind != "coupled") and rows.reasons == (
            () if rows.splits else ("metric 'share': a coupled",)
        )


def test_every_reason_names_its_result() -> None:
    rows = Rows(
        loss=COUPLED,
        metrics=(
            ("share", Dependence(kind="coupled", why="a median")),
            ("plain", Dependence(kind="sum")),
        ),
        state=(("norm.mean", COUPLED),),
    )
    assert rows.reasons == (
        "the loss: rows meet other rows (dot_general at loss.py:12)",
        "metric 'share': a median",
        "model state 'norm.mean': rows meet other rows (dot_general at loss.py:12)",
    )


def test_notes_are_said_once() -> None:
    noted = Dependence(kind="mean", notes=("balance", "z"))
    assert Rows(
        loss=noted, metrics=(("balance", Dependence(kind="mean", notes=("balance",))),)
    ).notes == ("balance", "z")


def test_a_dependence_has_a_known_kind() -> None:
    with pytest.raises(AssertionError, match="median"):
        Dependence(kind="median")
