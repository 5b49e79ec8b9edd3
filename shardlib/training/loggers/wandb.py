"""Weights & Biases."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlib.errors import MissingPackageError, ModelError
from shardlib.training.loggers.logger import LoggedRun
from shardlib.training.measures.metrics import scalars
from shardlib.untrusted.json_types import JsonMapping

MODES = ("offline", "online")


@dataclass(frozen=True, kw_only=True)
class WandB:
    """Numbers and events for Weights & Biases. All processes of a run write to one run there.

    Attributes:
        project: name of the project.
        name: of the run; by default the service makes one.
        mode: "offline", which writes files that `wandb sync` sends; or "online".
        folder: of the files; by default the folder of the run, or else the working directory.

    Raises:
        ModelError: another mode.
    """

    project: str
    name: str | None = None
    mode: str = "offline"
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ModelError(f"mode is {self.mode!r}\nTry: one of {', '.join(MODES)}")

    def open(self, run: LoggedRun, /) -> _Sink:
        """Begins a run there, or goes on with it."""
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise MissingPackageError(
                "Weights & Biases needs a package that is not here\nTry: pip install wandb"
            ) from error
        folder = Path(self.folder) if self.folder is not None else run.place("")
        folder.mkdir(parents=True, exist_ok=True)
        opened = wandb.init(
            project=self.project,
            name=self.name,
            id=run.kept("wandb-id", lambda: uuid.uuid4().hex[:8]),
            resume="allow",
            dir=str(folder),
            mode=self.mode,
            config=dict(run.words),
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Steps come again where a run goes back: they are a number like others.
        opened.define_metric("*", step_metric="step")
        return _Sink(opened)


class _Sink:
    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, record: JsonMapping) -> None:
        numbers = scalars(record)
        texts: Mapping[str, object] = (
            {} if "event" not in record or numbers else {"event": str(dict(record))}
        )
        self._run.log({"step": record["step"], **numbers, **texts})

    def close(self) -> None:
        self._run.finish()
