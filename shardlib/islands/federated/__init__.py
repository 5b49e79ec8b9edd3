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
job.py     what the clients of a federation train; local training and evaluation
"""

from __future__ import annotations

from shardlib import wings

__all__, __getattr__ = wings.face(__file__, "shardlib.federated")  # pyright: ignore
