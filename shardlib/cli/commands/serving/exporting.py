"""`shardlib export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardlib.cli.app import AsJson
from shardlib.cli.output import echo, quiet_stdout


def export_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Folder of a run, or of Hugging Face; a preset or model card."
        ),
    ],
    huggingface: Annotated[
        Path | None,
        typer.Option("--huggingface", help="Folder to make, as `transformers` reads them."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Of the files: float32, bfloat16, float16."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model for other programs."""
    from shardlib.errors import ArgumentError

    if huggingface is None:
        raise ArgumentError("nothing is said of where to\nTry: --huggingface FOLDER")
    with quiet_stdout(as_json):
        from shardlib.serving.folders.folder import is_folder
        from shardlib.serving.folders.writing import write_folder
        from shardlib.serving.text import ByteText
        from shardlib.serving.words import named

        found = named(model)
        if found.warning:
            echo(f"warning: {found.warning}", err=True)
        copied = is_folder(Path(model)) and not isinstance(found.text, ByteText)
        files = write_folder(
            found, huggingface, source=Path(model) if copied else None, dtype=dtype
        )
    if as_json:
        echo(json.dumps({"model": found.name, "folder": str(huggingface), "files": list(files)}))
    else:
        echo(f"wrote {found.name} to {huggingface}: {', '.join(files)}")
