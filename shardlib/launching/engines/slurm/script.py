"""The parts of the batch script of a job on Slurm, as lines of bash."""

from __future__ import annotations

import shlex

from shardlib.launching.engines.shared.shell import (
    STOPPED,
    USAGE,
    common_place,
    exports,
    inside,
)
from shardlib.launching.engines.slurm.settings import SlurmSettings
from shardlib.launching.job import Job
from shardlib.processes.place import FIRST_PORT, PORTS

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
    listed += ["--dependency=singleton"] if settings.chain > 1 else []
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
    """What comes before the processes; a container cannot mount a folder that is not there yet."""
    run = run_folder(job, settings)
    return [
        *settings.setup,
        *exports(job.environment),
        *([f"mkdir -p -- {shlex.quote(run)}"] if job.image and run else []),
    ]


def place(job: Job, settings: SlurmSettings) -> list[str]:
    """Where process 0 is: this script runs on the first node, and so does task 0."""
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
    """What the loop asks."""
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
    words += [f"--chdir={settings.workdir}"] if settings.workdir and not job.image else []
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
