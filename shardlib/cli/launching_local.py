"""What `shardlib launch` does without an engine: processes of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from shardlib.cli.launching_engines import option_of
from shardlib.launching.job import COMMANDS


def run_here(
    words: Sequence[str], *, processes: int, devices: int | None = None, interface: str | None = None, port: int | None = None, restarts: int = 0, elastic: bool = False,
    silent_seconds: float = 60.0, stop_seconds: float = 120.0, join_seconds: int = 300,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Runs a command in several processes of this machine, and gives its exit code.

    Args:
        words: a command of shardlib, or any program.
        processes, devices, port, elastic, join_seconds: see `shardlib.launching.local.Local`.
        interface: name of an interface, or an address of this machine, at which process 0 listens; by default 127.0.0.1.
        restarts: starts in a row that save nothing new, after the first.
        silent_seconds: without a sign of life, after which a process counts as frozen.
        stop_seconds: that processes have to save and end once they are asked to stop.
        environment: variables beside those of this process.

    Raises:
        LaunchError: what cannot be launched.
    """
    from shardlib.launching.local import LOOPBACK, Local, address_of, launch
    from shardlib.training.supervisor import Budget

    ours = bool(words) and words[0] in COMMANDS
    command = (sys.executable, "-m", "shardlib", *words) if ours else tuple(words)
    if elastic and ours and "--elastic" not in words and words[0] == "train":
        command = (*command, "--elastic")
    local = Local(command=command, processes=processes, devices=devices, address=address_of(interface) if interface else LOOPBACK, port=port, run=option_of(words, ("--run", "-r")),
                  elastic=elastic, join_seconds=join_seconds, budget=Budget(restarts=restarts, silent_seconds=silent_seconds, stop_seconds=stop_seconds))
    return launch(local, environ={**os.environ, **(environment or {})})
