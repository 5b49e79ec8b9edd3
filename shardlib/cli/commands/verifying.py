"""`shardlib verify`."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.app import AsJson, Changed, Model, PinList
from shardlib.cli.commands.planning import Sizes
from shardlib.cli.groups import spread
from shardlib.cli.inputs import inputs_of, origin_sizes, read_plan
from shardlib.cli.output import echo, quiet_stdout, read_text, status, writable, write
from shardlib.cli.pins import parse_pins
from shardlib.errors import (
    BatchError,
    PinError,
    PlanError,
    TopologyError,
    VerificationError,
)
from shardlib.untrusted import shown

if TYPE_CHECKING:
    from shardlib.planning.plan import Plan
    from shardlib.verification.report import Verification


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is compared, kept and allowed."""

    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline", help="An earlier report; more communication than there is an error."
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=writable, help="Write the report here, as JSON."),
    ] = None
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="Time that the compiler may take.")
    ] = 1800.0


@spread
def verify_command(
    model: Model,
    *,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            "-t",
            help="For example 16*h100:8 or v5e:16x16; taken from --plan if left out.",
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="A plan to verify instead of searching for one.")
    ] = None,
    changed: Changed = False,
    sizes: Sizes,
    pin: PinList = None,
    report: Report,
    as_json: AsJson = False,
) -> None:
    """Compile a plan with the real TPU, GPU or CPU compiler and compare; exit code 1 if that
    refutes it.
    """
    from shardlib.verification.report import growth, read_baseline, verification_to_data

    before = (
        read_baseline(
            read_text(
                report.baseline,
                "report",
                "shardlib verify MODEL ... --out report.json",
                VerificationError,
            ),
            str(report.baseline),
        )
        if report.baseline
        else None
    )
    with quiet_stdout(as_json):
        verification = _verified(
            model,
            topology,
            read_plan(plan, changed=changed) if plan else None,
            sizes,
            parse_pins(pin or []),
            report.seconds,
        )
    if before is not None and verification.compiled is not None:
        from dataclasses import replace

        verification = replace(
            verification,
            findings=(*growth(before, verification.compiled.collectives), *verification.findings),
        )
    if report.out is not None:
        write(report.out, verification.to_json() + "\n")
    echo(
        json.dumps(verification_to_data(verification)) if as_json else str(verification), nl=as_json
    )
    if not verification.ok:
        raise typer.Exit(1)


def _verified(
    spec: str,
    topology: str | None,
    plan: Plan | None,
    sizes: Sizes,
    pins: dict[str, Any],
    seconds: float,
) -> Verification:
    """Verifies the model that a command line names."""
    if topology is None and plan is None:
        raise TopologyError(
            "verify needs a machine to compile for\nTry: --topology v5e:16x16, or --plan plan.json"
        )
    if plan is not None and pins:
        raise PinError(
            "--plan and --pin exclude each other: the plan has decided already\nTry: make another"
            " plan with these pins, `shardlib plan ... --out plan.json`"
        )
    origin = dict(plan.origin) if plan is not None else {}
    batch, seq = sizes.batch, sizes.seq
    if plan is not None and batch is None and seq is None and origin.get("model") == spec:
        batch, seq = origin_sizes(plan)
    try:
        inputs = inputs_of(spec, batch, seq)
    except BatchError as error:
        _require_same(plan, spec, error)
        raise
    import shardlib
    from shardlib.verification.isolation import Limits

    machine = topology or (plan.topology if plan else "")
    with status(f"compiling {spec} for {machine}"):
        return shardlib.verify(
            **inputs, topology=machine, plan=plan, pin=pins, limits=Limits(seconds=seconds)
        )


def _require_same(plan: Plan | None, spec: str, error: BatchError) -> None:
    """Says that a plan is of another model, where that is why the size of the batch is open."""
    model = dict(plan.origin).get("model", "") if plan is not None else ""
    if model and model != spec:
        raise PlanError(
            f"the plan was made for {shown(model)}, and not for {shown(spec)}\nTry: shardlib verify"
            f" {shlex.quote(model)} --plan ..., or a plan for {spec}"
        ) from error
