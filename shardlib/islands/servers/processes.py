"""The processes of servers: `python -m shardlib.islands.servers.processes server FOLDER` for a
parameter server, `outer FOLDER` for the outer server of islands. Settings and the secret come in
variables of the environment. They load no JAX, and start in a fraction of a second.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlib.errors import ShardlibError
from shardlib.islands.servers.rounds import FILE, ClosedRound, Rounds, RoundService, Short
from shardlib.islands.servers.server import ServerSettings, service_of
from shardlib.islands.servers.service import Listening, MessageService, ProcessSettings, write
from shardlib.islands.servers.wire import address_file

#: Variables of the environment: the settings and the secret of a parameter server, and those of the
#: outer server.
SETTINGS, SECRET = "SHARDLIB_SERVER", "SHARDLIB_SECRET"
OUTER_SETTINGS, TOKEN = "SHARDLIB_ROUNDS", "SHARDLIB_MEETING_TOKEN"
#: File of the run that gets a line of JSON for each round, and one for each event.
ROUNDS, EVENTS = "rounds.jsonl", "events.jsonl"
#: File of the run that says where the outer server listens, and its pid.
ADDRESS = "outer.address"


@dataclass(frozen=True, kw_only=True)
class OuterServerSettings(ProcessSettings):
    """Settings of the outer server.

    Attributes:
        islands: how many there may be.
        rounds: how long they wait, and for how many.
        host: address to listen at.
        port: of it.
    """

    what = "the settings of the outer server"
    words = Short

    islands: int
    rounds: Rounds
    host: str
    port: int


def serve_parameters(folder: Path) -> None:
    """Serves until it is ended; SIGTERM saves first."""
    settings = ServerSettings.read(os.environ[SETTINGS])
    service = service_of(settings, folder)
    listening = Listening(service=service, secret=os.environ[SECRET], host=settings.host)

    serve(listening, service, address_file(folder, settings.server))


def serve_rounds(folder: Path) -> None:
    """Serves until it is ended; SIGTERM saves first."""
    settings = OuterServerSettings.read(os.environ[OUTER_SETTINGS])
    began, written = [time.time()], _last_round(folder / ROUNDS)

    def say(text: str) -> None:
        _line(folder / EVENTS, {"at_s": time.time(), "event": text})
        print(text, flush=True)

    def closed(last: ClosedRound) -> None:
        if goes_on and last.number <= written:
            return  # its line was written before the server was killed, its checkpoint was not
        now = time.time()
        seconds, began[0] = now - began[0], now
        line = {"round": last.number, "islands": last.islands, "seconds": seconds, "at_s": now}
        _line(folder / ROUNDS, line)

    service = RoundService(
        islands=settings.islands,
        rounds=settings.rounds,
        checkpoint=folder / FILE,
        say=say,
        closed=closed,
    )
    goes_on = service.state is not None
    listening = Listening(
        service=service, secret=os.environ[TOKEN], host=settings.host, wanted=settings.port
    )

    serve(listening, service, folder / ADDRESS)


def _last_round(path: Path) -> int:
    """The number of the last round in a file, 0 without any; the half of a line that a killed
    server left is removed.
    """
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines := lines[:-1]))
    return json.loads(lines[-1])["round"] if lines else 0


def _line(path: Path, data: dict[str, Any]) -> None:
    with path.open("a") as stream:
        stream.write(json.dumps(data) + "\n")


def serve(listening: Listening, service: MessageService, address: Path) -> None:
    """Serves until the process is ended; SIGTERM saves first."""

    def end(*_: Any) -> None:
        listening.close()

    signal.signal(signal.SIGTERM, end)
    location = {"host": listening.host, "port": listening.port, "pid": os.getpid()}
    write(address, json.dumps(location).encode())
    listening.serve()
    service.save()


def run(main: Callable[[Path], None], folder: str) -> None:
    """Runs a process for a folder; an error is one line."""
    try:
        main(Path(folder))
    except ShardlibError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    run({"server": serve_parameters, "outer": serve_rounds}[sys.argv[1]], sys.argv[2])
