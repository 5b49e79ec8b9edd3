from __future__ import annotations

import io
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from shardlib import models
from shardlib.data.batches import Loader
from shardlib.errors import (
    MissingFileError,
    ModelError,
    RunError,
    StoppedError,
    TopologyError,
    TrainingError,
)
from shardlib.processes.machine import simulate_cpu_devices
from shardlib.training.display import generate
from shardlib.training.fit import train
from shardlib.training.settings import TrainConfig, TrainResult

CARD = (
    "vocab_size = 256\nlayers = 2\nembed = 32\nheads = 4\nkv_heads = 2\nhead_dim = 8\nmlp ="
    " 64\nmax_seq = 64\ntied = true\ncompute_dtype = 'float32'\n"
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("training")
    (folder / "tiny.toml").write_text(CARD)
    generator = np.random.default_rng(0)
    lines = [f"value_{n} = {n * 7} + {n}\n" for n in generator.integers(0, 100, 2000)]
    (folder / "text.txt").write_text("".join(lines))
    return TrainConfig(
        data=folder / "text.txt",
        model=str(folder / "tiny.toml"),
        steps=60,
        batch=16,
        seq=32,
        lr=1e-2,
        sample_bytes=40,
        json=True,
    )


@pytest.fixture(scope="module")
def run(config: TrainConfig) -> tuple[TrainResult, str]:
    shown = io.StringIO()
    return train(config, Console(file=shown, width=100)), shown.getvalue()


@pytest.mark.long
def test_it_learns_more_than_pairs(run: tuple[TrainResult, str]):
    result, _ = run
    assert result.steps == len(result.losses) == 60
    assert result.losses[0] > 5 > result.bigram_loss > result.validation_loss


@pytest.mark.long
def test_it_says_what_it_did(run: tuple[TrainResult, str]):
    result, shown = run
    for text in (
        "60/60",
        "a byte bigram model has",
        "examples of 32 bytes, ",
        "predicted",
        "measured / predicted",
        "peak memory of a device",
        "def ",
    ):
        assert text in shown
    assert len(result.sample.encode()) >= 40
    assert result.measured.device_bytes > 0
    assert result.measured.step_seconds > 0
    assert result.plan.mesh.devices == 8
    assert result.predicted.step_seconds == result.plan.estimate.step_seconds


@pytest.mark.long
def test_quiet_shows_the_result_alone(config: TrainConfig):
    shown = io.StringIO()
    train(
        replace(config, quiet=True, json=False, sample_bytes=0, steps=2, pin={"mesh": {"data": 8}}),
        Console(file=shown, width=100),
    )
    assert shown.getvalue().startswith("validation loss ") and "measured" in shown.getvalue()


@pytest.mark.long
def test_json_is_the_last_line(config: TrainConfig, capsys: pytest.CaptureFixture[str]):
    result = train(replace(config, steps=2, sample_bytes=0, pin={"mesh": {"data": 8}}))
    out = capsys.readouterr().out
    data = json.loads(out.splitlines()[-1])
    assert out.count("\n") == 1
    assert {
        "validation_loss",
        "bigram_loss",
        "tokens_per_second",
        "predicted",
        "measured",
        "plan",
        "steps",
        "parameters",
    } <= data.keys()
    assert data["plan"]["mesh"] == {"data": 8} and data["validation_loss"] == result.validation_loss
    assert data["parameters"] == 256 * 32 + 2 * (32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 64 + 64) + 32


@pytest.mark.long
def test_loss_that_is_not_finite(config: TrainConfig):
    with pytest.raises(TrainingError, match="Try: a learning rate below 1e\\+30") as caught:
        train(replace(config, steps=8, lr=1e30, json=False, quiet=True, pin={"mesh": {"data": 8}}))
    assert "of 8 is " in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not-kept"])
def test_interruption_says_where(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: bool
):
    shown, real = io.StringIO(), Loader.__next__

    def interrupted(self: Loader) -> Any:
        step, batch = real(self)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step, batch

    monkeypatch.setattr(Loader, "__next__", interrupted)
    asked = replace(
        config,
        steps=5,
        json=False,
        pin={"mesh": {"data": 8}},
        run=tmp_path / "run" if kept else None,
    )
    with pytest.raises(StoppedError if kept else KeyboardInterrupt):
        train(asked, Console(file=shown, width=200))
    assert "stopped by SIGINT after 3 of 5 steps, loss " in shown.getvalue()
    assert (
        "step 3 is saved, and the same command goes on there" if kept else "nothing was saved"
    ) in shown.getvalue()


@pytest.mark.long
def test_all_that_is_another_is_listed_at_once(config: TrainConfig, tmp_path: Path):
    """Before anything takes time; and whoever does what the message says, goes on."""
    small = replace(
        config,
        steps=4,
        sample_bytes=0,
        quiet=True,
        json=False,
        pin={"mesh": {"data": 8}},
        run=tmp_path / "run",
    )
    train(small)
    (tmp_path / "text.txt").write_text("something else, and much of it\n" * 2000)
    for other, names in (
        (replace(small, seed=1, batch=32, data=tmp_path / "no"), "batch,seed"),
        (replace(small, steps=8), "steps,lr"),
        (replace(small, steps=8, lr=0.5, seed=3, data=tmp_path / "text.txt"), "steps,lr,seed,data"),
    ):
        with pytest.raises(RunError) as caught:
            train(other)
        assert f"--allow-changes {names}, or" in str(caught.value)
        assert str(caught.value).count("\n  - ") == names.count(",") + 1
    assert train(replace(small, steps=8, allow_changes=("steps", "lr"))).steps == 8


def test_what_goes_wrong_before_a_run_begins(
    config: TrainConfig, tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    shown = io.StringIO()
    with pytest.raises(MissingFileError):
        train(replace(config, data=tmp_path / "no", run=tmp_path / "run"), Console(file=shown))
    assert shown.getvalue() == "" and not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("text")
    with pytest.raises(RunError, match=r"cannot be written: Not a directory"):
        train(replace(config, run=tmp_path / "file" / "run"), Console(file=shown))
    assert shown.getvalue() == "" and not [
        one for one in recwarn if "compilation cache" in str(one.message)
    ]


@pytest.mark.long
def test_devices_that_are_simulated_are_said_to_be(config: TrainConfig):
    shown = io.StringIO()
    train(
        replace(
            config,
            steps=1,
            sample_bytes=0,
            json=False,
            topology="h100:8",
            pin={"mesh": {"data": 8}},
        ),
        Console(file=shown, width=200),
    )
    assert (
        "there is no h100:8 here: the plan for it is carried out on simulated devices of the CPU"
        in shown.getvalue()
    )


@pytest.mark.long
def test_fewer_devices_than_the_machine_has(config: TrainConfig):
    assert len(jax.devices()) == 8  # from here on their number cannot change
    result = train(
        replace(
            config, steps=1, sample_bytes=0, quiet=True, json=False, topology="cpu:16", elastic=True
        )
    )
    assert result.plan.topology == "cpu:8"
    with pytest.raises(TopologyError, match="16 CPU devices were asked for"):
        train(replace(config, steps=1, topology="cpu:16"))


def test_bad_requests(config: TrainConfig, tmp_path: Path):
    with pytest.raises(ModelError) as caught:
        TrainConfig(steps=0, batch=0, lr=-1.0)
    assert (
        str(caught.value)
        == "the training run is not usable:\n  - steps is 0; it must be at least 1\n  - batch is 0;"
        " it must be at least 1\n  - lr is -1.0; it must be positive"
    )
    (tmp_path / "small.toml").write_text(CARD.replace("256", "100", 1))
    with pytest.raises(
        ModelError, match="the model 'small' has a vocabulary of 100; bytes need 256"
    ):
        train(replace(config, model=str(tmp_path / "small.toml")))
    with pytest.raises(
        ModelError, match="the model 'tiny' takes sequences of 1 to 64 tokens, not 65"
    ):
        train(replace(config, seq=65))
    with pytest.raises(MissingFileError, match="there is no training data at"):
        train(replace(config, data=tmp_path / "no"))


def test_devices_that_cannot_change_any_more():
    simulate_cpu_devices(len(jax.devices()))
    with pytest.raises(
        TopologyError, match="3 CPU devices were asked for, and JAX already runs on 8 of cpu\n"
    ):
        simulate_cpu_devices(3)


def test_generation_is_that_of_a_plain_loop():
    config = models.TransformerConfig(
        name="t",
        vocab_size=256,
        layers=1,
        embed=16,
        heads=2,
        kv_heads=2,
        head_dim=8,
        mlp=16,
        max_seq=8,
        compute_dtype="float32",
    )
    model = nnx.jit(lambda: models.build(config)[0](nnx.Rngs(0)))()
    written = generate(model, b"abc", 12, window=8, seed=0, temperature=1e-4)
    text, forward = b"abc", nnx.jit(lambda model, tokens: model(tokens))
    for _ in range(12):
        window = text[-8:]
        padded = np.zeros((1, 8), np.int32)
        padded[0, : len(window)] = list(window)
        text += bytes([int(np.asarray(forward(model, padded))[0, len(window) - 1].argmax())])
    assert written == text[3:]
