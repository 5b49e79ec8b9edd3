"""What a server needs: the first record of parameters, a state of the last, metrics of rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardlib.errors import LaunchError
from shardlib.federated.flower import ArrayRecord, MetricRecord, RecordDict, flower
from shardlib.federated.parameters import Arrays, arrays, placed
from shardlib.federated.records import CLIENT, WEIGHT, arrays_of, record_of

if TYPE_CHECKING:
    from shardlib.lowering.program.program import Program
    from shardlib.lowering.runtime.state import TrainState


def record(program: Program, state: TrainState) -> ArrayRecord:
    """The trained parameters of a state as a record, for `strategy.start(initial_arrays=...)`.

    Args:
        program: of the state.
        state: from `program.init` or a step, or loaded.

    Raises:
        MissingPackageError: Flower is not installed.
    """
    return record_of(arrays(program, state))


def state(
    program: Program,
    found: ArrayRecord | Arrays | Sequence[np.ndarray],
    first: TrainState | None = None,
) -> TrainState:
    """A state with parameters that a strategy gives, to be evaluated, exported or trained on.

    Args:
        program: of the same model, for any devices.
        found: a record; or arrays by path, or in the order of the paths.
        first: a state whose frozen parameters are taken; by default `program.init(0)`.

    Returns:
        The state; `program.evaluate`, `program.module` and `program.step` take it. Its optimizer
        is as before the first step.

    Raises:
        ArgumentError: they are those of another model; everything that differs is listed.
        TrainingError: some are not finite.
    """
    begin = program.init(0) if first is None else first
    plain = found if isinstance(found, Sequence) else _by_path(found)
    return program.anew(replace(begin, params=placed(program, begin.params, plain)))


def _by_path(found: ArrayRecord | Arrays) -> Arrays:
    plain = {path: one for path, one in found.items() if isinstance(one, np.ndarray)}
    others = {path: one for path, one in found.items() if not isinstance(one, np.ndarray)}
    return plain | arrays_of(others)


def metrics(replies: Sequence[RecordDict], weighted_by: str = WEIGHT) -> MetricRecord:
    """Metrics of a round: Flower's weighted means, the sum of the rows, and the number of clients.
    For `FedAvg(train_metrics_aggr_fn=federated.metrics)` and other strategies.

    Args:
        replies: of the clients.
        weighted_by: metric that weighs.

    Raises:
        LaunchError: two clients have the same partition.
    """
    said = [one.config_records.get(CLIENT, {}).get("partition") for one in replies]
    taken = Counter(partition for partition in said if partition is not None)
    twice = sorted(str(partition) for partition, many in taken.items() if many > 1)
    if twice:
        raise LaunchError(
            f"several clients have partition {', '.join(twice)}: its rows would count"
            " more than once\nTry: another partition-id in the --node-config of each SuperNode"
        )
    strategies = flower("flwr.serverapp.strategy.strategy_utils")
    found = strategies.aggregate_metricrecords(list(replies), weighted_by)
    records = [next(iter(one.metric_records.values())) for one in replies]
    found["rows"] = sum(one["rows"] for one in records)
    found["clients"] = len(records)
    return found
