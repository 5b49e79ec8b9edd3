"""What a plan is made for: a model, a machine, and the software that runs it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardlib.decisions.table import Decisions
from shardlib.untrusted.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class FrameworkJob:
    """The training framework that a plan is made for, and the sizes that its configuration needs.

    Attributes:
        name: of the framework.
        profile: of the profile that the plan is priced as.
        vendor: of the chips.
        batch: examples of a step.
        sequence: positions of an example; 1 where there is no sequence.
        layers: layers of the largest layer group; 0 without layers.
        compute_dtype: dtype of the matmuls.
        experts: experts that tokens are routed to; 1 without.
    """

    name: str
    profile: str
    vendor: str
    batch: int
    sequence: int
    layers: int
    compute_dtype: str
    experts: int = 1

    def to_json(self) -> JsonObject:
        """The job as plain data."""
        return dict(self.__dict__)


@dataclass(frozen=True, kw_only=True)
class Purpose(Decisions):
    """Decisions, and what they are made for.

    Attributes:
        model: name of the model, for people.
        topology: spelling of the topology.
        framework: the training framework that runs it; None for programs of shardlib.
        origin: (word, value) pairs with which the command line can trace the model again.
    """

    model: str = field()
    topology: str = field()
    framework: FrameworkJob | None = None
    origin: tuple[tuple[str, str], ...] = ()
