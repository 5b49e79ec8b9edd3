"""Given a choice of colours, which kind of cut does every dim and factor get?

For pricing, a layout need not name mesh axes or sizes: it is enough to know which dim the *batch* axes cut (data and fsdp
together) and which dim the *tensor* axis cuts. `Choice` is that decision; it follows the priority semantics of
`shardlib.rules`: the colours of `tensor` in order, then, with sequence parallelism, the sequence colour.

>>> choice = Choice(tensor=("mlp",), batch="batch", sequence="seq")
>>> choice.cut(("batch", "seq", "mlp"))
('batch', None, 'tensor')
>>> choice.cut(("batch", "seq", "embed"))
('batch', 'tensor', None)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardlib.axes import LogicalAxes
from shardlib.rules import Rules

#: Per dim: "batch", "tensor" or None.
Cut = tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which colours the mesh axes cut.

    Attributes:
        tensor: colours that the tensor axis cuts, the first has priority.
        batch: the colour that data and fsdp cut; None where the batch has none.
        sequence: the colour that the tensor axis cuts where no colour of `tensor` occurs; None without sequence parallelism.
    """

    tensor: tuple[str, ...] = ()
    batch: str | None = None
    sequence: str | None = None

    def cut(self, colours: LogicalAxes, whole: Iterable[int] = ()) -> Cut:
        """The cut of a value or of the factors of an op.

        Args:
            colours: colour per dim or factor.
            whole: positions that must not be cut.
        """
        result: list[str | None] = [None] * len(colours)
        blocked = set(whole)

        def place(name: str | None, axis: str) -> bool:
            for dim, colour in enumerate(colours):
                if name is not None and colour == name and dim not in blocked and result[dim] is None:
                    result[dim] = axis
                    return True
            return False

        place(self.batch, "batch")
        any(place(name, "tensor") for name in (*self.tensor, self.sequence))
        return tuple(result)

    def restrict(self, colours: frozenset[str]) -> Choice:
        """The part of the choice that can matter to something that has only these colours."""
        return Choice(tensor=tuple(c for c in self.tensor if c in colours), batch=self.batch if self.batch in colours else None,
                      sequence=self.sequence if self.sequence in colours else None)

    def rules(self) -> Rules:
        """The choice as sharding rules over mesh axes."""
        entries: list[tuple[str, tuple[str, ...]]] = [(self.batch, ("data", "fsdp"))] if self.batch else []
        entries += [(name, ("tensor",)) for name in (*self.tensor, self.sequence) if name]
        return Rules(tuple(entries))
