"""`shardlib train` on islands: a run in a folder, and what it has learned."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from shardlib.checkpointing.store import Checkpoints
from shardlib.data.open import read
from shardlib.errors import RunError
from shardlib.training.byte_program import byte_model, planned
from shardlib.training.display import generate
from shardlib.training.fit import PROMPT, VALIDATION_BATCHES, train
from shardlib.training.measures import by_step, read_records
from shardlib.training.run import RunFolder
from shardlib.training.settings import TrainConfig
from tests.checkpointing.states import numbers
from tests.training.test_loop import CARD


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("islands")
    (folder / "tiny.toml").write_text(CARD)
    numbers = np.random.default_rng(0).integers(0, 100, 2000)
    (folder / "text.txt").write_text("".join(f"value_{n} = {n * 7} + {n}\n" for n in numbers))
    return TrainConfig(
        data=folder / "text.txt",
        model=str(folder / "tiny.toml"),
        steps=9,
        batch=16,
        seq=32,
        lr=1e-2,
        sample_bytes=8,
        run=folder / "run",
        save_every=4,
        pin={"exchange": "diloco:2:3:momentum=0.5", "zero": 3},
    )


def shown_of(config: TrainConfig) -> tuple[Any, str]:
    shown = io.StringIO()
    return train(config, Console(file=shown, width=100)), shown.getvalue()


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


def test_it_goes_on_with_the_same_words_and_no_others(config: TrainConfig) -> None:
    result, shown = shown_of(replace(config, steps=9))
    assert "the run has done all of its 9 steps" in shown and result.steps == 9
    other = replace(config, pin={"exchange": "diloco:2:4:momentum=0.5", "zero": 3})
    with pytest.raises(RunError, match="exchange is diloco every=4"):
        train(other, Console(quiet=True))
