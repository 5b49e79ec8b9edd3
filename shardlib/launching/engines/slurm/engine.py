"""Slurm: the batch script of a job.

One batch script: it asks for the nodes, says where process 0 is, starts a task for every process
with `srun`, and decides what happens when they end:

- code 0, or 2 for a mistake of the user: the run has ended. Later jobs of a chain see that and end
  at once.
- after Slurm has told the script that the time limit is near (`--signal=B:USR1@...`), and the
  script the processes: they have saved and ended with code 75. The job goes back into the queue, or
  the next one of the chain goes on.
- any other: the processes start again on the same nodes, so often without a new checkpoint as the
  job allows. That is so for code 75, too: when one process fails, `srun` stops the others, which
  save, and its own code is the highest of theirs.

A job that somebody cancels stays cancelled. When a node fails, Slurm itself puts the job back into
the queue (`--requeue`).

The folder of the submission must be on a file system that all nodes share; logs and two small
files, `ended` and `failures`, are written there. Formats: slurm.schedmd.com, sbatch.html, srun.html
and scontrol.html; containers: github.com/NVIDIA/pyxis, README (read 2026-11).
"""

from __future__ import annotations

import re
from pathlib import Path

from shardlib.launching.engines.shared.shell import (
    check_job,
)
from shardlib.launching.engines.shared.submission import Submission
from shardlib.launching.engines.slurm.script import (
    functions,
    loop,
    options,
    place,
    prepare,
    run_folder,
    start,
)
from shardlib.launching.engines.slurm.settings import SlurmSettings
from shardlib.launching.job import Job
from shardlib.untrusted.json_types import JsonMapping

SCRIPT = "job.sbatch"


def slurm(job: Job, settings: SlurmSettings | None = None) -> Submission:
    """A batch script and the commands that submit it.

    Args:
        settings: of the cluster; by default those of `SlurmSettings()`.
    """
    settings = settings or SlurmSettings()
    failures = (
        [f"{job.topology} is made of TPUs, which Slurm does not manage"]
        if job.machine.chip.vendor == "google"
        else []
    )
    failures += (
        [
            f"the time limit of {job.seconds} s leaves nothing beside the notice of"
            f" {settings.notice_seconds} s"
        ]
        if job.seconds is not None and job.seconds <= settings.notice_seconds
        else []
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


class Slurm:
    """The engine `--slurm`."""

    name = "slurm"
    help = "Submit to Slurm."
    settings = SlurmSettings

    def defaults(self) -> JsonMapping:
        """See `Engine`; nodes share folders with the machine that submits, so that relative
        paths are those of the user.
        """
        return {"workdir": str(Path.cwd())}

    def submission(self, job: Job, settings: SlurmSettings) -> Submission:
        """See `slurm`."""
        return slurm(job, settings)
