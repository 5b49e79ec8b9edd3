"""Workers whose stages are programs of their own: each begins when its own parameters are there."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.islands.exchanges import Part
from shardlib.islands.program import Run, StagedGradients
from shardlib.islands.servers.worker import Computing, Landing, Orders, Worker
from tests.islands.servers.helpers import Direct
from tests.islands.servers.test_worker import Service, held

WIDTH, VOCABULARY, LAYERS = 8, 12, 4
AXES = {
    "z_embed": ("vocab", "embed"),
    "layers": {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")},
    "a_head": ("embed", "vocab"),
}


def _weights(key: jax.Array) -> Any:
    keys = jax.random.split(key, 4)
    return {
        "z_embed": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        "layers": {
            "up": jax.random.normal(keys[1], (LAYERS, WIDTH, 2 * WIDTH)) / 3,
            "down": jax.random.normal(keys[2], (LAYERS, 2 * WIDTH, WIDTH)) / 4,
        },
        "a_head": jax.random.normal(keys[3], (WIDTH, VOCABULARY)) / 3,
    }


def _loss(params: Any, batch: Any) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, params["z_embed"][batch["tokens"]], params["layers"])
    logits = jax.nn.log_softmax(x @ params["a_head"])
    return -jnp.mean(jnp.take_along_axis(logits, batch["next"][..., None], -1))


def _rows(worker: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([worker, step])
    tokens = rng.integers(0, VOCABULARY, (8, 5), dtype=np.int32)
    return {"tokens": tokens, "next": (tokens + 1) % VOCABULARY}


def _job(**pin: Any) -> shardlib.servers.Job:
    pin = {"mesh": {"stage": 2}, "microbatches": 4, "pipeline": "programs", **pin}
    return shardlib.servers.Job(
        init=shardlib.tree(_weights, AXES), loss=_loss, rows=_rows, topology="cpu:2", pin=pin
    )


@pytest.fixture(scope="module")
def staged() -> Computing:
    return Computing(_job(), 0, 0.0)


def _worker(computing: Computing, **exchange: Any) -> tuple[Worker, list[Service]]:
    exchanged = shardlib.Asynchronous(workers=1, servers=2, rule="sgd", rate=0.5, **exchange)
    services = [Service(exchange=exchanged, server=number) for number in range(2)]
    links = [Direct(service) for service in services]
    worker = Worker(
        number=0, exchange=exchanged, computing=computing, links=links, bucket_bytes=128
    )
    worker.begin()
    return worker, services


def _trained(computing: Computing, shuffled: bool = False, **exchange: Any) -> dict[str, Any]:
    computing._landing = None
    worker, services = _worker(computing, **exchange)
    if shuffled:
        parts = random.Random(0).sample(computing.parts, len(computing.parts))
        worker.orders = Orders.of(parts, worker._sizes, 2, 64)
    for step in range(4):
        worker.step(step, _rows(0, step), last=step == 3)
    return held(worker, services)


def test_stages_need_their_own_layers_and_ends_whole(staged: Computing) -> None:
    assert staged.runs == {"z_embed": 1, "layers.up": 2, "layers.down": 2, "a_head": 1}
    assert isinstance(staged.gradients, StagedGradients)
    assert set(staged.gradients.needs(0)) == {("z_embed", 0), ("layers.up", 0), ("layers.down", 0)}
    assert set(staged.gradients.needs(1)) == {("a_head", 0), ("layers.up", 1), ("layers.down", 1)}


@pytest.mark.parametrize("exchange", [{}, {"fetch": 2, "push": 2}])
def test_they_train_as_sgd_does_whatever_the_order(staged: Computing, exchange: Any) -> None:
    found = _trained(staged, **exchange)
    for path, array in _trained(staged, shuffled=True, **exchange).items():
        np.testing.assert_array_equal(array, found[path])
    params: Any = jax.jit(_weights)(jax.random.key(0))
    gradient, every = jax.jit(jax.grad(_loss)), exchange.get("push", 1)
    total: Any = None
    for step in range(4):
        now = gradient(params, _rows(0, step))
        total = now if total is None else jax.tree.map(jnp.add, total, now)
        if (step + 1) % every == 0:
            params = optax.apply_updates(params, jax.tree.map(lambda g: -0.5 * g, total))
            total = None
    np.testing.assert_allclose(found["layers.up"], params["layers"]["up"], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(found["z_embed"], params["z_embed"], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(found["a_head"], params["a_head"], rtol=2e-5, atol=2e-6)


class _Late(Landing):
    """Parameters of which the second stage's come when they are waited for."""

    def __init__(self, computing: Computing, events: list[str]) -> None:
        super().__init__({p: leaf.size for p, leaf in computing.trained.items()}, computing.runs)
        self.events, self.values = events, computing.first()
        self.second = [Part(path="a_head", start=0, stop=self.values["a_head"].size)]
        for path, array in self.values.items():
            size, runs = array.size, computing.runs[path]
            if runs == 2:
                self.second.append(Part(path=path, start=size // 2, stop=size))
            if path != "a_head":
                self.put(
                    Part(path=path, start=0, stop=size // runs), array.reshape(-1)[: size // runs]
                )

    def run(self, path: str, number: int = 0) -> np.ndarray:
        if not self.there([(path, number)]):
            self.events.append("waits")
            for part in self.second:
                self.put(part, self.values[part.path].reshape(-1)[part.start : part.stop])
        return super().run(path, number)


def test_the_first_stage_goes_forward_while_the_second_waits(staged: Computing) -> None:
    gradients, events = staged.gradients, list[str]()
    assert isinstance(gradients, StagedGradients)
    chunk = gradients.dispatch.chunks[0]
    forward = chunk.forward
    assert forward is not None

    def told(inputs: Any) -> Any:
        events.append("forward")
        return forward(inputs)

    chunks = (replace(chunk, forward=told), *gradients.dispatch.chunks[1:])  # type: ignore[arg-type]
    known = replace(gradients, dispatch=replace(gradients.dispatch, chunks=chunks))
    landing = _Late(staged, events)
    batch = staged.program.put(_rows(0, 0))
    sums = known.begun(staged.params, staged.model_state, batch, landing)
    assert events[:2] == ["forward", "forward"] and events.count("waits") == 1
    whole = Landing.of(staged.first(), staged.runs)
    again = gradients.begun(staged.params, staged.model_state, batch, whole)
    for run, parts in again.parts.items():
        for one, other in zip(parts, sums.parts[run], strict=True):
            np.testing.assert_array_equal(one, other)


def test_casts_and_local_steps_wait_for_all_parameters() -> None:
    def cast(params: Any, batch: Any) -> jax.Array:
        return _loss(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), batch)

    computing = Computing(replace(_job(), loss=cast), 0, 0.0)
    assert set(computing.runs.values()) == {1}
    one = Computing(replace(_job(), loss=cast, topology="cpu:1", pin=None), 0, 0.0)
    found = [_trained(each)["layers.up"] for each in (computing, one)]
    np.testing.assert_allclose(*found, rtol=0.05, atol=0.01)


def test_a_gradient_that_is_not_finite_changes_nothing(staged: Computing) -> None:
    staged._landing = None
    worker, services = _worker(staged)
    broken = dict(services[1].shard.values or {})
    broken["z_embed"] = np.full_like(
        broken["z_embed"], np.inf
    )  # so that all gradients are not numbers
    services[1].shard.values = broken
    worker.step(0, _rows(0, 0))
    assert [service.shard.clock for service in services] == [0, 0]
    assert all(any("is not finite" in one for one in s.events) for s in services)


def test_a_server_that_is_gone_ends_the_step(staged: Computing) -> None:
    landing = Landing({p: leaf.size for p, leaf in staged.trained.items()}, staged.runs)
    threading.Timer(0.2, landing.fail, [shardlib.errors.LaunchError("server 0 is gone")]).start()
    runs: tuple[Run, ...] = (("a_head", 0),)
    assert not landing.there(runs)
    staged.fetched(landing)
    with pytest.raises(shardlib.errors.LaunchError, match="server 0 is gone"):
        staged.step(_rows(0, 0))
