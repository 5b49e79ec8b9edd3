"""Stages that are connected, and the batches that go through them."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardlib.errors import LaunchError
from shardlib.servers.wire.connection import keep_alive
from shardlib.servers.wire.frames import receive, send
from shardlib.servers.wire.secret import GREETING_SECONDS, introduce
from shardlib.serving.edge.cutting import StageProgram
from shardlib.serving.edge.stage import BROKEN, DRIVER, MOST_BYTES, SILENT_SECONDS, Entrance
from shardlib.serving.edge.workers import Workers

#: Seconds that a stage has to load and compile its part.
READY_SECONDS = 300.0


class StageError(LaunchError):
    """A stage is gone.

    Attributes:
        stage: its number in the chain.
        address: where it listened.
    """

    def __init__(self, stage: int, address: tuple[str, int], why: str) -> None:
        super().__init__(f"stage {stage} of the chain, at {address[0]}:{address[1]}, {why}")
        self.stage, self.address = stage, address


@dataclass(kw_only=True)
class Chain:
    """Connected stages; to be closed.

    Attributes:
        addresses: of the process of each stage.
        drivers: a connection to each stage.
        first: to the first stage, for batches.
        last: from the last stage, for results.
        heard: when each stage has last given a sign of life.
        gone: of the first stage that was lost, with why.
    """

    addresses: Sequence[tuple[str, int]]
    drivers: list[socket.socket]
    first: socket.socket
    last: socket.socket
    heard: list[float]
    gone: list[tuple[int, str]] = field(default_factory=list)

    def close(self) -> None:
        """Ends all connections: every stage waits for its next part then."""
        for connection in (*self.drivers, self.first, self.last):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def through(
        self, batches: Mapping[int, Sequence[np.ndarray]]
    ) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Sends batches, and gives results with their numbers as they come."""
        results: queue.Queue[tuple[int, list[np.ndarray]] | None] = queue.Queue()

        def sending() -> None:
            with contextlib.suppress(*BROKEN):
                for number, arrays in batches.items():
                    named = {str(k): array for k, array in enumerate(arrays)}
                    send(self.first, {"batch": number}, named)

        def receiving() -> None:
            with contextlib.suppress(*BROKEN):
                while True:
                    frame = receive(self.last, limit=MOST_BYTES)
                    number = frame.header.get("batch")
                    assert isinstance(number, int)
                    arrays = [frame.arrays[str(k)] for k in range(len(frame.arrays))]
                    results.put((number, arrays))
            results.put(None)

        for loop in (sending, receiving):
            threading.Thread(target=loop, daemon=True).start()
        left = len(batches)
        while left:
            self._check()
            try:
                result = results.get(timeout=0.2)
            except queue.Empty:
                continue
            if result is None:
                self._lost()
            assert result is not None
            left -= 1
            yield result

    def _check(self) -> None:
        if self.gone:
            self._lost()
        now = time.monotonic()
        for stage, last in enumerate(self.heard):
            if now - last > SILENT_SECONDS:
                reason = f"has given no sign of life for {SILENT_SECONDS:g} s"
                raise StageError(stage, self.addresses[stage], reason)

    def _lost(self) -> None:
        """Says which stage is gone: that whose own connection has closed first."""
        until = time.monotonic() + SILENT_SECONDS
        while not self.gone and time.monotonic() < until:
            time.sleep(0.05)
        stage, why = self.gone[0] if self.gone else (len(self.drivers) - 1, "says nothing more")
        raise StageError(stage, self.addresses[stage], why)


def connected(
    workers: Workers,
    addresses: Sequence[tuple[str, int]],
    stages: Sequence[StageProgram],
    least_s: Sequence[float],
) -> Chain:
    """Hands every stage its part, and connects them.

    Args:
        least_s: seconds that a batch takes at least on each; 0 for no device that is simulated.
    """
    count, stage = len(stages), 0
    with contextlib.ExitStack() as opened:
        try:
            drivers = list[socket.socket]()
            for stage in range(count):
                drivers.append(opened.enter_context(_to(workers, addresses[stage])))
            # Where the first stage sees this process: loopback for processes of this machine.
            host = drivers[0].getsockname()[0]
            listener = socket.create_server((host, 0))
            with contextlib.closing(Entrance(listener, workers.secret)) as entrance:
                after = [*addresses[1:], (host, listener.getsockname()[1])]
                for stage, program in enumerate(stages):
                    header, arrays = _told(program, stage, after[stage], least_s[stage])
                    drivers[stage].settimeout(READY_SECONDS)
                    send(drivers[stage], header, arrays)
                for stage in range(count):
                    receive(drivers[stage], limit=0)
                for stage in range(count):
                    send(drivers[stage], {"go": True}, {})
                stage = count - 1  # a stage is let in once the next one is
                last = entrance.accepted(stage, GREETING_SECONDS)
                opened.enter_context(last)
            stage = 0
            first = opened.enter_context(_to(workers, addresses[0]))
        except BROKEN as error:
            reason = f"does not answer ({error})"
            raise StageError(stage, addresses[stage], reason) from error
        opened.pop_all()
    chain = Chain(
        addresses=list(addresses),
        drivers=drivers,
        first=first,
        last=last,
        heard=[time.monotonic()] * count,
    )
    for number in range(count):
        threading.Thread(target=_listen, args=(chain, number), daemon=True).start()
    return chain


def _to(workers: Workers, address: tuple[str, int]) -> socket.socket:
    stream = socket.create_connection(address, GREETING_SECONDS)
    try:
        keep_alive(stream)
        introduce(stream, workers.secret, 0, DRIVER)
    except BROKEN as error:
        stream.close()
        raise ConnectionError(f"{error}; a stage with another secret does that, too") from error
    except BaseException:
        stream.close()
        raise
    stream.settimeout(None)
    return stream


def _told(
    program: StageProgram, number: int, after: tuple[str, int], least_s: float
) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    arrays = {"program": np.frombuffer(program.program, np.uint8)}
    arrays |= {f"weight{k}": array for k, array in enumerate(program.weights)}
    arrays |= {f"taken{k}": np.zeros(a.shape, a.dtype) for k, a in enumerate(program.taken)}
    header: dict[str, object] = {
        "stage": number,
        "after": list(after),
        "after_number": number + 1,
        "weights": len(program.weights),
        "taken": len(program.taken),
        "least_s": least_s,
    }
    return header, arrays


def _listen(chain: Chain, number: int) -> None:
    """Hears signs of life, and when a stage is gone."""
    stream = chain.drivers[number]
    try:
        stream.settimeout(None)
        while True:
            receive(stream, limit=0)
            chain.heard[number] = time.monotonic()
    except BROKEN as error:
        chain.gone.append((number, f"is gone ({error})"))
