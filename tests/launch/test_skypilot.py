"""Tasks for SkyPilot: what a node would run, and what SkyPilot's own parser makes of them, where it
is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardlib.launch.clouds import TASK, SkyPilotSettings, skypilot
from shardlib.launch.job import Job
from tests.processes import python

LLAMA = Job(
    name="llama",
    command=("train", "--run", "/runs/a"),
    topology="16*h100:8",
    image="image:1",
    run="/runs/a",
    environment={"ODD": "it's $(x)"},
)
SLICE = Job(name="llama", command=("train",), topology="v5e:4x8")
FULL = SkyPilotSettings(
    infra="gcp/us-central1",
    spot=True,
    setup=("pip install a", "pip install b"),
    file_mounts=("/runs=s3://bucket", "/code=code"),
)
#: What a node shows of its place.
SHOW = (
    "import json, os; from pathlib import Path;"
    " Path(os.environ['SHARDLIB_PROCESS']).write_text(json.dumps({k: v for k, v in"
    " os.environ.items() if k.startswith('SHARDLIB')}))"
)
PARSE = """\
import json, sys
import sky
for path in sys.argv[1:]:
    task = sky.Task.from_yaml(path)
    resources = next(iter(task.resources))
    asked = [resources.accelerators, resources.job_recovery]
    print(json.dumps([task.name, task.num_nodes, *asked, task.envs, task.setup, task.run]))
"""


def task(job: Job, settings: SkyPilotSettings | None = None) -> dict[str, Any]:
    return yaml.safe_load(skypilot(job, settings).files[TASK])


def test_nodes_and_devices_are_those_of_the_topology():
    found = task(LLAMA, FULL)
    assert (
        found["num_nodes"],
        found["resources"]["accelerators"],
        found["resources"]["image_id"],
    ) == (16, "H100:8", "docker:image:1")
    assert found["resources"]["job_recovery"] == {
        "max_restarts_on_errors": 3,
        "recover_on_exit_codes": [75, 86],
    }
    assert task(SLICE)["resources"]["accelerators"] == "tpu-v5litepod-32"
    assert task(SLICE)["num_nodes"] == 1
    assert found["file_mounts"] == {
        "/runs": {"source": "s3://bucket", "mode": "MOUNT"},
        "/code": "code",
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_every_process_has_its_place(processes: int, tmp_path: Path):
    job = Job(
        name="place",
        command=(sys.executable, "-c", SHOW),
        topology="2*cpu:2",
        host_processes=processes,
        seconds=60,
    )
    for node in range(2):
        subprocess.run(
            ["bash", "-c", task(job)["run"]],
            cwd=tmp_path,
            check=True,
            timeout=60,
            env={
                "PATH": os.environ["PATH"],
                "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
                "SKYPILOT_NODE_RANK": str(node),
                "SKYPILOT_NUM_NODES": "2",
            },
        )
    places = [json.loads((tmp_path / str(process)).read_text()) for process in range(2 * processes)]
    assert [
        (place["SHARDLIB_PROCESS"], place["SHARDLIB_HOST_PROCESS"], place["SHARDLIB_PROCESSES"])
        for place in places
    ] == [(str(i), str(i % processes), str(2 * processes)) for i in range(2 * processes)]
    assert {place["SHARDLIB_COORDINATOR"].rpartition(":")[0] for place in places} == {"10.0.0.1"}


@pytest.mark.skipif(
    importlib.util.find_spec("sky") is None, reason="the package skypilot is not installed"
)
def test_skypilot_reads_the_tasks(tmp_path: Path):
    jobs = {
        "gpus": (
            LLAMA,
            SkyPilotSettings(infra="gcp/us-central1", setup=("pip install a", "pip install b")),
        ),
        "slice": (SLICE, SkyPilotSettings(infra="gcp")),
        "cpus": (
            Job(name="small", command=("train",), topology="2*cpu:2"),
            SkyPilotSettings(managed=False),
        ),
    }
    for name, (job, settings) in jobs.items():
        (tmp_path / name).write_text(skypilot(job, settings).files[TASK])
    done = python(
        "-c",
        PARSE,
        *(str(tmp_path / name) for name in jobs),
        variables={"HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    gpus, tpus, cpus = (json.loads(line) for line in done.stdout.splitlines()[-3:])
    assert gpus[:3] == ["llama", 16, {"H100": 8}]
    assert gpus[3]["recover_on_exit_codes"] == [75, 86]
    assert gpus[4].items() >= LLAMA.environment.items()
    assert gpus[5].split("\n")[:2] == ["pip install a", "pip install b"]
    assert tpus[1:3] == [1, {"tpu-v5litepod-32": 1}]
    assert cpus[:3] == ["small", 2, None]
