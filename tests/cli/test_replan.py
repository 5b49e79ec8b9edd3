"""`shardlib replan`: a plan for the devices that are left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardlib.planning.plan import Plan


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
