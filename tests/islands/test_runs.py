"""Runs of islands in a folder: what was interrupted has the bits of what was not."""

from __future__ import annotations

import functools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import shardlib
from shardlib.errors import RunError
from shardlib.training.measures import Policy, by_step, read_records
from shardlib.training.run import RunFolder
from tests.checkpointing.states import assert_same, numbers
from tests.islands import test_diloco
from tests.islands.small import program, rows
from tests.processes import child

STEPS = 12


class Interrupted(Exception):
    """What a test interrupts a run with."""


def run(made: Any, folder: Path, data: Any = rows, **settings: Any) -> Any:
    kept = shardlib.Settings(run=folder, **{"save_every": 3, "loggers": (), **settings})
    return shardlib.fit(made, data, steps=STEPS, settings=kept)


DILOCO = "diloco:2:4:rate=0.5:momentum=0.8"


@functools.cache
def whole(mesh: str, exchange: str = DILOCO) -> Any:
    """A run that nothing interrupts, without a folder."""
    return shardlib.fit(program(mesh, exchange), rows, steps=STEPS)


@pytest.mark.parametrize(
    ("mesh", "exchange", "save_every"),
    [
        ("zero-1", DILOCO, 3),
        ("zero-3", DILOCO, 3),
        ("zero-3", DILOCO, 4),
        ("tensor", f"{DILOCO}:fragments=2:wire=int8", 3),
        ("two", "gossip:4:exponential:every=2", 3),
    ],
)
def test_a_run_that_fails_goes_on_bit_for_bit(
    mesh: str, exchange: str, save_every: int, tmp_path: Path
) -> None:
    """Islands meet after every fourth step: the run goes on after step 6, between two meetings, or
    after step 8, at one.
    """
    made, wanted = program(mesh, exchange), whole(mesh, exchange)

    def until(step: int) -> dict[str, np.ndarray]:
        if step == 8:
            raise Interrupted
        return rows(step)

    with pytest.raises(Interrupted):
        run(made, tmp_path, until, save_every=save_every)
    assert RunFolder(tmp_path).saved()[-1] == 2 * save_every
    found = run(made, tmp_path, save_every=save_every)
    assert found.resumed == 2 * save_every and found.losses == wanted.losses
    assert_same(numbers(found.state), numbers(wanted.state))
    if exchange == DILOCO:  # step 12 is a meeting about all parameters
        one, other = (island.params["up"]["kernel"] for island in found.state.islands)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.processes
def test_a_process_that_is_killed_is_followed_by_another(tmp_path: Path) -> None:
    process = child("tests.islands.child_run", tmp_path, 10)
    _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said
    made, wanted = program("zero-3"), whole("zero-3")
    found = run(made, tmp_path)
    assert found.resumed in (3, 6, 9) and found.losses == wanted.losses
    assert_same(numbers(found.state), numbers(wanted.state))
    events = [one["event"] for one in read_records(RunFolder(tmp_path).metrics) if "event" in one]
    assert events == ["resumed", "finished"]
    written = by_step(read_records(RunFolder(tmp_path).metrics))
    assert [written[step]["loss"] for step in range(1, STEPS + 1)] == [*wanted.losses]


def test_the_number_of_islands_is_no_other_run_and_how_they_meet_is(tmp_path: Path) -> None:
    made = program("zero-1")
    run(made, tmp_path)
    for other, says in (
        (program("zero-1", exchange="diloco:2:5:rate=0.5:momentum=0.8"), "every=5"),
        (program("zero-1", exchange=None, topology="cpu:4"), "exchange is exact"),
    ):
        with pytest.raises(RunError, match=says):
            run(other, tmp_path)
    with pytest.raises(RunError, match="the optimizer is another"):
        run(program("zero-1", optimizer=optax.sgd(0.1)), tmp_path)


def test_a_spike_is_left_out_on_its_island_alone() -> None:
    made = program("zero-1", guards=shardlib.Guards(spike=True))

    def spiky(step: int) -> dict[str, np.ndarray]:
        batch = rows(step)
        if step == 10:
            batch["y"][len(batch["y"]) // 2 :] += 1000  # of the second island
        return batch

    policy = Policy(window=8, action="skip")
    settings = shardlib.Settings(policy=policy)
    found: Any = shardlib.fit(made, spiky, steps=STEPS, settings=settings)
    assert found.steps == STEPS
    assert [int(one.opt_state[0].count) for one in found.state.islands] == [STEPS, STEPS - 1]


class Numbers:
    """A dataset with the rows of `test_diloco`."""

    fields = ("inputs", "targets")
    seq = 8

    def rows(self, position: int, rows: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        step, rest = divmod(position, test_diloco.ROWS)
        assert rest == 0
        return {name: array[rows] for name, array in test_diloco.rows(step).items()}


def test_a_dataset_gives_what_a_function_gives() -> None:
    pin = {"mesh": {"fsdp": 2, "tensor": 2}, "exchange": "diloco:2:3"}
    made: Any = test_diloco.compiled(optax.adamw(1e-2), **pin)
    found, wanted = (shardlib.fit(made, data, steps=7) for data in (Numbers(), test_diloco.rows))
    assert found.losses == wanted.losses
    assert_same(numbers(found.state), numbers(wanted.state))
