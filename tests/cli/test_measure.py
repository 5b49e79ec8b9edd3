"""`shardlib measure`: what it says and refuses, and its file from two processes."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from shardlib.machines.topology import topology
from shardlib.planner.plan import Plan
from shardlib.training.run import FORMAT
from tests.planner.fixture_plan import PLAN
from tests.processes import python


def test_a_dry_run_lists_the_figures_without_devices(shell):
    code, text = shell("measure", "--dry-run", "--topology", "2*h100:8", "--json")[:2]
    listed = json.loads(text)["figures"]
    assert code == 0 and {"matmul.bfloat16.8192", "memory", "overlap", "step"} <= listed.keys()
    assert {name.split(".")[0] for name in listed if "all-reduce" in name} == {
        "InfiniBand",
        "NVLink",
    }
    code, text = shell("measure", "--dry-run", "--topology", "cpu:4")[:2]
    assert code == 0 and "cpu:4: 37 figures would be measured" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--minutes", "0"), "--minutes is 0; it is above 0 and at most 1440\nTry: --minutes 10"),
        (("--minutes", "nan"), "--minutes is nan; it is above 0"),
        (("--out", "here.json"), "--out here.json is a topology file, whose name ends in .toml"),
        (("--topology", "h100:8"), "h100:8 has 8 devices h100, and 8 of cpu (cpu) are attached"),
        (("--topology", "h900:8"), "names the unknown chip 'h900'"),
        (("--check", "nowhere"), "there is no run in nowhere"),
        (("--check", "nowhere", "--dry-run"), "--check reads a run and measures nothing"),
        (("--check", "nowhere", "--out", "a.toml"), "Try: leave out --out and --dry-run"),
    ],
)
def test_what_is_refused(shell, words: tuple[str, ...], message: str):
    code, _, error = shell("measure", *words)
    assert code == 2 and message in error, error


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of ten steps that took twice as long as its plan says."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"format": FORMAT, "run": {"steps": 10}}))
    (folder / "plan.json").write_text(PLAN.to_json())
    return folder


def write_steps(run: Path, seconds: float, **more: float) -> None:
    lines = [
        {
            "step": n,
            "loss": 1.0,
            "seconds": seconds,
            "data_seconds": 0.0,
            "tokens_per_second": 1.0,
            **more,
        }
        for n in range(1, 11)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1.0, "the prices hold"),
        (2.0, "alone is off, it takes"),
        (0.25, "the prices are too high: 4.00 times the step"),
    ],
)
def test_prices_against_a_run(shell, run: Path, factor: float, words: str):
    predicted = PLAN.estimate.step_seconds
    write_steps(run, factor * predicted)
    code, text, _ = shell("measure", "--check", str(run), "--json")
    found = json.loads(text)
    assert code == 0 and found["ratio"] == pytest.approx(factor)
    assert any(words in line for line in found["off"]), found["off"]
    assert words in shell("measure", "--check", str(run))[1]


def test_what_is_no_price_is_named_first(shell, run: Path):
    seconds = 2 * PLAN.estimate.step_seconds
    write_steps(run, seconds, data_seconds=seconds / 2, others_busy=0.4)
    off = json.loads(shell("measure", "--check", str(run), "--json")[1])["off"]
    assert off[0].startswith("50% of a step is waiting for data")
    assert off[1] == "other programs used 40% of the processors during the run"
    assert off[2].startswith("the prices hold")


def test_a_run_without_steps_or_with_another_plan(shell, run: Path):
    assert "has no metrics of a step" in shell("measure", "--check", str(run))[2]
    write_steps(run, 1.0)
    (run / "plan.json").write_text("{}")
    assert "has no readable plan" in shell("measure", "--check", str(run))[2]
    (run / "plan.json").write_text(replace(PLAN, origin=()).to_json())
    error = shell("measure", "--check", str(run), "--topology", "h100:8")[2]
    assert "does not say which model it is of" in error


@pytest.mark.long
def test_two_processes_write_one_file_of_both(tmp_path: Path):
    """Collectives go through gloo between them; the second figure of a kind is among all."""
    out = tmp_path / "both.toml"
    python(
        *("-m", "shardlib", "launch", "--processes", "2", "--devices-per-process", "2", "--"),
        *("measure", "--minutes", "0.0001", "--out", str(out)),
    )
    found = topology(str(out))
    assert found.devices == 4 and found.measured is not None
    assert "4 devices in 2 processes" in found.measured.place
    ways = {(one.kind, one.ways): one for one in found.tiers[0].exchanges}
    assert len(ways) == 10
    inside, across = (ways["all-reduce", n].latency_s for n in (2, 4))
    assert 0 < inside < across < 10
    intervals = tomllib.loads(out.read_text())["measured"]["intervals"]
    assert all(low <= high and math.isfinite(high) for _, low, high in intervals)
    assert isinstance(PLAN, Plan)
