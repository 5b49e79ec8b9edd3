"""States of islands in checkpoints: written once, and restored bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from shardlib.checkpointing.store import Checkpoints
from shardlib.errors import CheckpointError
from tests.checkpointing.states import assert_same, data_files, numbers
from tests.islands.small import WIDTH, program, stepped

#: Where one array cannot be read, Orbax gives up the others, and tensorstore complains of that in
#: its own threads.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def made() -> Any:
    return program("zero-3")


@pytest.fixture(scope="module")
def saved(made: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Checkpoints of step 4, at a meeting, and of step 6, between two; the states."""
    folder = tmp_path_factory.mktemp("islands")
    states: list[Any] = []
    state = made.init(0)
    with Checkpoints(folder) as checkpoints:
        checkpoints.prepare(made)
        for first, last in ((0, 4), (4, 6)):
            state = stepped(made, state, first, last)
            states.append(numbers(state))
            checkpoints.save(last, state, plan=made.plan, wait=True)
        assert len(checkpoints._camera._programs) == 1  # what was prepared was what was needed
    return folder, states


@pytest.mark.parametrize("number", [0, 1], ids=["at-a-meeting", "between"])
def test_islands_are_restored_bit_for_bit(made: Any, saved: Any, number: int) -> None:
    folder, states = saved
    restored: Any = Checkpoints(folder, read_only=True).restore(made, (4, 6)[number])
    assert_same(numbers(restored.state), states[number])
    assert restored.findings == () and restored.plan.exchange == made.exchange
    for leaf, asked in zip(*map(jax.tree.leaves, (restored.state, made.state)), strict=True):
        assert np.ndim(leaf) == 0 or leaf.sharding.is_equivalent_to(asked.sharding, leaf.ndim)


@pytest.mark.long
@pytest.mark.parametrize(
    "exchange",
    [
        "diloco:2:4:fragments=2:wire=int8",
        "gossip:2:exponential",
        "compressed:2:powersgd:rank=1",
        "compressed:2:topk:density=0.1:warm_up=4",
        "compressed:2:sign",
        "diloco:2:4:delay=3",
        "diloco:2:4:fragments=2:delay=2:wire=int8",
        "diloco:2:4:fragments=2:delay=2:wire=int4",
        "diloco:2:4:delay=2:wire=bfloat16",
    ],
)
def test_what_is_resumed_goes_on_bit_for_bit(exchange: str, tmp_path: Path) -> None:
    """With a delay, also what was on its way when it was saved."""
    made: Any = program("two", exchange=exchange)
    state = stepped(made, made.init(0), 0, 5)
    assert "delay" not in exchange or int(state.exchange.sent_at) == 4
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, plan=made.plan, wait=True)
    whole = stepped(made, state, 5, 9)
    again: Any = Checkpoints(tmp_path, read_only=True).restore(made, 5)
    assert_same(numbers(stepped(made, again.state, 5, 9)), numbers(whole))


def test_every_array_is_written_once(saved: Any) -> None:
    folder, (_, state) = saved
    path, orbax = folder / "6" / "state", ocp.PyTreeCheckpointer()
    metadata: Any = orbax.metadata(path).item_metadata
    names = list(metadata.tree)
    arrays = orbax.restore(
        path, restore_args=dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))
    )
    one, other = (island.params["up"]["kernel"] for island in state.islands)
    np.testing.assert_array_equal(arrays["islands.params.up.kernel"], np.concatenate([one, other]))
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(arrays["frozen.table"], state.islands[0].params["table"])
    assert [n for n in names if "table" in n] == ["frozen.table"]
    assert arrays["outer.momentum.down.kernel"].shape == (16, WIDTH)
    keys = [np.asarray(island.model_state["drop"]["rngs"]["key"]) for island in state.islands]
    np.testing.assert_array_equal(arrays["islands.model_state.drop.rngs.key"], np.stack(keys))


def test_a_damaged_one_is_said_and_the_one_before_is_used(
    made: Any, saved: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved[0], tmp_path / "copy"))
    for path in data_files(folder / "6"):
        path.write_bytes(path.read_bytes()[:-40])
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(CheckpointError, match=r"step 6.*\n.*one of \[4\]"):
            checkpoints.restore(made, 6)
        alone = program("zero-3", exchange=None, topology="cpu:4")
        with pytest.raises(CheckpointError, match=r"step 6.*\n.*one of \[4\]"):
            checkpoints.restore(alone, 6)
        restored = checkpoints.restore(made)
        assert restored.step == 4 and restored.findings[0].code == "checkpoint-damaged"
        assert_same(numbers(restored.state), saved[1][0])
        assert (folder / "6.damaged").is_dir()


@pytest.mark.long
def test_the_optimizer_starts_anew_where_asked(saved: Any) -> None:
    other = program("zero-3", optimizer=optax.sgd(0.1, momentum=0.9))
    checkpoints = Checkpoints(saved[0], read_only=True)
    with pytest.raises(CheckpointError, match="of another optimizer"):
        checkpoints.restore(other)
    restored: Any = checkpoints.restore(other, parameters_only=True)
    state = saved[1][1]
    assert_same(numbers(restored.state.exchange), state.exchange)
    for found, wanted, fresh in zip(
        restored.state.islands, state.islands, other.init(0).islands, strict=True
    ):
        assert_same(numbers(found.inference), wanted.inference)
        assert_same(numbers(found.opt_state), numbers(fresh.opt_state))
