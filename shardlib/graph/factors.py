"""Factor rules: how the dims of an op's operands and results hang together.

A *factor* is one index of an op, as in an einsum: a matmul [b, i] x [i, j] -> [b, j] has three.
Each dim of each operand and result is a tuple of factors, the major one first (a reshape that
merges heads and head_dim has a dim with two); a dim without a factor is `()`: it has size 1, or
nothing is known about it.

>>> rule = FactorRule(
...     sizes=(8, 4, 16), operands=(((0,), (1,)), ((1,), (2,))), results=(((0,), (2,)),), summed={1}
... )
>>> rule.major(rule.operands[1][0])
1
>>> print(rule)
[a b] [b c] -> [a c] where a=8 b=4 c=16, sum b

What sharding a factor means is one of three things. A *parallel* factor is sharded freely: every
device computes its part. A *summed* factor is contracted: sharding it leaves partial results that a
reduction must add up. A *whole* factor must not be sharded: the op mixes positions along it (sort,
cumulative sum, a window), so a sharded operand is gathered first.

A dim may be several things side by side, as the fused kernel of queries, keys and values is: then
the major factor counts the pieces and is *outer*, and a cut of the dim cuts the next factor, which
is every piece (`shardlib.propagation.pieces`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

#: The factors of one dim, major first.
Dim = tuple[int, ...]
#: The dims of one value.
Dims = tuple[Dim, ...]


#: A dim of an op: whether it is of a result, of which one, and which of its dims.
Place = tuple[bool, int, int]


@dataclass(frozen=True)
class Window:
    """A dim that is a run of consecutive positions of a longer one, as the results of a split are.

    Attributes:
        long: the longer dim.
        short: the shorter one; None where it has one position and the op drops it (`unstack`).
        start: first position of the run in the longer dim.
        size: its length.
    """

    long: Place
    short: Place | None
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class FactorRule:
    """The factors of one op.

    Attributes:
        sizes: size of each factor, elements.
        operands: for each operand, for each dim, its factors.
        results: the same for the results.
        summed: factors whose cut leaves partial results (the reduction may be a sum, a maximum,
            ...).
        whole: factors that must not be sharded.
        outer: those of them that count the pieces of a dim; a cut of the dim cuts the next factor
            instead.
        windows: dims that are runs of positions of others.
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    summed: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    outer: frozenset[int] = frozenset()
    windows: tuple[Window, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "summed", frozenset(self.summed))
        object.__setattr__(self, "whole", frozenset(self.whole))
        for factor in self.used():
            assert 0 <= factor < len(self.sizes), (factor, self.sizes)
        assert not self.summed & self.whole, (self.summed, self.whole)

    def used(self) -> set[int]:
        """Every factor that some dim mentions."""
        return {
            factor for dims in (*self.operands, *self.results) for dim in dims for factor in dim
        }

    def major(self, dim: Dim) -> int | None:
        """The factor that a cut of this dim cuts: the major one larger than 1 that counts no
        pieces; None where there is none.
        """
        return next(
            (factor for factor in dim if self.sizes[factor] > 1 and factor not in self.outer), None
        )

    def dims(self) -> Iterator[tuple[Place, Dim]]:
        """Every dim of every operand and result."""
        for result, values in ((False, self.operands), (True, self.results)):
            for position, dims in enumerate(values):
                yield from (
                    ((result, position, dim_position), dim) for dim_position, dim in enumerate(dims)
                )

    def __str__(self) -> str:
        def letter(factor: int) -> str:
            return chr(ord("a") + factor) if factor < 26 else f"f{factor}"

        def text(dims: Dims) -> str:
            return "[" + " ".join("*".join(map(letter, dim)) or "1" for dim in dims) + "]"

        def names(label: str, factors: Iterable[int]) -> str:
            listed = " ".join(map(letter, sorted(factors)))
            return f", {label} {listed}" if listed else ""

        sizes = " ".join(f"{letter(i)}={size}" for i, size in enumerate(self.sizes))
        return (
            f"{' '.join(map(text, self.operands))} -> {' '.join(map(text, self.results))} where"
            f" {sizes}" + names("sum", self.summed) + names("whole", self.whole)
        )


def elementwise(
    shapes: Iterable[tuple[int, ...]], result: tuple[int, ...], results: int = 1
) -> FactorRule:
    """The rule of an op that works position by position; operands may have size-1 dims that
    broadcast, or rank 0.
    """
    return FactorRule(
        sizes=result,
        operands=tuple(
            (
                tuple(
                    (i,) if size == result[i] and size > 1 else () for i, size in enumerate(shape)
                )
                if len(shape) == len(result)
                else ((),) * len(shape)
            )
            for shape in shapes
        ),
        results=(tuple((i,) if size > 1 else () for i, size in enumerate(result)),) * results,
    )


def opaque(operands: Iterable[tuple[int, ...]], results: Iterable[tuple[int, ...]]) -> FactorRule:
    """The rule of an op about which nothing is known: every dim is a factor of its own that must
    stay whole.
    """
    sizes: list[int] = []

    def fresh(shape: tuple[int, ...]) -> Dims:
        start = len(sizes)
        sizes.extend(shape)
        return tuple((start + i,) if size > 1 else () for i, size in enumerate(shape))

    operand_dims, result_dims = tuple(map(fresh, operands)), tuple(map(fresh, results))
    return FactorRule(
        sizes=tuple(sizes),
        operands=operand_dims,
        results=result_dims,
        whole=frozenset(range(len(sizes))),
    )
