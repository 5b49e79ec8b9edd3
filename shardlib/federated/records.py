"""Flower's messages as plain values, and back.

Strategies of `flwr.serverapp` send an `ArrayRecord` and a `ConfigRecord`, and weigh by
"num-examples" of a `MetricRecord`. Workflows of `flwr.server` (secure aggregation) send the records
of the earlier interface, whose arrays have no names; what is answered has the form of what was
asked.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardlib.errors import ArgumentError
from shardlib.federated.flower import ArrayRecord, Context, Message, RecordDict, flower
from shardlib.federated.parameters import Arrays
from shardlib.federated.request import Answer, Request
from shardlib.untrusted.shown import shown

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
    """What a message asks a client."""
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
