"""What the scripts of several engines have in common.

All text that comes from a user is quoted here or checked, so that no name or path can end a line or
a word of a script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields

from shardlib.errors import LaunchError, raise_all
from shardlib.launching.job import Job
from shardlib.untrusted.json_types import JsonMapping

#: Exit code of a run that was stopped and has saved (`shardlib.training.supervisor`), which starts
#: again without counting as a failure.
STOPPED = 75
#: Exit code of a process that hung and ended itself (`shardlib.processes.watchdog`).
HUNG = 86
#: Seconds that a process has to save and end when its time is over.
SAVE_SECONDS = 120
#: Exit code for mistakes of the user, which no start repairs.
USAGE = 2
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

    Args:
        job: with its seconds.
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
    """What is wrong with fields that are text, or several texts, and stand in a script as they
    are.
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
    """Which fields that are text have line breaks in them."""
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
