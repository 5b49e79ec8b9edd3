"""Elements in buckets, in an order: frames, what servers refuse, and bits that do not change."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from shardlib.errors import ArgumentError
from shardlib.islands import servers
from shardlib.islands.exchanges import Asynchronous, Part
from shardlib.islands.servers.server import Service, scattered
from shardlib.islands.servers.wire import (
    Answer,
    Ask,
    OrderError,
    gathered,
    in_order,
    order_text,
    read_order,
)
from shardlib.islands.servers.worker import Landing, Orders
from shardlib.processes import wire
from shardlib.processes.wire import Later, body_of, made

SIZES = {"a": 6, "b": 1, "w": 40}


def _parts() -> list[Part]:
    """An order that is not that of paths; the layers of w one after the other."""
    rows = [Part(path="w", start=10 * row, stop=10 * row + 10) for row in (2, 0, 3, 1)]
    return [*rows[:2], Part(path="b", start=0, stop=1), *rows[2:], Part(path="a", start=0, stop=6)]


def _values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {path: rng.normal(size=size).astype(np.float32) for path, size in SIZES.items()}


@dataclass
class Heard:
    """What takes a frame, and when."""

    names: list[str] = field(default_factory=list)
    first: threading.Event = field(default_factory=threading.Event)

    def begin(self, header: Any) -> None: ...

    def take(self, name: str, array: np.ndarray) -> None:
        self.names.append(name)
        self.first.set()


def test_a_body_is_safetensors_whatever_the_order() -> None:
    arrays = {
        "z": np.array([[1, 2], [3, 4]], np.float32),
        "a": np.array([7], np.uint8),
        "m": np.zeros((0, 3), "f4"),
    }
    size, chunks = body_of(arrays)
    body = b"".join(bytes(chunk) for chunk in chunks)
    assert len(body) == size
    for name, array in load(body).items():
        np.testing.assert_array_equal(array, arrays[name])
        assert array.dtype == arrays[name].dtype


def test_arrays_are_there_before_the_last_one_is_made() -> None:
    heard = Heard()

    def last() -> np.ndarray:
        assert heard.first.wait(60), "the first array has been taken"
        return np.array([2, 3], np.float32)

    arrays = {"z": np.array([1], np.float32), "a": Later(size=2, make=last)}
    near, far = socket.socketpair()
    with near, far:
        thread = threading.Thread(target=wire.send, args=(near, {}, arrays))
        thread.start()
        wire.receive(far, limit=1 << 10, taken=heard)
        thread.join()
    assert heard.names == ["z", "a"]


@pytest.mark.parametrize(
    "body",
    [
        b"\x01",
        b"\xff" * 16,
        (2).to_bytes(8, "little") + b"[]",
        (24).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}   ',
        (61).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}       '
        + b"\x00" * 4,
        (61).to_bytes(8, "little")
        + b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}       '
        + b"\x00" * 4,
    ],
)
def test_bodies_that_are_none(body: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(wire._LENGTHS.pack(wire.MARK, 2, len(body)) + b"{}" + body)
        with pytest.raises(wire.FrameError):
            wire.receive(far, limit=1 << 10, taken=Heard())


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [4, 28, 1 << 20])
def test_what_is_gathered_lands_where_it_was(servers: int, bucket_bytes: int) -> None:
    from shardlib.islands.servers.wire import divided

    values = _values()
    orders = Orders.of(_parts(), SIZES, servers, bucket_bytes)
    landing = Landing(SIZES, {"a": 1, "b": 1, "w": 4})
    assert not landing.there([("w", 2)])
    for own, way in zip(divided(values, servers), orders.fetches, strict=True):
        receiver = landing.receiver(way.order)
        receiver.begin(Answer(clock=3))
        for name, array in made(gathered(own, read_order(way.text))).items():
            receiver.take(name, array)
            receiver.take(name, array * 0)  # come once more: what was there stays
    for path, value in values.items():
        found = [landing.run(path, number) for number in range(4 if path == "w" else 1)]
        np.testing.assert_array_equal(np.concatenate(found), value)
    whole = {path: value for own in divided(values, servers) for path, value in own.items()}
    for own, way in zip(divided(values, servers), orders.pushes, strict=True):
        sent = in_order(way.order, lambda part: values[part.path][part.start : part.stop])
        back = scattered(made(sent), read_order(way.text))
        assert back.keys() == own.keys() <= whole.keys()
        for path, value in back.items():
            np.testing.assert_array_equal(value, own[path])


def test_the_first_run_is_there_when_its_last_bucket_is() -> None:
    landing = Landing({"w": 4}, {"w": 2})
    landing.put(Part(path="w", start=1, stop=3), np.array([1, 2], np.float32))
    assert not landing.there([("w", 0)]) and not landing.there([("w", 1)])
    landing.put(Part(path="w", start=0, stop=1), np.array([0], np.float32))
    assert landing.there([("w", 0)]) and landing.run("w", 0).tolist() == [0, 1]


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[[]]", '[[["w",0]]]', '[[["w",2,2]]]', '[[["w",-1,2]]]', '[[["w",0,true]]]', "[1]"],
)
def test_texts_that_are_no_order(text: str) -> None:
    with pytest.raises(OrderError):
        read_order(text)


def _service() -> Service:
    service = Service(exchange=Asynchronous(workers=1, servers=1, rule="sgd", rate=1.0))
    service.answer(Ask(kind="offer", worker=0), {"w": np.ones(4, np.float32)}, 0)
    return service


@pytest.mark.parametrize(
    "parts",
    [
        [("w", 0, 3)],
        [("w", 0, 5)],
        [("w", 0, 2), ("w", 1, 4)],
        [("w", 0, 4), ("x", 0, 1)],
        [("w", 1, 4)],
    ],
)
def test_servers_refuse_orders_of_other_elements(parts: list[tuple[str, int, int]]) -> None:
    service = _service()
    text = order_text((tuple(Part(path=p, start=a, stop=b) for p, a, b in parts),))
    answer, found = service.answer(Ask(kind="fetch", worker=0, about=text), {}, 0)
    assert answer.kind == "refused" and not found
    total = sum(b - a for _, a, b in parts)
    sent = {"0": np.ones(total, np.float32)}
    ask = Ask(kind="push", worker=0, serial=1, start="s", about=text)
    answer, _ = service.answer(ask, sent, 0)
    assert answer.kind == "refused" and service.shard.clock == 0


def test_servers_refuse_buckets_that_are_none_of_the_order() -> None:
    service = _service()
    text = order_text(((Part(path="w", start=0, stop=4),),))
    ask = Ask(kind="push", worker=0, serial=1, start="s", about=text)
    for sent in (
        {},
        {"1": np.ones(4, np.float32)},
        {"0": np.ones(3, np.float32)},
        {"0": np.ones(4, np.float64)},
        {"0": np.ones((2, 2), np.float32)},
    ):
        assert service.answer(ask, dict(sent), 0)[0].kind == "refused"
    assert service.shard.clock == 0


def test_a_push_that_says_at_its_end_that_it_is_not_finite_changes_nothing() -> None:
    service = _service()
    text = order_text(((Part(path="w", start=0, stop=4),),))
    ask = Ask(kind="push", worker=0, serial=1, start="s", about=text)
    for whole, clock in ((0, 0), (1, 1)):
        sent = {"0": np.ones(4, np.float32), "whole": np.array([whole], np.uint8)}
        assert service.answer(ask, sent, 0)[0].kind == "ok" and service.shard.clock == clock
    assert any("is not finite" in event for event in service.events)


@pytest.mark.parametrize("bytes_", [0, -4, 100, 4096.0, True, "4MB", None])
def test_buckets_of_no_size_are_refused(bytes_: Any) -> None:
    with pytest.raises(ArgumentError, match="it is an integer of at least 4096"):
        servers.Upkeep(bucket_bytes=bytes_)
