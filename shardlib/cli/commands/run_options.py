"""Options of `shardlib plan` that say what the whole run is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from shardlib.cli.numbers import duration, price, quantity
from shardlib.errors import PlanError

if TYPE_CHECKING:
    from shardlib.planning.answers.run_cost import RunCost
    from shardlib.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Run:
    """The whole run that a plan is for."""

    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens", metavar="15T", help="Of the whole run: days, device-hours, energy."
        ),
    ] = None
    price: Annotated[
        str | None,
        typer.Option(
            "--price", metavar="MONEY[/h]", help="With --tokens: of a device and hour, or /d."
        ),
    ] = None
    mtbf: Annotated[
        str | None,
        typer.Option(
            "--mtbf",
            metavar="3h",
            help="With --tokens: between two failures of the whole machine.",
        ),
    ] = None

    def cost(self, plan: Plan) -> RunCost | None:
        """What the run takes; None where none was named."""
        if self.tokens is None:
            if self.price is not None or self.mtbf is not None:
                raise PlanError("--price and --mtbf are of a run\nTry: --tokens 15T beside them")
            return None
        return plan.run_cost(
            quantity(self.tokens, "--tokens"),
            price=None if self.price is None else price(self.price, "--price"),
            mtbf=None if self.mtbf is None else duration(self.mtbf, "--mtbf"),
        )
