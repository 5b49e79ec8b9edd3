"""The example of docs/parameter_server.md prints what it says, but for the order of pushes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "parameter_server.md").read_text()


def figures(text: str) -> list[tuple[str, ...]]:
    """Lines of a summary, without what the order of pushes decides."""
    return re.findall(r"(worker \d: \d+ steps|server \d: \d+ pushes)", text)


@pytest.mark.long
def test_the_example_runs(tmp_path: Path) -> None:
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", TEXT, re.DOTALL)[:2]
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert figures(done.stdout) == figures(shown) and len(figures(shown)) == 5
    ends = re.findall(r"loss ([\d.]+) at first, ([\d.]+) at last", done.stdout)
    assert max(float(last) for _, last in ends) < 0.1 < max(float(first) for first, _ in ends)
    assert not done.stderr
