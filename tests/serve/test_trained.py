"""A run is served as it is: `shardlib generate` continues a text with its newest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

import shardlib
from shardlib import models
from shardlib.annotation.model import read
from shardlib.checkpointing.store import Checkpoints
from shardlib.errors import RunError
from shardlib.serve.loading import named, trained_run
from shardlib.training.fit import train
from shardlib.training.run import RunFolder
from shardlib.training.settings import TrainConfig
from shardlib.untrusted.data import printable
from tests.serve.cards import card
from tests.serve.test_meshes import greedy

CARD = card(vocab=256, layers=2)


def made(home: Path, **more: Any) -> Path:
    """A run of six steps."""
    (home / "tiny.toml").write_text(CARD)
    (home / "text.txt").write_text("".join(f"value_{n} = {n * 7} + {n}\n" for n in range(2000)))
    config = TrainConfig(
        data=home / "text.txt",
        model=str(home / "tiny.toml"),
        steps=6,
        batch=8,
        seq=32,
        topology="cpu:8",
        sample_bytes=0,
        run=home / "run",
        quiet=True,
        **{"save_every": 3, **more},
    )
    train(config, Console(quiet=True))
    return home / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def averaging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps an average, and the checkpoint of every step."""
    home = tmp_path_factory.mktemp("averaging")
    return made(home, average=0.7, save_every=1, keep=6, pin={"mesh": {"fsdp": 4}, "zero": 3})


@pytest.mark.long
def test_a_text_is_continued_as_the_model_would(folder: Path, shell: Any):
    words = f"generate {folder} --prompt value_ --most 20 --temperature 0".split()
    code, out, _ = shell(*words, "--json")
    assert code == 0
    found = json.loads(out)
    run = trained_run(folder)
    assert found["version"] == "step 6"
    assert run.step == 6
    model = read(models.build(run.model)[0]).rebuild(*run.weights)
    logits = jax.jit(lambda tokens: model(tokens))
    assert found["tokens"] == greedy(lambda tokens: logits(tokens)[..., :256], list(b"value_"), 20)
    text = bytes(found["tokens"]).decode("utf-8", "replace")
    assert shell(*words)[:2] == (0, f"value_{printable(text)}\n")


@pytest.mark.long
def test_what_is_guessed_ahead_changes_no_answer(folder: Path, shell: Any):
    def text(more: str) -> str:
        words = f"generate {folder} --prompt value_ --most 20 --seed 3 --json {more}"
        return json.loads(shell(*words.split())[1])["text"]

    assert text("") == text("--drafts 3") == text(f"--draft {folder} --seconds 600") != ""
    assert text("--seconds 0.000001") == ""


@pytest.mark.long
def test_a_run_gives_the_weights_of_its_newest_checkpoint(folder: Path):
    found = named(str(folder))
    assert (found.name, found.version, found.warning) == ("run", "step 6", "")
    assert found.newer is not None and found.newer("step 6") is None
    fresh = found.newer("step 3")
    assert fresh is not None and fresh[1] == "step 6"
    jax.tree.map(np.testing.assert_array_equal, fresh[0], found.weights)
    half = folder / "checkpoints" / "9.orbax-checkpoint-tmp"  # of a process that was killed
    half.mkdir()
    (folder / "checkpoints" / "8").mkdir()
    assert found.newer("step 6") is None
    assert named(str(folder)).version == "step 6"


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--most", "64"], "1 tokens of the prompt and 64 of the answer are more"),
        (["--prompt", "a", "--temperature", "-1"], "temperature is -1"),
        (["--prompt", "a", "--top-p", "0"], "top_p is 0"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_cannot_be_answered_is_said(folder: Path, words: list[str], said: str, shell: Any):
    code, _, err = shell("generate", str(folder), *words)
    assert (code, said in err) == (2, True), err


@pytest.mark.long
def test_the_average_of_a_run_is_served(averaging: Path, shell: Any):
    """Against NumPy, from the parameters of every step."""
    config = trained_run(averaging).model
    init, loss = models.build(config)
    batch = models.example_batch(config, 8, 32)
    program = shardlib.compile(init, loss, optax.sgd(1.0), batch, topology="cpu:1")
    wanted = [np.asarray(one, np.float64) for one in jax.tree.leaves(program.init(seed=0).params)]
    with Checkpoints(RunFolder(averaging).checkpoints, read_only=True) as checkpoints:
        for step in range(1, 7):
            params = checkpoints.restore(program, step, parameters_only=True).state.params
            wanted = [
                0.7 * old + 0.3 * np.asarray(new, np.float64)
                for old, new in zip(wanted, jax.tree.leaves(params), strict=True)
            ]
    found = named(str(averaging), average=True)
    assert found.version == "step 6"
    assert found.newer is not None
    fresh = found.newer("step 5")
    assert fresh is not None
    for weights in (found.weights, fresh[0]):
        assert isinstance(weights, tuple)
        for one, like in zip(jax.tree.leaves(weights[0]), wanted, strict=True):
            np.testing.assert_allclose(one, like, rtol=1e-5, atol=1e-6)
    words = f"generate {averaging} --prompt value_ --most 9 --temperature 0 --json".split()
    said = [json.loads(shell(*words, *more)[1])["text"] for more in ((), ("--average",))]
    assert said[0] != said[1]


def test_an_average_that_is_not_there_is_said(folder: Path, shell: Any):
    code, _, err = shell("generate", str(folder), "--prompt", "a", "--average")
    assert code == 2 and "keeps no average of its parameters" in err


def test_a_folder_without_a_run_is_said(tmp_path: Path):
    with pytest.raises(RunError, match=r"is not a folder of a run: it has no run\.json"):
        trained_run(tmp_path)
    (tmp_path / "run.json").write_text(
        json.dumps({"format": 1, "run": {}, "traced": {}, "versions": {}})
    )
    with pytest.raises(RunError, match="is not a run of shardlib train"):
        trained_run(tmp_path)
