"""`shardlib generate`."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Annotated

import typer

from shardlib.cli.app import AsJson
from shardlib.cli.output import echo, quiet_stdout


def generate_command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, as `shardlib train --run` made.")
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text that is continued.")],
    most: Annotated[int, typer.Option("--most", "-n", min=1, help="Bytes of the answer.")] = 200,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 takes the likeliest byte.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option("--top-k", help="Likeliest bytes to choose from; 0: all.")
    ] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Probability that the bytes to choose from have.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the choices.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Continue a text with what a run has learned, byte by byte, as it is written. The run may
    still be training; its newest whole checkpoint counts.
    """
    from shardlib.errors import ArgumentError
    from shardlib.serving.scheduling.settings import Sampling

    how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    given = prompt.encode("utf-8", "surrogateescape")
    if not given:
        raise ArgumentError("the prompt is empty\nTry: --prompt 'def '")
    with quiet_stdout(as_json):
        from shardlib import models
        from shardlib.serving.engine import Engine
        from shardlib.serving.scheduling.capacity import Capacity
        from shardlib.serving.trained import trained_run

        found = trained_run(run)
        longest = found.model.max_seq
        if len(given) + most > longest:
            raise ArgumentError(
                f"{len(given)} bytes of the prompt and {most} of the answer are more than the"
                f" {longest} that the model of {run} looks at\nTry: a shorter prompt, or a smaller"
                " --most"
            )
        engine = Engine(
            models.build(found.model)[0],
            lambda model, tokens: model(tokens)[..., :256],
            weights=found.weights,
            capacity=Capacity(longest=longest, slots=1),
        )
    text = codecs.getincrementaldecoder("utf-8")("replace")
    if not as_json:
        echo(text.decode(given), nl=False)
    answer = bytearray()
    for byte in engine.stream(list(given), most, sampling=how):
        answer.append(byte)
        if not as_json:
            echo(text.decode(bytes([byte])), nl=False)
    if not as_json:
        echo(text.decode(b"", final=True))
        return
    echo(
        json.dumps(
            {
                "run": str(run),
                "step": found.step,
                "prompt": prompt,
                "text": bytes(answer).decode("utf-8", "replace"),
                "bytes": list(answer),
            }
        )
    )
