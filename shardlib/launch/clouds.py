"""The engines of clouds, which ask for the machines of a job: Cloud TPU VMs and SkyPilot."""

from __future__ import annotations

import shlex
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields

from shardlib.errors import LaunchError, raise_all
from shardlib.launch.job import Job
from shardlib.launch.submission import (
    Engine,
    Submission,
    accelerator_type,
    check_job,
    check_one_line,
    check_options,
    check_plain,
    check_tpu,
    common_place,
    exports,
    host_script,
    is_tpu,
    kind_of,
    shape_of,
    supervised,
    timed,
    yaml_text,
)
from shardlib.processes.place import AUTO, HUNG, STOPPED, port_of_job
from shardlib.untrusted.data import JsonObject

# --------------------------------------------------------------------------------------------------
# Cloud TPU VMs.

PROVISIONING = ("on-demand", "spot", "reserved")
VM, QUEUED = ("compute", "tpus", "tpu-vm"), ("compute", "tpus", "queued-resources")


@dataclass(frozen=True, kw_only=True)
class TpuVmSettings:
    """Settings of Cloud TPU beyond the job.

    Attributes:
        zone: of the slices, "us-east5-a".
        project: Google Cloud project; None for that of gcloud's configuration.
        create: whether to ask for the slices; otherwise they are there, named like the job, with
            "-0", "-1", ... at the end where there are several.
        provisioning: one of `PROVISIONING`.
        runtime_version: software of the VMs; None for what Google names for the generation.
        network, service_account: of the VMs; None for the project's defaults.
        setup: lines of shell on every host before the processes start.
        workdir: folder on every host in which the processes start.
        options: further options of `gcloud compute tpus queued-resources create`.

    Raises:
        LaunchError: fields that no command can have, all of them listed.
    """

    zone: str = ""
    project: str | None = None
    create: bool = True
    provisioning: str = "on-demand"
    runtime_version: str | None = None
    network: str | None = None
    service_account: str | None = None
    setup: tuple[str, ...] = ()
    workdir: str | None = None
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = tuple(
            field.name
            for field in fields(self)
            if field.name not in ("zone", "setup", "workdir", "options", "create")
        )
        failures = check_plain(self, names) + check_one_line(self)
        if not self.zone:
            failures.append("zone is missing; it says where the slices are, e.g. us-east5-a")
        if self.provisioning not in PROVISIONING:
            failures.append(
                f"provisioning is {self.provisioning!r}; it must be one of"
                f" {', '.join(PROVISIONING)}"
            )
        failures += check_options(self.options)
        if failures:
            raise_all(LaunchError, "settings of Cloud TPU are not usable", failures)


# --------------------------------------------------------------------------------------------------
# The engine of Cloud TPU: the script that every host of a job runs.
#
# Two ways, both without a controller that stays:
#
# - `create`: a queued resource is asked for, with the script below as the startup script of its
#   VMs. They start when Google has them, hours later perhaps, and nobody has to wait.
# - not `create`: the slices are there. The script is copied to all of their hosts and started.
#
# The script is the same on every host; JAX asks the metadata server which of them it is. Nothing
# starts a slice again that Google has taken back; a process that dies is started again by
# `shardlib train --restarts` on its own host, which the commands of a training with a run folder
# get.
#
# Formats: docs.cloud.google.com/tpu/docs/queued-resources,
# docs.cloud.google.com/compute/docs/instances/startup-scripts/linux, and `gcloud compute tpus
# queued-resources create`, `tpu-vm ssh` and `tpu-vm scp` of the Google Cloud SDK 528 (read
# 2026-11).


def tpu_vm(job: Job, settings: TpuVmSettings) -> Submission:
    """A script for every host, and the commands that bring it there."""
    check_job(
        job,
        "Cloud TPU",
        _tpu_failures(job, settings),
        hint="--kubernetes runs TPUs that GKE has" if is_tpu(job) else "",
    )
    location = (
        f"--zone={settings.zone}",
        *((f"--project={settings.project}",) if settings.project else ()),
    )
    script = f"{job.name}.sh"
    nodes = (job.name,) if job.slices == 1 else tuple(f"{job.name}-{i}" for i in range(job.slices))
    if settings.create:
        commands = (_create(job, settings, script, location),)
        look = ("gcloud", *QUEUED, "describe", job.name, *location)
        log = _ssh(
            nodes[0], location, "0", "sudo journalctl --unit=google-startup-scripts --follow"
        )
        delete = ("gcloud", *QUEUED, "delete", job.name, *location, "--force", "--quiet")
        stop = (("stop", delete),)
    else:
        start = f"setsid nohup bash {script} > {job.name}.log 2>&1 < /dev/null &"
        commands = (
            *(
                ("gcloud", *VM, "scp", script, f"{node}:{script}", *location, "--worker=all")
                for node in nodes
            ),
            *(_ssh(node, location, "all", start) for node in nodes),
        )
        look = ("gcloud", *VM, "describe", nodes[0], *location)
        log = _ssh(nodes[0], location, "0", f"tail --follow {job.name}.log")
        stop = tuple(("stop", _ssh(node, location, "all", _stop(job))) for node in nodes)
    return Submission(
        engine="Cloud TPU",
        files={script: host_text(job, settings)},
        commands=commands,
        later=(("look", look), ("log", log), *stop),
    )


TPU_VM = Engine(
    name="tpu-vm",
    help="Run on Cloud TPU VMs.",
    settings=TpuVmSettings,
    submission=tpu_vm,
)


def _tpu_failures(job: Job, settings: TpuVmSettings) -> list[str]:
    if not is_tpu(job):
        return [f"{job.topology} has no TPUs"]
    failures = check_tpu(job)
    if not failures and not kind_of(job).accelerator:
        failures.append(f"Cloud TPU has no accelerator type for {job.machine.chip.name}")
    if not failures and not kind_of(job).runtime and settings.runtime_version is None:
        failures.append(
            f"the runtime version for {job.machine.chip.name} is not known; the setting"
            " runtime_version names one"
        )
    if job.image is not None and job.run is not None and "://" not in job.run and ":" in job.run:
        failures.append(
            f"the folder of the run is {job.run!r}, and a container cannot see a folder with ':' in"
            " its name, where docker divides FROM and TO"
        )
    if job.run is not None and "://" not in job.run and not job.run.startswith("/"):
        failures.append(
            f"the folder {job.run} of the run is relative, and hosts of TPUs share no folder; it"
            " needs a whole path on a file system that `setup` mounts"
        )
    return failures


def _create(
    job: Job, settings: TpuVmSettings, script: str, location: tuple[str, ...]
) -> tuple[str, ...]:
    kind = kind_of(job)
    slices = (
        (f"--type={kind.accelerator}", f"--topology={shape_of(job)}")
        if kind.shaped
        else (f"--accelerator-type={accelerator_type(job)}",)
    )
    nodes = (
        (f"--node-id={job.name}",)
        if job.slices == 1
        else (f"--node-count={job.slices}", f"--node-prefix={job.name}")
    )
    return (
        "gcloud",
        *kind.track,
        *QUEUED,
        "create",
        job.name,
        *location,
        *slices,
        *nodes,
        f"--runtime-version={settings.runtime_version or kind.runtime}",
        *((f"--{settings.provisioning}",) if settings.provisioning != "on-demand" else ()),
        *((f"--network={settings.network}",) if settings.network else ()),
        *((f"--service-account={settings.service_account}",) if settings.service_account else ()),
        f"--metadata-from-file=startup-script={script}",
        *settings.options,
    )


def _ssh(node: str, location: tuple[str, ...], worker: str, command: str) -> tuple[str, ...]:
    return ("gcloud", *VM, "ssh", node, *location, f"--worker={worker}", f"--command={command}")


def _stop(job: Job) -> str:
    return (
        f"sudo docker stop --time=120 {job.name}"
        if job.image
        else f'kill -TERM "$(cat {job.name}.pid)"'
    )


def host_text(job: Job, settings: TpuVmSettings) -> str:
    """The script of every host."""
    environment = {**job.environment, **({"SHARDLIB_PROCESSES": AUTO} if job.processes > 1 else {})}
    words = timed(job, supervised(job))
    lines = [
        "#!/bin/bash",
        "# Runs on every host; JAX finds out which of them this is.",
        *settings.setup,
    ]
    if job.image is None:
        lines += [
            f"echo $$ > {job.name}.pid",
            *exports(environment),
            *([f"cd -- {shlex.quote(settings.workdir)} || exit 1"] if settings.workdir else []),
            f"exec {shlex.join(words)}",
        ]
    else:
        run = (
            [f"--volume={job.run}:{job.run}"]
            if job.run is not None and "://" not in job.run
            else []
        )
        docker = [
            "sudo",
            "docker",
            "run",
            "--rm",
            f"--name={job.name}",
            "--privileged",
            "--network=host",
            *run,
            *([f"--workdir={settings.workdir}"] if settings.workdir else []),
            *(f"--env={name}={value}" for name, value in environment.items()),
            "--entrypoint=",
            job.image,
            *words,
        ]
        lines.append(f"exec {shlex.join(docker)}")
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------
# SkyPilot: its settings, and the task of a job.
#
# One task: as many nodes as the topology has hosts, and a script that is told by SkyPilot which
# node it is on. As a managed job SkyPilot looks for the machines in the clouds that the user has,
# starts the task again when a cloud takes machines back, and starts it again when it fails, as
# often as the job allows; ends with code 75 and 86 do not count. SkyPilot makes no difference for
# code 2.
#
# Formats: docs.skypilot.co/en/latest/reference/yaml-spec.html,
# docs.skypilot.co/en/latest/running-jobs/distributed-jobs.html (SKYPILOT_NODE_IPS,
# SKYPILOT_NODE_RANK) and docs.skypilot.co/en/latest/examples/managed-jobs.html (read 2026-11).

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
    check_job(job, "SkyPilot", _sky_failures(job))
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


def _sky_failures(job: Job) -> list[str]:
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
        "run": _sky_script(job, settings),
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


def _sky_script(job: Job, settings: SkyPilotSettings) -> str:
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
