"""`shardlib launch`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlib.cli.app import AsJson, app
from shardlib.cli.launching_engines import (
    ENGINES,
    FOLDER,
    Request,
    chosen,
    completed,
    environment_of,
    option_of,
    submission_of,
)
from shardlib.cli.output import echo
from shardlib.errors import LaunchError
from shardlib.launching.job import COMMANDS


@app.command("launch", context_settings={"allow_interspersed_args": False})
def launch_command(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND",
            help="A command of shardlib (train ..., doctor ...), or any other program.",
        ),
    ],
    processes: Annotated[
        int | None,
        typer.Option("--processes", "-n", min=1, help="Run on this machine, in so many processes."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices-per-process",
            min=1,
            help="CPU devices that each simulates; if left out, they share the accelerators.",
        ),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            "--interface",
            help="Of this machine: interface or address at which process 0 listens. [127.0.0.1]",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", help="Of process 0 on this machine; if left out, a free one."),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="On this machine: go on with fewer processes where one fails again and again.",
        ),
    ] = False,
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
    ] = None,
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
    ] = None,
    join_seconds: Annotated[
        int | None,
        typer.Option(
            "--join-seconds",
            min=1,
            help="On this machine: how long processes wait for each other at the start. [300]",
        ),
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit to Slurm.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Create a JobSet.")] = False,
    tpu_vm: Annotated[bool, typer.Option("--tpu-vm", help="Run on Cloud TPU VMs.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Submit to a Ray cluster.")] = False,
    skypilot: Annotated[bool, typer.Option("--skypilot", help="Launch with SkyPilot.")] = False,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            "-t",
            help="The machine, e.g. 16*h100:8; taken from the command if left out.",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            "-r",
            help="Folder of the run, seen by all hosts; taken from the command if left out.",
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            "--restarts",
            min=0,
            help="Start again so often without progress. [0 on this machine, otherwise 3]",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="NAME=VALUE", help="A variable of every process. Repeatable."
        ),
    ] = None,
    plain: Annotated[
        list[str] | None,
        typer.Option(
            "--plain",
            metavar="NAME",
            help="A variable of --env that looks like a secret and is none. Repeatable.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Of the job. [shardlib]")] = None,
    image: Annotated[str | None, typer.Option("--image", help="Container image.")] = None,
    seconds: Annotated[
        int | None, typer.Option("--seconds", min=1, help="Time limit of one start.")
    ] = None,
    host_devices: Annotated[
        int | None,
        typer.Option(
            "--host-devices",
            min=1,
            help="Devices of a host, where not as many as the chip is sold with.",
        ),
    ] = None,
    host_processes: Annotated[
        int | None, typer.Option("--host-processes", min=1, help="Processes on a host. [1]")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="KEY=VALUE",
            help="A setting of the engine, e.g. partition=gpu; see docs/launching.md. Repeatable.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be submitted.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the files of the submission. [launches/NAME]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run one program in many processes: on this machine, or on many hosts with what you have
    already. Exit code on this machine: that of the first process that failed; 75: stopped, and
    saved.
    """
    engine = chosen(dict(zip(ENGINES, (slurm, kubernetes, tpu_vm, ray, skypilot), strict=True)))
    here = {
        "--processes": processes,
        "--devices-per-process": devices,
        "--interface": interface,
        "--port": port,
        "--elastic": elastic or None,
        "--silent-seconds": silent_seconds,
        "--stop-seconds": stop_seconds,
        "--join-seconds": join_seconds,
    }
    away = {
        "--plain": plain or None,
        "--name": name,
        "--image": image,
        "--seconds": seconds,
        "--host-devices": host_devices,
        "--host-processes": host_processes,
        "--option": option or None,
        "--dry-run": dry_run or None,
        "--out": out,
        "--json": as_json or None,
    }
    variables = environment_of(env or [])
    if engine is None and processes is None:
        raise LaunchError(
            "nothing says who starts the processes\nTry: --processes N for this machine, or one of"
            f" {', '.join(f'--{one}' for one in ENGINES)}"
        )
    if engine is None:
        _only(away, f"is for an engine: one of {', '.join(f'--{one}' for one in ENGINES)}")
        raise typer.Exit(_here(completed(command, topology, run), variables, restarts or 0, here))
    _only(
        here,
        f"is for processes of this machine, and --{engine} starts them elsewhere; what an engine"
        " can be told stands in docs/launching.md",
    )
    fields = {
        "name": name or "shardlib",
        "image": image,
        "environment": variables,
        "plain": tuple(plain or ()),
        "restarts": restarts,
        "seconds": seconds,
        "host_devices": host_devices,
        "host_processes": host_processes,
    }
    _submit(
        Request(
            engine=engine,
            command=tuple(command),
            topology=topology,
            run=run,
            options=tuple(option or ()),
            fields=fields,
        ),
        out or FOLDER / (name or "shardlib"),
        dry_run=dry_run,
        as_json=as_json,
    )


def _only(options: dict[str, Any], why: str) -> None:
    """Raises where options were given that have no meaning here."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise LaunchError(f"{given[0]} {why}\nTry: shardlib launch --help")


def _here(
    command: tuple[str, ...], variables: dict[str, str], restarts: int, options: dict[str, Any]
) -> int:
    """Runs a command in several processes of this machine."""

    names = {
        "--processes": "processes",
        "--devices-per-process": "devices",
        "--interface": "interface",
        "--port": "port",
        "--elastic": "elastic",
        "--silent-seconds": "silent_seconds",
        "--stop-seconds": "stop_seconds",
        "--join-seconds": "join_seconds",
    }
    given = {names[name]: value for name, value in options.items() if value is not None}
    return run_here(command, restarts=restarts, environment=variables, **given)


def _submit(request: Request, folder: Path, *, dry_run: bool, as_json: bool) -> None:
    """Submits, or shows what would be."""
    from shardlib.launching.engines.submission import submit

    made = submission_of(request)
    data = {
        "engine": made.engine,
        "files": dict(made.files),
        "commands": [list(words) for words in made.commands],
        "later": [[what, list(words)] for what, words in made.later],
    }
    if dry_run:
        echo(json.dumps(data) if as_json else str(made))
        return
    said = submit(made, folder)
    if as_json:
        echo(json.dumps({**data, "folder": str(folder), "said": said}))
        return
    echo(
        "\n".join(
            filter(None, [said, *(f"{what}: {shlex.join(words)}" for what, words in made.later)])
        )
    )


def run_here(
    words: Sequence[str],
    *,
    processes: int,
    devices: int | None = None,
    interface: str | None = None,
    port: int | None = None,
    restarts: int = 0,
    elastic: bool = False,
    silent_seconds: float = 60.0,
    stop_seconds: float = 120.0,
    join_seconds: int = 300,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Runs a command in several processes of this machine, and gives its exit code.

    Args:
        words: a command of shardlib, or any program.
        processes, devices, port, elastic, join_seconds: see `shardlib.launching.local.Local`.
        interface: name of an interface, or an address of this machine, at which process 0 listens;
            by default 127.0.0.1.
        restarts: starts in a row that save nothing new, after the first.
        silent_seconds: without a sign of life, after which a process counts as frozen.
        stop_seconds: that processes have to save and end once they are asked to stop.
        environment: variables beside those of this process.

    Raises:
        LaunchError: what cannot be launched.
    """
    from shardlib.launching.local import LOOPBACK, Local, address_of, launch
    from shardlib.training.supervisor import Budget

    ours = bool(words) and words[0] in COMMANDS
    command = (sys.executable, "-m", "shardlib", *words) if ours else tuple(words)
    if elastic and ours and "--elastic" not in words and words[0] == "train":
        command = (*command, "--elastic")
    local = Local(
        command=command,
        processes=processes,
        devices=devices,
        address=address_of(interface) if interface else LOOPBACK,
        port=port,
        run=option_of(words, ("--run", "-r")),
        elastic=elastic,
        join_seconds=join_seconds,
        budget=Budget(restarts=restarts, silent_seconds=silent_seconds, stop_seconds=stop_seconds),
    )
    return launch(local, environ={**os.environ, **(environment or {})})
