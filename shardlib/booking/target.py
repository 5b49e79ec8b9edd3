"""What a run has to do, by when, and what its machines cost.

>>> Target(tokens=15e12, deadline=30 * DAY, prices={"h100": 2.4}).price("h100", 1)
2.4
>>> failures = Failures(every=3 * 3600.0, devices=16384)
>>> failures.of(8192) / 3600  # half the devices fail half as often
6.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardlib.errors import ArgumentError, raise_all
from shardlib.hardware.catalog import CATALOG
from shardlib.planning.answers.run_cost import DAY
from shardlib.planning.plan import RESTART_S
from shardlib.planning.units.quantity import seconds_text
from shardlib.untrusted import shown
from shardlib.untrusted.json_types import JsonObject


def days_text(seconds: float) -> str:
    """Days, or a shorter unit below one.

    >>> days_text(3 * DAY), days_text(60.0)
    ('3.0 days', '60.0 s')
    """
    return f"{seconds / DAY:,.1f} days" if seconds >= DAY else seconds_text(seconds)


def _positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < math.inf


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often a machine of some size fails; larger ones fail oftener in proportion.

    Attributes:
        every: seconds between two failures of a machine.
        devices: that this machine has.
    """

    every: float
    devices: int

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {value!r:.40}; it is a number above 0"
            for name, value in (("every", self.every), ("devices", self.devices))
            if not _positive(value)
        ]
        if wrong:
            raise_all(ArgumentError, "failures are not defined", wrong)

    def of(self, devices: int) -> float:
        """Seconds between two failures of a machine of so many devices."""
        return self.every * self.devices / devices


@dataclass(frozen=True, kw_only=True)
class Target:
    """A training run that has to end in time.

    Attributes:
        tokens: of the whole run.
        deadline: seconds until it has to be done.
        prices: chip of the catalogue -> price of one such chip and hour, in money of your own; for
            chips that are not here, device-hours are compared, and no price is built in.
        failures: how often machines fail; None where nothing fails.
        restart: seconds from a failure to the next step.

    Raises:
        ArgumentError: numbers that are not positive, or prices of unknown chips; all are listed.
    """

    tokens: float
    deadline: float
    prices: Mapping[str, float] = field(default_factory=dict[str, float])
    failures: Failures | None = None
    restart: float = RESTART_S

    def __post_init__(self) -> None:
        figures = {"tokens": self.tokens, "deadline": self.deadline, "restart": self.restart}
        wrong = [
            f"{name} is {value!r:.40}; it is a number above 0"
            for name, value in [
                *figures.items(),
                *((f"the price of {chip}", price) for chip, price in self.prices.items()),
            ]
            if not _positive(value)
        ]
        wrong += [
            f"the price of {shown(str(chip))}: no such chip; there are {', '.join(CATALOG)}"
            for chip in self.prices
            if chip not in CATALOG
        ]
        if wrong:
            raise_all(ArgumentError, "the target is not defined", wrong)

    def price(self, chip: str, devices_per_chip: int) -> float | None:
        """Of a device and hour; None where the chip has none."""
        chip_price = self.prices.get(chip)
        return None if chip_price is None else chip_price / devices_per_chip

    def mtbf(self, devices: int) -> float | None:
        """Seconds between two failures of a machine of so many devices; None without failures."""
        return None if self.failures is None else self.failures.of(devices)

    @property
    def days(self) -> float:
        """Until the deadline."""
        return self.deadline / DAY

    def to_json(self) -> JsonObject:
        """The target as plain data."""
        return {
            "tokens": self.tokens,
            "deadline_seconds": self.deadline,
            "prices": dict(self.prices),
            "mtbf": None
            if self.failures is None
            else {"seconds": self.failures.every, "devices": self.failures.devices},
            "restart_seconds": self.restart,
        }
