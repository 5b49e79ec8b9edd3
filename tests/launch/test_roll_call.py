"""Processes are threads here: the roll call knows nothing of JAX."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from shardlib.errors import LaunchError
from shardlib.launch import joining
from shardlib.launch.joining import call
from shardlib.processes.console import free_port
from shardlib.processes.place import Place

SAME = {"jax": "0.10.2", "code of shardlib": "abc"}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(joining, "SPEAK_SECONDS", 0.5)
    # Threads of one process are told apart as processes are, by a number of their own.
    monkeypatch.setattr(joining.os, "getpid", threading.get_ident)
    yield Place(
        coordinator=f"127.0.0.1:{free_port('127.0.0.1')}",
        processes=3,
        process=0,
        host_processes=3,
        seconds=20,
        start="now",
    )


def called(
    places: Sequence[Place],
    about: Mapping[int, Mapping[str, str]] | None = None,
    late: Mapping[int, float] | None = None,
) -> tuple[list[str], list[str]]:
    """What every one of the processes got, and what the first said meanwhile."""
    said: list[str] = []

    def one(place: Place) -> str:
        time.sleep((late or {}).get(place.process, 0))
        try:
            return f"{call(place, (about or {}).get(place.process, SAME), say=said.append):.1f}"
        except LaunchError as error:
            return f"{error} [again: {error.again}]"

    with ThreadPoolExecutor(len(places)) as threads:
        return [*threads.map(one, places)], said


def test_all_come_and_the_port_is_free_again(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(joining, "SAY_AFTER", 0.3)
    found, said = called(
        [replace(place, process=number) for number in (2, 0, 1)], late={2: 1.0, 0: 0.2}
    )
    assert all(0 <= float(seconds) < 20 for seconds in found), found
    assert said and all(text.startswith("waiting for process 2 of 3 (") for text in said)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(place.coordinator.rpartition(":")[2])))


def test_who_is_missing_is_named_to_all(place: Place):
    place = replace(place, seconds=2)
    begin = time.monotonic()
    found, _ = called([place, replace(place, process=2)])
    assert time.monotonic() - begin < 30
    assert [text.partition("\n")[0] for text in found] == [
        "the 3 processes cannot work together: process 1 of 3 did not come within 2 s"
    ] * 2
    assert all(text.endswith("[again: True]") for text in found)


def test_two_with_one_number(place: Place):
    found, _ = called([place, replace(place, process=1), replace(place, process=1)])
    assert all(
        "process 1 is there twice: process " in text and text.endswith("[again: False]")
        for text in found
    ), found


def test_other_code_and_another_number_of_processes(place: Place):
    found, _ = called(
        [replace(place, process=number) for number in range(3)],
        about={2: {"jax": "0.12.0", "code of shardlib": "abc"}},
    )
    assert all(
        "cannot work together: jax: 0.10.2 (processes 0 and 1), 0.12.0 (process 2)\n" in text
        for text in found
    ), found
    found, _ = called([place, replace(place, process=1, processes=2)])
    assert all("says that it is process 1 of 2, process 0 waits for 3" in text for text in found), (
        found
    )


@pytest.mark.long
def test_nobody_or_somebody_else_listens(place: Place):
    other = replace(place, process=1, seconds=1)
    assert (
        "cannot reach process 0 at" in called([other])[0][0] and "Connect" in called([other])[0][0]
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", int(place.coordinator.rpartition(":")[2])))
        listener.listen()
        found, _ = called([place, other])
    assert (
        "process 0 cannot listen at 127.0.0.1:" in found[0]
        and "in use" in found[0]
        and found[0].endswith("[again: True]")
    )
    assert "something else listens there" in found[1]


def test_those_of_an_earlier_start_are_not_counted(place: Place):
    found, _ = called(
        [
            *(replace(place, process=number) for number in range(3)),
            replace(place, process=1, start="before", seconds=1),
        ]
    )
    assert all(float(seconds) < 20 for seconds in found[:3]), found
    assert "cannot reach process 0" in found[3]


def test_one_that_ended_while_it_waited_may_come_again(place: Place):
    host, port = place.coordinator.split(":")

    def come_and_go() -> None:
        for _ in range(100):
            try:
                with socket.create_connection((host, int(port))) as talk:
                    asked = joining.greeted(talk.recv(100))
                    talk.sendall(
                        joining.sealed(
                            "",
                            asked,
                            "member",
                            {
                                "me": {
                                    "process": 1,
                                    "processes": 3,
                                    "host": "h",
                                    "pid": 1,
                                    "start": "now",
                                    "about": {},
                                },
                                "asked": "1",
                            },
                        )
                    )
                    time.sleep(0.2)
                    return
            except OSError:
                time.sleep(0.02)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    found, _ = called(
        [replace(place, process=number) for number in range(3)], late={1: 0.6, 2: 0.6}
    )
    thread.join()
    assert all(float(seconds) < 20 for seconds in found), found


# What strangers of the network can do to the roll call: nothing, and they are counted. Few
# connections, on loopback, for seconds.


@pytest.fixture
def crowd(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Three processes that know a secret, and have time for strangers."""
    monkeypatch.setattr(joining, "SPEAK_SECONDS", 3.0)
    return replace(place, seconds=5, secret="nobody knows")


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


def connected(crowd: Place) -> socket.socket:
    """A connection to process 0, as soon as it listens."""
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(
                ("127.0.0.1", int(crowd.coordinator.rpartition(":")[2])), timeout=60
            )
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def attacked(crowd: Place, attack: Callable[[], None]) -> tuple[list[str], list[str], float]:
    """A roll call of three, of whom the last come after the strangers: what they got, what process
    0 said, and how long it took once all were there.
    """
    said: list[str] = []
    struck = threading.Event()
    caught: list[object] = []

    def one(number: int) -> str:
        if number:
            struck.wait(60)
        try:
            call(replace(crowd, process=number, seconds=60), SAME, say=said.append)
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
def test_garbage_is_ignored_and_counted(crowd: Place, what: str, capfd: pytest.CaptureFixture[str]):
    def attack() -> None:
        with connected(crowd) as talk:
            joining.greeted(talk.recv(100))
            with contextlib.suppress(OSError):
                talk.sendall(GARBAGE[what])
                talk.shutdown(socket.SHUT_WR)
                while talk.recv(100):
                    pass

    found, said, seconds = attacked(crowd, attack)
    assert found == ["together"] * 3 and seconds < 3
    assert said == ["the roll call ignored 1 callers that were no processes of this job"]
    assert capfd.readouterr().err == ""  # asyncio has nothing to say of errors that nobody caught


def test_idle_connections_delay_nobody(crowd: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(joining, "SILENT_CALLERS", 20)
    monkeypatch.setattr(joining, "SPEAK_SECONDS", 30.0)
    open_ones: list[socket.socket] = []
    found, said, seconds = attacked(
        crowd, lambda: open_ones.extend(connected(crowd) for _ in range(60))
    )
    for one in open_ones:
        one.close()
    assert found == ["together"] * 3 and seconds < 3, (found, seconds)
    assert said and said[0].startswith("the roll call ignored ")


def test_who_knows_no_secret_cannot_fail_the_others_nor_take_a_place(crowd: Place):
    def attack() -> None:
        for me in ({**ME, "processes": 7}, ME, {**ME, "process": 2}, {**ME, "about": {"jax": "9"}}):
            for secret in ("", "guessed"):
                with connected(crowd) as talk:
                    talk.sendall(
                        joining.sealed(
                            secret,
                            joining.greeted(talk.recv(100)),
                            "member",
                            {"me": me, "asked": "1"},
                        )
                    )
                    talk.recv(100)

    found, said, _ = attacked(crowd, attack)
    assert found == ["together"] * 3 and said == [
        "the roll call ignored 8 callers that were no processes of this job"
    ]


def test_a_line_that_was_overheard_is_of_no_use(crowd: Place):
    heard = joining.sealed(
        crowd.secret, "0" * 32, "member", {"me": {**ME, "processes": 7}, "asked": "1"}
    )

    def attack() -> None:
        with connected(crowd) as talk:
            assert joining.greeted(talk.recv(100)) != "0" * 32
            talk.sendall(heard)
            talk.recv(100)

    assert attacked(crowd, attack)[0] == ["together"] * 3


@pytest.mark.long
def test_a_false_process_0_cannot_fail_the_others(crowd: Place):
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
            false, "127.0.0.1", int(crowd.coordinator.rpartition(":")[2]), limit=1 << 20
        ):
            await asyncio.sleep(6)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    with pytest.raises(
        LaunchError, match="something else listens there, or process 0 ended while it waited"
    ) as caught:
        call(replace(crowd, process=1, seconds=1, coordinator=crowd.coordinator), SAME)
    thread.join()
    assert "you lose" not in str(caught.value) and caught.value.again


@pytest.mark.long
def test_what_others_say_is_escaped(crowd: Place):
    """Even one who knows the secret writes nothing on the terminals of the others."""

    def attack() -> None:
        talk = connected(crowd)
        talk.sendall(
            joining.sealed(
                crowd.secret,
                joining.greeted(talk.recv(100)),
                "member",
                {"me": {**ME, "processes": 7, "host": "evil\x1b[2J\x07"}, "asked": "1"},
            )
        )
        talk.recv(1000)
        talk.close()

    found, _, _ = attacked(crowd, attack)
    assert "evil\\x1b[2J\\x07 says that it is process 1 of 7" in found[0] and "\x1b" not in "".join(
        found
    )


def test_without_a_secret_the_start_still_tells_the_processes_apart(crowd: Place):
    assert attacked(replace(crowd, secret=""), lambda: None)[0] == ["together"] * 3
