"""From a word to what is served: model, weights, tokenizer, name.

    served = named("runs/a")           # the run of `shardlib train --run runs/a`
    engine = served.engine(Capacity(longest=served.longest))

A new kind of word is a function of the word that gives a `Served`, and one line in `named`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from shardlib import models
from shardlib.annotation.model import Tree
from shardlib.annotation.read import Init
from shardlib.errors import ModelError
from shardlib.lowering.serving.program import Forward
from shardlib.models.config import TransformerConfig
from shardlib.serving.engine import Engine
from shardlib.serving.scheduling.capacity import Capacity
from shardlib.serving.text import ByteText, Text
from shardlib.serving.trained import newer_step, trained_run
from shardlib.training.run.folder import RunFolder

#: Weights that are newer than those of a version, and their version; None where there are none.
Newer = Callable[[str], tuple[Tree, str] | None]


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served.

    Attributes:
        name: by which requests ask for it.
        init: what makes the model, as `Engine` takes it.
        forward: (model, int32 tokens [batch, seq]) -> logits [batch, seq, vocab].
        weights: as `Engine` takes them.
        longest: tokens that the model looks at.
        text: its tokenizer.
        hidden: (model, int32 tokens [batch, seq]) -> states [batch, seq, width] before the logits,
            which embeddings are made of; None where the model does not give them.
        version: of the weights, in words; empty where they have none.
        newer: asks for newer weights; None where there never are any.
        warning: what whoever starts the server should know; empty for nothing.
    """

    name: str
    init: Init
    forward: Forward
    weights: Tree | int
    longest: int
    text: Text
    hidden: Forward | None = None
    version: str = ""
    newer: Newer | None = None
    warning: str = ""

    def engine(
        self,
        capacity: Capacity,
        *,
        tensor: int = 1,
        devices: Sequence[jax.Device] | None = None,
    ) -> Engine:
        """An engine that serves it.

        Args:
            capacity: how many requests and tokens are served.
            tensor: devices that share every layer.
            devices: to choose from; all by default.

        Raises:
            ArgumentError, ModelError: see `Engine`.
        """
        return Engine(
            self.init,
            self.forward,
            weights=self.weights,
            capacity=capacity,
            tensor=tensor,
            devices=devices,
        )


def named(word: str) -> Served:
    """Finds what a word names.

    Args:
        word: folder of a run of `shardlib train`; or a preset, configuration file or model card,
            which is served with random weights.

    Raises:
        ModelError: nothing of that name, or a model that cannot be served.
        RunError: a folder that is no run of `shardlib train`.
        CheckpointError: a run without a checkpoint that is good.
        MissingFileError: a file that is not there.
    """
    if Path(word).is_dir() and RunFolder(Path(word)).manifest.exists():
        return _run(Path(word))
    return _random(word)


def _run(folder: Path) -> Served:
    """A run, as it is, also while it trains; its tokens are bytes."""
    found = trained_run(folder)

    def newer(version: str) -> tuple[Tree, str] | None:
        if not newer_step(folder, int(version.removeprefix("step "))):
            return None
        fresh = trained_run(folder)
        now = f"step {fresh.step}"
        return None if now == version else (fresh.weights, now)

    name = folder.resolve().name
    return _bytes(found.model, name, found.weights, version=f"step {found.step}", newer=newer)


def _random(word: str) -> Served:
    """A model with random weights, whose tokens are bytes."""
    found = models.load(word)
    if not isinstance(found, TransformerConfig) or found.vocab_size < 256:
        raise ModelError(
            f"{word} cannot be served: it is no decoder that knows 256 bytes\nTry: a folder of"
            " shardlib train --run, or shardlib.serving.Engine(init, forward) in a program of your"
            " own"
        )
    return _bytes(
        found,
        found.name,
        0,
        warning=(
            f"{found.name} is served with RANDOM weights: it answers in noise, byte by byte, and"
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
        version=version,
        newer=newer,
        warning=warning,
    )
