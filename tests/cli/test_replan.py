"""`shardlib replan`: a plan for the devices that are left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardlib import calibration
from shardlib.machines.topology import topology
from shardlib.planner.plan import Plan


@pytest.mark.long
def test_replan_for_a_machine_that_lost_a_host(shell, made: Path, tmp_path: Path):
    out_file = tmp_path / "smaller.json"
    code, out, err = shell(
        "replan", str(made), "--topology", "h100:2", "--out", str(out_file), "--json"
    )
    assert (code, err) == (0, "")
    data, new = json.loads(out), Plan.from_json(out_file.read_text())
    assert (
        data["plan"]["digest"] == new.digest and new.topology == "h100:2" and new.mesh.devices <= 2
    )
    assert len(data["moved_bytes_per_device"]) == 2
    assert data["slowdown"] == pytest.approx(
        new.estimate.step_seconds / Plan.from_json(made.read_text()).estimate.step_seconds
    )
    assert dict(new.origin)["model"] == dict(Plan.from_json(made.read_text()).origin)["model"]
    code, text, _ = shell("replan", str(made), "--topology", "h100:2", "--lost", "0-1")
    assert code == 0 and "What moves" in text


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
