"""Adds up the terms of items, for many shapes at once.

The result is an array [segments, quantities, shapes], per microbatch. Quantities of different items add up, so tables of partial sums can be combined; only
`cost/pricing.py` does anything that is no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import IntEnum

import numpy as np

from shardlib.cost.corrections import applied
from shardlib.cost.efficiency import Efficiency, efficiency_of, linked
from shardlib.cost.links import INDEX, SLOTS, Slot
from shardlib.cost.roofline import busiest, kernel_seconds
from shardlib.cost.shapes import Shapes, divides_at_rest, local
from shardlib.cost.stack import XLA, Stack
from shardlib.cost.terms import ENDS, Compute, Item, Resident, Rest, Term, Transfer
from shardlib.hardware.topology import Topology
from shardlib.propagation.assignment import Choice, has

Array = np.ndarray


class Q(IntEnum):
    """Quantities that add up over items, per microbatch and device; those of collectives follow as counts and bytes by slot."""

    COMPUTE = 0  # seconds of kernels
    WEIGHTS = 1  # seconds of those that compute gradients of weights
    FLOPS = 2  # executed
    GATHERED = 3  # bytes of parameters in use, if they are cut at rest (ZeRO 3)
    PARAMETERS = 4  # bytes of parameters, cut as in compute
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
    KEPT = 15  # bytes of gradients as they are kept over the microbatches of a step, cut as in compute
    KEPT_CUT = 16  # the same, cut at rest where a dim divides
    HOST = 17  # seconds that the host takes to launch kernels


#: Rows of an array of quantities: `Q`, then the counts and then the bytes of every slot.
COUNTS, BYTES = len(Q), len(Q) + len(SLOTS)
ROWS = len(Q) + 2 * len(SLOTS)

#: Quantity of a correction -> rows.
_CORRECTED: dict[str, tuple[Q, ...]] = {
    "compute": (Q.COMPUTE, Q.WEIGHTS), "activations": (Q.SAVED, Q.COPY, Q.COPY_CUT), "temporaries": (Q.TEMPORARY,), "communication": (Q.GATHERED,),
}
#: Part of a resident value -> where it is counted; those that ZeRO cuts are counted whole and cut.
_PARTS: dict[str, Q] = {"saved": Q.SAVED, "temporary": Q.TEMPORARY, "gathered": Q.GATHERED}
_PIECES: dict[str, tuple[Q, Q]] = {"gradient": (Q.GRADIENT, Q.GRADIENT_CUT), "copy": (Q.COPY, Q.COPY_CUT)}


def moves(term: Transfer, shapes: Shapes, *, flat: bool = False) -> list[tuple[Slot, Array, Array]]:
    """(slot, bytes of each result, count) of the collectives of a transfer, a microbatch; a count is 0 where its role has none. See `Stack.flat`."""
    size, once = local(term.bytes, shapes), shapes.ones * term.trips
    if term.group in ("tensor", "context"):
        ways = shapes.tensor if term.group == "tensor" else shapes.context
        return [(Slot("block" if term.group == "tensor" else "context", term.group, term.kind), size / ways if term.kind == "reduce-scatter" else size, once)]
    if term.group in ("expert", "stage"):
        return [(Slot("block" if term.group == "expert" else "stage", term.group, term.kind), size, once)]
    if term.group == "sum":
        return [(Slot("block", "tokens", "all-reduce"), size, once)]
    mine = " of experts" if has(term.cut, "expert") else ""
    cut = divides_at_rest(term.shape, term.cut, term.frozen, shapes, flat=flat)
    if term.group == "gather":
        return [(Slot("gather", f"rest{mine}", "all-gather"), size, once * cut)]
    also = "·tensor" if term.over_tensor else ""
    whole, ways = f"tokens{mine}{also}", shapes.rest(term.cut)
    return [(Slot("reduce", whole, "all-reduce"), size, once), (Slot("scatter", f"rest{mine}", "reduce-scatter"), size / ways, once * cut),
            (Slot("scatter", f"data{also}", "all-reduce"), size / ways, once * cut), (Slot("scatter", whole, "all-reduce"), size, once * ~cut)]


class Pricer:
    """Tallies terms on one topology.

    Attributes:
        topology: where the program runs, with links as fast as the stack's collectives reach.
        stack: the software.
        constants: efficiencies of the chips under the stack.
        outside: the same for kernels outside of all layers, where the loss is.
        factors: learned factor of each quantity that has one (`shardlib.cost.corrections`).
    """

    def __init__(self, topology: Topology, stack: Stack = XLA) -> None:
        chip = topology.chip
        self.stack = stack
        self.constants: Efficiency = efficiency_of(chip.name, chip.vendor, stack.name, dict(topology.efficiency))
        self.outside = replace(self.constants, unfused=max(self.constants.unfused, stack.unfused_loss))
        self.topology = linked(topology, self.constants)
        self.factors = {quantity: one.factor for one in applied(topology) for quantity in _CORRECTED[one.quantity]}

    def waits(self, slots: Sequence[int]) -> Array:
        """Share of the seconds of collectives that compute waits for, array [slots, 1]: the stack hides the rest under the matmuls beside them."""
        hidden = {"tensor": self.stack.tensor_overlap or 0.0, "expert": self.stack.expert_overlap or 0.0}
        return np.array([[1.0 - hidden.get(SLOTS[slot].group, 0.0)] for slot in slots])

    def corrected(self, quantities: Array) -> Array:
        """Quantities with the factors applied: array [..., `ROWS`, shapes]."""
        if not self.factors:
            return quantities
        factors = np.ones((ROWS, 1))
        for quantity, factor in self.factors.items():
            factors[quantity] = factor
        return quantities * factors

    def tally(self, items: Iterable[Item], choice: Choice, shapes: Shapes, classes: int, kinds: tuple[type[Term], ...] = ()) -> Array:
        """Quantities of some items under a choice: array [classes + 2, `ROWS`, shapes]; the last two segments are `INSIDE` and `ENDS`.

        Args:
            items: to be added up.
            choice: what is cut.
            shapes: into how many parts.
            classes: number of classes of layers.
            kinds: terms that count; all by default.
        """
        return self.tally_terms(((item.segment, term) for item in items for term in item.terms(choice)), shapes, classes, kinds)

    def tally_terms(self, terms: Iterable[tuple[int, Term]], shapes: Shapes, classes: int, kinds: tuple[type[Term], ...] = ()) -> Array:
        """Quantities of terms with their segments, see `tally`; without `kinds`, all terms count."""
        total = np.zeros((classes + 2, ROWS, len(shapes)))
        add: dict[type[Term], Callable[[Array, Term, Shapes], None]] = {
            Transfer: self._add_transfer, Resident: self._add_resident, Rest: self._add_rest}  # pyright: ignore[reportAssignmentType]
        for segment, term in terms:
            if isinstance(term, Compute):
                if not kinds or Compute in kinds:
                    self._add_compute(total[segment], term, shapes, self.outside if segment == ENDS else self.constants)
            elif not kinds or type(term) in kinds:
                add[type(term)](total[segment], term, shapes)
        return total

    def _add_compute(self, total: Array, term: Compute, shapes: Shapes, constants: Efficiency) -> None:
        seconds = kernel_seconds(term, lambda amount: local(amount, shapes), self.topology.chip, constants) * term.trips
        total[Q.COMPUTE] += seconds
        if term.weight:
            total[Q.WEIGHTS] += seconds
        total[Q.FLOPS] += local(term.flops, shapes) * term.trips
        total[Q.HOST] += constants.dispatch_s * term.trips

    def _add_resident(self, total: Array, term: Resident, shapes: Shapes) -> None:
        size = local(term.bytes, shapes)
        if term.part in _PIECES:
            whole, cut = _PIECES[term.part]
            total[whole] += size
            total[cut] += np.where(divides_at_rest(term.shape, term.cut, frozenset(), shapes, flat=self.stack.flat), size / shapes.rest(term.cut), size)
        else:
            total[_PARTS[term.part]] += size

    def _add_transfer(self, total: Array, term: Transfer, shapes: Shapes) -> None:
        load = busiest(term.routed, lambda amount: local(amount, shapes), self.constants)
        for slot, size, count in moves(term, shapes, flat=self.stack.flat):
            total[COUNTS + INDEX[slot]] += count
            total[BYTES + INDEX[slot]] += count * size * load

    def _add_rest(self, total: Array, term: Rest, shapes: Shapes) -> None:
        elements = np.full(len(shapes), float(term.elements * term.count))
        if has(term.cut, "tensor"):
            elements = elements / shapes.tensor
        if has(term.cut, "expert"):
            elements = elements / shapes.expert
            total[Q.EXPERTS] += elements * term.itemsize
        cut = np.where(divides_at_rest(term.shape, term.cut, term.frozen, shapes, flat=self.stack.flat), elements / shapes.rest(term.cut), elements)
        total[Q.PARAMETERS] += elements * term.itemsize
        total[Q.PARAMETERS_CUT] += cut * term.itemsize
        state = term.state if self.stack.state_bytes is None else self.stack.state_bytes
        total[Q.STATE] += elements * state
        total[Q.STATE_CUT] += cut * state
        kept = self.stack.gradient_bytes(term.itemsize)
        total[Q.KEPT] += elements * kept
        total[Q.KEPT_CUT] += cut * kept
