"""Which mesh axes share what, and how are rows exchanged and multiplied?"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shardlib.cost.terms.framework_profiles import EXCHANGE_ROOM
from shardlib.errors import LayoutError
from shardlib.lowering.experts.grouped import Grouped

#: Rows of a message are a multiple of it.
ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Where:
    """Experts on a mesh.

    Attributes:
        expert: mesh axes that share the experts, the major one first; empty where every device has
            all of them.
        ways: devices that share the experts: the product of the sizes of these axes.
        tensor: mesh axes that shard the hidden width of an expert.
        every: mesh axes that shard the tokens, the major one first; those of `expert` are among
            them, if tokens are not to be multiplied twice.
        exchange: "dense" exchanges messages of equal size (`jax.lax.all_to_all`, on every
            platform), "ragged" what is to be sent and no more (`jax.lax.ragged_all_to_all`, on TPU
            and GPU).
        grouped: how rows are multiplied with the matrix of their expert.
        slack: rows that there is room for in a round over those of an even routing; what does not
            fit takes another round.

    Raises:
        LayoutError: values that do not fit.
    """

    expert: tuple[str, ...]
    ways: int
    tensor: tuple[str, ...] = ()
    every: tuple[str, ...] = ()
    exchange: str = "dense"
    grouped: Grouped = field(default_factory=Grouped)
    slack: float = EXCHANGE_ROOM

    def __post_init__(self) -> None:
        if self.ways < 1 or (self.ways > 1) != bool(self.expert):
            raise LayoutError(
                f"experts on the axes {self.expert} are not shared in {self.ways} ways\nTry: the"
                " product of the sizes of the axes, 1 without axes"
            )
        if self.exchange not in ("dense", "ragged"):
            raise LayoutError(f"exchange {self.exchange!r} is not known\nTry: dense or ragged")
        if not (self.slack > 0 and math.isfinite(self.slack)):
            raise LayoutError(f"slack {self.slack} leaves no room for rows\nTry: 1.25")

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes, each once."""
        return tuple(dict.fromkeys((*self.every, *self.expert, *self.tensor)))

    def local(self, count: int) -> int:
        """Experts of one device, of `count` in all."""
        if count % self.ways:
            raise LayoutError(
                f"{count} experts cannot be shared by {'x'.join(self.expert)}={self.ways}"
                f" devices\nTry: an expert axis whose size divides {count}"
            )
        return count // self.ways

    def room(self, assignments: int) -> int:
        """Rows of the message to one device in a round, for so many assignments of the tokens of a
        device.
        """
        if self.ways == 1:
            return assignments
        return min(assignments, -(-math.ceil(self.slack * assignments / self.ways) // ROWS) * ROWS)

    def window(self, assignments: int) -> int:
        """Rows that arrive at a device in a round of the ragged exchange, for so many assignments
        of the tokens of each.
        """
        return min(assignments * self.ways, -(-math.ceil(self.slack * assignments) // ROWS) * ROWS)
