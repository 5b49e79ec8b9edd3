"""Local training and evaluation: parameters in, parameters out, as arrays of the host.

    answer = federated.train(job, federated.Request(arrays=arrays, partition=0, partitions=10))

A process plans and compiles once for each job and topology, whatever the number of rounds and of
clients that it stands for. The proximal term of FedProx is a program of its own, so that clients
without one do not hold the server's parameters twice.
"""

from __future__ import annotations

import functools

from shardlib.federated.job import Job, Place
from shardlib.federated.request import Answer, Request
from shardlib.federated.rows import read_rows
from shardlib.federated.trainer import Trainer

#: Pairs of a job and a topology whose programs a process keeps.
KEPT = 8


def train(job: Job, request: Request) -> Answer:
    """Trains as a client in a round."""
    rows = read_rows(job.rows, job.batch, request.partition, request.partitions)
    return _client(job, job.place(request.partition)).of(request.mu > 0).train(request, rows)


def evaluate(job: Job, request: Request) -> Answer:
    """Evaluates the parameters of the server on a client's rows, a batch of a step at a time."""
    rows = job.validation or job.rows
    batches = read_rows(rows, job.batch, request.partition, request.partitions)
    return _client(job, job.place(request.partition)).any().evaluate(request, batches)


class Client:
    """The programs of a job on a topology, made when they are first asked for."""

    def __init__(self, job: Job, place: Place) -> None:
        """Args:
        job: what is trained.
        place: what to plan for.
        """
        self._job, self._place, self._made = job, place, dict[bool, Trainer]()

    def of(self, term: bool) -> Trainer:
        """The program with a proximal term, or without."""
        if term not in self._made:
            self._made[term] = Trainer(self._job, self._place, term)
        return self._made[term]

    def any(self) -> Trainer:
        """A program for evaluations, where a term makes no difference."""
        return self.of(next(iter(self._made), False))


@functools.lru_cache(maxsize=KEPT)
def _client(job: Job, place: Place) -> Client:
    return Client(job, place)
