"""`shardlib explain` and the questions to a plan in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardlib.planner.plan import Plan
from shardlib.report.text import explain
from shardlib.verification.report import FORMAT
from tests.planner.fixture_plan import PLAN


def test_explain_prints_the_explanation(shell, plan_file: Path):
    assert shell("explain", str(plan_file)) == (0, explain(PLAN), "")


def test_explain_as_json_is_json_alone(shell, plan_file: Path):
    code, out, err = shell("explain", str(plan_file), "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert data["explanation"] == explain(PLAN) and Plan.from_json(json.dumps(data["plan"])) == PLAN


def test_explain_writes_html(shell, plan_file: Path, tmp_path: Path):
    page = tmp_path / "report.html"
    assert shell("explain", str(plan_file), "--html", str(page))[0] == 0
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 1}', '{"format": 1, "search": 3}', "no json"]
)
def test_a_file_that_is_no_plan(shell, plan_file: Path, text: str):
    plan_file.write_text(text)
    code, out, err = shell("explain", str(plan_file))
    assert (code, out) == (2, "") and err.startswith(f"error: {plan_file} holds no plan: ")


def test_why_not_a_plan_that_does_not_say_its_model(shell, plan_file: Path):
    code, _, err = shell("explain", str(plan_file), "--why-not", "mesh.tensor=1")
    assert code == 2 and err.startswith("error: the plan does not say which model it is for")


def test_questions_about_a_plan_that_does_not_say_its_model(shell, plan_file: Path):
    code, _, err = shell("explain", str(plan_file), "--sensitivity")
    assert code == 2 and err.startswith("error: the plan does not say which model it is for")


@pytest.mark.long
def test_explain_alternatives_and_sensitivity(shell, made: Path):
    code, out, err = shell("explain", str(made), "--alternatives", "--sensitivity", "--json")
    assert (code, err) == (0, "")
    data, plan = json.loads(out), Plan.from_json(made.read_text())
    assert len(data["alternatives"]) == 10 and all(
        one["step_seconds"] > plan.estimate.step_seconds for one in data["alternatives"]
    )
    assert {price["resource"] for price in data["sensitivity"]["prices"]} == {
        "memory",
        "InfiniBand",
        "NVLink",
    }
    assert data["constraints"]["step_seconds"] == plan.estimate.step_seconds
    code, text, _ = shell("explain", str(made), "--alternatives")
    assert (
        code == 0
        and text.startswith("Alternatives, by predicted time\n")
        and "What holds the plan back" in text
    )


def test_evidence_of_another_plan_does_not_stand_beside_it(shell, plan_file: Path, tmp_path: Path):
    compiled = {"collectives": [], "device_bytes": {"peak": 1}}
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    words = ("explain", str(plan_file), "--html", str(page), "--verified", str(report))
    for digest, code in ((PLAN.digest, 0), ("0123456789ab", 2)):
        report.write_text(
            json.dumps({"format": FORMAT, "plan": {"digest": digest}, "compiled": compiled})
        )
        found, _, err = shell(*words)
        assert found == code
    assert f"is of plan 0123456789ab, and the page is of plan {PLAN.digest}" in err


def test_a_mesh_axis_is_a_pin_by_its_own_name(shell, plan_file: Path):
    asked = [shell("explain", str(plan_file), "--why-not", word) for word in ("tensor=1", "tp=1")]
    whole = shell("explain", str(plan_file), "--why-not", "mesh.tensor=1")
    assert asked == [whole, whole]
