"""Local training and evaluation: parameters in, parameters out, as arrays of the host.

    answer = federated.train(job, federated.Request(arrays=arrays, partition=0, partitions=10))

A process plans and compiles once for each job and topology, whatever the number of rounds and of
clients that it stands for. The proximal term of FedProx is a program of its own, so that clients
without one do not hold the server's parameters twice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from shardlib.annotation.trees import Tree
from shardlib.api import compile
from shardlib.decisions.pins import PinMapping
from shardlib.errors import LaunchError, PinError, StateError, TrainingError
from shardlib.islands.federated.job import (
    Answer,
    Arrays,
    Job,
    Place,
    Request,
    arrays,
    batches,
    count,
    inner_of,
    placed,
    proximal,
    read_rows,
    require_finite,
    sent,
    with_inner,
    with_mu,
)
from shardlib.islands.program import by_path
from shardlib.lowering.program import Program
from shardlib.lowering.runtime import TrainState

# --------------------------------------------------------------------------------------------------
# A client's program, and the rounds that it runs.


def program(job: Job, topology: Place = None, pin: PinMapping | None = None) -> Program:
    """Compiles a program of a job's model: to begin with at the server, to evaluate and to export.

    Args:
        topology: what to plan for; by default all devices of this process.
    """
    return _compiled(job, topology, pin, term=False)


def _compiled(job: Job, topology: Place, pin: PinMapping | None, *, term: bool) -> Program:
    """A program whose optimizer has the proximal term of FedProx, or not."""
    if jax.process_count() > 1:
        raise LaunchError(f"a client is one process, and here are {jax.process_count()}")
    program = compile(
        job.init,
        job.loss,
        proximal(job.optimizer) if term else job.optimizer,
        job.batch,
        topology=topology,
        pin=pin,
        batch_axes=job.batch_axes,
        wrt=job.wrt,
        evaluation=job.local.evaluation,
    )
    if program.plan.exchange.islands > 1:
        raise PinError(
            f"pin of the job has exchange={program.plan.exchange}, and is of one client: how"
            " clients exchange is for the strategy to say"
        )
    updated = [
        parameter.path for parameter in program.plan.parameters if parameter.role == "updated"
    ]
    if term and (rounded := _rounded(program)):
        raise PinError(
            f"the proximal term of FedProx would be of {rounded} copies of the server's parameters"
            "\nTry: moment_dtype=None"
        )
    if updated:
        raise PinError(
            f"steps update {', '.join(updated[:4])}{' and others' if len(updated) > 4 else ''},"
            " which are not parameters: each client would have its own"
        )
    return program


def _rounded(program: Program) -> str:
    """The dtype that the anchor of a proximal term is kept in, where that is not the parameters'
    own.
    """
    anchor = by_path(program.state.opt_state.anchor)
    parameters = by_path(program.model.partition.trained(program.state.params))
    return next(
        (str(leaf.dtype) for path, leaf in anchor.items() if leaf.dtype != parameters[path].dtype),
        "",
    )


class Trainer:
    """A program, and what is left of its last round: parameters that no round changes."""

    def __init__(self, job: Job, place: Place, term: bool) -> None:
        """Plans."""
        self.job, self.program = job, _compiled(job, place, job.pin, term=term)
        #: Of its trained parameters nothing is used.
        self._last: TrainState | None = None

    def train(self, request: Request, rows: Tree) -> Answer:
        """See `shardlib.islands.federated.train`."""
        state, step_metrics, local = (
            self._first(request),
            list[Mapping[str, jax.Array]](),
            self.job.local,
        )
        self._last = None  # its arrays are donated to the first step
        key = (local.seed, request.partition, request.round)
        for batch in batches(rows, self.job.size, local.epochs, key):
            state, metrics = self.program.step(state, batch)
            step_metrics.append(metrics)
        self._last = replace(state, opt_state=None)
        means = _means(step_metrics, request)
        trained = arrays(self.program, state)
        who = f"partition {request.partition} of round {request.round}"
        require_finite(trained, f"parameters that {who} has trained")
        optimizer_arrays = (
            sent(by_path(inner_of(state.opt_state))) if local.keep == "optimizer" else {}
        )
        return Answer(
            weight=self._weight(rows),
            metrics={**means, "rows": float(count(rows)), "steps": float(len(step_metrics))},
            arrays=trained,
            kept=optimizer_arrays,
        )

    def evaluate(self, request: Request, rows: Tree) -> Answer:
        """See `shardlib.islands.federated.evaluate`."""
        state = self._with_parameters(request)
        self._last = state
        many, size = count(rows), self.job.size
        totals = dict[str, float]()
        for first in range(0, many, size):
            part = jax.tree.map(lambda array, first=first: array[first : first + size], rows)
            for name, value in self.program.evaluate(state, part).items():
                totals[name] = totals.get(name, 0.0) + float(value) * count(part)
        means = {name: total / many for name, total in totals.items()}
        return Answer(weight=self._weight(rows), metrics={**means, "rows": float(many)})

    def _weight(self, rows: Tree) -> float:
        return float(count(rows)) if self.job.local.weight == "rows" else 1.0

    def _with_parameters(self, request: Request) -> TrainState:
        """A state with the parameters of the server, and what is frozen from the round before."""
        local = self.job.local
        state = self._last
        if state is None:
            make = local.start or (lambda program: program.init(local.seed))
            state = make(self.program)
        return replace(state, params=placed(self.program, state.params, request.arrays))

    def _first(self, request: Request) -> TrainState:
        """The state before the first step of a round."""
        state = self.program.anew(self._with_parameters(request))
        opt_state = with_mu(state.opt_state, request.mu)
        if request.kept:
            inner = _restored(inner_of(self.program.state.opt_state), request.kept)
            opt_state = with_inner(opt_state, inner)
        state = replace(state, opt_state=opt_state)
        if not jax.tree.leaves(state.model_state):
            return state
        key = (self.job.local.seed, request.partition, request.round, 1)
        streams = self.program.init(int(np.random.default_rng(key).integers(2**31)))
        return replace(state, model_state=streams.model_state)


def _means(step_metrics: Sequence[Mapping[str, jax.Array]], request: Request) -> dict[str, float]:
    """Means of metrics over the steps of a round."""
    losses = np.asarray([metrics["loss"] for metrics in step_metrics], np.float64)
    if not np.isfinite(losses).all():
        step = int(np.argmin(np.isfinite(losses)))
        raise TrainingError(
            f"the loss of partition {request.partition} is {losses[step]} in step {step + 1} of"
            f" {len(losses)} of round {request.round}\nTry: a smaller learning rate"
        )
    return {
        name: float(np.mean([np.asarray(metrics[name], np.float64) for metrics in step_metrics]))
        for name in step_metrics[0]
    }


def _restored(template: Tree, stored: Arrays) -> Tree:
    """Optimizer state of an earlier round, on the devices."""
    leaves = by_path(template)
    if leaves.keys() != stored.keys():
        raise StateError("the optimizer state that a client has kept is that of another optimizer")
    placed_leaves = [
        jax.device_put(stored[path].reshape(leaf.shape).astype(leaf.dtype), leaf.sharding)
        for path, leaf in leaves.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(template), placed_leaves)


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
