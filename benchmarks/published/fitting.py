"""What of a chip under a software stack is fitted to published runs, and a run of them."""

from __future__ import annotations

from dataclasses import dataclass

#: Figures of a chip that are fitted.
FIGURES: tuple[str, ...] = (
    "matmul",
    "eight_bit",
    "unfused",
    "memory",
    "attention",
    "microbatch_s",
    "dispatch_s",
    "gap_s",
    "fast",
    "slow",
    "misaligned",
    "grouped",
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of a group.

    Attributes:
        id, source, split: of the row; runs of one `split` are alike.
        measured_s: seconds of a step.
    """

    id: str
    source: str
    split: str
    measured_s: float
