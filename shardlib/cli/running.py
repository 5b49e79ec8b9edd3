"""`shardlib verify | train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.app import AsJson, Model, PinList, app
from shardlib.cli.inputs import inputs_of, read_plan
from shardlib.cli.output import quiet_stdout, read_text, status, write
from shardlib.cli.pins import parse_pins
from shardlib.errors import PinError, TopologyError

if TYPE_CHECKING:
    from shardlib.planning.plan import Plan
    from shardlib.verification.report import Verification


@app.command("verify")
def verify_command(
    model: Model,
    topology: Annotated[str | None, typer.Option("--topology", "-t", help="For example 16*h100:8 or v5e:16x16; taken from --plan if left out.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="A plan to verify instead of searching for one.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", "-b", min=1, help="Sequences in the global batch.")] = None,
    seq: Annotated[int | None, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")] = None,
    pin: PinList = None,
    baseline: Annotated[Path | None, typer.Option("--baseline", help="An earlier report; more communication than there is an error.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the report here, as JSON.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Time that the compiler may take.")] = 1800.0,
    as_json: AsJson = False,
) -> None:
    """Compile a plan with the real TPU, GPU or CPU compiler and compare; exit code 1 if that refutes it."""
    from shardlib.verification.report import growth, read_baseline, verification_to_data

    before = read_baseline(read_text(baseline, "report", "shardlib verify MODEL ... --out report.json"), str(baseline)) if baseline else None
    with quiet_stdout(as_json):
        found = _verified(model, topology, read_plan(plan) if plan else None, batch, seq, parse_pins(pin or []), seconds)
    if before is not None and found.compiled is not None:
        from dataclasses import replace

        found = replace(found, findings=(*growth(before, found.compiled.collectives), *found.findings))
    if out is not None:
        write(out, found.to_json() + "\n")
    typer.echo(json.dumps(verification_to_data(found)) if as_json else str(found), nl=as_json)
    if not found.ok:
        raise typer.Exit(1)


def _verified(spec: str, topology: str | None, plan: Plan | None, batch: int | None, seq: int | None, pins: dict[str, Any], seconds: float) -> Verification:
    """Verifies the model that a command line names."""
    if topology is None and plan is None:
        raise TopologyError("verify needs a machine to compile for\nTry: --topology v5e:16x16, or --plan plan.json")
    if plan is not None and pins:
        raise PinError("--plan and --pin exclude each other: the plan has decided already\nTry: make another plan with these pins, `shardlib plan ... --out plan.json`")
    origin = dict(plan.origin) if plan is not None else {}
    if batch is None and seq is None and origin.get("model") == spec:
        batch, seq = (int(origin[key]) if key in origin else None for key in ("batch", "seq"))
    inputs = inputs_of(spec, batch, seq)
    import shardlib
    from shardlib.verification.isolation import Limits

    where = topology or (plan.topology if plan else "")
    with status(f"compiling {spec} for {where}"):
        return shardlib.verify(**inputs, topology=where, plan=plan, pin=pins, limits=Limits(seconds=seconds))


@app.command("train")
def train_command(
    data: Annotated[str | None, typer.Option("--data", help="A file or folder of text; if left out, Python's own standard library.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="A preset, configuration file or model card. [demo]")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Optimizer steps.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", "-b", help="Sequences in the global batch.")] = None,
    seq: Annotated[int | None, typer.Option("--seq", "-s", help="Bytes of a sequence.")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Peak learning rate.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of parameters, batches and the sample.")] = None,
    topology: Annotated[str | None, typer.Option("--topology", "-t", help="What to plan for; cpu:N simulates N devices. [cpu:8]")] = None,
    pin: PinList = None,
    sample_bytes: Annotated[int | None, typer.Option("--sample-bytes", help="Bytes of text to write at the end; 0 for none.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level transformer on text; with no arguments, on Python's own library."""
    pins = parse_pins(pin or [])
    from shardlib.training.loop import TrainConfig, train

    given: dict[str, Any] = {"data": data, "model": model, "steps": steps, "batch": batch, "seq": seq, "lr": lr, "seed": seed, "topology": topology,
             "sample_bytes": sample_bytes}
    train(TrainConfig(**{name: value for name, value in given.items() if value is not None}, pin=pins or None, quiet=quiet, json=as_json))
