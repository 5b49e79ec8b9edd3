"""Ray: the command that submits a job.

As a Ray job whose entrypoint is `shardlib.launching.engines.ray_driver`: it reserves a node for
every host and starts the processes there. shardlib must be installed on the nodes.

Formats: docs.ray.io/en/latest/cluster/running-applications/job-submission/cli.html (read 2026-11,
Ray 2.60).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from shardlib.errors import LaunchError, raise_all
from shardlib.launching.engines.ray_hosts import RayHosts
from shardlib.launching.engines.shared.shell import check_job, check_one_line, common_place, inside
from shardlib.launching.engines.shared.submission import Submission
from shardlib.launching.engines.shared.tpus import is_tpu
from shardlib.launching.job import Job
from shardlib.untrusted.json_types import JsonMapping


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """What Ray has to know beyond the job.

    Attributes:
        address: of the cluster's job server, "http://head:8265"; None for that of
            RAY_API_SERVER_ADDRESS.
        upload: folder of this machine that Ray copies to all nodes; the processes start in it.
        workdir: folder that all nodes have already, in which the processes start; instead of
            `upload`.
        cpus: cores that are reserved on every node.
        wait_seconds: for nodes that are not there yet.

    Raises:
        LaunchError: fields that no job can have, all of them listed.
    """

    address: str | None = None
    upload: str | None = None
    workdir: str | None = None
    cpus: int = 1
    wait_seconds: int = 3600

    def __post_init__(self) -> None:
        failures = check_one_line(self) + [
            f"{name} is {value}; it must be at least 1"
            for name, value in (("cpus", self.cpus), ("wait_seconds", self.wait_seconds))
            if value < 1
        ]
        failures += (
            ["upload and workdir exclude each other: processes start in one folder"]
            if self.upload and self.workdir
            else []
        )
        if failures:
            raise_all(LaunchError, "settings of Ray are not usable", failures)


def ray(job: Job, settings: RaySettings | None = None) -> Submission:
    """The command that submits a job to Ray.

    Args:
        settings: of the cluster; by default those of `RaySettings()`.
    """
    settings = settings or RaySettings()
    failures = (
        [
            f"{job.topology} is made of TPUs, whose hosts this driver does not know; --kubernetes"
            " and --tpu-vm do"
        ]
        if is_tpu(job)
        else []
    )
    failures += (
        [
            f"the folder {job.run} of the run is relative, and nodes have no common folder; it"
            " needs a whole path"
        ]
        if job.run is not None
        and settings.workdir is None
        and not job.run.startswith("/")
        and "://" not in job.run
        else []
    )
    failures += (
        ["Ray copies no folder into a container: `upload` and an image exclude each other"]
        if job.image and settings.upload
        else []
    )
    check_job(job, "Ray", failures)
    address = (f"--address={settings.address}",) if settings.address else ()
    command = (
        "ray",
        "job",
        "submit",
        *address,
        "--submission-id",
        job.name,
        "--no-wait",
        *((f"--working-dir={settings.upload}",) if settings.upload else ()),
        *(("--runtime-env-json", json.dumps({"image_uri": job.image})) if job.image else ()),
        "--",
        "python",
        "-m",
        "shardlib.launching.engines.ray_driver",
        ray_hosts(job, settings).to_word(),
    )
    return Submission(
        engine="Ray",
        files={},
        commands=(command,),
        notes=(f"the driver is told: {ray_hosts(job, settings).to_json()}",),
        later=tuple(
            (what, ("ray", "job", verb, *address, *extra, job.name))
            for what, verb, extra in (
                ("look", "status", ()),
                ("log", "logs", ("--follow",)),
                ("stop", "stop", ()),
            )
        ),
    )


class Ray:
    """The engine `--ray`."""

    name = "ray"
    help = "Submit to a Ray cluster."
    settings = RaySettings

    def defaults(self) -> JsonMapping:
        """See `Engine`."""
        return {}

    def submission(self, job: Job, settings: RaySettings) -> Submission:
        """See `ray`."""
        return ray(job, settings)


def ray_hosts(job: Job, settings: RaySettings) -> RayHosts:
    """What the driver is told."""
    gpus = {} if job.machine.chip.vendor == "cpu" else {"GPU": job.devices_per_host}
    return RayHosts(
        words=job.words,
        hosts=job.hosts,
        host_processes=job.host_processes,
        place=common_place(job),
        resources={**gpus, "CPU": settings.cpus},
        environment=job.environment,
        workdir=settings.workdir,
        run=job.run and inside(settings.workdir, job.run),
        restarts=job.restarts,
        seconds=job.seconds,
        wait_seconds=settings.wait_seconds,
    )
