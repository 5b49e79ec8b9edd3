"""The example of docs/islands.md prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "islands.md").read_text().partition("## Islands as processes")[2]


@pytest.mark.long
def test_the_example_runs(tmp_path: Path) -> None:
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", TEXT, re.DOTALL)[:2]
    (tmp_path / "train.py").write_text(code)
    command = re.findall(r"    (shardlib launch --islands .*)\n", TEXT)[0].split()
    words = [sys.executable if word == "python" else word for word in command]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = done.stdout.splitlines()
    for line in shown.splitlines():
        assert {line, line.replace("[1]", "[0]")} <= set(found)
    assert not done.stderr
