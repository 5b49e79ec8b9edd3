"""A Slurm cluster of several nodes on this machine: its own key, ports and folders, and no daemon
left behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
NODES = 2
#: `config_overrides`: nodes are as large as they say, whatever this machine has.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
JobRequeue=1
KillWait=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,sched_interval=1
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


class Cluster:
    """A running cluster; commands find it by `SLURM_CONF`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SLURM", "SHARDLIB_"))
            },
            "PATH": SEARCH,
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def __call__(self, *words: str) -> str:
        return subprocess.run(
            words,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
        ).stdout.strip()

    def states(self, name: str) -> list[str]:
        """States of the jobs of a name that are not over."""
        return self("squeue", "--noheader", f"--name={name}", "--format=%T").split()

    def until(self, done, seconds: float = 40.0) -> None:
        """Waits until something holds."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, self.report()
            time.sleep(0.2)

    def report(self) -> str:
        return self("squeue", "--long") + "".join(
            f"\n--- {path}\n{path.read_text()[-3000:]}" for path in self.folder.rglob("*.log")
        )


def why_not() -> str:
    """Why there can be no cluster here; empty where there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    return (
        f"Slurm's programs are not installed: {', '.join(missing)} (Debian: slurmctld, slurmd,"
        " slurm-client, munge)"
        if missing
        else ""
    )


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Starts the daemons as children, and ends them and whatever they have started."""
    controller, *ports = free_ports(1 + NODES)
    nodes = "\n".join(
        f"NodeName=n{i} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=16"
        " RealMemory=1024 State=UNKNOWN"
        for i, port in enumerate(ports)
    )
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            host=socket.gethostname(),
            controller=controller,
            user=_user(),
            folder=folder,
            nodes=nodes,
        )
    )
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    found = Cluster(folder)
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        log = (folder / f"{words[0]}-{len(daemons)}.log").open("wb")
        with log:
            daemons.append(
                subprocess.Popen(
                    words,
                    env=found.environment,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    try:
        start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munge.seed",
        )
        found.until(lambda: (folder / "munge.socket").exists())
        start("slurmctld", "-D", "-i")
        for i in range(NODES):
            start("slurmd", "-D", "-N", f"n{i}")
        _until_idle(found, daemons)
        yield found
    finally:
        _stop(found, daemons)


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _until_idle(found: Cluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and all(one.poll() is None for one in daemons):
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%D %t"],
            env=found.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.stdout.strip() == f"{NODES} idle":
            return
        time.sleep(0.2)
    pytest.skip(
        "Slurm's daemons are installed and do not run here: "
        + "".join(path.read_text()[-500:] for path in found.folder.glob("*.log"))
    )


def _stop(found: Cluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    """Cancels what runs, ends the daemons in the order in which they were started last, and then
    what is left of their sessions.
    """
    subprocess.run(
        ["scancel", "--user", _user()],
        env=found.environment,
        capture_output=True,
        check=False,
        timeout=30,
    )
    end = time.monotonic() + 60
    while (
        time.monotonic() < end
        and subprocess.run(
            ["squeue", "--noheader"],
            env=found.environment,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
    ):
        time.sleep(0.2)
    for one in reversed(daemons):
        one.terminate()
        try:
            one.wait(timeout=10)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()
    for pid in left_behind(found.folder):
        os.kill(pid, signal.SIGKILL)


def left_behind(folder: Path) -> list[int]:
    """Processes that this cluster has started, known by the configuration in their environment."""
    mark = f"SLURM_CONF={folder}/slurm.conf\0".encode()
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (
                mark in path.joinpath("environ").read_bytes() + b"\0"
                and int(path.name) != os.getpid()
            ):
                found.append(int(path.name))
        except OSError:
            continue
    return found
