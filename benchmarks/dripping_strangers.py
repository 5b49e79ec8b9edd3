"""Time to be let in, while strangers hold connections open by dripping bytes.

    python -m benchmarks dripping_strangers

A hundred connections begin a greeting and send a byte of it every half a second, at a stage of a
chain, at the outer server of islands, and at a server of parameters; new ones come in place of
those that are cut off. Meanwhile one that knows the secret connects forty times: the seconds until it is
let in, or answered, at most and in the middle, beside those without strangers. All are to be below
one.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.environment import command_line, write
from shardlib.islands.exchanges import Asynchronous
from shardlib.islands.servers.rounds import RoundService
from shardlib.islands.servers.server import Service
from shardlib.islands.servers.service import Listening
from shardlib.islands.servers.wire import Ask, Connection
from shardlib.processes.wire import MARK, introduce
from shardlib.serve.edge import DRIVER, Entrance

SECRET = "the secret of the benchmark"


@contextlib.contextmanager
def dripping(port: int, count: int) -> Iterator[list[int]]:
    """Strangers until the end of the block; how many were cut off."""
    ended, cut = threading.Event(), list[int]()

    def begun() -> socket.socket:
        one = socket.create_connection(("127.0.0.1", port))
        one.sendall(struct.pack("<4sIQ", MARK, 4000, 0))
        return one

    strangers = [begun() for _ in range(count)]

    def drip() -> None:
        while not ended.wait(0.5):
            for number, one in enumerate(strangers):
                try:
                    one.send(b"0")
                except OSError:
                    cut.append(number)
                    one.close()
                    strangers[number] = begun()

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield cut
    finally:
        ended.set()
        thread.join()
        for one in strangers:
            one.close()


def seconds_of(enter: Callable[[int], None], tries: int) -> dict[str, float]:
    """Seconds of each try, in the middle and at most."""
    found = list[float]()
    for number in range(tries):
        begun = time.monotonic()
        enter(number)
        found.append(time.monotonic() - begun)
        time.sleep(0.75)
    return {"median": statistics.median(found), "most": max(found)}


def measured(port: int, enter: Callable[[int], None], strangers: int, tries: int) -> dict[str, Any]:
    """Without strangers, and with them."""
    quiet = seconds_of(enter, 4)
    with dripping(port, strangers) as cut:
        return {
            "quiet_seconds": quiet,
            "strangers_seconds": seconds_of(enter, tries),
            "cut_off": len(cut),
        }


def stage(strangers: int, tries: int) -> dict[str, Any]:
    """A stage of a chain."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with contextlib.closing(Entrance(listener, SECRET)) as entrance:

        def enter(number: int) -> None:
            del number
            with socket.create_connection(("127.0.0.1", port)) as driver:
                introduce(driver, SECRET, 0, DRIVER)
                entrance.accepted(DRIVER, 60.0).close()

        return measured(port, enter, strangers, tries)


def server(service: Any, kind: str, strangers: int, tries: int) -> dict[str, Any]:
    """A server that answers."""
    listening = Listening(service=service, secret=SECRET)
    threading.Thread(target=listening.serve, daemon=True).start()

    def enter(number: int) -> None:
        where = ("127.0.0.1", listening.port)
        link = Connection(where=lambda: where, server=0, worker=number % 2, secret=SECRET)
        link.ask(Ask(kind=kind, worker=number % 2))
        link.close()

    try:
        return measured(listening.port, enter, strangers, tries)
    finally:
        listening.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "dripping_strangers.json")
    parser.add_argument("--strangers", type=int, default=100)
    parser.add_argument("--tries", type=int, default=40)
    options = parser.parse_args(arguments)
    many = options.strangers, options.tries
    parameters = Service(exchange=Asynchronous(workers=2, servers=1))
    result = {
        "strangers": options.strangers,
        "stage of a chain": stage(*many),
        "outer server of islands": server(RoundService(islands=2), "report", *many),
        "server of parameters": server(parameters, "report", *many),
    }
    write(options.out, result, quiet=True)
    print(json.dumps(result, indent=1))
