"""Loggers, read back by the packages that they write for."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardlib.errors import MissingPackageError
from shardlib.training.callbacks import Moment
from shardlib.training.fit import fit
from shardlib.training.loggers import JsonLines, LoggedRun, Logger, MLflow, TensorBoard, WandB
from shardlib.training.run import RunFolder
from shardlib.training.settings import Settings
from shardlib.training.validation import Validation
from tests.planner.fixture_plan import PLAN
from tests.training.small import batch_of, compiled

RECORDS: tuple[dict[str, Any], ...] = (
    {"step": 1, "loss": 2.5, "seconds": 0.5},
    {"step": 2, "loss": 1.5, "seconds": 0.25},
    {"event": "validation", "step": 2, "time": 1.0, "validation/loss": 1.25},
    {"event": "sample", "step": 2, "time": 1.0, "text": "hello"},
)


def written(logger: Logger, folder: Path, records: Any = RECORDS, step: int = 0) -> None:
    sink = logger.open(LoggedRun(folder=folder, step=step, words={"mesh": "fsdp=4"}))
    assert sink is not None
    for record in records:
        sink.write(record)
    sink.close()


def test_lines_of_json_anywhere(tmp_path: Path):
    path = tmp_path / "lines.jsonl"
    fit(
        compiled({"data": 2}),
        batch_of,
        steps=2,
        settings=Settings(
            loggers=(JsonLines(path), TensorBoard()),
            validation=Validation(data=batch_of(9, 3)),
        ),
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2]
    assert lines[-1]["event"] == "validation" and lines[-1]["validation/loss"] > 0


def test_tensorboard_shows_the_plan_beside_the_curves(tmp_path: Path):
    (tmp_path / RunFolder(tmp_path).plan.name).write_text(PLAN.to_json())
    written(TensorBoard(), tmp_path)
    data = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    for line in PLAN.explain().splitlines():
        assert line.encode() in data
    (tmp_path / "plan.json").write_text("{}")
    written(TensorBoard(folder=tmp_path / "other"), tmp_path)  # what is not a plan has no page
    data = b"".join(path.read_bytes() for path in (tmp_path / "other").iterdir())
    assert b"loss" in data and b"Decisions" not in data


def test_a_logger_that_fails_is_said_once(tmp_path: Path):
    class Full:
        def open(self, run: LoggedRun) -> Any:
            return self

        def write(self, record: Any) -> None:
            raise ValueError("full")

        def close(self) -> None: ...

    said: list[str] = []

    def listening(moment: Moment) -> None:
        said.append(moment.event)

    settings = Settings(loggers=(Full(),), callbacks=(listening,))
    fitted = fit(compiled({"data": 2}), batch_of, steps=2, settings=settings)
    assert fitted.steps == 2 and said == ["begin", "step", "step", "end"]


@pytest.mark.parametrize(("logger", "package"), [(WandB(project="p"), "wandb"), (MLflow(), "mlflow.tracking")])  # fmt: skip
def test_a_package_that_is_missing_is_named(
    logger: Logger, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match="pip install"):
        logger.open(LoggedRun(folder=tmp_path, step=0))


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, behind a header of seven bytes that counts for
    the first block of 32 KiB.
    """
    at, part = 0, b""
    while at + 7 <= len(data):
        if 32768 - (at + 7) % 32768 < 7:
            at += 32768 - (at + 7) % 32768
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield part
            part = b""


@pytest.mark.processes
@pytest.mark.long
def test_weights_and_biases_reads_its_files(tmp_path: Path):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    written(WandB(project="p"), tmp_path)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history, found = list[dict[str, Any]](), list[Any]()
    for _ in range(100):  # its own process writes the file
        found = [
            wandb_internal_pb2.Record.FromString(data)
            for data in log_records(path.read_bytes()[7:])
        ]
        if found and found[-1].HasField("exit"):
            break
        time.sleep(0.1)
    for record in found:
        if record.HasField("history"):
            items = record.history.item
            history.append({(one.key or "/".join(one.nested_key)): json.loads(one.value_json) for one in items})  # fmt: skip
    assert [one["loss"] for one in history if "loss" in one] == [2.5, 1.5]
    assert [(one["step"], one["validation/loss"]) for one in history if "validation/loss" in one] == [(2, 1.25)]  # fmt: skip
    assert any("hello" in one.get("event", "") for one in history)


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_mlflow_reads_its_database_and_a_resumed_run_is_the_same(tmp_path: Path):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    written(MLflow(), tmp_path)
    written(MLflow(), tmp_path, [{"step": 3, "loss": 1.0}], step=2)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("shardlib")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, 2.5), (2, 1.5), (3, 1.0)]
    assert client.get_metric_history(run.info.run_id, "validation/loss")[0].value == 1.25
    assert run.data.tags["mesh"] == "fsdp=4" and "hello" in run.data.tags["sample.2"]
    assert run.info.status == "FINISHED"
