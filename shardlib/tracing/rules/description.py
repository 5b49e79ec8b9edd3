"""What does a table entry know about an equation, and what does it answer?

The tables in the files beside it map a primitive's name to a function from `Call` to `Description`.
Neither holds anything of JAX but the parameters, so every entry can be read as a small theorem
about shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.graph import FactorRule
from shardlib.graph.factors import Dim, Dims, opaque

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Call:
    """An equation of a jaxpr, as far as a rule needs it.

    Attributes:
        name: the primitive.
        operands: shape of each operand.
        results: shape of each result.
        params: the primitive's parameters.
    """

    name: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Description:
    """What the graph keeps of an equation: how its dims hang together, its category, its
    floating-point operations.
    """

    rule: FactorRule
    category: str
    flops: float = 0.0


Describe = Callable[[Call], Description]


class Factors:
    """Collects the factors of one op while its rule is written down."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.summed: set[int] = set()
        self.whole: set[int] = set()

    def parallel(self, size: int) -> Dim:
        """A new factor that may be sharded; `()` for a dim of size 1."""
        if size <= 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def sum(self, size: int) -> Dim:
        """A new factor that is contracted."""
        dim = self.parallel(size)
        self.summed.update(dim)
        return dim

    def keep(self, size: int) -> Dim:
        """A new factor that must stay whole."""
        dim = self.parallel(size)
        self.whole.update(dim)
        return dim

    def rule(self, operands: Sequence[Dims], results: Sequence[Dims]) -> FactorRule:
        """The finished rule."""
        return FactorRule(
            sizes=tuple(self.sizes),
            operands=tuple(operands),
            results=tuple(results),
            summed=frozenset(self.summed),
            whole=frozenset(self.whole),
        )


def elements(shape: Shape) -> float:
    """Number of elements of a shape."""
    return float(math.prod(shape))


def unknown(call: Call) -> Description:
    """The description of an equation about which nothing is known."""
    return Description(opaque(call.operands, call.results), "opaque")
