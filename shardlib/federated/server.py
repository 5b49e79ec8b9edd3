"""What a server needs: the first record of parameters, a state of the last, metrics of rounds."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardlib.errors import LaunchError
from shardlib.federated.flower import ArrayRecord, Message, MetricRecord, RecordDict, flower
from shardlib.federated.parameters import Arrays, arrays, placed
from shardlib.federated.records import CLIENT, WEIGHT, arrays_of, record_of

if TYPE_CHECKING:
    from shardlib.lowering.program.program import Program
    from shardlib.lowering.runtime.state import TrainState


LOG = logging.getLogger("shardlib.federated")


class Strategy(Protocol):
    """What of a strategy of Flower is used."""

    aggregate_train: Callable[[int, Iterable[Message]], object]
    aggregate_evaluate: Callable[[int, Iterable[Message]], object]


def record(program: Program, state: TrainState) -> ArrayRecord:
    """The trained parameters of a state as a record, for `strategy.start(initial_arrays=...)`."""
    return record_of(arrays(program, state))


def state(
    program: Program,
    found: ArrayRecord | Arrays | Sequence[np.ndarray],
    first: TrainState | None = None,
) -> TrainState:
    """A state with parameters that a strategy gives, to be evaluated, exported or trained on.

    Args:
        first: a state whose frozen parameters are taken; by default `program.init(0)`.
    """
    begin = program.init(0) if first is None else first
    plain = found if isinstance(found, Sequence) else _by_path(found)
    return program.anew(replace(begin, params=placed(program, begin.params, plain)))


def _by_path(record: ArrayRecord | Arrays) -> Arrays:
    plain = {path: array for path, array in record.items() if isinstance(array, np.ndarray)}
    others = {path: array for path, array in record.items() if not isinstance(array, np.ndarray)}
    return plain | arrays_of(others)


def metrics(replies: Sequence[RecordDict], weighted_by: str = WEIGHT) -> MetricRecord:
    """Metrics of a round: Flower's weighted means, the sum of the rows, and the number of clients.
    For `FedAvg(train_metrics_aggr_fn=federated.metrics)` and other strategies. Replies without
    metrics that can be averaged do not count; see `tolerant`.
    """
    replies = [reply for reply in replies if _has_metrics(reply, weighted_by)]
    partitions = [reply.config_records.get(CLIENT, {}).get("partition") for reply in replies]
    taken = Counter(partition for partition in partitions if isinstance(partition, int))
    twice = sorted(str(partition) for partition, many in taken.items() if many > 1)
    if twice:
        raise LaunchError(
            f"several clients have partition {', '.join(twice)}: its rows would count"
            " more than once\nTry: another partition-id in the --node-config of each SuperNode"
        )
    if not replies:
        return flower().MetricRecord({"rows": 0, "clients": 0})
    strategies = flower("flwr.serverapp.strategy.strategy_utils")
    aggregated = strategies.aggregate_metricrecords(list(replies), weighted_by)
    records = [next(iter(reply.metric_records.values())) for reply in replies]
    aggregated["rows"] = sum(record.get("rows", 0) for record in records)
    aggregated["clients"] = len(records)
    return aggregated


def tolerant(strategy: Strategy) -> Strategy:
    """A strategy whose rounds go on without replies that cannot be averaged: those without metrics,
    or with other arrays and metrics than most clients have. Flower ends the run at the first.
    """
    train, evaluate = strategy.aggregate_train, strategy.aggregate_evaluate
    weighted_by = str(getattr(strategy, "weighted_by_key", WEIGHT))

    def aggregate_train(server_round: int, replies: Iterable[Message]) -> object:
        return train(server_round, _alike(replies, weighted_by, arrays=True))

    def aggregate_evaluate(server_round: int, replies: Iterable[Message]) -> object:
        return evaluate(server_round, _alike(replies, weighted_by, arrays=False))

    strategy.aggregate_train, strategy.aggregate_evaluate = aggregate_train, aggregate_evaluate
    return strategy


def _alike(replies: Iterable[Message], weighted_by: str, *, arrays: bool) -> list[Message]:
    """Errors, and the replies that have the same records as most; the others are logged."""
    all_replies = list(replies)
    kinds = {
        number: kind
        for number, reply in enumerate(all_replies)
        if not reply.has_error()
        and (kind := _kind(reply.content, weighted_by, arrays=arrays)) is not None
    }
    majority = Counter(kinds.values()).most_common(1)[0][0] if kinds else None
    alike = list[Message]()
    for number, reply in enumerate(all_replies):
        if reply.has_error() or (number in kinds and kinds[number] == majority):
            alike.append(reply)
        else:
            LOG.warning(
                "the reply of node %s has no metrics, or not the records of the others: the round"
                " goes on without it",
                getattr(reply.metadata, "src_node_id", "?"),
            )
    return alike


def _kind(
    reply: RecordDict, weighted_by: str, *, arrays: bool
) -> tuple[tuple[str, frozenset[str]], ...] | None:
    """Names of the records of a reply and of their entries; None where it cannot be averaged."""
    if not _has_metrics(reply, weighted_by) or (arrays and len(reply.array_records) != 1):
        return None
    records = [*reply.metric_records.items(), *(reply.array_records.items() if arrays else ())]
    return tuple((name, frozenset(record)) for name, record in records)


def _has_metrics(reply: RecordDict, weighted_by: str) -> bool:
    """Whether a reply has one record of metrics, with finite numbers and a weight."""
    if len(reply.metric_records) != 1:
        return False
    record = next(iter(reply.metric_records.values()))
    numbers = all(
        isinstance(value, int | float) and math.isfinite(value) for value in record.values()
    )
    return numbers and record.get(weighted_by, 0) > 0
