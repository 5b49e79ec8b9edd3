"""A schedule of two workers through servers of this process, against Downpour in NumPy."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardlib.errors import CheckpointError
from shardlib.islands.exchanges import Asynchronous
from shardlib.islands.servers.crew import joined
from shardlib.islands.servers.server import Service
from shardlib.islands.servers.wire import Ask, divided
from tests.islands.servers.helpers import together

Arrays = dict[str, np.ndarray]
#: (what, worker): worker 1 is two updates late, then three.
SCHEDULE = re.findall(r"\S+", "f0 f1 p0 f0 p0 p1 f1 f0 p0 f0 p0 f0 p0 p1 f1 p1 f0 p0")
SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 2), "b": (5,), "c": ()}


def start() -> Arrays:
    random = np.random.default_rng(0)
    return {path: random.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}


def gradient(params: Arrays, number: int) -> Arrays:
    """Something that depends on the parameters, and on which gradient it is."""
    return {k: np.asarray(np.sin(w * (number + 1)) + w / 2, "f") for k, w in params.items()}


def reference(
    rule: str, rate: float, accumulator: float, by_staleness: bool
) -> tuple[Arrays, dict[int, int]]:
    """Downpour SGD with one server that has everything."""
    w, a = start(), {path: np.full(shape, accumulator) for path, shape in SHAPES.items()}
    held: dict[str, tuple[int, Arrays]] = {}
    clock, stale = 0, dict[int, int]()
    for number, (what, worker) in enumerate(SCHEDULE):
        if what == "f":
            held[worker] = clock, dict(w)
            continue
        seen, params = held[worker]
        s = clock - seen
        stale[s] = stale.get(s, 0) + 1
        eta = rate / (1 + s) if by_staleness else rate
        for k, g in gradient(params, number).items():
            if rule == "adagrad":
                a[k] = a[k] + g.astype(float) ** 2
                w[k] = (w[k] - eta * g / np.sqrt(a[k] + 1e-7)).astype(np.float32)
            else:
                w[k] = (w[k] - eta * g).astype(np.float32)
        clock += 1
    return w, stale


def asked(service: Service, kind: str, worker: int, arrays: Arrays, **more: Any) -> Any:
    answer, found = service.answer(
        Ask(kind=kind, worker=worker, start=f"start {worker}", **more), arrays, worker
    )
    assert answer.kind == "ok", answer.why
    return answer, found


@pytest.mark.parametrize("by_staleness", [True, False])
@pytest.mark.parametrize(("rule", "accumulator"), [("sgd", 0.1), ("adagrad", 0.1), ("adagrad", 0)])
@pytest.mark.parametrize("servers", [1, 3, 30])
def test_servers_do_what_downpour_does(
    rule: Any, accumulator: float, by_staleness: bool, servers: int
) -> None:
    exchange = Asynchronous(
        workers=2,
        servers=servers,
        rule=rule,
        rate=0.3,
        by_staleness=by_staleness,
        accumulator=accumulator,
    )
    services = [Service(exchange=exchange, server=number) for number in range(servers)]
    for service, part in zip(services, divided(start(), servers), strict=True):
        asked(service, "offer", 0, part)
        asked(service, "offer", 1, part)
    held: dict[int, tuple[int, Arrays]] = {}
    for number, (what, who) in enumerate(SCHEDULE):
        worker = int(who)
        if what == "f":
            found = [asked(service, "fetch", worker, {}) for service in services]
            held[worker] = found[0][0].clock, joined([part for _, part in found], SHAPES)
            continue
        seen, params = held[worker]
        parts = divided(gradient(params, number), servers)
        for service, part in zip(services, parts, strict=True):
            asked(service, "push", worker, part, serial=number, seen=seen)
    params, stale = reference(rule, 0.3, accumulator, by_staleness)
    assert max(stale) == 3
    found = joined([service.shard.values or {} for service in services], SHAPES)
    for path, array in params.items():
        np.testing.assert_allclose(found[path], array, rtol=1e-5, atol=1e-6)
    assert all(dict(service.shard.staleness) == stale for service in services)


def test_a_push_that_comes_twice_is_applied_once_also_after_a_restart(tmp_path: Path) -> None:
    exchange = Asynchronous(workers=2, servers=1, rule="adagrad", rate=0.3)
    file = tmp_path / "server-0.safetensors"
    first, again = (
        {k: v.reshape(-1) for k, v in gradient(start(), number).items()} for number in (1, 2)
    )
    service = Service(exchange=exchange, checkpoint=file, save_every=1)
    asked(service, "offer", 0, divided(start(), 1)[0])
    for _ in range(2):
        assert asked(service, "push", 0, first, serial=1)[0].clock == 1
    assert service.again == 1
    restarted = Service(exchange=exchange, checkpoint=file, save_every=1)
    assert restarted.restored
    assert asked(restarted, "push", 0, first, serial=1)[0].clock == 1
    asked(restarted, "push", 0, again, serial=2, seen=1)
    asked(service, "push", 0, again, serial=2, seen=1)
    for path, value in (service.shard.values or {}).items():
        np.testing.assert_array_equal((restarted.shard.values or {})[path], value)
        np.testing.assert_array_equal(restarted.shard.squares[path], service.shard.squares[path])
    assert restarted.shard.staleness == service.shard.staleness
    with pytest.raises(CheckpointError, match="that of server 0 of 1 with adagrad"):
        Service(exchange=Asynchronous(servers=2), checkpoint=file)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="cannot be read"):
        Service(exchange=exchange, checkpoint=file)


def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "gone" / "server-0.safetensors"
    service = Service(exchange=Asynchronous(servers=1), checkpoint=file, save_every=1)
    asked(service, "offer", 0, divided(start(), 1)[0])
    found = {k: v.reshape(-1) for k, v in gradient(start(), 1).items()}
    assert asked(service, "push", 0, found, serial=1)[0].clock == 1
    assert service.events[0].startswith("the checkpoint after 1 pushes is not written: ")


def test_who_waits_is_answered_when_it_may_go_on() -> None:
    service = Service(exchange=Asynchronous(workers=3, servers=1, bound=0))
    for worker in range(3):
        asked(service, "enter", worker, {})
    together(*(partial(asked, service, "enter", worker, {}, step=1) for worker in (0, 1, 2)))
    began, cpu = time.monotonic(), time.process_time()
    answers = together(
        *(
            partial(service.answer, Ask(kind="enter", worker=worker, step=2), {}, worker)
            for worker in (0, 1)
        )
    )
    answers = [answer for answer, _ in answers]
    assert [answer.kind for answer in answers] == ["wait", "wait"]
    assert answers[0].why == "it is 1 steps ahead of worker 2, the bound is 0"
    assert time.monotonic() - began > 0.4
    assert time.process_time() - cpu < 0.2, "they do not wake each other"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda g: g | {"a": g["a"] * np.float32("nan")}, "of a is not finite"),
        (lambda g: g | {"b": g["b"] / np.float32(0)}, "of b is not finite"),
        (
            lambda g: g | {"b": g["b"] * np.float32(1e30)},
            "what becomes of the sums of squares of b",
        ),
        (lambda g: g | {"b": g["b"][:-1]}, r"of b is float32\[4\], and not float32\[5\]"),
        (lambda g: g | {"b": g["b"].astype(float)}, r"of b is float64\[5\]"),
        (lambda g: g | {"d": g["b"]}, "other parameters than this server: d"),
        (lambda g: {"a": g["a"]}, "other parameters than this server: b, c"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_that_cannot_be_used_change_nothing(change: Any, says: str) -> None:
    service = Service(exchange=Asynchronous(workers=2, servers=1))
    asked(service, "offer", 0, divided(start(), 1)[0])
    found = {k: v.reshape(-1) for k, v in gradient(start(), 1).items()}
    before = dict(service.shard.values or {})
    with pytest.raises(AssertionError, match=says):
        asked(service, "push", 1, change(found), serial=1, step=7)
    assert service.shard.clock == 0 and before == service.shard.values
    assert service.events[0].startswith("refused a push of worker 1, step 7")
    asked(service, "push", 0, found, serial=1)
    assert service.shard.clock == 1
