"""Slurm: its settings, the parts of the batch script, and the engine that puts them together."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from shardlib.errors import LaunchError, raise_all
from shardlib.launch.job import Job, too_small
from shardlib.launch.submission import (
    Engine,
    Submission,
    check_job,
    check_one_line,
    check_options,
    check_plain,
    common_place,
    exports,
    inside,
)
from shardlib.processes.place import FIRST_PORT, PORTS, STOPPED, USAGE

#: How GPUs can be asked for; "none" where a partition gives whole nodes without.
GPUS = ("gpus-per-node", "gres", "none")


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """Settings of Slurm beyond the job.

    Attributes:
        partition, account, qos, constraint, reservation: as `sbatch` has them; None for the site's
            defaults.
        gpus: option that asks for the GPUs of a node, one of `GPUS`.
        gpu_type: name that the site gives its GPUs, where it needs one.
        exclusive: whether the job has its nodes for itself, with all of their memory; by default
            where it has several.
        cpus: cores of a process; None for what the site gives.
        interface: network interface by which processes find each other, "ib0"; None for the name of
            the first node.
        mounts: FROM:TO folders that a container sees, besides the folder of the run and `workdir`.
        setup: lines of shell before the processes start, "module load cuda".
        workdir: folder in which the processes start; None for that of the submission.
        notice_seconds: before the time limit, that training has to save.
        chain: jobs that are submitted at once and run one after the other, each going on where the
            one before had to stop.
        options: further options of `sbatch`, "--comment=x".

    Raises:
        LaunchError: fields that no script can have, all of them listed.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gpus: str = "gpus-per-node"
    gpu_type: str | None = None
    exclusive: bool | None = None
    cpus: int | None = None
    interface: str | None = None
    mounts: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    workdir: str | None = None
    notice_seconds: int = 120
    chain: int = 1
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        failures = check_plain(
            self, ("partition", "account", "qos", "reservation", "gpu_type", "interface", "options")
        ) + check_one_line(self)
        if self.gpus not in GPUS:
            failures.append(f"gpus is {self.gpus!r}; it must be one of {', '.join(GPUS)}")
        failures += check_options(self.options)
        if self.constraint and not re.fullmatch(r"[\w\-.,&|*()\[\]]+", self.constraint):
            failures.append(f"constraint is {self.constraint!r}, which no sbatch reads")
        if self.workdir is not None and not self.workdir.startswith("/"):
            failures.append(f"workdir is {self.workdir!r}; it must be a whole path")
        failures += [
            f"mounts has {text!r}; it needs FROM:TO of whole paths with no ',' in them, once for"
            " each"
            for text in self.mounts
            if not re.fullmatch(r"/[^:,]*:/[^:,]*(:[a-z+]+)?", text)
        ]
        failures += too_small(self, cpus=1, chain=1, notice_seconds=1)
        if failures:
            raise_all(LaunchError, "settings of Slurm are not usable", failures)


#: What every task does first: it says which process it is. The rest of the words is the command.
TASK = 'export SHARDLIB_PROCESS=$SLURM_PROCID SHARDLIB_HOST_PROCESS=$SLURM_LOCALID; exec "$@"'


def options(job: Job, settings: SlurmSettings) -> list[str]:
    """The options that stand in the script."""
    values = {
        "job-name": job.name,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint and shlex.quote(settings.constraint),
        "reservation": settings.reservation,
        "nodes": job.hosts,
        "ntasks-per-node": job.host_processes,
        "cpus-per-task": settings.cpus,
        "time": None if job.seconds is None else _clock(job.seconds),
    }
    listed = [f"--{name}={value}" for name, value in values.items() if value is not None]
    if job.machine.chip.vendor != "cpu" and settings.gpus != "none":
        kind = f"{settings.gpu_type}:" if settings.gpu_type else ""
        listed.append(
            f"--gres=gpu:{kind}{job.devices_per_host}"
            if settings.gpus == "gres"
            else f"--gpus-per-node={kind}{job.devices_per_host}"
        )
    if settings.exclusive if settings.exclusive is not None else job.hosts > 1:
        listed += ["--exclusive", "--mem=0"]
    if settings.chain > 1:
        listed.append("--dependency=singleton")
    return [
        *listed,
        f"--signal=B:USR1@{settings.notice_seconds}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
        *settings.options,
    ]


def _clock(seconds: int) -> str:
    """Seconds as sbatch reads them.

    >>> _clock(90061)
    '1-01:01:01'
    """
    minutes, s = divmod(seconds, 60)
    hours, m = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02}:{m:02}:{s:02}"


def start() -> list[str]:
    return [
        "# The run has ended in an earlier job of this name.",
        'if [ -s ended ]; then exit "$(cat ended)"; fi',
    ]


def run_folder(job: Job, settings: SlurmSettings) -> str | None:
    """The folder of the run, where nodes see it as a folder.

    Returns:
        None where the job has none, or one in object storage.
    """
    return None if job.run is None or "://" in job.run else inside(settings.workdir, job.run)


def prepare(job: Job, settings: SlurmSettings) -> list[str]:
    """Lines before the processes; a container cannot mount a folder that is not there yet."""
    run = run_folder(job, settings)
    return [
        *settings.setup,
        *exports(job.environment),
        *([f"mkdir -p -- {shlex.quote(run)}"] if job.image and run else []),
    ]


def place(job: Job, settings: SlurmSettings) -> list[str]:
    """Lines that find process 0: this script runs on the first node, and so does task 0."""
    if settings.interface:
        address = [
            (
                f"address=$(ip -4 -oneline address show dev {settings.interface} | awk 'NR == 1 {{"
                ' split($4, part, "/"); print part[1] }\')'
            ),
            (
                f'if [ -z "$address" ]; then echo "{settings.interface} of $(hostname) has no IPv4'
                ' address" >&2; exit 1; fi'
            ),
        ]
    else:
        address = ['address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)']
    return [
        "# Process 0 is on the first node, where this script runs.",
        *address,
        f"export SHARDLIB_COORDINATOR=$address:$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))",
        *exports(common_place(job)),
    ]


def functions(job: Job, settings: SlurmSettings) -> list[str]:
    """Functions of bash that the loop calls."""
    newest = "newest() { :; }  # without a folder of the run no start can show what it has saved"
    run = run_folder(job, settings)
    if run is not None:
        newest = (
            f"newest() {{ ls -1 -- {shlex.quote(f'{run}/checkpoints')} 2>/dev/null | grep -xE"
            " '[0-9]+' | sort -n | tail -n 1; }"
        )
    return [
        newest,
        'running() { [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; }',
    ]


def loop(job: Job, settings: SlurmSettings) -> list[str]:
    again = ['scontrol requeue "$SLURM_JOB_ID"'] if settings.chain == 1 else []
    return [
        "told= starts=0",
        "trap 'told=1; kill -USR1 \"$step\" 2>/dev/null' USR1",
        "while :; do",
        "  before=$(newest) starts=$((starts + 1))",
        "  export SHARDLIB_START=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$starts",
        (
            "  SHARDLIB_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n'); export"
            " SHARDLIB_SECRET  # made here, written nowhere"
        ),
        f"  {_step(job, settings)} &",
        "  step=$!",
        '  wait "$step"; code=$?',
        (
            '  while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done  # the signal has'
            " ended the wait, not the step"
        ),
        f'  case $code in 0 | {USAGE}) echo "$code" > ended; exit "$code" ;; esac',
        '  running || exit "$code"  # cancelled, or on its way back into the queue',
        f'  if [ -n "$told" ] && [ "$code" -eq {STOPPED} ]; then',
        "    rm -f failures",
        "  else",
        "    failures=$(($(cat failures 2>/dev/null || echo 0) + 1))",
        '    if [ "$(newest)" != "$before" ]; then failures=1; fi',
        '    echo "$failures" > failures',
        (
            '    echo "the processes ended with code $code; failures without a new checkpoint:'
            ' $failures" >&2'
        ),
        f'    if [ "$failures" -gt {job.restarts} ]; then',
        f'      if [ "$code" -ne {STOPPED} ]; then echo "$code" > ended; fi',
        '      exit "$code"',
        "    fi",
        '    if [ -z "$told" ]; then sleep $((2 ** (failures < 6 ? failures : 6))); fi',
        "  fi",
        '  if [ -n "$told" ]; then',
        *(f"    {line}" for line in again),
        '    exit "$code"',
        "  fi",
        "done",
    ]


def _step(job: Job, settings: SlurmSettings) -> str:
    """The line that starts all processes."""
    words = (
        ["srun", "--kill-on-bad-exit=1", "--cpu-bind=none"]
        if settings.cpus is None
        else ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={settings.cpus}"]
    )
    if settings.workdir and not job.image:
        words.append(f"--chdir={settings.workdir}")
    if job.image is not None:
        seen = [
            f"{path}:{path}"
            for path in (settings.workdir, run_folder(job, settings))
            if path is not None
        ]
        mounts = ",".join(dict.fromkeys([*seen, *settings.mounts]))
        words += [
            f"--container-image={job.image}",
            *([f"--container-mounts={mounts}"] if mounts else []),
            *([f"--container-workdir={settings.workdir}"] if settings.workdir else []),
        ]
    return shlex.join([*words, "bash", "-c", TASK, "task", *job.words])


# --------------------------------------------------------------------------------------------------
# The engine.
#
# One batch script: it asks for the nodes, says where process 0 is, starts a task for every process
# with `srun`, and decides what happens when they end:
#
# - code 0, or 2 for a mistake of the user: the run has ended. Later jobs of a chain see that and
#   end at once.
# - after Slurm has told the script that the time limit is near (`--signal=B:USR1@...`), and the
#   script the processes: they have saved and ended with code 75. The job goes back into the queue,
#   or the next one of the chain goes on.
# - any other: the processes start again on the same nodes, so often without a new checkpoint as the
#   job allows. That is so for code 75, too: when one process fails, `srun` stops the others, which
#   save, and its own code is the highest of theirs.
#
# A job that somebody cancels stays cancelled. When a node fails, Slurm itself puts the job back
# into the queue (`--requeue`).
#
# The folder of the submission must be on a file system that all nodes share; logs and two small
# files, `ended` and `failures`, are written there. Formats: slurm.schedmd.com, sbatch.html,
# srun.html and scontrol.html; containers: github.com/NVIDIA/pyxis, README (read 2026-11).

SCRIPT = "job.sbatch"


def slurm(job: Job, settings: SlurmSettings | None = None) -> Submission:
    """A batch script and the commands that submit it."""
    settings = settings or SlurmSettings()
    failures = (
        [f"{job.topology} is made of TPUs, which Slurm does not manage"]
        if job.machine.chip.vendor == "google"
        else []
    )
    if job.seconds is not None and job.seconds <= settings.notice_seconds:
        failures.append(
            f"the time limit of {job.seconds} s leaves nothing beside the notice of"
            f" {settings.notice_seconds} s"
        )
    seen = (
        (("the folder of the run", run_folder(job, settings)), ("workdir", settings.workdir))
        if job.image
        else ()
    )
    failures += [
        f"{what} is {path!r}, and a container cannot see a folder with ':' or ',' in its name,"
        " where the list of its mounts is divided"
        for what, path in seen
        if path is not None and re.search("[:,]", path)
    ]
    check_job(job, "Slurm", failures)
    parts = (
        ["#!/bin/bash", *(f"#SBATCH {option}" for option in options(job, settings))],
        start(),
        prepare(job, settings),
        place(job, settings),
        functions(job, settings),
        loop(job, settings),
    )
    script = "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"
    return Submission(
        engine="Slurm",
        files={SCRIPT: script},
        commands=(
            ("rm", "-f", "ended", "failures"),
            *(("sbatch", "--parsable", SCRIPT),) * settings.chain,
        ),
        later=(
            ("look", ("squeue", f"--name={job.name}")),
            ("stop", ("scancel", f"--name={job.name}")),
        ),
    )


SLURM = Engine(
    name="slurm",
    help="Submit to Slurm.",
    settings=SlurmSettings,
    submission=slurm,
    # nodes share folders with the machine that submits: relative paths are those of the user
    defaults=lambda: {"workdir": str(Path.cwd())},
)
