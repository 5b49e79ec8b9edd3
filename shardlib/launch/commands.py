"""`shardlib launch | doctor`, and `shardlib compare | fit-model`: which machines to book.

>>> prices(["h100=2.40,v5p=4.20"])
{'h100': 2.4, 'v5p': 4.2}
>>> failures("3h@16384")
Failures(every=10800.0, devices=16384)
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.app import AsJson, Model, PinList, Sizes
from shardlib.cli.inputs import (
    duration,
    given,
    inputs_of,
    parse_pins,
    price,
    quantity,
    read_plan,
    spread,
)
from shardlib.cli.output import echo, quiet_stdout, writable, write
from shardlib.errors import PAGES, ArgumentError, LaunchError, MissingFileError, PlanError
from shardlib.launch.booking import LARGEST, TOKENS_PER_PARAMETER, Failures
from shardlib.launch.clouds import SKYPILOT, TPU_VM
from shardlib.launch.clusters import KUBERNETES, RAY, SLURM
from shardlib.launch.job import COMMANDS as OWN
from shardlib.launch.job import Job
from shardlib.launch.submission import Engine, Submission
from shardlib.machines.topology import topology as find_topology
from shardlib.processes.progress import Progress
from shardlib.untrusted.data import shown
from shardlib.wings import NoOptions, extension

if TYPE_CHECKING:
    from shardlib.launch.booking import Comparison


#: The engines, in the order of the help.
ENGINES: tuple[Engine, ...] = (SLURM, KUBERNETES, TPU_VM, RAY, SKYPILOT)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Options of the prices of machines, and of their failures."""

    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="CHIP=MONEY[/h]",
            help="Of a chip and hour, or /d, in your own money: h100=2.40,v5p=4.20. Repeatable.",
        ),
    ] = None
    mtbf: Annotated[
        str | None,
        typer.Option(
            "--mtbf",
            metavar="3h@16384",
            help="Between two failures of a machine of so many devices; others in proportion.",
        ),
    ] = None


def prices(words: Sequence[str]) -> dict[str, float]:
    """Chips and what an hour of one costs."""
    costs: dict[str, float] = {}
    for word in (part.strip() for text in words for part in text.split(",")):
        match = re.fullmatch(r"([\w-]+)=(.+)", word)
        if match is None or match[1] in costs:
            twice = " stands there twice" if match else " says no price"
            raise PlanError(f"--price {word!r}{twice}\nTry: --price h100=2.40,v5p=4.20")
        costs[match[1]] = price(match[2], f"--price {match[1]}=")
    return costs


def failures(text: str | None) -> Failures | None:
    """The mean time between failures, as an option says it."""
    if text is None:
        return None
    interval, separator, devices = text.partition("@")
    if not separator or not re.fullmatch(r"0*[1-9]\d{0,11}", devices.strip()):
        raise PlanError(
            f"--mtbf {text!r} does not say of how many devices: machines of many sizes are"
            " compared, and larger ones fail oftener\nTry: --mtbf 3h@16384"
        )
    return Failures(every=duration(interval, "--mtbf"), devices=int(devices))


# --------------------------------------------------------------------------------------------------
# `shardlib compare`.


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Files beside the table."""

    svg: Annotated[
        Path | None, typer.Option("--svg", callback=writable, help="Draw the comparison here.")
    ] = None
    html: Annotated[
        Path | None,
        typer.Option("--html", callback=writable, help="Write a page for the browser here."),
    ] = None
    plans: Annotated[
        Path | None,
        typer.Option("--plans", metavar="FOLDER", help="A folder for the plans of all choices."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """The run, and the kinds of machines that are compared for it."""

    tokens: Annotated[str, typer.Option("--tokens", metavar="15T", help="Of the whole run.")]
    deadline: Annotated[str, typer.Option("--deadline", metavar="30d", help="For the whole run.")]
    topologies: Annotated[
        str,
        typer.Option("--topologies", "-t", help="Kinds of machines, e.g. h100:8,v5p,v6e,b200:8."),
    ]
    largest: Annotated[
        int, typer.Option("--largest", min=1, help="Devices of the largest machine looked at.")
    ] = LARGEST


@spread
def compare_command(
    model: Model,
    *,
    sizes: Sizes,
    kinds: Kinds,
    terms: Terms,
    pin: PinList = None,
    pictures: Pictures,
    as_json: AsJson = False,
) -> None:
    """For each kind of machine the smallest and the cheapest size that ends a run in time."""
    from shardlib.launch import booking

    target = booking.Target(
        tokens=quantity(kinds.tokens, "--tokens"),
        deadline=duration(kinds.deadline, "--deadline"),
        prices=prices(terms.price or []),
        failures=failures(terms.mtbf),
    )
    pins = parse_pins(pin or [])
    families = [word.strip() for word in kinds.topologies.split(",")]
    if pictures.plans is not None:
        _folder(pictures.plans)
    with quiet_stdout(as_json), Progress(f"planning {model} for machines of {kinds.topologies}"):
        inputs = inputs_of(model, sizes.batch, sizes.seq)
        comparison = booking.compare(
            **inputs, topologies=families, target=target, largest=kinds.largest, pin=pins
        )
    if pictures.svg is not None:
        write(pictures.svg, comparison.svg())
    if pictures.html is not None:
        write(pictures.html, comparison.html())
    if pictures.plans is not None:
        _write_plans(pictures.plans, comparison)
    echo(json.dumps(comparison.to_json()) if as_json else str(comparison), nl=as_json)


def _folder(path: Path) -> None:
    """A folder that plans are written to, made where it is missing."""
    if path.exists() and not path.is_dir():
        raise ArgumentError(
            f"{path} is not a folder, and plans are written there\nTry: another name"
        )
    if not path.parent.is_dir():
        raise MissingFileError(f"the folder {path.parent} for {path.name} does not exist")


def _write_plans(folder: Path, comparison: Comparison) -> None:
    """The plans of the smallest and the cheapest size of every kind, by machine."""
    folder.mkdir(exist_ok=True)
    for family in comparison.families:
        for offer in (family.smallest, family.cheapest):
            if offer is not None and offer.plan is not None:
                name = offer.topology.replace("*", "x").replace(":", "-")
                write(folder / f"{name}.json", offer.plan.to_json() + "\n")


# --------------------------------------------------------------------------------------------------
# `shardlib fit-model`.


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The machine and the batch."""

    topology: Annotated[str, typer.Option("--topology", "-t", help="The machine that there is.")]
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Sequences of the batch.")]
    seq: Annotated[int, typer.Option("--seq", "-s", min=1, help="Tokens of a sequence.")]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Options of the limits of the run."""

    deadline: Annotated[str, typer.Option("--deadline", metavar="30d", help="For the whole run.")]
    per_parameter: Annotated[
        float | None,
        typer.Option(
            "--tokens-per-parameter",
            help=f"Tokens of the run for each parameter. [{TOKENS_PER_PARAMETER:g}, Hoffmann et al."
            " 2022]",
        ),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="15T", help="Of the run, whatever the size, instead."),
    ] = None
    price: Annotated[
        str | None,
        typer.Option(
            "--price", metavar="MONEY[/h]", help="Of a chip and hour, or /d, in your own money."
        ),
    ] = None
    mtbf: Annotated[
        str | None,
        typer.Option("--mtbf", metavar="3h@16384", help="Between two failures of so many devices."),
    ] = None


@spread
def fit_model_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="One of the family: a preset, a config.json or a .toml card."
        ),
    ] = "llama3-8b",
    *,
    machine: Asked,
    limits: Limits,
    pin: PinList = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=writable, help="Write the plan of the model here."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The largest model of a family that a machine trains in time."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # as in `shardlib.cli.inputs`
    from shardlib.launch import booking

    if limits.tokens is not None and limits.per_parameter is not None:
        raise PlanError("--tokens and --tokens-per-parameter contradict each other\nTry: one")
    budget = booking.Budget(
        deadline=duration(limits.deadline, "--deadline"),
        tokens_per_parameter=limits.per_parameter or TOKENS_PER_PARAMETER,
        tokens=None if limits.tokens is None else quantity(limits.tokens, "--tokens"),
        price=None if limits.price is None else price(limits.price, "--price"),
        failures=failures(limits.mtbf),
    )
    with quiet_stdout(as_json), Progress(f"planning sizes of {model} for {machine.topology}"):
        fitted = booking.fit_model(
            model,
            topology=machine.topology,
            budget=budget,
            batch=machine.batch,
            seq=machine.seq,
            pin=parse_pins(pin or []) or None,
        )
    plan = fitted.best.offer.plan if fitted.best.offer is not None else None
    if out is not None and plan is not None:
        write(out, plan.to_json() + "\n")
    echo(json.dumps(fitted.to_json()) if as_json else str(fitted), nl=as_json)


#: Where submissions are written, each in a folder of its name.
FOLDER = Path("launches")


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
    """
    if not command or command[0] != "train":
        return None
    for word, after in zip(command, [*command[1:], None], strict=True):
        if word in names:
            return after
        if word.startswith(f"{names[0]}="):
            return word.partition("=")[2]
    return None


#: Vendor of the chips -> the variable from which their compiler takes options.
FLAGS_VARIABLES = {"nvidia": "XLA_FLAGS", "google": "LIBTPU_INIT_ARGS"}


def flags_of(file: Path | None, variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of every process, with the compiler flags of a plan beside those that the variable
    has; one that is there already stays as it is.

    Args:
        file: of the plan.
        variables: of the processes.
    """
    if file is None:
        return {}
    plan = read_plan(file)
    options = plan.compiler_options
    return with_flags(options, find_topology(plan.topology).chip.vendor, variables)


def with_flags(
    options: Mapping[str, str | bool | int], vendor: str, variables: Mapping[str, str]
) -> dict[str, str]:
    """The variable of a compiler with options.

    >>> with_flags({"xla_a": True, "xla_b": 2}, "nvidia", {"XLA_FLAGS": "--xla_b=1"})
    {'XLA_FLAGS': '--xla_b=1 --xla_a=true'}
    """
    name = FLAGS_VARIABLES.get(vendor, "XLA_FLAGS")
    words = variables.get(name, "").split()
    names = {word.lstrip("-").partition("=")[0] for word in words}
    added = [
        f"--{option}={str(value).lower() if isinstance(value, bool) else value}"
        for option, value in options.items()
        if option not in names
    ]
    return {name: " ".join((*words, *added))} if added else {}


def environment_of(words: Sequence[str]) -> dict[str, str]:
    """Variables from NAME=VALUE."""
    wrong = [word for word in words if "=" not in word]
    if wrong:
        raise LaunchError(
            f"--env {wrong[0]!r} is not NAME=VALUE\nTry: --env"
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
    from shardlib.launch.local import Local, launch
    from shardlib.processes.console import LOOPBACK, address_of
    from shardlib.training.supervisor import Budget

    ours = bool(words) and words[0] in OWN
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
        budget=Budget(restarts=restarts, **_set_values(budget)),
        **_set_values(waiting),
    )
    return launch(local, environ={**os.environ, **environment})


def _require_program(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuses a program that is not there."""
    if not words or shutil.which(words[0], path=environ.get("PATH")) is not None:
        return
    near = difflib.get_close_matches(words[0], OWN, 1)
    raise LaunchError(
        f"there is no program {shown(words[0])} here"
        + (f"; did you mean {near[0]!r}?" if near else "")
        + f"\nTry: a command of shardlib that runs in several processes ({', '.join(OWN)}), or"
        " any program; the other commands of shardlib run in one process, without `launch`"
    )


def _set_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without those that were left out."""
    return {name: value for name, value in values.items() if value is not None}


def chosen(engines: Sequence[Engine], options: Sequence[str]) -> Engine | None:
    """The engine that a command line names, if any."""
    named = [engine for engine in engines if f"--{engine.name}" in options]
    if len(named) > 1:
        raise LaunchError(
            f"{' and '.join(f'--{engine.name}' for engine in named)} exclude each other: a job has"
            " one engine\nTry: one of them"
        )
    return named[0] if named else None


# --------------------------------------------------------------------------------------------------
# `shardlib launch`: one program in many processes, of this machine or of many hosts.
#
# The options of engines are those of `shardlib.launch.commands`: one option each, as its row says.

#: What a job is called that nobody has named.
NAME = "shardlib"


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of all launches."""

    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            "-t",
            help="The machine, e.g. 16*h100:8; taken from the command if left out.",
        ),
    ] = None
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            "-r",
            help="Folder of the run, seen by all hosts; taken from the command if left out.",
        ),
    ] = None
    restarts: Annotated[
        int | None,
        typer.Option(
            "--restarts",
            min=0,
            help="Start again so often without progress. [0 on this machine, otherwise 3]",
        ),
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="A plan whose compiler flags every process has."),
    ] = None
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="NAME=VALUE", help="A variable of every process. Repeatable."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a job on many hosts."""

    plain: Annotated[
        list[str] | None,
        typer.Option(
            "--plain",
            metavar="NAME",
            help="A variable of --env that looks like a secret and is none. Repeatable.",
        ),
    ] = None
    name: Annotated[str | None, typer.Option("--name", help="Of the job. [shardlib]")] = None
    image: Annotated[str | None, typer.Option("--image", help="Container image.")] = None
    seconds: Annotated[
        int | None, typer.Option("--seconds", min=1, help="Time limit of one start.")
    ] = None
    host_devices: Annotated[
        int | None,
        typer.Option(
            "--host-devices",
            min=1,
            help="Devices of a host, where not as many as the chip is sold with.",
        ),
    ] = None
    host_processes: Annotated[
        int | None, typer.Option("--host-processes", min=1, help="Processes on a host. [1]")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SubmissionOptions:
    """Options of a submission."""

    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="KEY=VALUE",
            help="A setting of the engine, e.g. partition=gpu; an unknown one lists them all."
            " Repeatable.",
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be submitted.")] = (
        False
    )
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the files of the submission. [launches/NAME]"),
    ] = None
    as_json: AsJson = False


def flags(engines: Sequence[Engine]) -> type:
    """One flag for every engine, as a group of options."""
    return make_dataclass(
        "Flags",
        [
            (
                engine.name.replace("-", "_"),
                Annotated[bool, typer.Option(f"--{engine.name}", help=engine.help)],
                field(default=False),
            )
            for engine in engines
        ],
        frozen=True,
        kw_only=True,
        namespace={"__doc__": "Where the processes start, if not on this machine."},
    )


def launch_command(engines: Sequence[Engine]) -> Callable[..., None]:
    """The command, for a table of engines."""
    names = ", ".join(f"--{engine.name}" for engine in engines)
    extended = extension("launch")
    islands_option = "" if extended.options is NoOptions else " or --islands N"

    def launch(
        command: Annotated[
            list[str],
            typer.Argument(
                metavar="-- COMMAND",
                help="A command of shardlib (train ..., doctor ...), or any other program.",
            ),
        ],
        here: Here,
        engine_flags: Any,
        common: Common,
        job: JobOptions,
        submission: SubmissionOptions,
        islands: Any,
    ) -> None:
        """Run one program in many processes: on this machine, or on many hosts with what you have
        already. Exit code on this machine: that of the first process that failed; 75: stopped, and
        saved.
        """
        engine = chosen(engines, list(given(engine_flags)))
        variables = environment_of(common.env or [])
        if engine is None:  # processes have the variables of this one
            variables |= flags_of(common.plan, {**os.environ, **variables})
        if given(islands):
            others = {**given(job), **given(submission), **given(engine_flags)}
            _only(others, "is for an engine, and islands are on this machine, or come by hand")
            raise typer.Exit(extended.run(command, islands, here, common, variables))
        if engine is None and here.processes is None:
            raise LaunchError(
                "nothing says who starts the processes\nTry: --processes"
                f" N{islands_option} for this machine, or one of {names}"
            )
        if engine is None:
            _only({**given(job), **given(submission)}, f"is for an engine: one of {names}")
            words = completed(command, common.topology, common.run)
            restarts = common.restarts or 0
            raise typer.Exit(run_here(words, here, restarts=restarts, environment=variables))
        _only(
            given(here),
            f"is for processes of this machine, and --{engine.name} starts them elsewhere; what an"
            f" engine can be told stands in {PAGES}/launching.html",
        )
        submitted = submission_of(engine, command, common, job, submission.option or ())
        _submit(submitted, submission, job.name)

    return spread(launch, engine_flags=flags(engines), islands=extended.options)


def submission_of(
    engine: Engine,
    command: Sequence[str],
    common: Common,
    job: JobOptions,
    options: Sequence[str],
) -> Submission:
    """The submission that an engine makes of the command line; machine and run are taken from the
    words of a training where no option says them.
    """
    topology = common.topology or option_of(command, ("--topology", "-t"))
    run = common.run or option_of(command, ("--run", "-r"))
    if topology is None:
        raise LaunchError(
            "a job needs to know its machine\nTry: --topology 16*h100:8, or v5p:8x8x8"
        )
    variables = environment_of(common.env or [])
    fields = {
        "name": job.name or NAME,
        "image": job.image,
        "environment": variables | flags_of(common.plan, variables),
        "plain": tuple(job.plain or ()),
        "restarts": common.restarts,
        "seconds": job.seconds,
        "host_devices": job.host_devices,
        "host_processes": job.host_processes,
    }
    described = Job(
        command=completed(command, topology, run), topology=topology, run=run, **_set_values(fields)
    )
    return engine.submission(described, engine.read_settings(options))


def _only(options: dict[str, Any], why: str) -> None:
    """Raises where options were given that have no meaning here."""
    for name in options:
        raise LaunchError(f"{name} {why}\nTry: shardlib launch --help")


def _submit(submission: Submission, options: SubmissionOptions, name: str | None) -> None:
    """Submits, or shows what would be."""
    from shardlib.launch.submission import submit

    data = {
        "engine": submission.engine,
        "files": dict(submission.files),
        "commands": [list(words) for words in submission.commands],
        "later": [[what, list(words)] for what, words in submission.later],
    }
    if options.dry_run:
        echo(json.dumps(data) if options.as_json else str(submission))
        return
    folder = options.out or FOLDER / (name or NAME)
    output = submit(submission, folder)
    if options.as_json:
        echo(json.dumps({**data, "folder": str(folder), "said": output}))
        return
    echo(
        "\n".join(
            filter(
                None,
                [output, *(f"{what}: {shlex.join(words)}" for what, words in submission.later)],
            )
        )
    )


#: `shardlib launch` with the engines that there are.
launch = launch_command(ENGINES)


# --------------------------------------------------------------------------------------------------
# `shardlib doctor`.


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
    from shardlib.launch.joining import join
    from shardlib.processes.machine import cpu_without_accelerators

    cpu_without_accelerators()
    with quiet_stdout(as_json):
        joined = join()
        first = joined is None or joined.process == 0
        if first:  # the one that writes
            writable(out)
        from shardlib.launch.doctor import examine

        if joined is None and topology is not None and topology.startswith("cpu:"):
            from shardlib.machines.topology import topology as parsed
            from shardlib.processes.machine import simulate_cpu_devices

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


COMMANDS: Mapping[str, Callable[..., None]] = {
    "doctor": doctor_command,
    "launch": launch,
    "compare": compare_command,
    "fit-model": fit_model_command,
}
