"""Federated learning: clients that keep their rows, and Flower (https://flower.ai) between them.

    job = federated.Job(init=init, loss=loss, optimizer=optax.sgd(0.1), rows=rows, batch=batch)
    app = federated.client(job)             # Flower's ClientApp; local epochs are a planned program
    program = federated.program(job)        # at the server
    result = FedAvg().start(grid, federated.record(program, program.init()), num_rounds=3)
    state = federated.state(program, result.arrays)

Flower has the rounds, the strategies, the sampling, secure aggregation, differential privacy and
the transport. Of this house are a client's local training and the parameters on both ends:

    job.py         what clients train
    rows.py        rows of a client, and their order
    parameters.py  parameters by path, as they are sent
    proximal.py    the proximal term of FedProx, as a part of the optimizer
    request.py     what a client is asked, and what it answers
    trainer.py     a client's program, and the rounds that it runs
    local.py       local training and evaluation: arrays in, arrays out, no Flower
    flower.py      what of Flower is used
    records.py     Flower's messages as plain values, and back
    app.py         the ClientApp
    server.py      the first record, a state of the last one, metrics of a round
    privacy.py     what rounds of noise cost

Flower is imported where a ClientApp or a record is made, and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlib.federated.app import client
    from shardlib.federated.job import Job, Local
    from shardlib.federated.local import evaluate, train
    from shardlib.federated.parameters import arrays
    from shardlib.federated.privacy import epsilon
    from shardlib.federated.request import Answer, Request
    from shardlib.federated.server import metrics, record, state, tolerant
    from shardlib.federated.trainer import program

_HOME = {
    "Answer": "shardlib.federated.request",
    "Job": "shardlib.federated.job",
    "Local": "shardlib.federated.job",
    "Request": "shardlib.federated.request",
    "arrays": "shardlib.federated.parameters",
    "client": "shardlib.federated.app",
    "epsilon": "shardlib.federated.privacy",
    "evaluate": "shardlib.federated.local",
    "metrics": "shardlib.federated.server",
    "program": "shardlib.federated.trainer",
    "record": "shardlib.federated.server",
    "state": "shardlib.federated.server",
    "tolerant": "shardlib.federated.server",
    "train": "shardlib.federated.local",
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
