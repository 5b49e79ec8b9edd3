"""What Slurm has to know beyond the job: partition, GPUs, mounts, notice before the time limit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardlib.errors import LaunchError, raise_all
from shardlib.launching.engines.shared.shell import (
    check_one_line,
    check_plain,
)

#: How GPUs can be asked for; "none" where a partition gives whole nodes without.
GPUS = ("gpus-per-node", "gres", "none")


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """What Slurm has to know beyond the job.

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
        failures += (
            []
            if self.gpus in GPUS
            else [f"gpus is {self.gpus!r}; it must be one of {', '.join(GPUS)}"]
        )
        failures += [
            f"options has {text!r}, which does not begin with --"
            for text in self.options
            if not text.startswith("--")
        ]
        failures += (
            [f"constraint is {self.constraint!r}, which no sbatch reads"]
            if self.constraint and not re.fullmatch(r"[\w\-.,&|*()\[\]]+", self.constraint)
            else []
        )
        failures += (
            [f"workdir is {self.workdir!r}; it must be a whole path"]
            if self.workdir is not None and not self.workdir.startswith("/")
            else []
        )
        failures += [
            f"mounts has {text!r}; it needs FROM:TO of whole paths with no ',' in them, once for"
            " each"
            for text in self.mounts
            if not re.fullmatch(r"/[^:,]*:/[^:,]*(:[a-z+]+)?", text)
        ]
        failures += [
            f"{name} is {value}; it must be at least 1"
            for name, value in (
                ("cpus", self.cpus),
                ("chain", self.chain),
                ("notice_seconds", self.notice_seconds),
            )
            if value is not None and value < 1
        ]
        if failures:
            raise_all(LaunchError, "settings of Slurm are not usable", failures)
