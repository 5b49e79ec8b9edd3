"""The relay as a link, and what strangers send to the outer server."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import shardlib
from shardlib.islands.servers.island import Exchanging
from shardlib.islands.servers.relay import Link, Relay, meeting_bytes, read_link
from shardlib.islands.servers.rounds import Outline, RoundService
from shardlib.islands.servers.service import Listening
from shardlib.islands.servers.wire import Connection
from shardlib.processes.wire import introduce
from tests.islands.servers.test_rounds import entered_all

TOKEN = "a secret word"
OUTLINE = Outline.of({"w": (100, 250)})


@pytest.fixture
def server() -> Iterator[Listening]:
    listening = Listening(service=RoundService(islands=2), secret=TOKEN)
    thread = threading.Thread(target=listening.serve)
    thread.start()
    yield listening
    listening.close()
    thread.join()


def island(
    port: int, number: int, token: str = TOKEN, patience_s: float = 60.0, **more: object
) -> Exchanging:
    where = ("127.0.0.1", port)
    link = Connection(
        where=lambda: where, server=0, worker=number, secret=token, patience_s=patience_s
    )
    exchange = shardlib.DiLoCo(islands=2, every=1, **more)  # pyright: ignore
    return Exchanging(link=link, number=number, exchange=exchange, outline=OUTLINE, weight=1.0)


def first() -> dict[str, np.ndarray]:
    return {"w": np.ones((100, 250), np.float32)}


def both(*islands: Exchanging) -> None:
    futures = [one.send(lambda: [np.zeros(25_000, np.float32)]) for one in islands]
    assert all(future.result() for future in futures)


def test_a_meeting_over_a_relay_takes_what_was_said(server: Listening) -> None:
    link = read_link("8mbit-30ms")
    with Relay(port=server.port, link=link) as relay:
        one, two = island(relay.at, 0), island(server.port, 1)
        entered_all(first, one, two)
        began = time.monotonic()
        both(one, two)
        took = time.monotonic() - began
        size = meeting_bytes(one.exchange, OUTLINE)
        assert size == 100_000 + 512
        said = link.seconds(size, size)
        assert said == pytest.approx(2 * 100_512 / 1e6 + 0.06)
        assert 0.97 * said < took < said + 20, "a busy machine takes longer"
        relay.stall(0.5)
        began = time.monotonic()
        both(one, two)
        assert time.monotonic() - began > 0.5 + 0.9 * said
        relay.cut()  # the connection is made anew
        both(one, two)
        one.close()
        two.close()


@pytest.mark.parametrize("text", ["10", "0mbit", "10mbit-", "-1mbit", "10kbit"])
def test_links_that_are_none(text: str) -> None:
    with pytest.raises(shardlib.ArgumentError, match="link is"):
        read_link(text)
    with pytest.raises(shardlib.ArgumentError, match="a rate of more than 0"):
        Link(bytes_per_s=0.0, latency_s=0.0)


def test_strangers_are_refused_and_the_others_go_on(server: Listening) -> None:
    one, two = island(server.port, 0), island(server.port, 1)
    entered_all(first, one, two)
    stranger = island(server.port, 1, "another word", patience_s=1.0)
    with pytest.raises(shardlib.LaunchError, match="has not answered"):
        stranger.enter(dict)
    with socket.create_connection(("127.0.0.1", server.port)) as stream:
        stream.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while stream.recv(1 << 12):
                pass
    with socket.create_connection(("127.0.0.1", server.port)) as stream:
        introduce(stream, TOKEN, 0, 7)  # it knows the token, and is not an island of this run
        stream.sendall(b"x" * 64)
        with contextlib.suppress(ConnectionResetError):
            while stream.recv(1 << 12):
                pass
    both(one, two)
    events = server.service.events
    for says in ("does not know the secret", "does not begin as a frame", "connection of island 7"):
        assert any(says in one for one in events), events
    one.leave()
    both(two)
    two.leave()
    with pytest.raises(shardlib.LaunchError, match="was closed here"):
        two.enter(first)


def test_who_waits_for_others_can_leave(server: Listening) -> None:
    one, two = island(server.port, 0), island(server.port, 1)
    entered_all(first, one, two)
    waiting = one.send(lambda: [np.zeros(25_000, np.float32)])
    time.sleep(0.2)
    one.close()
    with pytest.raises(shardlib.LaunchError, match="was closed here"):
        waiting.result()
    two.close()
