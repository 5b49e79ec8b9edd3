"""Kernels: which arrays a compiler writes to memory, and what reads them.

XLA fuses chains of element-wise ops, broadcasts, reshapes and reductions' inputs into single
kernels, so most values of a traced program never exist in memory. The model here: a value is
*materialised* if the op that makes it cannot be fused into its reader (a matmul, convolution,
gather, scatter, sort, reduction, loop boundary), or if some reader needs it whole in memory (a
matmul operand, a loop boundary, the program's result). Every other value is computed anew inside
its readers; reading it means reading the materialised values it was made from (XLA's fusion pass:
openxla/xla `xla/service/instruction_fusion.cc`, `IsAlwaysDuplicable` and `IsExpensive`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardlib.cost.step.routed_experts import GROUPED
from shardlib.graph import Graph

#: Categories whose result is written to memory.
_WRITES: frozenset[str] = frozenset(
    {"matmul", "convolution", "gather", "scatter", "sort", "reduction", "boundary", "opaque"}
)
#: Categories that need their operands in memory.
_READS_WHOLE: frozenset[str] = frozenset(
    {"matmul", "convolution", "scatter", "sort", "boundary", "opaque"}
)
#: Roles of inputs that are in memory anyway.
_SOURCES: frozenset[str] = frozenset({"parameter", "frozen", "state", "batch", "constant"})


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a vendor's compiler does with kernels.

    Attributes:
        fuses_operands: whether element-wise producers are computed inside the matmul or convolution
            that reads them, as XLA does on TPU and not where matmuls are library calls (GPU, CPU);
            grouped matmuls are kernels of their own everywhere.
        softmax_row: longest row, elements, that a kernel works on as a whole (openxla/xla
            `softmax_rewriter_triton.cc`): such a kernel writes its result beside its operands, and
            the exponentials of a softmax once for all readers; 0 where there are no such kernels.
        peels: whether the first iteration that is taken out of a pipelined loop runs beside the
            head's whole backward pass, weight gradients last.
        shares_gathers: whether two gathers of one array become one (openxla/xla
            `all_gather_cse.cc`, which only the TPU pipeline runs).
        casts_stacks: whether casts of layers of a stack become one cast of the stack before the
            loop, as XLA does on TPU (`benchmarks/memory_savers.py`, zero 0).
        score_bytes: bytes of a score of the block that attention in blocks works on, forward and
            backward: on GPUs forward the score in float32 and its exponential in 16 bits, backward
            the gradient of the score too, and more where kernels follow each other (XLA has 11 to
            14 bytes at the peak, on TPUs 4; `benchmarks/memory_savers.py`).
        adds_first: whether sums that are only added are reduced once (openxla/xla
            `all_reduce_reassociate.cc`, which only the GPU pipeline runs).
    """

    fuses_operands: bool = False
    softmax_row: int = 0
    peels: bool = False
    shares_gathers: bool = False
    casts_stacks: bool = False
    score_bytes: tuple[float, float] = (6.0, 11.0)
    adds_first: bool = False
    reduces_after_loops: bool = False


def traits(vendor: str) -> Traits:
    """The traits of the compiler for a vendor's chips ("nvidia", "google" or "cpu")."""
    return Traits(
        fuses_operands=vendor == "google",
        softmax_row=16384 if vendor == "nvidia" else 0,
        peels=vendor == "nvidia",
        shares_gathers=vendor == "google",
        casts_stacks=vendor == "google",
        score_bytes=(4.0, 4.0) if vendor == "google" else (6.0, 11.0),
        adds_first=vendor == "nvidia",
        reduces_after_loops=vendor != "cpu",
    )


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One pass over memory.

    Attributes:
        op: index of the op that ends the kernel.
        reads: materialised values it reads, without repeats.
        writes: materialised values it writes.
        fused: indices of the element-wise ops and reductions that it computes on the way.
    """

    op: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fused: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """The kernels of a graph.

    Attributes:
        kernels: in execution order; loop boundaries move no memory and are left out.
        materialised: value indices that exist in memory.
        apart: values that a kernel on whole rows makes, which are not written over an operand.
        roots: for every value, the materialised values it is made of (itself, if materialised).
    """

    kernels: tuple[Kernel, ...]
    materialised: frozenset[int]
    apart: frozenset[int]
    roots: tuple[tuple[int, ...], ...]


def _is_materialised(graph: Graph, traits: Traits) -> frozenset[int]:
    materialised: set[int] = set(graph.inputs) | set(graph.outputs)
    materialised |= {i for i, value in enumerate(graph.values) if value.role in _SOURCES}
    for op in graph.ops:
        if op.category in _WRITES:
            materialised |= set(op.results)
        if op.category in _READS_WHOLE and not (
            traits.fuses_operands
            and op.category in ("matmul", "convolution")
            and op.kind not in GROUPED
        ):
            materialised |= set(op.operands)
    return frozenset(materialised | exponentials(graph, traits))


def _by_rows(graph: Graph, traits: Traits) -> frozenset[int]:
    return frozenset(
        i
        for i, value in enumerate(graph.values)
        if value.shape and value.shape[-1] <= traits.softmax_row
    )


def exponentials(graph: Graph, traits: Traits) -> frozenset[int]:
    """Results of exponentials that are summed along their rows and read again: the middle of a
    softmax.
    """
    summed: set[int] = set()
    readers: Counter[int] = Counter()
    for op in graph.ops:
        readers.update(set(op.operands))
        if op.kind == "reduce_sum":
            summed.update(op.operands)
    return frozenset(
        value
        for op in graph.ops
        if op.kind == "exp"
        for value in op.results
        if value in summed
        and readers[value] > 1
        and graph.values[value].shape
        and graph.values[value].shape[-1] <= traits.softmax_row
    )


def fuse(graph: Graph, traits: Traits | None = None) -> Fusion:
    """Finds the kernels of a graph, as a compiler with the given traits makes them.

    Args:
        traits: what the compiler fuses; by default that of `Traits()`.
    """
    materialised = _is_materialised(graph, traits or Traits())
    roots: list[tuple[int, ...]] = [(i,) for i in range(len(graph.values))]
    kernels: list[Kernel] = []
    inside: dict[int, frozenset[int]] = {}
    for index, op in enumerate(graph.ops):
        fused = frozenset[int]().union(
            *(inside.get(operand, frozenset()) for operand in op.operands)
        )
        if op.category in ("elementwise", "reduction"):
            fused |= {index}
        reads = tuple(dict.fromkeys(root for operand in op.operands for root in roots[operand]))
        writes = tuple(value for value in op.results if value in materialised)
        for value in op.results:
            if value not in materialised:
                roots[value], inside[value] = reads, fused
        if writes and op.category != "boundary":
            kernels.append(Kernel(op=index, reads=reads, writes=writes, fused=tuple(sorted(fused))))
    return Fusion(
        kernels=tuple(kernels),
        materialised=materialised,
        apart=_by_rows(graph, traits or Traits()),
        roots=tuple(roots),
    )
