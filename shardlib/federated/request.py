"""What a client is asked, and what it answers: arrays of the host and plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardlib.errors import ArgumentError
from shardlib.federated.parameters import Arrays


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What a client is asked.

    Attributes:
        arrays: parameters of the server, by path; or without names, in the order of the paths.
        partition: whose rows, from 0 on.
        partitions: how many there are.
        round: number of the round; the order of rows depends on it.
        mu: weight of the proximal term of FedProx; 0 for none.
        kept: optimizer state of the client's last round, where it is kept.
    """

    arrays: Arrays | Sequence[np.ndarray]
    partition: int
    partitions: int
    round: int = 0
    mu: float = 0.0
    kept: Arrays = field(default_factory=dict[str, np.ndarray])

    def __post_init__(self) -> None:
        if not 0 <= self.partition < self.partitions:
            raise ArgumentError(
                f"partition {self.partition} of {self.partitions}: partitions are counted from 0"
            )
        if not (np.isfinite(self.mu) and self.mu >= 0):
            raise ArgumentError(f"mu is {self.mu}; it is a number of at least 0")


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What a client answers.

    Attributes:
        weight: how much it counts, see `Local.weight`.
        metrics: "loss", the mean over the steps, or of all rows of an evaluation; "rows"; "steps";
            and means of the user's own.
        arrays: parameters by path; none of an evaluation.
        kept: optimizer state for the client's next round, where it is kept.
    """

    weight: float
    metrics: Mapping[str, float]
    arrays: Arrays = field(default_factory=dict[str, np.ndarray])
    kept: Arrays = field(default_factory=dict[str, np.ndarray])
