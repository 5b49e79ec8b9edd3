"""`shardlib bench-serve`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardlib.cli.app import AsJson
from shardlib.cli.groups import spread
from shardlib.cli.numbers import duration
from shardlib.cli.output import echo, quiet_stdout, read_text, writable, write
from shardlib.errors import ArgumentError, DataError, MissingPackageError
from shardlib.untrusted.json_types import JsonObject

if TYPE_CHECKING:
    from shardlib.serving.measuring.replay import Seen, Target
    from shardlib.serving.measuring.workload import Job


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Who is asked."""

    url: Annotated[
        str | None,
        typer.Option("--url", help="Of a server that runs, e.g. http://127.0.0.1:8000/v1."),
    ] = None
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Of that server. [the first that it has]")
    ] = None
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the token that it wants.")
    ] = None
    serve: Annotated[
        str | None,
        typer.Option("--serve", metavar="MODEL", help="Serve this for as long as it takes."),
    ] = None
    slots: Annotated[int, typer.Option("--slots", help="--serve: requests at a time.")] = 8


@dataclass(frozen=True, kw_only=True)
class How:
    """How it is asked, and what counts as in time."""

    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", min=1e-6, help="Requests a second, at random, in place of the file's times."
        ),
    ] = None
    together: Annotated[
        int, typer.Option("--together", min=1, help="Requests that are open at most.")
    ] = 1024
    seed: Annotated[int, typer.Option("--seed", help="Of drawn prompts and times.")] = 0
    ttft: Annotated[
        str | None, typer.Option("--ttft", metavar="500ms", help="To the first token at most.")
    ] = None
    tpot: Annotated[
        str | None, typer.Option("--tpot", metavar="30ms", help="From token to token at most.")
    ] = None


@spread
def bench_serve_command(
    workload: Annotated[
        Path,
        typer.Argument(metavar="WORKLOAD", help="JSON: requests with lengths and times."),
    ],
    *,
    asked: Asked,
    how: How,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=writable, help="Write figures and requests there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a server as a stored workload says: latencies, throughput, answers in time."""
    if (asked.url is None) == (asked.serve is None):
        raise ArgumentError(
            "one of --url and --serve says who is asked\nTry: --url http://127.0.0.1:8000/v1"
        )
    try:
        from shardlib.serving.measuring.figures import figures
        from shardlib.serving.measuring.replay import Target
        from shardlib.serving.measuring.workload import read_workload
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"asking needs the package {error.name}\nTry: pip install 'shardlib[serve]'"
        ) from error
    limits = {
        f"{name}_limit": None if text is None else duration(text, f"--{name}")
        for name, text in (("ttft", how.ttft), ("tpot", how.tpot))
    }
    text = read_text(workload, "workload", "a JSON list of requests", DataError)
    jobs = read_workload(text, str(workload), seed=how.seed, rate=how.rate)
    token = ""
    if asked.token_file is not None:
        from shardlib.serving.http.settings import read_tokens

        token = read_tokens(asked.token_file)[0]
    target = Target(
        url=asked.url or "", model=asked.model or "", token=token, together=how.together
    )
    with quiet_stdout(as_json):
        seen = _replayed(jobs, target) if asked.serve is None else _served(jobs, target, asked)
    measured = figures(seen, **limits)
    if out is not None:
        write(
            out, json.dumps(measured | {"seen": [vars(answer) for answer in seen]}, indent=1) + "\n"
        )
    echo(json.dumps(measured) if as_json else told(measured))


def _replayed(jobs: list[Job], target: Target) -> list[Seen]:
    import asyncio

    from shardlib.serving.measuring.replay import replay

    return asyncio.run(replay(jobs, target))


def _served(jobs: list[Job], target: Target, options: Asked) -> list[Seen]:
    """Asks a server of this process."""
    from dataclasses import replace

    from shardlib.serving.hosting.deployment import deploy
    from shardlib.serving.http.app import application
    from shardlib.serving.http.server import serving
    from shardlib.serving.scheduling.capacity import Capacity
    from shardlib.serving.words import named

    served = named(options.serve or "")
    longest = max(len(job.prompt) + job.most for job in jobs)
    if longest > served.longest:
        raise ArgumentError(
            f"a request of the workload has {longest} tokens, and {served.name} looks at"
            f" {served.longest}"
        )
    capacity = Capacity(longest=max(longest, 2), slots=options.slots)
    deployed = deploy(served, capacity, waiting=len(jobs))
    with serving(application([deployed])) as url:
        return _replayed(jobs, replace(target, url=f"{url}/v1"))


def told(values: JsonObject) -> str:
    """Figures in words."""
    lines = [
        f"{values['answered']} of {values['requests']} requests answered in"
        f" {values['seconds']:.3g} s ({values['refused']} refused, {values['failed']} failed)",
        f"{values['output_tokens_per_second']:.4g} tokens/s of answers,"
        f" {values['requests_per_second']:.3g} requests/s,"
        f" {values['cached_tokens']:,} tokens of prompts cached",
    ]
    names = {
        "ttft_seconds": "first token",
        "tpot_seconds": "token to token",
        "request_seconds": "whole request",
    }
    for name, words in names.items():
        if (spread := values[name]) is not None:
            parts = (f"{key} {1000 * value:.4g} ms" for key, value in spread.items())
            lines.append(f"{words:<15} {', '.join(parts)}")
    if any(value is not None for value in values["limits"].values()):
        lines.append(f"in time         {100 * values['in_time']:.1f}% of all requests")
    return "\n".join([*lines, *(f"error: {error}" for error in values["errors"])])
