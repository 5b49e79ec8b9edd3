"""Engines and their submissions: what an engine makes of a job, its settings from the words of a
command line, scripts, and Google's names of TPU slices.

Settings are written as KEY=VALUE, with the names of the fields; a field that holds several values
may be given several times.

>>> from shardlib.launch.clusters import SlurmSettings
>>> words = ["partition=gpu", "chain=3", "exclusive=true"]
>>> found = settings_of(SlurmSettings, [*words, "setup=module load cuda", "setup=ulimit -n 65536"])
>>> found.partition, found.chain, found.setup, found.exclusive
('gpu', 3, ('module load cuda', 'ulimit -n 65536'), True)
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from shardlib.errors import LaunchError, MissingPackageError, raise_all
from shardlib.launch.job import Job
from shardlib.processes.place import STOPPED
from shardlib.untrusted.data import JsonMapping, bounded, printable, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Settings = TypeVar("Settings")
TRUTH: Mapping[str, bool] = {"true": True, "false": False}


def settings_of(
    kind: type[Settings], words: Sequence[str], defaults: JsonMapping | None = None
) -> Settings:
    """Settings of an engine from the words of a command line."""
    hints = get_type_hints(kind)
    table: Any = kind
    kinds = {field.name: hints[field.name] for field in fields(table)}
    values: dict[str, Any] = {}
    failures: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or name not in kinds:
            failures.append(_unknown(word, name, kinds) if equals else f"{word!r} is not KEY=VALUE")
            continue
        several = kinds[name] == tuple[str, ...]
        value = (*values.get(name, ()), text) if several else _value(kinds[name], text)
        if value is None:
            failures.append(
                f"{name} is {text!r}, and needs"
                f" {'true or false' if bool in _parts(kinds[name]) else 'a whole number'}"
            )
        elif name in values and not several:
            failures.append(f"{name} is given twice")
        values[name] = value
    if failures:
        raise_all(
            LaunchError,
            "options of the engine are not usable",
            failures,
            hint=f"it has {', '.join(kinds)}",
        )
    return kind(**{**(defaults or {}), **values})


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) or (hint,)


def _value(hint: Any, text: str) -> Any:
    """The value of a field, None where the text is none."""
    if bool in _parts(hint):
        return TRUTH.get(text.lower())
    if int in _parts(hint):
        return int(text) if text.isdigit() else None
    return text


def _unknown(word: str, name: str, kinds: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, kinds, n=1)
    return f"{word!r} names no option" + (f". Did you mean {near[0]}?" if near else "")


# --------------------------------------------------------------------------------------------------
# Parts of scripts that several engines share.
#
# All text that comes from a user is quoted here or checked, so that no name or path can end a line
# or a word of a script.

#: Seconds that a process has to save and end when its time is over.
SAVE_SECONDS = 120
#: Values that stand in a line of a script or manifest as they are.
PLAIN = re.compile(r"[^\s\"'\\`$;&|<>#]+")


def exports(environment: Mapping[str, str]) -> list[str]:
    """Lines of shell that set variables.

    >>> exports({"XLA_FLAGS": "--a --b"})
    ["export XLA_FLAGS='--a --b'"]
    """
    return [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]


def common_place(job: Job) -> dict[str, str]:
    """Variables of the place that are the same for all processes; CPU devices are simulated, so
    that every process has to know how many.
    """
    simulated = (
        {"SHARDLIB_HOST_DEVICES": str(job.devices_per_host // job.host_processes)}
        if job.machine.chip.vendor == "cpu"
        else {}
    )
    return {
        "SHARDLIB_PROCESSES": str(job.processes),
        "SHARDLIB_HOST_PROCESSES": str(job.host_processes),
        **simulated,
    }


def host_script(job: Job, host: str) -> list[str]:
    """Lines of bash that run the processes of one host; the words of the command are the arguments
    of the script.

    A signal goes on to all of them. The first failure is the code of the script, and ends the
    others, as they would wait for it for ever; those that were stopped and have saved end by
    themselves.
    """
    if job.host_processes == 1:
        return [f"export SHARDLIB_PROCESS={host} SHARDLIB_HOST_PROCESS=0", 'exec "$@"']
    return [
        "started=()",
        "trap 'kill -TERM \"${started[@]}\" 2>/dev/null' TERM INT USR1",
        f"for ((local = 0; local < {job.host_processes}; local++)); do",
        (
            f"  SHARDLIB_PROCESS=$(({host} * {job.host_processes} + local))"
            ' SHARDLIB_HOST_PROCESS=$local "$@" &'
        ),
        "  started+=($!)",
        "done",
        "code=0",
        'while [ "${#started[@]}" -gt 0 ]; do',
        "  sleep 0.5  # rather than wait -n, which misses processes that end at the same moment",
        '  for i in "${!started[@]}"; do',
        '    if kill -0 "${started[i]}" 2>/dev/null; then continue; fi',
        '    wait "${started[i]}"; got=$?',
        '    unset "started[i]"',
        '    if [ "$got" -eq 0 ] || [ "$code" -ne 0 ]; then continue; fi',
        "    code=$got",
        f'    if [ "$code" -ne {STOPPED} ]; then kill -KILL "${{started[@]}}" 2>/dev/null; fi',
        "  done",
        "done",
        'exit "$code"',
    ]


def supervised(job: Job) -> tuple[str, ...]:
    """The words of the command where no scheduler starts processes again: those of a training that
    keeps a run do it themselves.

    >>> job = Job(name="a", command=("train", "--run", "/r"), topology="v5e:4x4", run="/r")
    >>> supervised(job)[-2:]
    ('--restarts', '3')
    """
    restarts_itself = (
        job.command[0] == "train"
        and job.run is not None
        and job.restarts > 0
        and not any(word.split("=")[0] == "--restarts" for word in job.command)
    )
    return (*job.words, "--restarts", str(job.restarts)) if restarts_itself else job.words


def timed(job: Job, words: tuple[str, ...]) -> tuple[str, ...]:
    """Words with the time limit of the job, where no scheduler has one; the process is told, and
    has time to save.
    """
    return (
        ("timeout", "--signal=TERM", f"--kill-after={SAVE_SECONDS}", str(job.seconds), *words)
        if job.seconds is not None
        else words
    )


def inside(folder: str | None, path: str) -> str:
    """A path as a script sees it that runs elsewhere: relative ones begin in `folder`.

    >>> [inside("/home/me", path) for path in ("runs/a", "/runs/a", "gs://bucket/a")]
    ['/home/me/runs/a', '/runs/a', 'gs://bucket/a']
    """
    return (
        path
        if folder is None or path.startswith("/") or "://" in path
        else f"{folder.rstrip('/')}/{path}"
    )


def check_plain(settings: object, names: Iterable[str]) -> list[str]:
    """Checks fields that are text, or several texts, and stand in a script as they are; lists the
    faults.
    """
    failures: list[str] = []
    for name in names:
        value = getattr(settings, name)
        for text in (value,) if isinstance(value, str) else value or ():
            if not PLAIN.fullmatch(text):
                failures.append(
                    f"{name} is {text!r}; it may hold no spaces, quotes or signs of the shell"
                )
    return failures


def check_one_line(settings: DataclassInstance) -> list[str]:
    """Lists the fields that are text and have line breaks in them."""
    texts = [
        (field.name, text)
        for field in fields(settings)
        for value in (getattr(settings, field.name),)
        for text in (
            (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ()
        )
        if isinstance(text, str)
    ]
    return [
        f"{name} is {text!r}; it must be one line"
        for name, text in texts
        if "\n" in text or "\r" in text
    ]


def check_options(options: Iterable[str]) -> list[str]:
    """Lists the further options of a command that are none."""
    return [
        f"options has {text!r}, which does not begin with --"
        for text in options
        if not text.startswith("--")
    ]


def check_job(job: Job, engine: str, failures: Iterable[str], hint: str = "") -> None:
    """Refuses a job that an engine cannot run."""
    problems = list(failures)
    if job.command[0] == "train" and job.run is not None and "://" in job.run:
        problems.append(
            f"the run is at {job.run}, and shardlib train keeps runs in folders; mount it on all"
            " hosts, and name the folder"
        )
    if problems:
        raise_all(LaunchError, f"{engine} cannot run the job {job.name!r}", problems, hint=hint)


def yaml_text(fields: JsonMapping) -> str:
    """Plain data as YAML, in the order given; scripts as blocks, line by line, so that people can
    read them.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump(dict(fields), Dumper=Dumper, sort_keys=False, width=1000)


# --------------------------------------------------------------------------------------------------
# Submissions.
#
# Files to write and commands to run, as plain values: `--dry-run` prints them, tests read them,
# and submitting is the same for all engines.

#: What no script and no command can have: NUL, and bytes that are not UTF-8, as Python reads them.
NO_TEXT = re.compile("[\\0\\ud800-\\udfff]")


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Files and commands that hand a job to a scheduler.

    Attributes:
        engine: its name, for messages.
        files: name of each file, in the folder of the submission, and its text.
        commands: words of each command, in order, run in that folder; the next only if the one
            before succeeded.
        secrets: names of variables that `submit` sets to random words for the commands, which pass
            them on by name; they stand in no file and no command line.
        notes: what people should know that the words do not show.
        later: (what for, words) of commands that the user will want afterwards: to look, and to
            stop.
    """

    engine: str
    files: Mapping[str, str]
    commands: tuple[tuple[str, ...], ...]
    later: tuple[tuple[str, tuple[str, ...]], ...] = ()
    secrets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        texts = [(name, text) for name, text in self.files.items()]
        texts += [("a command", shlex.join(words)) for words in self.commands]
        failures = [
            f"{name} would have the line {shown(line, 200)}"
            for name, text in texts
            for line in text.split("\n")
            if NO_TEXT.search(line)
        ]
        if failures:
            raise_all(
                LaunchError,
                f"{self.engine} cannot be given NUL, or what is not UTF-8",
                bounded(failures),
                hint="other options",
            )

    def __str__(self) -> str:
        parts = [f"# {name}\n{text.rstrip()}\n" for name, text in self.files.items()]
        if self.notes:
            parts.append("\n".join(f"# {note}" for note in self.notes))
        parts += ["\n".join(["# commands", *(shlex.join(words) for words in self.commands)])]
        if self.later:
            parts.append("\n".join(f"# {what}: {shlex.join(words)}" for what, words in self.later))
        return "\n".join(parts)


def _write(path: Path, text: str) -> None:
    """Writes a file that nobody but the user reads: what variables hold is nobody else's."""
    path.unlink(missing_ok=True)
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as stream:
        stream.write(text)


def _write_all(files: Mapping[str, str], folder: Path) -> None:
    """Writes the files of a submission into its folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            _write(folder / name, text)
    except (OSError, ValueError) as failure:  # a name that no file can have is a ValueError
        why = (failure.strerror if isinstance(failure, OSError) else None) or str(failure)
        raise LaunchError(
            f"the files of the submission cannot be written into {printable(str(folder))}: {why}"
            "\nTry: --out with another folder"
        ) from failure


def submit(submission: Submission, folder: Path) -> str:
    """Writes the files into `folder`, runs the commands there, and gives what they printed."""
    missing = sorted({words[0] for words in submission.commands if shutil.which(words[0]) is None})
    if missing:
        raise MissingPackageError(
            f"{submission.engine} is driven with {', '.join(missing)}, which is not on the"
            " PATH\nTry: run this where it is installed, or --dry-run to see what would be"
            " submitted"
        )
    _write_all(submission.files, folder)
    outputs, environ = (
        list[str](),
        {
            **os.environ,
            **{name: secrets.token_hex(16) for name in submission.secrets},
        },
    )
    for words in submission.commands:
        done = subprocess.run(
            words,
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            raise LaunchError(
                f"{submission.engine} did not take the job: {shlex.join(words)} ended with code"
                f" {done.returncode}\n{(done.stderr or done.stdout).strip()}\nTry: what was written"
                f" is in {printable(str(folder))}; mend it there, or see it with --dry-run"
            )
        outputs.append(done.stdout.strip())
    return "\n".join(filter(None, outputs))


# --------------------------------------------------------------------------------------------------
# Engines: a name, its settings, and the submission that it makes of a job.
#
# A row in `shardlib.launch.commands` makes one an engine of `shardlib launch`: its option, its line
# of the help, `-o KEY=VALUE` for the fields of its settings, and `--dry-run` all come from here.


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A scheduler that starts the processes of a job on its hosts.

    Attributes:
        name: of its option: "slurm" for `--slurm`.
        help: of its option, one line.
        settings: frozen dataclass of what it has to know beyond the job.
        submission: (job, settings) -> files and commands that hand the job over.
        defaults: fields of the settings that a command line knows, where no word names them.
    """

    name: str
    help: str
    settings: type[Any]
    submission: Callable[[Job, Any], Submission]
    defaults: Callable[[], JsonMapping] = dict

    def read_settings(self, words: Sequence[str]) -> Any:
        """Its settings from the words of a command line."""
        return settings_of(self.settings, words, self.defaults())


# --------------------------------------------------------------------------------------------------
# Names of TPU slices, as Google's tools have them.
#
# Names: docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus (labels of nodes),
# docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e} (accelerator types) and
# docs.cloud.google.com/tpu/docs/runtimes (runtime versions), all read 2026-11.


@dataclass(frozen=True, kw_only=True)
class TpuKind:
    """Names of one generation.

    Attributes:
        node: value of the label of GKE nodes.
        accelerator: beginning of Cloud TPU's accelerator types; empty where Cloud TPU does not
            offer it by itself.
        counted: what the number in an accelerator type counts, for one chip: 2 where it counts
            TensorCores.
        shaped: whether a slice of one size exists in several shapes, so that the shape must be
            said.
        runtime: version of the software of a TPU VM.
        track: release track of gcloud that knows the shapes of this generation.
    """

    node: str
    accelerator: str = ""
    counted: int = 1
    shaped: bool = False
    runtime: str = ""
    track: tuple[str, ...] = ()


KINDS: Mapping[str, TpuKind] = {
    "v4": TpuKind(
        node="tpu-v4-podslice",
        accelerator="v4",
        counted=2,
        shaped=True,
        runtime="tpu-ubuntu2204-base",
    ),
    "v5e": TpuKind(
        node="tpu-v5-lite-podslice", accelerator="v5litepod", runtime="v2-alpha-tpuv5-lite"
    ),
    "v5p": TpuKind(
        node="tpu-v5p-slice",
        accelerator="v5p",
        counted=2,
        shaped=True,
        runtime="v2-alpha-tpuv5",
        track=("alpha",),
    ),
    "v6e": TpuKind(node="tpu-v6e-slice", accelerator="v6e", runtime="v2-alpha-tpuv6e"),
    "tpu7x": TpuKind(node="tpu7x"),
}


def is_tpu(job: Job) -> bool:
    """Returns whether the job runs on TPUs."""
    return job.machine.chip.vendor == "google"


def kind_of(job: Job) -> TpuKind:
    """Names of the generation of the job; those of a generation that nobody has named here are
    empty.
    """
    return KINDS.get(job.machine.chip.name, TpuKind(node=""))


def shape_of(job: Job) -> str:
    """The shape of a slice, in chips.

    >>> shape_of(Job(name="a", command=("train",), topology="2*v5p:4x4x8"))
    '4x4x8'
    """
    torus = next((tier for tier in job.machine.tiers if tier.kind == "torus"), None)
    return "x".join(map(str, torus.shape)) if torus else ""


def accelerator_type(job: Job) -> str:
    """Cloud TPU's name of a slice.

    >>> for topology in ("v5e:4x8", "v5p:4x4x4"):
    ...     accelerator_type(Job(name="a", command=("train",), topology=topology))
    'v5litepod-32'
    'v5p-128'
    """
    kind = kind_of(job)
    chips = job.machine.devices // job.slices // job.machine.chip.devices_per_chip
    return f"{kind.accelerator}-{chips * kind.counted}"


def check_tpu(job: Job) -> list[str]:
    """Lists the reasons why these TPUs cannot be requested; empty for GPUs, too."""
    if not is_tpu(job):
        return []
    failures = (
        []
        if kind_of(job).node
        else [
            f"{job.machine.chip.name} is a TPU whose names are not known; they are for"
            f" {', '.join(KINDS)}"
        ]
    )
    if not shape_of(job):
        failures.append(f"{job.topology} does not say the shape of a slice")
    if job.host_processes > 1:
        failures.append(
            f"{job.host_processes} processes share the chips of a host, and JAX runs one process on"
            " a TPU host"
        )
    return failures
