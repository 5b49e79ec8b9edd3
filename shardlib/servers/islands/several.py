"""An island of several processes: the first of them speaks to the outer server, and the others hear
from it.

Parameters are gathered to the hosts in the step after which they are sent, by all processes; what
crosses is in a thread of the first. All of them wait for it in the step in which it is taken in,
and get the outer parameters of the fragment from the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardlib.exchanges.parts import Part
from shardlib.processes.together import first_decides, is_first
from shardlib.servers.islands.exchanging import Exchanging, Runs
from shardlib.servers.islands.met import Crossed, Met
from shardlib.servers.rounds.outer import Outer

#: Numbers that the first process says of a meeting: in time, its round, finite, islands in it.
SAID = 4


@dataclass(kw_only=True)
class SeveralProcesses(Exchanging):
    """An island's way to the outer server, where it has several processes; all of them make the
    same calls in the same order.
    """

    def enter(self, first: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """See `Exchanging.enter`; `first` gathers parameters from all processes."""
        parameters, enter = first(), super().enter
        first_decides("the entry of an island", lambda: enter(lambda: parameters))
        number = _of_first(np.int32(self.round))
        theta = self.outer.theta if is_first() else np.zeros(self.outline.total, np.float32)
        theta = _of_first(theta)
        if not is_first():
            self.round, self._outer = int(number), Outer.first(theta)

    def send(self, runs: Runs) -> Crossed:
        """See `Exchanging.send`; `runs` gathers parameters from all processes, before this
        returns.
        """
        parameters, span, fragment = runs(), self.span(), self.fragment
        crossed = super().send(lambda: parameters) if is_first() else None
        return Heard(island=self, crossed=crossed, span=span, fragment=fragment)

    def leave(self) -> None:
        """See `Exchanging.leave`."""
        if is_first():
            super().leave()


@dataclass(kw_only=True)
class Heard:
    """A meeting, which all processes hear of.

    Attributes:
        island: of this process.
        crossed: the meeting, in the first process.
        span: of the fragment.
        fragment: its number.
    """

    island: SeveralProcesses
    crossed: Crossed | None
    span: tuple[int, int]
    fragment: int
    _met: tuple[Met | None] | None = None

    def result(self) -> Met | None:
        """The meeting, once it is done; to be called by all."""
        if self._met is None:
            self._met = (self._heard(),)
        return self._met[0]

    def run(self, part: Part) -> np.ndarray | None:
        """None: all processes hear of a meeting as a whole."""
        return None

    def _heard(self) -> Met | None:
        crossed, (start, stop) = self.crossed, self.span
        met = first_decides("a meeting", crossed.result if crossed is not None else _nothing)
        header = np.zeros(SAID, np.int32)
        if met is not None:
            header[:] = 1, met.round, met.finite, len(met.islands)
        in_time, number, finite, _ = (int(field) for field in _of_first(header))
        if not in_time:
            return None
        theta = _of_first(self.island.outer.theta[start:stop])
        if is_first():
            return met
        self.island.outer.theta[start:stop] = theta
        self.island.round = number + 1
        return Met(
            round=number, fragment=self.fragment, islands=(), seconds=0.0, finite=bool(finite)
        )


def _nothing() -> None:
    """What processes that are not the first come to."""


def _of_first(array: np.ndarray | np.int32) -> np.ndarray:
    """What the first process has, in all."""
    return np.array(jax.device_get(multihost_utils.broadcast_one_to_all(array)))
