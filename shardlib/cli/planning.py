"""`shardlib plan | explain | timeline | replan | scale | edge`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.app import AsJson, Changed, Model, PinList, PlanFile, app
from shardlib.cli.inputs import inputs_of, make_plan, read_plan, replanned, with_source
from shardlib.cli.output import echo, quiet_stdout, status, write
from shardlib.cli.pins import parse_allow, parse_pins, pin_text
from shardlib.errors import BatchError

if TYPE_CHECKING:
    from shardlib.planning.questions.scaling import Curve


@app.command("plan")
def plan_command(
    model: Model,
    topology: Annotated[
        str,
        typer.Option("--topology", "-t", help="For example 16*h100:8, v5e:16x16, or a .toml file."),
    ],
    batch: Annotated[
        int | None, typer.Option("--batch", "-b", min=1, help="Sequences in the global batch.")
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")
    ] = None,
    pin: PinList = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="WHAT=DTYPE",
            help="A dtype that may be chosen, e.g. moment_dtype=bfloat16. Repeatable.",
        ),
    ] = None,
    refine: Annotated[
        int,
        typer.Option(
            "--refine",
            metavar="K",
            min=0,
            help="Compile the K best plans and choose by what the compiler makes of them.",
        ),
    ] = 0,
    lowered: Annotated[
        bool, typer.Option("--lowered", help="Leave out decisions that no program is made of yet.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan here, as JSON.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best way to spread a model over a topology."""
    from shardlib.planning.decisions.plan_data import plan_to_data
    from shardlib.planning.text.explain import explain

    pins = {**parse_pins(pin or []), **parse_allow(allow or [])}
    with quiet_stdout(as_json):
        found = make_plan(model, topology, batch, seq, pins, refine, lowered=lowered)
    if out is not None:
        write(out, found.to_json() + "\n")
    echo(json.dumps(plan_to_data(found)) if as_json else explain(found), nl=as_json)


@app.command("explain")
def explain_command(
    file: PlanFile,
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
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a report for the browser here.")
    ] = None,
    changed: Changed = False,
    as_json: AsJson = False,
) -> None:
    """Explain a plan: what was chosen, why, and what another choice would cost."""
    from shardlib.planning.decisions.plan_data import plan_to_data
    from shardlib.planning.text.diff import diff
    from shardlib.planning.text.explain import explain

    plan = read_plan(file, changed=changed)
    data: dict[str, Any] = {"plan": plan_to_data(plan), "explanation": explain(plan)}
    text = data["explanation"]
    if why_not:
        pins = parse_pins(why_not)
        with quiet_stdout(as_json):
            other = replanned(plan, pins)
        text = (
            diff(plan, other) if not isinstance(other, str) else f"Not {pin_text(pins)}: {other}\n"
        )
        data["why_not"] = {
            "pins": pins,
            "plan": None if isinstance(other, str) else plan_to_data(other),
            "text": text,
        }
    told = None
    if alternatives or sensitivity:
        from shardlib.planning.questions.questions import answers

        with quiet_stdout(as_json):
            told = answers(with_source(plan), alternatives=alternatives, sensitivity=sensitivity)
        data |= told.to_json()
        text = "\n".join([*([text] if why_not else []), str(told)])
    if html is not None:
        from shardlib.explanation.html import html_report

        write(html, html_report(plan, answers=told))
    echo(json.dumps(data) if as_json else text, nl=as_json)


@app.command("timeline")
def timeline_command(
    file: PlanFile,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw it here.")] = None,
    trace: Annotated[
        Path | None, typer.Option("--perfetto", help="Write a trace for ui.perfetto.dev here.")
    ] = None,
    changed: Changed = False,
    as_json: AsJson = False,
) -> None:
    """Draw the pipeline of a plan: which stage does what when, and how long stages wait."""
    from shardlib.explanation.timelines import perfetto, timeline_svg

    found = read_plan(file, changed=changed).timeline()
    if svg is not None:
        write(svg, timeline_svg(found))
    if trace is not None:
        write(trace, perfetto(found))
    echo(json.dumps(found.to_json()) if as_json else str(found), nl=as_json)


@app.command("replan")
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
            help="Search the whole space; otherwise recomputation, schedule and the like stay.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the new plan here, as JSON.")
    ] = None,
    changed: Changed = False,
    as_json: AsJson = False,
) -> None:
    """Plan the same run for a machine that lost or gained hosts: the new plan, what moves, how much
    slower.
    """
    from shardlib.cli.numbers import numbers
    from shardlib.hardware import topology as find_topology

    plan, machine, gone = (
        read_plan(file, changed=changed),
        find_topology(topology),
        numbers(lost, "--lost"),
    )
    with quiet_stdout(as_json), status(f"planning {plan.model} for {topology}"):
        change = with_source(plan).replan(machine, lost=gone, anew=anew)
    if out is not None:
        write(out, change.plan.to_json() + "\n")
    echo(json.dumps(change.to_json()) if as_json else change.text, nl=as_json)


@app.command("scale")
def scale_command(
    model: Model,
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
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            "-b",
            min=1,
            help="Sequences in the global batch; with --weak, of the smallest machine.",
        ),
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")
    ] = None,
    weak: Annotated[
        bool, typer.Option("--weak", help="Let the batch grow with the devices.")
    ] = False,
    pin: PinList = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the curve here.")] = None,
    as_json: AsJson = False,
) -> None:
    """The best plan for every number of devices: time, efficiency, memory, and from where on more
    do not pay.
    """
    from shardlib.cli.numbers import sizes
    from shardlib.explanation.curves import curve_svg

    pins, numbers = parse_pins(pin or []), sizes(devices)
    with (
        quiet_stdout(as_json),
        status(f"planning {model} for {numbers[0]:,} to {numbers[-1]:,} devices"),
    ):
        found = _scaled(model, topology, numbers, batch, seq, pins, weak)
    if svg is not None:
        write(svg, curve_svg(found))
    echo(json.dumps(found.to_json()) if as_json else str(found), nl=as_json)


def _scaled(
    spec: str,
    topology: str,
    devices: tuple[int, ...],
    batch: int | None,
    seq: int | None,
    pins: dict[str, Any],
    weak: bool,
) -> Curve:
    """The scaling curve of the model that a command line names."""
    from shardlib.hardware.family import of_size

    for number in devices:
        of_size(topology, number)
    inputs = inputs_of(spec, batch, seq)
    import shardlib

    if weak:
        if batch is None:
            raise BatchError(
                f"{spec} brings its own batch, which cannot grow with the devices\nTry: leave out"
                " --weak, or shardlib.scale(..., batch=function)"
            )
        rows: int = batch
        inputs["batch"] = lambda number: inputs_of(spec, rows * number // devices[0], seq)["batch"]
    return shardlib.scale(**inputs, topology=topology, devices=devices, pin=pins)


@app.command("edge")
def edge_command(
    model: Model,
    devices: Annotated[
        Path,
        typer.Option(
            "--devices",
            "-d",
            metavar="FILE.toml",
            help="What there is: [[devices]] with chip, count, memory and link.",
        ),
    ],
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", "-b", min=1, help="Sequences in a batch that goes through the devices."
        ),
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Spread a model's forward pass over a chain of unlike devices, for inference."""
    from shardlib.hardware.cluster import cluster

    listed = cluster(devices)
    with quiet_stdout(as_json), status(f"planning {model} for {devices}"):
        inputs = inputs_of(model, batch, seq)
        import shardlib

        found = shardlib.plan_edge(
            inputs["init"],
            inputs["loss"],
            inputs["batch"],
            devices=listed,
            batch_axes=inputs["batch_axes"],
            name=inputs["name"],
        )
    echo(json.dumps(found.to_json()) if as_json else found.explain(), nl=as_json)
