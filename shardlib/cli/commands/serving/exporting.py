"""`shardlib export`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from shardlib.cli.app import AsJson
from shardlib.cli.groups import spread
from shardlib.cli.output import echo, quiet_stdout
from shardlib.untrusted.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Into:
    """Where to."""

    huggingface: Annotated[
        Path | None,
        typer.Option("--huggingface", help="Folder to make, as `transformers` reads them."),
    ] = None
    jax: Annotated[
        Path | None,
        typer.Option("--jax", help="Folder to make, with a program that needs JAX alone."),
    ] = None
    triton: Annotated[
        Path | None, typer.Option("--triton", help="Repository of NVIDIA Triton to add it to.")
    ] = None
    python_path: Annotated[
        list[Path] | None,
        typer.Option("--python-path", help="Folder that Triton's Python finds packages in."),
    ] = None


@spread
def export_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a run, or of Hugging Face; a preset or model card; or"
            " package.module:function, whose `outputs` are written.",
        ),
    ],
    into: Into,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Of --huggingface: float32, bfloat16, float16."),
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            "--seq", min=1, help="Tokens of a row of a language model; 128, or as many as it takes."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, help="Rows that a program takes; any number by default."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model for other programs."""
    from shardlib.errors import ArgumentError
    from shardlib.processes.devices import cpu_without_accelerators

    cpu_without_accelerators()
    targets = [target for target in (into.huggingface, into.jax, into.triton) if target is not None]
    if len(targets) != 1:
        raise ArgumentError(
            "one folder is made\nTry: --huggingface FOLDER, --jax FOLDER or --triton FOLDER"
        )
    with quiet_stdout(as_json):
        if into.huggingface is not None:
            report = _huggingface(model, into.huggingface, dtype)
        elif into.jax is not None:
            report = _jax(model, into.jax, seq, batch)
        else:
            report = _triton(model, into, seq, batch)
    if as_json:
        echo(json.dumps(report))
    else:
        echo(f"wrote {report['model']} to {report['folder']}")


def _huggingface(model: str, folder: Path, dtype: str | None) -> JsonObject:
    from shardlib.serving.folders.folder import is_folder
    from shardlib.serving.folders.writing import write_folder
    from shardlib.serving.text import ByteText
    from shardlib.serving.words import named

    served = named(model)
    if served.warning:
        echo(f"warning: {served.warning}", err=True)
    copied = is_folder(Path(model)) and not isinstance(served.text, ByteText)
    files = write_folder(served, folder, source=Path(model) if copied else None, dtype=dtype)
    return {"model": served.name, "folder": str(folder), "files": list(files)}


def _jax(model: str, folder: Path, seq: int | None, batch: int | None) -> JsonObject:
    from shardlib.serving.artefacts.single import named_pass
    from shardlib.serving.artefacts.written import write_artefact

    artefact = write_artefact(named_pass(model, seq), folder, batch=batch)
    return {
        "model": artefact.name,
        "folder": str(folder),
        "inputs": list(artefact.inputs),
        "outputs": list(artefact.outputs),
    }


def _triton(model: str, into: Into, seq: int | None, batch: int | None) -> JsonObject:
    from shardlib import models
    from shardlib.models.load import UserModel
    from shardlib.serving.artefacts.single import row_length, user_pass
    from shardlib.serving.folders.folder import is_folder
    from shardlib.serving.text import ByteText
    from shardlib.serving.triton.repository import Repository
    from shardlib.serving.words import named

    assert into.triton is not None
    repository = Repository(
        folder=into.triton,
        rows=batch or 16,
        python_path=tuple(str(path.resolve()) for path in into.python_path or ()),
    )
    loaded = models.load(model) if ":" in model else None
    if isinstance(loaded, UserModel):
        names = [repository.write_pass(user_pass(loaded, model, seq))]
    else:
        served = named(model)
        if served.warning:
            echo(f"warning: {served.warning}", err=True)
        copied = is_folder(Path(model)) and not isinstance(served.text, ByteText)
        fixed = served.config is not None and served.config.experts is not None
        names = replace(repository, fixed=fixed).write_language_model(
            served,
            source=Path(model) if copied else None,
            capacity={"longest": min(4096, served.longest)},
            seq=row_length(served, seq),
        )
    return {"model": names[0], "folder": str(into.triton), "models": names}
