from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from shardlib.checkpointing.store import Checkpoints, Keep
from shardlib.checkpointing.tree import named_leaves
from shardlib.errors import CheckpointError
from shardlib.lowering.runtime import TrainState
from tests.checkpointing.states import (
    BOTH,
    ROWS,
    WHOLE,
    abstract,
    assert_same,
    data_files,
    mesh,
    numbers,
    placed,
    state,
)

#: Where one array cannot be read, Orbax gives up the others, and tensorstore complains of that in
#: its own threads.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2; tests copy it."""
    folder = tmp_path_factory.mktemp("good")
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(
                step,
                placed(state(step), mesh(8, 1), ROWS),
                plan=None,
                extra={"position": 100 * step},
                metrics={"loss": jnp.float32(1 / step)},
            )
    return folder


def copy_of(good: Path, folder: Path) -> Path:
    return Path(shutil.copytree(good, folder / "copy"))


@pytest.mark.parametrize(("size", "layout"), [((2, 4), BOTH), ((1, 1), WHOLE)])
def test_restores_on_any_mesh_bit_for_bit(good: Path, size: tuple[int, int], layout):
    target = abstract(state(), mesh(*size), layout)
    restored = Checkpoints(good, read_only=True).restore(target)
    assert_same(restored.state, state(2))
    assert all(
        found.sharding.is_equivalent_to(asked.sharding, asked.ndim)
        for found, asked in zip(*map(jax.tree.leaves, (restored.state, target)), strict=True)
    )
    assert (restored.step, restored.extra, restored.metrics, restored.plan, restored.findings) == (
        2,
        {"position": 200},
        {"loss": 0.5},
        None,
        (),
    )


def test_an_older_step_can_be_asked_for(good: Path):
    assert_same(
        Checkpoints(good, read_only=True).restore(abstract(state(), mesh(8, 1), ROWS), 1).state,
        state(1),
    )


@pytest.mark.parametrize("snapshot", ["device", "host"])
def test_what_is_saved_is_the_state_before_the_next_step(tmp_path: Path, snapshot: str):
    """The loop donates the state while it is being written."""
    on = mesh(8, 1)
    step = jax.jit(
        lambda s: replace(
            s,
            step=s.step + 1,
            params=jax.tree.map(lambda x: x * 2 + 1, s.params),
            opt_state=jax.tree.map(lambda x: x + 1, s.opt_state),
        ),
        donate_argnums=0,
    )
    current = placed(state(0), on, ROWS)
    expected = []
    with Checkpoints(tmp_path, Keep(newest=None), snapshot=snapshot) as checkpoints:
        for number in range(3):
            expected.append(numbers(current))
            checkpoints.save(number, current, plan=None)
            current = step(current)
        target = abstract(current, on, ROWS)
        for number in range(3):
            assert jax.tree.all(
                jax.tree.map(
                    np.array_equal,
                    numbers(checkpoints.restore(target, number).state),
                    expected[number],
                )
            )


def test_keeps_newest_best_and_one_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    small = TrainState(step=jnp.int32(0), params=jnp.zeros(2), model_state={}, opt_state=())
    with Checkpoints(tmp_path, Keep(newest=2, best="loss", every_seconds=100)) as checkpoints:
        for step, loss in enumerate([5.0, 3.0, float("nan"), 4.0, 1.0, 2.0, 6.0, 7.0]):
            now[0] += 40  # 40, 80, ..., 320
            checkpoints.save(step, small, plan=None, metrics={"loss": loss}, wait=True)
    assert checkpoints.steps() == (
        0,
        3,
        4,
        6,
        7,
    )  # 6 and 7 are the newest, 4 is the best; 0, 3 and 6 are at least 100 s apart


def test_a_checkpoint_is_never_overwritten(good: Path, tmp_path: Path):
    with Checkpoints(copy_of(good, tmp_path)) as checkpoints:
        with pytest.raises(CheckpointError, match=r"checkpoint of step 2 .* not overwritten"):
            checkpoints.save(2, state(1), plan=None)
        assert_same(checkpoints.restore(abstract(state(), mesh(1, 1), WHOLE)).state, state(2))


def flip(*paths: Path) -> None:
    for path in paths:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 16
        path.write_bytes(content)


def truncate(*paths: Path) -> None:
    for path in paths:
        path.write_bytes(path.read_bytes()[:-40])


def delete(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def redate(path: Path) -> None:
    """Changes a number of a description, which stays one."""
    data = json.loads(path.read_text())
    data["content"]["time"] += 1.0
    path.write_text(json.dumps(data))


DAMAGE = {
    "bits-in-arrays": lambda at: flip(*data_files(at)),
    "truncated": lambda at: truncate(*data_files(at)),
    "files-gone": lambda at: delete(*data_files(at)),
    "bit-in-manifest": lambda at: flip(at / "state" / "manifest.ocdbt"),
    "bit-in-description": lambda at: flip(at / "about" / "metadata"),
    "number-in-description": lambda at: redate(at / "about" / "metadata"),
    "description-truncated": lambda at: truncate(at / "about" / "metadata"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_said_and_the_one_before_is_used(good: Path, tmp_path: Path, damage):
    folder = copy_of(good, tmp_path)
    damage(folder / "2")
    with Checkpoints(folder, Keep(newest=2)) as checkpoints:
        target = abstract(state(), mesh(2, 4), BOTH)
        with pytest.raises(CheckpointError, match=r"step 2.*\n.*one of \[1\]"):
            checkpoints.restore(target, 2)
        restored = checkpoints.restore(target)
        assert_same(restored.state, state(1))
        (finding,) = restored.findings
        assert finding.code == "checkpoint-damaged"
        assert "step 2" in finding.message
        assert finding.where.endswith("2.damaged")
        assert (folder / "2.damaged" / "about").is_dir() and checkpoints.steps() == (1,)


def test_a_damaged_one_leaves_its_place_and_does_not_count(good: Path, tmp_path: Path):
    folder = copy_of(good, tmp_path)
    flip(folder / "2" / "about" / "metadata")
    with Checkpoints(folder, Keep(newest=2)) as checkpoints:
        checkpoints.restore(abstract(state(), mesh(1, 1), WHOLE))
        for step in (2, 3):
            checkpoints.save(step, state(step), plan=None, wait=True)
        assert checkpoints.steps() == (2, 3) and (folder / "2.damaged").is_dir()


@pytest.mark.parametrize(
    "path", ["params.kernel", "opt_state.0.nu.embedding", "model_state.dropout.key"]
)
def test_a_flipped_bit_is_found_where_orbax_finds_none(good: Path, tmp_path: Path, path: str):
    """One bit of one array is changed in what Orbax has written, with all of Orbax's own sums
    right.
    """
    folder = copy_of(good, tmp_path)
    options = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in named_leaves(state())}
    arrays = ocp.PyTreeCheckpointer().restore(folder / "2" / "state", restore_args=options)
    changed = np.array(arrays[path])
    changed.view(np.uint8).reshape(-1)[3] ^= 64
    ocp.PyTreeCheckpointer().save(folder / "2" / "state", {**arrays, path: changed}, force=True)
    restored = Checkpoints(folder, read_only=True).restore(abstract(state(), mesh(8, 1), ROWS))
    assert restored.step == 1 and path in restored.findings[0].message
    assert (folder / "2").is_dir()  # for reading alone: nothing is renamed


def test_none_is_good(good: Path, tmp_path: Path):
    folder = copy_of(good, tmp_path)
    for step in (1, 2):
        truncate(*data_files(folder / str(step)))
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* is good:\n  - step 2: .*\n  - step 1: "
    ):
        Checkpoints(folder, read_only=True).restore(abstract(state(), mesh(8, 1), ROWS))
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == (1, 2)


def test_a_copy_under_the_name_of_another_step_is_none_of_that_step(good: Path, tmp_path: Path):
    folder = copy_of(good, tmp_path)
    shutil.copytree(folder / "1", folder / "9")
    target = abstract(state(), mesh(8, 1), ROWS)
    with pytest.raises(
        CheckpointError,
        match=(
            r"it is the checkpoint of step 1 under another name; what was saved at step 9 is not in"
            r" it\nTry: one of \[1, 2\]"
        ),
    ):
        Checkpoints(folder, read_only=True).restore(target, 9)
    with Checkpoints(folder, Keep(newest=2)) as checkpoints:
        restored = checkpoints.restore(target)
        assert restored.step == 2
        assert [finding.code for finding in restored.findings] == ["checkpoint-damaged"]
        assert (folder / "9.damaged").is_dir()
        shutil.copytree(folder / "2", folder / "1000")  # which counts for no rule of what stays
        checkpoints.save(3, placed(state(3), mesh(8, 1), ROWS), plan=None, wait=True)
        assert checkpoints.steps() == (2, 3, 1000)
    shutil.rmtree(folder / "2")
    shutil.rmtree(folder / "3")
    with pytest.raises(
        CheckpointError, match=r"step 1000: it is the checkpoint of step 2 under another name"
    ):
        Checkpoints(folder, read_only=True).restore(target)


def test_no_checkpoint_at_all(tmp_path: Path, good: Path):
    target = abstract(state(), mesh(8, 1), ROWS)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in"):
        Checkpoints(tmp_path / "new").restore(target)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7.*\n.*\[1, 2\]"):
        Checkpoints(good, read_only=True).restore(target, 7)


def test_another_model_is_said_in_full(good: Path):
    other = state()
    other = replace(
        other,
        params={
            "embedding": other.params["embedding"].T,
            "kernel": other.params["kernel"],
            "bias": other.params["scale"],
        },
    )
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(good, read_only=True).restore(abstract(other, mesh(8, 1), WHOLE))
    text = str(caught.value)
    assert "of another model" in text
    assert "params.bias is not in the checkpoint" in text
    assert "params.scale is in the checkpoint alone" in text
    assert "params.embedding is float32[64, 32] in the checkpoint, float32[32, 64] here" in text


def test_another_optimizer_is_said_and_the_parameters_can_be_had(good: Path):
    other = state(optimizer=optax.sgd(0.1, momentum=0.9))
    with pytest.raises(
        CheckpointError,
        match=(
            r"of another optimizer(.|\n)*opt_state.0.mu.embedding is in the checkpoint"
            r" alone(.|\n)*parameters_only=True"
        ),
    ):
        Checkpoints(good, read_only=True).restore(abstract(other, mesh(8, 1), ROWS))


def test_another_dtype_is_cast_and_said(good: Path):
    target = abstract(state(), mesh(8, 1), ROWS)
    wanted = target.params["embedding"]
    target.params["embedding"] = jax.ShapeDtypeStruct(
        wanted.shape, jnp.bfloat16, sharding=wanted.sharding
    )
    restored = Checkpoints(good, read_only=True).restore(target)
    np.testing.assert_array_equal(
        restored.state.params["embedding"], state(2).params["embedding"].astype(jnp.bfloat16)
    )
    assert [finding.code for finding in restored.findings] == [
        "checkpoint-dtype"
    ] and "params.embedding float32 -> bfloat16" in restored.findings[0].where


def test_a_target_says_where_its_arrays_live(good: Path):
    with pytest.raises(CheckpointError, match=r"no sharding for .*params.embedding"):
        Checkpoints(good, read_only=True).restore(jax.eval_shape(lambda: state()))


def test_what_cannot_be_saved_is_said_before_anything_is_written(tmp_path: Path):
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match=r"extra is not plain data"),
    ):
        checkpoints.save(1, state(), plan=None, extra={"position": np.zeros(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["owner"]


def test_a_file_in_place_of_the_folder(tmp_path: Path):
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*runs"):
        Checkpoints(tmp_path / "runs")
    assert (tmp_path / "runs").read_text() == "not a folder"


def test_the_description_is_plain_json(good: Path):
    data = json.loads((good / "2" / "about" / "metadata").read_text())["content"]
    assert data["step"] == 2
    assert data["arrays"]["params.kernel"]["dtype"] == "bfloat16"
    assert data["arrays"]["model_state.streams"]["key"] == "rbg"


@pytest.mark.parametrize(
    "wrong",
    [
        {"newest": 0},
        {"every_seconds": -1},
        {"best": "loss", "best_mode": "least"},
        {"best_count": 0},
    ],
)
def test_senseless_rules_are_refused(wrong):
    with pytest.raises(
        CheckpointError, match=next(iter(wrong)) if len(wrong) == 1 else "best_mode"
    ):
        Keep(**wrong)
