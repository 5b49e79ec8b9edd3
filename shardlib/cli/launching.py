"""`shardlib launch`."""

from __future__ import annotations

from typing import Annotated

import typer

from shardlib.cli.app import app


@app.command("launch", context_settings={"allow_interspersed_args": False})
def launch_command(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="A command of shardlib (train ...), or any other program.")],
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, help="Processes on this machine.")] = 1,
    devices: Annotated[int | None, typer.Option("--devices-per-process", min=1, help="CPU devices that each simulates; if left out, they share the accelerators.")] = None,
    interface: Annotated[str | None, typer.Option("--interface", help="Interface or address at which process 0 listens. [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Of process 0; if left out, a free one.")] = None,
    restarts: Annotated[int, typer.Option("--restarts", min=0, help="Start all again when one dies or is silent, so often without new progress.")] = 0,
    elastic: Annotated[bool, typer.Option("--elastic", help="Go on with fewer processes where one fails again and again.")] = False,
    silent_seconds: Annotated[float, typer.Option("--silent-seconds", min=2, help="Without a sign of life, after which a process counts as frozen.")] = 60.0,
    stop_seconds: Annotated[float, typer.Option("--stop-seconds", min=0, help="That processes have to save and end once they are asked to stop.")] = 120.0,
    join_seconds: Annotated[int, typer.Option("--join-seconds", min=1, help="How long processes wait for each other at the start.")] = 300,
) -> None:
    """Run one program in many processes that find each other. Exit code: that of the first process that failed; 75: stopped, and saved."""
    from shardlib.cli.launching_local import run_here

    raise typer.Exit(run_here(command, processes=processes, devices=devices, interface=interface, port=port, restarts=restarts, elastic=elastic, silent_seconds=silent_seconds, stop_seconds=stop_seconds,
                              join_seconds=join_seconds))
