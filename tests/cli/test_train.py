"""`shardlib train` from a shell, and what it refuses."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardlib.planner.plan import Plan
from shardlib.report.changes import change
from tests.planner.fixture_plan import PLAN
from tests.processes import python


@pytest.mark.long
def test_train_on_a_text_of_ones_own(tmp_path: Path, card: Path):
    text = tmp_path / "text"
    text.mkdir()
    for index in range(30):
        (text / f"{index}.txt").write_text("the cat sat on the mat and looked at the rat\n" * 60)
    words = (
        f"train --data {text} --model {card} --steps 3 --batch 8 --seq 32 --sample-bytes 4 "
        "--pin mesh.fsdp=8 --json"
    ).split()
    done = python("-m", "shardlib", *words)
    data = json.loads(done.stdout)
    assert {"validation_loss", "bigram_loss", "tokens_per_second", "predicted", "measured"} <= set(
        data
    )
    assert Plan.from_json(json.dumps(data["plan"])).mesh["fsdp"] == 8
    assert data["plan"]["topology"] == "cpu:8"


# `shardlib diff`: two plans as text, Markdown and a page, limits, and the files to copy.

REVIEW = Path(__file__).parents[2] / "examples" / "review"


@pytest.fixture
def slower(tmp_path: Path) -> Path:
    """The plan with a tenth more seconds of compute, and one collective more."""
    estimate = PLAN.estimate
    seconds = replace(estimate.seconds, compute=estimate.seconds.compute * 1.1)
    more = replace(estimate.collectives[0], count=estimate.collectives[0].count + 1)
    changed = replace(estimate, seconds=seconds, collectives=(more, *estimate.collectives[1:]))
    path = tmp_path / "slower.json"
    path.write_text(replace(PLAN, estimate=changed).to_json())
    return path


def test_figures_are_the_sums_of_the_plan(slower: Path):
    figures = {one.word: one.before for one in change(PLAN, PLAN).figures}
    told = json.loads(PLAN.to_json())["estimate"]
    assert figures["seconds"] == pytest.approx(told["step_seconds"])
    assert figures["memory"] == told["device_bytes"]["peak"]
    assert figures["traffic"] == sum(c["count"] * c["bytes"] for c in told["collectives"])
    assert figures["collectives"] == sum(c["count"] for c in told["collectives"])


def test_the_same_plan_passes_every_limit(shell, plan_file: Path):
    limits = [f"--max-{word}=0%" for word in ("seconds", "memory", "traffic", "collectives")]
    code, out, _ = shell("diff", str(plan_file), str(plan_file), *limits)
    assert code == 0 and "Decisions: the same" in out and "too much" not in out


def test_what_is_beyond_a_limit_is_said_and_is_exit_code_one(shell, plan_file, slower):
    code, out, _ = shell("diff", str(plan_file), str(slower), "--max-collectives", "0%")
    assert code == 1 and "too much: collectives per step" in out
    code, out, _ = shell("diff", str(plan_file), str(slower), "--max-seconds", "50%")
    assert code == 0 and "too much" not in out
    words = ("diff", str(plan_file), str(slower), "--max-seconds", "1%", "--json")
    code, out, _ = shell(*words)
    data = json.loads(out)
    assert code == 1 and not data["ok"] and data["beyond"][0].startswith("seconds per step: ")
    assert data["figures"]["seconds"][1] > data["figures"]["seconds"][0]
    code, out, _ = shell("diff", str(slower), str(plan_file), "--max-collectives", "0%")
    assert code == 0  # less is no more


def test_markdown_and_page(shell, plan_file: Path, slower: Path, tmp_path: Path):
    page = tmp_path / "diff.html"
    words = ("diff", str(plan_file), str(slower), "--markdown", "--html", str(page))
    code, out, _ = shell(*words, "--max-collectives", "0%")
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert code == 1 and ":x:" in out and "| seconds per step | " in out
    assert len({line.count("|") for line in rows[:4]}) == 1
    assert "After: the step" in page.read_text() and page.read_text().count("<svg") == 4


def test_a_limit_is_a_percentage(shell, plan_file: Path):
    code, _, err = shell("diff", str(plan_file), str(plan_file), "--max-memory", "much")
    assert code == 2 and "--max-memory is 'much'; it is a percentage" in err


@pytest.mark.long
def test_the_action_and_the_hook_fail_when_the_model_has_grown(shell, card: Path, tmp_path: Path):
    plans = tmp_path / "plans"
    plans.mkdir()
    words = ("plan", str(card), "-t", "v5e:2x2", "-b", "8", "-s", "32")
    assert shell(*words, "--out", str(plans / "small.json"))[0] == 0
    command = tmp_path / "bin" / "shardlib"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m shardlib "$@"\n')
    command.chmod(0o755)
    summary = tmp_path / "summary.md"
    root = str(Path(__file__).parents[2])
    there = {
        **os.environ,
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": root,
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    steps = yaml.safe_load((REVIEW / "plan.yml").read_text())["jobs"]["plan"]["steps"]
    compare = next(step["run"] for step in steps if step.get("name") == "Compare")
    hooks = yaml.safe_load((REVIEW / "pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    commands = (["bash", "-e", "-c", compare], shlex.split(hooks[0]["entry"]))
    for words in commands:
        assert subprocess.run(words, cwd=tmp_path, env=there, check=False).returncode == 0
    card.write_text(card.read_text().replace("mlp = 128", "mlp = 256"))
    for words in commands:
        assert subprocess.run(words, cwd=tmp_path, env=there, check=False).returncode == 1
    assert ":x: peak bytes per device" in summary.read_text()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--save-every", "0"), "save_every is 0; it must be at least 1"),
        (("--keep", "0"), "keep is 0; it must be at least 1"),
        (("--spike=-1",), "spike is -1.0; it must not be negative"),
        (("--spike", "nan"), "spike is nan; it must not be negative"),
        (("--hang-seconds=-1",), "hang_seconds is -1.0; it must be positive"),
        (
            ("--profile", "0"),
            "profile is (0, 1); the first step and the number of steps are at least 1",
        ),
        (
            ("--allow-changes", "foo"),
            "allow_changes has 'foo'; known are loss, optimizer, lr, data, seed, model, batch,"
            " exchange, steps, seq, identity",
        ),
        (("--seed=2147483648",), "seed is 2147483648; it must be below 2147483648"),
        (
            ("--seed=99999999999999999999",),
            "seed is 99999999999999999999; it must be below 2147483648",
        ),
        (
            ("--batch=99999999999999999999",),
            "batch is 99999999999999999999; it must be below 2147483648",
        ),
    ],
)
def test_train_refuses_nonsense_before_it_reads_or_makes_a_folder(
    shell, tmp_path: Path, words: tuple[str, ...], fault: str
):
    run = tmp_path / "run"
    code, out, err = shell("train", "--data", str(tmp_path / "none"), "--run", str(run), *words)
    assert (code, out, err) == (2, "", f"error: the training run is not usable: {fault}\n")
    assert not run.exists()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            ("--lr=-1", "--steps", "0"),
            "\n  - steps is 0; it must be at least 1\n  - lr is -1.0; it must be positive",
        ),
        (
            ("--allow-changes", "loss"),
            " allow_changes needs the folder of a run that was begun: run",
        ),
    ],
)
def test_train_refuses_nonsense_without_a_folder(shell, words: tuple[str, ...], fault: str):
    message = f"error: the training run is not usable:{fault}\n"
    assert shell("train", *words) == (2, "", message)
