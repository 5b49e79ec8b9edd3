"""MLflow."""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import dataclass
from typing import Any

from shardlib.errors import MissingPackageError
from shardlib.training.loggers.logger import LoggedRun
from shardlib.training.measures.metrics import scalars
from shardlib.untrusted.json_types import JsonMapping

#: Letters of a parameter's value, at most.
LONGEST = 500


@dataclass(frozen=True, kw_only=True)
class MLflow:
    """Numbers as metrics, what is trained as parameters, and events as tags, for MLflow. All
    processes of a run write to one run there.

    Attributes:
        experiment: its name.
        uri: where MLflow keeps it; by default the file `mlflow.db` in the folder of the run, or
            else of the working directory, which `mlflow ui --backend-store-uri` shows.
        name: of the run; by default MLflow makes one.
    """

    experiment: str = "shardlib"
    uri: str | None = None
    name: str | None = None

    def open(self, run: LoggedRun, /) -> _Sink:
        """Begins a run there, or goes on with it."""
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
        known = client.get_experiment_by_name(self.experiment)
        experiment = (
            client.create_experiment(self.experiment) if known is None else known.experiment_id
        )
        number = run.kept(
            "mlflow-id", lambda: client.create_run(experiment, run_name=self.name).info.run_id
        )
        client.update_run(number, status="RUNNING")
        for name, value in run.words.items():
            client.set_tag(number, name, str(value)[:LONGEST])
        return _Sink(client, entities, number)


class _Sink:
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
