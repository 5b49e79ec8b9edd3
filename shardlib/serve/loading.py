"""Loads what is served: a run of `shardlib train` at its newest whole checkpoint, or a model by
name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import optax

from shardlib import models
from shardlib.annotation.trees import Tree
from shardlib.api import compile
from shardlib.checkpointing.store import Checkpoints
from shardlib.errors import ModelError, RunError
from shardlib.lowering.program import Program
from shardlib.models.config import TransformerConfig
from shardlib.processes.machine import user_cache
from shardlib.serve.folders import is_folder, read_folder
from shardlib.serve.served import ByteText, Newer, Served
from shardlib.training.fit import GUARDS
from shardlib.training.run import RunFolder, read_manifest
from shardlib.training.settings import TrainConfig, optimizer
from shardlib.training.states import averaged
from shardlib.untrusted.data import construct


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """The model of a run, and its weights.

    Attributes:
        model: configuration of its transformer.
        weights: (params, state of the model).
        step: of the checkpoint.
    """

    model: TransformerConfig
    weights: tuple[Tree, Tree]
    step: int


def trained_run(folder: Path, *, average: bool = False) -> TrainedRun:
    """Reads a run, also while it trains; nothing in the folder is changed."""
    run = RunFolder(folder)
    manifest = read_manifest(run.manifest)
    if manifest is None:
        raise RunError(
            f"{folder} is not a folder of a run: it has no {run.manifest.name}\nTry: one that"
            " shardlib train --run has made"
        )
    description = manifest.get("run")
    if not isinstance(description, dict) or not isinstance(description.get("model"), dict):
        raise RunError(
            f"{folder} is not a run of shardlib train, so that its model is not known\nTry:"
            " shardlib.serving.Engine(init, forward, weights=state.params)"
        )
    config = construct(
        TransformerConfig,
        {"name": folder.name or "run", **description["model"]},
        f"the model of {run.manifest}",
        RunError,
    )
    if average and "average" not in description:
        raise RunError(
            f"{folder} keeps no average of its parameters\nTry: shardlib train --average 0.999, or"
            " its parameters as they are, without --average"
        )
    program = _program(config, average=average)
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        restored = checkpoints.restore(program, parameters_only=not average)
    state = averaged(program, restored.state) if average else restored.state
    return TrainedRun(model=config, weights=(state.params, state.model_state), step=restored.step)


def _program(config: TransformerConfig, *, average: bool) -> Program:
    """A program on one device whose states are those of a run; with its optimizer, where the
    average of that counts.
    """
    init, loss = models.build(config)
    batch = models.example_batch(config, 1, min(8, config.max_seq))
    return compile(
        init,
        loss,
        optimizer(TrainConfig(average=0.5)) if average else optax.sgd(1.0),
        batch,
        topology="cpu:1",
        name=config.name,
        guards=GUARDS if average else None,
    )


def newer_step(folder: Path, step: int) -> bool:
    """Returns whether a run has a whole checkpoint of a later step."""
    steps = RunFolder(folder).saved()
    return bool(steps) and steps[-1] > step


# --------------------------------------------------------------------------------------------------
# Models by name: from a word to model, weights, tokenizer, name.
#
#     served = named("runs/a")           # the run of `shardlib train --run runs/a`
#     engine = served.engine(Capacity(longest=served.longest))
#
# A new kind of word is a function of the word that gives a `Served`, and one line in `named`.


def named(word: str, *, average: bool = False) -> Served:
    """Finds what a word names."""
    if Path(word).is_dir() and RunFolder(Path(word)).manifest.exists():
        return _run(Path(word), average=average)
    if average:
        raise RunError(
            f"{word} is not a run, so that it has no average of its parameters\nTry: it without"
            " --average"
        )
    if Path(word).is_dir() and is_folder(Path(word)):
        return read_folder(word)
    return _random(word)


def _run(folder: Path, *, average: bool) -> Served:
    """A run, as it is, also while it trains; its tokens are bytes."""
    run = trained_run(folder, average=average)

    def newer(version: str) -> tuple[Tree, str] | None:
        if not newer_step(folder, int(version.removeprefix("step "))):
            return None
        fresh = trained_run(folder, average=average)
        now = f"step {fresh.step}"
        return None if now == version else (fresh.weights, now)

    name = folder.resolve().name
    return _bytes(run.model, name, run.weights, version=f"step {run.step}", newer=newer)


def _random(word: str) -> Served:
    """A model with random weights, whose tokens are bytes."""
    config = models.load(word)
    if not isinstance(config, TransformerConfig) or config.vocab_size < 256:
        raise ModelError(
            f"{word} cannot be served: it is not a decoder that knows 256 bytes\nTry: a folder of"
            " shardlib train --run, or shardlib.serving.Engine(init, forward) in a program of your"
            " own"
        )
    return _bytes(
        config,
        config.name,
        0,
        warning=(
            f"{config.name} is served with RANDOM weights: it answers in noise, byte by byte, and"
            " shows only how fast it would answer"
        ),
    )


def _bytes(
    config: TransformerConfig,
    name: str,
    weights: Tree | int,
    *,
    version: str = "",
    newer: Newer | None = None,
    warning: str = "",
) -> Served:
    """A reference transformer whose tokens are bytes."""
    return Served(
        name=name,
        init=models.build(config)[0],
        forward=lambda model, tokens: model(tokens)[..., :256],
        hidden=lambda model, tokens: model.hidden(tokens),
        weights=weights,
        longest=config.max_seq,
        text=ByteText(),
        config=config,
        version=version,
        newer=newer,
        warning=warning,
    )


#: Seconds that it is trained for, and in which it must have a checkpoint.
SECONDS, LONGEST = 60, 600
#: Steps between checkpoints.
SAVE_EVERY = 20
#: File in its folder that says that its minute is over.
DONE = "demonstration.txt"


def demonstration(say: Callable[[str], None], *, folder: Path | None = None) -> Path:
    """The folder of a run of `shardlib train`; it is made where it is not there.

    Args:
        folder: where; by default in the user's cache (environment variable SHARDLIB_CACHE_DIR).
    """
    place = folder or user_cache() / "demonstration"
    run = RunFolder(place)
    if (saved := run.saved()) and (place / DONE).exists():
        return place
    begins = f"it stopped at step {saved[-1]}" if saved else "nothing is there to be served"
    say(f"{begins}: a demonstration is trained for a minute, in {place}")
    words = ["train", "--run", str(place), "--sample-bytes", "0", "--quiet", "--json"]
    begun = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "shardlib", *words, "--save-every", str(SAVE_EVERY)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        while child.poll() is None and time.monotonic() - begun < LONGEST:
            time.sleep(0.5)
            if time.monotonic() - begun > SECONDS and run.saved() != saved:
                child.send_signal(signal.SIGTERM)  # it saves, and ends
                child.wait(timeout=LONGEST)
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    saved = run.saved()
    if saved:
        (place / DONE).write_text(f"trained up to step {saved[-1]}\n")
        say(f"trained up to step {saved[-1]}; shardlib train --run {place} goes on")
    else:
        raise RunError(
            f"the demonstration in {place} was not trained (exit code {child.returncode})\nTry:"
            f" shardlib {' '.join(words[:3])}, which says why"
        )
    return place
