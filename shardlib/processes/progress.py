"""What takes long says what it does, for how long, and how much time is left.

    with Progress("compiling", of=3) as progress:
        progress.to(1, "fsdp=8")

One line of standard error, or below the cell of a notebook; nothing where there is neither. What
begins while another is shown adds its words to that line. The time left is that of what has been
counted so far, or what the same took the last time on this machine.

>>> progress = Progress("exporting", of=4, clock=iter([0.0, 10.0, 10.0]).__next__)
>>> progress.to(1, "layers.mlp")
>>> progress.line()
'0:00:10, 0:00:30 left · exporting · 1 of 4 · layers.mlp'
"""

from __future__ import annotations

import contextlib
import contextvars
import html
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardlib.untrusted.data import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

T = TypeVar("T")

#: Seconds before anything is shown, and between two looks of a notebook.
LATE, EVERY = 1.0, 0.25
#: Lines whose last seconds are remembered.
REMEMBERED = 200
#: What is shown now, and what began within it.
_running: list[Progress] = []


@dataclass(eq=False)
class Progress:
    """Shows what runs while it is entered.

    Attributes:
        text: what is done.
        of: up to which number `to` counts; 0 where nobody knows.
        console: where; None for standard error.
        clock: returns seconds.
        first: the number from which it counts.
    """

    text: str
    of: int = 0
    console: Console | None = None
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    first: int = 0

    def __post_init__(self) -> None:
        self._began, self._done, self._words, self._last = self.clock(), 0, "", 0.0
        self._over, self._thread = threading.Event(), threading.Thread()

    def __enter__(self) -> Progress:
        _running.append(self)
        self._key = " · ".join(each.text for each in _running)
        if self.console is None and (sys.stderr.isatty() or "ipykernel" in sys.modules):
            from rich.console import Console  # what is not shown does not wait for it

            self.console = Console(stderr=True)
        console = self.console
        if console is None or console.quiet or console.is_dumb_terminal:
            return self
        if console.is_jupyter or console.is_terminal:
            self._last = _seconds().get(self._key, 0.0)
            if len(_running) == 1:
                run = contextvars.copy_context().run  # a notebook knows by it which cell this is
                self._thread = threading.Thread(target=run, args=(self._draw, console), daemon=True)
                self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        _running.remove(self)
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
            taken = self.clock() - self._began
            if raised[0] is None and taken > LATE and not self.of:
                _remember(self._key, taken)

    def to(self, done: int, words: str = "") -> None:
        """So many are done; words say what is at hand."""
        self._done, self._words = done, words

    def line(self) -> str:
        """The line, as text."""
        running = list(_running)
        shown = running[running.index(self) :] if self in running else [self]
        left = next((left for each in shown if (left := each._left()) is not None), None)
        clock = _duration(self.clock() - self._began)
        clock += "" if left is None else f", {_duration(left)} left"
        return " · ".join([clock, *(words for each in shown for words in each._parts())])

    def _parts(self) -> list[str]:
        count = f"{self._done:,} of {self.of:,}" if self.of else ""
        return [words for words in (self.text, count, self._words) if words]

    def _left(self) -> float | None:
        counted, taken = self._done - self.first, self.clock() - self._began
        if self.of:
            return taken / counted * (self.of - self._done) if counted > 0 else None
        return self._last - taken if self._last > taken else None

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(printable(self.line()), overflow="ellipsis", no_wrap=True)

    def _draw(self, console: Console) -> None:
        if self._over.wait(LATE):
            return
        if not console.is_jupyter:
            with console.status(self):
                self._over.wait()
            return
        shown = importlib.import_module("IPython.display")
        handle = shown.display(shown.HTML(self._html()), display_id=True)
        while not self._over.wait(EVERY):
            handle.update(shown.HTML(self._html()))
        handle.update(shown.HTML(self._html() if self.of else ""))

    def _html(self) -> str:
        value = f' max="{self.of}" value="{self._done}"' if self.of else ""
        bar = f'<progress{value} aria-label="{html.escape(self.text)}"></progress>'
        return f'<div role="status">{bar} {html.escape(self.line())}</div>'


def counted(items: Sequence[T], text: str) -> Iterator[T]:
    """The items of a loop, which shows how many of them are done."""
    with Progress(text, of=len(items)) as progress:
        for number, item in enumerate(items):
            progress.to(number)
            yield item


def _duration(seconds: float) -> str:
    total = round(seconds)
    return f"{total // 3600}:{total // 60 % 60:02d}:{total % 60:02d}"


def _file() -> Path:
    from shardlib.processes.machine import user_cache  # it imports JAX

    return user_cache() / "seconds.json"


def _seconds() -> dict[str, float]:
    """What took how long the last time."""
    try:
        stored: Any = json.loads(_file().read_text(encoding="utf-8"))
        return {str(key): float(seconds) for key, seconds in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(key: str, seconds: float) -> None:
    others = [(name, taken) for name, taken in _seconds().items() if name != key]
    stored = dict([*others[1 - REMEMBERED :], (key, round(seconds, 1))])
    with contextlib.suppress(OSError):  # it is a convenience
        _file().parent.mkdir(parents=True, exist_ok=True)
        _file().write_text(json.dumps(stored), encoding="utf-8")
