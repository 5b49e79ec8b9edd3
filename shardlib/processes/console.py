"""Several processes of this machine that start and end together, their output on one console, and
addresses of this machine.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TextIO

from shardlib.errors import LaunchError
from shardlib.processes.kin import Guard, end_group, start
from shardlib.untrusted.data import printable

# --------------------------------------------------------------------------------------------------
# One console for many processes: whole lines, each with the number of its process in front.
#
#     [0] going on after step 20 of 100
#     [2] error: there is no data in /data/part-2
#
# Lines of standard output go to standard output, those of standard error to standard error. On a
# terminal every process has its colour.

#: Bytes of a line that is shown as one; of longer ones the rest is a line of its own.
LINE_BYTES = 1 << 16
#: What the collectives of CPU devices print at each connection, from several threads at once and
#: without asking.
NOISE = re.compile(
    r"\[Gloo\] Rank|is connected to \d+ peer ranks|Expected number of connected peer ranks is"
)
#: Sequences that change colour and weight of letters, and nothing else.
COLOURED = re.compile(r"(\x1b\[[0-9;]{0,32}m)")
#: Colours of terminals (ECMA-48), readable on black and on white.
COLOURS = (36, 33, 35, 32, 34, 31)


def tamed(text: str) -> str:
    r"""A line with its colours, and with everything else escaped that a terminal would obey:
    processes show what strangers have called their files and models.

    >>> tamed("a \x1b[31mred\x1b[0m word and a \x1b]0;title\x07")
    'a \x1b[31mred\x1b[0m word and a \\x1b]0;title\\x07'
    """
    return "".join(
        part if i % 2 else printable(part) for i, part in enumerate(COLOURED.split(text))
    )


class Lines:
    """Shows what processes write.

    Attributes:
        last: the last lines that each wrote to standard error, by number.
    """

    def __init__(
        self,
        processes: int,
        *,
        keep: int = 20,
        out: TextIO | None = None,
        err: TextIO | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        processes: how many there are.
        keep: lines in `last`.
        out, err: where to; by default this process's own.
        environ: whose NO_COLOR counts; by default that of this process.
        """
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._plain = "NO_COLOR" in (os.environ if environ is None else environ)
        self._width = len(str(processes - 1))
        self._lock = threading.Lock()
        self.last: dict[int, deque[str]] = {
            number: deque(maxlen=keep) for number in range(processes)
        }

    def follow(self, number: int, stream: IO[bytes], *, error: bool) -> threading.Thread:
        """Shows what comes out of a pipe, in a thread, until it is closed."""
        thread = threading.Thread(
            target=self._copy,
            args=(number, stream, error),
            name=f"shardlib-console-{number}",
            daemon=True,
        )
        thread.start()
        return thread

    def show(self, number: int, text: str, *, error: bool) -> None:
        """Shows one line of a process."""
        if NOISE.search(text):
            return
        if error:
            self.last[number].append(text)
        stream = self._err if error else self._out
        with (
            self._lock,
            contextlib.suppress(BrokenPipeError),
        ):  # who reads has had enough; the processes go on
            stream.write(f"{self._prefix(number, stream)} {tamed(text)}\n")
            stream.flush()

    def say(self, text: str) -> None:
        """A message of the launcher itself."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._err.write(f"{tamed(text)}\n")
            self._err.flush()

    def _copy(self, number: int, stream: IO[bytes], error: bool) -> None:
        with stream:
            for line in iter(lambda: stream.readline(LINE_BYTES), b""):
                # A bar of progress draws itself over and over in one line; what counts is how it
                # looks in the end.
                self.show(
                    number,
                    line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2],
                    error=error,
                )

    def _prefix(self, number: int, stream: TextIO) -> str:
        text = f"[{number:>{self._width}}]"
        return (
            text
            if self._plain or not stream.isatty()
            else f"\x1b[{COLOURS[number % len(COLOURS)]}m{text}\x1b[0m"
        )


# --------------------------------------------------------------------------------------------------
# Processes of this machine that start and end together.
#
# Each is the first of a session and a process group of its own, so that Ctrl-C reaches the
# launcher alone, and that what a process has started can be ended with it. None outlives the
# launcher, even one that is killed: see `shardlib.processes.kin`.

#: Seconds that threads have to show the last lines of processes that have ended.
READ_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class End:
    """A process that has ended.

    Attributes:
        number: of the process.
        code: exit code; negative: the signal that killed it.
    """

    number: int
    code: int


class Processes:
    """Running processes. To be made in a thread that lives as long as they do: the kernel ends them
    with it.
    """

    def __init__(
        self,
        words: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        lines: Lines,
        *,
        first: int = 0,
    ) -> None:
        """Args:
        words: the command of all.
        environments: of each, whole.
        lines: where to show what they write.
        first: number of the first, where it is shown.
        """
        self._first = first
        self.codes: dict[int, int] = {}
        self._ends: queue.SimpleQueue[End] = queue.SimpleQueue()
        self._guard = Guard()
        self._running: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        try:
            for number, environment in enumerate(environments):
                self._start(number, words, environment, lines)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """True if one of them has not ended."""
        return len(self.codes) < len(self._running)

    def next_end(self, seconds: float) -> End | None:
        """The next process that ends, in the order in which they do; None where none does for so
        long.
        """
        with contextlib.suppress(queue.Empty):
            end = self._ends.get(timeout=seconds)
            self.codes[end.number] = end.code
            end_group(self._running[end.number].pid)  # what it has left behind
            self._guard.forget(self._running[end.number].pid)
            return end
        return None

    def pid(self, number: int) -> int:
        """Of a process."""
        return self._running[number].pid

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to all that have not ended."""
        for index, process in enumerate(self._running):
            if index not in self.codes:
                process.send_signal(number)

    def kill(self, number: int | None = None) -> None:
        """Ends one of them, or all, with everything that they have started, at once. Numbers of
        those that have ended may belong to others by now.
        """
        for index, process in enumerate(self._running):
            if index not in self.codes and (number is None or index == number):
                end_group(process.pid)

    def close(self) -> None:
        """Ends all of them, and shows what they wrote last."""
        self.kill()
        for number, process in enumerate(self._running):
            self.codes.setdefault(number, process.wait())
        for reader in self._readers:
            reader.join(READ_SECONDS)
        for process in self._running:
            self._guard.forget(process.pid)
        self._guard.close()

    def _start(
        self, number: int, words: Sequence[str], environment: Mapping[str, str], lines: Lines
    ) -> None:
        process = start(
            words,
            self._guard,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._running.append(process)
        assert process.stdout is not None and process.stderr is not None
        self._readers += [
            lines.follow(self._first + number, process.stdout, error=False),
            lines.follow(self._first + number, process.stderr, error=True),
        ]
        threading.Thread(target=self._wait, args=(number, process), daemon=True).start()

    def _wait(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self._ends.put(End(number=number, code=process.wait()))


LOOPBACK = "127.0.0.1"


def free_port(address: str) -> int:
    """A port of an address of this machine at which nobody listens."""
    try:
        info = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(info[0], socket.SOCK_STREAM) as listener:
            listener.bind(info[4])
            return listener.getsockname()[1]
    except OSError as error:
        raise LaunchError(
            f"{address} is not an address of this machine: {error.strerror or error}\nTry:"
            " 127.0.0.1, or the name of an interface:"
            f" {', '.join(name for _, name in socket.if_nameindex())}"
        ) from error


def address_of(interface: str) -> str:
    """The IPv4 address of an interface of this machine; an address or a host's name is passed
    on.
    """
    if interface not in [name for _, name in socket.if_nameindex()]:
        return interface
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(
                probe.fileno(), 0x8915, struct.pack("256s", interface.encode())
            )  # SIOCGIFADDR, netdevice(7)
        except OSError as error:
            raise LaunchError(
                f"the interface {interface} has no IPv4 address: {error.strerror}\nTry: --interface"
                " ADDRESS"
            ) from error
    return socket.inet_ntoa(answer[20:24])
