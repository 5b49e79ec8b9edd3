"""Where the main activations of a step live: as they are made, as they are held between
operations, and as operations read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardlib.axes import LogicalAxes
from shardlib.layout import Layout
from shardlib.untrusted.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Move:
    """A collective of an activation.

    Attributes:
        kind: as in `shardlib.collective.KINDS`.
        axes: the mesh axes it spans.
        of: the weights, or the attention, that read the activation after it, or whose result it is
            before it.
        layout: how the activation is sharded on the other side of the collective than `held`.
        before: whether that is before it, as of partial sums, and not after it.
    """

    kind: str
    axes: tuple[str, ...]
    of: tuple[str, ...]
    layout: Layout
    before: bool = False

    def to_json(self) -> JsonObject:
        """The move as plain data."""
        return {
            "kind": self.kind,
            "axes": list(self.axes),
            "of": list(self.of),
            "layout": self.layout.to_json(),
            "before": self.before,
        }


@dataclass(frozen=True, kw_only=True)
class ActivationLayout:
    """Where one activation lives, of the whole batch; a step with microbatches has a part of it at
    a time.

    Attributes:
        name: what makes it, or what reads it: "output of layers.mlp.up".
        shape: elements per dim.
        dtype: JAX's name of the dtype.
        colours: colour per dim; None where the dim has none.
        count: how many there are in a forward and backward pass, one for each layer say.
        held: how it is sharded between operations.
        moves: the collectives that bring it there, and from there to what reads it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    colours: LogicalAxes
    held: Layout
    count: int = 1
    moves: tuple[Move, ...] = ()

    def to_json(self) -> JsonObject:
        """The layout as plain data."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "colours": list(self.colours),
            "held": self.held.to_json(),
            "count": self.count,
            "moves": [move.to_json() for move in self.moves],
        }


def together(names: Iterable[str]) -> str:
    """Names in one, what they begin with alike said once.

    >>> together(["layers.mlp.up", "layers.mlp.gate", "layers.mlp.up"])
    'layers.mlp.up/gate'
    >>> together(["head", "layers.mlp.up"])
    'head, layers.mlp.up'

    Args:
        names: dotted.
    """
    found = list(dict.fromkeys(names))
    fronts = {name.rpartition(".")[0] for name in found}
    if len(found) > 1 and len(fronts) == 1 and (front := fronts.pop()):
        return f"{front}." + "/".join(name.rpartition(".")[2] for name in found)
    return ", ".join(found)
