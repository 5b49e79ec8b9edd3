"""A pricer tallies the terms of items on one topology under one framework profile, for many shapes
at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from shardlib.axes import EXPERT, TENSOR
from shardlib.cost.machine.collective_tables import (
    SLOTS,
    Slot,
    along,
)
from shardlib.cost.machine.corrections import applied
from shardlib.cost.machine.efficiency import Efficiency
from shardlib.cost.machine.efficiency_curves import efficiency_of, linked
from shardlib.cost.tables.basis_functions import Book, Values, evaluate
from shardlib.cost.tables.charges import charges, moved
from shardlib.cost.tables.coefficients import tallied
from shardlib.cost.tables.quantities import CORRECTED, ROWS
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.framework_profiles import XLA
from shardlib.cost.terms.local_sizes import Shapes
from shardlib.cost.terms.terms import Item, Term, Transfer
from shardlib.hardware.topology import Topology
from shardlib.propagation.assignment import Choice

Array = np.ndarray


def moves(
    term: Transfer, segment: int, shapes: Shapes, pricer: Pricer
) -> list[tuple[Slot, Array, Array]]:
    """(slot, bytes of each result, count) of the collectives of a transfer, a microbatch; a count
    is 0 where its role has none.
    """
    return [
        (
            slot,
            term.bytes.total * evaluate(size, shapes, pricer.constants),
            term.trips * evaluate(count, shapes, pricer.constants),
        )
        for slot, size, count in moved(term, segment, pricer.profile)
    ]


#: Bytes that attention in blocks moves for every score, forward and backward: about 6 and 14 passes
#: over scores in float32, which the TPU compiler's cycles of a ring over 64 devices come to
#: (`benchmarks/long_context.py`: 339 s for 8.8e12 scores, forward, again and backward, at 2.76e12
#: bytes/s).
BLOCKS: tuple[float, float] = (24.0, 58.0)


class Pricer:
    """Tallies terms on one topology.

    Attributes:
        topology: where the program runs, with links as fast as the framework's collectives reach.
        profile: the software.
        constants: efficiencies of the chips under the framework profile.
        outside: the same for kernels outside of all layers, where the loss is.
        factors: learned factor of each quantity that has one (`shardlib.cost.machine.corrections`).
    """

    def __init__(self, topology: Topology, profile: FrameworkProfile = XLA) -> None:
        chip = topology.chip
        self.profile = profile
        constants = efficiency_of(chip.name, chip.vendor, profile.name, dict(topology.efficiency))
        self.constants: Efficiency = (
            replace(constants, scores=BLOCKS[0], scores_backward=BLOCKS[1])
            if profile.attention == "blocks"
            else constants
        )
        if profile.name == XLA.name and topology.chip.vendor == "nvidia":
            # jax.nn.dot_product_attention has one width for all
            self.constants = replace(self.constants, equal_widths=True)
        self.outside = replace(
            self.constants, unfused=max(self.constants.unfused, profile.unfused_loss)
        )
        self.topology = linked(topology, self.constants)
        self.factors = {
            quantity: correction.factor
            for correction in applied(topology)
            for quantity in CORRECTED[correction.quantity]
        }

    def waits(self, slots: Sequence[int]) -> Array:
        """Share of the seconds of collectives that compute waits for, array [slots, 1]: the profile
        hides the rest under the matmuls beside them.
        """
        hidden = {
            along(TENSOR): self.profile.tensor_overlap or 0.0,
            along(EXPERT): self.profile.expert_overlap or 0.0,
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
        return book.on(self.topology.chip, self.constants, self.outside, shapes)

    def tally(self, items: Iterable[Item], choice: Choice, shapes: Shapes, classes: int) -> Array:
        """Quantities of some items under a choice: array [classes + 2, `ROWS`, shapes]; the last
        two segments are `INSIDE` and `OUTSIDE_LAYERS`.
        """
        return self.tally_terms(
            ((item.segment, term) for item in items for term in item.terms(choice)), shapes, classes
        )

    def tally_terms(self, terms: Iterable[tuple[int, Term]], shapes: Shapes, classes: int) -> Array:
        """Quantities of terms with their segments, see `tally`."""
        book, segments = Book(), classes + 2
        tally = tallied(
            (segment % segments * ROWS + row, book.number(measure), amount)
            for segment, term in terms
            for row, measure, amount in charges(segment, term, self.profile)
        )
        total = np.zeros((segments * ROWS, len(shapes)))
        total[tally.rows] = tally.on(self.values(book, shapes), np.arange(len(shapes)))
        return total.reshape(segments, ROWS, len(shapes))
