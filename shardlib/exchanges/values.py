"""The ways in which islands meet.

*Outer* is what belongs to all islands: its parameters are those that all start the next round from.
Signs and words are those of DiLoCo: the outer gradient is outer parameters minus the mean of the
islands' parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from shardlib.exchanges.compressed import Compressed
from shardlib.exchanges.diloco import DiLoCo
from shardlib.exchanges.gossip import Gossip
from shardlib.exchanges.shown import Shown
from shardlib.untrusted.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Exact(Shown):
    """There is one island: gradients of the whole batch are reduced in every step, as planned."""

    kind: ClassVar[str] = "exact"
    places: ClassVar[tuple[str, ...]] = ()
    islands: ClassVar[int] = 1

    def to_json(self) -> JsonObject:
        """The exchange as plain data."""
        return {"kind": self.kind}

    def __str__(self) -> str:
        return self.kind


#: How islands that train apart meet.
Meets: TypeAlias = DiLoCo | Gossip
#: How several islands train.
Several: TypeAlias = Meets | Compressed
Exchange: TypeAlias = Exact | Several
Form: TypeAlias = type[Exact] | type[DiLoCo] | type[Gossip] | type[Compressed]
#: One island.
EXACT = Exact()
#: Exchanges by the word with which they are pinned.
KINDS: dict[str, Form] = {form.kind: form for form in (Exact, DiLoCo, Gossip, Compressed)}
