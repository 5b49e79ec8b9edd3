"""The parts of Flower that are used, by its own names. Flower is imported when first needed."""

from __future__ import annotations

import importlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardlib.errors import ArgumentError, LaunchError, MissingPackageError, raise_all
from shardlib.islands.federated.job import (
    Answer,
    Arrays,
    Job,
    Request,
    arrays,
    evaluate,
    placed,
    train,
)
from shardlib.untrusted.data import shown

if TYPE_CHECKING:
    from shardlib.lowering.program import Program
    from shardlib.lowering.runtime import TrainState


class Array(Protocol):
    """An array as it is sent."""

    def numpy(self) -> np.ndarray:
        """Its numbers."""
        ...


ArrayRecord = MutableMapping[str, Array]
ConfigRecord = MutableMapping[str, object]
MetricRecord = MutableMapping[str, float]


class RecordDict(Protocol):
    """Records by name."""

    array_records: MutableMapping[str, ArrayRecord]
    config_records: MutableMapping[str, ConfigRecord]
    metric_records: MutableMapping[str, MetricRecord]


class Metadata(Protocol):
    """Address of a message."""

    group_id: str


class Message(Protocol):
    """A message between a server and a client."""

    content: RecordDict
    metadata: Metadata

    def has_error(self) -> bool:
        """Returns whether it says an error in place of content."""
        ...


class Context(Protocol):
    """A client's configuration, and its state between messages."""

    node_config: Mapping[str, object]
    state: RecordDict


#: What answers messages.
Handler = Callable[[Message, Context], Message]
#: What stands around it.
Mod = Callable[[Message, Context, Handler], Message]


class ClientApp(Protocol):
    """The interface that engines call."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answers a message."""
        ...


def flower(module: str = "flwr.app") -> ModuleType:
    """A module of Flower."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            "federated learning needs the package flwr\nTry: pip install 'shardlib[federated]'"
        ) from error


# --------------------------------------------------------------------------------------------------
# Flower's messages as plain values, and back.
#
# Strategies of `flwr.serverapp` send an `ArrayRecord` and a `ConfigRecord`, and weigh by "num-
# examples" of a `MetricRecord`. Workflows of `flwr.server` (secure aggregation) send the records
# of the earlier interface, whose arrays have no names; what is answered has the form of what was
# asked.

#: What weighs an answer: Flower's own word.
WEIGHT = "num-examples"
#: Records of an answer beside the arrays, and of a client's context.
METRICS, CLIENT, KEPT = "metrics", "client", "shardlib.optimizer"
#: Of the earlier interface: the array of no parameters; records that ask, and that answer.
EMPTY = "_empty"
EARLIER = {"fitins": "fitres", "evaluateins": "evaluateres"}


def record_of(arrays: Arrays) -> ArrayRecord:
    """A record of arrays, by path and in order."""
    app = flower()
    return app.ArrayRecord({path: app.Array(np.asarray(array)) for path, array in arrays.items()})


def arrays_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    """The arrays of a record."""
    return {path: array.numpy() for path, array in record.items()}


def request_of(message: Message, context: Context) -> Request:
    """Returns the request of a message to a client."""
    content = message.content
    if len(content.array_records) != 1:
        raise ArgumentError(
            f"a message has {len(content.array_records)} records of arrays, not one:"
            f" {shown(list(content.array_records))}"
        )
    name, record = next(iter(content.array_records.items()))
    if EMPTY in record:
        raise ArgumentError(
            "the server has no parameters to begin with\nTry: initial_parameters="
            "ndarrays_to_parameters(list(federated.arrays(program, program.init()).values()))"
        )
    config = {
        key: value for entries in content.config_records.values() for key, value in entries.items()
    }
    sent, earlier = arrays_of(record), name.split(".")[0] in EARLIER
    stored = context.state.array_records.get(KEPT)
    return Request(
        arrays=list(sent.values()) if earlier else sent,
        partition=_number(context, "partition-id"),
        partitions=_number(context, "num-partitions"),
        round=_round(config, message),
        mu=float(str(config.get("proximal-mu", config.get("proximal_mu", 0.0)))),
        kept={} if stored is None else arrays_of(stored),
    )


def _number(context: Context, name: str) -> int:
    value = context.node_config.get(name)
    if type(value) is not int:
        raise ArgumentError(
            f"{name} of the client is {shown(value)}, not an integer\nTry: flower-supernode"
            ' --node-config "partition-id=0 num-partitions=10"'
        )
    return value


def _round(config: Mapping[str, object], message: Message) -> int:
    """The number of the round, wherever it is said."""
    value = config.get("server-round", config.get("server_round", message.metadata.group_id))
    return int(str(value)) if str(value).isdigit() else 0


def answer_to(message: Message, context: Context, answer: Answer) -> Message:
    """An answer as a message."""
    app = flower()
    if answer.kept:
        context.state.array_records[KEPT] = record_of(answer.kept)
    name = next(iter(message.content.array_records))
    kind = name.split(".")[0]
    if kind in EARLIER:
        return app.Message(_earlier(EARLIER[kind], answer), reply_to=message)
    content = app.RecordDict(
        {
            METRICS: app.MetricRecord({**answer.metrics, WEIGHT: int(answer.weight)}),
            CLIENT: app.ConfigRecord({"partition": _number(context, "partition-id")}),
        }
    )
    if answer.arrays:
        asked_for = message.content.array_records[name]
        content[name] = record_of({path: answer.arrays[path] for path in asked_for})
    return app.Message(content, reply_to=message)


def _earlier(word: str, answer: Answer) -> RecordDict:
    """An answer in the records of the earlier interface."""
    app = flower()
    content = app.RecordDict(
        {
            f"{word}.num_examples": app.MetricRecord({"num_examples": int(answer.weight)}),
            f"{word}.metrics": app.ConfigRecord(dict(answer.metrics)),
            f"{word}.status": app.ConfigRecord({"code": 0, "message": ""}),
        }
    )
    if answer.arrays:
        content[f"{word}.parameters"] = app.ArrayRecord(list(answer.arrays.values()))
    else:
        content[f"{word}.loss"] = app.MetricRecord({"loss": answer.metrics["loss"]})
    return content


# --------------------------------------------------------------------------------------------------
# The ClientApp: Flower's messages answered by local training.


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers messages; a value that engines may copy into other processes.

    Attributes:
        job: what is trained.
        what: (job, request) -> answer.
    """

    job: Job
    what: Callable[[Job, Request], Answer]

    def __call__(self, message: Message, context: Context) -> Message:
        """Answers."""
        return answer_to(message, context, self.what(self.job, request_of(message, context)))


def client(job: Job, *, mods: Sequence[Mod] = ()) -> ClientApp:
    """A Flower ClientApp whose local epochs are a planned, sharded program.

    It answers `train` and `evaluate` of any strategy that sends parameters and takes parameters
    (FedAvg, FedProx, FedAdam, Krum and others, with wrappers for differential privacy), and of the
    SecAgg+ workflow. Parameters go by path; frozen ones are not sent. FedProx's "proximal-mu" is
    used where the strategy sends it.
    """
    if not isinstance(job, Job):
        raise ArgumentError(f"job is {shown(job)}\nTry: federated.Job(init=..., loss=..., ...)")
    app = flower("flwr.clientapp").ClientApp(mods=list(mods))
    app.train()(Answers(job=job, what=train))
    app.evaluate()(Answers(job=job, what=evaluate))
    return app


# --------------------------------------------------------------------------------------------------
# The server's side: the first record of parameters, a state of the last, metrics of rounds.

LOG = logging.getLogger("shardlib.islands.federated")


class Strategy(Protocol):
    """The methods of a strategy of Flower that are used."""

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
    """Returns whether a reply has one record of metrics, with finite numbers and a weight."""
    if len(reply.metric_records) != 1:
        return False
    record = next(iter(reply.metric_records.values()))
    numbers = all(
        isinstance(value, int | float) and math.isfinite(value) for value in record.values()
    )
    return numbers and record.get(weighted_by, 0) > 0


# --------------------------------------------------------------------------------------------------
# The cost of rounds of noise: the epsilon of differential privacy, by `dp-accounting`.
#
# Flower's wrappers (`DifferentialPrivacyServerSideFixedClipping` and others) clip the update of
# each client to a norm C, and add noise of deviation z C / m to the mean over m clients: z is the
# noise multiplier. They guard clients, not rows. All clients have to count alike
# (`Local(weight="equal")`), and what is sent as metrics is guarded by nothing.

#: Words of `sampling`.
SAMPLING = ("none", "poisson", "fixed")


def epsilon(
    noise_multiplier: float,
    rounds: int,
    *,
    delta: float,
    sampled: int = 1,
    clients: int = 1,
    sampling: str = "none",
) -> float:
    """The epsilon of (epsilon, delta) differential privacy of clients, by Renyi divergences."""
    _require(noise_multiplier, rounds, delta, sampled, clients, sampling)
    events, accounting, renyi = (
        _package(name) for name in ("dp_event", "privacy_accountant", "rdp.rdp_privacy_accountant")
    )
    relation = accounting.NeighboringRelation
    if sampling == "fixed":
        # Replacing one moves a sum by twice the norm.
        noise = events.GaussianDpEvent(noise_multiplier / 2)
        event = events.SampledWithoutReplacementDpEvent(clients, sampled, noise)
        accountant = renyi.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
    else:
        event = events.GaussianDpEvent(noise_multiplier)
        if sampling == "poisson":
            event = events.PoissonSampledDpEvent(sampled / clients, event)
        accountant = renyi.RdpAccountant(neighboring_relation=relation.ADD_OR_REMOVE_ONE)
    return float(accountant.compose(event, rounds).get_epsilon(delta))


def _require(
    noise_multiplier: float, rounds: int, delta: float, sampled: int, clients: int, sampling: str
) -> None:
    failures = [
        f"{name} is {shown(value)}; it is {rule}"
        for name, value, fine, rule in (
            ("noise_multiplier", noise_multiplier, noise_multiplier > 0, "a number of more than 0"),
            ("rounds", rounds, rounds >= 0, "an integer of at least 0"),
            ("delta", delta, 0 < delta < 1, "a number between 0 and 1"),
            ("sampled", sampled, 0 < sampled <= clients, f"1 to {clients}, the number of clients"),
            ("sampling", sampling, sampling in SAMPLING, f"one of {', '.join(SAMPLING)}"),
        )
        if not fine
    ]
    if failures:
        raise_all(ArgumentError, "epsilon cannot use its arguments", failures)


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"dp_accounting.{name}")
    except ImportError as error:
        raise MissingPackageError(
            "epsilon needs the package dp-accounting\nTry: pip install 'shardlib[federated]'"
        ) from error
