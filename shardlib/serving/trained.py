"""A run of `shardlib train`, as it is served: its model, and the newest whole checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import optax

from shardlib import models
from shardlib.annotation.model import Tree
from shardlib.checkpointing.store import Checkpoints
from shardlib.compiler import compile
from shardlib.errors import RunError
from shardlib.lowering.program.program import Program
from shardlib.models.config import TransformerConfig
from shardlib.training.byte_program import GUARDS
from shardlib.training.config import TrainConfig, optimizer
from shardlib.training.run.folder import RunFolder
from shardlib.training.run.manifest import read_manifest
from shardlib.training.states.average import averaged
from shardlib.untrusted import construct


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """What a run has learned.

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
            f"{folder} is no folder of a run: it has no {run.manifest.name}\nTry: one that"
            " shardlib train --run has made"
        )
    description = manifest.get("run")
    if not isinstance(description, dict) or not isinstance(description.get("model"), dict):
        raise RunError(
            f"{folder} is no run of shardlib train, so that its model is not known\nTry:"
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
    """Whether a run has a whole checkpoint of a later step."""
    steps = RunFolder(folder).saved()
    return bool(steps) and steps[-1] > step
