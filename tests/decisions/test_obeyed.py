"""A plan has what was pinned: every value that the table lists."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from shardlib.decisions.obeyed import require_obeyed
from shardlib.decisions.pins import Pins
from shardlib.decisions.table import TABLE, Decisions
from shardlib.errors import PlanError
from shardlib.hardware.topology import topology
from shardlib.planning import planner
from shardlib.planning.space.workload import Workload, prepare
from tests.planning import worlds

LISTED = [(word, value) for word, entry in TABLE.items() for value in entry.choices]
#: What a value needs: a machine, a model, what it calls. Four layers on two GPUs do for all others,
#: and a perceptron for the values that a plan has by default.
BESIDE: dict[tuple[str, Any], dict[str, Any]] = {
    ("attention", "traced"): {"world": "layers"},  # the kernel of cuDNN would be faster
    ("attention", "splash"): {"where": "v5e:1x2"},
    ("experts", "dropless"): {"world": "experts", "calls": "dropless"},
    ("experts", "capacity"): {"world": "experts", "calls": "capacity"},
    ("gather", "once"): {"where": "h100:4"},  # stages, and weights that are sharded beside them
    ("remat", "dots"): {"world": "two_stacks"},
    **{("zero", stored): {"world": "mlp"} for stored in (1, 2, 3)},
}
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 2},
    "stack": {"batch": 2, "seq": 8, "embed": 16, "hidden": 32},
    "layers": {"batch": 2, "seq": 8, "embed": 16, "hidden": 32, "heads": 4, "vocab": 8, "depth": 2},
    "experts": {"batch": 2, "seq": 8, "embed": 16, "hidden": 32},
    "two_stacks": {"batch": 2, "seq": 8, "embed": 16, "hidden": (16, 32)},
}


@functools.cache
def _load(where: str, world: str, calls: str) -> Workload:
    problem = replace(getattr(worlds, world)(**SIZES[world]), functions=frozenset({calls}))
    return prepare(problem, topology(where).chip.vendor)


@pytest.mark.parametrize(("word", "value"), LISTED)
def test_a_plan_has_what_was_pinned(word: str, value: Any) -> None:
    usual = {
        "where": "h100:2",
        "world": "mlp" if value == TABLE[word].default else "stack",
        "calls": "attention",
    }
    needs = {**usual, **BESIDE.get((word, value), {})}
    load, where = _load(**needs), needs["where"]
    plan = planner.search(load.problem, where, {word: value}, load=load)
    assert getattr(plan, word) == value


def test_a_plan_that_decides_otherwise_is_none() -> None:
    pins = Pins.parse({"zero": 3, "remat": "full", "collective_matmul": "any", "microbatches": 2})
    with pytest.raises(PlanError) as caught:
        require_obeyed(pins, Decisions(zero=3, remat="dots", collective_matmul="loop"))
    assert "pins: remat is pinned to 'full', and the plan has 'dots'\n" in str(caught.value)
