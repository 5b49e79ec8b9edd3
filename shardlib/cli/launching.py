"""`shardlib launch`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from shardlib.cli.app import AsJson, app
from shardlib.cli.launching_engines import ENGINES, FOLDER, Request, chosen, environment_of, submission_of
from shardlib.errors import LaunchError


@app.command("launch", context_settings={"allow_interspersed_args": False})
def launch_command(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="A command of shardlib (train ...), or any other program.")],
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit to Slurm.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Create a JobSet.")] = False,
    tpu_vm: Annotated[bool, typer.Option("--tpu-vm", help="Run on Cloud TPU VMs.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Submit to a Ray cluster.")] = False,
    skypilot: Annotated[bool, typer.Option("--skypilot", help="Launch with SkyPilot.")] = False,
    topology: Annotated[str | None, typer.Option("--topology", "-t", help="The machine, e.g. 16*h100:8; taken from the command if left out.")] = None,
    name: Annotated[str, typer.Option("--name", help="Of the job.")] = "shardlib",
    image: Annotated[str | None, typer.Option("--image", help="Container image.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A variable of every process. Repeatable.")] = None,
    run: Annotated[str | None, typer.Option("--run", "-r", help="Folder of the run, seen by all hosts; taken from the command if left out.")] = None,
    restarts: Annotated[int | None, typer.Option("--restarts", min=0, help="Start again so often without progress. [3]")] = None,
    seconds: Annotated[int | None, typer.Option("--seconds", min=1, help="Time limit of one start.")] = None,
    host_devices: Annotated[int | None, typer.Option("--host-devices", min=1, help="Devices of a host, where not as many as the chip is sold with.")] = None,
    host_processes: Annotated[int | None, typer.Option("--host-processes", min=1, help="Processes on a host. [1]")] = None,
    option: Annotated[list[str] | None, typer.Option("--option", "-o", metavar="KEY=VALUE", help="A setting of the engine, e.g. partition=gpu; see docs/launching.md. Repeatable.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be submitted.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the files of the submission. [launches/NAME]")] = None,
    as_json: AsJson = False,
) -> None:
    """Run one program on many hosts, with what you have already."""
    engine = chosen(dict(zip(ENGINES, (slurm, kubernetes, tpu_vm, ray, skypilot), strict=True)))
    if engine is None:
        raise LaunchError(f"nothing says who starts the processes\nTry: one of {', '.join(f'--{name}' for name in ENGINES)}")
    fields = {"name": name, "image": image, "environment": environment_of(env or []), "restarts": restarts, "seconds": seconds, "host_devices": host_devices, "host_processes": host_processes}
    _submit(Request(engine=engine, command=tuple(command), topology=topology, run=run, options=tuple(option or ()), fields=fields), out or FOLDER / name, dry_run=dry_run, as_json=as_json)


def _submit(request: Request, folder: Path, *, dry_run: bool, as_json: bool) -> None:
    """Submits, or shows what would be."""
    from shardlib.launching.submission import submit

    made = submission_of(request)
    data = {"engine": made.engine, "files": dict(made.files), "commands": [list(words) for words in made.commands], "later": [[what, list(words)] for what, words in made.later]}
    if dry_run:
        typer.echo(json.dumps(data) if as_json else str(made))
        return
    said = submit(made, folder)
    if as_json:
        typer.echo(json.dumps({**data, "folder": str(folder), "said": said}))
        return
    typer.echo("\n".join(filter(None, [said, *(f"{what}: {shlex.join(words)}" for what, words in made.later)])))
