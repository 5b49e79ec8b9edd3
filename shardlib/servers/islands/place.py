"""Where islands meet, and which of them this process is. Whoever starts it says so in variables:

    SHARDLIB_MEETING             HOST:PORT of the outer server
    SHARDLIB_ISLAND              number of this island, from 0 on
    SHARDLIB_MEETING_TOKEN       a word that all islands and the server know and nobody else, or
    SHARDLIB_MEETING_TOKEN_FILE  a file with it

>>> found = {"SHARDLIB_MEETING": "10.0.0.1:4711", "SHARDLIB_ISLAND": "1"}
>>> place = read_place({**found, "SHARDLIB_MEETING_TOKEN": "a secret word"})
>>> place.host, place.port, place.island
('10.0.0.1', 4711, 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardlib.errors import LaunchError, raise_all
from shardlib.untrusted.shown import shown

#: Variables of the environment.
MEETING, ISLAND = "SHARDLIB_MEETING", "SHARDLIB_ISLAND"
TOKEN, TOKEN_FILE = "SHARDLIB_MEETING_TOKEN", "SHARDLIB_MEETING_TOKEN_FILE"
#: Letters of a token, at least.
LEAST_TOKEN = 8


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """Where an island meets the others.

    Attributes:
        host: address of the outer server.
        port: of it.
        island: number of this island.
        token: that all of them know.
    """

    host: str
    port: int
    island: int
    token: str = field(repr=False)

    def environment(self) -> dict[str, str]:
        """The variables that say so."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return {MEETING: f"{host}:{self.port}", ISLAND: str(self.island), TOKEN: self.token}


def read_place(environ: Mapping[str, str]) -> MeetingPlace:
    """The place that variables name."""
    failures: list[str] = []
    host, _, port = environ.get(MEETING, "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        failures.append(f"{MEETING} is {shown(environ.get(MEETING))}; it is HOST:PORT")
    island = environ.get(ISLAND, "")
    if not island.isdigit() or len(island) > 6:
        failures.append(f"{ISLAND} is {shown(environ.get(ISLAND))}; it is a number from 0 on")
    token, wrong = _token(environ)
    failures += wrong
    if failures:
        raise_all(
            LaunchError,
            "nothing says where islands meet",
            failures,
            hint="shardlib launch --islands 2 --devices-per-process 2 -- python train.py",
        )
    return MeetingPlace(host=host.strip("[]"), port=int(port), island=int(island), token=token)


def _token(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """The token, and what is wrong with it."""
    name, token = TOKEN, environ.get(TOKEN, "")
    if not token and TOKEN_FILE in environ:
        name = TOKEN_FILE
        try:
            token = Path(environ[TOKEN_FILE]).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            return "", [f"{TOKEN_FILE} cannot be read: {error}"]
    if len(token) < LEAST_TOKEN:
        return "", [f"{name} has no token of at least {LEAST_TOKEN} letters"]
    return token, []
