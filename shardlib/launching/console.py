"""One console for many processes: whole lines, each with the number of its process in front.

    [0] going on after step 20 of 100
    [2] error: there is no data in /data/part-2

Lines of standard output go to standard output, those of standard error to standard error. On a
terminal every process has its colour.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import IO, TextIO

from shardlib.untrusted import printable

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
