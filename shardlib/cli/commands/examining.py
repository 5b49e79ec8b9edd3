"""`shardlib doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardlib.cli.app import AsJson
from shardlib.cli.output import echo, quiet_stdout, writable, write


def doctor_command(
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            "-t",
            help=(
                "The machine that these hosts are meant to be, e.g. 16*h100:8; links are measured"
                " along its tiers."
            ),
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", "-r", help="Folder of the run, which every host must be able to write."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="That it may take.")] = 60.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Look and compare, and time nothing.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the topology with the measured rates here, to plan for."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look for what keeps these hosts from training together, and name the host. Exit code 1:
    something is wrong. With several processes: shardlib launch ... -- doctor.
    """
    from shardlib.launching import join
    from shardlib.processes.devices import cpu_without_accelerators

    cpu_without_accelerators()
    with quiet_stdout(as_json):
        joined = join()
        first = joined is None or joined.process == 0
        if first:  # the one that writes
            writable(out)
        from shardlib.doctor.examine import examine

        if joined is None and topology is not None and topology.startswith("cpu:"):
            from shardlib.hardware.topology import topology as parsed
            from shardlib.processes.devices import simulate_cpu_devices

            simulate_cpu_devices(parsed(topology).devices)
        examination = examine(
            topology, run=str(run) if run is not None else None, seconds=seconds, measure=not quick
        )
        corrected = examination.corrected() if out is not None else ""
    if first:
        if out is not None:
            write(out, corrected)
        echo(json.dumps(examination.to_json()) if as_json else str(examination), nl=True)
    if not examination.ok:
        raise typer.Exit(1)
