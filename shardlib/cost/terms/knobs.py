"""The decisions that pricing reads: what neither the mesh nor the colours say."""

from __future__ import annotations

from dataclasses import Field
from typing import Any, ClassVar, Protocol


class Knobs(Protocol):
    """Decisions of one value for all candidates of an array; `shardlib.decisions.table.Decisions`
    has them, and so does a plan.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def zero(self) -> int:
        """ZeRO stage, 0 to 3."""
        ...

    @property
    def schedule(self) -> str:
        """Pipeline schedule; "none" without stages."""
        ...

    @property
    def virtual(self) -> int:
        """Chunks of layers on each stage."""
        ...

    @property
    def context(self) -> str:
        """How keys and values meet queries along the context axis: all of them are gathered before
        ("all-gather"), go around beside the attention ("ring", arXiv:2310.01889), or devices
        exchange parts of the sequence for heads ("ulysses", arXiv:2309.14509). Without a context
        axis, one of them.
        """
        ...

    @property
    def gather(self) -> str:
        """When a pipeline's stage gathers sharded weights: at every "use", or "once" for all
        microbatches of a group.
        """
        ...

    @property
    def accumulation(self) -> int:
        """Groups of microbatches that go through the pipeline one after the other; 1 without
        stages.
        """
        ...

    @property
    def ring(self) -> bool:
        """Whether keys and values go around the context axis."""
        ...
