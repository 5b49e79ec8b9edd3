"""What a program computes, free of JAX.

A `Graph` is a flat list of ops in execution order. Loops and branches do not nest: every op belongs
to a *region*, and a region knows its parent and how often it runs for one run of its parent. Values
enter and leave a loop through *boundary* ops of no cost that carry ordinary factor rules:

    enter   [layers, in, out] -> [in, out]   a stacked operand of a scan, one slice per iteration
    carry   [batch, embed] -> [batch, embed] the initial carry, the body's carry, the final carry
    exit    [in, out] -> [layers, in, out]   a result that a scan stacks up

so that propagation and cost see one kind of op. Ops called through jit, remat and custom
derivatives are inlined.

`Op.path` locates the op in the program it was traced from, "3/body/12" say; lowering uses it to
find the equation again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardlib.compact import compact
from shardlib.graph.factors import FactorRule
from shardlib.report import Finding

#: Bytes of an element for each dtype name that JAX uses; sub-byte types count whole bytes as stored
#: unpacked on CPU.
ITEMSIZE: dict[str, int] = {
    "bool": 1,
    **dict.fromkeys(("int1", "uint1", "int2", "uint2", "int4", "uint4"), 1),
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e4m3": 1,
    "float8_e3m4": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

#: What an op does to the machine; cost models treat each differently.
CATEGORIES: tuple[str, ...] = (
    "matmul",
    "convolution",
    "elementwise",
    "reduction",
    "gather",
    "scatter",
    "movement",
    "sort",
    "boundary",
    "opaque",
)


def input_source(number: int) -> tuple[str, int]:
    """Where an input of a program is said to come from, as results of operations come from (path,
    index).
    """
    return "input", number


@dataclass(frozen=True, kw_only=True)
class Value:
    """An array.

    Attributes:
        shape: elements per dim.
        dtype: JAX's name of the dtype; "key" for PRNG keys and "token" for effects.
        path: tree path for inputs ("params.layers.mlp.kernel", "batch.tokens"), else "".
        role: "parameter" (trained), "frozen" (used as a parameter is, without a gradient), "state"
            (other model state), "batch", "constant" or "internal".
    """

    shape: tuple[int, ...]
    dtype: str
    path: str = ""
    role: str = "internal"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE.get(self.dtype, 4)

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation.

    Attributes:
        kind: JAX's primitive name, or "enter", "carry", "exit" for boundaries.
        operands: indices into `Graph.values`.
        results: indices into `Graph.values`.
        rule: how the dims hang together.
        category: one of `CATEGORIES`.
        flops: floating-point operations of one execution on the whole, uncut arrays.
        region: index into `Graph.regions`.
        path: where the equation stands in the traced program.
        scope: the model's name scope, for messages.
    """

    kind: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: FactorRule
    category: str
    flops: float = 0.0
    region: int = 0
    path: str = ""
    scope: str = ""

    def __post_init__(self) -> None:
        assert self.category in CATEGORIES, self.category

    def value(self, result: bool, position: int) -> int:
        """The index of an operand, or of a result."""
        return (self.results if result else self.operands)[position]


@dataclass(frozen=True, kw_only=True)
class Region:
    """A piece of the program that runs as a whole.

    Attributes:
        parent: index of the region around it; -1 for the root.
        kind: "root", "scan", "while" or "branch".
        trips: executions for one execution of the parent.
    """

    parent: int
    kind: str
    trips: int = 1


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A program as a flat list of ops.

    Attributes:
        values: every array; ops and inputs refer to them by index.
        ops: in execution order.
        regions: region 0 is the root.
        inputs: value indices of the program's inputs, in order.
        outputs: value indices of its results, in order.
        findings: what tracing noticed.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    regions: tuple[Region, ...] = (Region(parent=-1, kind="root"),)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = ()

    __repr__ = compact

    def trips(self, region: int) -> int:
        """Executions of a region in one run of the program."""
        total = 1
        while region >= 0:
            total *= self.regions[region].trips
            region = self.regions[region].parent
        return total

    def producers(self) -> dict[int, int]:
        """For each value that an op makes, the index of that op."""
        return {value: index for index, op in enumerate(self.ops) for value in op.results}

    def inputs_of(self, role: str) -> Iterator[int]:
        """Value indices of the inputs with a role."""
        return (index for index in self.inputs if self.values[index].role == role)

    @property
    def flops(self) -> float:
        """Floating-point operations of one run of the whole program."""
        return sum(op.flops * self.trips(op.region) for op in self.ops)
