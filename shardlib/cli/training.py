"""`shardlib train | status`."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.app import AsJson, PinList
from shardlib.cli.inputs import duration, parse_pins, price, quantity, spread
from shardlib.cli.output import echo
from shardlib.errors import LaunchError, ModelError, PlanError, RunError
from shardlib.launch.job import COMMANDS
from shardlib.untrusted.data import shown

if TYPE_CHECKING:
    from shardlib.planner.answers import RunCost
    from shardlib.planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, and on what."""

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
    """How the run is kept, watched and judged."""

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
    from shardlib.launch.joining import join
    from shardlib.processes.devices import cpu_without_accelerators

    cpu_without_accelerators()
    join()
    from shardlib.processes.place import ends_at_once
    from shardlib.processes.values import is_first
    from shardlib.training.fit import train
    from shardlib.training.settings import TrainConfig
    from shardlib.training.supervisor import STOPPED

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
        if is_first():  # it did what it was asked to: that is no error to be shown
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
    """How a run is doing: step, loss, speed against prediction, checkpoints, processes."""
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
            f"--profile {text!r} is no step\nTry: --profile 10, or 10:3 for three steps from the"
            " tenth on"
        )
    return int(first), int(count or 1)


# --------------------------------------------------------------------------------------------------
# Options of `shardlib plan` that say what the whole run is.


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
        """What the run takes; None where none was named."""
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
# Words behind `shardlib launch`: a training with its machine and its run, and variables.


def completed(command: Sequence[str], topology: str | None, run: str | None) -> tuple[str, ...]:
    """The words of a training with the machine and the folder of the run, where they do not name
    them; other words as they are.

    >>> completed(["train", "--steps", "9"], "16*h100:8", "/runs/a")
    ('train', '--steps', '9', '--topology', '16*h100:8', '--run', '/runs/a')
    """
    if not command or command[0] != "train":
        return tuple(command)
    missing = [
        (long, value)
        for long, short, value in (("--topology", "-t", topology), ("--run", "-r", run))
        if value is not None and option_of(command, (long, short)) is None
    ]
    return (*command, *(word for pair in missing for word in pair))


def option_of(command: Sequence[str], names: tuple[str, str]) -> str | None:
    """The value of an option of a training; None for other commands.

    >>> [option_of(["train", *words], ("--run", "-r")) for words in (["--run=a"], ["-r", "b"])]
    ['a', 'b']

    Args:
        command: words of a `shardlib` command.
        names: of the option, long and short.
    """
    if not command or command[0] != "train":
        return None
    for word, after in zip(command, [*command[1:], None], strict=True):
        if word in names:
            return after
        if word.startswith(f"{names[0]}="):
            return word.partition("=")[2]
    return None


def environment_of(words: Sequence[str]) -> dict[str, str]:
    """Variables from NAME=VALUE."""
    wrong = [word for word in words if "=" not in word]
    if wrong:
        raise LaunchError(
            f"--env {wrong[0]!r} is no NAME=VALUE\nTry: --env"
            " XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true"
        )
    return dict(word.split("=", 1) for word in words)


# --------------------------------------------------------------------------------------------------
# `shardlib launch -n N`: processes of this machine.


@dataclass(frozen=True, kw_only=True)
class Here:
    """Options of processes of this machine."""

    processes: Annotated[
        int | None,
        typer.Option("--processes", "-n", min=1, help="Run on this machine, in so many processes."),
    ] = None
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices-per-process",
            min=1,
            help="CPU devices that each simulates; if left out, they share the accelerators.",
        ),
    ] = None
    interface: Annotated[
        str | None,
        typer.Option(
            "--interface",
            help="Of this machine: interface or address at which process 0 listens. [127.0.0.1]",
        ),
    ] = None
    port: Annotated[
        int | None,
        typer.Option("--port", help="Of process 0 on this machine; if left out, a free one."),
    ] = None
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="On this machine: go on with fewer processes where one fails again and again.",
        ),
    ] = False
    silent_seconds: Annotated[
        float | None,
        typer.Option(
            "--silent-seconds",
            min=2,
            help=(
                "On this machine: without a sign of life, after which a process counts as frozen."
                " [60]"
            ),
        ),
    ] = None
    stop_seconds: Annotated[
        float | None,
        typer.Option(
            "--stop-seconds",
            min=0,
            help=(
                "On this machine: that processes have to save and end once they are asked to stop."
                " [120]"
            ),
        ),
    ] = None
    join_seconds: Annotated[
        int | None,
        typer.Option(
            "--join-seconds",
            min=1,
            help="On this machine: how long processes wait for each other at the start. [300]",
        ),
    ] = None


def run_here(
    words: Sequence[str], here: Here, *, restarts: int, environment: Mapping[str, str]
) -> int:
    """Runs a command in several processes of this machine, and gives its exit code."""
    from shardlib.launch.local import LOOPBACK, Local, address_of, launch
    from shardlib.training.supervisor import Budget

    ours = bool(words) and words[0] in COMMANDS
    if not ours:
        _require_program(words, {**os.environ, **environment})
    command = (sys.executable, "-m", "shardlib", *words) if ours else tuple(words)
    if here.elastic and ours and "--elastic" not in words and words[0] == "train":
        command = (*command, "--elastic")
    budget = {"silent_seconds": here.silent_seconds, "stop_seconds": here.stop_seconds}
    waiting = {"join_seconds": here.join_seconds}
    local = Local(
        command=command,
        processes=here.processes or 0,
        devices=here.devices,
        address=address_of(here.interface) if here.interface else LOOPBACK,
        port=here.port,
        run=option_of(words, ("--run", "-r")),
        elastic=here.elastic,
        budget=Budget(restarts=restarts, **_said(budget)),
        **_said(waiting),
    )
    return launch(local, environ={**os.environ, **environment})


def _require_program(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuses a program that is not there."""
    if not words or shutil.which(words[0], path=environ.get("PATH")) is not None:
        return
    near = difflib.get_close_matches(words[0], COMMANDS, 1)
    raise LaunchError(
        f"there is no program {shown(words[0])} here"
        + (f"; did you mean {near[0]!r}?" if near else "")
        + f"\nTry: a command of shardlib that runs in several processes ({', '.join(COMMANDS)}), or"
        " any program; the other commands of shardlib run in one process, without `launch`"
    )


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without those that were left out."""
    return {name: value for name, value in values.items() if value is not None}
