"""Pages and comparisons of plans: the options of `explain` for its page, and `diff`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from shardlib.cli.app import AsJson, Changed, Model, PinList, PlanFile, Sizes
from shardlib.cli.inputs import (
    inputs_of,
    make_plan,
    origin_sizes,
    parse_pins,
    read_plan,
    replanned,
    spread,
    with_source,
)
from shardlib.cli.output import echo, quiet_stdout, read_text, show, writable, write
from shardlib.cli.running import Run
from shardlib.errors import (
    BatchError,
    PinError,
    PlanError,
    RunError,
    TopologyError,
    VerificationError,
)
from shardlib.planner.plan import Plan
from shardlib.processes.progress import Progress
from shardlib.report.elements import seconds_text
from shardlib.report.timelines import Timeline
from shardlib.untrusted.data import JsonObject, parse_json, shown
from shardlib.wings import extension, required

if TYPE_CHECKING:
    from shardlib.planner.answers import Answers
    from shardlib.planner.scaling import ScalingCurve
    from shardlib.report.pages import Evidence
    from shardlib.verification.report import Verification


# --------------------------------------------------------------------------------------------------
# `shardlib scale`.


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The batch, and whether it grows with the devices."""

    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            "-b",
            min=1,
            help="Sequences in the global batch; with --weak, of the smallest machine.",
        ),
    ] = None
    seq: Annotated[int | None, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")] = (
        None
    )
    weak: Annotated[bool, typer.Option("--weak", help="Let the batch grow with the devices.")] = (
        False
    )


@spread
def scale_command(
    model: Model,
    *,
    topology: Annotated[
        str,
        typer.Option(
            "--topology",
            "-t",
            help="A member of the family of machines, e.g. 16*h100:8 or v5e:16x16.",
        ),
    ],
    devices: Annotated[
        str, typer.Option("--devices", "-n", help="8..16384 for doublings, or 8,24,48.")
    ] = "8..16384",
    growth: Growth,
    pin: PinList = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", callback=writable, help="Draw the curve here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The best plan for every number of devices: time, efficiency, memory, and from where on more
    do not pay.
    """
    from shardlib.cli.inputs import sizes
    from shardlib.report.pages import curve_svg

    pins, numbers = parse_pins(pin or []), sizes(devices)
    with (
        quiet_stdout(as_json),
        Progress(f"planning {model} for {numbers[0]:,} to {numbers[-1]:,} devices"),
    ):
        curve = _scaled(model, topology, numbers, growth, pins)
    if svg is not None:
        write(svg, curve_svg(curve))
    echo(json.dumps(curve.to_json()) if as_json else str(curve), nl=as_json)


def _scaled(
    spec: str,
    topology: str,
    devices: tuple[int, ...],
    growth: Growth,
    pins: dict[str, Any],
) -> ScalingCurve:
    """The scaling curve of the model that a command line names."""
    from shardlib.machines.topology import of_size

    for number in devices:
        of_size(topology, number)
    inputs = inputs_of(spec, growth.batch, growth.seq)
    import shardlib

    if growth.weak:
        if growth.batch is None:
            raise BatchError(
                f"{spec} brings its own batch, which cannot grow with the devices\nTry: leave out"
                " --weak, or shardlib.scale(..., batch=function)"
            )
        rows: int = growth.batch
        inputs["batch"] = lambda number: inputs_of(spec, rows * number // devices[0], growth.seq)[
            "batch"
        ]
    return shardlib.scale(**inputs, topology=topology, devices=devices, pin=pins)


# --------------------------------------------------------------------------------------------------
# `shardlib models | topologies`: what is known by name.


def models_command(as_json: AsJson = False) -> None:
    """List the models that are known by name."""
    from shardlib.models.presets import PRESETS
    from shardlib.report.elements import parameters_text

    rows = [
        {
            "model": name,
            "parameters": c.parameter_count(),
            "layers": c.layers,
            "embed": c.embed,
            "heads": c.heads,
            "vocab": c.vocab_size,
            "experts": c.experts.count if c.experts else 0,
            "max_seq": c.max_seq,
        }
        for name, c in PRESETS.items()
    ]
    show(
        rows,
        as_json,
        text={"parameters": parameters_text, "experts": lambda n: str(n) if n else ""},
    )


def topologies_command(as_json: AsJson = False) -> None:
    """List the chips that the catalogue knows, and how a topology of them is spelled."""
    from shardlib.machines.catalog import CATALOG
    from shardlib.report.elements import bytes_text, count_text

    rows = [
        {
            "chip": name,
            "example": p.example,
            "flops_per_s": p.chip.peak("bfloat16"),
            "hbm_bytes": p.chip.hbm_bytes,
            "hbm_bytes_per_s": p.chip.hbm_bytes_per_s,
            "link": p.fast.name,
            "link_bytes_per_s": p.fast.bytes_per_s,
            "network": p.slow.name,
            "network_bytes_per_s": p.slow.bytes_per_s,
        }
        for name, p in CATALOG.items()
    ]

    def rate(value: float) -> str:
        return count_text(value, "B/s")

    show(
        rows,
        as_json,
        text={
            "flops_per_s": lambda f: count_text(f, "FLOP/s"),
            "hbm_bytes": bytes_text,
            "hbm_bytes_per_s": rate,
            "link_bytes_per_s": rate,
            "network_bytes_per_s": rate,
        },
    )


# --------------------------------------------------------------------------------------------------
# `shardlib diff`: what a change of a model or of its plan costs, and whether that is too much.


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of what a change may add."""

    max_seconds: Annotated[
        str | None,
        typer.Option("--max-seconds", metavar="2%", help="Exit code 1 beyond so much more time."),
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option("--max-memory", metavar="2%", help="The same for bytes of a device."),
    ] = None
    max_traffic: Annotated[
        str | None,
        typer.Option("--max-traffic", metavar="2%", help="The same for bytes of collectives."),
    ] = None
    max_collectives: Annotated[
        str | None,
        typer.Option(
            "--max-collectives", metavar="0%", help="The same for the number of collectives."
        ),
    ] = None

    def parts(self) -> dict[str, float]:
        """The part of each figure that may be added, by its word."""
        limits: dict[str, float] = {}
        for field in fields(self):
            text = getattr(self, field.name)
            if text is None:
                continue
            word = field.name.removeprefix("max_")
            match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
            if match is None:
                raise PlanError(f"--max-{word} is {text!r}; it is a percentage\nTry: 2%")
            limits[word] = float(match[1]) / 100
        return limits


@spread
def diff_command(
    file: PlanFile,
    limits: Limits,
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="OTHER", help="The plan after the change. [the model planned again, now]"
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown, for a pull request.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", callback=writable, help="Write a page here.")
    ] = None,
    changed: Changed = False,
    as_json: AsJson = False,
) -> None:
    """Compare two plans: decisions, seconds, memory, collectives. Exit code 1: beyond a limit."""
    from shardlib.report.changes import change, diff

    parts, before = limits.parts(), read_plan(file, changed=changed)
    if other is not None:
        after = read_plan(other, changed=changed)
    else:
        with quiet_stdout(as_json or markdown):
            after = replanned(before, {})
        if isinstance(after, str):
            raise PlanError(f"nothing fits any more: {after}")
    difference = change(before, after)
    beyond = difference.beyond(parts)
    if html is not None:
        from shardlib.report.pages import compared_page

        write(html, compared_page(before, after))
    if as_json:
        echo(json.dumps({**difference.to_json(), "beyond": list(beyond), "ok": not beyond}))
    elif markdown:
        echo(difference.markdown(beyond), nl=False)
    else:
        sections = [
            diff(before, after),
            difference.collectives_text(),
            *(f"too much: {excess}" for excess in beyond),
        ]
        echo("\n\n".join(text.rstrip("\n") for text in sections if text))
    if beyond:
        raise typer.Exit(1)


# --------------------------------------------------------------------------------------------------
# Options of `shardlib explain` that write a page, and what stands there beside the prediction.


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page for the browser."""

    html: Annotated[
        Path | None,
        typer.Option("--html", callback=writable, help="Write a report for the browser here."),
    ] = None
    svg: Annotated[
        Path | None,
        typer.Option("--svg", callback=writable, help="Draw the plan on its machine here."),
    ] = None
    verified: Annotated[
        Path | None,
        typer.Option(
            "--verified",
            metavar="REPORT",
            help="With --html: what `shardlib verify --out` wrote, beside the prediction.",
        ),
    ] = None
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="FOLDER", help="With --html: a run whose steps were measured."
        ),
    ] = None

    def write(self, plan: Plan, answers: Answers | None) -> None:
        """Writes the page, where one was asked for."""
        if self.svg is not None:
            from shardlib.machines.topology import topology
            from shardlib.report.pages import plan_svg

            write(self.svg, plan_svg(plan, topology(plan.topology)))
        if self.html is None:
            if self.verified is not None or self.run is not None:
                raise PlanError("--verified and --run belong to a page\nTry: --html report.html")
            return
        from shardlib.report.pages import html_report

        evidence = [*self._compiled(plan), *self._measured(plan)]
        write(self.html, html_report(plan, answers=answers, evidence=evidence))

    def _compiled(self, plan: Plan) -> list[Evidence]:
        if self.verified is None:
            return []
        from shardlib.report.pages import Evidence
        from shardlib.verification.report import read_baseline

        again = "make it with `shardlib verify ... --out report.json`"
        text = read_text(self.verified, "report", again, VerificationError)
        collectives = read_baseline(text, str(self.verified))
        data = cast("Mapping[str, Any]", parse_json(text, "the report", VerificationError))
        _held_to(plan, cast("Mapping[str, Any]", data.get("plan") or {}), self.verified)
        peak = data["compiled"].get("device_bytes", {}).get("peak")
        size = peak if isinstance(peak, int) and not isinstance(peak, bool) else None
        return [Evidence(source="compiled", peak_bytes=size, collectives=collectives)]

    def _measured(self, plan: Plan) -> list[Evidence]:
        if self.run is None:
            return []
        from shardlib.report.pages import Evidence
        from shardlib.training.run import status

        state = status(self.run)
        stored = parse_json(
            read_text(self.run / "plan.json", "plan", "a run that has begun", RunError),
            "the plan of the run",
            RunError,
        )
        _held_to(plan, cast("Mapping[str, Any]", stored), self.run)
        pace = state.pace
        return [Evidence(source="measured", step_seconds=pace.step_seconds or None)]


def _held_to(plan: Plan, stored: Mapping[str, Any], source: Path) -> None:
    """Refuses evidence that is of another plan than the prediction."""
    digest = str(stored.get("digest", ""))
    if digest != plan.digest:
        raise PlanError(
            f"{source} is of plan {digest or 'unknown'}, and the page is of plan"
            f" {plan.digest}\nTry: the plan.json of the run, or the plan that was verified"
        )


# --------------------------------------------------------------------------------------------------
# `shardlib plan | explain | timeline | replan`.


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
    """The validated value of `--emit`."""
    if emit is not None:
        plain = _plain_file(emit)
        writable(Path(emit) if plain is None else plain[0])
    return emit


@dataclass(frozen=True, kw_only=True)
class Searching:
    """Options of the search."""

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


@partial(spread, serving=extension("plan").options)
def plan_command(
    model: Model,
    topology: Annotated[
        str,
        typer.Option("--topology", "-t", help="For example 16*h100:8, v5e:16x16, or a .toml file."),
    ],
    sizes: Sizes,
    searching: Searching,
    run: Run,
    serving: Any,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=writable, help="Write the plan here, as JSON."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best way to spread a model over a topology."""
    from shardlib.planner.plan import plan_to_data
    from shardlib.report.text import explain

    training = {
        "batch": sizes.batch,
        "seq": sizes.seq,
        "allow": searching.allow,
        "refine": searching.refine,
        "framework": searching.framework,
        "emit": searching.emit,
        "tokens": run.tokens,
        "price": run.price,
        "mtbf": run.mtbf,
    }
    pin = searching.pin or []
    if extension("plan").run(model, topology, serving, pin, out, as_json, training=training):
        return
    pins = {**parse_pins(pin), **parse_allow(searching.allow or [])}
    plain = _plain_file(searching.emit) if searching.framework is None else None
    if searching.emit is not None and plain is None:
        what = "the configuration of a plan"
        required("shardlib.frameworks.configurations", what).require_written(searching.framework)
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
            "--why-not",
            metavar="KEY=VALUE",
            help="What would this decision cost? Several are one question.",
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
    from shardlib.planner.plan import plan_to_data
    from shardlib.report.changes import diff
    from shardlib.report.text import explain

    if extension("explain").run(
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
            f"- this plan, + the best with {pin_text(pins)}\n\n{diff(plan, alternative)}"
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
        from shardlib.planner.questions import answers

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
    from shardlib.report.timelines import timeline_svg

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
    from shardlib.cli.inputs import numbers
    from shardlib.machines.topology import topology as find_topology

    plan, gone = read_plan(file, changed=changed), numbers(lost, "--lost")
    find_topology(topology)  # what is misspelt is said before anything is traced
    with quiet_stdout(as_json), Progress(f"planning {plan.model} for {topology}"):
        change = with_source(plan).replan(topology, lost=gone, anew=anew)
    if out is not None:
        write(out, change.plan.to_json() + "\n")
    echo(json.dumps(change.to_json()) if as_json else change.text, nl=as_json)


# --------------------------------------------------------------------------------------------------
# `shardlib verify`.


@dataclass(frozen=True, kw_only=True)
class Report:
    """Options of the report."""

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
    with Progress(f"compiling {spec} for {machine}"):
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


# --------------------------------------------------------------------------------------------------
# `--perfetto` and `--run` of `shardlib timeline`: a trace of a step, predicted and measured.


def write_trace(
    plan: Plan, timeline: Timeline | None, trace: Path, run: Path | None
) -> dict[str, float]:
    """Writes the trace of a plan, beside what a run recorded of its steps.

    Args:
        timeline: of its stages; None where it has none.
        run: with profiles; None for the prediction alone.
    """
    from shardlib.report.timelines import step_trace
    from shardlib.verification.timelines import newest_profile, recorded_steps

    steps = () if run is None else recorded_steps(newest_profile(run), plan.digest)
    staged = None if timeline is None or not timeline.stages else timeline
    write(trace, step_trace(plan, steps, staged))
    return {
        "predicted": plan.estimate.step_seconds,
        **{step.name: step.seconds for step in steps},
    }


def told(steps: Mapping[str, float], trace: Path) -> str:
    """The contents of a trace in words."""
    rows = [f"{name}: {seconds_text(seconds)} per step" for name, seconds in steps.items()]
    return "\n".join([*rows, f"{trace}: open it with https://ui.perfetto.dev", ""])


def timeline_of(plan: Plan, *, needed: bool) -> Timeline | None:
    """The timeline of the plan's stages; None where it has none and none is needed."""
    try:
        return plan.timeline()
    except PlanError:
        if needed:
            raise
        return None


def parse_allow(words: list[str]) -> JsonObject:
    """Dtypes that the planner may choose, as pins: `what=dtype` or `what=dtype,dtype`."""
    allowed: dict[str, list[str]] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not key or not equals or not value:
            raise PinError(
                f"--allow {word!r} is not WHAT=DTYPE\nTry: --allow moment_dtype=bfloat16"
            )
        allowed.setdefault(key, []).extend(part.strip() for part in value.split(","))
    if not allowed:
        return {}
    from shardlib.decisions.pins import Pins

    Pins.parse({"allow": allowed})
    return {"allow": allowed}


def pin_text(pins: JsonObject) -> str:
    """Pins as they are spelled on a command line."""
    return ", ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in pins.items()
    )


COMMANDS: Mapping[str, Callable[..., None]] = {
    "plan": plan_command,
    "explain": explain_command,
    "diff": diff_command,
    "timeline": timeline_command,
    "replan": replan_command,
    "scale": scale_command,
    "verify": verify_command,
    "models": models_command,
    "topologies": topologies_command,
}
