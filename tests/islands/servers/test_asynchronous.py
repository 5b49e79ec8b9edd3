"""The value, and what it is no decision of."""

from __future__ import annotations

from typing import Any

import pytest

import shardlib
from shardlib.exchanges import read_exchange
from shardlib.islands.servers.crew import _first_and_last


def test_all_that_is_wrong_is_listed() -> None:
    with pytest.raises(shardlib.PinError) as caught:
        shardlib.Asynchronous(
            workers=0,
            servers=True,
            fetch=0,
            push=1.5,  # pyright: ignore[reportArgumentType]
            bound=-1,
            rule="adam",  # pyright: ignore[reportArgumentType]
            rate=float("nan"),
            by_staleness=1,  # pyright: ignore[reportArgumentType]
            warm=-1,
            local_rate=-0.1,
            accumulator=float("inf"),
        )
    assert len(caught.value.failures) == 11
    assert "rule is 'adam'; it is 'adagrad' or 'sgd'" in str(caught.value)


def test_local_steps_need_steps_between_fetches() -> None:
    with pytest.raises(shardlib.PinError, match="fetched before every step\nTry: fetch=2"):
        shardlib.Asynchronous(local_rate=0.1)


@pytest.mark.parametrize(
    "pinned", [shardlib.Asynchronous(), "asynchronous:8", {"kind": "asynchronous", "workers": 3}]
)
def test_no_plan_has_it(pinned: Any) -> None:
    with pytest.raises(shardlib.PinError, match=r"Try: shardlib\.servers\.train\("):
        read_exchange("exchange", pinned)


def test_it_is_written_and_printed() -> None:
    made = shardlib.Asynchronous(workers=3, rate=1)
    assert made.to_json()["workers"] == 3 and made.to_json()["kind"] == "asynchronous"
    assert str(made) == "asynchronous:workers=3:rate=1.0"


def test_losses_that_are_not_finite_are_told_apart() -> None:
    losses = (4.0, *(1.0,) * 7, float("nan"))
    found = _first_and_last(losses)
    assert found == "4.0000 at first, 1.0000 at last (1 of the last 8 not finite)"
