"""Machines side by side: which size of each ends a run in time, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardlib.booking.offers import Offer, Offers, device_hours
from shardlib.booking.target import Target
from shardlib.planning.answers.run_cost import DAY
from shardlib.planning.units.quantity import count_text, percent_text
from shardlib.planning.units.tables import aligned, wrapped
from shardlib.untrusted.json_types import JsonObject

HEAD = ("machine", "", "devices", "days", "device-hours", "cost", "MWh", "MFU", "mesh")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Families of machines for one run; `print` shows a table, a notebook the picture.

    Attributes:
        model: its name.
        target: tokens, deadline, prices, failures.
        tokens_per_step: of the global batch, which is the same everywhere.
        families: in the order in which they were asked for.
    """

    model: str
    target: Target
    tokens_per_step: int
    families: tuple[Offers, ...]

    @property
    def cheapest(self) -> Offer | None:
        """The least money of all; None where a family that meets the deadline has no price, or
        none meets it.
        """
        offers = [family.cheapest for family in self.families if family.cheapest is not None]
        prices = [money(offer) for offer in offers]
        if not offers or None in prices:
            return None
        return min(offers, key=lambda offer: money(offer) or 0.0)

    def to_json(self) -> JsonObject:
        """The comparison as plain data; plans are named by their digests."""
        best = self.cheapest
        return {
            "model": self.model,
            "target": self.target.to_json(),
            "tokens_per_step": self.tokens_per_step,
            "families": [family.to_json() for family in self.families],
            "cheapest": None if best is None else best.topology,
        }

    def __str__(self) -> str:
        rows = [HEAD, *self.rows()]
        used = [
            column
            for column in range(len(HEAD))
            if column < 2 or any(row[column] for row in rows[1:])
        ]
        lines = [
            self.title,
            *aligned(
                [[row[column] for column in used] for row in rows], right=range(2, len(used) - 1)
            ),
        ]
        best = self.cheapest
        if best is not None and len(self.families) > 1:
            lines += wrapped("  - ", f"The least money: {best.topology}.")
        if self.target.prices and (unpriced := self._unpriced()):
            lines += wrapped("  - ", f"No price was given of {', '.join(unpriced)}.")
        for family in self.families:
            lines += wrapped("  - ", f"{family.family}: {family.certificate}.")
        return "\n".join(lines) + "\n"

    def _unpriced(self) -> list[str]:
        """Families that meet the deadline and have no price."""
        cheapest_by_family = [(family.family, family.cheapest) for family in self.families]
        return [
            name for name, best in cheapest_by_family if best is not None and money(best) is None
        ]

    @property
    def title(self) -> str:
        """What is compared."""
        return (
            f"{self.model}: {count_text(self.target.tokens)} tokens within {self.target.days:,.3g}"
            f" days, {count_text(self.tokens_per_step)} tokens a step"
        )

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Cells of the table, two rows a family, or one where one size is both."""
        for family in self.families:
            smallest, cheapest = family.smallest, family.cheapest
            if smallest is None or cheapest is None:
                yield (family.family, "none in time", *[""] * (len(HEAD) - 2))
            elif smallest == cheapest:
                yield _row(smallest, "smallest, cheapest")
            else:
                yield _row(smallest, "smallest")
                yield _row(cheapest, "cheapest")

    def svg(self) -> str:
        """The comparison as a picture: days over devices, one line a family, with the deadline."""
        from shardlib.booking.picture import comparison_svg

        return comparison_svg(self)

    def html(self) -> str:
        """The comparison as one page without scripts or anything to fetch."""
        from shardlib.booking.page import comparison_html

        return comparison_html(self)

    def _repr_html_(self) -> str:
        return self.svg()


def money(offer: Offer) -> float | None:
    """What an offer costs; None without a price."""
    return None if offer.cost is None else offer.cost.money


def _row(offer: Offer, what: str) -> tuple[str, ...]:
    assert offer.cost is not None and offer.plan is not None
    paid, energy = money(offer), offer.cost.kilowatt_hours
    idle = offer.devices - offer.plan.mesh.devices
    return (
        offer.topology,
        what,
        f"{offer.devices:,}",
        f"{offer.cost.wall_seconds / DAY:,.1f}",
        count_text(device_hours(offer)),
        "" if paid is None else f"{paid:,.0f}",
        "" if energy is None else f"{energy / 1000:,.0f}",
        percent_text(offer.mfu),
        f"{offer.plan.mesh}" + (f" ({idle:,} idle)" if idle else ""),
    )
