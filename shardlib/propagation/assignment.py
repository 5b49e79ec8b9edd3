"""Choices: which colours are sharded, and so how every dim and factor is.

For pricing, a layout need not name sizes: it is enough to know which dim the *batch* axes shard
(data, fsdp and expert together), which dim the *context* axis shards, which dim the *tensor* axis
cuts, and which dim of a weight the *expert* axis shards. `Choice` is that decision; for the tensor
axis it follows the priority semantics of `shardlib.rules`: the colours of `tensor` in order, then,
with sequence parallelism, the sequence colour.

>>> choice = Choice(tensor=("mlp",), batch="batch", sequence="seq")
>>> choice.cut(("batch", "seq", "mlp"))
('batch', None, 'tensor')
>>> choice.cut(("batch", "seq", "embed"))
('batch', 'tensor', None)

A dim that two axes shard names both, the major one first. The expert axis shards the batch of
everything that has one, and the experts of weights:

>>> choice = Choice(tensor=("mlp",), batch="batch", sequence="seq", context="seq", expert="expert")
>>> choice.cut(("batch", "seq", "embed"))
('batch', 'context+tensor', None)
>>> choice.cut(("expert", "embed", "mlp"))
('expert', None, 'tensor')
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from shardlib.axes import BATCH_AXES, EXPERT, LogicalAxes
from shardlib.rules import Rules

#: Per dim: the kinds of axes that shard it, joined by "+", or None.
Cut = tuple[str | None, ...]

#: What a dim is called that merges batch and sequence, as the tokens of a mixture of experts: batch
#: and context axes shard it together.
TOKENS = "batch+context"


@lru_cache(maxsize=1 << 14)
def has(cut: Cut, kind: str) -> bool:
    """Whether some dim is sharded over a kind of axis."""
    return any(part is not None and kind in part for part in cut)


@lru_cache(maxsize=1 << 14)
def divisors(cut: Cut) -> tuple[bool, bool, bool, bool]:
    """Whether batch, tensor, context and expert axes divide an array."""
    return has(cut, "batch"), has(cut, "tensor"), has(cut, "context"), has(cut, "expert")


def kinds(part: str | None) -> tuple[str, ...]:
    """The kinds of axes that shard one dim, the major one first."""
    return tuple(part.split("+")) if part else ()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which colours the mesh axes shard.

    Attributes:
        tensor: colours that the tensor axis shards, the first has priority.
        batch: the colour that data, fsdp and expert cut; None where the batch has none.
        sequence: the colour that the tensor axis shards where no colour of `tensor` occurs; None
            without sequence parallelism.
        context: the colour that the context axis shards; None without one.
        expert: the colour of experts, that the expert axis shards in values without a batch; None
            without one.
    """

    tensor: tuple[str, ...] = ()
    batch: str | None = None
    sequence: str | None = None
    context: str | None = None
    expert: str | None = None

    @cached_property
    def _hash(self) -> int:
        return hash((self.tensor, self.batch, self.sequence, self.context, self.expert))

    def __hash__(self) -> int:
        return self._hash  # tables of the search are asked for the same choices all the time

    def cut(
        self, colours: LogicalAxes, unsharded: Iterable[int] = (), sequence_at: int | None = None
    ) -> Cut:
        """The cut of a value or of the factors of an op.

        Args:
            sequence_at: position along the sequence that is sharded where several are (queries and
                keys of attention); by default the first.
        """
        result: list[str | None] = [None] * len(colours)
        blocked = set(unsharded)

        def place(name: str | None, axis: str, beside: str | None = None) -> bool:
            if name is None or name not in colours:
                return False
            for dim, colour in enumerate(colours):
                if colour == name and dim not in blocked and result[dim] in (None, beside):
                    result[dim] = f"{beside}+{axis}" if result[dim] else axis
                    return True
            return False

        tokens = TOKENS in colours and place(TOKENS, TOKENS if self.context else "batch")
        batched = tokens or place(self.batch, "batch")
        if self.context and not tokens:
            if sequence_at is not None and result[sequence_at] is None:
                result[sequence_at] = "context"
            elif sequence_at is None:
                place(self.context, "context")
        if not batched:
            place(self.expert, "expert")
        if any(place(name, "tensor") for name in self.tensor):
            return tuple(result)
        beside = "context" if self.sequence == self.context else None
        if (
            sequence_at is not None
            and result[sequence_at] in (None, beside)
            and colours[sequence_at] == self.sequence
        ):
            result[sequence_at] = f"{beside}+tensor" if result[sequence_at] else "tensor"
        else:
            place(self.sequence, "tensor", beside)
        return tuple(result)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    def alike(self, other: Choice) -> bool:
        """Whether the tensor axis shards the same under another choice."""
        return (self.tensor, self.sequence) == (other.tensor, other.sequence)

    def restrict(self, colours: frozenset[str]) -> Choice:
        """The part of the choice that can matter to something that has only these colours."""
        tensor = tuple(c for c in self.tensor if c in colours)
        sequence = self.sequence if self.sequence in colours else None
        if tensor == self.tensor and sequence == self.sequence:
            return self
        return Choice(
            tensor=tensor,
            batch=self.batch,
            sequence=sequence,
            context=self.context,
            expert=self.expert,
        )

    def rules(self) -> Rules:
        """The choice as sharding rules over mesh axes."""
        over = tuple(a for a in BATCH_AXES if self.expert or a != EXPERT.name)
        entries: list[tuple[str, tuple[str, ...]]] = [(self.batch, over)] if self.batch else []
        if self.expert:
            entries.append((self.expert, ("expert",)))
        entries += [(name, ("tensor",)) for name in self.tensor]
        along = (("context",) if self.context else ()) + (("tensor",) if self.sequence else ())
        if along:
            name = self.sequence or self.context
            assert name is not None
            entries += [
                (name, along),
                *([(name, ("context",))] if len(along) > 1 else []),
            ]  # the second where tensor shards another dim already
        return Rules(tuple(entries))
