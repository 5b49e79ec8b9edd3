"""Whole runs: processes of workers and servers, some of which are paused or killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import shardlib
from shardlib.islands import servers
from shardlib.islands.servers.crew import WorkerStep, read_steps
from tests.islands.servers import jobs
from tests.islands.servers.test_worker import first
from tests.processes import until

UPKEEP = servers.Upkeep(save_every=1)


def pid(run: Path, name: str) -> int:
    return json.loads((run / "pids.json").read_text())[name]


def done(run: Path, worker: int) -> int:
    """Steps that a worker has done."""
    return len(read_steps(run / f"worker-{worker}.jsonl"))


def train(job: Any, steps: int, **more: Any) -> servers.Trained:
    return servers.train(job, steps, **{"devices": 2, "say": lambda _: None, **more})


@contextlib.contextmanager
def running(job: Any, steps: int, **more: Any) -> Iterator[list[servers.Trained]]:
    """A run in a thread; what came of it, once it has ended."""
    found: list[servers.Trained] = []
    thread = threading.Thread(target=lambda: found.append(train(job, steps, **more)))
    thread.start()
    try:
        yield found
    finally:
        thread.join()


@pytest.mark.long
def test_a_server_that_is_killed_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """One worker, SGD, a checkpoint at every push: plain SGD, whatever is killed."""
    steps = 60
    exchange = shardlib.Asynchronous(workers=1, servers=2, rule="sgd", rate=0.1)
    with running(jobs.slow_job, steps, exchange=exchange, run=tmp_path, upkeep=UPKEEP) as found:
        for number, after in ((0, 10), (1, 25), (0, 40)):
            until(lambda after=after: done(tmp_path, 0) >= after)
            os.kill(pid(tmp_path, f"server-{number}"), signal.SIGKILL)
    (trained,) = found
    assert [one for one in trained.events if "started again" in one] == [
        f"server {number} was killed by SIGKILL; it is started again from its checkpoint"
        for number in (0, 1, 0)
    ]
    params: Any = jax.device_get(first())
    optimizer = optax.sgd(0.1)
    state, gradient = optimizer.init(params), jax.jit(jax.grad(jobs.loss))
    for step in range(steps):
        updates, state = optimizer.update(gradient(params, jobs.rows(0, step)), state)
        params = optax.apply_updates(params, updates)
    for path, array in trained.params.items():
        np.testing.assert_allclose(array, params[path], rtol=1e-5, atol=1e-6)
    assert trained.pushes == (steps, steps)
    program = shardlib.compile(
        jobs.job().init, jobs.loss, optimizer, jobs.rows(0, 0), topology="cpu:2"
    )
    evaluated = program.evaluate(trained.state(program), jobs.rows(9, 9))
    assert float(evaluated["loss"]) == pytest.approx(float(jobs.loss(params, jobs.rows(9, 9))))


@pytest.mark.long
def test_nobody_waits_for_a_worker_that_is_paused_or_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEST_TOGETHER", str(tmp_path))
    steps = 150
    exchange = shardlib.Asynchronous(workers=3, servers=2, rate=0.05)
    with running(jobs.slow_job, steps, exchange=exchange, run=tmp_path) as found:
        until(lambda: all(done(tmp_path, worker) >= 5 for worker in range(3)))
        os.kill(pid(tmp_path, "worker-2"), signal.SIGSTOP)
        paused = time.time()
        os.kill(pid(tmp_path, "worker-1"), signal.SIGKILL)
        time.sleep(2.0)
        went_on = time.time()
        os.kill(pid(tmp_path, "worker-2"), signal.SIGCONT)
    (trained,) = found
    during = [one for one in trained.steps[0] if paused < one.at_s < went_on]
    assert len(during) > 10, "worker 0 went on"
    assert longest_gap(trained.steps[0]) < 1.9 < longest_gap(trained.steps[2])
    assert not [one for one in trained.steps[2] if paused + 0.2 < one.at_s < went_on]
    assert [len(one) for one in trained.steps[::2]] == [steps, steps]
    assert 5 <= len(trained.steps[1]) < steps
    assert "worker 1 was killed by SIGKILL; the others go on" in trained.events
    assert any("server 0: worker 1 is gone at its step" in one for one in trained.events)
    assert trained.pushes[0] == sum(trained.staleness[0].values()) >= 2 * steps
    assert np.mean(trained.losses[0][-40:]) < 0.7 * np.mean(trained.losses[0][:10])


def longest_gap(steps: tuple[WorkerStep, ...]) -> float:
    return max(b.at_s - a.at_s for a, b in itertools.pairwise(steps))


@pytest.mark.long
def test_a_bound_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Worker 0 is fast, and waits for worker 1 alone where it is three steps ahead."""
    monkeypatch.setenv("TEST_BEGUN", str(tmp_path / "worker-1.jsonl"))
    exchange = shardlib.Asynchronous(workers=2, servers=1, bound=3)
    trained = train(jobs.uneven_job, 40, exchange=exchange, run=tmp_path)
    fast, slow = trained.steps
    times = [one.at_s for one in slow]
    ahead = [one.step - int(np.searchsorted(times, one.at_s)) for one in fast]
    # Steps of worker 1 count from where worker 0 was: at its first or second.
    assert max(ahead) <= 3 + 1
    assert sum(one.waited_s for one in fast) > 10 * 0.05 > sum(one.waited_s for one in slow)


@pytest.mark.long
def test_a_gradient_that_is_not_finite_is_pushed_to_nobody(tmp_path: Path) -> None:
    exchange = shardlib.Asynchronous(workers=2, servers=2)
    trained = train(jobs.bad_job, 8, exchange=exchange, run=tmp_path)
    assert trained.pushes == (15, 15)
    assert np.isnan(trained.losses[1][3]) and np.isfinite(trained.losses[1][4:]).all()
    assert [one for one in trained.events if "not finite" in one] == [
        f"server {number}: the gradient of worker 1, step 3, is not finite" for number in range(2)
    ]
    again = train(jobs.job, 2, exchange=exchange, run=tmp_path)
    assert again.pushes == (19, 19), "a run goes on at its checkpoints"
    assert [len(one) for one in again.losses] == [2, 2]


@pytest.mark.long
def test_a_server_that_is_killed_too_often_ends_the_run(tmp_path: Path) -> None:
    exchange = shardlib.Asynchronous(workers=1, servers=2)
    errors: list[str] = []

    def until_it_ends() -> None:
        try:
            upkeep = servers.Upkeep(restarts=0)
            train(jobs.slow_job, 10_000, exchange=exchange, run=tmp_path, upkeep=upkeep)
        except shardlib.LaunchError as error:
            errors.append(str(error))

    thread = threading.Thread(target=until_it_ends)
    thread.start()
    until(lambda: done(tmp_path, 0) >= 3)
    with pytest.raises(shardlib.OwnedError):
        train(jobs.job, 1, exchange=exchange, run=tmp_path)
    pids = [pid(tmp_path, name) for name in ("worker-0", "server-0", "server-1")]
    os.kill(pids[2], signal.SIGKILL)
    thread.join(30)
    assert errors and errors[0].startswith("server 1 was killed by SIGKILL")
    for number in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


@pytest.mark.long
def test_a_job_that_cannot_be_planned_says_why(tmp_path: Path) -> None:
    exchange = shardlib.Asynchronous(workers=1, servers=1)
    with pytest.raises(shardlib.LaunchError, match=r"(?s)no worker has ended well.*zero is 9"):
        train(jobs.wrong_job, 2, exchange=exchange)


def test_a_script_without_a_guard_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLIB_WORKER", "{}")
    with pytest.raises(shardlib.LaunchError, match="under if __name__"):
        servers.train(jobs.job, 1, exchange=shardlib.Asynchronous())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"job": lambda: None}, "a function at the top of"),
        ({"steps": 0}, "steps is 0; it is an integer of at least 1"),
        ({"exchange": shardlib.DiLoCo()}, "it is a shardlib.Asynchronous"),
        ({"devices": 0}, "devices is 0"),
        ({"engine": "mpi"}, "engine is 'mpi'; it is 'local' or 'ray'"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], says: str) -> None:
    usual = {"job": jobs.job, "steps": 1, "exchange": shardlib.Asynchronous()}
    with pytest.raises(shardlib.ArgumentError, match=says):
        servers.train(**usual | arguments)
    with pytest.raises(shardlib.ArgumentError, match="save_every is -1"):
        servers.Upkeep(save_every=-1)
