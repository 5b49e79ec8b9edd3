"""Scripts for Slurm: their text, and what a real Slurm makes of them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardlib.launch.clusters import SCRIPT, SlurmSettings, slurm
from shardlib.launch.job import Job
from shardlib.launch.submission import Submission, submit
from shardlib.processes.place import port_of_job
from tests.launch import slurm_cluster

LLAMA = Job(
    name="llama",
    command=("train", "--run", "/runs/llama"),
    topology="16*h100:8",
    run="/runs/llama",
    seconds=86400,
)
#: Exit codes of the starts of a program, the first one first; each start writes down where it was.
#: No process ends before all have started, so that they agree on which start it is.
PROGRAM = """\
import json, os, signal, sys, time
from pathlib import Path
from shardlib.processes.place import read_place
place = read_place(os.environ)
starts = Path(f"starts-{place.process}")
with starts.open("a") as file:
    line = [str(place), os.environ["SLURMD_NODENAME"], os.environ.get("GREETING")]
    file.write(json.dumps(line) + "\\n")
def count(process):
    path = Path(f"starts-{process}")
    return len(path.read_text().splitlines()) if path.exists() else 0
number = count(place.process)
while min(map(count, range(place.processes))) < number:
    time.sleep(0.05)
code, save, wait = json.loads(Path("plan.json").read_text())[number - 1]
if wait and not (wait == "others" and place.process == 0):
    code = 75
    def stopped(number, frame):
        Path(f"told-{place.process}").write_text(signal.Signals(number).name)
        sys.exit(code)
    signal.signal(signal.SIGUSR1, stopped)
    signal.signal(signal.SIGTERM, stopped)
    Path(f"waiting-{number}-{place.process}").touch()
    time.sleep(120)
while wait == "others" and not Path(f"waiting-{number}-1").exists():
    time.sleep(0.05)
if save and place.process == 0:
    Path(f"run/checkpoints/{number}").mkdir(parents=True)
sys.exit(code)
"""
JOINING = """\
import json, os
import jax
from jax.experimental import multihost_utils
from pathlib import Path
from shardlib.processes.place import read_place
place = read_place(os.environ)
jax.distributed.initialize(
    place.coordinator, place.processes, place.process, initialization_timeout=60
)
found = multihost_utils.process_allgather(jax.numpy.asarray(place.process + 1))
line = [jax.process_count(), jax.device_count(), sorted(map(int, found))]
Path(f"joined-{place.process}").write_text(json.dumps(line))
"""


def options(submission: Submission) -> dict[str, str]:
    """Options of the script, by name."""
    lines = [
        line.removeprefix("#SBATCH --")
        for line in submission.files[SCRIPT].splitlines()
        if line.startswith("#SBATCH")
    ]
    return {
        name: value for name, _, value in (shlex.split(line)[0].partition("=") for line in lines)
    }


def step(submission: Submission) -> list[str]:
    """Words of the line that starts the processes."""
    line = next(
        line for line in submission.files[SCRIPT].splitlines() if line.strip().startswith("srun")
    )
    return shlex.split(line.strip().removesuffix("&"))


def test_nodes_and_devices_are_those_of_the_topology():
    found = options(slurm(LLAMA))
    assert {
        name: found[name]
        for name in ("nodes", "ntasks-per-node", "gpus-per-node", "time", "job-name")
    } == {
        "nodes": "16",
        "ntasks-per-node": "1",
        "gpus-per-node": "8",
        "time": "1-00:00:00",
        "job-name": "llama",
    }
    assert found.keys() >= {"exclusive", "requeue", "signal"}
    wanted = "task python -m shardlib train --run /runs/llama"
    assert step(slurm(LLAMA))[-7:] == wanted.split()


def test_settings_reach_their_options():
    settings = SlurmSettings(
        partition="gpu",
        account="a1",
        qos="high",
        constraint="[a|b]&ib",
        reservation="r",
        gpus="gres",
        gpu_type="h100",
        exclusive=False,
        cpus=12,
        chain=3,
        notice_seconds=300,
        options=("--comment=night",),
    )
    submission = slurm(
        Job(name="small", command=("python", "train.py"), topology="h100:4", host_processes=4),
        settings,
    )
    found = options(submission)
    assert (
        found
        | {
            "partition": "gpu",
            "account": "a1",
            "qos": "high",
            "constraint": "[a|b]&ib",
            "reservation": "r",
            "gres": "gpu:h100:4",
            "cpus-per-task": "12",
            "dependency": "singleton",
            "signal": "B:USR1@300",
            "comment": "night",
            "ntasks-per-node": "4",
        }
        == found
    )
    assert not found.keys() & {"exclusive", "gpus-per-node", "time"}
    assert [words[0] for words in submission.commands] == ["rm", "sbatch", "sbatch", "sbatch"]
    assert "scontrol requeue" not in submission.files[SCRIPT]


def test_a_container_sees_the_run_and_the_folder_of_the_user():
    job = Job(
        name="llama",
        command=("train",),
        topology="16*h100:8",
        image="nvcr.io#nvidia/jax:26.01",
        run="runs/first",
    )
    words = step(slurm(job, SlurmSettings(workdir="/home/me", mounts=("/data:/data",))))
    assert "--container-image=nvcr.io#nvidia/jax:26.01" in words
    assert (
        "--container-mounts=/home/me:/home/me,/home/me/runs/first:/home/me/runs/first,/data:/data"
        in words
    )
    assert "--container-workdir=/home/me" in words


def test_python_and_script_agree_on_the_port(tmp_path: Path):
    line = next(
        line
        for line in slurm(LLAMA).files[SCRIPT].splitlines()
        if line.startswith("export SHARDLIB_COORDINATOR")
    )
    for number in (7, 3999, 4000, 123456):
        done = subprocess.run(
            ["bash", "-c", f"address=a; SLURM_JOB_ID={number}; {line}; echo $SHARDLIB_COORDINATOR"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == f"a:{port_of_job(number)}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm_cluster.Cluster]:
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # paths of sockets must be short
    try:
        with slurm_cluster.cluster(folder) as found:
            yield found
        assert slurm_cluster.left_behind(folder) == []
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Submitted:
    """A job in a folder of its own on the cluster."""

    def __init__(
        self,
        cluster: slurm_cluster.Cluster,
        patch: pytest.MonkeyPatch,
        name: str,
        program: str = PROGRAM,
        plan: object = (),
        topology: str = "2*cpu:1",
        **fields: object,
    ) -> None:
        self.cluster, self.name, self.folder = cluster, name, cluster.folder / name
        self.folder.mkdir()
        (self.folder / "program.py").write_text(program)
        (self.folder / "plan.json").write_text(json.dumps(plan))
        for variable in [
            variable for variable in os.environ if variable.startswith(("SLURM", "SHARDLIB_"))
        ]:
            patch.delenv(variable)
        for variable in ("PATH", "SLURM_CONF"):
            patch.setenv(variable, cluster.environment[variable])
        settings = {key: fields.pop(key) for key in ("chain",) if key in fields}
        job = Job(
            name=name,
            command=(sys.executable, "program.py"),
            topology=topology,
            run="run",
            environment={"PYTHONPATH": str(Path(__file__).parents[2]), "GREETING": "it's"},
            **fields,
        )
        self.ids = submit(
            slurm(
                job,
                SlurmSettings(
                    interface="lo", workdir=str(self.folder), exclusive=False, **settings
                ),
            ),
            self.folder,
        ).split()

    def over(self) -> None:
        """Waits until the script has ended; what Slurm has to clean up after it takes seconds."""
        self.cluster.until(lambda: not set(self.cluster.states(self.name)) - {"COMPLETING"})

    def gone(self) -> None:
        """Waits until no job of the name is left, nor comes back."""
        self.cluster.until(lambda: not self.cluster.states(self.name))

    def waits(self, start: int = 1) -> None:
        self.cluster.until(
            lambda: all(
                (self.folder / f"waiting-{start}-{process}").exists() for process in range(2)
            )
        )

    def notice(self) -> None:
        """What Slurm does before the time limit of a job."""
        self.cluster("scancel", "--signal=USR1", "--batch", self.ids[0])

    def starts_now(self) -> None:
        """Slurm lets a job that is back in the queue wait until its credentials of before have
        expired; nobody has that time here.
        """
        self.cluster.until(lambda: self.cluster.states(self.name) == ["PENDING"])
        self.cluster("scontrol", "update", f"JobId={self.ids[0]}", "StartTime=now")

    def starts(self, process: int = 0) -> list[list[str]]:
        return [
            json.loads(line)
            for line in (self.folder / f"starts-{process}").read_text().splitlines()
        ]

    @property
    def ended(self) -> str | None:
        path = self.folder / "ended"
        return path.read_text().strip() if path.exists() else None


#: What programs do at a start: their code, whether they save, and whether they wait for a signal
#: first.
CRASH, SAVE_AND_CRASH, MISTAKE, DONE, STOPPED, ONE_CRASHES = (
    (1, False, False),
    (1, True, False),
    (2, False, False),
    (0, False, False),
    (75, False, True),
    (1, False, "others"),
)
#: Starts of jobs with one restart, how many there are, and what is written at the end.
CRASHES = {
    "once": ([CRASH, DONE], 2, "0"),
    "ever": ([CRASH] * 3, 2, "1"),
    "progress": ([SAVE_AND_CRASH] * 2 + [CRASH] * 2, 3, "1"),
    "mistake": ([MISTAKE] * 2, 1, "2"),
    "one": ([ONE_CRASHES] * 3, 2, None),
}


@pytest.fixture(scope="module")
def jobs(cluster: slurm_cluster.Cluster) -> Iterator[dict[str, Submitted]]:
    """All jobs, at once: Slurm takes seconds for each that nobody has to spend one after the
    other.
    """
    with pytest.MonkeyPatch.context() as patch:
        found = [
            Submitted(cluster, patch, "join", JOINING),
            Submitted(cluster, patch, "later", plan=[STOPPED, DONE]),
            Submitted(cluster, patch, "chain", plan=[STOPPED, DONE], chain=3),
            Submitted(cluster, patch, "cancel", plan=[STOPPED] * 2),
            *(
                Submitted(
                    cluster, patch, name, plan=plan, topology="cpu:2", host_processes=2, restarts=1
                )
                for name, (plan, _, _) in CRASHES.items()
            ),
        ]
        yield {job.name: job for job in found}


def test_processes_on_two_nodes_join(cluster, jobs):
    job = jobs["join"]
    job.over()
    assert job.ended == "0", cluster.report()
    assert [json.loads((job.folder / f"joined-{process}").read_text()) for process in range(2)] == [
        [2, 2 * 8, [1, 2]]
    ] * 2


def test_a_job_that_is_told_to_save_goes_on_later(jobs):
    job = jobs["later"]
    job.waits()
    job.notice()
    job.starts_now()
    job.over()
    assert [(job.folder / f"told-{process}").read_text() for process in range(2)] == ["SIGUSR1"] * 2
    where = f"127.0.0.1:{port_of_job(int(job.ids[0]))} (shardlib launch)"
    assert [job.starts(process) for process in range(2)] == [
        [[f"process {process} of 2, coordinator {where}", f"n{process}", "it's"]] * 2
        for process in range(2)
    ]
    assert job.ended == "0"


def test_a_chain_goes_on_until_the_run_has_ended(cluster, jobs):
    job = jobs["chain"]
    assert len(set(job.ids)) == 3
    job.waits()
    assert sorted(cluster.states("chain")) == ["PENDING", "PENDING", "RUNNING"]
    job.notice()
    job.over()
    assert len(job.starts()) == 2
    assert job.ended == "0"
    assert {path.name for path in job.folder.glob("chain-*.log")} == {
        f"chain-{number}.log" for number in job.ids
    }


def test_a_cancelled_job_stays_cancelled(cluster, jobs):
    job = jobs["cancel"]
    job.waits()
    cluster("scancel", "--name=cancel")
    job.gone()
    assert (job.folder / "told-0").read_text() == "SIGTERM"
    assert len(job.starts()) == 1
    assert job.ended is None


def test_crashes_start_again_so_often_without_a_new_checkpoint(cluster, jobs):
    for name in CRASHES:
        jobs[name].over()
    assert {name: (len(jobs[name].starts()), jobs[name].ended) for name in CRASHES} == {
        name: (starts, ended) for name, (_, starts, ended) in CRASHES.items()
    }, cluster.report()
    assert jobs["once"].starts(1)[0][0].startswith("process 1 of 2")
    assert (jobs["one"].folder / "told-1").read_text() == "SIGTERM"
