"""The programs of a worker: gradients as the plan says, their sum between two pushes, and plain SGD
between two fetches. The sum and the local step stay sharded as gradients and parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np
import optax

from shardlib.annotation.trees.paths import Tree
from shardlib.compiler import compile
from shardlib.errors import PinError, raise_all
from shardlib.lowering.islands.halves import (
    GradientProgram,
    by_path,
    placed_as,
    trained,
    with_placed,
)
from shardlib.lowering.islands.staged import StagedGradients, Sums
from shardlib.lowering.islands.use_order import parts_in_order
from shardlib.lowering.program.program import Program
from shardlib.servers.worker.gradients import Gradients, OfStages, OnHost
from shardlib.servers.worker.job import Job
from shardlib.servers.worker.landing import Landing

#: Random streams of workers are those of seeds that are so far from that of the parameters.
STREAMS = 1 << 16


class Computing:
    """Parameters on the devices of a worker, and what is computed with them.

    Attributes:
        trained: the parameters, abstract, by path.
        parts: their elements in the order of use.
        runs: into how many equal runs each is divided that are needed one by one.
    """

    def __init__(self, job: Job, worker: int, local_rate: float) -> None:
        """Compiles."""
        batch = job.rows(worker, 0)
        program = compile(
            job.init,
            job.loss,
            optax.identity(),
            batch,
            topology=job.topology,
            pin=job.pin,
            batch_axes=job.batch_axes,
            wrt=job.wrt,
        )
        if not isinstance(program, Program):
            raise PinError(
                f"pin of the job has exchange={program.plan.exchange}, and is of one worker"
            )
        staged = None if program.programs is None else StagedGradients.of(program)
        self.gradients = staged or GradientProgram.of(program)
        self.trained = trained(program)
        _require_floating(self.trained)
        self.parts = parts_in_order(program)
        #: Where steps begin before all parameters are there.
        self._staged = staged if staged and staged.runs and not local_rate else None
        self.runs = self._staged.runs if self._staged else dict.fromkeys(self.trained, 1)
        self._landing: Landing | None = None
        state = program.init(job.seed)
        self.params, self.model_state = state.params, state.model_state
        if jax.tree.leaves(self.model_state):
            streams = (job.seed + STREAMS * (worker + 1)) % 2**31
            self.model_state = program.init(streams).model_state
        self._rate = local_rate
        self._add = jax.jit(_added, donate_argnums=0)
        self._move = jax.jit(_moved, static_argnums=2)
        self._sum: Tree = None
        self._sums: tuple[Sums, ...] = ()
        self._rehearse(batch)

    def _rehearse(self, batch: Tree) -> None:
        """Fetches from itself and takes a step, so that nothing is compiled or allocated anew
        between the first fetch and the first push: they would be many updates apart.
        """
        before = self.params, self.model_state, self._landing
        self.fetched(Landing.of(self.first(), self.runs))
        for _ in range(2):
            self.step(batch)()
        self.taken().finite()
        self.params, self.model_state, self._landing = before

    @property
    def program(self) -> Program:
        """The worker's program."""
        return self.gradients.program

    def first(self) -> dict[str, np.ndarray]:
        """The trained parameters as they are, on the host."""
        if self._landing is None:
            return _on_host(self.program.model.partition.trained(self.params))
        return {
            path: self._landing.whole(path).reshape(parameter.shape)
            for path, parameter in self.trained.items()
        }

    def fetched(self, landing: Landing) -> None:
        """Goes on with parameters of the servers; each is placed as soon as it is there."""
        if self._staged:
            self._landing = landing
            return
        placed = {
            path: placed_as(self.trained[path], landing.run(path))
            for path in dict.fromkeys(part.path for part in self.parts)
        }
        self.params = with_placed(self.program, self.params, placed)

    def step(self, batch: Tree) -> Callable[[], float]:
        """Computes a gradient, and adds it to those that wait for the next push."""
        if self._staged:
            return self._begun(self._staged, batch)
        metrics, gradients, self.model_state = self.gradients.call(
            self.params, self.model_state, self.program.put(batch)
        )
        if self._rate:
            partition = self.program.model.partition
            moved = self._move(partition.trained(self.params), gradients, self._rate)
            self.params = partition.joined(moved, self.params)
        self._sum = gradients if self._sum is None else self._add(self._sum, gradients)
        return lambda: float(metrics["loss"])

    def _begun(self, staged: StagedGradients, batch: Tree) -> Callable[[], float]:
        """A step whose stages begin as soon as their parameters are there."""
        assert self._landing is not None, "fetched"
        placed = self.program.put(batch)
        sums = staged.begun(self.params, self.model_state, placed, self._landing)
        self.model_state, self._sums = sums.model_state, (*self._sums, sums)
        return lambda: float(np.asarray(sums.loss)[0]) / sums.count

    def taken(self) -> Gradients:
        """The sum of the gradients since the last call."""
        if self._staged:
            sums, self._sums = self._sums, ()
            return OfStages(sums=sums, trained=self.trained, runs=self.runs)
        total, self._sum = self._sum, None
        return OnHost(arrays=_on_host(total))


def _added(total: Tree, gradients: Tree) -> Tree:
    return jax.tree.map(jax.numpy.add, total, gradients)


def _moved(trained: Tree, gradients: Tree, rate: float) -> Tree:
    return jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), trained, gradients)


def _on_host(tree: Tree) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf, np.float32) for path, leaf in by_path(tree).items()}


def _require_floating(trained: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Refuses parameters that float32 cannot hold."""
    failures = [
        f"{path} is {leaf.dtype}"
        for path, leaf in trained.items()
        if not jax.numpy.issubdtype(leaf.dtype, np.floating) or leaf.dtype.itemsize > 4
    ]
    if failures:
        raise_all(PinError, "parameter servers hold float32, which cannot hold these", failures)
