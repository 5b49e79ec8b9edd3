"""A meeting of an island, once it is done, and while it is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardlib.exchanges.parts import Part


@dataclass(frozen=True, kw_only=True)
class Met:
    """A meeting of this island.

    Attributes:
        round: its number.
        fragment: that it was about.
        islands: whose outer gradients are in the mean; none where it changed nothing.
        seconds: from sending to the mean.
        waited_s: for which a step waited.
        finite: whether this island's outer gradient was.
    """

    round: int
    fragment: int
    islands: tuple[int, ...]
    seconds: float
    waited_s: float = 0.0
    finite: bool = True


class Crossed(Protocol):
    """A meeting that may not be done."""

    def result(self) -> Met | None:
        """The meeting, once it is done; None where the round was closed without this island."""
        ...

    def run(self, part: Part) -> np.ndarray | None:
        """The outer parameters of a part of the fragment, once they are there; None where they do
        not come before the meeting is done.
        """
        ...
