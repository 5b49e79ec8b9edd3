"""Processes that are killed while they save, that are several, and that have no room."""

from __future__ import annotations

import ast
import resource
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from shardlib.checkpointing import huggingface
from shardlib.checkpointing.folder import described
from shardlib.checkpointing.store import Checkpoints
from shardlib.errors import CheckpointError
from tests.checkpointing.states import BOTH, ROWS, WHOLE, abstract, assert_same, mesh, placed, state
from tests.checkpointing.test_huggingface import CONFIGS, drawn, program_of
from tests.processes import child, free_port, until

#: Where one array cannot be written, Orbax gives up the others, and tensorstore complains of that
#: in its own threads.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.long
def test_killed_while_saving(tmp_path: Path):
    """Whatever the moment, every checkpoint that is seen afterwards is whole, and the next process
    saves on.
    """
    process = child("-m", "tests.checkpointing.child_saves", tmp_path, *(0.02, 0.1, 0.2))
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors[-3000:]
    left = [ast.literal_eval(line) for line in output.splitlines()]
    assert len(left) == 3 and any("tmp" in name for names in left for name in names), (
        left
    )  # some were killed while they wrote
    reader = Checkpoints(tmp_path, read_only=True)
    assert reader.steps() and all(2 <= sum(name.isdigit() for name in names) <= 3 for names in left)
    for step in reader.steps():
        assert_same(reader.restore(abstract(state(), mesh(1, 1), WHOLE), step).state, state(step))
    Checkpoints(tmp_path).close()
    assert [entry.name for entry in tmp_path.iterdir() if not entry.name.isdigit()] == ["owner"]


@pytest.mark.long
def test_four_processes_and_one(tmp_path: Path):
    """4 processes of 2 devices save, 1 of 8 restores that and saves, and the 4 restore that."""
    process = child("-m", "tests.checkpointing.child_processes", 4, free_port(), tmp_path)
    until(
        lambda: (
            ((tmp_path / "1").is_dir() and described(tmp_path) is None)
            or process.poll() is not None
        ),
        100,
    )
    if process.poll() is None:
        with Checkpoints(tmp_path) as checkpoints:
            assert_same(checkpoints.restore(abstract(state(), mesh(2, 4), BOTH)).state, state(1))
            checkpoints.save(
                2, placed(state(2), mesh(2, 4), BOTH), plan=None, extra={"position": 2}
            )
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors[-3000:]


@pytest.mark.long
def test_four_processes_read_and_write_hugging_face_files(tmp_path: Path):
    """Each reads the part of its own devices, and what they write together is what they have
    read.
    """
    program = program_of(CONFIGS["mixtral-8x7b"], tmp_path / "config")
    (name,) = huggingface.save(
        program, drawn(program), tmp_path / "in", config=tmp_path / "config" / "config.json"
    )
    process = child("-m", "tests.checkpointing.child_huggingface", 4, free_port(), tmp_path)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors[-3000:]
    shares = [float(path.read_text()) for path in tmp_path.glob("share-*")]
    assert (
        len(shares) == 4 and max(shares) < 0.6 and sum(shares) >= 1
    )  # what no axis cuts is read by all of them
    one, other = (load_file(tmp_path / folder / name) for folder in ("in", "out"))
    assert one.keys() == other.keys() and all(
        (one[tensor] == other[tensor]).all() for tensor in one
    )


@pytest.mark.long
def test_no_room(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Files may not grow beyond a few bytes: the save fails, the state and what was saved before
    are as they were. One error says so, and no thread of a library logs its own.
    """
    on = mesh(8, 1)
    current = placed(state(2), on, ROWS)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, placed(state(1), on, ROWS), plan=None, wait=True)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            checkpoints.save(2, current, plan=None)
            with pytest.raises(
                CheckpointError,
                match=r"step 2 could not be written to .* \(the disk is full, or files may not be"
                r" so large\); earlier ones are as before\nTry: make room",
            ):
                checkpoints.wait()
            assert [one for one in caplog.records if one.levelname == "ERROR"] == []
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        assert checkpoints.steps() == (1,) and sorted(
            entry.name for entry in tmp_path.iterdir()
        ) == ["1", "owner"]
        assert_same(current, state(2))
        checkpoints.save(2, current, plan=None, wait=True)
        assert_same(checkpoints.restore(abstract(state(), on, ROWS)).state, state(2))
