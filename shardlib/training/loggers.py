"""Loggers: receivers of the numbers and events of a run, in addition to the JSON lines in its
folder.

    settings = Settings(run="runs/a", loggers=(TensorBoard(), WandB(project="a")))
"""

from __future__ import annotations

import contextlib
import importlib
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardlib.errors import MissingPackageError, ModelError, RunError, ShardlibError
from shardlib.planner.plan import Plan
from shardlib.training.measures import EventFiles, Sink, scalars
from shardlib.training.measures import JsonLines as Lines
from shardlib.untrusted.data import JsonMapping, read_regular


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """The run that is logged.

    Attributes:
        folder: of the run; None if nothing is stored.
        step: number of steps done when the sink is opened.
        words: the training task and the plan, as plain data.
    """

    folder: Path | None
    step: int
    words: JsonMapping = field(default_factory=dict)

    def place(self, name: str) -> Path:
        """The path of a logger's files: in the folder of the run, or else in the working
        directory.
        """
        return (self.folder or Path()) / name

    def kept(self, name: str, make: Callable[[], str]) -> str:
        """An identifier, made by the first process of a run and shared by all later ones."""
        if self.folder is None:
            return make()
        path = self.folder / name
        try:
            if not path.exists():
                path.write_text(make() + "\n", encoding="utf-8")
            return path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise RunError(
                f"{path} cannot be read or written: {error.strerror or error}\nTry: other"
                " permissions; nothing was changed"
            ) from error


class Logger(Protocol):
    """A destination of numbers. It is opened in the first process only."""

    def open(self, run: LoggedRun, /) -> Sink | None:
        """The receiver of records; None if the run has no folder for it."""
        ...


@dataclass(frozen=True)
class JsonLines:
    """A line of JSON for every step, validation and event.

    Attributes:
        path: of the file, which is appended to.
    """

    path: str | Path

    def open(self, run: LoggedRun, /) -> Sink:
        """Opens the file."""
        return Lines(Path(self.path))


#: Maximum length of a parameter's value.
LONGEST = 500


@dataclass(frozen=True, kw_only=True)
class MLflow:
    """Metrics, the training task as parameters, and events as tags, for MLflow. All processes of a
    run log to one MLflow run.

    Attributes:
        experiment: name of the experiment.
        uri: tracking URI; by default the file `mlflow.db` in the folder of the run, or else in the
            working directory, which `mlflow ui --backend-store-uri` shows.
        name: of the run; by default MLflow makes one.
    """

    experiment: str = "shardlib"
    uri: str | None = None
    name: str | None = None

    def open(self, run: LoggedRun, /) -> _MlflowSink:
        """Starts an MLflow run, or resumes it."""
        try:
            tracking: Any = importlib.import_module("mlflow.tracking")
            entities: Any = importlib.import_module("mlflow.entities")
            if self.uri is None:
                importlib.import_module("sqlalchemy")
                importlib.import_module("alembic")
        except ImportError as error:
            raise MissingPackageError(
                f"MLflow needs a package that is not here: {error.name}\nTry: pip install"
                " mlflow-skinny 'sqlalchemy<2.1' alembic"
            ) from error
        uri = self.uri or f"sqlite:///{run.place('mlflow.db').absolute()}"
        client = tracking.MlflowClient(tracking_uri=uri)
        existing = client.get_experiment_by_name(self.experiment)
        experiment = (
            client.create_experiment(self.experiment)
            if existing is None
            else existing.experiment_id
        )
        number = run.kept(
            "mlflow-id", lambda: client.create_run(experiment, run_name=self.name).info.run_id
        )
        client.update_run(number, status="RUNNING")
        for name, value in run.words.items():
            client.set_tag(number, name, str(value)[:LONGEST])
        return _MlflowSink(client, entities, number)


class _MlflowSink:
    def __init__(self, client: Any, entities: Any, run: str) -> None:
        self._client, self._entities, self._run = client, entities, run

    def write(self, record: JsonMapping) -> None:
        step, now = int(record["step"]), int(time.time() * 1000)
        numbers = scalars(record)
        metrics = [self._entities.Metric(name, value, now, step) for name, value in numbers.items()]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)
        elif "event" in record:
            self._client.set_tag(
                self._run, f"{record['event']}.{step}", json.dumps(record, default=str)[:LONGEST]
            )

    def close(self) -> None:
        self._client.set_terminated(self._run)


#: Name of the plan's file in a run folder (`shardlib.training.run`).
_PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """Numbers as scalars, events and the plan of the run as text, for TensorBoard.

    Attributes:
        folder: of event files; by default `tensorboard/` in the folder of the run, and none for a
            run without a folder.
    """

    folder: str | Path | None = None

    def open(self, run: LoggedRun, /) -> Sink | None:
        """Opens event files; those of later steps are hidden."""
        if self.folder is None and run.folder is None:
            return None
        folder = Path(self.folder) if self.folder is not None else run.place("tensorboard")
        sink = EventFiles(folder, after=run.step)
        if text := _plan_text(run):
            sink.page("plan", text, run.step)
        return sink


def _plan_text(run: LoggedRun) -> str:
    """The plan of a run as Markdown; "" if it has no readable plan."""
    if run.folder is None:
        return ""
    with contextlib.suppress(OSError, ShardlibError):
        plan = Plan.from_json(read_regular(run.folder / _PLAN))
        # Indented lines are shown verbatim.
        return "\n".join(f"    {line}" for line in plan.explain().splitlines())
    return ""


MODES = ("offline", "online")


@dataclass(frozen=True, kw_only=True)
class WandB:
    """Numbers and events for Weights & Biases. All processes of a run log to one run there.

    Attributes:
        project: name of the project.
        name: of the run; by default the service makes one.
        mode: "offline", which writes files for `wandb sync`; or "online".
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

    def open(self, run: LoggedRun, /) -> _WandbSink:
        """Starts a run there, or resumes it."""
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
        # Steps repeat when a run rolls back, so the step is logged as a metric.
        opened.define_metric("*", step_metric="step")
        return _WandbSink(opened)


class _WandbSink:
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
