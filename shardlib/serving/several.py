"""Several models at once in one process, each with pages of its own.

>>> models = Models({"small": small, "large": large})                     # doctest: +SKIP
>>> models.add("small", Asked(prompt=(5, 2, 7)))                          # doctest: +SKIP
>>> models.run()                                                          # doctest: +SKIP

A name is a key, and nothing else. The models share the device: the next step is of the one that has
had the least time of it over its share, among those that have something to do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from shardlib.errors import ArgumentError, raise_all
from shardlib.serving.engine import Engine
from shardlib.serving.scheduling.requests import Asked, Event, Request


class Models(Mapping[str, Engine]):
    """Engines by name.

    Args:
        engines: each with its own capacity.
        shares: of them in the time of the device, above 0; 1 of those that have none.

    Raises:
        ArgumentError: no engines, two names of one engine, or shares that are not usable.
    """

    def __init__(
        self, engines: Mapping[str, Engine], *, shares: Mapping[str, float] | None = None
    ) -> None:
        self._engines = dict(engines)
        self._shares = dict(shares or {})
        failures = [] if engines else ["there is none"]
        failures += [
            f"the share of {name!r} is of no model" for name in self._shares if name not in engines
        ]
        failures += [
            f"the share of {name!r} is {share!r}; it is a number above 0"
            for name, share in self._shares.items()
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1e9
        ]
        if len({id(engine) for engine in engines.values()}) < len(engines):
            failures.append("one engine has two names")
        if failures:
            raise_all(ArgumentError, "the models cannot be served", failures)
        self._spent = dict.fromkeys(engines, 0.0)
        self._idle = set(engines)
        self.clock = time.perf_counter

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def add(self, name: str, asked: Asked) -> Request:
        """A request waits to be served by a model."""
        if name not in self._engines:
            raise ArgumentError(
                f"there is no model {name!r}; there are {', '.join(map(repr, self._engines))}"
            )
        return self[name].add(asked)

    def step(self) -> list[Event]:
        """Computes a step of one model, where there is something to do; returns what is new."""
        busy = [
            name
            for name, engine in self._engines.items()
            if engine.schedule.waiting or engine.schedule.running
        ]
        if not busy:
            self._idle = set(self._engines)
            return []
        active = [self._used(name) for name in busy if name not in self._idle]
        for name in busy:  # one that had nothing to do has saved nothing up
            if name in self._idle and active:
                minimum = min(active) * self._shares.get(name, 1.0)
                self._spent[name] = max(self._spent[name], minimum)
        self._idle = set(self._engines) - set(busy)
        name = min(busy, key=self._used)
        start = self.clock()
        events = self[name].step()
        self._spent[name] += self.clock() - start
        return events

    def run(self) -> None:
        """Serves until every request has ended."""
        while any(engine.schedule.waiting or engine.schedule.running for engine in self.values()):
            self.step()

    def warm_up(self) -> None:
        """Compiles all programs of all models."""
        for engine in self.values():
            engine.warm_up()

    def _used(self, name: str) -> float:
        return self._spent[name] / self._shares.get(name, 1.0)
