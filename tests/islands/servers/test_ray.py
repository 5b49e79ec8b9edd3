"""The same over Ray actors, in a process of its own: Ray warns of much."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path

import pytest

import shardlib
from shardlib.islands import servers
from tests.islands.servers import jobs
from tests.processes import child, until

ROOT = Path(__file__).parents[3]
#: Two workers, one of which is killed, and a server that is killed; then what there is to tell.
SCRIPT = """\
import json, sys
import ray, shardlib
from shardlib import servers
from tests.islands.servers.jobs import slow_job
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
exchange = shardlib.Asynchronous(workers=2, servers=2, rule="sgd", rate=0.1)
trained = servers.train(slow_job, 80, exchange=exchange, devices=2, run=sys.argv[1], engine="ray",
                        upkeep=servers.Upkeep(save_every=1), say=lambda _: None)
ray.shutdown()
print(json.dumps(trained.metrics()))
"""


def wait_for(path: Path, lines: int) -> None:
    until(lambda: path.exists() and path.read_text().count("\n") >= lines, 90)


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="the package ray is not installed"
)
def test_a_run_of_ray_actors(tmp_path: Path) -> None:
    process = child("-c", SCRIPT, tmp_path)
    try:
        for worker in range(2):
            wait_for(tmp_path / f"worker-{worker}.jsonl", 5)
        for name in ("worker-1", "server-0"):
            os.kill(int((tmp_path / f"{name}.pid").read_text()), signal.SIGKILL)
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    found = json.loads(out.splitlines()[-1])
    assert len(found["losses"][0]) == 80 > len(found["losses"][1]) >= 5
    assert "worker 1 is gone; the others go on" in found["events"]
    assert any(one.startswith("server 0: it goes on at its checkpoint") for one in found["events"])
    for pushes, staleness in zip(found["pushes"], found["staleness"], strict=True):
        assert pushes == sum(staleness.values()) >= 85
    assert sum(found["losses"][0][-20:]) < sum(found["losses"][0][:20])


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_it_says_what_to_install() -> None:
    with pytest.raises(shardlib.MissingPackageError, match=r"pip install 'shardlib\[ray\]'"):
        servers.train(jobs.job, 1, exchange=shardlib.Asynchronous(), engine="ray")
