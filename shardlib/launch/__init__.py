"""Starting one program on many hosts, with what people have already.

    job.py          what is to run, and on what: `Job`
    engines/        from a job and settings of the engine's own to files and commands
    local.py        processes of this machine, started again; `watching.py`: one start of them
    processes.py, console.py
                    how they are started and ended (`shardlib.processes`), and shown
    addresses.py    addresses and free ports of this machine
    joining.py      what every process does first: find the others
    meeting/        the roll call before JAX starts
    devices.py      which devices of its host are a process's own
    likely_secrets.py
                    words that look like secrets, which no file may show

`shardlib.launch.join()` is what a script of your own calls before anything else of JAX.
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
