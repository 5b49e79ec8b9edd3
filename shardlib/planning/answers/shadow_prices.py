"""What more of a resource is worth to a plan, and what a wrong figure costs it."""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.axes import MeshShape
from shardlib.compact import compact
from shardlib.planning.units.quantity import TIE, bytes_text, count_text, percent_text, seconds_text
from shardlib.planning.units.tables import aligned, wrapped
from shardlib.untrusted.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Price:
    """What more of a resource is worth.

    Attributes:
        resource: "memory", or the name of a link tier.
        kind: of the tier; "hbm" for the memory of a device.
        unit: what one more of it is: bytes of memory, or bytes per second.
        amount: how much of it there is now: usable bytes of a device, or peak bytes per second.
        saved_seconds: seconds of a step that one unit more saves; the best plan is chosen anew.
        break_amount: amount from which on another plan is the best; 0 where there is none.
        break_mesh: mesh of that plan.
        break_changes: what it decides differently.
        break_seconds: its time of a step at the break point.
        limit: of a link, the largest rate that was looked at; of memory, an amount at which no
            other plan is faster yet.
    """

    resource: str
    kind: str
    unit: int
    amount: float
    saved_seconds: float
    break_amount: float = 0.0
    break_mesh: MeshShape | None = None
    break_changes: tuple[str, ...] = ()
    break_seconds: float = 0.0
    limit: float = 0.0

    def to_json(self) -> JsonObject:
        """The price as plain data."""
        return {
            **self.__dict__,
            "break_mesh": dict(self.break_mesh) if self.break_mesh is not None else None,
            "break_changes": list(self.break_changes),
        }


@dataclass(frozen=True, kw_only=True)
class Shock:
    """What happens if a figure of the machine is a tenth lower than was thought.

    Attributes:
        what: the figure.
        factor: what is left of it.
        plan_seconds: time of a step of this plan.
        best_seconds: time of a step of the plan that is then the best.
        best_mesh: its mesh.
        changes: what it decides differently; empty where this plan is still the best.
    """

    what: str
    factor: float
    plan_seconds: float
    best_seconds: float
    best_mesh: MeshShape
    changes: tuple[str, ...]

    @property
    def regret_seconds(self) -> float:
        """Seconds of a step lost by having chosen this plan."""
        return max(0.0, self.plan_seconds - self.best_seconds)

    def to_json(self) -> JsonObject:
        """The shock as plain data, with the regret."""
        return {
            **self.__dict__,
            "best_mesh": dict(self.best_mesh),
            "changes": list(self.changes),
            "regret_seconds": self.regret_seconds,
        }


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How a plan answers to changes of its machine.

    Attributes:
        step_seconds: time of a step of the plan as it is.
        best_seconds: time of the best plan of the search; the same unless the plan was made in
            another way.
        prices: shadow prices, memory first, then link tiers from the outermost inwards.
        shocks: every figure lowered by a tenth, one at a time.
    """

    step_seconds: float
    best_seconds: float
    prices: tuple[Price, ...]
    shocks: tuple[Shock, ...]

    __repr__ = compact

    def to_json(self) -> JsonObject:
        """The sensitivity as plain data."""
        return {
            "step_seconds": self.step_seconds,
            "best_seconds": self.best_seconds,
            "prices": [one.to_json() for one in self.prices],
            "shocks": [one.to_json() for one in self.shocks],
        }

    def __str__(self) -> str:
        return sensitivity_text(self)


def sensitivity_text(found: Sensitivity) -> str:
    """Prices and shocks for people."""
    lines = [
        "What more would buy",
        *aligned(
            [
                ("", "now", "one more", "saves a step"),
                *(price_row(price) for price in found.prices),
            ],
            right={1, 2, 3},
        ),
    ]
    lines += [line for price in found.prices for line in wrapped("  - ", break_text(price))]
    if found.best_seconds < found.step_seconds * (1 - TIE):
        lines += wrapped(
            "  - ",
            f"This plan takes {seconds_text(found.step_seconds)}; the search's best takes"
            f" {seconds_text(found.best_seconds)}, and prices are for that one.",
        )
    rows = [SHOCK_HEAD, *map(shock_row, found.shocks)]
    return (
        "\n".join(
            [*lines, "", "If a figure is lower than thought", *aligned(rows, right={1, 2, 3})]
        )
        + "\n"
    )


SHOCK_HEAD = ("", "this plan", "best plan then", "regret", "which would be")


def link_name(name: str, kind: str) -> str:
    """A link tier for people; one that is the memory of a host is no memory of a device."""
    return f"{name} links" if kind == "memory" else name


def shock_row(shock: Shock) -> tuple[str, ...]:
    """A shock under `SHOCK_HEAD`."""
    return (
        f"{shock.what} -{percent_text(1 - shock.factor)}",
        seconds_text(shock.plan_seconds),
        seconds_text(shock.best_seconds),
        seconds_text(shock.regret_seconds),
        "the same" if not shock.changes else str(shock.best_mesh),
    )


def price_row(price: Price) -> tuple[str, str, str, str]:
    """Resource, how much there is, one more of it, and what that saves."""
    if price.kind == "hbm":
        return (
            "memory of a device",
            bytes_text(price.amount),
            "1 GB",
            seconds_text(price.saved_seconds),
        )
    return (
        f"{link_name(price.resource, price.kind)} of a device",
        count_text(price.amount, "B/s"),
        "1 GB/s",
        seconds_text(price.saved_seconds),
    )


def break_text(price: Price) -> str:
    """Where another plan becomes the best, as a sentence."""

    name = price.resource if price.kind == "hbm" else link_name(price.resource, price.kind)

    def amount(value: float) -> str:
        return bytes_text(value) if price.kind == "hbm" else count_text(value, "B/s")

    if not price.break_amount:
        reach = f" up to {amount(price.limit)}" if price.limit and price.kind != "hbm" else ""
        return f"{name}: no amount{reach} changes the plan."
    same_mesh = "" if price.break_mesh is None else f"{price.break_mesh}, "
    return (
        f"{name}: from {amount(price.break_amount)} on another plan is the best,"
        f" {same_mesh}{seconds_text(price.break_seconds)} a step"
        f" ({'; '.join(price.break_changes)})."
    )
