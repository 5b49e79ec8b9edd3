"""Fixtures of the command line: a shell, a plan on disk, a small model."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from shardlib.cli import main
from tests.planner.fixture_plan import PLAN

CARD = """\
vocab_size = 256
layers = 2
embed = 64
heads = 4
kv_heads = 2
head_dim = 16
mlp = 128
max_seq = 64
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    return path


@pytest.fixture
def card(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CARD)
    return path


@pytest.fixture
def shallow(tmp_path: Path) -> Path:
    """A model of one layer, which is not repeated: no remat policy to try."""
    path = tmp_path / "shallow.toml"
    path.write_text(CARD.replace("layers = 2", "layers = 1"))
    return path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of a perceptron that the command line made; tests read it."""
    file = tmp_path_factory.mktemp("made") / "made.json"
    words = f"plan tests.cli.perceptron:make --topology 2*h100:2 --out {file} --json".split()
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as stop:
        main(words)
    assert not stop.value.code
    return file
