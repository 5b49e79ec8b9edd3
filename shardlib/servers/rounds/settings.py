"""How long rounds wait, and for how many islands."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from shardlib.errors import ArgumentError, raise_all
from shardlib.exchanges.checks import between, one_of, whole
from shardlib.untrusted.json_types import JsonObject

#: What follows where a round has too few islands.
Short = Literal["wait", "fail"]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How rounds of islands are held.

    Attributes:
        timeout_s: seconds that a round waits after the first outer gradient for islands that are
            there and have sent none.
        away_s: seconds that a round waits for an island whose connection has closed.
        gather_s: seconds that the first round waits for islands that have not come; they begin
            together.
        quorum: least islands that send in a round.
        short: "wait": a round without its quorum waits for islands to come; "fail": after its
            timeout all islands end with an error.
        save_every: rounds between two checkpoints; with 1 a round is on disk before it is answered.
        restarts: how often the server may be started again.

    Raises:
        ArgumentError: values out of range; all of them are listed.
    """

    timeout_s: float = 60.0
    away_s: float = 10.0
    gather_s: float = 600.0
    quorum: int = 1
    short: Short = "wait"
    save_every: int = 1
    restarts: int = 3

    def __post_init__(self) -> None:
        failures = [
            *between("timeout_s", self.timeout_s, most=math.inf, above=True),
            *between("away_s", self.away_s, most=math.inf, above=False),
            *between("gather_s", self.gather_s, most=math.inf, above=True),
            *whole("quorum", self.quorum, 1),
            *one_of("short", self.short, get_args(Short)),
            *whole("save_every", self.save_every, 1),
            *whole("restarts", self.restarts, 0),
        ]
        if failures:
            raise_all(ArgumentError, "Rounds is not usable", failures)

    def to_json(self) -> JsonObject:
        """The settings as plain data."""
        return asdict(self)
