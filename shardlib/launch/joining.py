"""`join`: the first thing that every process of a job does, to find the others.

    import shardlib
    shardlib.join()        # before anything else of JAX

`shardlib train` does so by itself, and a process that is alone goes on as it is. Whoever started
the processes has said in their environment which of them is which (`shardlib.processes.place`).
First all of them meet without JAX (`roll_call`), then JAX's own coordination service is started,
with everything that it would otherwise guess: address, numbers, devices.

A process that fails after that must not wait for the others in JAX's orderly end, which waits for
processes that may wait for this one: it says what is wrong and ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from shardlib import _jax_compat
from shardlib.errors import LaunchError, ShardlibError
from shardlib.launch.meeting import address_here, call, wait_for_listener
from shardlib.processes.code import versions
from shardlib.processes.devices import set_cpu_devices
from shardlib.processes.place import (
    Place,
    Watchdog,
    read_place,
    split_address,
)

#: Seconds without a sign of life of a process after which JAX's service ends all others.
HEARTBEAT_SECONDS = 100
#: Seconds that a process waits at its orderly end for the others to come to theirs.
SHUTDOWN_SECONDS = 300
#: Seconds that a process which fails waits for others that fail too, so that each can say why.
LEAVE_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Joined:
    """This process among all.

    Attributes:
        process: number of this one.
        processes: how many there are.
        seconds: that joining took, of which most is waiting for the last to come.
        place: what the environment said.
    """

    process: int
    processes: int
    seconds: float
    place: Place


_joined: Joined | None = None


def join(environ: Mapping[str, str] | None = None) -> Joined | None:
    """Finds the other processes of the job, once; to be called before anything else of JAX.

    Args:
        environ: variables that say which process this is (`shardlib.processes.place`); by default
            those of this process.

    Returns:
        This process among all; None where it is alone. Later calls give the first answer again.

    Raises:
        LaunchError: the variables contradict each other, processes are missing or there twice, they
            do not run the same, the port is taken, or JAX has been used already.
    """
    global _joined
    if _joined is not None:
        return _joined
    place = read_place(os.environ if environ is None else environ)
    if place is None:
        return None
    if jax.distributed.is_initialized():
        raise LaunchError(
            "jax.distributed.initialize has been called already\nTry: call shardlib.join() in its"
            " place"
        )
    seconds = _meet(place)
    coordination = _jax_compat.coordination()
    assert coordination is not None
    _, process, processes = coordination
    _joined = Joined(process=process, processes=processes, seconds=seconds, place=place)
    _beat(os.environ if environ is None else environ, process)
    sys.excepthook = _failed
    return _joined


def leave(code: int) -> None:
    """Ends this process with an exit code because something failed. Where all fail alike they end
    in order; where the others go on it does not wait for them.

    Returns only where this process is alone.
    """
    coordination = _jax_compat.coordination()
    if coordination is None or coordination[2] == 1:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        coordination[0].wait_at_barrier("shardlib/leave", int(LEAVE_SECONDS * 1000))
        jax.distributed.shutdown()
    os._exit(code)


def _meet(place: Place) -> float:
    """The roll call, and JAX's service; gives the seconds of the first."""
    if place.simulated is not None:
        set_cpu_devices(place.simulated)
    try:
        if place.automatic:
            jax.distributed.initialize(
                initialization_timeout=place.seconds,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            )
            return 0.0
        seconds = call(place, versions())
        if place.process:
            wait_for_listener(place)
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process,
            local_device_ids=device_ids(place, os.environ),
            cluster_detection_method="deactivate",
            initialization_timeout=place.seconds,
            coordinator_bind_address=_bind_address(place) if place.process == 0 else None,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
        return seconds
    except (RuntimeError, ValueError) as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(
            f"{place} cannot join the others: {error}\nTry: call shardlib.join() before anything"
            " else of JAX"
        ) from error


def _bind_address(place: Place) -> str:
    """Returns the address on which JAX's service is to listen; without it, it would listen on all
    interfaces.
    """
    address = address_here(place)
    return f"{f'[{address}]' if ':' in address else address}:{split_address(place.coordinator)[1]}"


def _beat(environ: Mapping[str, str], process: int) -> None:
    """Says every second that this process lives, where somebody asks for that."""
    folder = environ.get("SHARDLIB_HEARTBEATS")
    if folder:
        atexit.register(Watchdog(Path(folder) / f"rank-{process}.json", rank=process).close)


def _failed(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> Any:
    """Handles an error that nobody caught: its words, and the end, with 2 for a mistake that
    another start would not mend.
    """
    sys.__excepthook__(kind, error, traceback)
    leave(
        130
        if issubclass(kind, KeyboardInterrupt)
        else 2
        if isinstance(error, ShardlibError) and not getattr(error, "again", False)
        else 1
    )


# --------------------------------------------------------------------------------------------------
# The devices of its host that belong to this process.
#
# JAX sees all GPUs of a host. Where several processes share them, each is told which are its own,
# evenly and in order. JAX's own guess is one GPU for each task of Slurm or Open MPI, whoever asked
# for what; it is not used.

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
