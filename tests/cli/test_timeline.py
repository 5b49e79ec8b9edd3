"""`shardlib timeline` and `shardlib edge`: stages of a pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.mark.long
def test_timeline_draws_a_plan_with_stages(shell, tmp_path: Path, plan_file: Path):
    plan, picture, trace = tmp_path / "staged.json", tmp_path / "t.svg", tmp_path / "t.json"
    words = (
        "plan",
        "gpt2-small",
        "-t",
        "h100:4",
        "-b",
        "8",
        "-s",
        "64",
        "--pin",
        "mesh.stage=4",
        "--pin",
        "microbatches=8",
        "--pin",
        "schedule=1f1b",
        "--pin",
        "remat=full",
    )
    assert shell(*words, "--out", str(plan))[0] == 0
    code, out, _ = shell("timeline", str(plan), "--svg", str(picture), "--perfetto", str(trace))
    assert code == 0 and "4 stages, 1f1b, 8 microbatches, in lockstep" in out and "0>>" in out
    assert (
        picture.read_text().startswith("<svg ")
        and len(json.loads(trace.read_text())["traceEvents"]) > 64
    )
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
    assert (
        data["examples"] == 2
        and data["throughput"] == pytest.approx(2 / data["seconds"])
        and data["stages"][0]["first"] == 0
    )
    code, out, _ = shell(
        "edge", str(card), "--devices", str(tmp_path / "none.toml"), "-b", "2", "-s", "16", "--json"
    )
    assert code == 2 and json.loads(out)["error"]["kind"] == "MissingFileError"
