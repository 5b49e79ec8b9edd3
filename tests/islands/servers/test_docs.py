"""The examples of docs/parameter_server.md and of docs/islands.md print what they say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.processes import python

ROOT = Path(__file__).parents[3]


def blocks(text: str) -> list[str]:
    """The program of an example, and what it prints."""
    return re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)[:2]


def printed(folder: Path, *words: str) -> str:
    done = python(*words, cwd=folder)
    assert not done.stderr
    return done.stdout


@pytest.mark.long
def test_the_parameter_server(tmp_path: Path) -> None:
    """But for what the order of pushes decides."""
    code, shown = blocks((ROOT / "docs" / "parameter_server.md").read_text())
    (tmp_path / "example.py").write_text(code)
    out = printed(tmp_path, "example.py")
    figures, wanted = (
        re.findall(r"(worker \d: \d+ steps|server \d: \d+ pushes)", text) for text in (out, shown)
    )
    assert figures == wanted and len(wanted) == 5
    ends = re.findall(r"loss ([\d.]+) at first, ([\d.]+) at last", out)
    assert max(float(last) for _, last in ends) < 0.1 < max(float(first) for first, _ in ends)


@pytest.mark.long
def test_islands_as_processes(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "islands.md").read_text().partition("## Islands as processes")[2]
    code, shown = blocks(text)
    (tmp_path / "train.py").write_text(code)
    command = re.findall(r"    (shardlib launch --islands .*)\n", text)[0].split()
    words = [sys.executable if word == "python" else word for word in command]
    lines = printed(tmp_path, "-m", *words).splitlines()
    for line in shown.splitlines():
        assert {line, line.replace("[1]", "[0]")} <= set(lines)
