"""`shardlib generate`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from shardlib.cli.app import AsJson
from shardlib.cli.commands.serving.beside import Guesses, beside
from shardlib.cli.groups import spread
from shardlib.cli.output import echo, quiet_stdout

if TYPE_CHECKING:
    from shardlib.serving.engine import Engine
    from shardlib.serving.scheduling.requests import Request
    from shardlib.serving.text import Text

#: What the adapter is called.
ADAPTER = "adapter"


@dataclass(frozen=True, kw_only=True)
class How:
    """How tokens are chosen, and for how long."""

    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            help="0 takes the likeliest; by default what the folder says, 0.8 of a run.",
        ),
    ] = None
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Likeliest tokens to choose from; 0: all.")
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Probability that the tokens to choose from have."),
    ] = None
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="That the answer may take; it ends with what it has then."),
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Of the choices.")] = 0


@spread
def generate_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="Folder of a run, as `shardlib train --run` made, or of Hugging Face.",
        ),
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text that is continued.")],
    most: Annotated[
        int, typer.Option("--most", "-n", min=1, help="Tokens of the answer; bytes, of a run.")
    ] = 200,
    *,
    how: How,
    guesses: Guesses,
    adapter: Annotated[
        str | None, typer.Option("--adapter", help="Folder of PEFT with an adapter of the model.")
    ] = None,
    average: Annotated[
        bool,
        typer.Option(
            "--average", help="Of a run, the moving average that `train --average` keeps."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a text with what a run has learned, or with a model of Hugging Face, as it is
    written. A run may still be training; its newest whole checkpoint counts.
    """
    from shardlib.errors import ArgumentError
    from shardlib.processes.devices import cpu_without_accelerators
    from shardlib.serving.scheduling.requests import Asked
    from shardlib.serving.scheduling.settings import Sampling

    options = {name: value for name, value in vars(how).items() if value is not None}
    seconds = options.pop("seconds", None)
    sampling = replace(Sampling(temperature=0.8), **options)  # before anything is read
    if not prompt:
        raise ArgumentError("the prompt is empty\nTry: --prompt 'def '")
    cpu_without_accelerators()
    with quiet_stdout(as_json):
        from shardlib.serving.scheduling.capacity import Capacity
        from shardlib.serving.words import named

        served = named(model, average=average)
        if served.warning:
            echo(f"warning: {served.warning}", err=True)
        tokens = tuple(served.text.encode(prompt))
        if len(tokens) + most > served.longest:
            raise ArgumentError(
                f"{len(tokens)} tokens of the prompt and {most} of the answer are more than the"
                f" {served.longest} that {served.name} looks at\nTry: a shorter prompt, or a"
                " smaller --most"
            )
        served, others = beside(model, served, guesses, {ADAPTER: adapter} if adapter else {})
        longest = _room(len(tokens) + most, served.longest)
        sizes = Capacity(
            longest=longest, slots=1, drafts=guesses.ahead, adapters=len(others.adapters)
        )
        engine = served.engine(sizes)
        others.join(engine)
        if seconds is not None:
            engine.warm_up()  # compilation is no part of them
    if served.sampling is not None:
        sampling = replace(served.sampling, **options)
    request = engine.add(
        Asked(
            prompt=tokens,
            most=most,
            sampling=sampling,
            stop=served.text.ends,
            seconds=seconds,
            adapter=ADAPTER if adapter else "",
        )
    )
    if not as_json:
        _show(engine, request, prompt, served.text)
        return
    while request.ended is None:
        engine.step()
    report = {"model": served.name, "version": served.version, "prompt": prompt}
    echo(
        json.dumps({**report, "text": served.text.decode(request.answer), "tokens": request.answer})
    )


def _show(engine: Engine, request: Request, prompt: str, text: Text) -> None:
    """Prints a prompt, and the answer as it is written."""
    from shardlib.serving.text import Pieces

    pieces = Pieces(text)
    echo(prompt, nl=False)
    while request.ended is None:
        for event in engine.step():
            if event.token is not None:
                echo(pieces.add(event.token), nl=False)
    echo(pieces.end())


def _room(tokens: int, longest: int) -> int:
    """Tokens of the longest request: no more than needed, but whole blocks of them, since a model
    may want these.
    """
    return min(longest, -(-tokens // 1024) * 1024)
