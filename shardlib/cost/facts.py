"""Facts of a traced step: fused kernels, named results of layers, live ranges of its arrays, and
phases that programs of different remat policies share.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.cost.attention import FORWARD, KERNELS, KernelHeads, without_tensor
from shardlib.cost.experts import EVEN_ROUTING, GROUPED, TokenExchange, capacity_layers
from shardlib.cost.framework import RESULTS
from shardlib.cost.terms import OUTSIDE_LAYERS, Item
from shardlib.graph import Graph, Op, StepGraph, once
from shardlib.layout import LogicalAxes
from shardlib.propagation.colours import (
    TOKENS,
    Choice,
    Spec,
    all_factor_colours,
    axes_of,
    sharded_by,
)

# --------------------------------------------------------------------------------------------------
# Kernels: which arrays a compiler writes to memory, and what reads them.
#
# XLA fuses chains of element-wise ops, broadcasts, reshapes and reductions' inputs into single
# kernels, so most values of a traced program never exist in memory. The model: a value is
# *materialised* if the op that makes it cannot be fused into its reader (a matmul, convolution,
# gather, scatter, sort, reduction, loop boundary), or if some reader needs it whole in memory (a
# matmul operand, a loop boundary, the program's result). Every other value is recomputed inside its
# readers; reading it means reading the materialised values it was made from (XLA's fusion pass:
# openxla/xla `xla/service/instruction_fusion.cc`, `IsAlwaysDuplicable` and `IsExpensive`).

#: Categories whose result is written to memory.
_WRITES: frozenset[str] = frozenset(
    {"matmul", "convolution", "gather", "scatter", "sort", "reduction", "boundary", "opaque"}
)
#: Categories that need their operands in memory.
_READS_MEMORY: frozenset[str] = frozenset(
    {"matmul", "convolution", "scatter", "sort", "boundary", "opaque"}
)
#: Roles of inputs, which are always in memory.
_INPUT_ROLES: frozenset[str] = frozenset({"parameter", "frozen", "state", "batch", "constant"})


@dataclass(frozen=True, kw_only=True)
class CompilerTraits:
    """Fusion and scheduling behaviour of a vendor's compiler.

    Attributes:
        fuses_operands: True if element-wise producers are computed inside the matmul or convolution
            that reads them, as XLA does on TPU but not for library calls (GPU, CPU); grouped
            matmuls are kernels of their own everywhere.
        softmax_row: longest row, elements, that a kernel processes as a whole (openxla/xla
            `softmax_rewriter_triton.cc`): such a kernel does not write over its operands, and
            writes the exponentials of a softmax once for all readers; 0 if there are no such
            kernels.
        peels: True if the peeled first iteration of a loop whose gathers are pipelined (ZeRO
            3) overlaps with the head's backward pass, weight gradients last.
        fuses_output_casts: True if a matmul writes its result in the dtype of a cast that is all
            that reads it, as XLA's fusions into matmuls do on TPUs and GPUs.
        merges_gathers: True if two gathers of one array become one (openxla/xla
            `all_gather_cse.cc`, which only the TPU pipeline runs).
        hoists_casts: True if casts of the layers of a stack become one cast of the stack before the
            loop, as XLA does on TPU (`benchmarks/memory_savers.py`, zero 0).
        score_bytes: bytes per score of the current block of blockwise attention, forward and
            backward: on GPUs forward the score in float32 and its exponential in 16 bits, backward
            both gradients: score and gradient of the probability in float32, probability and
            gradient of the score in 16 bits (on TPUs 4; `benchmarks/memory_savers.py`).
        lanes: elements to which a kernel of attention pads the minor dim of its arrays: TPUs store
            the two minor dims of an array in tiles of 8 x 128 (jax
            `jax/experimental/pallas/ops/tpu/splash_attention`); 0 for none.
        adds_partial_sums: True if partial sums of activations' gradients that are only added are
            reduced once, as on TPUs and GPUs.
        reassociates_all_reduces: True if those of uses of a parameter are, too (openxla/xla
            `all_reduce_reassociate.cc`, which only the GPU pipeline runs).
        reduces_after_loops: True if partial sums that a loop accumulates are all-reduced once,
            after it.
    """

    fuses_operands: bool = False
    softmax_row: int = 0
    peels: bool = False
    fuses_output_casts: bool = False
    merges_gathers: bool = False
    hoists_casts: bool = False
    score_bytes: tuple[float, float] = (6.0, 12.0)
    lanes: int = 0
    adds_partial_sums: bool = True
    reassociates_all_reduces: bool = False
    reduces_after_loops: bool = False


def traits(vendor: str) -> CompilerTraits:
    """The traits of the compiler for a vendor's chips ("nvidia", "google" or "cpu")."""
    return CompilerTraits(
        fuses_operands=vendor == "google",
        softmax_row=16384 if vendor == "nvidia" else 0,
        peels=vendor == "nvidia",
        fuses_output_casts=vendor != "cpu",
        merges_gathers=vendor == "google",
        hoists_casts=vendor == "google",
        score_bytes=(4.0, 4.0) if vendor == "google" else (6.0, 12.0),
        lanes=128 if vendor == "google" else 0,
        adds_partial_sums=vendor != "cpu",
        reassociates_all_reduces=vendor == "nvidia",
        reduces_after_loops=vendor != "cpu",
    )


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One fused kernel.

    Attributes:
        op: index of the op that ends the kernel.
        reads: materialised values it reads, without repeats.
        writes: materialised values it writes.
        fused: indices of the element-wise ops and reductions fused into it.
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
        row_results: results of kernels on whole rows, which are not written over an operand.
        roots: for every value, the materialised values it is made of (itself, if materialised).
    """

    kernels: tuple[Kernel, ...]
    materialised: frozenset[int]
    row_results: frozenset[int]
    roots: tuple[tuple[int, ...], ...]


def _materialised(graph: Graph, traits: CompilerTraits) -> frozenset[int]:
    materialised: set[int] = set(graph.inputs) | set(graph.outputs)
    materialised |= {i for i, value in enumerate(graph.values) if value.role in _INPUT_ROLES}
    for op in graph.ops:
        if op.category in _WRITES and not _reduces_nothing(graph, op):
            materialised |= set(op.results)
        if op.category in _READS_MEMORY and not (
            traits.fuses_operands
            and op.category in ("matmul", "convolution")
            and op.kind not in GROUPED
        ):
            materialised |= set(op.operands)
    return frozenset(materialised | exponentials(graph, traits))


def _reduces_nothing(graph: Graph, op: Op) -> bool:
    """Whether it reduces dims of size 1, as the transposition of a lookup of labels does."""
    before, after = (graph.values[values[0]].shape for values in (op.operands, op.results))
    return op.kind.startswith("reduce_") and math.prod(before) == math.prod(after)


def _row_results(graph: Graph, traits: CompilerTraits) -> frozenset[int]:
    return frozenset(
        i
        for i, value in enumerate(graph.values)
        if value.shape and value.shape[-1] <= traits.softmax_row
    )


def exponentials(graph: Graph, traits: CompilerTraits) -> frozenset[int]:
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


def fuse(graph: Graph, traits: CompilerTraits | None = None) -> Fusion:
    """The kernels of a graph, as a compiler with the given traits makes them; by default
    `CompilerTraits()`.
    """
    materialised = _materialised(graph, traits or CompilerTraits())
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
        row_results=_row_results(graph, traits or CompilerTraits()),
        roots=tuple(roots),
    )


# --------------------------------------------------------------------------------------------------
# Results of a layer, by the names of checkpoint lists.
#
# Frameworks say by name which results of a layer the forward pass saves: MaxText's remat policies
# ("query_proj", "context", "mlpwi", ...; AI-Hypercomputer/maxtext MaxText/layers/decoders.py),
# torchtitan's list of ops (every second matmul and attention; pytorch/torchtitan
# torchtitan/models/llama/parallelize_llama.py). Here a name stands for results that are identified
# by the structure of a layer whose attention is one kernel:
#
#     layer_input             the carry of the loop over layers
#     query, key, value       weight matmuls whose results the attention kernel reads
#     context                 result of the attention kernel
#     out                     weight matmuls that read nothing but the context
#     gate                    of several other weight matmuls, those that a non-linear function
#                             reads: the gate of a feed-forward layer
#     wide                    the others: into the feed-forward layer
#     narrow                  matmuls that read nothing but results of wide ones: out of it

#: Kinds of ops that non-linear functions begin with.
_NONLINEAR: frozenset[str] = frozenset(
    {"logistic", "tanh", "erf", "erfc", "max", "exp", "integer_pow"}
)


def named_results(
    graph: Graph, region: int, weights: Collection[int]
) -> Mapping[str, frozenset[int]]:
    """The results of one loop over layers, by name."""
    search = LayerSearch(graph, region, frozenset(weights))
    results: dict[str, set[int]] = {name: set() for name in RESULTS}
    results["layer_input"] = {
        value
        for op in graph.ops
        if op.kind == "carry" and op.region == region
        for value in op.results
        if "float" in graph.values[value].dtype
    }
    kernels = [op for op in graph.ops if op.kind == FORWARD and op.region == region]
    results["context"] = search.views({value for op in kernels for value in op.results})
    for op in kernels:
        for name, operand in zip(("query", "key", "value"), op.operands, strict=False):
            results[name] |= {value for value in search.sources(operand) if value in search.matmuls}
    attended = results["query"] | results["key"] | results["value"]
    sources = {
        result: search.sources(operand)
        for result, operand in search.matmuls.items()
        if result not in attended
    }
    results["out"] = {
        result for result, read in sources.items() if read and read <= results["context"]
    }
    results["narrow"] = {
        result for result, read in sources.items() if read and read <= set(sources) - results["out"]
    }
    into = set(sources) - results["out"] - results["narrow"]
    results["gate"] = {
        result for result in into if len(into) > 1 and search.read_by(result) & _NONLINEAR
    }
    results["wide"] = into - results["gate"]
    return {name: frozenset(values) for name, values in results.items()}


class LayerSearch:
    """A search for the sources of the values of one loop.

    Attributes:
        matmuls: results of weight matmuls -> the operand that is not a weight.
    """

    def __init__(self, graph: Graph, region: int, weights: frozenset[int]) -> None:
        self._makers: dict[int, Op] = {
            value: op
            for op in graph.ops
            if op.region == region and op.kind != "enter"
            for value in op.results
        }
        self._readers: dict[int, list[Op]] = defaultdict(list)
        self.matmuls: dict[int, int] = {}
        for op in dict.fromkeys(self._makers.values()):
            for value in op.operands:
                self._readers[value].append(op)
            if op.category == "matmul" or op.kind in GROUPED:
                others = [value for value in op.operands[:2] if value not in weights]
                if len(others) == 1:
                    self.matmuls[op.results[0]] = others[0]

    def read_by(self, value: int) -> set[str]:
        """Kinds of the ops that read a value or a cast of it."""
        readers = [(op.kind, op.results[0]) for op in self._readers.get(value, ())]
        return {kind for kind, _ in readers}.union(
            *(self.read_by(result) for kind, result in readers if kind == "convert_element_type")
        )

    def views(self, values: set[int]) -> set[int]:
        """The values, and every view of one of them."""
        views = set(values)
        for value, op in self._makers.items():
            if op.category == "movement" and views.issuperset(op.operands):
                views.add(value)
        return views

    def sources(self, value: int) -> frozenset[int]:
        """The weight-matmul results, contexts and layer inputs that a value is made of through
        other ops.
        """
        pending, seen, sources = [value], set[int](), set[int]()
        while pending:
            current = pending.pop()
            maker = self._makers.get(current)
            if current in seen or maker is None:
                continue
            seen.add(current)
            if current in self.matmuls or maker.kind in (FORWARD, "carry"):
                sources.add(current)
            else:
                pending.extend(maker.operands)
        return frozenset(sources)


# --------------------------------------------------------------------------------------------------
# Live ranges: which arrays are in memory at the same time.
#
# A value lives from the op that makes it to the last op that reads it, directly or through fused
# ops. Values that a loop reads from outside, and the stacks that it fills (XLA allocates a scan's
# stacked results before the first iteration), live for the whole loop; values of the body live
# within one iteration. The peak is the largest sum over all points of the program. Which point that
# is depends on the layout, so `points` returns a few candidates: the peak under several
# hypothetical weightings; pricing takes the largest of them.

_LOOPS: frozenset[str] = frozenset({"scan", "while"})


def _chains(graph: Graph) -> list[tuple[int, ...]]:
    """For every region, itself and its enclosing regions, innermost first."""
    chains: list[tuple[int, ...]] = []
    for region in range(len(graph.regions)):
        chain: list[int] = []
        current = region
        while current >= 0:
            chain.append(current)
            current = graph.regions[current].parent
        chains.append(tuple(chain))
    return chains


def _extents(graph: Graph, chains: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """First and last op index of every region, including nested regions."""
    extents = [(len(graph.ops), -1)] * len(graph.regions)
    for index, op in enumerate(graph.ops):
        for region in chains[op.region]:
            extents[region] = (min(extents[region][0], index), max(extents[region][1], index))
    return extents


def _outermost(graph: Graph, chain: Iterable[int], home: frozenset[int]) -> int | None:
    """The outermost loop of `chain` that does not contain the value's home region."""
    outermost = None
    for region in chain:
        if region in home:
            break
        if graph.regions[region].kind in _LOOPS:
            outermost = region
    return outermost


def leaves_loop(op: Op) -> bool:
    """True if a boundary op carries a value out of a loop: a stack, or the final carry, which also
    reads the first one.
    """
    return op.kind == "exit" or (op.kind == "carry" and len(op.operands) > 1)


@dataclass(frozen=True, kw_only=True)
class Accumulator:
    """A loop carry that every iteration only adds to: the cotangent of a value that all layers
    read, such as a position bias.

    Attributes:
        carry: value of the running sum, in the body.
        added: value that an iteration adds.
        first, last: live range of the sum, in ops: the whole loop.
    """

    carry: int
    added: int
    first: int
    last: int


@once
def accumulators(graph: Graph) -> tuple[Accumulator, ...]:
    """The accumulators of the loops of a program."""
    producers, readers = graph.producers(), Counter[int]()
    for op in graph.ops:
        readers.update(set(op.operands))
    extents = _extents(graph, _chains(graph))
    sums: list[Accumulator] = []
    for op in graph.ops:
        if op.kind != "carry" or len(op.operands) != 2:
            continue
        carry, total = op.operands
        maker = graph.ops[producers[total]] if total in producers else None
        if (
            maker is not None
            and maker.kind == "add_any"
            and carry in maker.operands
            and readers[carry] == 2  # the addition, and the op by which the sum leaves the loop
        ):
            added = maker.operands[maker.operands[0] == carry]
            first, last = extents[op.region]
            sums.append(Accumulator(carry=carry, added=added, first=first, last=last))
    return tuple(sums)


def live_spans(graph: Graph, fusion: Fusion, ignore: frozenset[int]) -> dict[int, tuple[int, int]]:
    """First and last op index of the live range of each materialised value."""
    chains = _chains(graph)
    extents = _extents(graph, chains)
    producers = graph.producers()
    home: dict[int, frozenset[int]] = {}
    births: dict[int, int] = {}
    for value in fusion.materialised:
        maker = producers.get(value)
        region = graph.ops[maker].region if maker is not None else 0
        births[value] = maker if maker is not None else 0
        if (
            maker is not None
            and leaves_loop(graph.ops[maker])
            and graph.regions[region].kind in _LOOPS
        ):
            births[value] = extents[region][0] if graph.ops[maker].kind == "exit" else maker
            region = graph.regions[region].parent
        home[value] = frozenset(chains[max(region, 0)])
    deaths = dict(births)
    for index, op in enumerate(graph.ops):
        for value in {root for operand in op.operands for root in fusion.roots[operand]}:
            if value not in deaths:
                continue
            loop = _outermost(graph, chains[op.region], home[value])
            deaths[value] = max(deaths[value], extents[loop][1] if loop is not None else index)
    for value in graph.outputs:
        if value in deaths:
            deaths[value] = len(graph.ops) - 1
    _alias(graph, fusion, births, deaths)
    return {
        value: (births[value], deaths[value])
        for value in fusion.materialised
        if value not in ignore and graph.values[value].role == "internal"
    }


def _alias(graph: Graph, fusion: Fusion, births: dict[int, int], deaths: dict[int, int]) -> None:
    """Ends the live range of an operand one op earlier if an element-wise kernel can write over it:
    same size, not read later.
    """
    for index, op in enumerate(graph.ops):
        if op.category != "elementwise":
            continue
        for value in op.results:
            if value not in births or value in fusion.row_results:
                continue
            dying = [
                root
                for operand in op.operands
                for root in fusion.roots[operand]
                if deaths.get(root) == index
                and births[root] < index
                and graph.values[root].bytes == graph.values[value].bytes
                and graph.values[root].role == "internal"
            ]
            if dying:
                deaths[dying[0]] = index - 1


def alive_at(spans: dict[int, tuple[int, int]], first: int, last: int) -> frozenset[int]:
    """Values whose live range overlaps the ops from `first` to `last`."""
    return frozenset(
        key for key, (birth, death) in spans.items() if birth <= first and last <= death
    )


# --------------------------------------------------------------------------------------------------
# Layer groups: the loops of a step that run over the same layers.
#
# The forward loop over a stack of layers and the backward loop over it read the same parameters;
# both belong to one *layer group*. Pipeline stages, and rematerialisation of only some of the
# layers, divide a group by its number of layers. Everything else (embedding, head and loss) is
# outside of the layers.


@dataclass(frozen=True, kw_only=True)
class LayerGroups:
    """The layer groups of one step graph.

    Attributes:
        layer_counts: number of layers of each group, in the order of the forward pass.
        regions: layer group of each region; `OUTSIDE_LAYERS` outside of all.
        carried: value that each group carries from layer to layer: the residual stream; -1 if there
            is none.
    """

    layer_counts: tuple[int, ...]
    regions: tuple[int, ...]
    carried: tuple[int, ...]

    def segment(self, region: int) -> int:
        """The layer group of a region, or `OUTSIDE_LAYERS`."""
        return self.regions[region]


def find_layers(graph: Graph, weights: Mapping[int, int]) -> LayerGroups:
    """Finds the layer groups.

    Args:
        weights: value -> the parameter that it is a copy, cast or slice of.
    """
    top = [_top(graph, region) for region in range(len(graph.regions))]
    reads: dict[int, set[int]] = {}
    for op in graph.ops:
        if (
            op.kind == "enter"
            and op.results[0] in weights
            and top[op.region] > 0
            and graph.regions[top[op.region]].parent == 0
            and op.region == top[op.region]
            and graph.regions[op.region].trips > 0
        ):
            reads.setdefault(op.region, set()).add(weights[op.results[0]])
    groups: list[tuple[set[int], list[int]]] = []
    for region, sources in reads.items():
        same_layers = [
            entry
            for entry in groups
            if entry[0] & sources
            and graph.regions[entry[1][0]].trips == graph.regions[region].trips
        ]
        if same_layers:
            same_layers[0][0].update(sources)
            same_layers[0][1].append(region)
        else:
            groups.append((set(sources), [region]))
    owner = {region: number for number, (_, regions) in enumerate(groups) for region in regions}
    return LayerGroups(
        layer_counts=tuple(graph.regions[regions[0]].trips for _, regions in groups),
        regions=tuple(
            owner.get(top[region], OUTSIDE_LAYERS) for region in range(len(graph.regions))
        ),
        carried=tuple(_carried(graph, regions[0]) for _, regions in groups),
    )


def repeated_calls(graph: Graph, layers: LayerGroups, weights: Mapping[int, int]) -> int:
    """The number of uses of the same parameters outside of all layer groups, for example if a loss
    calls its model several times: the calls become one loop, or the parameters are stacked several
    times. 1 without repetition.

    Args:
        weights: value -> the parameter that it is a copy, cast or slice of.
    """
    repeats = 1
    for op in graph.ops:
        read = [value for value in op.operands if value in weights]
        outside = layers.segment(op.region) == OUTSIDE_LAYERS
        top = _top(graph, op.region)
        if op.category == "matmul" and read and outside and top > 0:
            repeats = max(repeats, graph.regions[top].trips)
        elif op.kind == "stack" and read:
            repeats = max(repeats, *Counter(read).values())
    return repeats


def _carried(graph: Graph, region: int) -> int:
    """The largest floating-point array that a loop carries."""
    carried = [
        value
        for op in graph.ops
        if op.kind == "carry" and op.region == region
        for value in op.results
        if "float" in graph.values[value].dtype
    ]
    return max(carried, key=lambda value: graph.values[value].bytes, default=-1)


# --------------------------------------------------------------------------------------------------
# Phases of a step that are the same in programs of different remat policies.
#
# Programs of one model under different remat policies run the same loops over layers in the same
# order. So all of them pass through the same *phases*: a loop, or the ops between two. The memory
# that other layer groups have saved in a phase does not depend on the policy of the group whose
# loop runs, so the memory of a step with mixed policies can be put together from them
# (`shardlib.cost.variants`).


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Memory of one program in one phase.

    Attributes:
        segment: layer group of the loop, or `OUTSIDE_LAYERS` between loops.
        points: items of memory at each op of the phase where memory may peak.
        stacks: items of stacks of saved values, and of their gradients, that live for the whole
            phase.
    """

    segment: int
    points: tuple[list[Item], ...]
    stacks: list[Item]


@dataclass(frozen=True, kw_only=True)
class PhaseOps:
    """The ops of a phase in a step graph.

    Attributes:
        segment: layer group of the loop, or `OUTSIDE_LAYERS` between loops.
        first, last: ops of the phase; there may be none between loops.
        before, after: a value lives for the whole phase if its live range begins no later than
            `before` and ends no earlier than `after`.
    """

    segment: int
    first: int
    last: int
    before: int
    after: int


def phases(graph: Graph, layers: LayerGroups) -> tuple[PhaseOps, ...]:
    """The phases of a step from the end of the forward loops on, in order: before a loop, the loop,
    before the next and so on; memory is lower earlier.
    """
    loops: list[tuple[int, int, int, int]] = []
    for index, op in enumerate(graph.ops):
        segment = layers.segment(op.region)
        if segment == OUTSIDE_LAYERS:
            continue
        top = _top(graph, op.region)
        if loops and loops[-1][1] == top:
            loops[-1] = (*loops[-1][:3], index)
        else:
            loops.append((segment, top, index, index))
    seen = [segment for segment, *_ in loops]
    start = next((i for i, segment in enumerate(seen) if segment in seen[:i]), 0)
    listed: list[PhaseOps] = []
    for i in range(start, len(loops) + 1):
        before = loops[i - 1][3] if i else 0
        after = loops[i][2] if i < len(loops) else len(graph.ops) - 1
        listed.append(
            PhaseOps(
                segment=OUTSIDE_LAYERS,
                first=before + bool(i),
                last=after - (i < len(loops)),
                before=before,
                after=after,
            )
        )
        if i < len(loops):
            segment, _, first, last = loops[i]
            listed.append(
                PhaseOps(segment=segment, first=first, last=last, before=first, after=last)
            )
    return tuple(listed)


def _top(graph: Graph, region: int) -> int:
    """The enclosing region directly below the root; 0 for the root."""
    while graph.regions[region].parent > 0:
        region = graph.regions[region].parent
    return region


# --------------------------------------------------------------------------------------------------
# Facts that all items of one step graph share: colours, kernels, weights and gradients.


def kernel_heads(
    op: Op, colours: LogicalAxes, batch: str | None, sequence: str | None
) -> KernelHeads | None:
    """The heads of an attention kernel; None if they cannot be identified."""
    if op.kind not in KERNELS or batch is None:
        return None
    rows = op.rule.results[-1] if op.kind == FORWARD else op.rule.operands[-1]
    unsharded = {colours[factor] for factor in op.rule.whole} - {None}
    others = {batch, sequence, TOKENS, *unsharded} - {None}
    heads = {
        factor
        for dim in rows
        for factor in dim
        if factor not in op.rule.whole and colours[factor] not in others
    }
    if not heads:
        return None
    sides = [
        {factor for dim in dims for factor in dim} for dims in (*op.rule.operands, *op.rule.results)
    ]
    group = max(sorted(heads), key=lambda factor: sum(factor in side for side in sides))
    within = frozenset(heads - {group})
    return KernelHeads(
        group_factor=group,
        query_factors=within,
        groups=op.rule.sizes[group],
        queries_per_group=math.prod(op.rule.sizes[factor] for factor in within),
        colour=colours[group],
        width_colours=frozenset(n for n in unsharded if n is not None and n != sequence),
    )


def over_heads(spec: Spec, heads: KernelHeads) -> Spec:
    """The sharding of the factors of a kernel whose heads tensor shards inside it."""
    parts = [None if part == "tensor" else without_tensor(part) for part in spec]
    group = parts[heads.group_factor]
    parts[heads.group_factor] = "tensor" if group is None else f"{group}+tensor"
    return tuple(parts)


@dataclass(frozen=True, kw_only=True)
class HeadPaths:
    """The values between projections and attention kernels.

    Attributes:
        heads: heads of the kernel, by value.
        paired: gradients made by kernels whose head dims an op pairs before a contraction reads
            them, such as a rotation by positions.
    """

    heads: Mapping[int, KernelHeads]
    paired: frozenset[int]


def head_paths(
    graph: Graph, kernels: Mapping[int, KernelHeads], colours: Sequence[LogicalAxes]
) -> HeadPaths:
    """The values that ops without a contraction make of projection results for a kernel, and of the
    kernel's results for the products of gradients.
    """
    producers, value_heads, paired = graph.producers(), dict[int, KernelHeads](), set[int]()
    readers: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for value in op.operands:
            readers.setdefault(value, []).append(index)

    def next_ops(value: int, forward: bool) -> list[Op]:
        neighbours = (
            [producers[value]] if forward and value in producers else readers.get(value, [])
        )
        if forward and value not in producers:
            return []
        ops = [graph.ops[index] for index in neighbours]
        return [op for op in ops if op.category in ("elementwise", "movement")]

    for kernel, heads in kernels.items():
        colour, forward = heads.colour, graph.ops[kernel].kind == FORWARD
        for start in graph.ops[kernel].operands if forward else graph.ops[kernel].results:
            pending = [start]
            while pending:
                value = pending.pop()
                if value in value_heads or colour is None or colour not in colours[value]:
                    continue
                value_heads[value] = heads
                for op in next_ops(value, forward):
                    pending.extend(op.operands if forward else op.results)
                    if op.category == "movement" and op.rule.whole and not forward:
                        paired.add(start)
    return HeadPaths(heads=value_heads, paired=frozenset(paired))


class Facts:
    """Facts that the items of one step graph share: colours of values and factors, fusion, weights,
    gradients.

    Attributes:
        graph: the step graph.
        colours: colour per dim of every value.
        factors: colour per factor of every op.
        query: of every op with several factors along the sequence, that of the queries.
        weights, gradients: copies, casts and slices of parameters, and values that are gradients.
        fusion: kernels and materialised values.
        layers: layer groups.
        batch, sequence: colours of the batch and of the sequence.
        routes: True if tokens are routed between devices (`shardlib.cost.experts`).
        token_exchange: how tokens are dispatched to their experts.
        capped: layers of experts with a capacity, by region; only if tokens are routed.
        heads: heads of the kernels of attention, by index of the op.
        trips: number of executions of every region per microbatch.
        sources: input of the step graph -> the inputs of the step that it is made of.
        producers, consumers: the op that makes a value, and those that read it.
        head_width_colours: colours of the width of `heads`.
    """

    def __init__(
        self,
        step: StepGraph,
        colours: tuple[LogicalAxes, ...],
        parameter_stack_dims: frozenset[tuple[str, int]],
        traits: CompilerTraits,
        *,
        batch: tuple[str | None, int] = (None, 1),
        sequence: tuple[str | None, int] = (None, 1),
        routes: bool = False,
        token_exchange: TokenExchange = EVEN_ROUTING,
    ) -> None:
        self.graph = step.graph
        self._sizes = batch, sequence
        self.batch, self.sequence, self.routes = batch[0], sequence[0], routes
        self.token_exchange = token_exchange
        self.capped = capacity_layers(step.graph) if routes else {}
        self.colours = colours = merged_colours(step.graph, colours, batch, sequence)
        self.weights, self.gradients = step.weights(), step.gradient_like()
        self.factors = all_factor_colours(step.graph, colours, {*self.weights, *self.gradients})
        self.query = tuple(
            _query_factor(step.graph, op, colours, factor_colours, sequence[0])
            for op, factor_colours in zip(step.graph.ops, self.factors, strict=True)
        )
        self.traits = traits
        self.fusion: Fusion = fuse(step.graph, traits)
        self.layers: LayerGroups = find_layers(step.graph, self.weights)
        self.heads = {
            index: heads
            for index, op in enumerate(step.graph.ops)
            if (heads := kernel_heads(op, self.factors[index], batch[0], sequence[0])) is not None
        }
        widths = (heads.width_colours for heads in self.heads.values())
        self.head_width_colours = frozenset[str]().union(*widths)
        self._head_paths = head_paths(step.graph, self.heads, colours)
        self.trips = tuple(step.graph.trips(region) for region in range(len(step.graph.regions)))
        self.sources = dict(zip(step.graph.inputs, step.inputs, strict=True))
        self.parameter_stack_dims = parameter_stack_dims
        self._specs: dict[Choice, dict[LogicalAxes, Spec]] = {}
        self._last_specs: tuple[Choice | None, dict[LogicalAxes, Spec]] = None, {}
        self._sharded_inside: dict[tuple[int, Choice], bool] = {}
        self.producers = step.graph.producers()
        self.consumers: dict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(step.graph.ops):
            for value in dict.fromkeys(op.operands):
                self.consumers[value].append(index)

    def for_graph(self, graph: Graph) -> Facts:
        """The facts of a part of the program that makes no gradients and has the same value
        indices.
        """
        batch, sequence = self._sizes
        step = StepGraph(
            graph=graph, inputs=tuple(self.sources[value] for value in graph.inputs), gradients=()
        )
        return Facts(
            step,
            self.colours,
            self.parameter_stack_dims,
            self.traits,
            batch=batch,
            sequence=sequence,
            routes=self.routes,
            token_exchange=self.token_exchange,
        )

    def op_spec(self, index: int, choice: Choice) -> Spec:
        """The sharding of the factors of an op."""
        spec = choice.spec(self.factors[index], self.graph.ops[index].rule.whole, self.query[index])
        return over_heads(spec, self.heads[index]) if self.shards_heads(index, choice) else spec

    def value_spec(self, value: int, choice: Choice) -> Spec:
        """The sharding of the dims of a value."""
        spec = self._colour_spec(value, choice)
        if value not in self._head_paths.heads or not self.has_whole_heads(value, choice):
            return spec
        position = self.colours[value].index(self._head_paths.heads[value].colour)
        return tuple(
            "tensor" if dim == position else without_tensor(part) for dim, part in enumerate(spec)
        )

    def _colour_spec(self, value: int, choice: Choice) -> Spec:
        last, specs = self._last_specs
        if choice is not last:  # a choice is used for many values, and hashing it takes time
            specs = self._specs.setdefault(choice, {})
            self._last_specs = choice, specs
        axes = self.colours[value]
        if axes not in specs:
            specs[axes] = choice.spec(axes)
        return specs[axes]

    def shards_heads(self, index: int, choice: Choice) -> bool:
        """True for an attention kernel whose heads tensor shards only inside the kernel, while
        outside it shards the sequence or the width of heads.
        """
        if index not in self.heads:
            return False
        key = index, choice
        if key not in self._sharded_inside:
            self._sharded_inside[key] = self._shards_heads(index, choice)
        return self._sharded_inside[key]

    def _shards_heads(self, index: int, choice: Choice) -> bool:
        heads, op = self.heads[index], self.graph.ops[index]
        spec = choice.spec(self.factors[index], op.rule.whole, self.query[index])
        return not any("tensor" in axes_of(spec[factor]) for factor in heads.factors) and any(
            sharded_by(self._colour_spec(value, choice), "tensor")
            for value in (*op.operands, *op.results)
        )

    def sharding_of_value(self, value: int) -> Hashable:
        """All that decides `value_spec`: equal for values that every choice shards alike."""
        return self.colours[value], self._head_paths.heads.get(value)

    def sharding_of_op(self, index: int) -> Hashable:
        """All that decides `op_spec` and `shards_heads`, besides the factor rule."""
        op, heads = self.graph.ops[index], self.heads.get(index)
        inside = heads and tuple(self.colours[value] for value in (*op.operands, *op.results))
        return self.factors[index], self.query[index], heads, inside

    def pairs_head_dims(self, value: int, choice: Choice) -> bool:
        """True if a gradient made by an attention kernel satisfies `has_whole_heads`, and an
        op pairs its head dims (a rotation by positions) before the gradient of the projection reads
        it.
        """
        return value in self._head_paths.paired and self.has_whole_heads(value, choice)

    def has_whole_heads(self, value: int, choice: Choice) -> bool:
        """True if a value is between an attention kernel and a projection whose heads tensor shards
        along their width, so that its heads are already whole.
        """
        heads, spec = self._head_paths.heads.get(value), self._colour_spec(value, choice)
        return heads is not None and any(
            colour in heads.width_colours and "tensor" in axes_of(part)
            for colour, part in zip(self.colours[value], spec, strict=True)
        )

    def reaches_kernel(self, value: int) -> bool:
        """True for values between a projection and an attention kernel."""
        return value in self._head_paths.heads

    def grouped_matmul_colours(self, region: int) -> frozenset[str]:
        """The colours of all indices of the grouped matmuls of a region."""
        return frozenset(
            colour
            for number, op in enumerate(self.graph.ops)
            if op.region == region and op.kind in GROUPED
            for colour in self.factors[number]
            if colour is not None
        )

    def shards_grouped_matmuls(self, region: int, choice: Choice) -> bool:
        """True if tensor shards an index of the grouped matmuls of a region."""
        return any(
            sharded_by(self.op_spec(number, choice), "tensor")
            for number, op in enumerate(self.graph.ops)
            if op.region == region and op.kind in GROUPED
        )

    def experts_per_token(self, value: int) -> float:
        """Rows of an array over the tokens of the batch: the number of experts per token."""
        rows = math.prod(self.graph.values[value].shape[:-1])
        return max(1.0, rows / (self._sizes[0][1] * self._sizes[1][1]))

    def stack_dims(self, value: int) -> frozenset[int]:
        """The dims of an input that stack layers."""
        source = self.sources.get(value)
        if source is None:
            return frozenset()
        return (
            frozenset({0})
            if source.stacked
            else frozenset(dim for path, dim in self.parameter_stack_dims if path in source.paths)
        )


def merged_colours(
    graph: Graph,
    colours: tuple[LogicalAxes, ...],
    batch: tuple[str | None, int],
    sequence: tuple[str | None, int],
) -> tuple[LogicalAxes, ...]:
    """The colours of every value, with `TOKENS` for dims that merge batch and sequence."""
    (name, examples), (sequence_name, length) = batch, sequence
    if name is None or sequence_name is None or length == 1:
        return colours

    def merges(colour: str | None, size: int, axes: LogicalAxes) -> bool:
        return colour == name and sequence_name not in axes and size % (examples * length) == 0

    return tuple(
        tuple(
            TOKENS if merges(colour, size, axes) else colour
            for colour, size in zip(axes, value.shape, strict=True)
        )
        for axes, value in zip(colours, graph.values, strict=True)
    )


def _query_factor(
    graph: Graph,
    op: Op,
    colours: tuple[LogicalAxes, ...],
    factors: LogicalAxes,
    sequence: str | None,
) -> int | None:
    """Of several factors along the sequence (queries and keys of attention), the first one in the
    largest value; None if there is only one.
    """
    positions = [i for i, c in enumerate(factors) if c == sequence and i not in op.rule.whole]
    if sequence is None or len(positions) < 2:
        return None
    sides = [
        (value, dims)
        for values, all_dims in ((op.operands, op.rule.operands), (op.results, op.rule.results))
        for value, dims in zip(values, all_dims, strict=True)
    ]
    value, dims = max(
        sides, key=lambda side: (colours[side[0]].count(sequence), graph.values[side[0]].bytes)
    )
    return next(
        (
            major
            for dim, group in enumerate(dims)
            if colours[value][dim] == sequence and (major := op.rule.major(group)) in positions
        ),
        None,
    )
