"""Starting one program on many hosts, with what people have already.

    job.py          what is to run, and on what: `Job`
    submission.py   what an engine makes of it, files and commands: `Submission`
    slurm.py, kubernetes.py, tpu_vm.py, ray.py, skypilot.py
                    engines: functions from a job and their own settings to a submission
    ray_driver.py   the entrypoint of a job on Ray
    shell.py        what the scripts of several engines have in common
    tpus.py         what Google's tools call TPU slices
    options.py      settings of engines, as a command line spells them
    local.py        processes of this machine, watched and started again
    processes.py, console.py
                    how they are started, ended with whoever started them (`shardlib.processes`), and shown
    place.py        which of how many processes is this one?
    roll_call.py    is everybody there, before JAX starts?
    joining.py      what every process does first: find the others
    devices.py      which devices of its host are its own?
    doctor/         what is wrong with these hosts?

`shardlib.launching.join()` is what a script of your own calls before anything else of JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlib.launching.joining import Joined, join

__all__ = ["Joined", "join"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shardlib.launching' has no attribute {name!r}")
    from shardlib.launching import joining

    return getattr(joining, name)
