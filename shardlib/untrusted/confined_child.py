"""The program of the processes of `confined.py`: prepares a user's program, and forks for each
piece of work.

    python -I confined_child.py PROGRAM.py          (its input is a socket)

Of the standard library alone. Limits are the system's: they end the process whatever its libraries
do.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import runpy
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

_LENGTHS = struct.Struct("<II")
#: Of calls that yield to everything else: about 3% of a core that somebody else wants.
NICE = 15
Operation = Callable[[Mapping[str, Any], bytes], "tuple[Mapping[str, Any], bytes] | None"]


def _exactly(stream: socket.socket, count: int) -> bytes:
    """Exactly this many bytes; the process ends where the other end is closed."""
    chunks, left = list[bytes](), count
    while left:
        chunk = stream.recv(min(left, 1 << 20))
        if not chunk:
            os._exit(0)
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def _read(stream: socket.socket) -> tuple[dict[str, Any], bytes]:
    header, body = _LENGTHS.unpack(_exactly(stream, _LENGTHS.size))
    return json.loads(_exactly(stream, header)), _exactly(stream, body)


def _write(stream: socket.socket, header: Mapping[str, Any], body: bytes = b"") -> None:
    text = json.dumps(dict(header)).encode()
    try:
        stream.sendall(_LENGTHS.pack(len(text), len(body)) + text)
        stream.sendall(body)
    except OSError:
        os._exit(0)


def _lower(what: int, soft: int) -> None:
    """A limit of the system, where a lower one is not in force."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _limit_memory(beyond: int) -> None:
    """Address space may grow by so much."""
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:  # only Linux holds a process to it
        return
    _lower(resource.RLIMIT_AS, now + beyond)


def _limit_time(seconds: float, wall_seconds: float) -> None:
    """The system ends the process after so many seconds of computation, or by the clock."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)


def _answer(call: Callable[[], Any]) -> Any:
    """Returns the result of a call, or why it failed: libraries raise what is not an `Exception`,
    too.
    """
    try:
        return call()
    except BaseException as error:
        message = str(error)[:2000].encode("utf-8", "replace").decode()
        kind = "" if isinstance(error, ValueError) and message else f"{type(error).__name__}: "
        return {"refused": f"{kind}{message}"}, b""


def _low_priority(call: Callable[[], Any]) -> Any:
    """A call in a thread that yields to every other one of the machine."""
    answers = list[Any]()

    def run() -> None:
        if sys.platform == "linux":  # of a thread there, of the process elsewhere
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        answers.append(_answer(call))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers[0] if answers else ({"refused": "its thread has ended"}, b"")


def _serve(
    stream: socket.socket, operations: Mapping[str, Operation], settings: dict[str, Any]
) -> None:
    """One call after the other, within limits."""
    _lower(resource.RLIMIT_STACK, settings["stack_bytes"])
    threading.stack_size(settings["stack_bytes"])
    _limit_memory(settings["memory_bytes"] + settings["stack_bytes"])
    while True:
        header, body = _read(stream)
        _limit_time(settings["seconds"], settings["wall_seconds"])
        operation = operations[header["operation"]]
        run = _low_priority if header["background"] else _answer
        answer = run(lambda call=operation, header=header, body=body: call(header, body))
        _limit_time(0, 0)
        if answer is not None:
            _write(stream, *answer)


def main() -> None:
    """Prepares, and forks for each socket that comes in."""
    control = socket.socket(fileno=os.dup(0))
    settings, body = _read(control)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_time(settings["prepare_seconds"], 10 * settings["prepare_seconds"])
    before = resource.getrlimit(resource.RLIMIT_AS)
    _lower(resource.RLIMIT_AS, settings["prepare_bytes"])
    prepared = _answer(lambda: runpy.run_path(sys.argv[1])["prepare"](settings["given"], body))
    _limit_time(0, 0)
    if isinstance(prepared[0], dict) and "refused" in prepared[0]:
        _write(control, *prepared)
        return
    operations, description = prepared
    resource.setrlimit(resource.RLIMIT_AS, before)
    _write(control, *description)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended are forgotten at once
    gc.collect()
    gc.freeze()
    while True:
        data, files, *_ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            os.close(0)
            _serve(socket.socket(fileno=files[0]), operations, settings)
        os.close(files[0])


if __name__ == "__main__":
    main()
