"""Federated learning: clients that keep their rows, and Flower (https://flower.ai) between them.

    job = federated.Job(init=init, loss=loss, optimizer=optax.sgd(0.1), rows=rows, batch=batch)
    app = federated.client(job)             # Flower's ClientApp; local epochs are a planned program
    program = federated.program(job)        # at the server
    result = FedAvg().start(grid, federated.record(program, program.init()), num_rounds=3)
    state = federated.state(program, result.arrays)

Flower has the rounds, the strategies, the sampling, secure aggregation, differential privacy and
the transport. Of this house are a client's local training and the parameters on both ends:

Flower is imported where a ClientApp or a record is made, and not before.

flower.py  what of Flower is used, by its own names
job.py     what the clients of a federation train
local.py   local training and evaluation
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlib.islands.federated.flower import client, epsilon, metrics, record, state, tolerant
    from shardlib.islands.federated.job import Answer, Job, Local, Request, arrays
    from shardlib.islands.federated.local import evaluate, program, train

_HOME = {
    "Answer": "shardlib.islands.federated.job",
    "Job": "shardlib.islands.federated.job",
    "Local": "shardlib.islands.federated.job",
    "Request": "shardlib.islands.federated.job",
    "arrays": "shardlib.islands.federated.job",
    "client": "shardlib.islands.federated.flower",
    "epsilon": "shardlib.islands.federated.flower",
    "evaluate": "shardlib.islands.federated.local",
    "metrics": "shardlib.islands.federated.flower",
    "program": "shardlib.islands.federated.local",
    "record": "shardlib.islands.federated.flower",
    "state": "shardlib.islands.federated.flower",
    "tolerant": "shardlib.islands.federated.flower",
    "train": "shardlib.islands.federated.local",
}

__all__ = [
    "Answer",
    "Job",
    "Local",
    "Request",
    "arrays",
    "client",
    "epsilon",
    "evaluate",
    "metrics",
    "program",
    "record",
    "state",
    "tolerant",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardlib.federated' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
