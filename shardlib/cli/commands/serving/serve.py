"""`shardlib serve`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardlib.cli.app import AsJson
from shardlib.cli.commands.serving.beside import Adapted, Guesses, beside, folders_of
from shardlib.cli.commands.serving.sizes import Planned, Room, devices_of, sizes_of
from shardlib.cli.groups import spread
from shardlib.cli.numbers import duration
from shardlib.cli.output import echo, quiet_stdout
from shardlib.errors import ArgumentError, MissingPackageError

if TYPE_CHECKING:
    from shardlib.serving.hosting.deployment import Deployment
    from shardlib.serving.http.settings import Settings

#: Addresses that only this machine reaches.
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the server is, and who may ask."""

    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = (
        8000
    )
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File of bearer tokens, one a line; one is asked for."),
    ] = None
    waiting: Annotated[
        int, typer.Option("--waiting", min=0, help="Requests of a model that wait at most.")
    ] = 64
    drain: Annotated[
        str,
        typer.Option(
            "--drain", metavar="60s", help="Time that answers have to end in after SIGTERM."
        ),
    ] = "60s"
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="That an answer may take; it ends with what it has then."),
    ] = None
    refresh: Annotated[
        str,
        typer.Option("--refresh", metavar="10s", help="Time between looks for newer checkpoints."),
    ] = "10s"


@spread
def serve_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]MODEL...",
            help=(
                "Folder of a run of `shardlib train` or of Hugging Face, or a preset or model card"
                " with random weights. [a demonstration, trained for a minute the first time]"
            ),
        ),
    ] = None,
    *,
    place: Place,
    room: Room,
    planned: Planned,
    guesses: Guesses,
    adapted: Adapted,
    average: Annotated[
        bool,
        typer.Option(
            "--average", help="Of a run, the moving average that `train --average` keeps."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Serve models to any client of OpenAI's interface. A run may still be training: its newest
    checkpoint is served, without dropping a request.
    """
    try:
        from shardlib.serving.http import server, settings
        from shardlib.serving.http.app import application
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"serving needs the package {error.name}\nTry: pip install 'shardlib[serve]'"
        ) from error
    tokens = () if place.token_file is None else settings.read_tokens(place.token_file)
    limits = settings.Settings(
        tokens=tokens,
        waiting=place.waiting,
        drain_seconds=duration(place.drain, "--drain"),
        refresh_seconds=duration(place.refresh, "--refresh"),
        answer_seconds=place.seconds,
    )
    if place.host not in LOOPBACK and not tokens:
        echo(
            f"WARNING: whoever reaches {place.host} may ask; --token-file keeps others out",
            err=True,
        )
    # What is taken is said before anything is made.
    with server.listen(place.host, place.port) as listening:
        with quiet_stdout(as_json):
            deployed = _deployed(
                models or [], room, planned, (guesses, adapted), limits, average=average
            )
        names = [deployment.name for deployment in deployed]

        def ready() -> None:
            host, port = listening.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            if as_json:
                echo(json.dumps({"url": f"{url}/v1", "models": names}))
            else:
                echo(f"{', '.join(names)} at {url}/v1 for clients, at {url} for people")

        server.run(application(deployed, limits), limits, listening, ready=ready)


def _deployed(
    models: list[str],
    space: Room,
    planned: Planned,
    extra: tuple[Guesses, Adapted],
    settings: Settings,
    *,
    average: bool,
) -> list[Deployment]:
    """The models of the command line, each with an engine of its own."""
    from shardlib.processes.devices import cpu_without_accelerators

    cpu_without_accelerators()
    devices = devices_of(space)
    from shardlib.serving.hosting.demonstration import demonstration
    from shardlib.serving.hosting.deployment import deploy
    from shardlib.serving.words import named

    def say(text: str) -> None:
        echo(text, err=True)

    guesses, adapters = extra[0], folders_of(extra[1].adapters)
    if adapters and len(models) != 1:
        raise ArgumentError("--adapter is for one model\nTry: shardlib serve FOLDER --adapter ...")
    words = [_split(word) for word in models or [str(demonstration(say))]]
    deployed: list[Deployment] = []
    for name, word in words:
        served = named(word, average=average)
        if any(deployment.name == (name or served.name) for deployment in deployed):
            raise ArgumentError(
                f"two models are called {name or served.name}\nTry: NAME={word}, for another name"
            )
        if served.warning:
            say(f"WARNING: {served.warning}")
        served, others = beside(word, served, guesses, adapters)
        sizes = sizes_of(served, space, planned, devices)
        if sizes.says:
            say(sizes.says)
        say(f"{name or served.name}: compiling" + (f" ({served.version})" * bool(served.version)))
        deployed.append(
            deploy(
                served,
                replace(sizes.capacity, drafts=guesses.ahead),
                name=name,
                tensor=sizes.tensor,
                groups=sizes.groups,
                waiting=settings.waiting,
                buffer=settings.buffer,
                beside=others,
            )
        )
    return deployed


def _split(word: str) -> tuple[str, str]:
    """Name and model of a word; the name is empty where none is given."""
    name, equals, model = word.partition("=")
    if not equals or Path(word).exists() or "/" in name or not name:
        return "", word
    return name, model
