from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardlib.errors import MissingFileError, RunError
from shardlib.training.run import RunFolder


def test_the_same_run_is_opened_again(tmp_path: Path):
    folder = RunFolder(tmp_path / "a" / "run")
    identity = {"model": "demo", "lr": 4e-3, "data": None, "batch": 16}
    folder.check({"model": "any"})
    assert (
        not folder.open(identity).known
        and folder.open(identity).known
        and folder.require() == identity
    )
    folder.check({"model": "demo", "batch": 16})
    with pytest.raises(RunError, match='model is "large", the run has "demo"'):
        folder.check({"model": "large"})
    assert folder.saved() == () and folder.heartbeats() == []


def test_another_run_is_refused_and_nothing_is_touched(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    folder.open({"model": "demo", "seed": 0, "batch": 16})
    before = folder.manifest.read_bytes()
    with pytest.raises(RunError) as caught:
        folder.open({"model": "demo", "seed": 1, "seq": 64})
    assert (
        str(caught.value)
        == f"{folder.path} holds another run:\n  - seed is 1, the run has 0\n  - batch is nothing,"
        " the run has 16\n  - seq is 64, the run has nothing\nTry: another folder, or what the"
        " run was begun with; to go on with these changes on purpose, --allow-changes"
        " seed,batch,seq, or Settings(allow_changes=...). Nothing was changed"
    )
    assert folder.manifest.read_bytes() == before


def test_folders_that_are_none(tmp_path: Path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(RunError, match="cannot be written: "):
        RunFolder(tmp_path / "file" / "run").open({})
    with pytest.raises(MissingFileError, match="there is no run in "):
        RunFolder(tmp_path / "none").require()
    for text in ("{", "[]", "{}", '{"format": 1}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(
            RunError, match=r"is no description of a run: .*\n.*Nothing was changed"
        ):
            RunFolder(tmp_path).open({})
    (tmp_path / "run.json").write_text('{"format": 7, "run": {}}')
    with pytest.raises(RunError, match="is of format 7; this version reads 1"):
        RunFolder(tmp_path).require()


@pytest.mark.processes
def test_who_only_watches_does_not_load_jax():
    """Neither the supervisor nor `shardlib status`; and whoever owns a folder is known without."""
    code = (
        "import sys, shardlib.training.supervisor, shardlib.training.run,"
        " shardlib.checkpointing.folder; print(sorted({'jax', 'flax', 'optax'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[]"
