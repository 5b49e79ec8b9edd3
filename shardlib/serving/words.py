"""From a word to what is served: model, weights, tokenizer, name.

    served = named("runs/a")           # the run of `shardlib train --run runs/a`
    engine = served.engine(Capacity(longest=served.longest))

A new kind of word is a function of the word that gives a `Served`, and one line in `named`.
"""

from __future__ import annotations

from pathlib import Path

from shardlib import models
from shardlib.annotation.model import Tree
from shardlib.errors import ModelError, RunError
from shardlib.models.config import TransformerConfig
from shardlib.serving.folders.folder import is_folder, read_folder
from shardlib.serving.served import Newer, Served
from shardlib.serving.text import ByteText
from shardlib.serving.trained import newer_step, trained_run
from shardlib.training.run.folder import RunFolder


def named(word: str, *, average: bool = False) -> Served:
    """Finds what a word names."""
    if Path(word).is_dir() and RunFolder(Path(word)).manifest.exists():
        return _run(Path(word), average=average)
    if average:
        raise RunError(
            f"{word} is no run, so that it has no average of its parameters\nTry: it without"
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
            f"{word} cannot be served: it is no decoder that knows 256 bytes\nTry: a folder of"
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
