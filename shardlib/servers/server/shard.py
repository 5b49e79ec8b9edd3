"""The parameters that one server owns, and everything that a gradient changes.

A shard is used by one thread at a time; whoever has several holds a lock. Arrays are replaced and
never written to, so that what was fetched may be sent while gradients are applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from shardlib.errors import ShardlibError
from shardlib.exchanges.asynchronous import Asynchronous
from shardlib.servers.ownership import Flat
from shardlib.servers.server.update import applied, rate_of
from shardlib.untrusted.shown import fit, printable


class RefusedError(ShardlibError, ValueError):
    """What somebody sent and cannot be used; nothing has changed."""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """Who pushes, and of what parameters the gradient is.

    Attributes:
        worker: number of the worker.
        start: a word that each start of a worker has of its own.
        serial: number of the push in that start, from 1 on.
        seen: the clock at the fetch that the gradient belongs to.
    """

    worker: int
    start: str
    serial: int
    seen: int


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What came of a push.

    Attributes:
        clock: updates of the server.
        staleness: of the gradient.
        again: whether it had been applied before, and was not again.
    """

    clock: int
    staleness: int = 0
    again: bool = False


@dataclass(kw_only=True)
class Shard:
    """The parameters of a server.

    Attributes:
        exchange: how gradients are applied.
        values: the parameters; None before the first offer.
        squares: Adagrad's sums.
        clock: how many gradients have been applied.
        staleness: how many of them were how stale.
        serials: of each worker its start, and the last of its pushes.
    """

    exchange: Asynchronous
    values: Flat | None = None
    squares: Flat = field(default_factory=dict[str, np.ndarray])
    clock: int = 0
    staleness: Counter[int] = field(default_factory=Counter[int])
    serials: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])

    def offer(self, values: Mapping[str, np.ndarray]) -> None:
        """Begins with parameters, where there are none yet; all workers offer the same."""
        if self.values is not None:
            _require_alike(values, self.values, "what is offered")
            return
        _require_finite(values, "what is offered")
        self.values = dict(values)
        first = np.float32(self.exchange.accumulator)
        if self.exchange.rule == "adagrad":
            self.squares = {path: np.full_like(value, first) for path, value in values.items()}

    def fetch(self) -> tuple[int, Flat]:
        """The clock, and the parameters."""
        if self.values is None:
            raise RefusedError("nobody has offered parameters yet")
        return self.clock, self.values

    def push(self, pushed: Pushed, gradients: Mapping[str, np.ndarray]) -> Applied:
        """Applies a gradient, once."""
        if self.values is None:
            raise RefusedError("nobody has offered parameters yet")
        start, last = self.serials.get(pushed.worker, ("", 0))
        if start == pushed.start and pushed.serial <= last:
            return Applied(clock=self.clock, again=True)
        _require_alike(gradients, self.values, "the gradient")
        _require_finite(gradients, "the gradient")
        # A server that was restarted may be behind what a worker saw.
        staleness = max(self.clock - pushed.seen, 0)
        rate = rate_of(self.exchange, staleness)
        values, squares = self._after(rate, gradients)
        if self.exchange.rule == "adagrad":
            self.squares = squares
        self.values = values
        self.clock += 1
        self.staleness[staleness] += 1
        self.serials[pushed.worker] = (pushed.start, pushed.serial)
        return Applied(clock=self.clock, staleness=staleness)

    def _after(self, rate: float, gradients: Mapping[str, np.ndarray]) -> tuple[Flat, Flat]:
        """Parameters and sums of squares after a gradient."""
        assert self.values is not None
        values, squares = Flat(), Flat()
        with np.errstate(over="ignore", invalid="ignore"):
            for path, gradient in gradients.items():
                value = self.values[path]
                values[path], squares[path] = applied(
                    self.exchange.rule, rate, value, self.squares.get(path, value), gradient
                )
        for what, arrays in (("parameters", values), ("sums of squares", squares)):
            _require_finite(arrays, f"with this gradient, what becomes of the {what}")
        return values, squares


def _require_alike(received: Mapping[str, np.ndarray], stored: Flat, what: str) -> None:
    if received.keys() != stored.keys():
        strange = sorted(received.keys() ^ stored.keys())[:3]
        names = fit(printable(", ".join(strange)), 200)
        raise RefusedError(f"{what} has other parameters than this server: {names}")
    for path, array in received.items():
        if array.shape != stored[path].shape or array.dtype != np.float32:
            raise RefusedError(
                f"{what} of {path} is {array.dtype}{list(array.shape)}, and not"
                f" float32{list(stored[path].shape)}"
            )


def _require_finite(arrays: Mapping[str, np.ndarray], what: str) -> None:
    for path, array in arrays.items():
        if array.dtype != np.float32 or array.ndim != 1:
            raise RefusedError(
                f"{what} of {fit(printable(path), 80)} is {array.dtype}{list(array.shape)}, and no"
                " float32 of one dim"
            )
        if not np.isfinite(array).all():
            raise RefusedError(f"{what} of {fit(printable(path), 80)} is not finite")
