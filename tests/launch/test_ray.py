"""Jobs on Ray: the command, and hosts of a real Ray cluster of several nodes on this machine, where
Ray is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from shardlib.launch.clusters import RayHosts, RaySettings, ray, ray_hosts
from shardlib.launch.job import Job
from shardlib.launch.ray_driver import Host
from tests.processes import python

ROOT = Path(__file__).parents[2]
LLAMA = Job(
    name="llama",
    command=("train", "--run", "/runs/a"),
    topology="16*h100:8",
    run="/runs/a",
    environment={"A": "it's"},
    host_processes=2,
    restarts=5,
    seconds=60,
)
#: Exit codes of the starts of a program, the first one first. No process ends before all have
#: started, so that they agree on which start it is.
PROGRAM = """\
import json, os, sys, time
from pathlib import Path
from shardlib.processes.place import read_place
place = read_place(os.environ)
starts = Path(f"starts-{place.process}")
with starts.open("a") as file:
    said = [os.environ["GREETING"], os.environ["SHARDLIB_HOST_DEVICES"]]
    line = [place.coordinator, place.processes, place.host_process, *said]
    file.write(json.dumps(line) + "\\n")
def count(process):
    path = Path(f"starts-{process}")
    return len(path.read_text().splitlines()) if path.exists() else 0
number = count(place.process)
while min(map(count, range(place.processes))) < number:
    time.sleep(0.05)
sys.exit(json.loads(Path("plan.json").read_text())[number - 1])
"""
#: A cluster of two nodes, and the job on it; in a process of its own, as Ray warns of much.
CLUSTER = """\
import sys
import ray
from ray.cluster_utils import Cluster
from shardlib.launch.ray_driver import RayHosts, Stop, drive
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
ray.init(address=cluster.address)
codes = []
try:
    for text in sys.argv[1:]:
        try:
            codes.append(drive(RayHosts.from_json(text), Stop()))
        except Exception as error:
            codes.append(str(error))
finally:
    ray.shutdown()
    cluster.shutdown()
import json
print(json.dumps(codes))
"""


def test_the_driver_is_told_the_job():
    command = ray(
        LLAMA, RaySettings(address="http://head:8265", upload="/home/me/project", cpus=8)
    ).commands[0]
    wanted = "ray job submit --address=http://head:8265 --submission-id llama --no-wait"
    assert command[:8] == (*wanted.split(), "--working-dir=/home/me/project")
    assert RayHosts.from_word(command[-1]) == RayHosts(
        words=("python", "-m", "shardlib", "train", "--run", "/runs/a"),
        hosts=16,
        host_processes=2,
        place={"SHARDLIB_PROCESSES": "32", "SHARDLIB_HOST_PROCESSES": "2"},
        resources={"GPU": 8, "CPU": 8},
        environment={"A": "it's"},
        run="/runs/a",
        restarts=5,
        seconds=60,
    )


@pytest.mark.parametrize(("codes", "code"), [((0, 0), 0), ((0, 3), 3), ((75, 75), 75)])
def test_processes_of_a_host(codes: tuple[int, int], code: int, tmp_path: Path):
    program = (
        "import os, pathlib, sys; p = os.environ['SHARDLIB_PROCESS'];"
        " pathlib.Path(p).write_text(os.environ['SHARDLIB_HOST_PROCESS']); sys.exit({'4':"
        f" {codes[0]}, '5': {codes[1]}}}[p])"
    )
    job = RayHosts(
        words=(sys.executable, "-c", program),
        hosts=4,
        host_processes=2,
        place={},
        resources={},
        environment={},
        workdir=str(tmp_path),
    )
    assert Host().run(job.to_json(), 2, "127.0.0.1:1", "first") == code
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"4": "0", "5": "1"}


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="the package ray is not installed"
)
def test_hosts_of_a_ray_cluster(tmp_path: Path):
    plans = {"crash": [1, 0], "ever": [1] * 4, "mistake": [2, 0], "large": [0]}
    jobs: list[str] = []
    for name, plan in plans.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        (folder / "plan.json").write_text(json.dumps(plan))
        job = Job(
            name=name,
            command=(sys.executable, "program.py"),
            topology=f"{3 if name == 'large' else 2}*cpu:2",
            host_processes=2,
            restarts=1,
            environment={"PYTHONPATH": str(ROOT), "GREETING": "it's"},
        )
        jobs.append(
            ray_hosts(
                job, RaySettings(workdir=str(folder), wait_seconds=5 if name == "large" else 60)
            ).to_json()
        )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = python("-c", CLUSTER, *jobs, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    *codes, large = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0, 1, 2]
    assert "Ray has no 3 nodes" in large
    starts = {
        name: [
            [
                json.loads(line)
                for line in (tmp_path / name / f"starts-{process}").read_text().splitlines()
            ]
            for process in range(4)
        ]
        for name in list(plans)[:3]
    }
    assert [len(starts[name][0]) for name in starts] == [2, 2, 1]
    assert [[line[1:] for line in lines] for lines in starts["crash"]] == [
        [[4, process % 2, "it's", "1"]] * 2 for process in range(4)
    ]
    assert len({lines[-1][0] for lines in starts["crash"]}) == 1
