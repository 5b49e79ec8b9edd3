"""What the machines of one family take for a run: every size that was looked at, and the choice.

Which sizes miss the deadline is proven, not assumed: each is planned by a search that is exact
within the cost model, or so small that the kernels alone, spread equally over its devices with no
communication, take too long (`shardlib.planning.questions.least_work`). That larger machines are
faster is assumed nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardlib.booking.target import days_text
from shardlib.planning.answers.run_cost import RunCost
from shardlib.planning.plan import Plan
from shardlib.planning.units.quantity import percent_text
from shardlib.untrusted.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A machine of some size, and what the run takes on it.

    Attributes:
        topology: spelling of the machine.
        devices: that are paid for; a plan may use fewer.
        plan: the best plan; None where there is none.
        cost: of the run; None where there is no plan, or where failures let no run end.
        deadline: seconds.
        message: why there is no plan or no cost.
    """

    topology: str
    devices: int
    plan: Plan | None = field(default=None, repr=False)
    cost: RunCost | None = None
    deadline: float
    message: str = ""

    @property
    def meets(self) -> bool:
        """Whether the run ends in time."""
        return self.cost is not None and self.cost.wall_seconds <= self.deadline

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of all devices that are paid for."""
        if self.plan is None:
            return 0.0
        return self.plan.estimate.mfu * self.plan.mesh.devices / self.devices

    def to_json(self) -> JsonObject:
        """The offer as plain data."""
        data: JsonObject = {
            "topology": self.topology,
            "devices": self.devices,
            "meets_deadline": self.meets,
        }
        if self.plan is None or self.cost is None:
            return {**data, "message": self.message}
        search = self.plan.search
        return {
            **data,
            "mesh": dict(self.plan.mesh),
            "digest": self.plan.digest,
            "mfu": self.mfu,
            "run": self.cost.to_json(),
            "search": {
                "gap": search.gap,
                "candidates": search.candidates,
                "evaluations": search.evaluations,
            },
        }


@dataclass(frozen=True, kw_only=True)
class Offers:
    """The machines of one family for a run.

    Attributes:
        family: as it was asked for.
        tried: sizes that were planned, ascending.
        excluded: spellings of sizes that a bound says are too small, ascending.
        unseen: sizes above the smallest that meets the deadline and that were not planned.
        least_device_hours: of the kernels alone; no size needs fewer.
    """

    family: str
    tried: tuple[Offer, ...]
    excluded: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    least_device_hours: float

    @property
    def in_time(self) -> tuple[Offer, ...]:
        """Sizes that meet the deadline."""
        return tuple(offer for offer in self.tried if offer.meets)

    @property
    def smallest(self) -> Offer | None:
        """The fewest devices that meet the deadline; None where none do."""
        return min(self.in_time, key=lambda offer: offer.devices, default=None)

    @property
    def cheapest(self) -> Offer | None:
        """The fewest device-hours within the deadline, of the sizes that were planned; all devices
        of a family cost the same. The smaller one where two are equal.
        """
        return min(
            self.in_time, key=lambda offer: (device_hours(offer), offer.devices), default=None
        )

    @property
    def gap(self) -> float | None:
        """Part of the cheapest one's device-hours that no other size could save more of; None where
        no size meets the deadline.
        """
        best = self.cheapest
        if best is None:
            return None
        return max(0.0, 1 - self.least_device_hours / device_hours(best))

    @property
    def certificate(self) -> str:
        """What is proven of the choice, and what was only tried, in a sentence or two."""
        missed = [offer for offer in self.tried if not offer.meets]
        first = self.smallest
        below = [offer for offer in missed if first is None or offer.devices < first.devices]
        reasons: list[str] = []
        if self.excluded:
            reasons.append(
                f"up to {self.excluded[-1]} the kernels alone take too long ({len(self.excluded)}"
                " sizes, not planned)"
            )
        if below:
            reasons.append(f"planned, and not in time: {_all_missed(below)}")
        if first is None:
            return (
                f"no size meets the deadline: {'; '.join(reasons)}" if reasons else "no size at all"
            )
        proof = f"{first.topology} is the smallest, proven: {'; '.join(reasons) or 'no other size'}"
        others = len(self.in_time) - 1
        best = self.cheapest
        assert best is not None and self.gap is not None
        return (
            f"{proof}. {best.topology} is the cheapest of {others + 1} sizes in time that were"
            f" planned, and no size could be over {percent_text(self.gap)} cheaper, as its kernels"
            " alone take the rest"
        )

    def to_json(self) -> JsonObject:
        """The offers as plain data."""
        smallest, cheapest = self.smallest, self.cheapest
        return {
            "family": self.family,
            "smallest": None if smallest is None else smallest.to_json(),
            "cheapest": None if cheapest is None else cheapest.to_json(),
            "cheapest_gap": self.gap,
            "least_device_hours": self.least_device_hours,
            "certificate": self.certificate,
            "planned": [offer.to_json() for offer in self.tried],
            "excluded": list(self.excluded),
            "not_planned": list(self.unseen),
        }


def device_hours(offer: Offer) -> float:
    """Hours of devices that are paid for, used or not; infinite where there is no cost."""
    return math.inf if offer.cost is None else offer.cost.device_hours


def _all_missed(offers: Sequence[Offer]) -> str:
    """Sizes that miss the deadline; of many the first, the fastest and the last."""
    if len(offers) <= 4:
        return ", ".join(map(_missed, offers))
    first, *_, last = offers
    timed = [offer for offer in offers if offer.cost is not None]
    best = min(timed, key=lambda o: o.cost.wall_seconds if o.cost else math.inf, default=last)
    named = dict.fromkeys([first.topology, last.topology, best.topology])
    shown = [_missed(offer) for offer in offers if offer.topology in named]
    return f"{len(offers)} sizes, among them {', '.join(shown)}"


def _missed(offer: Offer) -> str:
    """A size that misses the deadline, with the reason."""
    if offer.cost is None:
        return f"{offer.topology} ({offer.message})"
    return f"{offer.topology} ({days_text(offer.cost.wall_seconds)})"
