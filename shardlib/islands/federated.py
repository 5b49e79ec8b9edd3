"""Federated learning: clients that keep their rows, and Flower (https://flower.ai) between them.

    job = federated.Job(init=init, loss=loss, optimizer=optax.sgd(0.1), rows=rows, batch=batch)
    app = federated.client(job)             # Flower's ClientApp; local epochs are a planned program
    program = federated.program(job)        # at the server
    result = FedAvg().start(grid, federated.record(program, program.init()), num_rounds=3)
    state = federated.state(program, result.arrays)

Flower has the rounds, the strategies, the sampling, secure aggregation, differential privacy and
the transport; it is imported where a ClientApp or a record is made, and not before. Of this house
are a client's local training and the parameters on both ends, which work without it:

    answer = federated.train(job, federated.Request(arrays=arrays, partition=0, partitions=10))
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardlib.annotation.model import Init
from shardlib.annotation.trees import Filter, Tree, path_text
from shardlib.api import compile
from shardlib.decisions.pins import PinMapping
from shardlib.errors import (
    ArgumentError,
    BatchError,
    DataError,
    LaunchError,
    MissingPackageError,
    PinError,
    StateError,
    TrainingError,
    raise_all,
)
from shardlib.frontend.model import Loss
from shardlib.islands.planning import updated_by_steps
from shardlib.islands.program import by_path, trained, with_trained
from shardlib.jax_types import Leaf
from shardlib.lowering.program import Program
from shardlib.lowering.runtime import TrainState
from shardlib.machines.topology import Topology
from shardlib.untrusted.data import bounded, read_seed, shown

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

#: (partition, partitions) -> all rows of a client: a tree like the batch, of any number of rows.
Rows = Callable[[int, int], Tree]
#: What a client plans for, see `shardlib.compile`.
Place = str | Topology | None
#: Words of `Local`.
KEEP, WEIGHT = ("nothing", "optimizer"), ("rows", "equal")


@dataclass(frozen=True, kw_only=True, eq=False)
class Local:
    """Options of a client's training in a round.

    Attributes:
        epochs: passes over the client's rows. A round has as many whole batches as so many passes
            give, and at least one.
        keep: "nothing": the optimizer begins anew in each round, so that what a client sends
            depends on the parameters and its rows alone; or "optimizer": its state is kept between
            the rounds of a client, in Flower's context of the client.
        weight: "rows": a client counts as many times as it has rows; or "equal": all count alike,
            as bounds of differential privacy ask for.
        seed: of the parameters, of the order of rows and of random streams.
        start: program -> the state whose frozen parameters a client uses; by default
            `program.init(seed)`. It is called once by each program, which donates what it gives.
        evaluation: loss of evaluations, see `shardlib.compile`.

    Raises:
        ArgumentError: values that are none of these; all of them are listed.
    """

    epochs: int = 1
    keep: str = "nothing"
    weight: str = "rows"
    seed: int = 0
    start: Callable[[Program], TrainState] | None = None
    evaluation: Loss | None = None

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {shown(value)}; it is one of {', '.join(map(repr, words))}"
            for name, value, words in (
                ("keep", self.keep, KEEP),
                ("weight", self.weight, WEIGHT),
            )
            if value not in words
        ]
        if type(self.epochs) is not int or self.epochs < 1:
            failures.append(f"epochs is {shown(self.epochs)}; it is an integer of at least 1")
        if failures:
            raise_all(ArgumentError, "federated.Local is not usable", failures)
        read_seed(self.seed)


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """The training of clients. Two jobs are equal where one is a copy of the other in another
    process.

    Attributes:
        init: see `shardlib.compile`.
        loss: see `shardlib.compile`; that of the rows of one client.
        optimizer: of local steps, an optax transformation.
        batch: of a local step: arrays or `jax.ShapeDtypeStruct` whose first dims are rows.
        rows: (partition, partitions) -> all rows of a client; called in every round.
        validation: the same for evaluations; by default `rows`.
        topology: of one client, or a function of its partition; by default all devices that its
            process sees.
        pin: decisions of a client's plan, fixed by hand.
        batch_axes: logical axes of the batch; by default the convention.
        wrt: what is trained; all parameters if left out. The rest is frozen, and never sent.
        local: how a client trains in a round.
        token: of this job, by which a process knows it again.

    Raises:
        ArgumentError: arrays of the batch do not have the same number of rows.
    """

    init: Init
    loss: Loss
    optimizer: optax.GradientTransformation
    batch: Tree
    rows: Rows
    validation: Rows | None = None
    topology: Place | Callable[[int], Place] = None
    pin: PinMapping | None = None
    batch_axes: Tree = None
    wrt: Filter = None
    local: Local = field(default_factory=Local)
    token: str = field(init=False, repr=False, default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        sizes = {
            path_text(path) or "batch": np.shape(leaf)[:1]
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.batch)
        }
        if len(set(sizes.values())) != 1 or () in sizes.values() or (0,) in sizes.values():
            raise_all(
                ArgumentError,
                "arrays of a batch have the same number of rows, at least one, as their first dim",
                [f"{path} has {list(size)}" for path, size in sizes.items()] or ["it is empty"],
                hint='batch={"x": jax.ShapeDtypeStruct((rows, width), "float32")}',
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)

    @property
    def size(self) -> int:
        """Rows of a local step."""
        return np.shape(jax.tree.leaves(self.batch)[0])[0]

    def place(self, partition: int) -> Place:
        """Returns the place that the client of a partition plans for."""
        return self.topology(partition) if callable(self.topology) else self.topology


# --------------------------------------------------------------------------------------------------
# The rows of a client, and the order in which local steps take them.


def read_rows(rows: Rows, batch: Tree, partition: int, partitions: int) -> Tree:
    """All rows of a client, as arrays of the host."""
    client_rows = rows(partition, partitions)
    who = f"the rows of partition {partition} of {partitions}"
    batch_leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
    if jax.tree.structure(client_rows) != structure:
        raise BatchError(
            f"{who} are {shown(jax.tree.structure(client_rows))}, and a batch is {shown(structure)}"
        )
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(client_rows)]
    failures = [
        f"{path_text(path) or 'rows'} is {array.dtype}{list(array.shape)}, and in a batch"
        f" {leaf.dtype}{['rows', *np.shape(leaf)[1:]]}".replace("'", "")
        for (path, leaf), array in zip(batch_leaves, arrays, strict=True)
        if array.shape[1:] != np.shape(leaf)[1:]
        or not array.ndim
        or jax.dtypes.canonicalize_dtype(array.dtype) != leaf.dtype
    ]
    if not failures and len({len(array) for array in arrays}) > 1:
        failures = [
            f"{path_text(path) or 'rows'} has {len(array)} rows"
            for (path, _), array in zip(batch_leaves, arrays, strict=True)
        ]
    if failures:
        raise_all(BatchError, f"{who} are not those of a batch", failures)
    if not len(arrays[0]):
        raise DataError(
            f"partition {partition} of {partitions} has no rows: its client has nothing to train"
            " on\nTry: fewer partitions, or a client that does not take part"
        )
    return jax.tree.unflatten(structure, arrays)


def count(rows: Tree) -> int:
    """Number of rows."""
    return len(jax.tree.leaves(rows)[0])


def batches(rows: Tree, size: int, epochs: int, key: tuple[int, ...]) -> Iterator[Tree]:
    """The batches of a round: passes over all rows, one after the other, each in an order of its
    own; what is left at the end and fills no batch is left out. Of fewer rows than one batch
    takes, some come twice.
    """
    many, order = count(rows), np.random.default_rng(key)
    waiting = np.zeros(0, np.int64)
    for _ in range(steps(many, size, epochs)):
        while len(waiting) < size:
            waiting = np.concatenate([waiting, order.permutation(many)])
        now, waiting = waiting[:size], waiting[size:]
        yield jax.tree.map(lambda array, now=now: array[now], rows)


def steps(many: int, size: int, epochs: int) -> int:
    """Number of steps of a round.

    >>> steps(10, 4, 1), steps(10, 4, 2), steps(3, 4, 1)
    (2, 5, 1)

    Args:
        many: rows of the client.
        size: rows of a batch.
        epochs: passes over the rows.
    """
    return max(1, many * epochs // size)


# --------------------------------------------------------------------------------------------------
# Parameters as they are sent: trained arrays by path, in the order of the tree.
#
# What NumPy has no dtype for (bfloat16, float8) is sent as float32, which holds it exactly.
# Scalars are sent with one dim: engines clip and scale arrays in place, which a NumPy scalar
# ignores.

#: Arrays by path, in order.
Arrays = Mapping[str, np.ndarray]


def arrays(program: Program, state: TrainState) -> dict[str, np.ndarray]:
    """The trained parameters of a state as they are sent."""
    return sent(by_path(program.model.partition.trained(state.params)))


def sent(leaves: Mapping[str, Leaf]) -> dict[str, np.ndarray]:
    """Arrays on the host, in dtypes that NumPy writes."""
    return {path: np.atleast_1d(_plain(np.asarray(leaf))) for path, leaf in leaves.items()}


def _plain(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)


def received(program: Program, sent: Arrays | Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of a program from the arrays that were sent."""
    expected = trained(program)
    if not sent:
        raise ArgumentError(
            "there are no parameters: no client has answered with any\nTry: Flower's log, which has"
            " what each client says"
        )
    if not isinstance(sent, Mapping):
        if len(sent) != len(expected):
            raise ArgumentError(
                f"the parameters are those of another model: {len(sent)} arrays, and"
                f" {program.plan.model} trains {len(expected)}"
            )
        sent = dict(zip(expected, sent, strict=True))
    failures = [
        *_differing(expected, sent),
        *(f"{path} is not known" for path in sent.keys() - expected.keys()),
    ]
    if failures:
        raise_all(
            ArgumentError,
            f"the parameters are those of another model than {program.plan.model}",
            bounded(failures),
        )
    with np.errstate(over="ignore"):  # what a smaller dtype cannot hold is infinite in it
        cast_arrays = {path: sent[path].astype(leaf.dtype) for path, leaf in expected.items()}
    require_finite(sent, "parameters that were received")
    require_finite(cast_arrays, "parameters that were received, in the dtypes of the model,")
    return {path: sent[path].reshape(leaf.shape) for path, leaf in expected.items()}


def _differing(expected: Mapping[str, jax.ShapeDtypeStruct], sent: Arrays) -> list[str]:
    failures: list[str] = []
    for path, leaf in expected.items():
        if path not in sent:
            failures.append(f"{path} is missing")
        elif np.shape(sent[path]) not in (leaf.shape, leaf.shape or (1,)):
            failures.append(f"{path} is {list(np.shape(sent[path]))}, not {list(leaf.shape)}")
        elif sent[path].dtype.kind != _plain(np.empty(0, leaf.dtype)).dtype.kind:
            failures.append(f"{path} is {sent[path].dtype}, not {leaf.dtype}")
    return failures


def require_finite(arrays: Arrays, what: str) -> None:
    """Refuses arrays that are not finite."""
    wrong = [path for path, array in arrays.items() if not np.isfinite(array).all()]
    if wrong:
        raise TrainingError(f"{what} are not finite: {', '.join(bounded(wrong))}")


def placed(program: Program, params: Tree, sent: Arrays | Sequence[np.ndarray]) -> Tree:
    """Parameters of which the trained ones are those that were sent."""
    return with_trained(program, params, received(program, sent))


# --------------------------------------------------------------------------------------------------
# The proximal term of FedProx ([arXiv:1812.06127](https://arxiv.org/abs/1812.06127)), as a part of
# the optimizer.
#
# Clients minimise loss(w) + mu / 2 |w - w0|^2, w0 the parameters of the server. The gradient of
# the term, mu (w - w0), is added to that of the loss before the client's optimizer sees it, which
# is what an optimizer of the sum would see; the loss that is reported is that of the rows alone.
# w0 is a part of the optimizer's state, and is sharded as that is.


class ProximalState(NamedTuple):
    """The state of an optimizer with a proximal term.

    Attributes:
        mu: weight of the term, float32 scalar.
        anchor: w0, like the trained parameters.
        inner: of the client's optimizer.
    """

    mu: jax.Array
    anchor: Tree
    inner: Tree


def proximal(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """An optimizer of the loss and the proximal term. Where its state is made, there is the anchor;
    mu is 0 until `with_mu` says more.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> ProximalState:
        return ProximalState(
            mu=jnp.zeros((), jnp.float32),
            anchor=jax.tree.map(jnp.array, params),
            inner=inner.init(params),
        )

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **more: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        assert isinstance(state, ProximalState)

        def pulled(gradient: jax.Array, now: jax.Array, anchor: jax.Array) -> jax.Array:
            term = state.mu.astype(now.dtype) * (now - anchor.astype(now.dtype))
            return gradient + term.astype(gradient.dtype)

        gradients = jax.tree.map(pulled, updates, params, state.anchor)
        inner_updates, after = inner.update(gradients, state.inner, params, **more)
        return inner_updates, state._replace(inner=after)

    return optax.GradientTransformationExtraArgs(init, update)


def with_mu(opt_state: Tree, mu: float) -> Tree:
    """The same state with a weight of the proximal term, where there is one."""

    def weighted(state: ProximalState) -> ProximalState:
        number = jax.device_put(jnp.float32(mu), state.mu.sharding)
        return state._replace(mu=number)

    return _mapped(opt_state, weighted)


def inner_of(opt_state: Tree) -> Tree:
    """The state of the client's own optimizer."""
    return _mapped(opt_state, lambda state: state.inner)


def with_inner(opt_state: Tree, inner: Tree) -> Tree:
    """The same state with that of the client's own optimizer."""
    if isinstance(opt_state, ProximalState):
        return opt_state._replace(inner=inner)
    return inner


def _mapped(opt_state: Tree, change: Callable[[ProximalState], Tree]) -> Tree:
    return change(opt_state) if isinstance(opt_state, ProximalState) else opt_state


# --------------------------------------------------------------------------------------------------
# Requests to a client and their answers: arrays of the host and plain numbers.


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A request to a client.

    Attributes:
        arrays: parameters of the server, by path; or without names, in the order of the paths.
        partition: whose rows, from 0 on.
        partitions: how many there are.
        round: number of the round; the order of rows depends on it.
        mu: weight of the proximal term of FedProx; 0 for none.
        kept: optimizer state of the client's last round, where it is kept.
    """

    arrays: Arrays | Sequence[np.ndarray]
    partition: int
    partitions: int
    round: int = 0
    mu: float = 0.0
    kept: Arrays = field(default_factory=dict[str, np.ndarray])

    def __post_init__(self) -> None:
        if not 0 <= self.partition < self.partitions:
            raise ArgumentError(
                f"partition {self.partition} of {self.partitions}: partitions are counted from 0"
            )
        if not (np.isfinite(self.mu) and self.mu >= 0):
            raise ArgumentError(f"mu is {self.mu}; it is a number of at least 0")


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """A client's answer.

    Attributes:
        weight: how much it counts, see `Local.weight`.
        metrics: "loss", the mean over the steps, or of all rows of an evaluation; "rows"; "steps";
            and means of the user's own.
        arrays: parameters by path; none of an evaluation.
        kept: optimizer state for the client's next round, where it is kept.
    """

    weight: float
    metrics: Mapping[str, float]
    arrays: Arrays = field(default_factory=dict[str, np.ndarray])
    kept: Arrays = field(default_factory=dict[str, np.ndarray])


# --------------------------------------------------------------------------------------------------
# A client's program, and the rounds that it runs: parameters in, parameters out, as arrays of the
# host.
#
# A process plans and compiles once for each job and topology, whatever the number of rounds and of
# clients that it stands for. The proximal term of FedProx is a program of its own, so that clients
# without one do not hold the server's parameters twice.

#: Pairs of a job and a topology whose programs a process keeps.
PROGRAMS_KEPT = 8


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
    if term and (rounded := _rounded(program)):
        raise PinError(
            f"the proximal term of FedProx would be of {rounded} copies of the server's parameters"
            "\nTry: moment_dtype=None"
        )
    if updated := updated_by_steps(program.plan.parameters):
        raise PinError(
            f"steps update {updated}, which are not parameters: each client would have its own"
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
        self._job, self._place, self._made = job, place, dict[bool, Trainer]()

    def of(self, term: bool) -> Trainer:
        """The program with a proximal term, or without."""
        if term not in self._made:
            self._made[term] = Trainer(self._job, self._place, term)
        return self._made[term]

    def any(self) -> Trainer:
        """A program for evaluations, where a term makes no difference."""
        return self.of(next(iter(self._made), False))


@functools.lru_cache(maxsize=PROGRAMS_KEPT)
def _client(job: Job, place: Place) -> Client:
    return Client(job, place)


# --------------------------------------------------------------------------------------------------
# The parts of Flower that are used, by its own names. Flower is imported when first needed.


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
EXAMPLES = "num-examples"
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
            METRICS: app.MetricRecord({**answer.metrics, EXAMPLES: int(answer.weight)}),
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


def metrics(replies: Sequence[RecordDict], weighted_by: str = EXAMPLES) -> MetricRecord:
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
    weighted_by = str(getattr(strategy, "weighted_by_key", EXAMPLES))

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
