"""The place of a process: which of how many it is, and where they meet.

Whoever starts processes says so in their environment. `shardlib launch` sets the variables below;
where they are missing, those of the scheduler that started the process are read, so that `srun` and
`mpirun` work by themselves:

    SHARDLIB_COORDINATOR       HOST:PORT at which process 0 listens; HOST is an address that all
                               others reach, and the only one that it listens on
    SHARDLIB_PROCESSES         number of processes, or "auto" where JAX finds it out (Cloud TPU)
    SHARDLIB_PROCESS           number of this one
    SHARDLIB_HOST_PROCESSES    number of processes on this host, which share its devices; 1 if left
                               out
    SHARDLIB_HOST_PROCESS      number of this one among them
    SHARDLIB_HOST_DEVICES      CPU devices that this process simulates, where it is to use no
                               accelerator
    SHARDLIB_JOIN_SECONDS      how long to wait for the others
    SHARDLIB_START             a word that all processes of one start have in common, and those of
                               an earlier one that still run have not
    SHARDLIB_SECRET            a word that all processes of the job know and nobody else, by which
                               they know each other at the roll call
    SHARDLIB_HEARTBEATS        folder in which this process says every second that it lives

>>> place = {"SHARDLIB_COORDINATOR": "10.0.0.1:7000", "SHARDLIB_PROCESSES": "4"}
>>> read_place({**place, "SHARDLIB_PROCESS": "3"}).process
3
>>> read_place({}) is None
True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardlib.errors import LaunchError, raise_all

#: Seconds that a process waits for the others; a pod that is pulled anew takes minutes.
JOIN_SECONDS = 300
AUTO = "auto"
#: Ports of coordinators: above those that systems give out by themselves (32768 to 60999).
FIRST_PORT = 61000
PORTS = 4000


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one process among all.

    Attributes:
        coordinator: HOST:PORT of process 0; empty where JAX finds it out.
        processes: how many there are; 0 where JAX finds it out.
        process: number of this one.
        host_processes: processes that share the devices of this host.
        host_process: number of this one among them.
        simulated: CPU devices of this process; None for the devices that JAX finds.
        seconds: how long to wait for the others.
        start: a word for this start; empty where nobody gave one.
        secret: a word that only processes of the job know; empty where nobody gave one.
        source: who said so, for messages: "shardlib launch", "Slurm", "Open MPI", ...
    """

    coordinator: str
    processes: int
    process: int
    host_processes: int = 1
    host_process: int = 0
    simulated: int | None = None
    seconds: int = JOIN_SECONDS
    start: str = ""
    secret: str = field(default="", repr=False)
    source: str = "shardlib launch"

    @property
    def hosts_differ(self) -> bool:
        """Whether some of the processes are on other hosts."""
        return self.processes > self.host_processes

    @property
    def automatic(self) -> bool:
        """Whether JAX finds out the rest."""
        return not self.processes

    def __str__(self) -> str:
        return (
            f"a process of this host, found by JAX ({self.source})"
            if self.automatic
            else (
                f"process {self.process} of {self.processes}, coordinator {self.coordinator}"
                f" ({self.source})"
            )
        )


def read_place(environ: Mapping[str, str]) -> Place | None:
    """The place of this process; None where it is alone."""
    common = _common(environ)
    if "SHARDLIB_PROCESSES" in environ:
        return replace(_ours(environ), **common)
    for reader in (_slurm, _open_mpi):
        place = reader(environ)
        if place is not None and place.processes > 1:
            return replace(place, **common)
    return None


def _common(environ: Mapping[str, str]) -> dict[str, Any]:
    """What may be said whoever starts the processes."""
    texts = {
        field: (name, environ[name])
        for field, name in (
            ("seconds", "SHARDLIB_JOIN_SECONDS"),
            ("simulated", "SHARDLIB_HOST_DEVICES"),
        )
        if name in environ
    }
    failures = [
        f"{name} is {text!r}; it needs a number from 1 on"
        for name, text in texts.values()
        if not (_number(text) and int(text))
    ]
    if failures:
        raise_all(LaunchError, "the environment of this process cannot be used", failures)
    return {
        **{field: int(text) for field, (_, text) in texts.items()},
        "start": environ.get("SHARDLIB_START", ""),
        "secret": environ.get("SHARDLIB_SECRET", ""),
    }


def _ours(environ: Mapping[str, str]) -> Place:
    if environ["SHARDLIB_PROCESSES"] == AUTO:
        return Place(coordinator="", processes=0, process=0)
    names = (
        "SHARDLIB_PROCESSES",
        "SHARDLIB_PROCESS",
        "SHARDLIB_HOST_PROCESSES",
        "SHARDLIB_HOST_PROCESS",
    )
    variables = {
        name: environ.get(name, default)
        for name, default in zip(names, ("", "", "1", "0"), strict=True)
    }
    failures = [
        f"{name} is {value!r}, which is no number"
        for name, value in variables.items()
        if not _number(value)
    ]
    coordinator = environ.get("SHARDLIB_COORDINATOR", "")
    if (
        not coordinator.rpartition(":")[0]
        or not _number(port := coordinator.rpartition(":")[2])
        or not 0 < int(port) < 1 << 16
    ):
        failures.append(f"SHARDLIB_COORDINATOR is {coordinator!r}; it needs HOST:PORT of process 0")
    if not failures:
        processes, process, host_processes, host_process = (int(variables[name]) for name in names)
        failures += (
            [f"SHARDLIB_PROCESS is {process} of {processes}; numbers run from 0"]
            if process >= processes
            else []
        )
        failures += (
            [f"SHARDLIB_HOST_PROCESS is {host_process} of {host_processes}; numbers run from 0"]
            if host_process >= host_processes
            else []
        )
        if not failures:
            return Place(
                coordinator=coordinator,
                processes=processes,
                process=process,
                host_processes=host_processes,
                host_process=host_process,
            )
    raise_all(
        LaunchError,
        "the environment does not say which process this is",
        failures,
        hint="start it with shardlib launch, srun or mpirun, or unset SHARDLIB_PROCESSES",
    )


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _slurm(environ: Mapping[str, str]) -> Place | None:
    """Of a task that srun started; the coordinator is on the first node of the step."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if any(name not in environ for name in names):
        return None
    nodes, job, tasks, task, local = (environ[name] for name in names)
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1"))
    return Place(
        coordinator=f"{first_host(nodes)}:{port_of_job(int(job))}",
        processes=int(tasks),
        process=int(task),
        host_processes=_evenly(per_node),
        host_process=int(local),
        source="Slurm",
    )


def _open_mpi(environ: Mapping[str, str]) -> Place | None:
    """Of a process that mpirun of Open MPI started on one host, or on several where the user names
    the coordinator.
    """
    names = (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    )
    if any(name not in environ for name in names):
        return None
    size, rank, local_size, local_rank = (int(environ[name]) for name in names)
    coordinator = environ.get("SHARDLIB_COORDINATOR", "")
    if not coordinator and local_size == size:
        digits = "".join(filter(str.isdigit, environ.get("PMIX_NAMESPACE", "0")))
        coordinator = f"127.0.0.1:{port_of_job(int(digits or 0))}"
    if not coordinator and size > 1:
        raise LaunchError(
            "mpirun does not say on which host process 0 is\nTry: mpirun -x"
            " SHARDLIB_COORDINATOR=HOST:PORT ..., with an address of that host which all others"
            " reach"
        )
    return Place(
        coordinator=coordinator,
        processes=size,
        process=rank,
        host_processes=local_size,
        host_process=local_rank,
        source="Open MPI",
    )


def first_host(nodes: str) -> str:
    """The first of a Slurm list of nodes.

    >>> first_host("node[007-015,20],other"), first_host("a1,b2"), first_host("gpu-[3,5]-ib")
    ('node007', 'a1', 'gpu-3-ib')
    """
    before, bracket, after_bracket = nodes.partition("[")
    if not bracket or "," in before:
        return before.partition(",")[0]
    inside, _, after = after_bracket.partition("]")
    return before + inside.partition(",")[0].partition("-")[0] + after.partition(",")[0]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, where the host of IPv6 may stand in brackets.

    >>> split_address("10.0.0.1:7000"), split_address("[fd00::1]:7000")
    (('10.0.0.1', 7000), ('fd00::1', 7000))
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def port_of_job(number: int) -> int:
    """A port for the coordinator of a job: the same on all hosts, another one for the next job."""
    return FIRST_PORT + number % PORTS


def _evenly(text: str) -> int:
    """Tasks of a node, of Slurm's "2(x3)" or "2"; of uneven ones the first."""
    return int(text.partition("(")[0].partition(",")[0])
