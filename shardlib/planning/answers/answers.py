"""Answers to several questions about a plan, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardlib.planning.answers.alternative import Alternative, alternatives_text
from shardlib.planning.answers.constraint import Constraints
from shardlib.planning.answers.kernels import Kernels
from shardlib.planning.answers.shadow_prices import Sensitivity
from shardlib.untrusted.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers to the questions that were asked about a plan; None for the others.

    Attributes:
        alternatives: the plans that come next.
        constraints: what holds the plan back.
        sensitivity: what more memory and faster links are worth, and the regret if a figure is
            lower.
        kernels: of a step, beside the roofline.
    """

    alternatives: tuple[Alternative, ...] | None = None
    constraints: Constraints | None = None
    sensitivity: Sensitivity | None = None
    kernels: Kernels | None = None

    def to_json(self) -> JsonObject:
        """The answers as plain data, each under its name."""
        data: dict[str, Any] = {}
        if self.alternatives is not None:
            data["alternatives"] = [one.to_json() for one in self.alternatives]
        if self.constraints is not None:
            data["constraints"] = self.constraints.to_json()
        if self.sensitivity is not None:
            data["sensitivity"] = self.sensitivity.to_json()
        if self.kernels is not None:
            data["kernels"] = self.kernels.to_json()
        return data

    def __str__(self) -> str:
        texts = [alternatives_text(self.alternatives)] if self.alternatives is not None else []
        return "\n".join(
            [
                *texts,
                *(
                    str(one)
                    for one in (self.constraints, self.sensitivity, self.kernels)
                    if one is not None
                ),
            ]
        )
