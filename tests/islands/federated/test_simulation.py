"""Flower's simulation, in processes of its own: the example of the docs, and the longer one."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.processes import python

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "federated.md").read_text()
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("flwr", "ray")),
    reason="flwr[simulation] is not installed",
)


def run(script: Path, *words: str) -> str:
    """What a script prints."""
    done = python(str(script), *words)
    return done.stdout


@pytest.mark.long
def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", TEXT, re.DOTALL)[:2]
    script = tmp_path / "example.py"
    script.write_text(code)
    assert shown.strip() in run(script)


@pytest.mark.long
def test_ten_clients_learn_of_each_others_text(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    run(ROOT / "examples" / "federated_text.py", "--rounds", "2", "--out", str(out))
    losses = json.loads(out.read_text())["losses"]
    assert len(losses) == 3 and losses[0] > 5.5 > 3.2 > losses[1] > losses[2]
