"""The process of a server: `python -m shardlib.islands.servers.server_process FOLDER`, with the
secret and its settings in variables of the environment. It loads no JAX, and starts in a
fraction of a second.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from shardlib.errors import LaunchError, ShardlibError
from shardlib.islands.exchanges import Asynchronous, Rule
from shardlib.islands.servers.server import Listening, Service, checkpoint_file, write
from shardlib.islands.servers.wire import address_file
from shardlib.untrusted.data import Form, construct, parse_json

#: Variables of the environment.
SETTINGS, SECRET = "SHARDLIB_SERVER", "SHARDLIB_SECRET"


class Saves(Protocol):
    """A writer of checkpoints."""

    def save(self) -> object:
        """Writes it."""
        ...


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


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ProcessSettings):
    """Settings of a server.

    Attributes:
        server: its number.
        exchange: of the run.
        save_every: see `Service`.
        silent_s: see `Service`.
        host: address to listen at.
    """

    what = "the settings of a server"
    words = Rule

    server: int
    exchange: Asynchronous
    save_every: int
    silent_s: float
    host: str


def service_of(settings: ServerSettings, folder: Path) -> Service:
    """Returns the service, at its checkpoint where there is one."""
    return Service(
        exchange=settings.exchange,
        server=settings.server,
        checkpoint=checkpoint_file(folder, settings.server),
        save_every=settings.save_every,
        silent_s=settings.silent_s,
    )


def main(folder: Path) -> None:
    """Serves until it is ended; SIGTERM saves first."""
    settings = ServerSettings.read(os.environ[SETTINGS])
    service = service_of(settings, folder)
    listening = Listening(service=service, secret=os.environ[SECRET], host=settings.host)

    serve(listening, service, address_file(folder, settings.server))


def serve(listening: Listening, service: Saves, address: Path) -> None:
    """Serves until the process is ended; SIGTERM saves first."""

    def end(*_: Any) -> None:
        listening.close()

    signal.signal(signal.SIGTERM, end)
    location = {"host": listening.host, "port": listening.port, "pid": os.getpid()}
    write(address, json.dumps(location).encode())
    listening.serve()
    service.save()


def run(main: Callable[[Path], None]) -> None:
    """Runs a process for the folder that the command line names; an error is one line."""
    try:
        main(Path(sys.argv[1]))
    except ShardlibError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    run(main)
