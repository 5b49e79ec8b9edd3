"""`shardlib launch -n N`: processes of this machine."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from shardlib.cli.commands.launch_words import option_of
from shardlib.errors import LaunchError
from shardlib.launching.job import COMMANDS
from shardlib.untrusted import shown


@dataclass(frozen=True, kw_only=True)
class Here:
    """Options of processes of this machine."""

    processes: Annotated[
        int | None,
        typer.Option("--processes", "-n", min=1, help="Run on this machine, in so many processes."),
    ] = None
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices-per-process",
            min=1,
            help="CPU devices that each simulates; if left out, they share the accelerators.",
        ),
    ] = None
    interface: Annotated[
        str | None,
        typer.Option(
            "--interface",
            help="Of this machine: interface or address at which process 0 listens. [127.0.0.1]",
        ),
    ] = None
    port: Annotated[
        int | None,
        typer.Option("--port", help="Of process 0 on this machine; if left out, a free one."),
    ] = None
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="On this machine: go on with fewer processes where one fails again and again.",
        ),
    ] = False
    silent_seconds: Annotated[
        float | None,
        typer.Option(
            "--silent-seconds",
            min=2,
            help=(
                "On this machine: without a sign of life, after which a process counts as frozen."
                " [60]"
            ),
        ),
    ] = None
    stop_seconds: Annotated[
        float | None,
        typer.Option(
            "--stop-seconds",
            min=0,
            help=(
                "On this machine: that processes have to save and end once they are asked to stop."
                " [120]"
            ),
        ),
    ] = None
    join_seconds: Annotated[
        int | None,
        typer.Option(
            "--join-seconds",
            min=1,
            help="On this machine: how long processes wait for each other at the start. [300]",
        ),
    ] = None


def run_here(
    words: Sequence[str], here: Here, *, restarts: int, environment: Mapping[str, str]
) -> int:
    """Runs a command in several processes of this machine, and gives its exit code."""
    from shardlib.launching.addresses import LOOPBACK, address_of
    from shardlib.launching.local import Local, launch
    from shardlib.training.supervisor import Budget

    ours = bool(words) and words[0] in COMMANDS
    if not ours:
        _require_program(words, {**os.environ, **environment})
    command = (sys.executable, "-m", "shardlib", *words) if ours else tuple(words)
    if here.elastic and ours and "--elastic" not in words and words[0] == "train":
        command = (*command, "--elastic")
    budget = {"silent_seconds": here.silent_seconds, "stop_seconds": here.stop_seconds}
    waiting = {"join_seconds": here.join_seconds}
    local = Local(
        command=command,
        processes=here.processes or 0,
        devices=here.devices,
        address=address_of(here.interface) if here.interface else LOOPBACK,
        port=here.port,
        run=option_of(words, ("--run", "-r")),
        elastic=here.elastic,
        budget=Budget(restarts=restarts, **_said(budget)),
        **_said(waiting),
    )
    return launch(local, environ={**os.environ, **environment})


def _require_program(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuses a program that is not there."""
    if not words or shutil.which(words[0], path=environ.get("PATH")) is not None:
        return
    near = difflib.get_close_matches(words[0], COMMANDS, 1)
    raise LaunchError(
        f"there is no program {shown(words[0])} here"
        + (f"; did you mean {near[0]!r}?" if near else "")
        + f"\nTry: a command of shardlib that runs in several processes ({', '.join(COMMANDS)}), or"
        " any program; the other commands of shardlib run in one process, without `launch`"
    )


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without those that were left out."""
    return {name: value for name, value in values.items() if value is not None}
