"""Workers with programs of their own and servers of this process, one step after the other,
against optax and against Downpour over unsharded gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

import shardlib
from shardlib.islands.servers.crew import joined
from shardlib.islands.servers.server import Service
from shardlib.islands.servers.worker import Computing, Job, Worker
from tests.islands.servers.helpers import Direct
from tests.islands.servers.jobs import job, loss, rows

Tree = Any
STEPS = 12


def crew(exchange: shardlib.Asynchronous, what: Job) -> tuple[list[Worker], list[Service]]:
    """Workers and servers, connected; parameters are offered."""
    services = [Service(exchange=exchange, server=k) for k in range(exchange.servers)]
    workers = [
        Worker(
            number=number,
            exchange=exchange,
            computing=Computing(what, number, exchange.local_rate),
            links=[Direct(service) for service in services],
        )
        for number in range(exchange.workers)
    ]
    for worker in workers:
        worker.begin()
    return workers, services


def held(worker: Worker, services: list[Service]) -> dict[str, np.ndarray]:
    """The parameters of all servers."""
    shapes = {path: leaf.shape for path, leaf in worker.computing.trained.items()}
    return joined([service.shard.values or {} for service in services], shapes)


def first(key: int = 0) -> Tree:
    return (
        shardlib.compile(job().init, loss, optax.identity(), rows(0, 0), topology="cpu:1")
        .init(key)
        .params
    )


@pytest.mark.parametrize("pin", [{"mesh.data": 2}, {"mesh.fsdp": 4, "zero": 3, "microbatches": 2}])
@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [("sgd", optax.sgd(0.1)), ("adagrad", optax.adagrad(0.1, initial_accumulator_value=0.1))],
)
def test_one_worker_is_optax(
    rule: Any, optimizer: optax.GradientTransformation, pin: dict[str, Any]
) -> None:
    exchange = shardlib.Asynchronous(workers=1, servers=2, rule=rule, rate=0.1)
    devices = max(value for key, value in pin.items() if key.startswith("mesh"))
    (worker,), services = crew(exchange, replace(job(), topology=f"cpu:{devices}", pin=pin))
    params: Tree = jax.device_get(first())
    state, gradient = optimizer.init(params), jax.jit(jax.value_and_grad(loss))
    for step in range(STEPS):
        found = worker.step(step, rows(0, step))
        value, g = gradient(params, rows(0, step))
        updates, state = optimizer.update(g, state, params)
        params = optax.apply_updates(params, updates)
        assert found == pytest.approx(float(value), rel=1e-5)
    for path, array in held(worker, services).items():
        np.testing.assert_allclose(array, params[path], rtol=1e-6, atol=1e-6)
    assert services[0].shard.staleness == {0: STEPS}


def downpour(exchange: shardlib.Asynchronous, order: list[int]) -> tuple[Tree, dict[int, int]]:
    """Downpour SGD over the steps of workers in an order: no line of shardlib's servers."""
    w, clock, stale = jax.device_get(first()), 0, dict[int, int]()
    gradient = jax.jit(jax.grad(loss))
    own: dict[int, Any] = dict.fromkeys(order, (None, 0, None, None, 0))
    for worker in order:
        params, newest, total, seen, step = own[worker]
        if step % exchange.fetch == 0:
            params, newest = w, clock
        seen = newest if seen is None else seen
        g = gradient(params, rows(worker, step))
        total = g if total is None else jax.tree.map(np.add, total, g)
        params = jax.tree.map(lambda p, d: p - exchange.local_rate * d, params, g)
        if (step + 1) % exchange.push == 0:
            s = clock - seen
            stale[s] = stale.get(s, 0) + 1
            w = jax.tree.map(lambda p, d, s=s: p - exchange.rate / (1 + s) * d, w, total)
            clock, total, seen = clock + 1, None, None
        own[worker] = params, newest, total, seen, step + 1
    return w, stale


@pytest.mark.parametrize(
    "periods",
    [
        {"fetch": 2},
        {"push": 3},
        {"fetch": 3, "push": 2},
        {"fetch": 2, "push": 4, "local_rate": 0.1},
    ],
)
def test_two_workers_are_downpour(periods: dict[str, Any]) -> None:
    exchange = shardlib.Asynchronous(workers=2, servers=3, rule="sgd", rate=0.1, **periods)
    workers, services = crew(exchange, replace(job(), topology="cpu:2"))
    order = np.random.default_rng(3).integers(0, 2, 24).tolist()
    counts = [0, 0]
    for number in order:
        workers[number].step(counts[number], rows(number, counts[number]))
        counts[number] += 1
    params, stale = downpour(exchange, order)
    for path, array in held(workers[0], services).items():
        np.testing.assert_allclose(array, params[path], rtol=1e-5, atol=1e-6)
    assert dict(services[0].shard.staleness) == stale and max(stale) > 0


def test_frozen_parameters_stay_at_the_worker() -> None:
    what = replace(job(), topology="cpu:2", wrt=lambda path, leaf: "up" not in path)
    exchange = shardlib.Asynchronous(workers=1, servers=1, rule="sgd", rate=0.1)
    (worker,), services = crew(exchange, what)
    before = np.asarray(worker.computing.params["up"])
    for step in range(3):
        worker.step(step, rows(0, step))
    assert services[0].shard.values and services[0].shard.values.keys() == {"bias", "down"}
    np.testing.assert_array_equal(worker.computing.params["up"], before)


def test_steps_that_update_state_are_refused() -> None:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dense = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

    what = Job(
        init=lambda rngs: Net(rngs),
        loss=lambda model, batch: (model.norm(model.dense(batch["x"])) ** 2).mean(),
        rows=rows,
        topology="cpu:2",
    )
    with pytest.raises(shardlib.PinError, match="each worker would have its own"):
        Computing(what, 0, 0.0)


def test_islands_are_no_worker() -> None:
    what = replace(job(), topology="cpu:4", pin={"exchange": "diloco:2:10"})
    with pytest.raises(shardlib.PinError, match="exchange=diloco:2:10, and is of one worker"):
        Computing(what, 0, 0.0)


def test_dropout_differs_from_worker_to_worker() -> None:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dense = nnx.Linear(8, 8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    what = Job(
        init=lambda rngs: Net(rngs),
        loss=lambda model, batch: (model.dropout(model.dense(batch["x"])) ** 2).mean(),
        rows=lambda worker, step: rows(0, 0),
        topology="cpu:2",
    )
    both = [Computing(what, worker, 0.0) for worker in range(2)]
    for path, array in both[0].first().items():
        np.testing.assert_array_equal(array, both[1].first()[path])
    assert both[0].step(rows(0, 0))() != both[1].step(rows(0, 0))()
