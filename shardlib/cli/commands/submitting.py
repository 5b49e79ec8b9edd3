"""From the words of a command line to what an engine makes of them: a submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlib.cli.commands.launch_words import completed, option_of
from shardlib.errors import LaunchError
from shardlib.launching.engines.shared.engine import Engine
from shardlib.launching.engines.shared.options import settings_of
from shardlib.launching.engines.shared.submission import Submission
from shardlib.launching.job import Job

#: Where submissions are written, each in a folder of its name.
FOLDER = Path("launches")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command line asks of an engine.

    Attributes:
        engine: what starts the processes.
        command: words after --.
        topology, run: as the options say; taken from the words of a training where they are left
            out.
        options: KEY=VALUE of the engine.
        fields: further fields of the job, None where the default is wanted.
    """

    engine: Engine
    command: tuple[str, ...]
    topology: str | None
    run: str | None
    options: tuple[str, ...]
    fields: dict[str, Any]


def chosen(engines: Sequence[Engine], options: Sequence[str]) -> Engine | None:
    """The engine that a command line names, if any."""
    named = [engine for engine in engines if f"--{engine.name}" in options]
    if len(named) > 1:
        raise LaunchError(
            f"{' and '.join(f'--{engine.name}' for engine in named)} exclude each other: a job has"
            " one engine\nTry: one of them"
        )
    return named[0] if named else None


def submission_of(request: Request) -> Submission:
    """What the engine makes of the request."""
    topology, run = (
        value or option_of(request.command, names)
        for value, names in (
            (request.topology, ("--topology", "-t")),
            (request.run, ("--run", "-r")),
        )
    )
    if topology is None:
        raise LaunchError(
            "a job needs to know its machine\nTry: --topology 16*h100:8, or v5p:8x8x8"
        )
    command = completed(request.command, topology, run)
    job = Job(
        command=command,
        topology=topology,
        run=run,
        **{name: value for name, value in request.fields.items() if value is not None},
    )
    engine = request.engine
    settings = settings_of(engine.settings, request.options, engine.defaults())
    return engine.submission(job, settings)
