"""`shardlib export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardlib.cli.app import AsJson
from shardlib.cli.output import echo, quiet_stdout
from shardlib.untrusted.json_types import JsonObject


def export_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a run, or of Hugging Face; a preset or model card; or"
            " package.module:function, whose `outputs` are written.",
        ),
    ],
    huggingface: Annotated[
        Path | None,
        typer.Option("--huggingface", help="Folder to make, as `transformers` reads them."),
    ] = None,
    jax: Annotated[
        Path | None,
        typer.Option("--jax", help="Folder to make, with a program that needs JAX alone."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Of --huggingface: float32, bfloat16, float16."),
    ] = None,
    seq: Annotated[
        int, typer.Option("--seq", min=1, help="Tokens of a row of a language model.")
    ] = 128,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, help="Rows that a program takes; any number by default."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model for other programs."""
    from shardlib.errors import ArgumentError

    if (huggingface is None) == (jax is None):
        raise ArgumentError("one folder is made\nTry: --huggingface FOLDER, or --jax FOLDER")
    with quiet_stdout(as_json):
        if huggingface is not None:
            said = _huggingface(model, huggingface, dtype)
        else:
            assert jax is not None
            said = _jax(model, jax, seq, batch)
    if as_json:
        echo(json.dumps(said))
    else:
        echo(f"wrote {said['model']} to {said['folder']}")


def _huggingface(model: str, folder: Path, dtype: str | None) -> JsonObject:
    from shardlib.serving.folders.folder import is_folder
    from shardlib.serving.folders.writing import write_folder
    from shardlib.serving.text import ByteText
    from shardlib.serving.words import named

    found = named(model)
    if found.warning:
        echo(f"warning: {found.warning}", err=True)
    copied = is_folder(Path(model)) and not isinstance(found.text, ByteText)
    files = write_folder(found, folder, source=Path(model) if copied else None, dtype=dtype)
    return {"model": found.name, "folder": str(folder), "files": list(files)}


def _jax(model: str, folder: Path, seq: int, batch: int | None) -> JsonObject:
    from shardlib.serving.artefacts.single import named_pass
    from shardlib.serving.artefacts.written import write_artefact

    made = write_artefact(named_pass(model, seq), folder, batch=batch)
    return {
        "model": made.name,
        "folder": str(folder),
        "inputs": list(made.inputs),
        "outputs": list(made.outputs),
    }
