"""`shardlib explain` and the questions to a plan in a file."""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import shardlib
from shardlib import calibration
from shardlib.machines.topology import topology
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


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 1}', '{"format": 1, "search": 3}', "no json"]
)
def test_a_file_that_is_no_plan(shell, plan_file: Path, text: str):
    plan_file.write_text(text)
    code, out, err = shell("explain", str(plan_file))
    assert (code, out) == (2, "") and err.startswith(f"error: {plan_file} holds no plan: ")


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
    assert code == 0
    assert text.startswith("Alternatives, by predicted time\n")
    assert "What holds the plan back" in text


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
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert f"is of plan 0123456789ab, and the page is of plan {PLAN.digest}" in err


def test_a_mesh_axis_is_a_pin_by_its_own_name(shell, plan_file: Path):
    asked = [shell("explain", str(plan_file), "--why-not", word) for word in ("tensor=1", "tp=1")]
    whole = shell("explain", str(plan_file), "--why-not", "mesh.tensor=1")
    assert asked == [whole, whole]


# `shardlib compare`: words, files, and what is refused.

WORDS = (
    *("compare", "tests.cli.perceptron:make", "--tokens", "4T", "--topologies", "h100:2,v5e"),
    *("--deadline", "40d", "--largest", "4"),
)


def test_a_comparison_is_a_table_json_pictures_and_plans(shell, tmp_path: Path):
    files = [tmp_path / name for name in ("a.svg", "a.html", "plans")]
    more = ("--svg", str(files[0]), "--html", str(files[1]), "--plans", str(files[2]))
    code, out, err = shell(*WORDS, *more, "--price", "h100=2,v5e=0.5", "--mtbf", "3h@64", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["target"]["mtbf"] == {"seconds": 10800.0, "devices": 64}
    assert files[0].read_text().startswith("<svg ") and "<table" in files[1].read_text()
    digests = {shardlib.Plan.from_json(p.read_text()).digest for p in files[2].iterdir()}
    chosen = [one[what] for one in data["families"] for what in ("smallest", "cheapest")]
    assert digests == {one["digest"] for one in chosen if one is not None} and digests


def test_a_comparison_without_prices_names_no_cheapest_size(shell):
    code, out, _ = shell(*WORDS)
    assert code == 0 and "cheap" not in out and "fewest device-hours" in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--price", "2.40"), "--price '2.40' says no price\nTry: --price h100=2.40"),
        (("--price", "h100=1,h100=2"), "'h100=2' stands there twice"),
        (("--price", "h100=0"), "the price of h100 is 0.0; it is a number above 0"),
        (("--mtbf", "3h"), "does not say of how many devices"),
        (("--mtbf", "3h@0"), "does not say of how many devices"),
        (("--plans", "/nowhere/at/all"), "the folder /nowhere/at for all does not exist"),
        (("--deadline", "soon"), "--deadline 'soon' is not a duration"),
        (
            ("--deadline", "30"),
            "error: --deadline '30' has no unit: us, ms, s, m, h or d\nTry: --deadline 30s, 30h or"
            " 30d\n",
        ),
        (
            ("--tokens", "15"),
            "error: --tokens '15' has no unit, K, M, B or T, and is less than 1,000,000\nTry:"
            " --tokens 15B or 15T\n",
        ),
        (
            ("--price", "h100=2/week"),
            "error: --price h100='2/week' is not a price: a number in your own money, of an hour, or"
            " with /h or /d\nTry: --price h100=2.40/h\n",
        ),
        (("--deadline", "0d"), "--deadline '0d' is not a duration, above 0"),
        (
            ("--price", "h100=2,v6e=1"),
            "there is a price of v6e, and the machines that are compared",
        ),
        (("--batch", "8"), "brings its own batch"),
    ],
)
def test_compare_refuses_nonsense(shell, more: tuple[str, ...], message: str):
    code, _, err = shell(*WORDS, *more)
    assert code == 2 and message in err


# `shardlib scale`: curves over numbers of devices.


@pytest.mark.long
def test_scale_strong_and_weak(shell, shallow: Path, tmp_path: Path):
    picture = tmp_path / "curve.svg"
    words = (
        f"scale {shallow} --topology h100:8 --devices 1..2 --batch 32 --seq 64 --pin "
        "mesh.stage=1 --pin mesh.context=1"
    ).split()
    code, out, err = shell(*words, "--svg", str(picture), "--json")
    assert (code, err) == (0, "")
    strong = json.loads(out)
    assert [point["devices"] for point in strong["points"]] == [1, 2] and {
        point["tokens"] for point in strong["points"]
    } == {32 * 64}
    assert picture.read_text().startswith("<svg ")
    first, second = (
        json.loads(shell("plan", str(shallow), "--topology", f"h100:{n}", *words[6:], "--json")[1])
        for n in (1, 2)
    )
    assert strong["points"][0]["digest"] == first["digest"]
    assert strong["points"][1]["step_seconds"] <= second["estimate"]["step_seconds"]
    assert all(
        b["step_seconds"] <= a["step_seconds"] for a, b in itertools.pairwise(strong["points"])
    )
    code, out, _ = shell(*words, "--weak", "--json")
    weak = json.loads(out)
    assert weak["kind"] == "weak" and [point["tokens"] for point in weak["points"]] == [
        32 * 64,
        64 * 64,
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", "0"), "'0' says no numbers of devices"),
        (("--devices", "x", "--json"), "'x' says no numbers"),
        (("--devices", "3,1,3,3"), "'3,1,3,3' names 3 twice\nTry: 1,3"),
        (("--devices", "8"), "the size of the batch of"),
    ],
)
def test_scale_refuses_nonsense(shell, card: Path, words: tuple[str, ...], message: str):
    code, out, err = shell("scale", str(card), "--topology", "h100:8", *words)
    assert code == 2 and message in err and (not out or "--json" in words)


# `shardlib timeline` and `shardlib edge`: stages of a pipeline.


@pytest.mark.long
def test_timeline_draws_a_plan_with_stages(shell, tmp_path: Path, plan_file: Path):
    plan, picture, trace = tmp_path / "staged.json", tmp_path / "t.svg", tmp_path / "t.json"
    words = shlex.split(
        "plan gpt2-small -t h100:4 -b 8 -s 64 --pin mesh.stage=4 --pin microbatches=8"
        " --pin schedule=1f1b --pin remat=full"
    )
    assert shell(*words, "--out", str(plan))[0] == 0
    code, out, _ = shell("timeline", str(plan), "--svg", str(picture), "--perfetto", str(trace))
    assert code == 0 and "4 stages, 1f1b, 8 microbatches, in lockstep" in out and "0>>" in out
    assert picture.read_text().startswith("<svg ")
    assert len(json.loads(trace.read_text())["traceEvents"]) > 64
    data = json.loads(shell("timeline", str(plan), "--json")[1])
    assert len(data["slices"]) == 64 and data["step_seconds"] == pytest.approx(
        json.loads(plan.read_text())["estimate"]["step_seconds"]
    )
    code, _, err = shell("timeline", str(plan_file))
    assert code == 2 and "no pipeline stages to draw" in err


def test_a_trace_of_any_plan(shell, tmp_path: Path, plan_file: Path):
    trace = tmp_path / "t.json"
    code, out, _ = shell("timeline", str(plan_file), "--perfetto", str(trace))
    seconds = json.loads(plan_file.read_text())["estimate"]["step_seconds"]
    drawn = json.loads(trace.read_text())["traceEvents"]
    assert code == 0 and out.startswith("predicted: ")
    assert sum(e["dur"] for e in drawn if e["ph"] == "X" and e["tid"] == 1) == pytest.approx(
        seconds * 1e6
    )
    words = ("timeline", str(plan_file), "--perfetto", str(trace), "--json")
    assert json.loads(shell(*words)[1]) == {"steps": {"predicted": pytest.approx(seconds)}}
    code, _, err = shell("timeline", str(plan_file), "--run", str(tmp_path))
    assert code == 2 and "--run belongs to a trace" in err
    code, _, err = shell(*words[:-1], "--run", str(tmp_path))
    assert code == 2 and "has no profile (*.xplane.pb)" in err


@pytest.mark.long
def test_edge_spreads_a_model_over_devices_of_a_file(shell, card: Path, tmp_path: Path):
    devices = tmp_path / "devices.toml"
    devices.write_text(
        '[[devices]]\nname = "board"\ncount = 3\nlink_bytes_per_s = 1e9\n[devices.chip]\nname ='
        ' "board"\nvendor = "cpu"\nflops_per_s = { float32 = 1e9 }\nhbm_bytes ='
        " 100_000_000\nhbm_bytes_per_s = 1e9\n"
    )
    words = ("edge", str(card), "--devices", str(devices), "-b", "2", "-s", "16")
    code, out, _ = shell(*words)
    assert code == 0 and "stage  device" in out and "before the layers" in out
    data = json.loads(shell(*words, "--json")[1])
    assert data["examples"] == 2
    assert data["throughput"] == pytest.approx(2 / data["seconds"])
    assert data["stages"][0]["first"] == 0
    code, out, _ = shell(
        "edge", str(card), "--devices", str(tmp_path / "none.toml"), "-b", "2", "-s", "16", "--json"
    )
    assert code == 2 and json.loads(out)["error"]["kind"] == "MissingFileError"


# `shardlib replan`: a plan for the devices that are left.


@pytest.mark.long
def test_replan_for_a_machine_that_lost_a_host(shell, made: Path, tmp_path: Path):
    out_file = tmp_path / "smaller.json"
    code, out, err = shell(
        "replan", str(made), "--topology", "h100:2", "--out", str(out_file), "--json"
    )
    assert (code, err) == (0, "")
    data, new = json.loads(out), Plan.from_json(out_file.read_text())
    assert data["plan"]["digest"] == new.digest
    assert new.topology == "h100:2"
    assert new.mesh.devices <= 2
    assert len(data["moved_bytes_per_device"]) == 2
    assert data["slowdown"] == pytest.approx(
        new.estimate.step_seconds / Plan.from_json(made.read_text()).estimate.step_seconds
    )
    assert dict(new.origin)["model"] == dict(Plan.from_json(made.read_text()).origin)["model"]
    code, text, _ = shell("replan", str(made), "--topology", "h100:2", "--lost", "0-1")
    assert code == 0 and "What moves" in text


@pytest.mark.long
def test_simulated_devices_are_priced_at_one_list(
    shell, card: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    measured = topology("cpu:4")
    chip = replace(measured.chip, hbm_bytes_per_s=2e10, sources=("measured here",))
    monkeypatch.setattr(calibration, "measured_cpu", lambda _: replace(measured, chip=chip))
    words = ("--topology", "cpu:4", "--batch", "8", "--seq", "32", "--pin", "mesh.data=4")
    file = tmp_path / "plan.json"
    assert shell("plan", str(card), *words, "--out", str(file))[0] == 0
    again = ("replan", str(file), "--topology", "cpu:4", "--lost", "0", "--json")
    here = json.loads(shell(*again)[1])
    assert here["slowdown"] == pytest.approx(1) and here["changed"] == []
    assert not any("chips" in note or "rates" in note for note in here["notes"])

    slower = replace(chip, hbm_bytes_per_s=1e10, sources=("measured there",))
    monkeypatch.setattr(calibration, "measured_cpu", lambda _: replace(measured, chip=slower))
    there = json.loads(shell(*again)[1])
    assert there["slowdown"] == pytest.approx(1)
    assert there["old_step_seconds"] > here["old_step_seconds"]
    assert there["notes"][1].startswith("The plan was written with ")
    assert "by those of this machine it takes" in there["text"].replace("\n    ", " ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--topology", "0*h100:8"), "has a size of 0"),
        (("--topology", "h100:4", "--lost", "x"), "--lost has 'x'"),
        (("--topology", "h100:4", "--lost", "99"), "the lost devices 99 are none of 2*h100:2"),
    ],
)
def test_replan_refuses_nonsense(shell, made: Path, words: tuple[str, ...], message: str):
    code, out, err = shell("replan", str(made), *words)
    assert (code, out) == (2, "") and message in err


@pytest.mark.parametrize("question", [("--why-not", "mesh.tensor=1"), ("--sensitivity",)])
def test_questions_about_a_plan_that_does_not_say_its_model(shell, plan_file: Path, question):
    code, _, err = shell("explain", str(plan_file), *question)
    assert code == 2
    assert err.startswith("error: the plan does not say which model it is for")
