"""`shardlib launch --islands N`: islands as processes, with the server that they meet over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.errors import LaunchError
from shardlib.wings import Extension

if TYPE_CHECKING:
    from shardlib.launch.commands import Common, Here


@dataclass(frozen=True, kw_only=True)
class Islands:
    """Options of islands that are processes."""

    islands: Annotated[
        int | None,
        typer.Option(
            "--islands",
            min=2,
            help="Run islands that meet over TCP, so many in all.",
        ),
    ] = None
    islands_here: Annotated[
        int | None,
        typer.Option(
            "--islands-here", min=1, help="Of them on this machine; others come by hand. [all]"
        ),
    ] = None
    quorum: Annotated[
        int | None,
        typer.Option("--quorum", min=1, help="Islands that a round needs at least. [1]"),
    ] = None
    round_seconds: Annotated[
        float | None,
        typer.Option(
            "--round-seconds",
            help="That a round waits after its first island for the others. [60]",
        ),
    ] = None
    away_seconds: Annotated[
        float | None,
        typer.Option(
            "--away-seconds",
            help="That a round waits for an island whose connection has closed. [10]",
        ),
    ] = None
    gather_seconds: Annotated[
        float | None,
        typer.Option(
            "--gather-seconds", help="That the first round waits for islands to come. [600]"
        ),
    ] = None
    emulate_link: Annotated[
        str | None,
        typer.Option(
            "--emulate-link",
            metavar="50mbit-20ms",
            help="A slow link between each island of this machine and the server, for trials.",
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", help="File of the token, for islands elsewhere; made if missing."
        ),
    ] = None


def run_islands(
    words: Sequence[str],
    options: Islands,
    here: Here,
    common: Common,
    variables: Mapping[str, str],
) -> int:
    """Runs islands of this machine and their server, and gives their exit code."""
    from shardlib.islands.servers.joining import LocalIslands, OuterServer, launch_islands
    from shardlib.islands.servers.relay import read_link
    from shardlib.islands.servers.rounds import Rounds
    from shardlib.launch.job import COMMANDS as SINGLE
    from shardlib.processes.console import LOOPBACK, address_of

    if options.islands is None:
        raise LaunchError("nothing says how many islands there are\nTry: --islands 2")
    if here.processes is not None:
        raise LaunchError("an island is one process\nTry: --islands N without --processes")
    if words and words[0] in SINGLE:
        raise LaunchError(
            f"{words[0]} is not an island of its own: its islands are of one process\nTry: --"
            " python train.py, a script that calls shardlib.servers.join"
        )
    local = LocalIslands(
        command=tuple(words),
        here=options.islands_here or options.islands,
        devices=here.devices,
        restarts=common.restarts or 0,
        variables=variables,
        link=None if options.emulate_link is None else read_link(options.emulate_link),
    )
    waits: dict[str, Any] = {
        "quorum": options.quorum,
        "timeout_s": options.round_seconds,
        "away_s": options.away_seconds,
        "gather_s": options.gather_seconds,
    }
    server = OuterServer(
        islands=options.islands,
        rounds=Rounds(**{name: value for name, value in waits.items() if value is not None}),
        run=common.run,
        host=address_of(here.interface) if here.interface else LOOPBACK,
        port=here.port,
        token_file=options.token_file,
    )
    return launch_islands(local, server)


COMMANDS: Mapping[str, Callable[..., None]] = {}
#: `launch` calls `run_islands` where an option of `Islands` is there.
EXTENSIONS: Mapping[str, Extension] = {"launch": Extension(options=Islands, run=run_islands)}
