"""A server of workers or of islands, whatever it serves: its answers and events, its connections,
and the file of its checkpoint. Free of JAX.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from shardlib.errors import CheckpointError, LaunchError
from shardlib.islands.servers.wire import (
    STARTER,
    Answer,
    Ask,
    Flat,
    MessageError,
    RefusedError,
    read_ask,
)
from shardlib.processes.wire import ClosedError, Door, FrameError, Outgoing, receive, send
from shardlib.untrusted.data import Form, JsonObject, construct, parse_json

#: Events that are kept.
MOST_EVENTS = 1000


@dataclass(kw_only=True)
class MessageService(ABC):
    """A server without its connections: a question has one answer, whatever carries them.

    Attributes:
        server: number of this server.
        checkpoint: its file; None for none.
        say: is told what happens.
        events: what has happened and somebody should know.
        refused: how many messages were.
    """

    #: What it calls those that may ask, in the singular.
    asker: ClassVar[str]

    server: int = 0
    checkpoint: Path | None = None
    say: Callable[[str], None] = lambda text: None
    events: list[str] = field(default_factory=list[str])
    refused: int = 0

    @property
    @abstractmethod
    def askers(self) -> int:
        """Number of those that may ask."""

    @property
    @abstractmethod
    def most_bytes(self) -> int | None:
        """Bytes of the parameters, the most that a message may have; None before they are known."""

    @property
    @abstractmethod
    def progress(self) -> Answer:
        """An answer that says how far the server is, and nothing else."""

    @abstractmethod
    def answered(self, ask: Ask, arrays: Flat) -> tuple[Answer, Outgoing]:
        """Answers a message of one that may ask; what is refused raises an error."""

    @abstractmethod
    def gone(self, who: int) -> None:
        """The connection of an asker has closed."""

    @abstractmethod
    def save(self) -> None:
        """Writes the checkpoint, where there are parameters and a place for it."""

    def name(self, who: int) -> str:
        """Names an asker by its number."""
        return "the starter" if who == STARTER else f"{self.asker} {who}"

    def answer(self, ask: Ask, arrays: Flat, who: int) -> tuple[Answer, Outgoing]:
        """Answers a message.

        Args:
            who: the asker that the connection knows.
        """
        try:
            if ask.worker != who or not STARTER <= who < self.askers:
                raise RefusedError(
                    f"it speaks for {self.name(ask.worker)}; there are {self.askers} {self.asker}s"
                )
            return self.answered(ask, arrays)
        except RefusedError as error:
            self.refused += 1
            moment = {"push": f", step {ask.step}", "send": f", round {ask.round}"}
            about = f"{ask.kind} of {self.name(who)}{moment.get(ask.kind, '')}"
            self.note(f"refused a {about}: {error}")
            return replace(self.progress, kind="refused", why=str(error)), {}

    def replace_checkpoint(self, data: bytes, moment: str) -> None:
        """Writes the file of the checkpoint; where it cannot be written, an event says so."""
        assert self.checkpoint is not None
        try:
            write(self.checkpoint, data)
        except OSError as error:
            self.note(f"the checkpoint {moment} is not written: {error}")

    def note(self, text: str) -> None:
        """Keeps an event."""
        if len(self.events) < MOST_EVENTS:
            self.events.append(text)
        self.say(text)

    def report(self) -> JsonObject:
        """Returns what the server has noticed, as plain data."""
        return {"refused": self.refused, "events": list(self.events)}


# --------------------------------------------------------------------------------------------------
# The connections of a server: a thread each, and none can stop another.
#
# Those that have shown the secret have places of their own; see `shardlib.processes.wire`
# for the others.

#: Bytes of parameters that a server takes before it knows how many there are.
MOST_FIRST_BYTES = 1 << 36
#: Connections that have shown the secret, beyond two for each worker: some break unseen.
SPARE = 32


@dataclass(kw_only=True)
class Listening:
    """A server's socket.

    Attributes:
        service: what answers.
        secret: of the run.
        host: address to listen at.
        wanted: port to listen at; 0 for a free one.
    """

    service: MessageService
    secret: str
    host: str = "127.0.0.1"
    wanted: int = 0
    _newest: dict[int, object] = field(default_factory=dict[int, object])

    def __post_init__(self) -> None:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._socket = socket.create_server((self.host, self.wanted), family=family, backlog=256)
        self._room = threading.Semaphore(2 * self.service.askers + SPARE)
        self._door = Door(
            self._socket,
            self.secret,
            self.service.server,
            enter=self._entered,
            refused=self._refused,
            note=self.service.note,
        )

    @property
    def port(self) -> int:
        """At which it listens."""
        return self._socket.getsockname()[1]

    def serve(self) -> None:
        """Takes connections, until the socket is closed."""
        self._door.serve()

    def close(self) -> None:
        """Takes no more connections."""
        self._door.close()

    def _refused(self) -> None:
        self.service.refused += 1

    def _entered(self, stream: socket.socket, who: int) -> None:
        with stream:
            if not self._room.acquire(blocking=False):
                self.service.note(f"refused a connection of {self.service.name(who)}: too many")
                return
            try:
                self._talk(stream, who)
            finally:
                self._room.release()

    def _talk(self, stream: socket.socket, who: int) -> None:
        service, this = self.service, object()
        self._newest[who] = this
        try:
            while True:
                self._one(stream, who)
        except (FrameError, MessageError) as error:
            service.refused += 1
            service.note(f"closed the connection of {service.name(who)}: {error}")
        except (ClosedError, OSError):
            pass
        finally:
            if self._newest.get(who) is this:
                service.gone(who)

    def _one(self, stream: socket.socket, who: int) -> None:
        limit = self.service.most_bytes
        frame = receive(stream, limit=MOST_FIRST_BYTES if limit is None else limit)
        answer, arrays = self.service.answer(read_ask(frame.header), dict(frame.arrays), who)
        send(stream, answer.to_json(), arrays)


# --------------------------------------------------------------------------------------------------
# The file of a checkpoint: safetensors with a header of plain data, replaced as a whole.

#: Version of its form.
VERSION = 1

T = TypeVar("T")


def packed_file(header: JsonObject, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> bytes:
    """A file of a header, and arrays by kind and name."""
    named = {
        f"{kind}:{name}": array for kind, group in arrays.items() for name, array in group.items()
    }
    return save(named, {"about": json.dumps({"version": VERSION, **header})})


def read_file(path: Path, form: type[T], kinds: tuple[str, ...]) -> tuple[T, list[Flat]] | None:
    """The header of a file, and its arrays of each kind by name; None where there is no file."""
    if not path.exists():
        return None
    what = f"the checkpoint {path}"
    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get("about", "null")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{what} cannot be read: {error}") from error
    header = construct(form, parse_json(text, what, CheckpointError), what, CheckpointError)
    by_kind: dict[str, Flat] = {kind: Flat() for kind in kinds}
    for name, array in arrays.items():
        kind, _, path_of_array = name.partition(":")
        by_kind.setdefault(kind, Flat())[path_of_array] = array
    return header, [by_kind[kind] for kind in kinds]


def write(path: Path, data: bytes) -> None:
    """Puts a file in its place, as a whole, on disk."""
    draft = path.with_name(f"{path.name}.draft")
    with draft.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# --------------------------------------------------------------------------------------------------
# Settings with which processes of servers and workers are started.


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Settings with which a process is started, as text."""

    #: How messages call them.
    what: ClassVar[str]
    #: The type of a field that is one of some words.
    words: ClassVar[Any]

    def to_json(self) -> str:
        """The settings as text."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """The settings of a text."""
        data = parse_json(text, cls.what, LaunchError)
        forms = {cls.words: Form(plain=str, build=str)}
        return construct(cls, data, cls.what, LaunchError, forms=forms)
