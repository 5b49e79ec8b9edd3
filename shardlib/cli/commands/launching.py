"""`shardlib launch`: one program in many processes, of this machine or of many hosts.

The options of engines are those of `shardlib.launching.engines.table`: one option each, as its row
says.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlib.cli.app import AsJson
from shardlib.cli.commands.here import Here, run_here
from shardlib.cli.commands.island_options import Islands, run_islands
from shardlib.cli.commands.launch_words import completed, environment_of
from shardlib.cli.commands.submitting import FOLDER, Request, chosen, submission_of
from shardlib.cli.groups import given, spread
from shardlib.cli.output import echo
from shardlib.errors import LaunchError
from shardlib.launching.engines.shared.engine import Engine
from shardlib.launching.engines.table import ENGINES

#: What a job is called that nobody has named.
NAME = "shardlib"


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of all launches."""

    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            "-t",
            help="The machine, e.g. 16*h100:8; taken from the command if left out.",
        ),
    ] = None
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            "-r",
            help="Folder of the run, seen by all hosts; taken from the command if left out.",
        ),
    ] = None
    restarts: Annotated[
        int | None,
        typer.Option(
            "--restarts",
            min=0,
            help="Start again so often without progress. [0 on this machine, otherwise 3]",
        ),
    ] = None
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="NAME=VALUE", help="A variable of every process. Repeatable."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a job on many hosts."""

    plain: Annotated[
        list[str] | None,
        typer.Option(
            "--plain",
            metavar="NAME",
            help="A variable of --env that looks like a secret and is none. Repeatable.",
        ),
    ] = None
    name: Annotated[str | None, typer.Option("--name", help="Of the job. [shardlib]")] = None
    image: Annotated[str | None, typer.Option("--image", help="Container image.")] = None
    seconds: Annotated[
        int | None, typer.Option("--seconds", min=1, help="Time limit of one start.")
    ] = None
    host_devices: Annotated[
        int | None,
        typer.Option(
            "--host-devices",
            min=1,
            help="Devices of a host, where not as many as the chip is sold with.",
        ),
    ] = None
    host_processes: Annotated[
        int | None, typer.Option("--host-processes", min=1, help="Processes on a host. [1]")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SubmissionOptions:
    """What is done with a job."""

    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="KEY=VALUE",
            help="A setting of the engine, e.g. partition=gpu; see docs/launching.md. Repeatable.",
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be submitted.")] = (
        False
    )
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the files of the submission. [launches/NAME]"),
    ] = None
    as_json: AsJson = False


def flags(engines: Sequence[Engine]) -> type:
    """One flag for every engine, as a group of options."""
    return make_dataclass(
        "Flags",
        [
            (
                engine.name.replace("-", "_"),
                Annotated[bool, typer.Option(f"--{engine.name}", help=engine.help)],
                field(default=False),
            )
            for engine in engines
        ],
        frozen=True,
        kw_only=True,
    )


def launch_command(engines: Sequence[Engine]) -> Callable[..., None]:
    """The command, for a table of engines."""
    names = ", ".join(f"--{engine.name}" for engine in engines)

    def launch(
        command: Annotated[
            list[str],
            typer.Argument(
                metavar="-- COMMAND",
                help="A command of shardlib (train ..., doctor ...), or any other program.",
            ),
        ],
        here: Here,
        wanted: Any,
        common: Common,
        job: JobOptions,
        submission: SubmissionOptions,
        islands: Islands,
    ) -> None:
        """Run one program in many processes: on this machine, or on many hosts with what you have
        already. Exit code on this machine: that of the first process that failed; 75: stopped, and
        saved.
        """
        engine = chosen(engines, list(given(wanted)))
        variables = environment_of(common.env or [])
        if given(islands):
            others = {**given(job), **given(submission), **given(wanted)}
            _only(others, "is for an engine, and islands are on this machine, or come by hand")
            raise typer.Exit(run_islands(command, islands, here, common, variables))
        if engine is None and here.processes is None:
            raise LaunchError(
                "nothing says who starts the processes\nTry: --processes N or --islands N for this"
                f" machine, or one of {names}"
            )
        if engine is None:
            _only({**given(job), **given(submission)}, f"is for an engine: one of {names}")
            words = completed(command, common.topology, common.run)
            restarts = common.restarts or 0
            raise typer.Exit(run_here(words, here, restarts=restarts, environment=variables))
        _only(
            given(here),
            f"is for processes of this machine, and --{engine.name} starts them elsewhere; what an"
            " engine can be told stands in docs/launching.md",
        )
        _submit(_request(engine, command, common, job, submission), submission, job.name)

    return spread(launch, wanted=flags(engines))


def _request(
    engine: Engine,
    command: Sequence[str],
    common: Common,
    job: JobOptions,
    submission: SubmissionOptions,
) -> Request:
    """What the command line asks of the engine."""
    return Request(
        engine=engine,
        command=tuple(command),
        topology=common.topology,
        run=common.run,
        options=tuple(submission.option or ()),
        fields={
            "name": job.name or NAME,
            "image": job.image,
            "environment": environment_of(common.env or []),
            "plain": tuple(job.plain or ()),
            "restarts": common.restarts,
            "seconds": job.seconds,
            "host_devices": job.host_devices,
            "host_processes": job.host_processes,
        },
    )


def _only(options: dict[str, Any], why: str) -> None:
    """Raises where options were given that have no meaning here."""
    for name in options:
        raise LaunchError(f"{name} {why}\nTry: shardlib launch --help")


def _submit(request: Request, options: SubmissionOptions, name: str | None) -> None:
    """Submits, or shows what would be."""
    from shardlib.launching.engines.shared.submission import submit

    submission = submission_of(request)
    data = {
        "engine": submission.engine,
        "files": dict(submission.files),
        "commands": [list(words) for words in submission.commands],
        "later": [[what, list(words)] for what, words in submission.later],
    }
    if options.dry_run:
        echo(json.dumps(data) if options.as_json else str(submission))
        return
    folder = options.out or FOLDER / (name or NAME)
    output = submit(submission, folder)
    if options.as_json:
        echo(json.dumps({**data, "folder": str(folder), "said": output}))
        return
    echo(
        "\n".join(
            filter(
                None,
                [output, *(f"{what}: {shlex.join(words)}" for what, words in submission.later)],
            )
        )
    )


#: `shardlib launch` with the engines that there are.
launch = launch_command(ENGINES)
