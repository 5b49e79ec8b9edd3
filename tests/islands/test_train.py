"""`shardlib train` on islands: a run in a folder, and what it has learned."""

from __future__ import annotations

import functools
import io
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

import shardlib
from shardlib import models
from shardlib.checkpointing import huggingface
from shardlib.checkpointing.store import Checkpoints
from shardlib.data.open import read
from shardlib.errors import RunError
from shardlib.training.display import generate
from shardlib.training.fit import PROMPT, VALIDATION_BATCHES, byte_model, planned, train
from shardlib.training.measures import Policy, by_step, read_records
from shardlib.training.run import RunFolder
from shardlib.training.settings import TrainConfig
from tests.checkpointing.states import assert_same, numbers
from tests.checkpointing.test_huggingface import CONFIGS, written
from tests.islands import test_diloco
from tests.islands.small import program, rows
from tests.processes import child
from tests.training.test_loop import CARD


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "tiny.toml").write_text(CARD)
    numbers = np.random.default_rng(0).integers(0, 100, 2000)
    (tmp_path / "text.txt").write_text("".join(f"value_{n} = {n * 7} + {n}\n" for n in numbers))
    return TrainConfig(
        data=tmp_path / "text.txt",
        model=str(tmp_path / "tiny.toml"),
        steps=9,
        batch=16,
        seq=32,
        lr=1e-2,
        sample_bytes=8,
        run=tmp_path / "run",
        save_every=4,
        pin={"exchange": "diloco:2:3:momentum=0.5", "zero": 3},
    )


def shown_of(config: TrainConfig) -> tuple[Any, str]:
    shown = io.StringIO()
    return train(config, Console(file=shown, width=100)), shown.getvalue()


@pytest.mark.long
def test_a_run_of_islands_is_validated_with_the_outer_parameters(config: TrainConfig) -> None:
    result, shown = shown_of(config)
    assert result.steps == 9 and result.losses[-1] < result.losses[0]
    assert result.plan.mesh["island"] == 2 and "9/9" in shown
    assert result.measured.device_bytes > 0
    program: Any = planned(config, byte_model(config), Console(quiet=True))
    folder = RunFolder(Path(str(config.run)))
    restored: Any = Checkpoints(folder.checkpoints, read_only=True).restore(program)
    outer = program.outer(restored.state)
    for one, other in zip(
        jax.tree.leaves(numbers(outer.params)), restored.state.exchange.params, strict=True
    ):
        np.testing.assert_array_equal(one, np.asarray(other))
    model = program.programs[0].model.rebuild(numbers(outer.params), outer.model_state)
    text = generate(model, PROMPT.encode(), 8, window=32, seed=0)
    assert result.sample == text.decode("utf-8", "replace")
    held = read(config.data, seq=32, seed=0, split="validation")
    expected = [
        float(program.programs[0].evaluate(outer, held.batch(16 * n, 16))["cross_entropy"])
        for n in range(VALIDATION_BATCHES)
    ]
    assert result.validation_loss == pytest.approx(np.mean(expected), rel=1e-6)
    written = by_step(read_records(folder.metrics))
    for step in range(1, 10):
        of_islands = [written[step][f"loss_of_island_{n}"] for n in (1, 2)]
        assert written[step]["loss"] == pytest.approx(np.mean(of_islands), rel=1e-6)
        assert written[step]["meetings"] == step // 3
    result, shown = shown_of(config)  # the same words again
    assert "the run has done all of its 9 steps" in shown and result.steps == 9
    other = replace(config, pin={"exchange": "diloco:2:4:momentum=0.5", "zero": 3})
    with pytest.raises(RunError, match="exchange is diloco every=4"):
        train(other, Console(quiet=True))


# Runs of islands in a folder: what was interrupted has the bits of what was not.

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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.processes
def test_a_process_that_is_killed_is_followed_by_another(tmp_path: Path) -> None:
    process = child("-m", "tests.islands.child_run", tmp_path, 10)
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


@pytest.mark.long
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


@pytest.mark.long
def test_a_dataset_gives_what_a_function_gives() -> None:
    pin = {"mesh": {"fsdp": 2, "tensor": 2}, "exchange": "diloco:2:3"}
    made: Any = test_diloco.compiled(optax.adamw(1e-2), **pin)
    found, wanted = (shardlib.fit(made, data, steps=7) for data in (Numbers(), test_diloco.rows))
    assert found.losses == wanted.losses
    assert_same(numbers(found.state), numbers(wanted.state))


# Models of islands as files of Hugging Face: what is written are the outer parameters, and all
# islands start with what is read.


@pytest.mark.long
def test_outer_parameters_are_written_and_all_islands_start_with_them(tmp_path: Path) -> None:
    config: Any = models.load(str(written(CONFIGS["llama-2-7b"], tmp_path)))
    init, loss = models.build(config)
    draw = np.random.default_rng(0)
    batch = jax.tree.map(
        lambda leaf: draw.integers(0, 8, leaf.shape).astype(leaf.dtype),
        models.example_batch(config, 8, 8),
    )

    def compiled(topology: str, **pin: Any) -> Any:
        return shardlib.compile(
            init, loss, optax.adam(1e-2), batch, topology=topology, pin={"zero": 3, **pin}
        )

    made = compiled("cpu:8", mesh={"fsdp": 4}, exchange="diloco:2:2")
    state, outer = made.init(5), None
    for step in range(3):
        state, _ = made.step(state, batch)
        outer = numbers(state.exchange.params) if step == 1 else outer
    huggingface.save(made, state, tmp_path / "out", config=tmp_path / "config.json")
    one = compiled("cpu:4", mesh={"fsdp": 4})
    alone = huggingface.load(tmp_path / "out", one).state
    assert_same([*jax.tree.leaves(numbers(alone.params))], outer)
    again: Any = huggingface.load(tmp_path / "out", made).state
    for island in again.islands:
        assert_same(numbers(island.params), numbers(alone.params))
        assert_same(numbers(island.opt_state), numbers(alone.opt_state))
    assert_same(numbers(again.exchange.params), outer)
    assert not any(np.any(np.asarray(leaf)) for leaf in again.exchange.momentum)
    after, _ = made.step(again, batch)
    assert after.step == 1
