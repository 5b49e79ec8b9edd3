"""The ways in which islands meet.

*Outer* is what belongs to all islands: its parameters are those that all start the next round from.
Signs and words are those of DiLoCo: the outer gradient is outer parameters minus the mean of the
islands' parameters.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import ClassVar, TypeAlias

from shardlib.errors import PinError, raise_all
from shardlib.untrusted.json_types import JsonObject
from shardlib.untrusted.shown import shown


def _whole(name: str, value: object, least: int) -> list[str]:
    """What is wrong with a whole number of at least `least`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return []
    return [f"{name} is {shown(value)}; it is an integer of at least {least}"]


def _between(name: str, value: object, *, most: float, above: bool) -> list[str]:
    """What is wrong with a number from 0 to less than `most`; above 0 where `above`."""
    number = (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    )
    if math.isfinite(number) and 0 <= number < most and (number > 0 or not above):
        return []
    least = "more than 0" if above else "at least 0"
    limit = f" and less than {most:g}" if math.isfinite(most) else ""
    return [f"{name} is {shown(value)}; it is a number of {least}{limit}"]


@dataclass(frozen=True, kw_only=True)
class Exact:
    """There is one island: gradients of the whole batch are reduced in every step, as planned."""

    kind: ClassVar[str] = "exact"
    islands: ClassVar[int] = 1

    def to_json(self) -> JsonObject:
        """The exchange as plain data."""
        return {"kind": self.kind}

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """Islands train apart, each with its part of the batch, and meet every so many steps.

    With theta the outer parameters, theta_k those of island k and v a momentum (Douillard et al.,
    "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105):

        d = theta - mean of theta_k,   v <- d + momentum v,   theta <- theta - rate (d + momentum v)

    and all islands go on from theta. Optimizer state stays on its island. `rate=1, momentum=0` is
    local SGD (arXiv:1805.09767): the mean of the parameters.

    Attributes:
        islands: their number, at least 2; they divide the machine and the rows of the batch.
        every: steps between two meetings.
        rate: of the outer update.
        momentum: of the outer update, in Nesterov's form.

    Raises:
        PinError: values out of range; all of them are listed.
    """

    kind: ClassVar[str] = "diloco"

    islands: int = 2
    every: int = 100
    rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        failures = [
            *_whole("islands", self.islands, 2),
            *_whole("every", self.every, 1),
            *_between("rate", self.rate, most=math.inf, above=True),
            *_between("momentum", self.momentum, most=1.0, above=False),
        ]
        if failures:
            raise_all(PinError, "exchange=DiLoCo is not usable", failures)
        object.__setattr__(self, "rate", float(self.rate))
        object.__setattr__(self, "momentum", float(self.momentum))

    def to_json(self) -> JsonObject:
        """The exchange as plain data."""
        return {"kind": self.kind, **asdict(self)}

    def __str__(self) -> str:
        """As the command line spells it, with what differs from the defaults."""
        words = [self.kind, str(self.islands), str(self.every)]
        usual = DiLoCo()
        for name in ("rate", "momentum"):
            if getattr(self, name) != getattr(usual, name):
                words.append(f"{name}={getattr(self, name):g}")
        return ":".join(words)


Exchange: TypeAlias = Exact | DiLoCo
#: One island.
EXACT = Exact()
#: Exchanges by the word with which they are pinned.
KINDS: dict[str, type[Exact] | type[DiLoCo]] = {one.kind: one for one in (Exact, DiLoCo)}
