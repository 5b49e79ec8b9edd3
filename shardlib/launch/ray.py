"""Ray: its settings, and the command that submits a job.

As a Ray job whose entrypoint is `shardlib.launch.ray_driver`: it reserves a node for
every host and starts the processes there. shardlib must be installed on the nodes.

Formats: docs.ray.io/en/latest/cluster/running-applications/job-submission/cli.html (read 2026-11,
Ray 2.60).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shardlib.errors import LaunchError, raise_all
from shardlib.launch.job import Job, too_small
from shardlib.launch.submission import (
    Engine,
    Submission,
    check_job,
    check_one_line,
    common_place,
    inside,
    is_tpu,
)
from shardlib.untrusted.data import construct, parse_json, shown


@dataclass(frozen=True, kw_only=True)
class RayHosts:
    """The hosts of the driver, as one word.

    Attributes:
        words: the command of every process.
        hosts: number of nodes.
        host_processes: processes on each.
        place: variables by which processes find each other, as far as they are the same for all.
        resources: of each host, as Ray names them: "GPU", "CPU".
        environment: variables of every process.
        workdir: folder of the processes; None for that of the actor, which Ray sets to the working
            directory of the Ray job.
        run: folder of the run, or None.
        restarts: starts in a row without a new checkpoint, after the first.
        seconds: time limit of one start, or None.
        wait_seconds: for the nodes.
    """

    words: tuple[str, ...]
    hosts: int
    host_processes: int = 1
    place: Mapping[str, str]
    resources: Mapping[str, float]
    environment: Mapping[str, str]
    workdir: str | None = None
    run: str | None = None
    restarts: int = 3
    seconds: int | None = None
    wait_seconds: int = 3600

    def to_json(self) -> str:
        """All fields."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RayHosts:
        """The opposite of `to_json`."""
        return construct(cls, parse_json(text, "the job", LaunchError), "the job", LaunchError)

    def to_word(self) -> str:
        """All fields as one word of letters, digits, "-" and "_": Ray puts the words of an
        entrypoint together with the quoting of Windows, and gives them to a shell of the head node,
        which would carry out what stands in them.
        """
        return base64.urlsafe_b64encode(self.to_json().encode()).decode().rstrip("=")

    @classmethod
    def from_word(cls, word: str) -> RayHosts:
        """The opposite of `to_word`."""
        try:
            text = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_", validate=True)
        except ValueError as error:
            raise LaunchError(
                f"the driver was given {shown(word)}, which is not a job\nTry: shardlib launch"
                " --ray, which starts it"
            ) from error
        return cls.from_json(text)


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """Settings of Ray beyond the job.

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
        failures = check_one_line(self) + too_small(self, cpus=1, wait_seconds=1)
        if self.upload and self.workdir:
            failures.append("upload and workdir exclude each other: processes start in one folder")
        if failures:
            raise_all(LaunchError, "settings of Ray are not usable", failures)


def ray(job: Job, settings: RaySettings | None = None) -> Submission:
    """The command that submits a job to Ray."""
    settings = settings or RaySettings()
    failures = (
        [
            f"{job.topology} is made of TPUs, whose hosts this driver does not know; --kubernetes"
            " and --tpu-vm do"
        ]
        if is_tpu(job)
        else []
    )
    if (
        job.run is not None
        and settings.workdir is None
        and not job.run.startswith("/")
        and "://" not in job.run
    ):
        failures.append(
            f"the folder {job.run} of the run is relative, and nodes have no common folder; it"
            " needs a whole path"
        )
    if job.image and settings.upload:
        failures.append(
            "Ray copies no folder into a container: `upload` and an image exclude each other"
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
        "shardlib.launch.ray_driver",
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


RAY = Engine(
    name="ray",
    help="Submit to a Ray cluster.",
    settings=RaySettings,
    submission=ray,
)


def ray_hosts(job: Job, settings: RaySettings) -> RayHosts:
    """Returns the hosts of the driver."""
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
