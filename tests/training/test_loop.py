from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from shardlib import models
from shardlib.errors import MissingFileError, ModelError, TopologyError, TrainingError
from shardlib.training import loop
from shardlib.training.devices import simulate_cpu_devices
from shardlib.training.loop import TrainConfig, TrainResult, train
from shardlib.training.sampling import generate

CARD = "vocab_size = 256\nlayers = 2\nembed = 32\nheads = 4\nkv_heads = 2\nhead_dim = 8\nmlp = 64\nmax_seq = 64\ntied = true\ncompute_dtype = 'float32'\n"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("training")
    (folder / "tiny.toml").write_text(CARD)
    generator = np.random.default_rng(0)
    lines = [f"value_{n} = {n * 7} + {n}\n" for n in generator.integers(0, 100, 2000)]
    (folder / "text.txt").write_text("".join(lines))
    return TrainConfig(data=folder / "text.txt", model=str(folder / "tiny.toml"), steps=60, batch=16, seq=32, lr=1e-2, sample_bytes=40, json=True)


@pytest.fixture(scope="module")
def run(config: TrainConfig) -> tuple[TrainResult, str]:
    shown = io.StringIO()
    return train(config, Console(file=shown, width=100)), shown.getvalue()


def test_it_learns_more_than_pairs(run: tuple[TrainResult, str]):
    result, _ = run
    assert result.steps == len(result.losses) == 60
    assert result.losses[0] > 5 > result.bigram_loss > result.validation_loss


def test_it_says_what_it_did(run: tuple[TrainResult, str]):
    result, shown = run
    for text in ("60/60", "a byte bigram model has", "predicted", "measured / predicted", "peak memory of a device", "def "):
        assert text in shown
    assert len(result.sample.encode()) >= 40
    assert result.measured.device_bytes > 0 and result.measured.step_seconds > 0 and result.plan.mesh.devices == 8
    assert result.predicted.step_seconds == result.plan.estimate.step_seconds


def test_quiet_shows_the_result_alone(config: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    shown = io.StringIO()
    monkeypatch.setattr(loop, "_run", lambda *arguments: (run_state, [1.0], [1.0]))
    program = loop._compile(config, models.load(config.model), Console(quiet=True))
    run_state = program.init(0)
    monkeypatch.setattr(loop, "_compile", lambda *arguments: program)
    train(replace(config, quiet=True, json=False, sample_bytes=0), Console(file=shown, width=100))
    assert shown.getvalue().startswith("validation loss ") and "measured" in shown.getvalue()


def test_json_is_the_last_line(config: TrainConfig, capsys: pytest.CaptureFixture[str]):
    result = train(replace(config, steps=2, sample_bytes=0, pin={"mesh": {"data": 8}}))
    out = capsys.readouterr().out
    data = json.loads(out.splitlines()[-1])
    assert out.count("\n") == 1
    assert {"validation_loss", "bigram_loss", "tokens_per_second", "predicted", "measured", "plan", "steps", "parameters"} <= data.keys()
    assert data["plan"]["mesh"] == {"data": 8} and data["validation_loss"] == result.validation_loss
    assert data["parameters"] == 256 * 32 + 2 * (32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 64 + 64) + 32


def test_loss_that_is_not_finite(config: TrainConfig):
    with pytest.raises(TrainingError, match="Try: a learning rate below 1e\\+30") as caught:
        train(replace(config, steps=8, lr=1e30, json=False, quiet=True, pin={"mesh": {"data": 8}}))
    assert "of 8 is " in str(caught.value)


def test_interruption_says_where(config: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    real, shown = loop._finite, io.StringIO()

    def interrupted(loss: float, step: int, config: TrainConfig) -> float:
        if step == 2:
            raise KeyboardInterrupt
        return real(loss, step, config)

    monkeypatch.setattr(loop, "_finite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(replace(config, steps=5, json=False, pin={"mesh": {"data": 8}}), Console(file=shown, width=100))
    assert "stopped after 2 of 5 steps, loss " in shown.getvalue()


def test_bad_requests(config: TrainConfig, tmp_path: Path):
    with pytest.raises(ModelError) as caught:
        TrainConfig(steps=0, batch=0, lr=-1.0)
    assert str(caught.value) == ("the training run is not usable:\n  - steps is 0; it must be at least 1\n  - batch is 0; it must be at least 1\n"
                                 "  - lr is -1.0; it must be positive")
    (tmp_path / "small.toml").write_text(CARD.replace("256", "100", 1))
    with pytest.raises(ModelError, match="the model 'small' has a vocabulary of 100; bytes need 256"):
        train(replace(config, model=str(tmp_path / "small.toml")))
    with pytest.raises(ModelError, match="the model 'tiny' takes sequences of 1 to 64 tokens, not 65"):
        train(replace(config, seq=65))
    with pytest.raises(MissingFileError, match="there is no training text at"):
        train(replace(config, data=tmp_path / "no"))


def test_devices_that_cannot_change_any_more():
    simulate_cpu_devices(len(jax.devices()))
    with pytest.raises(TopologyError, match="3 CPU devices were asked for, and JAX already runs on 8 of cpu\n"):
        simulate_cpu_devices(3)


def test_generation_is_that_of_a_plain_loop():
    config = models.TransformerConfig(name="t", vocab_size=256, layers=1, embed=16, heads=2, kv_heads=2, head_dim=8, mlp=16, max_seq=8,
                                      compute_dtype="float32")
    model = nnx.jit(lambda: models.build(config)[0](nnx.Rngs(0)))()
    written = generate(model, b"abc", 12, window=8, seed=0, temperature=1e-4)
    text, forward = b"abc", nnx.jit(lambda model, tokens: model(tokens))
    for _ in range(12):
        window = text[-8:]
        padded = np.zeros((1, 8), np.int32)
        padded[0, :len(window)] = list(window)
        text += bytes([int(np.asarray(forward(model, padded))[0, len(window) - 1].argmax())])
    assert written == text[3:]
