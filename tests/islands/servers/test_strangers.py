"""What strangers send to a server: refused and named, and the others go on."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from shardlib.errors import LaunchError
from shardlib.islands.exchanges import Asynchronous
from shardlib.islands.servers.server import Service
from shardlib.islands.servers.service import Listening
from shardlib.islands.servers.wire import (
    Ask,
    Connection,
    MessageError,
    address_file,
    listed,
    read_ask,
)
from shardlib.processes import wire as door_module
from shardlib.processes.wire import Door
from tests.processes import until

SECRET = "the secret of the run"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Listening]:
    service = Service(exchange=Asynchronous(workers=2, servers=1, rule="sgd", rate=1.0))
    listening = Listening(service=service, secret=SECRET)
    where = f'{{"host": "127.0.0.1", "port": {listening.port}}}'
    address_file(tmp_path, 0).write_text(where)
    thread = threading.Thread(target=listening.serve)
    thread.start()
    link = connection(tmp_path)
    link.ask(Ask(kind="offer", worker=0), {"w": np.ones(3, np.float32)})
    yield listening
    answer, found = link.ask(Ask(kind="fetch", worker=0))
    assert answer.kind == "ok" and found["w"].tolist() == [1, 1, 1], "it goes on as before"
    link.close()
    listening.close()
    thread.join()


def connection(
    folder: Path, worker: int = 0, word: str = SECRET, patience_s: float = 60.0
) -> Connection:
    return Connection(
        where=listed(folder, 0), server=0, worker=worker, secret=word, patience_s=patience_s
    )


def event(server: Listening, says: str) -> None:
    """Waits until the server names it."""
    until(lambda: any(says in one for one in server.service.events))


def greeted(server: Listening, worker: int = 1) -> socket.socket:
    stream = socket.create_connection(("127.0.0.1", server.port))
    door_module.introduce(stream, SECRET, 0, worker)
    return stream


def frame(header: bytes, body: bytes = b"", mark: bytes = door_module.MARK) -> bytes:
    return struct.pack("<4sIQ", mark, len(header), len(body)) + header + body


def test_who_does_not_know_the_secret(server: Listening, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="server 0 has not answered"):
        connection(tmp_path, 1, "another", patience_s=1.0).ask(Ask(kind="fetch", worker=1))
    event(server, "refused a stranger: it does not know the secret")


def test_a_server_that_does_not_know_the_secret(tmp_path: Path) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    where = f'{{"host": "127.0.0.1", "port": {listening.getsockname()[1]}}}'
    address_file(tmp_path, 0).write_text(where)

    def answer() -> None:
        stream, _ = listening.accept()
        with stream:
            door_module.send(stream, {"number": "0" * 32}, {})
            door_module.receive(stream, limit=0)
            door_module.send(stream, {"line": '{"said": "{}", "seal": "00"}'}, {})

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(LaunchError, match="server 0 is a stranger"):
        connection(tmp_path).ask(Ask(kind="fetch", worker=0))
    thread.join()
    listening.close()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n", "refused a stranger: it does not begin"),
        (frame(b"{}"), "it has no line"),
        (frame(b'{"line": "{}"}'), "refused a stranger"),
        (frame(b"[" * 4_000), "nested deeper"),
        (frame(b"{}", b"x"), "refused a stranger: its header has 2 bytes and its body 1"),
        (
            struct.pack("<4sIQ", door_module.MARK, 2**32 - 1, 0),
            "refused a stranger: its header has",
        ),
        (
            struct.pack("<4sIQ", door_module.MARK, 4097, 0),
            "has 4,097 bytes and its body 0; the most are",
        ),
    ],
)
def test_garbage_before_the_secret(server: Listening, data: bytes, says: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stream:
        stream.sendall(data)
        event(server, says)
        with contextlib.suppress(ConnectionResetError):
            while stream.recv(1 << 16):
                pass  # the server closes


PUSH = b'{"kind": "push", "worker": 1, "serial": 1, "start": "x"}'


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (frame(b"{}", mark=b"\x80\x04\x95."), "it does not begin as a frame does"),
        (frame(b"{}"), "kind is missing"),
        (frame(b'{"kind": 3, "worker": 1}'), "kind is 3; it is a text"),
        (frame(b'{"kind": "fetch", "worker": 1, "seen": 1e400}'), "the header is not valid JSON"),
        (frame(b"\xff\xfe"), "closed the connection of worker 1"),
        (frame(PUSH, b"\x80\x04no safetensors"), "its layout has"),
        (frame(PUSH, struct.pack("<Q", 1 << 60) + b"{}"), "its layout has"),
        (struct.pack("<4sIQ", door_module.MARK, 2, 1 << 50), "the most are"),
    ],
)
def test_garbage_after_it(server: Listening, data: bytes, says: str) -> None:
    with greeted(server) as stream:
        stream.sendall(data)
        event(server, says)


@pytest.mark.parametrize(
    ("header", "body", "says"),
    [
        ({"kind": "fetch", "worker": 0}, {}, "refused a fetch of worker 1: it speaks for worker 0"),
        ({"kind": "run", "worker": 1}, {}, "there is no such message"),
        ({"kind": "push", "worker": 1, "serial": 1}, {"w": np.full(3, np.nan, "f")}, "not finite"),
        ({"kind": "push", "worker": 1, "serial": 1}, {"w": np.ones(3, "i4")}, "is int32[3]"),
        ({"kind": "offer", "worker": 1}, {"v": np.ones(3, "f")}, "other parameters"),
    ],
)
def test_messages_that_are_refused_leave_the_connection(
    server: Listening, header: dict[str, object], body: dict[str, np.ndarray], says: str
) -> None:
    with greeted(server) as stream:
        door_module.send(stream, header, body)
        assert door_module.receive(stream, limit=1 << 20).header["kind"] == "refused"
        event(server, says)
        door_module.send(stream, {"kind": "fetch", "worker": 1}, {})
        assert door_module.receive(stream, limit=1 << 20).header["kind"] == "ok"


def test_whatever_becomes_of_a_frame_it_is_an_answer_or_named() -> None:
    """Bytes of a push are changed, removed and put in; the lengths fit again, mostly."""
    random = np.random.default_rng(0)
    service = Service(exchange=Asynchronous(workers=2, servers=1))
    service.answer(Ask(kind="offer", worker=0), {"w": np.ones(3, np.float32)}, 0)
    body, found = save({"w": np.ones(3, np.float32)}), set[str]()
    for number in range(1000):
        data = bytearray(PUSH + body)
        for place in random.integers(0, len(data) - 8, random.integers(1, 4)):
            new = random.choice([b"", b"9" * 20, b"1e999", b'"', b"{", b"BF16", random.bytes(3)])
            data[place : place + random.integers(0, 5)] = new
        lengths = struct.pack("<4sIQ", door_module.MARK, len(PUSH), len(data) - len(PUSH))
        ours, theirs = socket.socketpair()
        with theirs:
            with ours:
                ours.sendall((lengths if number % 5 else b"") + data)
            try:
                frame = door_module.receive(theirs, limit=1 << 20)
                answer, _ = service.answer(read_ask(frame.header), dict(frame.arrays), 1)
                found.add(answer.kind)
            except (door_module.FrameError, door_module.ClosedError, MessageError) as error:
                found.add(type(error).__name__)
    assert found >= {"ok", "FrameError", "MessageError"}


def test_a_frame_that_stops_halfway_stops_nobody(server: Listening) -> None:
    with greeted(server) as stream:
        whole = frame(PUSH, save({"w": np.ones(3, np.float32)}))
        stream.sendall(whole[:-5])
        with greeted(server, 1) as other:
            door_module.send(other, {"kind": "fetch", "worker": 1}, {})
            assert door_module.receive(other, limit=1 << 20).header["kind"] == "ok"


@contextlib.contextmanager
def dripping(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Strangers who begin a frame and send a byte of it now and then."""
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    ended = threading.Event()

    def drip() -> None:
        for one in strangers:
            one.sendall(struct.pack("<4sIQ", door_module.MARK, 4000, 0))
        while not ended.wait(0.1):
            for one in strangers:
                with contextlib.suppress(OSError):
                    one.send(b"0")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield strangers
    finally:
        ended.set()
        thread.join()
        for one in strangers:
            one.close()


def test_strangers_who_drip_hold_up_nobody(server: Listening, tmp_path: Path) -> None:
    with dripping(server.port, 60):
        begun = time.monotonic()
        link = connection(tmp_path, 1)
        assert link.ask(Ask(kind="fetch", worker=1))[0].kind == "ok"
        assert time.monotonic() - begun < 15
        link.close()


def test_a_greeting_has_one_deadline_and_refusals_are_noted_ever_more_rarely() -> None:
    listener, notes, refused = socket.create_server(("127.0.0.1", 0)), list[str](), list[int]()
    door = Door(
        listener,
        SECRET,
        0,
        enter=lambda stream, who: stream.close(),
        refused=lambda: refused.append(1),
        note=notes.append,
        seconds=0.5,
    )
    threading.Thread(target=door.serve, daemon=True).start()
    begun = time.monotonic()
    with dripping(listener.getsockname()[1], 20) as strangers:
        for one in strangers:
            with contextlib.suppress(ConnectionResetError):
                while one.recv(1 << 10):
                    pass
    assert 0.4 < time.monotonic() - begun < 8  # twenty times 0.5 one after the other
    until(lambda: len(refused) >= 20)  # a stranger is let go before it is counted
    door.close()
    assert len(refused) == 20 and len(notes) == 9
    assert "it has not said who it is within 0.5 s" in notes[0]


def test_of_too_many_strangers_those_of_one_address_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door_module, "STRANGERS", 4)
    listener, came = socket.create_server(("0.0.0.0", 0)), list[int]()

    def enter(stream: socket.socket, who: int) -> None:
        came.append(who)
        stream.close()

    door = Door(listener, SECRET, 0, enter=enter)
    threading.Thread(target=door.serve, daemon=True).start()
    port = listener.getsockname()[1]
    other = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
    many = [socket.create_connection(("127.0.0.1", port)) for _ in range(6)]
    for one in many[:3]:  # the first of them are sent away
        while one.recv(1 << 10):
            pass
    door_module.introduce(other, SECRET, 0, 7)
    door_module.introduce(many[-1], SECRET, 0, 8)
    until(lambda: sorted(came) == [7, 8])
    door.close()
    for one in (other, *many):
        one.close()


def test_a_stage_of_a_chain_is_reached_past_strangers() -> None:
    pytest.importorskip("jax")
    from shardlib.serve.edge import DRIVER, Entrance

    listener = socket.create_server(("127.0.0.1", 0))
    entrance, port = Entrance(listener, SECRET), listener.getsockname()[1]
    with dripping(port, 5), contextlib.closing(entrance):
        begun = time.monotonic()
        gone, before, driver = (socket.create_connection(("127.0.0.1", port)) for _ in range(3))
        door_module.introduce(gone, SECRET, 0, DRIVER)
        gone.close()
        door_module.introduce(before, SECRET, 0, 3)
        door_module.introduce(driver, SECRET, 0, DRIVER)
        with entrance.accepted(DRIVER, 60.0) as taken, entrance.accepted(3, 60.0) as other:
            assert time.monotonic() - begun < 15
            driver.sendall(b"a")
            before.sendall(b"b")
            assert (taken.recv(1), other.recv(1)) == (b"a", b"b")
        with pytest.raises(TimeoutError):
            entrance.accepted(DRIVER, 0.01)
        before.close()
        driver.close()
