"""What strangers of the network can do to the roll call: nothing, and they are counted. Few
connections, on loopback, for seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from shardlib.errors import LaunchError
from shardlib.launch import joining
from shardlib.launch.joining import call
from shardlib.processes.console import free_port
from shardlib.processes.place import Place

SAME = {"jax": "0.10.2"}
ME = {"process": 1, "processes": 3, "host": "h", "pid": 1, "start": "now", "about": SAME}
#: What strangers say, after the greeting.
GARBAGE = {
    "a line of the web": b"GET / HTTP/1.1\r\n\r\n",
    "no UTF-8": b"\xff\xfe\n",
    "no JSON": b"hello\n",
    "a number": b"7\n",
    "deep": b"[" * 60_000 + b"\n",
    "an endless line": b"x" * 200_000,
    "a huge number": b'{"said": 1e999}\n',
    "empty": b"\n",
    "a line of the version before": (
        b'{"process": 1, "processes": 3, "host": "h", "pid": 1, "start": "now", "about": {}}\n'
    ),
    "no secret": joining.sealed("", "0" * 32, "member", {"me": ME, "asked": "1"}),
    "half a line": b'{"said": ',
    "many lines": b"{}\n" * 1000,
}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(joining, "SPEAK_SECONDS", 3.0)
    monkeypatch.setattr(joining, "SPEAK_SECONDS", 3.0)
    monkeypatch.setattr(joining.os, "getpid", threading.get_ident)
    yield Place(
        coordinator=f"127.0.0.1:{free_port('127.0.0.1')}",
        processes=3,
        process=0,
        host_processes=3,
        seconds=5,
        start="now",
        secret="nobody knows",
    )


def connected(place: Place) -> socket.socket:
    """A connection to process 0, as soon as it listens."""
    end = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection(
                ("127.0.0.1", int(place.coordinator.rpartition(":")[2])), timeout=3
            )
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def attacked(place: Place, attack: Callable[[], None]) -> tuple[list[str], list[str], float]:
    """A roll call of three, of whom the last come after the strangers: what they got, what process
    0 said, and how long it took once all were there.
    """
    said: list[str] = []
    struck = threading.Event()
    caught: list[object] = []

    def one(number: int) -> str:
        if number:
            struck.wait(10)
        try:
            call(replace(place, process=number), SAME, say=said.append)
            return "together"
        except LaunchError as error:
            return str(error)

    begin = [0.0]

    def strike() -> None:
        try:
            attack()
        except Exception as error:
            caught.append(error)
        begin[0] = time.monotonic()
        struck.set()

    with ThreadPoolExecutor(4) as threads:
        waiting = threads.submit(strike)
        found = [*threads.map(one, range(3))]
        waiting.result()
    assert caught == []
    return found, said, time.monotonic() - begin[0]


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_ignored_and_counted(place: Place, what: str, capfd: pytest.CaptureFixture[str]):
    def attack() -> None:
        with connected(place) as talk:
            joining.greeted(talk.recv(100))
            with contextlib.suppress(OSError):
                talk.sendall(GARBAGE[what])
                talk.shutdown(socket.SHUT_WR)
                while talk.recv(100):
                    pass

    found, said, seconds = attacked(place, attack)
    assert found == ["together"] * 3 and seconds < 3
    assert said == ["the roll call ignored 1 callers that were no processes of this job"]
    assert capfd.readouterr().err == ""  # asyncio has nothing to say of errors that nobody caught


def test_idle_connections_delay_nobody(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(joining, "SILENT_CALLERS", 20)
    monkeypatch.setattr(joining, "SPEAK_SECONDS", 30.0)
    monkeypatch.setattr(joining, "SPEAK_SECONDS", 30.0)
    open_ones: list[socket.socket] = []
    found, said, seconds = attacked(
        place, lambda: open_ones.extend(connected(place) for _ in range(60))
    )
    for one in open_ones:
        one.close()
    assert found == ["together"] * 3 and seconds < 3, (found, seconds)
    assert said and said[0].startswith("the roll call ignored ")


def test_who_knows_no_secret_cannot_fail_the_others_nor_take_a_place(place: Place):
    def attack() -> None:
        for me in ({**ME, "processes": 7}, ME, {**ME, "process": 2}, {**ME, "about": {"jax": "9"}}):
            for secret in ("", "guessed"):
                with connected(place) as talk:
                    talk.sendall(
                        joining.sealed(
                            secret,
                            joining.greeted(talk.recv(100)),
                            "member",
                            {"me": me, "asked": "1"},
                        )
                    )
                    talk.recv(100)

    found, said, _ = attacked(place, attack)
    assert found == ["together"] * 3 and said == [
        "the roll call ignored 8 callers that were no processes of this job"
    ]


def test_a_line_that_was_overheard_is_of_no_use(place: Place):
    heard = joining.sealed(
        place.secret, "0" * 32, "member", {"me": {**ME, "processes": 7}, "asked": "1"}
    )

    def attack() -> None:
        with connected(place) as talk:
            assert joining.greeted(talk.recv(100)) != "0" * 32
            talk.sendall(heard)
            talk.recv(100)

    assert attacked(place, attack)[0] == ["together"] * 3


@pytest.mark.long
def test_a_false_process_0_cannot_fail_the_others(place: Place):
    """It answers whatever it likes; who knows the secret goes on looking for the right one."""
    lines = [
        joining.sealed("", "1", "first", {"failures": ["\x1b[2J you lose"], "again": False}),
        b"[" * 50_000 + b"\n",
        b"x" * 3_000_000,
        b'{"failures": ["no"], "again": false}\n',
        b"\xff\n",
    ]

    async def false(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(joining.greeting(joining.number()))
            await reader.readuntil()
            writer.write(lines[0] if len(lines) == 1 else lines.pop(0))
            await writer.drain()
        writer.close()

    async def serve() -> None:
        async with await asyncio.start_server(
            false, "127.0.0.1", int(place.coordinator.rpartition(":")[2]), limit=1 << 20
        ):
            await asyncio.sleep(6)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    with pytest.raises(
        LaunchError, match="something else listens there, or process 0 ended while it waited"
    ) as caught:
        call(replace(place, process=1, seconds=1, coordinator=place.coordinator), SAME)
    thread.join()
    assert "you lose" not in str(caught.value) and caught.value.again


@pytest.mark.long
def test_what_others_say_is_escaped(place: Place):
    """Even one who knows the secret writes nothing on the terminals of the others."""

    def attack() -> None:
        talk = connected(place)
        talk.sendall(
            joining.sealed(
                place.secret,
                joining.greeted(talk.recv(100)),
                "member",
                {"me": {**ME, "processes": 7, "host": "evil\x1b[2J\x07"}, "asked": "1"},
            )
        )
        talk.recv(1000)
        talk.close()

    found, _, _ = attacked(place, attack)
    assert "evil\\x1b[2J\\x07 says that it is process 1 of 7" in found[0] and "\x1b" not in "".join(
        found
    )


def test_without_a_secret_the_start_still_tells_the_processes_apart(place: Place):
    assert attacked(replace(place, secret=""), lambda: None)[0] == ["together"] * 3
