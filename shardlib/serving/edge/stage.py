"""The process of a stage: it waits for its part, then for batches, and passes on what it computes.

    python -m shardlib.serving.edge.stage [--listen HOST:PORT] [--secret-file F]

Without a file the secret comes in the environment, and the address that it listens at is printed.
Every connection is of `shardlib.servers.wire`: both ends show that they know the secret, lengths
are held against limits before anything is read, and what is sent is arrays and a program of
`jax.export`, nothing that Python would run. A chain that breaks leaves the process as it was:
it waits for the next part. What goes over the connection is not encrypted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
from jax import export

from shardlib.launching.meeting.wire import StrangerError
from shardlib.servers.wire.connection import keep_alive
from shardlib.servers.wire.door import Door
from shardlib.servers.wire.frames import ClosedError, Frame, FrameError, receive, send
from shardlib.servers.wire.secret import GREETING_SECONDS, introduce
from shardlib.serving.edge.places import listener, long_enough, read_address, read_secret

#: Number by which whoever drives the chain introduces itself; stages have theirs from 0 on.
DRIVER = 1 << 20
#: Seconds between signs of life, and after which a chain without any is broken.
ALIVE_SECONDS, SILENT_SECONDS = 0.5, 5.0
#: Bytes of arrays of a message, at most.
MOST_BYTES = 1 << 36
#: Connections that have shown the secret and wait for their turn.
MOST_WAITING = 64
#: Batches that wait on either side of the computation.
WAITING = 2
SECRET = "SHARDLIB_EDGE_SECRET"
BROKEN = (OSError, FrameError, ClosedError, StrangerError)


@dataclass(kw_only=True)
class Part:
    """What a stage was told.

    Attributes:
        number: of the stage.
        after: address of the stage after it, or of whoever drives the chain.
        after_number: by which that one introduces itself.
        least_s: seconds that a batch takes at least: another device is simulated.
        compute: arrays in -> arrays out.
    """

    number: int
    after: tuple[str, int]
    after_number: int
    least_s: float
    compute: Callable[[Sequence[np.ndarray]], list[np.ndarray]]
    links: list[socket.socket] = field(default_factory=list)

    def close(self) -> None:
        """Ends what it is connected to, also for threads that wait."""
        for link in self.links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()


class Entrance:
    """Where the driver and the stage before connect; strangers hold up nobody.

    Args:
        listener: a listening socket, which it owns.
        secret: of the chain.
    """

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, socket.socket]] = []
        self._door = Door(listener, secret, 0, enter=self._entered, note=_say)
        threading.Thread(target=self._door.serve, daemon=True).start()

    def accepted(self, number: int, seconds: float | None) -> socket.socket:
        """The first connection from whom it is wanted.

        Args:
            seconds: that it may take; None for as long as it takes.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._from(number), seconds):
                raise TimeoutError(f"nobody has connected within {seconds} s")
            first = self._from(number)[0]
            self._waiting.remove((number, first))
            return first

    def forget(self, but: int) -> None:
        """Connections that wait are of a chain that has broken."""
        with self._changed:
            for _, stream in [entry for entry in self._waiting if entry[0] != but]:
                stream.close()
            self._waiting = [entry for entry in self._waiting if entry[0] == but]

    def close(self) -> None:
        """Nobody can connect any more."""
        self._door.close()
        self.forget(-1)

    def _entered(self, stream: socket.socket, who: int) -> None:
        with self._changed:
            self._waiting.append((who, stream))
            if len(self._waiting) > MOST_WAITING:
                self._waiting.pop(0)[1].close()
            self._changed.notify_all()

    def _from(self, number: int) -> list[socket.socket]:
        """Connections of a number that wait and are not closed at the other end."""
        gone = [entry for entry in self._waiting if entry[0] == number and _is_closed(entry[1])]
        for _, stream in gone:
            stream.close()
        self._waiting = [entry for entry in self._waiting if entry not in gone]
        return [stream for who, stream in self._waiting if who == number]


def _is_closed(stream: socket.socket) -> bool:
    try:
        return not stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def serve(listener: socket.socket, secret: str) -> None:
    """Takes one part after the other."""
    entrance = Entrance(listener, secret)
    while True:
        with contextlib.suppress(*BROKEN):
            driver = entrance.accepted(DRIVER, None)
            entrance.forget(DRIVER)
            with contextlib.closing(driver):
                _one_chain(entrance, driver, secret)


def _one_chain(entrance: Entrance, driver: socket.socket, secret: str) -> None:
    part = _part(receive(driver, limit=MOST_BYTES))
    send(driver, {"ready": part.number}, {})
    part.links.append(driver)
    receive(driver, limit=0)  # all are ready
    lives = threading.Event()
    watch = [
        threading.Thread(target=_sign, args=(driver, lives, part), daemon=True),
        threading.Thread(target=_watch, args=(driver, part), daemon=True),
    ]
    for thread in watch:
        thread.start()
    try:
        after = _connect(part, secret)
        before = part.number - 1 if part.number else DRIVER
        came = entrance.accepted(before, GREETING_SECONDS)
        part.links += [after, came]
        _batches(part, came, after)
    finally:
        for link in part.links[1:]:
            link.close()
        watch[1].join(1.0)  # whoever drives the chain should hear first of the stage that is gone
        lives.set()
        part.close()


def _connect(part: Part, secret: str) -> socket.socket:
    stream = socket.create_connection(part.after, GREETING_SECONDS)
    keep_alive(stream)
    introduce(stream, secret, 0, part.number)
    stream.settimeout(None)
    return stream


def _sign(driver: socket.socket, ended: threading.Event, part: Part) -> None:
    """Says that this process lives, until the chain ends."""
    while not ended.wait(ALIVE_SECONDS):
        try:
            send(driver, {"alive": part.number}, {})
        except OSError:
            return


def _watch(driver: socket.socket, part: Part) -> None:
    """Ends the chain when its driver is gone."""
    with contextlib.suppress(*BROKEN):
        receive(driver, limit=0)
    part.close()


def _part(frame: Frame) -> Part:
    """What a driver says."""
    header, arrays = frame.header, frame.arrays
    after, count, taken = header.get("after"), header.get("weights"), header.get("taken")
    match header:
        case {"stage": int(number), "after_number": int(after_number)}:
            pass
        case _:
            raise FrameError("it is no part of a chain")
    minimum = header.get("least_s", 0.0)
    if (
        not isinstance(after, list)
        or len(after) != 2
        or not isinstance(after[0], str)
        or not isinstance(after[1], int)
        or not isinstance(count, int)
        or not isinstance(taken, int)
        or not isinstance(minimum, int | float)
        or "program" not in arrays
    ):
        raise FrameError("it is no part of a chain")
    try:
        weights = [jax.device_put(arrays[f"weight{k}"]) for k in range(count)]
        first = [arrays[f"taken{k}"] for k in range(taken)]
        program = jax.jit(export.deserialize(bytearray(arrays["program"].tobytes())).call)
    except (KeyError, ValueError) as error:
        raise FrameError(f"it is no part of a chain: {error}") from error

    def compute(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(array) for array in program(weights, list(inputs))]

    compute(first)  # compiles
    return Part(
        number=number,
        after=(after[0], after[1]),
        after_number=after_number,
        least_s=float(minimum),
        compute=compute,
    )


def _batches(part: Part, came: socket.socket, after: socket.socket) -> None:
    """Computes batches until one end is gone; messages go beside the computation."""
    received: queue.Queue[Frame | None] = queue.Queue(WAITING)
    done: queue.Queue[tuple[dict[str, int], dict[str, np.ndarray]] | None] = queue.Queue(WAITING)

    def receiving() -> None:
        with contextlib.suppress(*BROKEN):
            while True:
                received.put(receive(came, limit=MOST_BYTES))
        received.put(None)

    def sending() -> None:
        while (message := done.get()) is not None:
            try:
                send(after, message[0], message[1])
            except BROKEN:
                part.close()

    threads = [threading.Thread(target=loop, daemon=True) for loop in (receiving, sending)]
    for thread in threads:
        thread.start()
    while (frame := received.get()) is not None:
        start = time.perf_counter()
        number = frame.header.get("batch")
        if not isinstance(number, int):
            break
        arrays = [frame.arrays[str(k)] for k in range(len(frame.arrays))]
        results = part.compute(arrays)
        time.sleep(max(0.0, part.least_s - (time.perf_counter() - start)))
        done.put(({"batch": number}, {str(k): array for k, array in enumerate(results)}))
    done.put(None)
    threads[1].join(SILENT_SECONDS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Listens until it is ended."""
    parser = argparse.ArgumentParser(description="One stage of a chain of unlike devices.")
    parser.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT; loopback by default")
    parser.add_argument("--secret-file", type=Path, help="that all stages know")
    options = parser.parse_args(arguments)
    secret = (
        read_secret(options.secret_file)
        if options.secret_file
        else long_enough(os.environ.get(SECRET, ""))
    )
    server_socket = listener(read_address(options.listen, "--listen"))
    print(server_socket.getsockname()[1], flush=True)
    if options.secret_file is None:  # whoever started it holds the other end of its input
        threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(server_socket, secret)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
