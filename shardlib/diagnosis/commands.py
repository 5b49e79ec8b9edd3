"""`shardlib why`: why there is communication in a function, or in a compiled program's text."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.app import AsJson
from shardlib.cli.output import echo, quiet_stdout, writable, write
from shardlib.diagnosis.source import error_text
from shardlib.errors import ArgumentError, MissingFileError, TracingError
from shardlib.processes.progress import Progress

if TYPE_CHECKING:
    from shardlib.diagnosis.report import Diagnosis


def why_command(
    program: Annotated[
        str,
        typer.Argument(
            metavar="PROGRAM",
            help="package.module:function, which takes no arguments and returns a function and its"
            " arguments; or a file with the text of a compiled program (HLO).",
        ),
    ],
    topology: Annotated[
        str | None,
        typer.Option("--topology", "-t", help="The machine: v5e:4x4, 2*h100:8, cpu:8."),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option("--mesh", help="Axes and sizes: data=4,model=2.")
    ] = None,
    cures: Annotated[
        int, typer.Option("--cures", min=0, help="Programs that may be compiled to find cures.")
    ] = 4,
    cure_seconds: Annotated[
        float, typer.Option("--cure-seconds", min=0, help="After which no more is tried.")
    ] = 600.0,
    max_unexplained: Annotated[
        int | None,
        typer.Option(
            "--max-unexplained",
            min=0,
            help="Exit with 1 where more collectives than so many are not inherent, or a part of"
            " the program cannot be read.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page.")
    ] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Annotations for a workflow of GitHub.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say why there is communication in a function: line, shardings, bytes, cure."""
    if html is not None:
        writable(html)
    with quiet_stdout(as_json):
        diagnosis = _diagnose(program, topology, mesh, cures=cures, cure_seconds=cure_seconds)
    from shardlib.diagnosis.report import github_annotations, page, report_text

    if html is not None:
        write(html, page(diagnosis))
    if as_json:
        echo(diagnosis.to_json())
    elif github:
        for line in github_annotations(diagnosis):
            echo(line)
    else:
        echo(report_text(diagnosis))
    unexplained, unread = len(diagnosis.unexplained), diagnosis.communication.problems
    if max_unexplained is not None and unread:
        echo(f"{len(unread)} parts of the program could not be read", err=True)
        raise typer.Exit(1)
    if max_unexplained is not None and unexplained > max_unexplained:
        echo(
            f"{unexplained} collectives are not inherent, and --max-unexplained is"
            f" {max_unexplained}",
            err=True,
        )
        raise typer.Exit(1)


def _diagnose(program: str, topology: str | None, mesh: str | None, **search: Any) -> Diagnosis:
    module, colon, name = program.rpartition(":")
    if Path(program).exists() or not colon:
        return _of_text(Path(program), topology, mesh)
    if topology is None:
        raise ArgumentError(
            "a function is compiled for a machine, and none is named\nTry: --topology v5e:4x4"
        )
    from shardlib.machines.topology import topology as parse_topology

    _simulate(parse_topology(topology).devices)
    function, arguments, keywords = _load(program, module, name)
    from shardlib.diagnosis.diagnose import why

    with Progress(f"diagnosing {program}") as progress:
        return why(
            function,
            *arguments,
            keywords=keywords,
            topology=topology,
            mesh=mesh,
            **search,
            progress=lambda step: progress.to(0, step),
        )


def _of_text(file: Path, topology: str | None, mesh: str | None) -> Diagnosis:
    from shardlib.diagnosis.diagnose import why_text

    if not file.is_file():
        state = f"{file} is a folder" if file.is_dir() else f"there is no file {file}"
        dumped = file.glob("*after_optimizations.txt") if file.is_dir() else ()
        programs = sorted(
            dumped, key=lambda path: -path.stat().st_size
        )  # the step, then small ones
        remedy = (
            " or ".join(f"shardlib why {path}" for path in programs[:3])
            or "the text of a compiled program (of XLA_FLAGS='--xla_dump_to=dump"
            " --xla_dump_hlo_as_text' the file ...after_optimizations.txt), or"
            " package.module:function"
        )
        raise MissingFileError(f"{state}\nTry: {remedy}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{file} cannot be read as text: {error}") from error
    return why_text(text, source=str(file), topology=topology, mesh=mesh)


def _simulate(devices: int) -> None:
    """Gives this process as many simulated devices as the topology has, and no others, before JAX
    looks for them, so that a function may make its mesh of `jax.devices()`.
    """
    import jax

    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
        jax.config.update("jax_num_cpu_devices", devices)


def _load(
    program: str, module: str, name: str
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """The function, its arguments and its keyword arguments, as a user's function returns them."""
    if not module or not name:
        raise ArgumentError(f"{program!r} should be package.module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        raise ArgumentError(f"{program}: importing {module} fails{error_text(error)}") from error
    if not callable(make):
        raise ArgumentError(f"{program}: {module} has no function {name!r}")
    try:
        result = make()
    except Exception as error:
        raise TracingError(
            f"{program} fails{error_text(error)}\nTry: call it in"
            " Python first; a mesh of absent devices is a jax.sharding.AbstractMesh"
        ) from error
    if not isinstance(result, tuple) or not result or not callable(result[0]):
        raise ArgumentError(
            f"{program} returns {type(result).__name__}, not a function and its arguments\nTry:"
            " return step, (params, batch)"
        )
    function, *values = result
    if len(values) in (1, 2) and isinstance(values[0], tuple | list):
        keywords = values[1] if len(values) == 2 else {}
        if isinstance(keywords, Mapping):
            return function, tuple(values[0]), keywords
    return function, tuple(values), {}


#: What the wing adds to the command line.
COMMANDS: Mapping[str, Callable[..., None]] = {"why": why_command}
