"""`shardlib train` from a shell, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardlib.planner.plan import Plan


@pytest.mark.long
def test_train_on_a_text_of_ones_own(tmp_path: Path, card: Path):
    text = tmp_path / "text"
    text.mkdir()
    for index in range(30):
        (text / f"{index}.txt").write_text("the cat sat on the mat and looked at the rat\n" * 60)
    words = [
        "train",
        "--data",
        str(text),
        "--model",
        str(card),
        "--steps",
        "3",
        "--batch",
        "8",
        "--seq",
        "32",
        "--sample-bytes",
        "4",
        "--pin",
        "mesh.fsdp=8",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "shardlib", *words],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    data = json.loads(done.stdout)
    assert {"validation_loss", "bigram_loss", "tokens_per_second", "predicted", "measured"} <= set(
        data
    )
    assert (
        Plan.from_json(json.dumps(data["plan"])).mesh["fsdp"] == 8
        and data["plan"]["topology"] == "cpu:8"
    )


def test_train_refuses_nonsense(shell):
    code, out, err = shell("train", "--lr=-1", "--steps", "0")
    assert (code, out) == (2, "")
    assert (
        err
        == "error: the training run is not usable:\n  - steps is 0; it must be at least 1\n  - lr"
        " is -1.0; it must be positive\n"
    )


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
    ],
)
def test_train_refuses_what_keeps_no_run_before_it_reads(
    shell, tmp_path: Path, words: tuple[str, ...], fault: str
):
    run = tmp_path / "run"
    code, out, err = shell("train", "--data", str(tmp_path / "none"), "--run", str(run), *words)
    assert (code, out, err) == (2, "", f"error: the training run is not usable: {fault}\n")
    assert not run.exists()


def test_train_allows_changes_of_a_run_alone(shell):
    assert shell("train", "--allow-changes", "loss") == (
        2,
        "",
        "error: the training run is not usable: allow_changes needs the folder of a run that was"
        " begun: run\n",
    )


@pytest.mark.parametrize("seed", ["2147483648", "99999999999999999999"])
def test_train_refuses_a_seed_that_is_too_large_before_it_makes_a_folder(
    shell, tmp_path: Path, seed: str
):
    code, out, err = shell(
        "train", f"--seed={seed}", "--steps", "1", "--run", str(tmp_path / "run")
    )
    assert (code, out, err) == (
        2,
        "",
        f"error: the training run is not usable: seed is {seed}; it must be below 2147483648\n",
    )
    assert not (tmp_path / "run").exists()
