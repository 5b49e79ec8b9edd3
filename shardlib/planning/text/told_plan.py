"""A plan that can be told without its model."""

from __future__ import annotations

from shardlib.hardware.topology import topology as find_topology
from shardlib.planning.answers.run_cost import RESTART_S, RunCost, run_cost
from shardlib.planning.decisions.plan_data import PlanData
from shardlib.planning.text.card import plan_card, plan_line
from shardlib.planning.text.diff import diff
from shardlib.planning.text.explain import explain


class ToldPlan(PlanData):
    """A plan in words: one line where it is printed, a card in a notebook, a page of text."""

    def __repr__(self) -> str:
        return plan_line(self)

    def _repr_html_(self) -> str:
        return plan_card(self)

    def explain(self) -> str:
        """What was chosen, why, and what it costs, as text for people.

        Returns:
            Several paragraphs and tables, of at most 100 columns.
        """
        return explain(self)

    def diff(self, other: PlanData) -> str:
        """What another plan decides and costs differently, as text of at most 100 columns.

        Args:
            other: a plan of any model or topology.
        """
        return diff(self, other)

    def run_cost(
        self,
        tokens: float,
        *,
        price: float | None = None,
        mtbf: float | None = None,
        restart: float = RESTART_S,
    ) -> RunCost:
        """What a run of so many tokens takes: days, device-hours, money, energy, and what failures
        cost with the best interval between saves; `print` shows it.

        Args:
            tokens: of the whole run.
            price: of a device and hour, in your own money; None for none.
            mtbf: seconds between two failures of the whole machine; None where nothing fails.
            restart: seconds from a failure to the next step.

        Raises:
            ArgumentError: numbers that are not positive; or failures so close that no run ends.
            TopologyError, MissingFileError: the plan's topology is a file that is not here.
        """
        return run_cost(
            self,
            find_topology(self.topology),
            tokens=tokens,
            price=price,
            mtbf=mtbf,
            restart=restart,
        )
