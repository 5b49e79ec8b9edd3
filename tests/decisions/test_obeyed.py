"""A plan has what was pinned: every value that the table lists, meshes and orders, counts."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.decisions.pins import Pins, full_names, require_obeyed
from shardlib.decisions.table import TABLE, Decisions
from shardlib.errors import PinError, PlanError
from shardlib.layout import MeshShape
from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from shardlib.planner.workload import Workload, prepare
from tests.planner import worlds

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
    plan = planner.search(load.problem, where, {word: value}, workload=load)
    assert getattr(plan, word) == value


def test_a_plan_that_decides_otherwise_is_none() -> None:
    pins = Pins.parse({"zero": 3, "remat": "full", "collective_matmul": "any", "microbatches": 2})
    with pytest.raises(PlanError) as caught:
        require_obeyed(
            pins, Decisions(zero=3, remat="dots", collective_matmul="loop", microbatches=2)
        )
    assert "pins: remat is pinned to 'full', and the plan has 'dots'\n" in str(caught.value)


#: A plan, and pins that it does not obey, with what is said of them.
MADE = Decisions(
    mesh=MeshShape(data=2, tensor=4), microbatches=2, axis_order=("tensor", "data"), offload=()
)
MISSED: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"mesh": {"data": 8}},
        "mesh is pinned to {'data': 8}, and the plan has {'data': 2, 'tensor': 4}",
    ),
    ({"mesh": {"data": 2}}, "mesh is pinned to {'data': 2}, and"),
    ({"mesh.tensor": 2}, "mesh.tensor is pinned to 2, and the plan has 4"),
    ({"mesh.stage": 2}, "mesh.stage is pinned to 2, and the plan has 1"),
    ({"microbatches": 4}, "microbatches is pinned to 4, and the plan has 2"),
    ({"offload": ["optimizer"]}, "offload is pinned to ['optimizer'], and the plan has []"),
    ({"axis_order": ["data", "tensor"]}, "axis_order is pinned to ['data', 'tensor'], and"),
    ({"axis_order": ["stage", "data"]}, "axis_order is pinned to ['data', 'tensor'], and"),
)


@pytest.mark.parametrize(("pin", "says"), MISSED, ids=str)
def test_meshes_orders_and_counts_are_held_to_their_pins(pin: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        require_obeyed(Pins.parse(pin), MADE)


@pytest.mark.parametrize(
    ("word", "value", "found"),
    [
        ("mesh.fsdp", 2, {"fsdp": 2}),
        ("microbatches", 2, 2),
        ("accumulation", 2, 2),
        ("virtual_stages", 2, 2),
        ("offload", [], []),
        ("offload", ["optimizer"], ["optimizer"]),
        ("offload", ["optimizer", "activations"], ["optimizer", "activations"]),
        ("axis_order", ["tensor", "data"], ["tensor", "data"]),
    ],
)
def test_a_plan_has_what_was_pinned_of_no_listed_value(word: str, value: Any, found: Any) -> None:
    ordered = word == "axis_order"
    beside, where = ({"mesh": {"data": 2, "tensor": 2}}, "h100:4") if ordered else ({}, "h100:2")
    load = _load(where, "stack", "attention")
    plan = planner.search(load.problem, where, {word: value, **beside}, workload=load)
    assert plan.decisions[word.partition(".")[0]] == found


# Values of other kinds than a decision has are read as what they stand for, or refused.

READ = (
    ({"zero": np.int64(2)}, {"zero": 2}),
    ({"sequence_parallel": np.True_}, {"sequence_parallel": True}),
    ({"mesh.tp": 2, "mesh.tensor": np.int64(2)}, {"axes": (("tensor", 2),)}),
    ({"tensor": 2, "tp": 2}, {"axes": (("tensor", 2),)}),
    ({"context": 2}, {"axes": (("context", 2),)}),
    ({"moment_dtype": jnp.bfloat16}, {"dtypes": (("moment_dtype", "bfloat16"),)}),
    ({"dtypes": {"param_dtype": np.float32}}, {"dtypes": (("param_dtype", "float32"),)}),
    ({"matmul_dtype": jnp.dtype("bfloat16")}, {"dtypes": (("matmul_dtype", "bfloat16"),)}),
    ({"allow": {"moment_dtype": jnp.bfloat16}}, {"allow": (("moment_dtype", ("bfloat16",)),)}),
    (
        {"allow": {"moment_dtype": [np.dtype("float16"), jnp.bfloat16]}},
        {"allow": (("moment_dtype", ("float16", "bfloat16")),)},
    ),
)
REFUSED = (
    ({"zero": np.array(3)}, "zero is array(3); it is one of 0, 1, 2, 3"),
    ({"zero": np.array([])}, "it is one of 0, 1, 2, 3"),
    ({"zero": 1 + 0j}, "zero is (1+0j)"),
    ({"zero": 3.0}, "zero is 3.0"),
    ({"zero": Fraction(3)}, "zero is Fraction(3, 1)"),
    ({"zero": np.True_}, "it is one of 0, 1, 2, 3"),
    ({"sequence_parallel": 1}, "it is one of False, True"),
    ({"sequence_parallel": np.array([2, 4])}, "it is one of False, True"),
    ({"remat": np.array("full")}, "it is one of 'none', 'dots', 'full'"),
    ({"remat": "ful"}, "did you mean 'full'?"),
    ({"schedule": "1F1B"}, "did you mean '1f1b'?"),
    ({"remat": "x" * 5000}, "xxxx...xxxx"),
    ({"rules": np.array(2)}, "sharding rules are array(2); they are a list of pairs"),
    ({"mesh": {1: 2}}, "1 is not a mesh axis"),
    ({"mesh.tp": 2, "mesh.tensor": 4}, "mesh.tensor=4 contradicts mesh.tensor=2"),
    ({"tensor": 2, "mesh.tensor": 4}, "mesh.tensor=4 contradicts mesh.tensor=2"),
    ({"moment_dtype": np.int32}, "it is one of float32, bfloat16, float16"),
    ({"moment_dtype": np.zeros(2, np.float32)}, "it is one of float32, bfloat16, float16"),
    ({"moment_dtype": dict}, "moment_dtype is <class 'dict'>; it is one of float32"),
    ({"mesh": {"data": 0}}, "pins are not usable: mesh axis 'data' has size 0"),
    (
        {"rules": [("a", "tenser")]},
        "pins are not usable: rules: 'a' -> 'tenser' is not a mesh axis",
    ),
    ("zero=3", "pins are a mapping such as {'zero': 3}"),
)


@pytest.mark.parametrize(("given", "meant"), READ, ids=str)
def test_what_stands_for_a_value_is_that_value(given: dict[str, Any], meant: dict[str, Any]):
    found = dict(Pins.parse(given).fixed)
    assert found == meant and [type(one) for one in found.values()] == [
        type(one) for one in meant.values()
    ]


@pytest.mark.parametrize(("given", "says"), REFUSED, ids=lambda one: str(one)[:60])
def test_what_stands_for_none_is_refused_in_words(given: Any, says: str):
    with pytest.raises(PinError, match=re.escape(says)) as refused:
        Pins.parse(given)
    assert len(str(refused.value)) < 400


def test_two_keywords_of_one_axis_agree_or_are_refused():
    assert full_names({"tp": 2, "tensor": 2}) == {"mesh.tensor": 2}
    with pytest.raises(PinError, match="tensor=4 contradicts"):
        full_names({"tp": 2, "tensor": 4})
