"""What does a whole training run take: days, devices, money, energy, and what failures cost?

Failures come at random, M seconds apart on average (a Poisson process). A run saves every tau
seconds, which holds it up for C, and a failure costs R to start again and what was done since the
last save. The expected time of T seconds of work is

    M exp(R / M) (exp((tau + C) / M) - 1) T / tau

(J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22, 2006, equation 20), and the best tau is where that is least: about
sqrt(2 C M) (J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM
17, 1974).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardlib.errors import ArgumentError, raise_all
from shardlib.hardware.catalog.power import BOARD_POWER
from shardlib.hardware.topology import Topology
from shardlib.planning.plan import RESTART_S, Plan
from shardlib.planning.units.quantity import count_text, percent_text, seconds_text
from shardlib.planning.units.tables import aligned
from shardlib.untrusted.json_types import JsonObject

#: Seconds between two saves at least: storage takes its time, beside training.
LEAST_EVERY_S = 300.0
DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What a training run takes.

    Attributes:
        tokens: of the run.
        steps: optimizer steps.
        devices: that work.
        work_seconds: of all steps, as planned.
        wall_seconds: with saves, failures and starts.
        save_seconds: that a save holds training up: the state's way to the host.
        every_seconds: between two saves; None where nothing fails.
        mtbf_seconds: between two failures of the whole machine; None where nothing fails.
        restart_seconds: from a failure to the next step.
        price: of a device and hour, in the user's own money; None where it was not said.
        watts: of a device's board at most; None where the vendor published none.
    """

    tokens: float
    steps: float
    devices: int
    work_seconds: float
    wall_seconds: float
    save_seconds: float
    every_seconds: float | None
    mtbf_seconds: float | None
    restart_seconds: float
    price: float | None
    watts: float | None

    @property
    def goodput(self) -> float:
        """Share of the time that is work."""
        return self.work_seconds / self.wall_seconds

    @property
    def device_hours(self) -> float:
        """Hours of devices."""
        return self.devices * self.wall_seconds / 3600

    @property
    def money(self) -> float | None:
        """What they cost; None without a price."""
        return None if self.price is None else self.price * self.device_hours

    @property
    def kilowatt_hours(self) -> float | None:
        """Energy of the boards at most; None where their power is not published."""
        return None if self.watts is None else self.watts * self.device_hours / 1000

    def to_json(self) -> JsonObject:
        """The cost as plain data."""
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "goodput": self.goodput,
            "device_hours": self.device_hours,
            "money": self.money,
            "kilowatt_hours": self.kilowatt_hours,
        }

    def __str__(self) -> str:
        rows = [
            ["tokens", f"{count_text(self.tokens)} in {count_text(self.steps)} steps"],
            ["work", _long(self.work_seconds)],
            [
                "time",
                _long(self.wall_seconds)
                + (f", {percent_text(self.goodput)} of it work" if self.mtbf_seconds else ""),
            ],
            ["device-hours", f"{count_text(self.device_hours)} of {self.devices} devices"],
        ]
        if self.money is not None:
            rows.append(["cost", f"{self.money:,.0f} at {self.price:g} a device and hour"])
        if self.kilowatt_hours is not None:
            rows.append(
                [
                    "energy",
                    f"up to {self.kilowatt_hours / 1000:,.1f} MWh ({self.watts:g} W a board)",
                ]
            )
        if self.mtbf_seconds is not None and self.every_seconds is not None:
            rows.append(
                [
                    "saves",
                    (
                        f"every {_long(self.every_seconds)}, holding it up for"
                        f" {seconds_text(self.save_seconds)}"
                    ),
                ]
            )
            rows.append(
                [
                    "failures",
                    (
                        f"every {_long(self.mtbf_seconds)}, {_long(self.restart_seconds)} to the"
                        f" next step; {self.wall_seconds / self.mtbf_seconds:,.0f} in all"
                    ),
                ]
            )
        return "\n".join(["Run", *aligned(rows)]) + "\n"


def run_cost(
    plan: Plan,
    topology: Topology,
    *,
    tokens: float,
    price: float | None = None,
    mtbf: float | None = None,
    restart: float = RESTART_S,
) -> RunCost:
    """What a run of so many tokens takes.

    Args:
        mtbf: seconds between two failures of the whole machine; None where nothing fails.
        restart: seconds from a failure to the next step.
    """
    given: dict[str, object] = {
        "tokens": tokens,
        "price": price,
        "mtbf": mtbf,
        "restart": restart,
    }
    wrong = [
        f"{name} is {value!r}; it is a number above 0"
        for name, value in given.items()
        if value is not None
        and (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (value > 0 and math.isfinite(value))
        )
    ]
    if wrong:
        raise_all(ArgumentError, "the cost of the run is not defined", wrong)
    estimate = plan.estimate
    work = tokens / estimate.tokens_per_second
    save, every, wall = save_seconds(plan, topology), None, work
    if mtbf is not None:
        every = max(LEAST_EVERY_S, best_interval(save, mtbf))
        wall = expected_seconds(work, every, save, mtbf, restart)
        if not math.isfinite(wall) or wall > 1e4 * work:
            raise ArgumentError(
                f"with a failure every {_long(mtbf)} and {_long(restart)} to start again no run"
                " ends\nTry: a longer mtbf, a shorter restart, or fewer devices"
            )
    power = BOARD_POWER.get(topology.chip.name)
    return RunCost(
        tokens=float(tokens),
        steps=work / estimate.step_seconds,
        devices=plan.mesh.devices,
        work_seconds=work,
        wall_seconds=wall,
        save_seconds=save,
        every_seconds=every,
        mtbf_seconds=mtbf,
        restart_seconds=restart,
        price=price,
        watts=None if power is None else power[0],
    )


def save_seconds(plan: Plan, topology: Topology) -> float:
    """Seconds that a save holds training up: a device's share of parameters and optimizer state
    goes to the host; writing goes on beside training (`docs/checkpoints.md`).
    """
    held = plan.estimate.device_bytes
    rate = topology.chip.host_bytes_per_s or topology.chip.hbm_bytes_per_s
    return (held.parameters + held.optimizer) / rate


def expected_seconds(work: float, every: float, save: float, mtbf: float, restart: float) -> float:
    """Expected seconds of a run, see above.

    Args:
        work: seconds of all steps.
        every: seconds of work between two saves.
    """
    if max(restart, every + save) / mtbf > 500:
        return math.inf
    return mtbf * math.exp(restart / mtbf) * math.expm1((every + save) / mtbf) * work / every


def best_interval(save: float, mtbf: float) -> float:
    """Seconds of work between two saves with the least expected time.

    The derivative of the expected time is 0 where exp(-(tau + C) / M) = 1 - tau / M, which has one
    solution below M.

    Args:
        save: seconds that a save takes.
        mtbf: seconds between two failures.
    """
    low, high = 0.0, mtbf
    for _ in range(200):
        middle = (low + high) / 2
        if math.exp(-(middle + save) / mtbf) < 1 - middle / mtbf:
            low = middle
        else:
            high = middle
    return max((low + high) / 2, 1e-9)


def _long(seconds: float) -> str:
    """Seconds in the unit that people say."""
    for size, name in ((DAY, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.3g} {name}"
    return seconds_text(seconds)
