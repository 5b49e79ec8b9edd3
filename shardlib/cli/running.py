"""`shardlib train | status | measure`: what runs on the attached devices."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

import shardlib
from shardlib.cli.app import AsJson, PinList
from shardlib.cli.inputs import duration, parse_pins, price, quantity, spread
from shardlib.cli.output import echo, writable
from shardlib.errors import LaunchError, ModelError, PlanError, RunError, TopologyError
from shardlib.processes.progress import Progress
from shardlib.report.elements import aligned, seconds_text
from shardlib.untrusted.data import JsonObject

if TYPE_CHECKING:
    from shardlib.calibration import Prices
    from shardlib.machines.topology import Topology
    from shardlib.models.config import TransformerConfig
    from shardlib.planner.answers import RunCost
    from shardlib.planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Task:
    """Options of the model, its data and its training."""

    data: Annotated[
        str | None,
        typer.Option(
            "--data", help="A file or folder of text; if left out, Python's own standard library."
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A preset, configuration file or model card. [demo]"),
    ] = None
    steps: Annotated[int | None, typer.Option("--steps", help="Optimizer steps.")] = None
    batch: Annotated[
        int | None, typer.Option("--batch", "-b", help="Sequences in the global batch.")
    ] = None
    seq: Annotated[int | None, typer.Option("--seq", "-s", help="Bytes of a sequence.")] = None
    lr: Annotated[float | None, typer.Option("--lr", help="Peak learning rate.")] = None
    average: Annotated[
        float | None,
        typer.Option(
            "--average",
            metavar="DECAY",
            help="Keep a moving average of the parameters, for `serve --average`; 0.999 is usual.",
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of parameters, batches and the sample.")
    ] = None
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            "-t",
            help=(
                "What to plan for; cpu:N simulates N devices. [cpu:8, or the devices that `launch`"
                " gives]"
            ),
        ),
    ] = None
    pin: PinList = None
    sample_bytes: Annotated[
        int | None,
        typer.Option("--sample-bytes", help="Bytes of text to write at the end; 0 for none."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Options of checkpoints, restarts and checks of the run."""

    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "-r",
            help="Folder that keeps checkpoints and metrics; the run goes on where it was.",
        ),
    ] = None
    save_every: Annotated[
        int | None, typer.Option("--save-every", help="Steps between checkpoints. [50]")
    ] = None
    keep: Annotated[
        int | None, typer.Option("--keep", help="Newest checkpoints that stay. [3]")
    ] = None
    restarts: Annotated[
        int | None,
        typer.Option(
            "--restarts",
            min=0,
            help=(
                "Start the run again when its process dies or hangs, so often without new progress."
            ),
        ),
    ] = None
    hang_seconds: Annotated[
        float | None,
        typer.Option(
            "--hang-seconds", help="How long a step may take before the process ends as hung."
        ),
    ] = None
    spike: Annotated[
        float | None,
        typer.Option(
            "--spike",
            help=(
                "Deviations above the last losses that make a spike; the run then goes back. 0:"
                " none. [20]"
            ),
        ),
    ] = None
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="STEP[:COUNT]", help="Record a trace of these steps."),
    ] = None
    allow_changes: Annotated[
        str | None,
        typer.Option(
            "--allow-changes",
            metavar="NAME,...",
            help=(
                "Go on although these are others than the run was begun with: loss, optimizer, lr,"
                " data, seed, model, batch, exchange, steps, seq; identity: from checkpoints of"
                " which nothing says what they are of."
            ),
        ),
    ] = None


@spread
def train_command(
    task: Task,
    keeping: Keeping,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="Where fewer devices are there than the topology has, plan for those."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level transformer on text; with no arguments, on Python's own library. Exit code
    75: stopped by a signal, and saved.
    """
    if keeping.restarts is not None:
        raise typer.Exit(_supervised(keeping.run, keeping.restarts))
    pins = parse_pins(task.pin or [])
    from shardlib.errors import StoppedError
    from shardlib.processes.machine import cpu_without_accelerators
    from shardlib.processes.place import STOPPED, read_place

    cpu_without_accelerators()
    if read_place(os.environ) is not None:  # one of several processes
        shardlib.join()
    from shardlib.processes.place import ends_at_once
    from shardlib.processes.values import is_first
    from shardlib.training.fit import train
    from shardlib.training.settings import TrainConfig

    options = {**vars(task), **vars(keeping)}
    options |= {"profile": _steps(keeping.profile), "allow_changes": _names(keeping.allow_changes)}
    fields = {name: value for name, value in options.items() if name not in ("pin", "restarts")}
    try:
        with ends_at_once():
            train(
                TrainConfig(
                    **{name: value for name, value in fields.items() if value is not None},
                    pin=pins or None,
                    elastic=elastic,
                    quiet=quiet,
                    json=as_json,
                )
            )
    except StoppedError as error:
        if is_first():  # it did what it was asked to: that is not an error to be shown
            if as_json:
                typer.echo(
                    json.dumps({"error": {"kind": type(error).__name__, "message": str(error)}})
                )
            typer.echo(str(error), err=True)
        raise typer.Exit(STOPPED) from error


def demo_command(
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps.")] = None,
) -> None:
    """Plan, compile and train a small transformer on eight simulated devices of this machine."""
    train_command(steps=steps, topology="cpu:8")


def status_command(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A folder that was given to `shardlib train --run`."),
    ],
    as_json: AsJson = False,
) -> None:
    """Show the progress of a run: step, loss, speed against prediction, checkpoints, processes."""
    from shardlib.training.run import status as look

    state = look(run)
    echo(json.dumps(state.to_json()) if as_json else str(state))


def _supervised(run: Path | None, restarts: int) -> int:
    """Runs this very command in a process of its own, again when that dies."""
    if run is None:
        raise RunError(
            "--restarts starts a run again from what it has saved, and without --run nothing is"
            " saved\nTry: --run FOLDER"
        )
    from shardlib.training.run import RunFolder
    from shardlib.training.supervisor import Budget, supervise

    if "SHARDLIB_HEARTBEATS" in os.environ:
        raise LaunchError(
            "--restarts starts one process again, and this is one of several that were launched"
            f" together\nTry: shardlib launch --restarts {restarts} -- train ..., without"
            " --restarts behind the dashes"
        )
    words = _without(sys.argv[1:], "--restarts")
    return supervise(
        [sys.executable, "-m", "shardlib", *words],
        RunFolder(run),
        budget=Budget(restarts=restarts),
        say=lambda text: echo(text, err=True),
    )


def _without(words: list[str], option: str) -> list[str]:
    """The words of a command line without an option and its value."""
    kept_words: list[str] = []
    skip = False
    for word in words:
        if not skip and word != option and not word.startswith(f"{option}="):
            kept_words.append(word)
        skip = not skip and word == option
    return kept_words


def _names(text: str | None) -> tuple[str, ...] | None:
    """Names between commas."""
    if text is None:
        return None
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _steps(text: str | None) -> tuple[int, int] | None:
    """ "10" or "10:3" as first step and number of steps."""
    if text is None:
        return None
    first, _, count = text.partition(":")
    if not first.isdigit() or (count and not count.isdigit()):
        raise ModelError(
            f"--profile {text!r} is not a step\nTry: --profile 10, or 10:3 for three steps from the"
            " tenth on"
        )
    return int(first), int(count or 1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The whole run that a plan is for."""

    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens", metavar="15T", help="Of the whole run: days, device-hours, energy."
        ),
    ] = None
    price: Annotated[
        str | None,
        typer.Option(
            "--price", metavar="MONEY[/h]", help="With --tokens: of a device and hour, or /d."
        ),
    ] = None
    mtbf: Annotated[
        str | None,
        typer.Option(
            "--mtbf",
            metavar="3h",
            help="With --tokens: between two failures of the whole machine.",
        ),
    ] = None

    def cost(self, plan: Plan) -> RunCost | None:
        """The cost of the run; None where none was named."""
        if self.tokens is None:
            if self.price is not None or self.mtbf is not None:
                raise PlanError("--price and --mtbf are of a run\nTry: --tokens 15T beside them")
            return None
        return plan.run_cost(
            quantity(self.tokens, "--tokens"),
            price=None if self.price is None else price(self.price, "--price"),
            mtbf=None if self.mtbf is None else duration(self.mtbf, "--mtbf"),
        )


# --------------------------------------------------------------------------------------------------
# `shardlib measure`: prices of the attached devices as a topology file, and a check of prices
# against a run.

#: Name of the file that is written.
MEASURED_FILE = "measured.toml"
#: Minutes that are asked for at most: a day.
MOST_MINUTES = 24 * 60


def _toml(path: Path | None) -> Path | None:
    """The validated value of `--out`."""
    if path is not None and path.suffix != ".toml":
        raise TopologyError(
            f"--out {path} is a topology file, whose name ends in .toml\nTry: {MEASURED_FILE}"
        )
    return writable(path)


def measure_command(
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            "-t",
            help="What the devices are, a spelling or a .toml file; cpu:N simulates N devices. [as"
            " the devices say]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=_toml, help=f"The topology file. [{MEASURED_FILE}]"),
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", help="For the measurements, beside compilation.")
    ] = 10.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be measured, and measure nothing.")
    ] = False,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check",
            metavar="RUN",
            help="Compare prices with the metrics of a run, of `shardlib train --run`; with"
            " --topology those of a file.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the prices of the attached devices, for plans that count with them."""
    if not 0 < minutes <= MOST_MINUTES:
        raise TopologyError(
            f"--minutes is {minutes:g}; it is above 0 and at most {MOST_MINUTES}\nTry: --minutes 10"
        )
    if check is not None:
        if dry_run or out is not None:
            raise TopologyError(
                "--check reads a run and measures nothing\nTry: leave out --out and --dry-run"
            )
        rows = _checked(check, topology)
        echo(json.dumps(rows) if as_json else _check_text(rows))
        return
    if dry_run and topology is not None:
        from shardlib.machines.topology import topology as parse

        _say_list(parse(topology), as_json)
        return
    base = _attached(topology)
    if dry_run:
        _say_list(base, as_json)
        return
    _measure(base, out or Path(MEASURED_FILE), minutes, as_json)


def _attached(topology: str | None) -> Topology:
    """The topology of the attached devices, as it is known."""
    import jax

    from shardlib.machines.topology import topology as parse
    from shardlib.processes.machine import (
        cpu_without_accelerators,
        let_collectives_wait,
        simulate_cpu_devices,
    )
    from shardlib.processes.place import read_place

    cpu_without_accelerators()
    if read_place(os.environ) is not None:  # one of several processes
        shardlib.join()
    named = None if topology is None else parse(topology)
    if named is not None and named.name.startswith("cpu:"):
        simulate_cpu_devices(named.devices)
    let_collectives_wait()
    return parse(jax.devices()) if named is None else named


def _say_list(base: Topology, as_json: bool) -> None:
    """Prints what would be measured."""
    from shardlib.calibration import figure_list
    from shardlib.processes.values import is_first

    figures = {**figure_list(base), "step": STEP}
    if not is_first():
        return
    if as_json:
        echo(json.dumps({"topology": base.name, "figures": figures}))
        return
    echo(f"{base.name}: {len(figures)} figures would be measured")
    echo("\n".join(aligned([(f"  {name}", what) for name, what in figures.items()])))


STEP = "predicted over measured seconds of a training step of a small transformer"


def _measure(base: Topology, out: Path, minutes: float, as_json: bool) -> None:
    import jax
    import tomli_w

    from shardlib.calibration import prices
    from shardlib.cli.output import write
    from shardlib.processes.values import is_first

    with Progress(f"measuring {base.name}, {minutes:g} minutes and compilation"):
        measured = prices(base, jax.devices(), minutes)
        step = small_step(measured.machine)
    if not is_first():
        return
    data = {**measured.machine.to_json(), "name": base.name}
    write(out, tomli_w.dumps(_without_none(data)))
    rows = _rows(measured)
    if as_json:
        echo(json.dumps({"file": str(out), "topology": data, "figures": rows, "step": step}))
        return
    echo("\n".join(aligned([("figure", "measured", "interval", "known", "ratio"), *_texts(rows)])))
    echo(
        f"a training step of a small transformer takes {seconds_text(step['measured_s'])}"
        f" ({seconds_text(step['low_s'])} to {seconds_text(step['high_s'])}), by these prices"
        f" {seconds_text(step['predicted_s'])}"
    )
    echo(f"{out}: {measured.machine.measured}; plan with --topology {out}")


def small_step(machine: Topology) -> dict[str, float]:
    """Seconds of a training step of a small transformer on a machine, measured and predicted."""
    import optax

    from shardlib import models
    from shardlib.frontend.timed import stepping
    from shardlib.models.presets import load
    from shardlib.processes.timing import Clock

    config, seq = cast("TransformerConfig", load("demo")), 128
    if machine.chip.vendor != "cpu":  # the same blocks at a size that keeps an accelerator busy
        wide = {"embed": 2048, "heads": 16, "kv_heads": 16, "head_dim": 128, "mlp": 8192}
        changes: dict[str, Any] = {"max_seq": 2048, "compute_dtype": "bfloat16", **wide}
        config, seq = replace(config, **changes), 2048
    batch = models.example_batch(config, 2 * machine.devices, seq)
    program = shardlib.compile(*models.build(config), optax.adamw(1e-3), batch, topology=machine)
    clock = Clock(budget_s=2.0)

    def step() -> dict[str, float]:
        make = partial(stepping, program, batch)
        return {"s": clock.seconds("step", make, devices=program.plan.mesh.devices)}

    step()
    clock.again(2)
    passes = [clock.in_pass(number, step)["s"] for number in range(1, clock.count)]
    return {
        "measured_s": step()["s"],
        "low_s": min(passes),
        "high_s": max(passes),
        "predicted_s": program.plan.estimate.step_seconds,
    }


def _without_none(value: Any) -> Any:
    """Plain data as TOML can hold it."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


def _rows(prices: Prices) -> list[JsonObject]:
    measured = prices.machine.measured
    ranges = {name: (low, high) for name, low, high in measured.intervals} if measured else {}
    return [
        {
            "figure": name,
            "measured": value,
            "low": ranges[name][0],
            "high": ranges[name][1],
            "known": prices.before.get(name),
        }
        for name, value in prices.figures.items()
    ]


def _texts(rows: list[JsonObject]) -> list[tuple[str, ...]]:
    return [
        (
            row["figure"],
            f"{row['measured']:.3g}",
            f"{row['low']:.3g} to {row['high']:.3g}",
            "-" if row["known"] is None else f"{row['known']:.3g}",
            f"{row['measured'] / row['known']:.2f}" if row["known"] else "-",
        )
        for row in rows
    ]


# --------------------------------------------------------------------------------------------------
# Prices against the metrics of a run.

#: Share of a step up to which prediction and measurement are the same.
CLOSE = 0.1


def _checked(run: Path, topology: str | None) -> JsonObject:
    """What a run measured beside what its plan was priced with."""
    from shardlib.planner.plan import Plan
    from shardlib.training.run import RunFolder
    from shardlib.training.run import status as look

    state = look(run)
    if not state.pace.step_seconds:
        raise RunError(f"{run} has no metrics of a step\nTry: after some steps of the run")
    try:
        plan = Plan.from_json(RunFolder(run).plan.read_bytes().decode())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{run} has no readable plan: {error}\nTry: a run of this version"
        ) from error
    priced, prices = plan, plan.topology
    if topology is not None:
        priced, prices = _priced_on(plan, topology), topology
    seconds = priced.estimate.seconds
    measured, predicted = state.pace.step_seconds, priced.estimate.step_seconds
    low, high = priced.estimate.step_interval or (predicted, predicted)
    rows: JsonObject = {
        "run": str(run),
        "prices": prices,
        "predicted_s": predicted,
        "low_s": low,
        "high_s": high,
        "measured_s": measured,
        "ratio": measured / predicted,
        "parts": {name: value for name, value in seconds.__dict__.items() if value},
        "data_share": state.pace.data_share,
        "others_busy": state.pace.busy,
    }
    return {**rows, "off": verdicts(rows)}


def _priced_on(plan: Any, topology: str) -> Any:
    """The plan of a run at the prices of a topology."""
    from shardlib.cli.inputs import with_source
    from shardlib.machines.topology import topology as parse
    from shardlib.planner.questions import priced_on

    machine = parse(topology)
    if not dict(plan.origin).get("model"):
        raise RunError(
            "the plan of this run does not say which model it is of, and cannot be priced again"
            "\nTry: leave out --topology, which compares with the prices that it was planned with"
        )
    priced = priced_on(with_source(plan), machine)
    if priced is None:
        raise TopologyError(
            f"the plan {plan.mesh} does not fit on {machine.name}\nTry: the topology file of the"
            " machine of the run"
        )
    return priced


def verdicts(rows: JsonObject) -> list[str]:
    """What is off, in words; the likeliest cause first.

    >>> verdicts({"measured_s": 1.0, "predicted_s": 0.5, "low_s": 0.45, "high_s": 0.6,
    ...     "parts": {"compute": 0.4, "exposed": 0.1}, "data_share": 0.3, "others_busy": None})[0]
    '30% of a step is waiting for data, which no price knows: look at the input pipeline'
    """
    measured, predicted = rows["measured_s"], rows["predicted_s"]
    causes: list[str] = []
    if rows["data_share"] > CLOSE:
        causes.append(
            f"{rows['data_share']:.0%} of a step is waiting for data, which no price knows: look at"
            " the input pipeline"
        )
    if (rows["others_busy"] or 0) > CLOSE:
        causes.append(
            f"other programs used {rows['others_busy']:.0%} of the processors during the run"
        )
    without_data = measured * (1 - rows["data_share"])
    if (1 - CLOSE) * rows["low_s"] <= without_data <= (1 + CLOSE) * rows["high_s"]:
        return [*causes, "the prices hold: the step is within their interval"]
    if without_data < predicted:
        return [*causes, f"the prices are too high: {predicted / without_data:.2f} times the step"]
    for name, seconds in sorted(rows["parts"].items(), key=lambda part: -part[1]):
        factor = (without_data - predicted + seconds) / seconds
        if seconds > CLOSE * predicted:
            causes.append(f"if {name} alone is off, it takes {factor:.2f} times as long as priced")
    return causes


def _check_text(rows: JsonObject) -> str:
    return "\n".join(
        [
            f"{rows['run']}: {seconds_text(rows['measured_s'])} per step, by the prices of"
            f" {rows['prices']} {seconds_text(rows['predicted_s'])}"
            f" ({seconds_text(rows['low_s'])} to {seconds_text(rows['high_s'])})",
            *(f"  - {line}" for line in rows["off"]),
        ]
    )


COMMANDS: Mapping[str, Callable[..., None]] = {
    "demo": demo_command,
    "train": train_command,
    "status": status_command,
    "measure": measure_command,
}
