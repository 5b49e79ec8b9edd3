"""The largest model that fits a deadline, as a value and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.booking.offers import Offer
from shardlib.booking.target import days_text
from shardlib.models import TransformerConfig
from shardlib.planning.units.quantity import count_text, parameters_text, percent_text
from shardlib.planning.units.tables import aligned, wrapped
from shardlib.untrusted.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Sized:
    """A model of some size on the machine.

    Attributes:
        config: the model.
        tokens: of its run.
        least_seconds: that its kernels alone take, spread equally over all devices.
        offer: the best plan and its cost; None where the kernels alone take too long.
    """

    config: TransformerConfig
    tokens: float
    least_seconds: float
    offer: Offer | None = None

    @property
    def meets(self) -> bool:
        """Whether it is trained in time."""
        return self.offer is not None and self.offer.meets

    @property
    def why(self) -> str:
        """How long it takes, or why it has no plan."""
        if self.offer is None:
            return f"kernels alone {days_text(self.least_seconds)}"
        if self.offer.cost is None:
            return self.offer.message
        return days_text(self.offer.cost.wall_seconds)

    def to_json(self) -> JsonObject:
        """The size as plain data."""
        config = self.config
        return {
            "parameters": config.parameter_count(),
            "layers": config.layers,
            "embed": config.embed,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "mlp": config.mlp,
            "tokens": self.tokens,
            "least_seconds": self.least_seconds,
            "offer": None if self.offer is None else self.offer.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The largest model of a family that a machine trains in time.

    Attributes:
        family: the known model whose shape it has.
        topology: the machine.
        deadline: seconds.
        best: the largest in time.
        looked: sizes that were planned, or excluded by their kernels, ascending.
        larger: names of all larger ones that the machine's peak alone does not exclude.
    """

    family: str
    topology: str
    deadline: float
    best: Sized
    looked: tuple[Sized, ...]
    larger: tuple[str, ...]

    @property
    def proven(self) -> bool:
        """Whether every larger one was planned, or excluded by its kernels."""
        return not self._unseen

    @property
    def _unseen(self) -> list[str]:
        seen = {size.config.name for size in self.looked}
        return [name for name in self.larger if name not in seen]

    @property
    def certificate(self) -> str:
        """What is proven, and what was only tried."""
        above = [
            size
            for size in self.looked
            if size.config.parameter_count() > self.best.config.parameter_count()
        ]
        planned = [size for size in above if size.offer is not None]
        excluded = len(above) - len(planned)
        reasons = [f"{size.config.name} ({size.why})" for size in planned]
        words = (
            f"planned, and not in time: {', '.join(reasons)}"
            if reasons
            else "none above was planned"
        )
        if excluded:
            words += f"; of {excluded} larger ones the kernels alone take too long"
        if self.proven:
            return f"the largest of the family, proven: {words}"
        return (
            f"the largest that was found: {words}; {len(self._unseen)} larger ones were not looked"
            " at, as if a larger one took longer"
        )

    def to_json(self) -> JsonObject:
        """The result as plain data."""
        return {
            "family": self.family,
            "topology": self.topology,
            "deadline_seconds": self.deadline,
            "best": self.best.to_json(),
            "proven": self.proven,
            "certificate": self.certificate,
            "looked_at": [size.to_json() for size in self.looked],
        }

    def __str__(self) -> str:
        config, offer = self.best.config, self.best.offer
        assert offer is not None and offer.plan is not None and offer.cost is not None
        rows = [
            ["parameters", parameters_text(config.parameter_count())],
            [
                "shape",
                f"{config.layers} layers, width {config.embed:,}, {config.heads} heads,"
                f" {config.kv_heads} of keys, feed-forward {config.mlp:,}",
            ],
            ["tokens", f"{count_text(self.best.tokens)}, {self._per_parameter:,.3g} a parameter"],
            ["time", f"{days_text(offer.cost.wall_seconds)} of {days_text(self.deadline)}"],
            ["device-hours", count_text(offer.cost.device_hours)],
            ["mesh", f"{offer.plan.mesh}, MFU {percent_text(offer.mfu)}"],
        ]
        if offer.cost.money is not None:
            rows.insert(5, ["cost", f"{offer.cost.money:,.0f}"])
        lines = [f"The family of {self.family} on {self.topology}", *aligned(rows)]
        return "\n".join([*lines, *wrapped("  - ", f"It is {self.certificate}.")]) + "\n"

    @property
    def _per_parameter(self) -> float:
        return self.best.tokens / self.best.config.parameter_count()
