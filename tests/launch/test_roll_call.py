"""Processes are threads here: the roll call knows nothing of JAX."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
    monkeypatch.setattr(joining, "SPEAK_SECONDS", 0.5)
    # Threads of one process are told apart as processes are, by a number of their own.
    monkeypatch.setattr(joining.os, "getpid", threading.get_ident)
    yield Place(
        coordinator=f"127.0.0.1:{free_port('127.0.0.1')}",
        processes=3,
        process=0,
        host_processes=3,
        seconds=2,
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
    assert all(0 <= float(seconds) < 2 for seconds in found), found
    assert said and all(text.startswith("waiting for process 2 of 3 (") for text in said)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(place.coordinator.rpartition(":")[2])))


def test_who_is_missing_is_named_to_all(place: Place):
    begin = time.monotonic()
    found, _ = called([place, replace(place, process=2)])
    assert time.monotonic() - begin < 4
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
    assert all(float(seconds) < 2 for seconds in found[:3]), found
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
    assert all(float(seconds) < 2 for seconds in found), found
