"""The process of the outer server: `python -m shardlib.islands.servers.rounds_process FOLDER`, with
its settings and the secret in variables of the environment. It loads no JAX.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlib.islands.servers.rounds import FILE, Last, Rounds, RoundService, Short
from shardlib.islands.servers.server import Listening
from shardlib.islands.servers.server_process import ProcessSettings, run, serve

#: Variables of the environment.
SETTINGS, TOKEN = "SHARDLIB_ROUNDS", "SHARDLIB_MEETING_TOKEN"
#: File of the run that gets a line of JSON for each round, and one for each event.
ROUNDS, EVENTS = "rounds.jsonl", "events.jsonl"
#: File of the run that says where the server listens, and its pid.
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


def main(folder: Path) -> None:
    """Serves until it is ended; SIGTERM saves first."""
    settings = OuterServerSettings.read(os.environ[SETTINGS])
    began = [time.time()]

    def say(text: str) -> None:
        _line(folder / EVENTS, {"at_s": time.time(), "event": text})
        print(text, flush=True)

    def closed(last: Last) -> None:
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
    listening = Listening(
        service=service, secret=os.environ[TOKEN], host=settings.host, wanted=settings.port
    )

    serve(listening, service, folder / ADDRESS)


def _line(path: Path, data: dict[str, Any]) -> None:
    with path.open("a") as stream:
        stream.write(json.dumps(data) + "\n")


if __name__ == "__main__":
    run(main)
