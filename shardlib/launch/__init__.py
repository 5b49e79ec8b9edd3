"""Starting one program on many hosts, with what people have already.

`shardlib.launch.join()` is what a script of your own calls before anything else of JAX.

booking.py           what should I book? Machines for a run, and runs for a machine
booking_commands.py  `shardlib compare | fit-model`
commands.py          from the words of a command line to what an engine makes of them
doctor.py            what is wrong with these hosts, before a run finds out
engines.py           the engines of `shardlib launch`, in the order of its help
job.py               A job
joining.py           what every process does first
kubernetes.py        kubernetes
local.py             many processes on this machine, as one command
meeting.py           the processes of a job meet before JAX starts
ray.py               ray
ray_driver.py        the driver of a job on a Ray cluster, which starts the processes on its
                     hosts
skypilot.py          skyPilot
slurm.py             slurm
submission.py        what engines share
tpu_vm.py            cloud TPU VMs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlib.launch.joining import Joined, join

__all__ = ["Joined", "join"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shardlib.launch' has no attribute {name!r}")
    from shardlib.launch import joining

    return getattr(joining, name)
