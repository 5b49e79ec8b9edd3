"""Processes that stages run in: on this machine, or wherever somebody has started them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardlib.errors import ArgumentError, LaunchError
from shardlib.serving.edge.stage import SECRET


@dataclass(kw_only=True)
class Workers:
    """Processes that stages run in.

    Attributes:
        addresses: where each listens.
        secret: that all know.
        names: device of each; none where each may be any.
        processes: those that were started here.
    """

    addresses: list[tuple[str, int]]
    secret: str
    names: list[str] = field(default_factory=list)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @classmethod
    def here(cls, count: int) -> Workers:
        """Starts processes on this machine."""
        secret = secrets.token_hex(32)
        environment = {**os.environ, SECRET: secret}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "shardlib.serving.edge.stage"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for _ in range(count)
        ]
        workers = cls(addresses=[], secret=secret, processes=started)
        for process in started:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line.isdigit():
                workers.close()
                raise LaunchError("a process of a stage has not started; see what it says above")
            workers.addresses.append(("127.0.0.1", int(line)))
        return workers

    def of(self, devices: Sequence[str]) -> list[tuple[str, int]]:
        """Addresses of the processes of some stages."""
        left = list(range(len(self.addresses)))
        indices = list[int]()
        for device in devices:
            matches = [k for k in left if not self.names or self.names[k] == device]
            if not matches:
                there = f" among {', '.join(self.names)}" if self.names else ""
                raise ArgumentError(
                    f"the plan needs another {device}, and there is no process of one{there}"
                )
            left.remove(matches[0])
            indices.append(matches[0])
        return [self.addresses[k] for k in indices]

    def lose(self, address: tuple[str, int]) -> None:
        """A process is not used again."""
        index = self.addresses.index(address)
        for listed in (self.addresses, self.names, self.processes):
            if listed:
                lost = listed.pop(index)
                if isinstance(lost, subprocess.Popen):
                    _end(lost)

    def close(self) -> None:
        """Ends the processes that were started here."""
        for process in self.processes:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(10)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
