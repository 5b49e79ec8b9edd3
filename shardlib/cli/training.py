"""`shardlib train | status`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import shardlib
from shardlib.cli.app import AsJson, PinList
from shardlib.cli.inputs import duration, parse_pins, price, quantity, spread
from shardlib.cli.output import echo
from shardlib.errors import LaunchError, ModelError, PlanError, RunError

if TYPE_CHECKING:
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


COMMANDS: Mapping[str, Callable[..., None]] = {"train": train_command, "status": status_command}
