"""The quantities of a step that add up over its items, as rows of a tally.

A tally of a program is an array [segments, `ROWS`, shapes], per microbatch and device: first the
quantities `Q`, then the count and then the bytes of the collectives of every slot.

>>> Q.COMPUTE, ROWS == BYTES + len(SLOTS)
(<Q.COMPUTE: 0>, True)
"""

from __future__ import annotations

from enum import IntEnum

from shardlib.cost.machine.collective_tables import (
    SLOTS,
)


class Q(IntEnum):
    """Quantities that add up over items, per microbatch and device; those of collectives follow as
    counts and bytes by slot.
    """

    COMPUTE = 0  # seconds of kernels
    WEIGHTS = 1  # seconds of those that compute gradients of weights
    FLOPS = 2  # executed
    GATHERED = 3  # bytes of parameters in use, if they are stored sharded (ZeRO 3)
    PARAMETERS = 4  # bytes of trained parameters, sharded as in compute
    PARAMETERS_CUT = 5  # the same, stored sharded where a dim divides
    STATE = 6  # bytes of optimizer state, sharded as in compute
    STATE_CUT = 7  # the same, stored sharded where a dim divides
    EXPERTS = 8  # bytes of parameters that the expert axis shards, sharded as in compute
    SAVED = 9  # bytes that the forward pass keeps for the backward pass
    TEMPORARY = 10  # bytes of other values alive
    GRADIENT = 11  # bytes of gradients alive, if they are stored replicated (ZeRO 0, 1)
    GRADIENT_CUT = 12  # the same, if they are (ZeRO 2, 3)
    COPY = 13  # bytes of copies of parameters that are saved, sharded as in compute
    COPY_CUT = 14  # the same, stored sharded where a dim divides
    #: bytes of gradients as they are kept over the microbatches of a step, sharded as in compute
    KEPT = 15
    KEPT_CUT = 16  # the same, stored sharded where a dim divides
    HOST = 17  # seconds that the host takes to launch kernels
    # bytes of parameters of layers that are cast before the loop, all layers at once, if they
    # are stored replicated (ZeRO 0 to 2)
    CAST = 18
    FROZEN = 19  # bytes of parameters that are not trained, sharded as in compute
    FROZEN_CUT = 20  # the same, stored sharded where a dim divides


#: Rows of an array of quantities: `Q`, then the counts and then the bytes of every slot.
COUNTS, BYTES = len(Q), len(Q) + len(SLOTS)
ROWS = len(Q) + 2 * len(SLOTS)
#: Quantity of a correction -> rows.
CORRECTED: dict[str, tuple[Q, ...]] = {
    "compute": (Q.COMPUTE, Q.WEIGHTS),
    "activations": (Q.SAVED, Q.COPY, Q.COPY_CUT),
    "temporaries": (Q.TEMPORARY,),
    "communication": (Q.GATHERED,),
    "margin": (),
}
