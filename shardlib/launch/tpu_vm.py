"""Cloud TPU VMs: their settings, and the engine that writes the script of every host."""

from __future__ import annotations

import shlex
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
    exports,
    is_tpu,
    kind_of,
    shape_of,
    supervised,
    timed,
)
from shardlib.processes.place import AUTO

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
# The engine: the script that every host of a job runs.
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
        _failures(job, settings),
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


def _failures(job: Job, settings: TpuVmSettings) -> list[str]:
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
