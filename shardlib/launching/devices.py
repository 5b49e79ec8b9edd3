"""The devices of its host that belong to this process.

JAX sees all GPUs of a host. Where several processes share them, each is told which are its own,
evenly and in order. JAX's own guess is one GPU for each task of Slurm or Open MPI, whoever asked
for what; it is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardlib.errors import LaunchError
from shardlib.processes.place import Place

#: Folder with one entry for each NVIDIA GPU of the host.
GPUS = Path("/proc/driver/nvidia/gpus")


def device_ids(place: Place, environ: Mapping[str, str], gpus: Path = GPUS) -> list[int] | None:
    """Numbers of the GPUs of this process, counted among those that it could see; None for all of
    them.
    """
    if place.host_processes == 1 or place.simulated is not None:
        return None
    count = visible_gpus(environ, gpus)
    if count <= 1:
        return None  # none at all, or the one that the scheduler has picked for this process
    if count % place.host_processes:
        raise LaunchError(
            f"{place.host_processes} processes of this host cannot share {count} GPUs evenly\nTry:"
            f" a number of processes that divides {count}, or CUDA_VISIBLE_DEVICES"
        )
    each = count // place.host_processes
    return list(range(place.host_process * each, (place.host_process + 1) * each))


def visible_gpus(environ: Mapping[str, str], gpus: Path = GPUS) -> int:
    """Number of NVIDIA GPUs that a process can see."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return len([word for word in environ["CUDA_VISIBLE_DEVICES"].split(",") if word.strip()])
    return len([*gpus.iterdir()]) if gpus.is_dir() else 0
