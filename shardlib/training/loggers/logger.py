"""What is a logger? A value that opens a sink, once the run knows what it goes on with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shardlib.errors import RunError
from shardlib.training.measures.metrics import Sink
from shardlib.untrusted.json_types import JsonMapping


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """The run that is logged.

    Attributes:
        folder: of the run; None where nothing is kept.
        step: steps that are done when the sink is opened.
        words: what is trained, and the plan, as plain data.
    """

    folder: Path | None
    step: int
    words: JsonMapping = field(default_factory=dict)

    def place(self, name: str) -> Path:
        """Where a logger keeps its files: a folder of the run, or else of the working directory."""
        return (self.folder or Path()) / name

    def kept(self, name: str, make: Callable[[], str]) -> str:
        """An identifier that all processes of a run share: that of the first one."""
        if self.folder is None:
            return make()
        path = self.folder / name
        try:
            if not path.exists():
                path.write_text(make() + "\n", encoding="utf-8")
            return path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise RunError(
                f"{path} cannot be read or written: {error.strerror or error}\nTry: other"
                " permissions; nothing was changed"
            ) from error


class Logger(Protocol):
    """A place where numbers go. It is opened in the first process alone."""

    def open(self, run: LoggedRun, /) -> Sink | None:
        """What takes records; None where the run gives it no place."""
        ...
