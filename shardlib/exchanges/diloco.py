"""Islands that train apart and meet every so many steps."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import ClassVar

from shardlib.errors import PinError, raise_all
from shardlib.exchanges.checks import between, one_of, whole
from shardlib.exchanges.shown import Shown
from shardlib.exchanges.spelling import spelled
from shardlib.exchanges.wires import WIRES
from shardlib.untrusted.json_types import JsonObject

#: Part of its own parameters that an island keeps, as in arXiv:2501.18512.
MIXING = 0.5


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Shown):
    """Islands train apart, each with its part of the batch, and meet every so many steps.

    With theta the outer parameters, theta_k those of island k and v a momentum (Douillard et al.,
    "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105):

        d = theta - mean of theta_k,   v <- d + momentum v,   theta <- theta - rate (d + momentum v)

    and all islands go on from theta. Optimizer state stays on its island. `rate=1, momentum=0` is
    local SGD (arXiv:1805.09767): the mean of the parameters. Of several fragments one meets at a
    time, evenly spread over the `every` steps (Streaming DiLoCo, arXiv:2501.18512), so that less
    crosses at once.

    With a delay, what an island sends crosses beside its next steps. When it is there, the outer
    update is done, and islands go on from

        mixing theta_k + (1 - mixing) theta

    Attributes:
        islands: their number, at least 2; they divide the machine and the rows of the batch.
        every: steps between two meetings about the same parameters.
        rate: of the outer update.
        momentum: of the outer update, in Nesterov's form.
        fragments: parts of the parameters that meet apart; they divide `every`.
        wire: dtype of outer gradients as they cross: "float32", "bfloat16", or "int8" and "int4"
            in blocks of 256 with a scale each; they are summed in float32.
        delay: steps that islands do while outer gradients cross, at most until the next are sent;
            0: they wait.
        mixing: part of its own parameters that an island keeps after a delay, 0 to less than 1.

    Raises:
        PinError: values out of range; all of them are listed.
    """

    kind: ClassVar[str] = "diloco"
    places: ClassVar[tuple[str, ...]] = ("islands", "every")
    keeps: ClassVar[bool] = True

    islands: int = 2
    every: int = 100
    rate: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    wire: str = "float32"
    delay: int = 0
    mixing: float = MIXING

    def __post_init__(self) -> None:
        failures = [
            *whole("islands", self.islands, 2),
            *whole("every", self.every, 1),
            *between("rate", self.rate, most=math.inf, above=True),
            *between("momentum", self.momentum, most=1.0, above=False),
            *whole("fragments", self.fragments, 1),
            *one_of("wire", self.wire, WIRES),
            *whole("delay", self.delay, 0),
            *between("mixing", self.mixing, most=1.0, above=False),
        ]
        if not failures and self.every % self.fragments:
            failures.append(
                f"every is {self.every}, which {self.fragments} fragments do not divide: one meets"
                " after every so many steps"
            )
        if not failures and self.delay > self.between:
            failures.append(
                f"delay is {self.delay}, and the next outer gradients are sent after {self.between}"
                " steps: at most that many"
            )
        if not failures and self.mixing != MIXING and not self.delay:
            failures.append(
                f"mixing is {self.mixing:g} without a delay, where islands go on from outer"
                " parameters: a delay of at least 1, or no mixing"
            )
        if failures:
            raise_all(PinError, "exchange=DiLoCo is not usable", failures)
        object.__setattr__(self, "mixing", float(self.mixing))
        object.__setattr__(self, "rate", float(self.rate))
        object.__setattr__(self, "momentum", float(self.momentum))

    @property
    def meetings(self) -> int:
        """Number of meetings that differ: about one fragment each."""
        return self.fragments

    @property
    def period(self) -> int:
        """Steps between two meetings about the same fragment."""
        return self.every

    @property
    def between(self) -> int:
        """Steps between two meetings."""
        return self.every // self.fragments

    def due(self, step: int) -> int | None:
        """The meeting after a step, or what is sent then where there is a delay; None where there
        is none.

        >>> [DiLoCo(every=4, fragments=2).due(step) for step in range(1, 9)]
        [None, 0, None, 1, None, 0, None, 1]

        Args:
            step: number of steps done.
        """
        return None if step % self.between else (step // self.between - 1) % self.fragments

    def to_json(self) -> JsonObject:
        """The exchange as plain data."""
        return {"kind": self.kind, **asdict(self)}

    def __str__(self) -> str:
        return spelled(self)
