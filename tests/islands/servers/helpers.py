"""Links to servers of this process, calls at the same time, and waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardlib.islands.servers.starting import handed
from shardlib.islands.servers.wire import Answer, Arrivals, Ask, Flat
from shardlib.processes.wire import Outgoing, made


@dataclass
class Direct:
    """A link to a server of this process."""

    service: Any

    def ask(
        self, ask: Ask, arrays: Outgoing | None = None, arrivals: Arrivals | None = None
    ) -> tuple[Answer, Flat]:
        return handed(*self.service.answer(ask, made(arrays or {}), ask.worker), arrivals)

    def close(self) -> None: ...


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls, each in a thread of its own."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results
