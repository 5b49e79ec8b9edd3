from __future__ import annotations

from pathlib import Path

import pytest

from shardlib.errors import LaunchError
from shardlib.launch.joining import address_here, device_ids
from shardlib.processes.place import Place, read_place

OURS = {"SHARDLIB_COORDINATOR": "10.0.0.1:7000", "SHARDLIB_PROCESSES": "4", "SHARDLIB_PROCESS": "3"}
SLURM = {
    "SLURM_STEP_NODELIST": "n[3-4]",
    "SLURM_JOB_ID": "4001",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "prterun-vm-77@1",
}


def test_whoever_started_it_says_which_process_it_is():
    assert read_place(OURS) == Place(coordinator="10.0.0.1:7000", processes=4, process=3)
    assert read_place(SLURM) == Place(
        coordinator="n3:61001", processes=4, process=2, host_processes=2, source="Slurm"
    )
    assert read_place(OPEN_MPI) == Place(
        coordinator="127.0.0.1:61771",
        processes=2,
        process=1,
        host_processes=2,
        host_process=1,
        source="Open MPI",
    )
    both = read_place(
        {
            **SLURM,
            **OURS,
            "SHARDLIB_JOIN_SECONDS": "9",
            "SHARDLIB_HOST_DEVICES": "2",
            "SHARDLIB_START": "a",
        }
    )
    assert both == Place(
        coordinator="10.0.0.1:7000", processes=4, process=3, seconds=9, simulated=2, start="a"
    )
    automatic = read_place({"SHARDLIB_PROCESSES": "auto"})
    assert automatic is not None and automatic.automatic
    assert read_place({**SLURM, "SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SHARDLIB_PROCESS": "4"}, "SHARDLIB_PROCESS is 4 of 4"),
        ({"SHARDLIB_COORDINATOR": "host"}, "needs HOST:PORT"),
        ({"SHARDLIB_PROCESSES": "many"}, "SHARDLIB_PROCESSES is 'many', which is not a number"),
        ({"SHARDLIB_JOIN_SECONDS": "soon"}, "SHARDLIB_JOIN_SECONDS is 'soon'"),
        ({"SHARDLIB_HOST_DEVICES": "0"}, "SHARDLIB_HOST_DEVICES is '0'"),
        ({"SHARDLIB_PROCESSES": "²"}, "SHARDLIB_PROCESSES is"),
        ({"SHARDLIB_PROCESS": "9" * 5000}, "SHARDLIB_PROCESS is"),
        ({"SHARDLIB_JOIN_SECONDS": "³"}, "SHARDLIB_JOIN_SECONDS is"),
        ({"SHARDLIB_COORDINATOR": "h:99999"}, "SHARDLIB_COORDINATOR"),
        ({"SHARDLIB_COORDINATOR": "h:0"}, "SHARDLIB_COORDINATOR"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, str], message: str):
    with pytest.raises(LaunchError, match=message):
        read_place({**OURS, **change})


def test_processes_of_a_host_share_its_gpus(tmp_path: Path):
    for number in range(8):
        (tmp_path / f"0000:0{number}").mkdir()
    place = Place(coordinator="h:1", processes=8, process=5, host_processes=4, host_process=1)
    assert device_ids(place, {}, tmp_path) == [2, 3]
    assert device_ids(place, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, tmp_path) == [1]
    assert device_ids(place, {"CUDA_VISIBLE_DEVICES": "6"}, tmp_path) is None
    assert device_ids(place, {}, tmp_path / "none") is None
    assert device_ids(Place(coordinator="h:1", processes=2, process=1), {}, tmp_path) is None
    with pytest.raises(LaunchError, match="4 processes of this host cannot share 6 GPUs evenly"):
        device_ids(place, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, tmp_path)


def test_an_address_that_other_hosts_cannot_reach():
    one_host = Place(coordinator="localhost:7000", processes=2, process=0, host_processes=2)
    assert address_here(one_host) in ("127.0.0.1", "::1")
    with pytest.raises(
        LaunchError,
        match=(
            r"only processes of its own host reach it, and 2 of 4 are on others\nTry:"
            r" SHARDLIB_COORDINATOR"
        ),
    ):
        address_here(Place(coordinator="127.0.0.1:7000", processes=4, process=0, host_processes=2))
    with pytest.raises(LaunchError, match="not known here"):
        address_here(Place(coordinator="no.such.host.invalid:7000", processes=2, process=0))
