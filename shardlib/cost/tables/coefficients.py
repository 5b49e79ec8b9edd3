"""Adds up the terms of items, for many shapes at once.

The result is an array [segments, quantities, shapes], per microbatch. Quantities of different items
add up, so tables of partial sums can be combined; only `cost/pricing/step_time.py` does anything
that is no sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from shardlib.axes import CONTEXT, EXPERT, STAGE, TENSOR, Axis
from shardlib.cost.machine.collective_tables import (
    INDEX,
    SLOTS,
    Slot,
    along,
    replicas,
    stored,
    tokens,
)
from shardlib.cost.machine.corrections import applied
from shardlib.cost.machine.efficiency import Efficiency, efficiency_of, linked
from shardlib.cost.tables.basis_functions import (
    AtRest,
    Book,
    Kernel,
    Launch,
    Load,
    Measure,
    Part,
    StoredWays,
    Values,
    Ways,
    evaluate,
    part,
)
from shardlib.cost.terms.framework import XLA, Stack
from shardlib.cost.terms.local_sizes import Shapes
from shardlib.cost.terms.terms import ENDS, Compute, Item, Resident, Rest, Term, Transfer
from shardlib.hardware.topology import Topology
from shardlib.propagation.assignment import Choice, Cut, has

Array = np.ndarray


class Q(IntEnum):
    """Quantities that add up over items, per microbatch and device; those of collectives follow as
    counts and bytes by slot.
    """

    COMPUTE = 0  # seconds of kernels
    WEIGHTS = 1  # seconds of those that compute gradients of weights
    FLOPS = 2  # executed
    GATHERED = 3  # bytes of parameters in use, if they are cut at rest (ZeRO 3)
    PARAMETERS = 4  # bytes of trained parameters, cut as in compute
    PARAMETERS_CUT = 5  # the same, cut at rest where a dim divides
    STATE = 6  # bytes of optimizer state, cut as in compute
    STATE_CUT = 7  # the same, cut at rest where a dim divides
    EXPERTS = 8  # bytes of parameters that the expert axis cuts, cut as in compute
    SAVED = 9  # bytes that the forward pass keeps for the backward pass
    TEMPORARY = 10  # bytes of other values alive
    GRADIENT = 11  # bytes of gradients alive, if they are not cut at rest (ZeRO 0, 1)
    GRADIENT_CUT = 12  # the same, if they are (ZeRO 2, 3)
    COPY = 13  # bytes of copies of parameters that are saved, cut as in compute
    COPY_CUT = 14  # the same, cut at rest where a dim divides
    KEPT = (
        15  # bytes of gradients as they are kept over the microbatches of a step, cut as in compute
    )
    KEPT_CUT = 16  # the same, cut at rest where a dim divides
    HOST = 17  # seconds that the host takes to launch kernels
    # bytes of parameters of layers that are cast before the loop, all layers at once, if they rest
    # whole (ZeRO 0 to 2)
    CAST = 18
    FROZEN = 19  # bytes of parameters that are not trained, cut as in compute
    FROZEN_CUT = 20  # the same, cut at rest where a dim divides


#: Rows of an array of quantities: `Q`, then the counts and then the bytes of every slot.
COUNTS, BYTES = len(Q), len(Q) + len(SLOTS)
ROWS = len(Q) + 2 * len(SLOTS)

#: Quantity of a correction -> rows.
_CORRECTED: dict[str, tuple[Q, ...]] = {
    "compute": (Q.COMPUTE, Q.WEIGHTS),
    "activations": (Q.SAVED, Q.COPY, Q.COPY_CUT),
    "temporaries": (Q.TEMPORARY,),
    "communication": (Q.GATHERED,),
}
#: Part of a resident value -> where it is counted; those that ZeRO cuts are counted whole and cut.
_PARTS: dict[str, Q] = {
    "cast": Q.CAST,
    "saved": Q.SAVED,
    "temporary": Q.TEMPORARY,
    "gathered": Q.GATHERED,
}
_PIECES: dict[str, tuple[Q, Q]] = {
    "gradient": (Q.GRADIENT, Q.GRADIENT_CUT),
    "copy": (Q.COPY, Q.COPY_CUT),
}

#: Group of a transfer -> the role of its collectives, and the axis that they run along.
_ROLES: dict[str, tuple[str, Axis]] = {
    "tensor": ("block", TENSOR),
    "context": ("context", CONTEXT),
    "keys": ("keys", CONTEXT),
    "ring": ("ring", CONTEXT),
    "exchange": ("exchange", CONTEXT),
    "expert": ("block", EXPERT),
    "stage": ("stage", STAGE),
}


def moved(term: Transfer, stack: Stack) -> list[tuple[Slot, Part, Part]]:
    """(slot, size, count) of the collectives of a transfer, a microbatch, over `term.bytes.total`
    and over `term.trips`.
    """
    size, once = part(term.bytes), Part()
    if term.group in _ROLES:
        role, axis = _ROLES[term.group]
        sharded = term.kind == "reduce-scatter"
        moved = size.by(Ways(axis.name)) if sharded else size
        return [(Slot(role, along(axis), term.kind), moved, once)]
    if term.group == "sum":
        return [(Slot("block", tokens(), "all-reduce"), size, once)]
    experts, tensor = has(term.cut, EXPERT.name), term.over_tensor
    sharded, replicated = (
        once.by(AtRest(term.shape, term.cut, term.frozen, stack.flat, divides))
        for divides in (True, False)
    )
    if term.group == "gather":
        return [(Slot("gather", stored(experts=experts), "all-gather"), size, sharded)]
    everywhere, shard = tokens(experts=experts, tensor=tensor), size.by(StoredWays(experts))
    return [
        (Slot("reduce", everywhere, "all-reduce"), size, once),
        (Slot("scatter", stored(experts=experts), "reduce-scatter"), shard, sharded),
        (Slot("scatter", replicas(tensor=tensor), "all-reduce"), shard, sharded),
        (Slot("scatter", everywhere, "all-reduce"), size, replicated),
    ]


def moves(term: Transfer, shapes: Shapes, pricer: Pricer) -> list[tuple[Slot, Array, Array]]:
    """(slot, bytes of each result, count) of the collectives of a transfer, a microbatch; a count
    is 0 where its role has none.
    """
    return [
        (
            slot,
            term.bytes.total * evaluate(size, shapes, pricer.constants),
            term.trips * evaluate(count, shapes, pricer.constants),
        )
        for slot, size, count in moved(term, pricer.stack)
    ]


#: Bytes that attention in blocks moves for every score, forward and backward: about 6 and 14 passes
#: over scores in float32, which the TPU compiler's cycles of a ring over 64 devices come to
#: (`benchmarks/long_context.py`: 339 s for 8.8e12 scores, forward, again and backward, at 2.76e12
#: bytes/s).
BLOCKS: tuple[float, float] = (24.0, 58.0)
#: The host's part in one kernel.
_LAUNCH = Part(factors=(Launch(),))
#: One entry of a tally: row, measure, coefficient.
Charge = tuple[int, Measure, float]


def charges(segment: int, term: Term, stack: Stack) -> Iterator[Charge]:
    """What a term of a segment adds to which row of a tally."""
    match term:
        case Compute():
            return _compute(segment, term)
        case Transfer():
            return _transfer(term, stack)
        case Resident():
            return _resident(term, stack)
        case Rest():
            return _rest(term, stack)


def _compute(segment: int, term: Compute) -> Iterator[Charge]:
    kernel = Kernel(replace(term, trips=1, weight=False), segment == ENDS)
    yield Q.COMPUTE, kernel, term.trips
    if term.weight:
        yield Q.WEIGHTS, kernel, term.trips
    yield Q.FLOPS, part(term.flops), term.flops.total * term.trips
    yield Q.HOST, _LAUNCH, term.trips


def _transfer(term: Transfer, stack: Stack) -> Iterator[Charge]:
    load = (Load(term.routed),) if term.routed is not None else ()
    for slot, size, count in moved(term, stack):
        yield COUNTS + INDEX[slot], count, term.trips
        yield BYTES + INDEX[slot], size.by(*count.factors, *load), term.bytes.total * term.trips


def _cut(
    whole: Part, shape: tuple[int, ...], cut: Cut, frozen: frozenset[int], stack: Stack
) -> tuple[Part, Part]:
    """The measures whose sum is that of an array at rest: in pieces where it divides, and whole
    where not.
    """
    ways = StoredWays(has(cut, EXPERT.name))
    return whole.by(AtRest(shape, cut, frozen, stack.flat), ways), whole.by(
        AtRest(shape, cut, frozen, stack.flat, divides=False)
    )


def _resident(term: Resident, stack: Stack) -> Iterator[Charge]:
    whole, size = part(term.bytes), term.bytes.total
    if term.part not in _PIECES:
        yield _PARTS[term.part], whole, size
        return
    row, cut = _PIECES[term.part]
    yield row, whole, size
    for piece in _cut(whole, term.shape, term.cut, frozenset(), stack):
        yield cut, piece, size


def _rest(term: Rest, stack: Stack) -> Iterator[Charge]:
    whole = Part(tensor=has(term.cut, "tensor"), expert=has(term.cut, "expert"))
    pieces, elements = (
        _cut(whole, term.shape, term.cut, term.frozen, stack),
        float(term.elements * term.count),
    )
    if not term.trained:
        yield Q.FROZEN, whole, elements * term.itemsize
        for piece in pieces:
            yield Q.FROZEN_CUT, piece, elements * term.itemsize
        return
    state = term.state if stack.state_bytes is None else stack.state_bytes
    sizes = (
        (Q.PARAMETERS, Q.PARAMETERS_CUT, term.itemsize),
        (Q.STATE, Q.STATE_CUT, state),
        (Q.KEPT, Q.KEPT_CUT, stack.gradient_bytes(term.itemsize)),
    )
    for row, cut, size in sizes:
        yield row, whole, elements * size
        for piece in pieces:
            yield cut, piece, elements * size
    if has(term.cut, "expert"):
        yield Q.EXPERTS, whole, elements * term.itemsize


@dataclass(frozen=True, kw_only=True)
class Tally:
    """A tally for any shapes: a matrix of coefficients times measures.

    Attributes:
        rows: numbers of the rows that are not empty, ascending.
        measures: numbers of the measures, in a `Book`.
        matrix: array [rows, measures].
    """

    rows: Array
    measures: tuple[int, ...]
    matrix: Array

    def folded(self, length: int, width: int, rows: Sequence[int]) -> Tally:
        """Segments of `width` rows added up, as many as there are in `length`, and of the result
        only some rows, as far as they are not empty.
        """
        found, which = np.unique(self.rows % width, return_inverse=True)
        matrix = np.zeros((len(found), len(self.measures)))
        np.add.at(matrix, which, np.where((self.rows < length)[:, None], self.matrix, 0.0))
        wanted = np.isin(found, rows) & matrix.any(1)
        used = np.flatnonzero(matrix[wanted].any(0))
        return Tally(
            rows=found[wanted],
            measures=tuple(self.measures[i] for i in used),
            matrix=matrix[np.ix_(wanted, used)],
        )

    def weighed(self, weights: Array) -> Tally:
        """Sums of the rows by coefficients, array [sums, all rows]; every sum is a row of the
        result.
        """
        matrix = weights[:, self.rows] @ self.matrix
        used = np.flatnonzero(matrix.any(0))
        return Tally(
            rows=np.arange(len(weights)),
            measures=tuple(self.measures[i] for i in used),
            matrix=matrix[:, used],
        )

    def on(self, values: Values, at: Array) -> Array:
        """The rows on some of the shapes, array [rows, shapes]."""
        return self.matrix @ values.stacked(self.measures, at)


def tallied(entries: Iterable[tuple[int, int, float]]) -> Tally:
    """The tally of (row, number of the measure, coefficient)."""
    listed = [entry for entry in entries if entry[2]]
    if not listed:
        return Tally(rows=np.zeros(0, dtype=np.int64), measures=(), matrix=np.zeros((0, 0)))
    rows, at = np.unique([row for row, _, _ in listed], return_inverse=True)
    measures, used = np.unique([number for _, number, _ in listed], return_inverse=True)
    matrix = np.zeros((len(rows), len(measures)))
    np.add.at(matrix, (at, used), [amount for _, _, amount in listed])
    return Tally(rows=rows, measures=tuple(measures.tolist()), matrix=matrix)


class Pricer:
    """Tallies terms on one topology.

    Attributes:
        topology: where the program runs, with links as fast as the stack's collectives reach.
        stack: the software.
        constants: efficiencies of the chips under the stack.
        outside: the same for kernels outside of all layers, where the loss is.
        factors: learned factor of each quantity that has one (`shardlib.cost.machine.corrections`).
    """

    def __init__(self, topology: Topology, stack: Stack = XLA) -> None:
        chip = topology.chip
        self.stack = stack
        constants = efficiency_of(chip.name, chip.vendor, stack.name, dict(topology.efficiency))
        self.constants: Efficiency = (
            replace(constants, scores=BLOCKS[0], scores_backward=BLOCKS[1])
            if stack.attention == "blocks"
            else constants
        )
        self.outside = replace(
            self.constants, unfused=max(self.constants.unfused, stack.unfused_loss)
        )
        self.topology = linked(topology, self.constants)
        self.factors = {
            quantity: one.factor
            for one in applied(topology)
            for quantity in _CORRECTED[one.quantity]
        }

    def waits(self, slots: Sequence[int]) -> Array:
        """Share of the seconds of collectives that compute waits for, array [slots, 1]: the stack
        hides the rest under the matmuls beside them.
        """
        hidden = {
            along(TENSOR): self.stack.tensor_overlap or 0.0,
            along(EXPERT): self.stack.expert_overlap or 0.0,
        }
        return np.array([[1.0 - hidden.get(SLOTS[slot].group, 0.0)] for slot in slots])

    def corrected(self, quantities: Array) -> Array:
        """Quantities with the factors applied: array [..., `ROWS` or the first of them, shapes]."""
        if not self.factors:
            return quantities
        factors = np.ones((ROWS, 1))
        for quantity, factor in self.factors.items():
            factors[quantity] = factor
        return quantities * factors[: quantities.shape[-2]]

    def values(self, book: Book, shapes: Shapes) -> Values:
        """Measures on shapes."""
        return Values(
            book=book,
            chip=self.topology.chip,
            constants=self.constants,
            outside=self.outside,
            shapes=shapes,
        )

    def tally(self, items: Iterable[Item], choice: Choice, shapes: Shapes, classes: int) -> Array:
        """Quantities of some items under a choice: array [classes + 2, `ROWS`, shapes]; the last
        two segments are `INSIDE` and `ENDS`.

        Args:
            items: to be added up.
            choice: what is cut.
            shapes: into how many parts.
            classes: number of classes of layers.
        """
        return self.tally_terms(
            ((item.segment, term) for item in items for term in item.terms(choice)), shapes, classes
        )

    def tally_terms(self, terms: Iterable[tuple[int, Term]], shapes: Shapes, classes: int) -> Array:
        """Quantities of terms with their segments, see `tally`."""
        book, segments = Book(), classes + 2
        found = tallied(
            (segment % segments * ROWS + row, book.number(measure), amount)
            for segment, term in terms
            for row, measure, amount in charges(segment, term, self.stack)
        )
        total = np.zeros((segments * ROWS, len(shapes)))
        total[found.rows] = found.on(self.values(book, shapes), np.arange(len(shapes)))
        return total.reshape(segments, ROWS, len(shapes))
