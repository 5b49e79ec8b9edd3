"""The words in which items speak of their cost.

A term is a quantity of the whole program with a note of what divides it; an item is a separable piece of the cost, which yields terms under a choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardlib.axes import LogicalAxes
from shardlib.propagation.assignment import Choice, Cut


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A number of FLOPs or bytes of the whole program, and which axes divide it.

    Attributes:
        total: for uncut arrays.
        batch: whether data, fsdp and microbatches divide it.
        tensor: whether the tensor axis divides it.
    """

    total: float
    batch: bool
    tensor: bool


@dataclass(frozen=True, kw_only=True)
class Compute:
    """One kernel: FLOPs and memory traffic of one execution.

    Attributes:
        flops: operations.
        dtype: dtype of the operands, which decides the peak.
        traffic: bytes read and written, by divisor.
        trips: executions per microbatch.
        simple, transcendental: elements of the additions, multiplications and such, and of the exponentials and such, that are fused into it, by divisor.
        matmul: (rows, columns, depth) of a matmul with what divides each; None for other kernels.
    """

    flops: Amount
    dtype: str
    traffic: tuple[Amount, ...]
    trips: int
    simple: tuple[Amount, ...] = ()
    transcendental: tuple[Amount, ...] = ()
    matmul: tuple[Amount, Amount, Amount] | None = None


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective.

    Attributes:
        kind: kind of collective; gradients are decided by the ZeRO stage and say "reduce".
        group: "tensor", "gather" (a parameter over fsdp, ZeRO 3 only), "gradient" or "sum" (over data and fsdp).
        bytes: of the array before it is cut over the group itself.
        trips: executions per microbatch.
        shape: shape of the array, to see whether fsdp divides it.
        cut: cut of the array.
        frozen: dims that fsdp must not cut.
        over_tensor: whether the partial sums of a gradient are spread over tensor, too.
        cause: what needs it.
    """

    kind: str
    group: str
    bytes: Amount
    trips: int
    shape: tuple[int, ...] = ()
    cut: Cut = ()
    frozen: frozenset[int] = frozenset()
    over_tensor: bool = False
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Resident:
    """A value that is in memory at a certain point of the program.

    Attributes:
        bytes: its size.
        part: "saved" from the forward for the backward pass, "gradient", "copy" of a parameter (saved, cut as the parameter is), "gathered"
            (a parameter in use, where it rests in pieces), or "temporary".
        shape: elements per dim, to see whether fsdp divides a gradient or a copy.
        cut: compute cut per dim.
    """

    bytes: Amount
    part: str
    shape: tuple[int, ...] = ()
    cut: Cut = ()


@dataclass(frozen=True, kw_only=True)
class Rest:
    """A parameter with its gradient and optimizer state.

    Attributes:
        count: parameters that are alike.
        elements: number of elements of each.
        itemsize: bytes an element of the parameter.
        state: bytes an element of optimizer state.
        shape: elements per dim.
        cut: compute cut per dim.
        frozen: dims that fsdp must not cut (a stack of layers that a scan walks).
    """

    count: int
    elements: int
    itemsize: int
    state: float
    shape: tuple[int, ...]
    cut: Cut
    frozen: frozenset[int]

Term = Compute | Transfer | Resident | Rest


@dataclass(frozen=True, kw_only=True)
class Item:
    """A separable piece of the cost.

    Attributes:
        colours: colours that its terms depend on.
        terms: choice -> terms.
    """

    colours: frozenset[str]
    terms: Callable[[Choice], tuple[Term, ...]]


def amount(total: float, cut: Cut) -> Amount:
    """An amount of an array with a cut."""
    return Amount(total=total, batch="batch" in cut, tensor="tensor" in cut)


def named(axes: LogicalAxes) -> frozenset[str]:
    """The colours among the dims of an array."""
    return frozenset(name for name in axes if name)
