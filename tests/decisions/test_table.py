"""The table of decisions: its page, its defaults, its rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardlib.decisions.pins import PIN_CONFLICTS, PinnedValues, Pins, contradictions
from shardlib.decisions.table import TABLE, Decisions, illegal, page, plain_data, values_of
from shardlib.errors import PinError

PAGE = Path(__file__).parents[2] / "docs" / "pins.md"


def test_the_page_has_the_table() -> None:
    """`python -m shardlib.decisions.table docs/pins.md` writes it."""
    text = PAGE.read_text()
    assert page(text) == text
    assert page(text.replace("| `zero` |", "| `one` |")) == text


def test_the_defaults_are_legal_and_are_read_as_they_are_written() -> None:
    written = plain_data(Decisions())
    assert not illegal(written)
    read = {word: TABLE[word].read(word, value) for word, value in written.items()}
    assert read == values_of(Decisions())


@pytest.mark.parametrize("word", TABLE)
def test_every_decision_says_what_it_means(word: str) -> None:
    entry = TABLE[word]
    assert entry.meaning and (entry.choices or entry.values)
    assert all(entry.choices.values())


def test_pins_are_values() -> None:
    pins = Pins.parse({"mesh.tensor": 2, "zero": 3, "offload": "none"})
    assert (pins.zero, pins.remat, pins.offload, pins.axes) == (3, None, (), (("tensor", 2),))
    assert pins == Pins.parse({"zero": 3, "mesh.tensor": 2, "offload": []})
    assert hash(pins) == hash(pins.replace(zero=1).replace(zero=3))
    assert str(pins) == "mesh.tensor=2, zero=3, offload=[]"
    assert pins.replace(zero=None).zero is None and pins.replace(axes=()).axes == ()
    assert pins.changed(Pins.parse({"mesh": {"fsdp": 2}})).axes == ()


def test_nothing_offloaded_is_a_pin_like_any_other() -> None:
    host, nothing = Pins.parse({"offload": ["optimizer"]}), Pins.parse({"offload": []})
    assert host.changed(nothing).offload == () and Pins.parse({}).offload is None
    assert nothing.without().keys() == {"offload"}
    with pytest.raises(PinError, match="'none' is for nothing at all\nTry: "):
        Pins.parse({"offload": ["none", "optimizer"]})


def test_an_order_of_no_axes_is_the_order_of_one_device_alone() -> None:
    assert Pins.parse({"mesh": {}, "axis_order": []}).axis_order == ()
    for pin in ({}, {"mesh": {"data": 2}}, {"mesh.data": 1}):
        with pytest.raises(PinError, match=r"axis_order is \[\], which names no mesh axis\nTry: "):
            Pins.parse({**pin, "axis_order": []})


#: Pins of every kind, as users write them, and their text.
WRITTEN = (
    ({}, "nothing"),
    ({"mesh.data": 2, "mesh.tensor": 8}, "mesh.data=2, mesh.tensor=8"),
    ({"mesh": {"tensor": 8}, "remat": "full"}, "mesh={'tensor': 8}, remat='full'"),
    ({"mesh": {}, "sequence_parallel": False}, "mesh={}, sequence_parallel=False"),
    ({"rules": [["mlp", ["tensor"]], ["embed", []]]}, "rules=[['mlp', ['tensor']], ['embed', []]]"),
    (
        {"remat_classes": {"decoder": ["dots", 3], "encoder": "full"}},
        "remat_classes={'decoder': ['dots', 3], 'encoder': 'full'}",
    ),
    ({"remat_classes": "any"}, "remat_classes='any'"),
    (
        {"collective_matmul": "any", "offload": ["disk"]},
        "collective_matmul='any', offload=['disk']",
    ),
    ({"axis_order": ["tensor", "data"]}, "axis_order=['tensor', 'data']"),
    ({"dtypes": {"moment_dtype": "bfloat16"}}, "dtypes={'moment_dtype': 'bfloat16'}"),
    (
        {"exchange": {"kind": "exact"}, "allow": {"moment_dtype": ["bfloat16"]}},
        "exchange={'kind': 'exact'}, allow={'moment_dtype': ['bfloat16']}",
    ),
    ({"microbatches": np.int64(4), "mesh.fsdp": np.int32(2)}, "mesh.fsdp=2, microbatches=4"),
)


@pytest.mark.parametrize(("pin", "text"), WRITTEN, ids=str)
def test_pins_are_shown_as_users_write_them(pin: dict[str, Any], text: str) -> None:
    pins = Pins.parse(pin)
    assert str(pins) == text
    assert pins.to_json() == pin and Pins.parse(json.loads(json.dumps(pins.to_json()))) == pins


def test_changed_pins_are_checked_against_those_that_stay() -> None:
    pins = Pins.parse({"zero": 3, "mesh.fsdp": 8, "remat": "none"})
    assert str(pins.changed(Pins.parse({"mesh.tensor": 2, "remat": "full"}))) == (
        "mesh.tensor=2, zero=3, remat='full'"
    )
    with pytest.raises(PinError) as error:
        pins.changed(Pins.parse({"mesh": {"data": 2}, "remat_layers": 2}))
    assert str(error.value) == (
        "mesh={'data': 2}, remat_layers=2 is not usable beside zero=3, remat='none':\n"
        "  - remat_layers=2 rematerialises layers, and remat is pinned to 'none'\n"
        "  - zero=3 shards over fsdp, which is pinned to 1\n"
        "Try: remat='full', or remat_layers=0; mesh.fsdp=2 or more, or zero=0"
    )


#: Pins that break each rule, in the order of the rules.
BROKEN = (
    {"schedule": "1f1b", "mesh.stage": 1},
    {"schedule": "none", "mesh.stage": 2},
    {"virtual_stages": 2, "mesh.stage": 1},
    {"schedule": "1f1b", "virtual_stages": 2},
    {"gather": "once", "zero": 1},
    {"accumulation": 2, "schedule": "none"},
    {"accumulation": 2, "microbatches": 3},
    {"pipeline": "programs", "schedule": "gpipe", "virtual_stages": 2},
    {"pipeline": "programs", "mesh.stage": 1},
    {"context": "ring", "mesh.context": 1},
    {"context": "none", "mesh.context": 2},
    {"context": "all-gather", "attention": "splash"},
    {"context": "ring", "attention": "splash"},
    {"experts": "none", "mesh.expert": 2},
    {"remat_layers": 1, "remat": "none"},
    {"remat": "dots", "remat_classes": {"layers": "full"}},
    {"remat_layers": 2, "remat_classes": {"layers": ["full", 3]}},
    {"zero": 1, "mesh": {"data": 2}},
    {"zero": 0, "mesh.fsdp": 2},
    {"sequence_parallel": True, "mesh.tensor": 1},
    {"axis_order": ["tensor", "data"], "mesh.tensor": 1},
    {"axis_order": [], "mesh.data": 2},
    {"exchange": "diloco:4:10", "mesh.island": 2},
)


@pytest.mark.parametrize(("number", "pin"), list(enumerate(BROKEN)))
def test_every_rule_can_be_broken_alone(number: int, pin: dict[str, object]) -> None:
    axes = {
        word.removeprefix("mesh."): size
        for word, size in pin.items()
        if word.startswith("mesh.") and isinstance(size, int)
    }
    read = {word: TABLE[word].read(word, pin[word]) for word in pin if word in TABLE}
    mesh = read.get("mesh")
    sizes = axes if mesh is None else {axis: mesh[axis] for axis in ("fsdp", "expert", "context")}
    given = PinnedValues(values=read, axes=sizes)
    assert [k for k, rule in enumerate(PIN_CONFLICTS) if rule.violated(given)] == [number]
    (says,) = contradictions(read, axes)
    assert "\nTry: " in says and "{" not in says.replace("={", "")


def test_every_rule_has_pins_that_break_it() -> None:
    assert len(BROKEN) == len(PIN_CONFLICTS)


def test_integers_of_numpy_are_integers() -> None:
    plain = Pins.parse({"microbatches": 2, "mesh": {"data": 4}})
    assert Pins.parse({"microbatches": np.int64(2), "mesh": {"data": np.int32(4)}}) == plain
    for wrong in (np.float32(2), np.array([2]), np.True_, True, "2"):
        with pytest.raises(PinError, match="an integer of at least 1"):
            Pins.parse({"microbatches": wrong})
        with pytest.raises(PinError, match="sizes are integers of at least 1"):
            Pins.parse({"mesh": {"data": wrong}})
