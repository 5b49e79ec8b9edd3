"""What `shardlib launch` does without an engine: processes of this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardlib.launching.job import COMMANDS


def run_here(
    words: Sequence[str], *, processes: int, devices: int | None = None, interface: str | None = None, port: int | None = None, restarts: int = 0, elastic: bool = False,
    silent_seconds: float = 60.0, stop_seconds: float = 120.0, join_seconds: int = 300,
) -> int:
    """Runs a command in several processes of this machine, and gives its exit code.

    Args:
        words: a command of shardlib, or any program.
        processes, devices, port, elastic, join_seconds: see `shardlib.launching.local.Local`.
        interface: name of an interface, or an address of this machine, at which process 0 listens; by default 127.0.0.1.
        restarts: starts in a row that save nothing new, after the first.
        silent_seconds: without a sign of life, after which a process counts as frozen.
        stop_seconds: that processes have to save and end once they are asked to stop.

    Raises:
        LaunchError: what cannot be launched.
    """
    from shardlib.launching.local import LOOPBACK, Local, address_of, launch
    from shardlib.training.supervisor import Budget

    ours = bool(words) and words[0] in COMMANDS
    command = (sys.executable, "-m", "shardlib", *words) if ours else tuple(words)
    if elastic and ours and "--elastic" not in words and words[0] == "train":
        command = (*command, "--elastic")
    local = Local(command=command, processes=processes, devices=devices, address=address_of(interface) if interface else LOOPBACK, port=port, run=_run_of(words) if ours else None,
                  elastic=elastic, join_seconds=join_seconds, budget=Budget(restarts=restarts, silent_seconds=silent_seconds, stop_seconds=stop_seconds))
    return launch(local)


def _run_of(words: Sequence[str]) -> str | None:
    """The folder that a command line of `shardlib train` names.

    >>> _run_of(["train", "--run", "runs/a"]), _run_of(["train", "--run=runs/b"]), _run_of(["train"])
    ('runs/a', 'runs/b', None)
    """
    for word, after in zip(words, [*words[1:], None], strict=True):
        if word in ("--run", "-r"):
            return after
        if word.startswith("--run="):
            return word.removeprefix("--run=")
    return None
