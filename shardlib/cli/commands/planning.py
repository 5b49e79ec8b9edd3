"""`shardlib plan | explain | timeline | replan`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlib.cli.app import AsJson, Changed, Model, PinList, PlanFile
from shardlib.cli.commands.reports.page import Page
from shardlib.cli.commands.run_options import Run
from shardlib.cli.commands.serving.planning import Serving, explain_serving, plan_to_serve
from shardlib.cli.groups import spread
from shardlib.cli.inputs import make_plan, read_plan, replanned, with_source
from shardlib.cli.output import echo, quiet_stdout, status, writable, write
from shardlib.cli.pins import parse_allow, parse_pins, pin_text
from shardlib.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the batch."""

    batch: Annotated[
        int | None, typer.Option("--batch", "-b", min=1, help="Sequences in the global batch.")
    ] = None
    seq: Annotated[int | None, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")] = (
        None
    )


#: Where `--emit jax` writes.
PLAIN_FILE = "sharded_step.py"


#: What `--emit` says for plain JAX -> mode of its mesh axes.
PLAIN_FORMS = {"jax": "auto", "jax-explicit": "explicit"}


def _plain_file(emit: str | None) -> tuple[Path, str] | None:
    """The file that a plan is written to as plain JAX, and its mode; None where `--emit` says
    something else.
    """
    form, colon, file = (emit or "").partition(":")
    is_plain = form in PLAIN_FORMS
    return (Path(file if colon else PLAIN_FILE), PLAIN_FORMS[form]) if is_plain else None


def _emitted(emit: str | None) -> str | None:
    """What `--emit` says, if its file can be written."""
    if emit is not None:
        plain = _plain_file(emit)
        writable(Path(emit) if plain is None else plain[0])
    return emit


@dataclass(frozen=True, kw_only=True)
class Searching:
    """What is searched, and how."""

    pin: PinList = None
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="WHAT=DTYPE",
            help="A dtype that may be chosen, e.g. moment_dtype=bfloat16. Repeatable.",
        ),
    ] = None
    refine: Annotated[
        int,
        typer.Option(
            "--refine",
            metavar="K",
            min=0,
            help="Compile the K best plans and choose by what the compiler makes of them.",
        ),
    ] = 0
    framework: Annotated[
        str | None,
        typer.Option(
            "--framework",
            metavar="NAME",
            help="Plan for this training framework, within what it can do: megatron-core,"
            " torchtitan, maxtext, deepspeed, levanter. [programs of shardlib]",
        ),
    ] = None
    emit: Annotated[
        str | None,
        typer.Option(
            "--emit",
            metavar="FILE|jax[:FILE]|jax-explicit[:FILE]",
            callback=_emitted,
            help="Write the configuration of the --framework here; or with jax the plan as a file"
            f" of plain JAX, {PLAIN_FILE} unless it is named; with jax-explicit one for programs in"
            " JAX's explicit mode.",
        ),
    ] = None


@spread
def plan_command(
    model: Model,
    topology: Annotated[
        str,
        typer.Option("--topology", "-t", help="For example 16*h100:8, v5e:16x16, or a .toml file."),
    ],
    sizes: Sizes,
    searching: Searching,
    run: Run,
    serving: Serving,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=writable, help="Write the plan here, as JSON."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best way to spread a model over a topology, or with --serve to answer requests
    there.
    """
    from shardlib.planning.emission.emit import require_written
    from shardlib.planning.plan import plan_to_data
    from shardlib.planning.text.explain import explain

    if serving.asked(
        batch=sizes.batch,
        seq=sizes.seq,
        allow=searching.allow,
        refine=searching.refine,
        framework=searching.framework,
        emit=searching.emit,
        tokens=run.tokens,
        price=run.price,
        mtbf=run.mtbf,
    ):
        plan_to_serve(model, topology, serving, searching.pin or [], out, as_json)
        return
    pins = {**parse_pins(searching.pin or []), **parse_allow(searching.allow or [])}
    plain = _plain_file(searching.emit) if searching.framework is None else None
    if searching.emit is not None and plain is None:
        require_written(searching.framework)
    with quiet_stdout(as_json):
        plan = make_plan(
            model,
            topology,
            sizes.batch,
            sizes.seq,
            pins,
            searching.refine,
            framework=searching.framework,
        )
    if plain is not None:
        file, mode = plain
        write(file, plan.emit("jax", mode=mode))
        echo(f"plain JAX: {file}", err=True)
    elif searching.emit is not None:
        write(Path(searching.emit), plan.emit())
    if out is not None:
        write(out, plan.to_json() + "\n")
    cost = run.cost(plan)
    data = {**plan_to_data(plan), **({} if cost is None else {"run": cost.to_json()})}
    text = explain(plan) if cost is None else f"{explain(plan)}\n{cost}"
    echo(json.dumps(data) if as_json else text, nl=as_json)


@spread
def explain_command(
    file: PlanFile,
    page: Page,
    why_not: Annotated[
        list[str] | None,
        typer.Option(
            "--why-not", metavar="KEY=VALUE", help="What would this decision cost? Repeatable."
        ),
    ] = None,
    alternatives: Annotated[
        bool,
        typer.Option(
            "--alternatives", help="The ten plans that come next, and what holds the plan back."
        ),
    ] = False,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="What memory and links are worth, and the regret if a figure is lower.",
        ),
    ] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="The kernels of a step beside the roofline.")
    ] = False,
    changed: Changed = False,
    as_json: AsJson = False,
) -> None:
    """Explain a plan: what was chosen, why, and what another choice would cost."""
    from shardlib.planning.plan import plan_to_data
    from shardlib.planning.text.diff import diff
    from shardlib.planning.text.explain import explain

    if explain_serving(
        file,
        as_json,
        others=bool(why_not or alternatives or sensitivity or kernels or page.html or page.svg),
    ):
        return
    plan = read_plan(file, changed=changed)
    data: dict[str, Any] = {"plan": plan_to_data(plan), "explanation": explain(plan)}
    text = data["explanation"]
    if why_not:
        pins = parse_pins(why_not)
        with quiet_stdout(as_json):
            alternative = replanned(plan, pins)
        text = (
            diff(plan, alternative)
            if not isinstance(alternative, str)
            else f"Not {pin_text(pins)}: {alternative}\n"
        )
        data["why_not"] = {
            "pins": pins,
            "plan": None if isinstance(alternative, str) else plan_to_data(alternative),
            "text": text,
        }
    answered = None
    if alternatives or sensitivity or kernels:
        from shardlib.planning.questions.questions import answers

        with quiet_stdout(as_json):
            answered = answers(
                with_source(plan),
                alternatives=alternatives,
                sensitivity=sensitivity,
                kernels=kernels,
            )
        data |= answered.to_json()
        text = "\n".join([*([text] if why_not else []), str(answered)])
    page.write(plan, answered)
    echo(json.dumps(data) if as_json else text, nl=as_json)


def timeline_command(
    file: PlanFile,
    svg: Annotated[
        Path | None, typer.Option("--svg", callback=writable, help="Draw it here.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--perfetto", callback=writable, help="Write a trace for ui.perfetto.dev here."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="FOLDER", help="With --perfetto: a run whose steps were recorded."
        ),
    ] = None,
    changed: Changed = False,
    as_json: AsJson = False,
) -> None:
    """Draw the pipeline of a plan: which stage does what when, and how long stages wait."""
    from shardlib.cli.commands.reports.trace import timeline_of, told, write_trace
    from shardlib.planning.pictures.timelines import timeline_svg

    if run is not None and trace is None:
        raise PlanError("--run belongs to a trace\nTry: --perfetto trace.json")
    plan = read_plan(file, changed=changed)
    timeline = timeline_of(plan, needed=trace is None or svg is not None)
    if svg is not None and timeline is not None:
        write(svg, timeline_svg(timeline))
    steps = {} if trace is None else write_trace(plan, timeline, trace, run)
    if as_json:
        data = {} if timeline is None else timeline.to_json()
        echo(json.dumps({**data, "steps": steps} if steps else data))
        return
    text = [
        *([] if timeline is None else [str(timeline)]),
        *([told(steps, trace)] if trace else []),
    ]
    echo("\n".join(text), nl=False)


def replan_command(
    file: PlanFile,
    topology: Annotated[
        str, typer.Option("--topology", "-t", help="The machine that is left, or that has grown.")
    ],
    lost: Annotated[
        str,
        typer.Option(
            "--lost",
            metavar="N,N,...",
            help="Numbers of the devices that are gone, A-B for a range. [the last ones]",
        ),
    ] = "",
    anew: Annotated[
        bool,
        typer.Option(
            "--anew",
            help="Search the whole space; otherwise the remat policy, schedule and the like stay.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=writable, help="Write the new plan here, as JSON."),
    ] = None,
    changed: Changed = False,
    as_json: AsJson = False,
) -> None:
    """Plan the same run for a machine that lost or gained hosts: the new plan, what moves, how much
    slower.
    """
    from shardlib.cli.numbers import numbers
    from shardlib.hardware import topology as find_topology

    plan, gone = read_plan(file, changed=changed), numbers(lost, "--lost")
    find_topology(topology)  # what is misspelt is said before anything is traced
    with quiet_stdout(as_json), status(f"planning {plan.model} for {topology}"):
        change = with_source(plan).replan(topology, lost=gone, anew=anew)
    if out is not None:
        write(out, change.plan.to_json() + "\n")
    echo(json.dumps(change.to_json()) if as_json else change.text, nl=as_json)
