"""Runs native code on a stranger's input in processes of its own, with limits.

A library that is written in C or Rust may take for ever, take all memory, or overflow its stack on
a hostile input, and no `except` catches that. So a *program*, one file that imports the library and
nothing of shardlib, is run by an isolated Python (`confined_child.py`), which prepares it once and
forks for each piece of work: a fork has limits of its own, and ends alone.

    confined = Confined(Path("reverse.py"), limits=ChildLimits(seconds=2.0))
    with confined.fork() as fork:
        header, body = fork.call("reverse", {"text": "abc"})

The file has a function `prepare(given, body) -> (operations, about)`: operations take (header,
body) and return (header, body), and whatever they raise is a `RefusedError` here. Nothing that
comes back is ever run: headers are JSON, bodies are bytes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from shardlib.errors import ShardlibError
from shardlib.untrusted.data import JsonMapping, JsonObject, Limits, fit, parse_json, printable

CHILD = Path(__file__).with_name("confined_child.py")
_LENGTHS = struct.Struct("<II")
#: Seconds by the clock for each second of computation that is allowed: the machine may be busy.
PATIENCE = 10.0


class RefusedError(ShardlibError, ValueError):
    """A program has refused its input, or went beyond its limits.

    Attributes:
        ended: whether the process has ended: by a limit, or by a fault of the library.
    """

    def __init__(self, message: str, *, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


@dataclass(frozen=True, kw_only=True)
class ChildLimits:
    """Limits of a process.

    Attributes:
        seconds: of computation, of one call.
        memory_bytes: of address space, beyond what the prepared program has.
        stack_bytes: of the thread that computes.
        answer_bytes: of what one call returns.
        prepare_seconds: of computation, until the program is prepared.
        prepare_bytes: of address space of the prepared program.
    """

    seconds: float = 2.0
    memory_bytes: int = 1 << 28
    stack_bytes: int = 1 << 23
    answer_bytes: int = 1 << 26
    prepare_seconds: float = 60.0
    prepare_bytes: int = 1 << 32

    @property
    def text(self) -> str:
        """Of one call, for messages."""
        return (
            f"{self.seconds:g} s of computation, {self.memory_bytes >> 20} MiB of memory or"
            f" {self.stack_bytes >> 20} MiB of stack"
        )


class Confined:
    """A program that is prepared in a process of its own, and forked for each piece of work.

    Methods may be called from any thread. The process starts with the first fork, and anew where it
    has ended.

    Args:
        program: the file, see above.
        given: of `prepare`, plain data.
        body: of `prepare`.
        limits: of the process and of its forks.
    """

    def __init__(
        self,
        program: Path,
        *,
        given: JsonMapping | None = None,
        body: bytes = b"",
        limits: ChildLimits | None = None,
    ) -> None:
        self.limits = limits or ChildLimits()
        self._program, self._given, self._body = program, dict(given or {}), body
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Fork | None = None
        self._about: tuple[JsonObject, bytes] = {}, b""
        self._idle: list[Fork] = []

    def about(self) -> tuple[JsonObject, bytes]:
        """Returns the description that `prepare` gave."""
        with self._lock:
            self._started()
            return self._about

    def fork(self) -> Fork:
        """A process of the prepared program; to be closed."""
        with self._lock:
            for again in (True, False):
                control = self._started()
                ours, theirs = socket.socketpair()
                try:
                    with theirs:
                        socket.send_fds(control.stream, [b"f"], [theirs.fileno()])
                    return Fork(ours, self.limits)
                except OSError as error:
                    ours.close()
                    self._end()
                    if not again:
                        raise RefusedError(f"its process has ended: {error}", ended=True) from error
            raise AssertionError

    def call(
        self, operation: str, header: JsonMapping, body: bytes = b""
    ) -> tuple[JsonObject, bytes]:
        """Calls an operation in an idle fork, or in a new one, which is idle afterwards."""
        try:
            fork = self._idle.pop()
        except IndexError:  # threads may call at once
            fork = self.fork()
        try:
            answer = fork.call(operation, header, body)
        except RefusedError as error:
            if not error.ended:
                self._idle.append(fork)
            raise
        self._idle.append(fork)
        return answer

    def close(self) -> None:
        """Ends the process and idle forks; others end when they are closed."""
        while self._idle:
            self._idle.pop().close()
        with self._lock:
            self._end()

    def _started(self) -> Fork:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._end()
        limits = self.limits
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(CHILD), str(self._program)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": "", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            )
        self._control = first = Fork(ours, limits)
        self._stop = weakref.finalize(self, _stop, self._process, ours)
        settings = {
            "given": self._given,
            "seconds": limits.seconds,
            "wall_seconds": limits.seconds * PATIENCE,
            "memory_bytes": limits.memory_bytes,
            "stack_bytes": limits.stack_bytes,
            "prepare_seconds": limits.prepare_seconds,
            "prepare_bytes": limits.prepare_bytes,
        }
        try:
            first.send("prepare", settings, self._body)
            answer = first.receive(limits.prepare_seconds * PATIENCE)
        except RefusedError as error:
            self._end()
            if error.ended:
                raise RefusedError(
                    f"it takes more than {limits.prepare_seconds:g} s of computation or"
                    f" {limits.prepare_bytes >> 20} MiB of memory, or ends its process",
                    ended=True,
                ) from error
            raise
        assert answer is not None
        self._about = answer
        ours.settimeout(None)
        return first

    def _end(self) -> None:
        if self._process is not None:
            self._stop()
        self._process = self._control = None


def _stop(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


class Fork:
    """A fork of a prepared program: calls one after the other, of one thread at a time."""

    def __init__(self, stream: socket.socket, limits: ChildLimits) -> None:
        self.stream, self._limits = stream, limits
        weakref.finalize(self, stream.close)
        self._bytes = bytearray()

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def fileno(self) -> int:
        """For `select`: readable where an answer, or a part of one, is there."""
        return self.stream.fileno()

    def call(
        self, operation: str, header: JsonMapping, body: bytes = b"", *, background: bool = False
    ) -> tuple[JsonObject, bytes]:
        """Calls an operation and returns its result."""
        self.send(operation, header, body, background=background)
        answer = self.receive(self._limits.seconds * PATIENCE + 5.0)
        assert answer is not None
        return answer

    def send(
        self, operation: str, header: JsonMapping, body: bytes = b"", *, background: bool = False
    ) -> None:
        """Begins a call; arguments and errors as those of `call`."""
        text = json.dumps({**header, "operation": operation, "background": background}).encode()
        self.stream.settimeout(self._limits.seconds * PATIENCE + 5.0)
        try:
            self.stream.sendall(_LENGTHS.pack(len(text), len(body)) + text)
            self.stream.sendall(body)
        except OSError as error:
            raise self._ended() from error

    def receive(self, seconds: float, *, wait: bool = True) -> tuple[JsonObject, bytes] | None:
        """The answer of the first call that has begun and was not answered.

        Args:
            seconds: that it may take.
            wait: whether it is an error where they are over; None is returned otherwise.
        """
        until = time.monotonic() + seconds
        while (answer := self._whole()) is None:
            try:
                self.stream.settimeout(max(until - time.monotonic(), 0.0))
                data = self.stream.recv(1 << 20)
            except (BlockingIOError, TimeoutError) as error:
                if not wait:
                    return None
                raise self._ended() from error
            except OSError as error:
                raise self._ended() from error
            if not data:
                raise self._ended()
            self._bytes += data
        header, body = answer
        if "refused" in header:
            raise RefusedError(fit(printable(str(header["refused"])), 500))
        return header, body

    def close(self) -> None:
        """Ends it, whatever it does."""
        self.stream.close()

    def _whole(self) -> tuple[JsonObject, bytes] | None:
        if len(self._bytes) < _LENGTHS.size:
            return None
        header, body = _LENGTHS.unpack_from(self._bytes)
        if header + body > self._limits.answer_bytes:
            raise self._ended()
        end = _LENGTHS.size + header + body
        if len(self._bytes) < end:
            return None
        text = bytes(self._bytes[_LENGTHS.size : _LENGTHS.size + header])
        rest = bytes(self._bytes[_LENGTHS.size + header : end])
        del self._bytes[:end]
        limits = Limits(bytes=self._limits.answer_bytes)
        parsed = parse_json(text, "the answer of a confined process", RefusedError, limits=limits)
        if not isinstance(parsed, dict):
            raise self._ended()
        return parsed, rest

    def _ended(self) -> RefusedError:
        with contextlib.suppress(OSError):
            self.stream.close()
        return RefusedError(
            f"it takes too long or too much memory: more than {self._limits.text}", ended=True
        )
