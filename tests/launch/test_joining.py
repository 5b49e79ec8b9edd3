"""Real processes that join each other with JAX, as a launcher starts them."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from pathlib import Path

import pytest

from shardlib.launch.local import Local, launch
from shardlib.processes.console import Lines
from shardlib.training.fit import fit
from shardlib.training.measures import by_step, read_records
from shardlib.training.run import RunFolder
from tests.training.small import batch_of, compiled

ROOT = Path(__file__).parents[2]


def launched(folder: Path, what: str) -> tuple[int, str, str]:
    """Two processes of two devices each: exit code, standard output and standard error of all."""
    folder.mkdir()
    out, err = io.StringIO(), io.StringIO()
    local = Local(
        command=(sys.executable, "-m", "tests.launch.program", what, str(folder)),
        processes=2,
        devices=2,
        run=str(folder),
        join_seconds=300,
    )
    return (
        launch(
            local, lines=Lines(2, out=out, err=err), environ={**os.environ, "PYTHONPATH": str(ROOT)}
        ),
        out.getvalue(),
        err.getvalue(),
    )


@pytest.mark.long
def test_two_processes_train_as_one_does(tmp_path: Path):
    code, out, err = launched(tmp_path / "run", "train")
    assert code == 0, err
    assert sorted(re.findall(r"^\[\d\] \d \d$", out, re.MULTILINE)) == ["[0] 0 6", "[1] 1 6"]
    several = [
        record["loss"]
        for record in by_step(read_records(RunFolder(tmp_path / "run").metrics)).values()
    ]
    one = fit(compiled({"fsdp": 4}), batch_of, steps=6).losses
    assert (
        several == pytest.approx(one, rel=1e-6)
        and len(several) == 6
        and RunFolder(tmp_path / "run").saved() == (4, 6)
    )


@pytest.mark.long
def test_processes_that_mean_something_else_end_before_they_compute(tmp_path: Path):
    code, _, err = launched(tmp_path / "run", "differ")
    assert code == 2, err
    for number in range(2):
        assert (
            f"[{number}] shardlib.errors.LaunchError: the processes do not fit each other: their"
            " program differs: steps: 6 (process 0), 7 (process 1)\n" in err
        )
    assert not RunFolder(tmp_path / "run").metrics.exists()


@pytest.mark.long
def test_one_that_fails_does_not_wait_for_the_others(tmp_path: Path):
    begin = time.monotonic()
    code, _, err = launched(tmp_path / "run", "raise")
    # Process 0 fails in the exchange that 1 left, and may be gone before it.
    assert code == 1 and "[1] ValueError: there is no more data\n" in err
    assert re.search(r"process [01] of 2 failed with exit code 1; ending the 1 that is left\n", err)
    assert time.monotonic() - begin < 200


@pytest.mark.long
def test_what_processes_compare(tmp_path: Path):
    code, out, err = launched(tmp_path / "run", "agree")
    assert code == 0, err
    hint = " | Try: start all of them with the same words, code and packages"
    for number in range(2):
        assert [
            line.partition(f"[{number}] {number} ")[2]
            for line in out.splitlines()
            if line.startswith(f"[{number}] {number} ")
        ][:3] == [
            (
                "the processes do not fit each other: their colour differs: sky: blue (process 0),"
                f" grey (process 1){hint}"
            ),
            "agrees",
            "made by 0",
        ]
    assert "[0] 0 process 1 of 2 did not come to compare its late within 1 s True True\n" in out
