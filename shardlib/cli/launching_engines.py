"""What `shardlib launch` does with an engine: from the words of a command line to a submission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlib.errors import LaunchError

if TYPE_CHECKING:
    from shardlib.launching.engines.submission import Submission
    from shardlib.launching.job import Job

#: Names of the engines, as their options spell them.
ENGINES = ("slurm", "kubernetes", "tpu-vm", "ray", "skypilot")
#: Where submissions are written, each in a folder of its name.
FOLDER = Path("launches")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command line asks of an engine.

    Attributes:
        engine: one of `ENGINES`.
        command: words after --.
        topology, run: as the options say; taken from the words of a training where they are left
            out.
        options: KEY=VALUE of the engine.
        fields: further fields of the job, None where the default is wanted.
    """

    engine: str
    command: tuple[str, ...]
    topology: str | None
    run: str | None
    options: tuple[str, ...]
    fields: dict[str, Any]


def chosen(flags: dict[str, bool]) -> str | None:
    """The engine that a command line names, if any.

    Raises:
        LaunchError: it names several.
    """
    found = [name for name, wanted in flags.items() if wanted]
    if len(found) > 1:
        raise LaunchError(
            f"{' and '.join(f'--{name}' for name in found)} exclude each other: a job has one"
            " engine\nTry: one of them"
        )
    return found[0] if found else None


def submission_of(request: Request) -> Submission:
    """What the engine makes of the request.

    Raises:
        LaunchError: the job or the options are not usable.
        TopologyError: the topology does not parse.
    """
    from shardlib.launching.job import Job

    topology, run = (
        value or option_of(request.command, names)
        for value, names in (
            (request.topology, ("--topology", "-t")),
            (request.run, ("--run", "-r")),
        )
    )
    if topology is None:
        raise LaunchError(
            "a job needs to know its machine\nTry: --topology 16*h100:8, or v5p:8x8x8"
        )
    command = completed(request.command, topology, run)
    job = Job(
        command=command,
        topology=topology,
        run=run,
        **{name: value for name, value in request.fields.items() if value is not None},
    )
    return _made(request, job)


def _made(request: Request, job: Job) -> Submission:
    from shardlib.launching.engines.kubernetes import KubernetesSettings, kubernetes
    from shardlib.launching.engines.ray import RaySettings, ray
    from shardlib.launching.engines.skypilot import SkyPilotSettings, skypilot
    from shardlib.launching.engines.slurm import SlurmSettings, slurm
    from shardlib.launching.engines.tpu_vm import TpuVmSettings, tpu_vm
    from shardlib.launching.options import settings_of

    # Nodes of Slurm share folders with the machine that submits, so that relative paths are those
    # of the user.
    engines: dict[str, tuple[type[Any], Callable[[Job, Any], Submission], dict[str, Any]]] = {
        "slurm": (SlurmSettings, slurm, {"workdir": str(Path.cwd())}),
        "kubernetes": (KubernetesSettings, kubernetes, {}),
        "tpu-vm": (TpuVmSettings, tpu_vm, {}),
        "ray": (RaySettings, ray, {}),
        "skypilot": (SkyPilotSettings, skypilot, {}),
    }
    kind, make, defaults = engines[request.engine]
    return make(job, settings_of(kind, request.options, defaults))


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

    >>> option_of(["train", "--run=runs/a"], ("--run", "-r")), option_of(["train", "-r", "runs/b"], ("--run", "-r"))
    ('runs/a', 'runs/b')
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
    """Variables from NAME=VALUE.

    Raises:
        LaunchError: a word has no `=`.
    """
    wrong = [word for word in words if "=" not in word]
    if wrong:
        raise LaunchError(
            f"--env {wrong[0]!r} is no NAME=VALUE\nTry: --env"
            " XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true"
        )
    return dict(word.split("=", 1) for word in words)
