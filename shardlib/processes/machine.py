"""This machine: its CPU as several simulated devices, and the folder for what is kept between runs.

JAX decides how many CPU devices there are when it first looks at them, so this must be settled
before.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import jax
import platformdirs

from shardlib import _jax_compat
from shardlib.errors import TopologyError


def user_cache() -> Path:
    """The user's cache folder of shardlib (measured prices, prepared data, demonstrations), or what
    `SHARDLIB_CACHE_DIR` says.
    """
    return Path(
        os.environ.get("SHARDLIB_CACHE_DIR")
        or platformdirs.user_cache_dir("shardlib", appauthor=False)
    )


_FLAG = "xla_force_host_platform_device_count"


#: Variable with the number of CPU devices that each of several processes simulates; who starts
#: processes sets it.
HOST_DEVICES = "SHARDLIB_HOST_DEVICES"


#: Threads of a simulated device: four collectives may wait at a time.
THREADS = 4


def simulate_cpu_devices(count: int) -> None:
    """Makes JAX see `count` CPU devices and no accelerator; of several processes, each simulates
    its part of them.
    """
    joined = _jax_compat.coordination()
    processes = 1 if joined is None else joined[2]
    if processes == 1:
        set_cpu_devices(count)
    elif HOST_DEVICES not in os.environ:
        if count % processes:
            raise TopologyError(
                f"{processes} processes cannot share {count} CPU devices evenly\nTry:"
                f" cpu:{max(count - count % processes, processes)}"
            )
        set_cpu_devices(count // processes)
    devices = jax.devices()
    if len(devices) == count and devices[0].platform == "cpu":
        return
    if processes > 1:
        raise TopologyError(
            f"{count} CPU devices were asked for, and {processes} processes have {len(devices)} of"
            f" {devices[0].platform} together\nTry: --topology cpu:{len(devices)}, or another"
            " number of devices of each process"
        )
    raise TopologyError(
        f"{count} CPU devices were asked for, and JAX already runs on {len(devices)} of"
        f" {devices[0].platform}\nTry: start a fresh process, with JAX_NUM_CPU_DEVICES={count} and"
        f" JAX_PLATFORMS=cpu in its environment and no --{_FLAG} in XLA_FLAGS"
    )


def set_cpu_devices(count: int) -> None:
    """Makes this process simulate `count` CPU devices and use no accelerator, unless JAX has been
    used already or XLA_FLAGS says how many.
    """
    if _FLAG not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
            jax.config.update("jax_platforms", "cpu")
    let_collectives_wait()


#: What a machine with an accelerator has: files of drivers, and variables of those who lend one.
_DRIVERS = ("nvidia[0-9]*", "nvidiactl", "nvhost*", "dxg", "kfd", "accel*", "vfio/[0-9]*", "dri/*")


_LENT = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TPU_NAME", "TPU_WORKER_ID")


def cpu_without_accelerators(
    dev: Path = Path("/dev"), environ: Mapping[str, str] = os.environ
) -> None:
    """Makes this process use the CPU where the machine has no accelerator and nobody says
    otherwise: plugins that are installed without one print errors of their own while JAX looks for
    it. Call it before JAX is used; processes that this one starts are not concerned.
    """
    if jax.config.values["jax_platforms"] or {*_LENT} & environ.keys():
        return
    if not any(file for form in _DRIVERS for file in dev.glob(form)):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_platforms", "cpu")


def let_collectives_wait(environ: MutableMapping[str, str] = os.environ) -> None:
    """Gives simulated CPU devices threads for several collectives at a time; call it before JAX
    starts. What the user has set stays.

    XLA runs all devices of a process on one pool of as many threads as there are devices (or cores,
    if more), and a collective that waits for the others holds its thread. A device can be in two at
    once, of which one is in a branch or a loop (JAX 0.10.2 and 0.12); then another device finds no
    thread to arrive on, and the process stands still. `PJRT_NPROC` is the size of the pool.
    """
    devices = _simulated_devices(environ)
    if devices > 1 and not {"PJRT_NPROC", "NPROC"} & environ.keys():
        environ["PJRT_NPROC"] = str(max(THREADS * devices, os.cpu_count() or 1))


def _simulated_devices(environ: Mapping[str, str]) -> int:
    """The number of CPU devices that these variables and JAX's settings simulate."""
    flag = re.search(rf"{_FLAG}=(\d+)", environ.get("XLA_FLAGS", ""))
    counts = (environ.get("JAX_NUM_CPU_DEVICES", ""), flag[1] if flag else "")
    set_in_jax = jax.config.values["jax_num_cpu_devices"]  # -1: not set
    return max(1, set_in_jax, *(int(word) for word in counts if word.isdigit()))
