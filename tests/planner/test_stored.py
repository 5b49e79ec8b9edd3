"""A stored plan is the plan that was written, or says that it is not; its values are those of a
plan, whatever field they are in.
"""

from __future__ import annotations

import copy
import json
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from shardlib.cost.pricing import DeviceBytes, Estimate, Seconds
from shardlib.errors import PlanError
from shardlib.planner.plan import Plan, checksum, plan_to_data
from shardlib.report.pages import html_report
from tests.planner.fixture_plan import PLAN

DATA = json.loads(PLAN.to_json())
#: Keys whose values are made of others, and are not read.
DERIVED = {
    "digest",
    "checksum",
    "format",
    "step_seconds",
    "tokens_per_second",
    "mfu",
    "hfu",
    "total",
    "peak",
}


def leaves(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where numbers, texts and truths are."""
    items = (
        list(data.items())
        if isinstance(data, dict)
        else list(enumerate(data))
        if isinstance(data, list)
        else []
    )
    for key, one in items:
        if isinstance(one, dict | list):
            yield from leaves(one, (*at, key))
        elif key not in DERIVED:
            yield (*at, key)


def changed(at: tuple[Any, ...], value: Any) -> str:
    data = copy.deepcopy(DATA)
    inner = data
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return json.dumps(data)


def test_a_plan_that_was_not_changed_has_no_finding_of_it():
    assert Plan.from_json(PLAN.to_json()) == PLAN
    assert Plan.from_json(PLAN.to_json().encode()) == PLAN
    again = json.dumps(
        dict(reversed(DATA.items())), indent=7, ensure_ascii=False
    )  # another program may have written it anew
    assert Plan.from_json(again) == PLAN
    assert (
        Plan.from_json(
            json.dumps(
                {
                    key: int(value) if isinstance(value, float) and value.is_integer() else value
                    for key, value in DATA.items()
                }
            )
        )
        == PLAN
    )


@pytest.mark.matrix
@pytest.mark.parametrize("at", list(leaves(DATA)), ids=lambda at: ".".join(map(str, at)))
def test_every_value_that_is_changed_is_noticed(at: tuple[Any, ...]):
    inner: Any = DATA
    for key in at:
        inner = inner[key]
    others = [
        one
        for one in (None, True, -1, 0.5, "other", [], {}, 10**30)
        if one != inner and type(one) is not type(inner)
    ]
    others += (
        [inner + 1]
        if isinstance(inner, int) and not isinstance(inner, bool)
        else (
            [inner * 2 + 1]
            if isinstance(inner, float)
            else (
                [not inner]
                if isinstance(inner, bool)
                else [f"{inner}x"]
                if isinstance(inner, str)
                else []
            )
        )
    )
    for other in others:
        with pytest.raises(PlanError):
            Plan.from_json(changed(at, other))
        try:
            taken = Plan.from_json(changed(at, other), changed=True)
        except PlanError:
            continue
        assert taken.findings[-1].code == "plan-changed"
        assert Plan.from_json(taken.to_json()) == taken
        taken.explain(), html_report(taken), taken.diff(PLAN)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (("microbatches",), True, "microbatches is True; it is an integer"),
        (("microbatches",), 0, "microbatches is 0; it is an integer of at least 1"),
        (("zero",), 4, "zero is 4; it is one of 0, 1, 2, 3"),
        (("remat",), "some", "remat is 'some'"),
        (("gather",), "any", "gather is 'any', which is not a decision"),
        (("attention",), "magic", "attention is 'magic'"),
        (("mesh",), {"fsdp": 0}, "mesh axis 'fsdp' has size 0"),
        (("mesh",), {"web": 2}, "'web' is not a mesh axis"),
        (("mesh",), [], "mesh is []; it is an object"),
        (("rules",), [["batch", ["web"]]], "'web' is not a mesh axis"),
        (
            ("estimate", "seconds", "compute"),
            "fast",
            "estimate.seconds.compute is 'fast'; it is a number",
        ),
        (("estimate", "seconds", "compute"), -1, "at least 0"),
        (("estimate", "device_bytes", "parameters"), 2**64, "of a size that there is"),
        (("estimate", "peak_flops_per_s"), 0, "it is positive"),
        (("estimate", "collectives", 0, "kind"), "shout", "estimate.collectives[0] is not usable"),
        (("parameters", 0, "rest"), [["fsdp"]], "has 1 dims, and the parameter has 2"),
        (("parameters", 0, "rest"), [["fsdp"], ["fsdp"]], "uses a mesh axis twice"),
        (("parameters", 0, "shape"), [1, "2"], "parameters[0].shape[1] is '2'; it is an integer"),
        (("findings", 0, "severity"), "fatal", "findings[0] is not usable"),
        (("axis_order",), ["data", "data"], "it names axes of the mesh"),
        (("offload",), ["moon"], "offload is ['moon']"),
        (("origin",), {"model": 3}, "origin.model is 3; it is a text"),
        (("format",), True, "not a plan of format 1"),
        (("format",), [1], "not a plan of format 1"),
    ],
)
@pytest.mark.parametrize("allowed", [False, True])
def test_values_that_no_plan_has(at: tuple[Any, ...], value: Any, message: str, allowed: bool):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(changed(at, value), changed=allowed)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"topology": "h100:1"}, "which has 16 devices, and the topology 'h100:1' has 1"),
        ({"axis_order": ["fsdp"]}, "axis_order is ('fsdp',); it names axes of the mesh"),
        ({"axis_order": ["fsdp", "data"]}, "it names axes of the mesh fsdp=4 x tensor=4, each"),
        ({"schedule": "1f1b"}, "schedule is '1f1b', and the mesh has stage=1"),
        ({"mesh": {"stage": 16}}, "schedule is 'none', and the mesh has stage=16"),
        ({"origin": {"model": "gpt2-small", "batch": "64"}, "microbatches": 10**9}, "batch of 64"),
        ({"mesh": {"fsdp": 0}}, "mesh is not usable: mesh axis 'fsdp' has size 0"),
        ({"axis_order": []}, ""),
        ({"axis_order": ["tensor", "fsdp"]}, ""),
        ({"topology": "a machine of its own"}, ""),
        ({"topology": "missing.toml"}, ""),
        ({"mesh": {"island": 2, "fsdp": 2, "tensor": 4}, "axis_order": ["tensor", "fsdp"]}, ""),
    ],
)
def test_decisions_that_exclude_each_other(values: dict[str, Any], message: str):
    text = json.dumps({**DATA, **values})
    if not message:
        plan = Plan.from_json(text, changed=True)
        assert plan.findings[-1].code == "plan-changed" and html_report(plan)
        return
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text, changed=True)
    assert message in str(caught.value) and "the mesh is not usable" not in str(caught.value)


@pytest.mark.long
def test_everything_that_is_wrong_is_listed_and_no_more_than_people_read():
    data = {**DATA, "zero": "a", "remat": 3, "estimate": {**DATA["estimate"], "tokens": None}}
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    assert str(caught.value).startswith("the plan is not usable:\n") and all(
        word in str(caught.value)
        for word in ("zero is 'a'", "remat is 3", "estimate.tokens is None")
    )
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps({**DATA, "parameters": [{"path": "x" * 10**5}] * 1000}))
    assert len(str(caught.value)) < 10_000 and "more" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"plan"',
        "{}",
        '{"format": 2}',
        '{"format": 1}',
        "[" * 100_000,
        '{"format": NaN}',
        '{"a": 1, "a": 2}',
        b"\xff",
        PLAN.to_json()[:-20],
    ],
)
def test_texts_that_are_no_plan(text: str | bytes):
    for allowed in (False, True):
        with pytest.raises(PlanError) as caught:
            Plan.from_json(text, changed=allowed)
        assert len(str(caught.value)) < 5000


def test_without_its_checksum_a_plan_is_treated_as_one_that_was_changed():
    old = {key: value for key, value in DATA.items() if key != "checksum"}
    faster = json.loads(json.dumps(old))
    faster["estimate"]["seconds"]["compute"] /= 10
    for other in (
        old,
        faster,
        {**old, "checksum": None},
        {**old, "microbatches": 4},
        {**old, "digest": "0" * 12},
        {key: value for key, value in old.items() if key != "digest"},
    ):
        with pytest.raises(
            PlanError,
            match=(
                r"the plan has no checksum, with which every plan is written: .*\nTry: .*--changed"
            ),
        ):
            Plan.from_json(json.dumps(other))
        found = Plan.from_json(json.dumps(other), changed=True)
        kept = (
            "its decisions are those of its digest"
            if other.get("digest") == found.digest
            else "its decisions are not those of its digest"
        )
        assert (found.findings[-1].code, found.findings[-1].severity) == (
            "plan-unchecked",
            "warning",
        ) and kept in found.findings[-1].message
        assert "The plan has no checksum" in " ".join(found.explain().split())
    assert replace(Plan.from_json(json.dumps(old), changed=True), findings=PLAN.findings) == PLAN


def test_every_field_of_a_plan_is_read_by_its_annotation():
    """A field that somebody adds needs no reader of its own: what `plan_to_data` writes of it comes
    back, or the round trip of a plan fails.
    """

    def reached(kind: Any) -> Iterator[Any]:
        for one in typing.get_args(kind):
            yield from reached(one)
        if is_dataclass(kind):
            hints = typing.get_type_hints(kind)
            for one in fields(kind):  # pyright: ignore[reportArgumentType]
                if one.name != "source":
                    yield one.name
                    yield from reached(hints[one.name])

    names = set(reached(Plan))
    assert {one.name for kind in (Estimate, Seconds, DeviceBytes) for one in fields(kind)} <= names
    written = json.dumps(plan_to_data(PLAN))
    assert all(
        f'"{one.name}"' in written for kind in (Seconds, DeviceBytes) for one in fields(kind)
    )


def test_the_checksum_covers_everything_but_itself():
    assert (
        DATA["checksum"]
        == checksum(DATA)
        == checksum({key: value for key, value in DATA.items() if key != "checksum"})
    )
    assert checksum({**DATA, "new": 1}) != DATA["checksum"]


def test_names_of_strangers_write_nothing_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    evil = replace(PLAN, model="\x1b[2J\x1b]0;title\x07[red]<script>alert(1)</script>\u202e")
    assert "\x1b" not in evil.explain() + evil.diff(PLAN)
    assert "\u202e" not in evil.explain()
    assert "\\x1b[2J" in evil.explain()
    assert "<script>alert" not in html_report(evil)
    from shardlib.cli.output import report

    report(PlanError(f"what is {evil.model}"), as_json=False)
    said = capsys.readouterr().err
    assert "\x1b[2J" not in said and "\\x1b[2J" in said and "[red]" in said


def test_the_command_line_takes_a_changed_plan_on_request_alone(
    tmp_path: Path, shell: Callable[..., tuple[int, str, str]]
):
    path = tmp_path / "plan.json"
    path.write_text(changed(("microbatches",), 4))
    for words, code in ((["explain", str(path)], 2), (["explain", str(path), "--changed"], 0)):
        ended, out, err = shell(*words)
        assert ended == code, err
        assert "was changed since it was written" in " ".join((err + out).split())
        assert "holds no plan" not in err


@pytest.mark.parametrize(
    "question", ["alternatives", "constraints", "kernels", "replan", "sensitivity"]
)
def test_a_plan_from_a_file_says_that_it_lacks_its_model(question: str):
    arguments = ("h100:4",) if question == "replan" else ()
    with pytest.raises(PlanError, match="does not carry its model"):
        getattr(Plan.from_json(PLAN.to_json()), question)(*arguments)


@pytest.mark.parametrize("field", ["accumulation", "refined", "search.landscape"])
def test_plans_written_before_a_field_existed_are_read(field: str):
    old = json.loads(PLAN.to_json())
    inner = old["search"] if "." in field else old
    del inner[field.rpartition(".")[2]], old["checksum"]
    read = Plan.from_json(json.dumps(old), changed=True)
    assert replace(read, findings=PLAN.findings) == PLAN
    assert read.digest == PLAN.digest
