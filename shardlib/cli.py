"""What can be asked from a shell? `shardlib plan | explain | verify | train | models | topologies`.

Text for people goes to stdout, progress and errors to stderr. With `--json` stdout holds JSON and nothing else, and an
error is a JSON object there, too. Whatever shardlib refuses is one message and exit code 2; `--traceback` shows where it
came from. JAX is imported by the commands that trace a model, never for `--help`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib import __version__
from shardlib.errors import BatchError, MissingFileError, PinError, PlanError, ShardlibError, TopologyError, raise_all

if TYPE_CHECKING:
    from shardlib.planning.plan import Plan
    from shardlib.planning.scaling import Curve
    from shardlib.verification.report import Verification

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    help="Plans how a JAX model is spread over a GPU cluster or a TPU pod, and says why.",
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A preset, a Hugging Face config.json, a .toml card, or package.module:function.")]
PinList = Annotated[list[str] | None, typer.Option("--pin", metavar="KEY=VALUE", help="Fix a decision, e.g. mesh.tensor=8 or zero=1. Repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]


def main(arguments: list[str] | None = None) -> None:
    """The console script: runs a command and turns errors of shardlib into messages."""
    given = sys.argv[1:] if arguments is None else arguments
    words = [word for word in given if word != "--traceback"]
    try:
        app(words, prog_name="shardlib")
    except ShardlibError as error:
        if "--traceback" in given:
            raise
        _report(error, as_json="--json" in words)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _report(error: ShardlibError, *, as_json: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    if as_json:
        print(json.dumps({"error": {"kind": type(error).__name__, "message": str(error)}}))
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(f"error: {error}", style="red"))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardlib {__version__}")
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised; may stand anywhere.")] = False,
) -> None:
    """Options of all commands; typer handles them."""


@app.command("plan")
def plan_command(
    model: Model,
    topology: Annotated[str, typer.Option("--topology", "-t", help="For example 16*h100:8, v5e:16x16, or a .toml file.")],
    batch: Annotated[int | None, typer.Option("--batch", "-b", min=1, help="Sequences in the global batch.")] = None,
    seq: Annotated[int | None, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")] = None,
    pin: PinList = None,
    refine: Annotated[int, typer.Option("--refine", metavar="K", min=0, help="Compile the K best plans and choose by what the compiler makes of them.")] = 0,
    lowered: Annotated[bool, typer.Option("--lowered", help="Leave out decisions that no program is made of yet.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan here, as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best way to spread a model over a topology."""
    from shardlib.planning.plan import plan_to_data
    from shardlib.planning.text import explain

    pins = parse_pins(pin or [])
    with _quiet_stdout(as_json):
        found = make_plan(model, topology, batch, seq, pins, refine, lowered=lowered)
    if out is not None:
        _write(out, found.to_json() + "\n")
    typer.echo(json.dumps(plan_to_data(found)) if as_json else explain(found), nl=as_json)


@app.command("explain")
def explain_command(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that `shardlib plan --out` wrote.")],
    why_not: Annotated[list[str] | None, typer.Option("--why-not", metavar="KEY=VALUE", help="What would this decision cost? Repeatable.")] = None,
    alternatives: Annotated[bool, typer.Option("--alternatives", help="The ten plans that come next, and what holds the plan back.")] = False,
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="What memory and links are worth, and the regret if a figure is lower.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report for the browser here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a plan: what was chosen, why, and what another choice would cost."""
    from shardlib.planning.plan import plan_to_data
    from shardlib.planning.text import diff, explain

    plan = read_plan(file)
    data: dict[str, Any] = {"plan": plan_to_data(plan), "explanation": explain(plan)}
    text = data["explanation"]
    if why_not:
        pins = parse_pins(why_not)
        with _quiet_stdout(as_json):
            other = _replan(plan, pins)
        text = diff(plan, other) if not isinstance(other, str) else f"Not {_pin_text(pins)}: {other}\n"
        data["why_not"] = {"pins": pins, "plan": None if isinstance(other, str) else plan_to_data(other), "text": text}
    told = None
    if alternatives or sensitivity:
        from shardlib.planning.questions import answers

        with _quiet_stdout(as_json):
            told = answers(with_source(plan), alternatives=alternatives, sensitivity=sensitivity)
        data |= told.to_json()
        text = "\n".join([*([text] if why_not else []), str(told)])
    if html is not None:
        from shardlib.explanation.html import html_report

        _write(html, html_report(plan, answers=told))
    typer.echo(json.dumps(data) if as_json else text, nl=as_json)


@app.command("replan")
def replan_command(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that `shardlib plan --out` wrote.")],
    topology: Annotated[str, typer.Option("--topology", "-t", help="The machine that is left, or that has grown.")],
    lost: Annotated[str, typer.Option("--lost", metavar="N,N,...", help="Numbers of the devices that are gone, A-B for a range. [the last ones]")] = "",
    anew: Annotated[bool, typer.Option("--anew", help="Search the whole space; otherwise recomputation, schedule and the like stay.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the new plan here, as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan the same run for a machine that lost or gained hosts: the new plan, what moves, how much slower."""
    from shardlib.hardware import topology as find_topology
    from shardlib.planning.numbers import numbers

    plan, machine, gone = read_plan(file), find_topology(topology), numbers(lost, "--lost")
    with _quiet_stdout(as_json), _status(f"planning {plan.model} for {topology}"):
        change = with_source(plan).replan(machine, lost=gone, anew=anew)
    if out is not None:
        _write(out, change.plan.to_json() + "\n")
    typer.echo(json.dumps(change.to_json()) if as_json else change.text, nl=as_json)


@app.command("scale")
def scale_command(
    model: Model,
    topology: Annotated[str, typer.Option("--topology", "-t", help="A member of the family of machines, e.g. 16*h100:8 or v5e:16x16.")],
    devices: Annotated[str, typer.Option("--devices", "-n", help="8..16384 for doublings, or 8,24,48.")] = "8..16384",
    batch: Annotated[int | None, typer.Option("--batch", "-b", min=1, help="Sequences in the global batch; with --weak, of the smallest machine.")] = None,
    seq: Annotated[int | None, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")] = None,
    weak: Annotated[bool, typer.Option("--weak", help="Let the batch grow with the devices.")] = False,
    pin: PinList = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the curve here.")] = None,
    as_json: AsJson = False,
) -> None:
    """The best plan for every number of devices: time, efficiency, memory, and from where on more do not pay."""
    from shardlib.explanation.curves import curve_svg
    from shardlib.planning.numbers import sizes

    pins, numbers = parse_pins(pin or []), sizes(devices)
    with _quiet_stdout(as_json), _status(f"planning {model} for {numbers[0]:,} to {numbers[-1]:,} devices"):
        found = _scaled(model, topology, numbers, batch, seq, pins, weak)
    if svg is not None:
        _write(svg, curve_svg(found))
    typer.echo(json.dumps(found.to_json()) if as_json else str(found), nl=as_json)


def _scaled(spec: str, topology: str, devices: tuple[int, ...], batch: int | None, seq: int | None, pins: dict[str, Any], weak: bool) -> Curve:
    """The scaling curve of the model that a command line names."""
    from shardlib.hardware.family import of_size

    for number in devices:
        of_size(topology, number)
    inputs = _inputs(spec, batch, seq)
    import shardlib

    if weak:
        if batch is None:
            raise BatchError(f"{spec} brings its own batch, which cannot grow with the devices\nTry: leave out --weak, or shardlib.scale(..., batch=function)")
        rows: int = batch
        inputs["batch"] = lambda number: _inputs(spec, rows * number // devices[0], seq)["batch"]
    return shardlib.scale(**inputs, topology=topology, devices=devices, pin=pins)


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

    before = read_baseline(_read(baseline, "report", "shardlib verify MODEL ... --out report.json"), str(baseline)) if baseline else None
    with _quiet_stdout(as_json):
        found = _verified(model, topology, read_plan(plan) if plan else None, batch, seq, parse_pins(pin or []), seconds)
    if before is not None and found.compiled is not None:
        from dataclasses import replace

        found = replace(found, findings=(*growth(before, found.compiled.collectives), *found.findings))
    if out is not None:
        _write(out, found.to_json() + "\n")
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
    inputs = _inputs(spec, batch, seq)
    import shardlib
    from shardlib.verification.isolation import Limits

    where = topology or (plan.topology if plan else "")
    with _status(f"compiling {spec} for {where}"):
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


@app.command("models")
def models_command(as_json: AsJson = False) -> None:
    """List the models that are known by name."""
    from shardlib.models import PRESETS
    from shardlib.planning.quantity import parameters_text

    rows = [{"model": name, "parameters": c.parameter_count(), "layers": c.layers, "embed": c.embed, "heads": c.heads, "vocab": c.vocab_size,
             "experts": c.experts.count if c.experts else 0, "max_seq": c.max_seq} for name, c in PRESETS.items()]
    _show(rows, as_json, text={"parameters": parameters_text, "experts": lambda n: str(n) if n else ""})


@app.command("topologies")
def topologies_command(as_json: AsJson = False) -> None:
    """List the chips that the catalogue knows, and how a topology of them is spelled."""
    from shardlib.hardware.catalog import CATALOG
    from shardlib.planning.quantity import bytes_text, count_text

    rows = [{"chip": name, "example": p.example, "flops_per_s": p.chip.peak("bfloat16"), "hbm_bytes": p.chip.hbm_bytes,
             "hbm_bytes_per_s": p.chip.hbm_bytes_per_s, "link": p.fast.name, "link_bytes_per_s": p.fast.bytes_per_s,
             "network": p.slow.name, "network_bytes_per_s": p.slow.bytes_per_s} for name, p in CATALOG.items()]

    def rate(value: float) -> str:
        return count_text(value, "B/s")

    _show(rows, as_json, text={"flops_per_s": lambda f: count_text(f, "FLOP/s"), "hbm_bytes": bytes_text, "hbm_bytes_per_s": rate,
                               "link_bytes_per_s": rate, "network_bytes_per_s": rate})


def _show(rows: list[dict[str, Any]], as_json: bool, text: dict[str, Any]) -> None:
    """Prints rows as a JSON list, or as a table with numbers in words."""
    if as_json:
        typer.echo(json.dumps(rows))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        heading = name.replace("flops_per_s", "bfloat16").replace("hbm_bytes", "memory").replace("_bytes", "").replace("_per_s", "/s").replace("_", " ")
        table.add_column(heading, justify="left" if isinstance(rows[0][name], str) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(text.get(name, str)(value) for name, value in row.items()))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)
    console.print(table)


def parse_pins(words: list[str]) -> dict[str, Any]:
    """Pins from the command line: `key=value` with the value as JSON, or else as a string.

    Raises:
        PinError: a word has no `=`, a key is given twice, or the pins make no sense; all of them are listed.
    """
    pins: dict[str, Any] = {}
    failures: list[str] = []
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not key or not equals or not value:
            failures.append(f"{word!r} is no KEY=VALUE")
        elif key in pins:
            failures.append(f"{key!r} is given twice")
        else:
            pins[key] = _value(value)
    if failures:
        raise_all(PinError, "pins are not usable", failures, hint="for example --pin mesh.tensor=8 --pin remat=full")
    if pins:
        from shardlib.planning.pins import Pins

        Pins.parse(pins)
    return pins


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _pin_text(pins: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in pins.items())


def make_plan(spec: str, topology: str, batch: int | None, seq: int | None, pins: dict[str, Any], refine: int = 0, *, lowered: bool = False) -> Plan:
    """Plans the model that a command line names; the plan remembers where it came from.

    Args:
        spec: MODEL.
        topology, batch, seq, pins: as the options say.
        refine: how many of the best plans to compile.
        lowered: whether to leave out what is not lowered yet.

    Raises:
        ShardlibError: anything that the command line asked for and that cannot be done.
    """
    from dataclasses import replace

    from shardlib.hardware import topology as find_topology

    find_topology(topology)
    with _status(f"planning {spec} for {topology}" + (f", compiling the {refine} best" if refine else "")):
        inputs = _inputs(spec, batch, seq)
        import shardlib

        plan = shardlib.plan(**inputs, topology=topology, pin=pins, refine=refine, lowered=lowered)
    origin = {"model": spec, **({"batch": str(batch)} if batch else {}), **({"seq": str(seq)} if seq else {}), "pin": json.dumps(pins)}
    return replace(plan, origin=tuple(origin.items()))


def _inputs(spec: str, batch: int | None, seq: int | None) -> dict[str, Any]:
    """The model that a command line names, as keyword arguments of `shardlib.plan`."""
    from shardlib.models import UserModel, build, example_batch, load

    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # planning needs no accelerator and must not occupy one
    found = load(spec)
    if isinstance(found, UserModel):
        _refuse_sizes(spec, batch, seq)
        init, loss, example, name, axes, optimizer = found.init, found.loss, found.batch, found.name, found.batch_axes, found.optimizer
    else:
        rows, tokens = _sizes(spec, batch, seq)
        (init, loss), example, name, axes, optimizer = build(found), example_batch(found, rows, tokens), found.name, None, None
    if optimizer is None:
        import optax

        optimizer = optax.adamw(3e-4)
    return {"init": init, "loss": loss, "optimizer": optimizer, "batch": example, "batch_axes": axes, "name": name}


def _sizes(spec: str, batch: int | None, seq: int | None) -> tuple[int, int]:
    if batch is None or seq is None:
        missing = [flag for flag, value in (("--batch", batch), ("--seq", seq)) if value is None]
        raise BatchError(f"the size of the batch of {spec} is open: {' and '.join(missing)} missing\nTry: --batch 256 --seq 4096")
    return batch, seq


def _refuse_sizes(spec: str, batch: int | None, seq: int | None) -> None:
    given = [flag for flag, value in (("--batch", batch), ("--seq", seq)) if value is not None]
    if given:
        raise BatchError(f"{spec} brings its own batch; {' and '.join(given)} cannot change it\nTry: leave out {' and '.join(given)}")


def _overrides(new: str, old: str) -> bool:
    """Whether a pin takes the place of another: the same decision, or the mesh and one of its axes."""
    return new == old or (old == "mesh" and new.startswith("mesh.")) or (new == "mesh" and old.startswith("mesh."))


def _replan(plan: Plan, pins: dict[str, Any]) -> Plan | str:
    """The best plan under other pins, or why there is none."""
    from shardlib.errors import InfeasibleError

    origin = dict(plan.origin)
    if "model" not in origin:
        raise PlanError("the plan does not say which model it is for, so that it cannot be made again\nTry: make it with `shardlib plan MODEL ... --out plan.json`")
    kept = {key: value for key, value in json.loads(origin.get("pin", "{}")).items()
            if not any(_overrides(new, key) for new in pins)}
    batch, seq = (int(origin[key]) if key in origin else None for key in ("batch", "seq"))
    try:
        return make_plan(origin["model"], plan.topology, batch, seq, {**kept, **pins})
    except InfeasibleError as error:
        return str(error)


def with_source(plan: Plan) -> Plan:
    """A plan from a file with what it was made from: its model traced again, its topology and its pins.

    Raises:
        PlanError: the plan does not say which model it is for.
    """
    from dataclasses import replace

    again = _replan(plan, {})
    if isinstance(again, str):
        raise PlanError(f"the plan cannot be made again: {again}")
    return replace(plan, source=again.source)


def read_plan(path: Path) -> Plan:
    """Reads a plan from a file.

    Raises:
        MissingFileError: there is no such file.
        PlanError: the file holds no plan.
    """
    from shardlib.planning.plan import Plan

    text = _read(path, "plan", f"shardlib plan MODEL --topology T ... --out {path}")
    try:
        return Plan.from_json(text)
    except (ValueError, TypeError, AttributeError) as error:
        raise PlanError(f"{path} holds no plan: {error}") from error


def _read(path: Path, what: str, hint: str) -> str:
    if not path.is_file():
        raise MissingFileError(f"there is no {what} file {path}\nTry: {hint}")
    return path.read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    if not path.parent.is_dir():
        raise MissingFileError(f"the folder {path.parent} for {path.name} does not exist")
    path.write_text(text)


@contextlib.contextmanager
def _quiet_stdout(as_json: bool) -> Iterator[None]:
    """Sends what a user's model prints to stderr while stdout belongs to JSON."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _status(text: str) -> Iterator[None]:
    """A spinner on stderr, when that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield


if __name__ == "__main__":
    main()
