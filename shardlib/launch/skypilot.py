"""SkyPilot: its settings, and the task of a job.

One task: as many nodes as the topology has hosts, and a script that is told by SkyPilot which node
it is on. As a managed job SkyPilot looks for the machines in the clouds that the user has, starts
the task again when a cloud takes machines back, and starts it again when it fails, as often as the
job allows; ends with code 75 and 86 do not count. SkyPilot makes no difference for code 2.

Formats: docs.skypilot.co/en/latest/reference/yaml-spec.html,
docs.skypilot.co/en/latest/running-jobs/distributed-jobs.html (SKYPILOT_NODE_IPS,
SKYPILOT_NODE_RANK) and docs.skypilot.co/en/latest/examples/managed-jobs.html (read 2026-11).
"""

from __future__ import annotations

import shlex
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.errors import LaunchError, raise_all
from shardlib.launch.job import Job
from shardlib.launch.submission import (
    Engine,
    Submission,
    accelerator_type,
    check_job,
    check_one_line,
    check_tpu,
    common_place,
    exports,
    host_script,
    is_tpu,
    kind_of,
    supervised,
    timed,
    yaml_text,
)
from shardlib.processes.place import AUTO, HUNG, STOPPED, port_of_job
from shardlib.untrusted.data import JsonObject

TASK = "task.yaml"
#: Variables that `sky` takes out of its own environment, by name.
SECRETS = ("SHARDLIB_SECRET",)
#: SkyPilot's names of GPUs, as `sky gpus list` shows them.
GPUS: Mapping[str, str] = {
    "a100": "A100-80GB",
    "a100-40gb": "A100",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
    "gb200": "GB200",
}


@dataclass(frozen=True, kw_only=True)
class SkyPilotSettings:
    """Settings of SkyPilot beyond the job.

    Attributes:
        infra: where, "gcp/us-central1" or "k8s/my-context"; None for the cheapest place.
        spot: whether machines may be taken back.
        managed: whether SkyPilot looks after the job, and starts it again; otherwise it starts a
            cluster of the job's name once.
        network_tier: "best" for the fastest network that the machines have.
        setup: lines of shell on every node, once, when it is new.
        workdir: folder of this machine that is copied to all nodes; the processes start in it.
        file_mounts: REMOTE=SOURCE; folders of this machine are copied to every node, buckets are
            mounted, so that what is written there stays.

    Raises:
        LaunchError: fields that no task can have, all of them listed.
    """

    infra: str | None = None
    spot: bool = False
    managed: bool = True
    network_tier: str | None = "best"
    setup: tuple[str, ...] = ()
    workdir: str | None = None
    file_mounts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        failures = check_one_line(self)
        if self.network_tier not in (None, "standard", "best"):
            failures.append(f"network_tier is {self.network_tier!r}; it must be standard or best")
        failures += [
            f"file_mounts has {text!r}; it needs REMOTE=SOURCE"
            for text in self.file_mounts
            if not all(text.partition("="))
        ]
        if failures:
            raise_all(LaunchError, "settings of SkyPilot are not usable", failures)


def skypilot(job: Job, settings: SkyPilotSettings | None = None) -> Submission:
    """A task and the command that launches it."""
    settings = settings or SkyPilotSettings()
    check_job(job, "SkyPilot", _failures(job))
    hidden = SECRETS if job.processes > 1 and not is_tpu(job) else ()
    passed = tuple(f"--secret={name}" for name in hidden)
    if settings.managed:
        command = (
            "sky",
            "jobs",
            "launch",
            "--yes",
            "--detach-run",
            f"--name={job.name}",
            *passed,
            TASK,
        )
        later = (
            ("look", ("sky", "jobs", "queue")),
            ("log", ("sky", "jobs", "logs", f"--name={job.name}")),
            ("stop", ("sky", "jobs", "cancel", "--yes", f"--name={job.name}")),
        )
    else:
        command = ("sky", "launch", "--yes", "--detach-run", f"--cluster={job.name}", *passed, TASK)
        later = (
            ("look", ("sky", "queue", job.name)),
            ("log", ("sky", "logs", job.name)),
            ("stop", ("sky", "down", "--yes", job.name)),
        )
    return Submission(
        engine="SkyPilot",
        files={TASK: yaml_text(task(job, settings))},
        commands=(command,),
        later=later,
        secrets=hidden,
    )


SKYPILOT = Engine(
    name="skypilot",
    help="Launch with SkyPilot.",
    settings=SkyPilotSettings,
    submission=skypilot,
)


def _failures(job: Job) -> list[str]:
    if not is_tpu(job):
        return (
            []
            if job.machine.chip.vendor == "cpu" or job.machine.chip.name in GPUS
            else [
                f"SkyPilot's name of {job.machine.chip.name} is not known; known are"
                f" {', '.join(GPUS)}"
            ]
        )
    failures = check_tpu(job)
    if job.slices > 1:
        failures.append(
            f"{job.topology} has several slices, which SkyPilot does not join; --tpu-vm and"
            " --kubernetes do"
        )
    if not failures and not kind_of(job).accelerator:
        failures.append(f"SkyPilot has no accelerator type for {job.machine.chip.name}")
    return failures


def task(job: Job, settings: SkyPilotSettings) -> JsonObject:
    """The task as plain data."""
    resources = {
        "infra": settings.infra,
        "use_spot": True if settings.spot else None,
        "image_id": f"docker:{job.image}" if job.image else None,
        "network_tier": settings.network_tier if job.hosts > 1 else None,
        "job_recovery": (
            {"max_restarts_on_errors": job.restarts, "recover_on_exit_codes": [STOPPED, HUNG]}
            if settings.managed
            else None
        ),
        **_accelerators(job),
    }
    fields = {
        "name": job.name,
        "workdir": settings.workdir,
        "num_nodes": 1 if is_tpu(job) else job.hosts,
        "resources": {name: value for name, value in resources.items() if value is not None},
        "envs": dict(job.environment),
        "file_mounts": {
            remote: {"source": source, "mode": "MOUNT"} if "://" in source else source
            for remote, source in (text.split("=", 1) for text in settings.file_mounts)
        },
        "setup": "\n".join([*settings.setup, ""]) if settings.setup else None,
        "run": _run(job, settings),
    }
    return {name: value for name, value in fields.items() if value not in (None, {})}


def _accelerators(job: Job) -> JsonObject:
    if is_tpu(job):  # a slice is one node of SkyPilot, however many hosts it has
        return {
            "accelerators": f"tpu-{accelerator_type(job)}",
            "accelerator_args": {"runtime_version": kind_of(job).runtime},
        }
    return (
        {"accelerators": f"{GPUS[job.machine.chip.name]}:{job.devices_per_host}"}
        if job.machine.chip.vendor != "cpu"
        else {}
    )


def _run(job: Job, settings: SkyPilotSettings) -> str:
    """Returns the script that runs on every node."""
    words = timed(job, job.words if settings.managed else supervised(job))
    if job.processes == 1:
        return f"exec {shlex.join(words)}\n"
    if is_tpu(job):
        return f"export SHARDLIB_PROCESSES={AUTO}\nexec {shlex.join(words)}\n"
    # SkyPilot does not number its jobs for the nodes, so that the port is the job's by its name.
    lines = [
        (
            'export SHARDLIB_COORDINATOR=$(echo "$SKYPILOT_NODE_IPS" | head -n'
            f" 1):{port_of_job(zlib.crc32(job.name.encode()))}"
        ),
        *exports(common_place(job)),
        f"set -- {shlex.join(words)}",
        *host_script(job, "$SKYPILOT_NODE_RANK"),
    ]
    return "\n".join(lines) + "\n"
