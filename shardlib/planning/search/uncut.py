"""What the step takes on one device where nothing is sharded: over so many no plan takes less than
that share of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardlib.cost.tables.basis_functions import Values
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.tables.quantities import Q
from shardlib.cost.terms.local_sizes import Shapes
from shardlib.planning.space.space import Space
from shardlib.planning.space.workload import Workload
from shardlib.propagation.assignment import Choice

Array = np.ndarray
_ONE = np.ones(1, dtype=np.int64)
#: The shape of a program on one device.
ONE = Shapes(batch=_ONE, context=_ONE, tensor=_ONE, expert=_ONE, fsdp=_ONE)


@dataclass(frozen=True, kw_only=True)
class Uncut:
    """Bounds of the step on one device.

    Attributes:
        load: the model.
        space: the space.
        pricer: the machine.
        values: measures on shapes of which the last is that of one device, where they have been
            evaluated; otherwise they are evaluated on this shape alone.
    """

    load: Workload
    space: Space
    pricer: Pricer
    values: Values | None = None

    @cached_property
    def seconds(self) -> float:
        """Seconds of the kernels; spread equally, no plan beats them, since the largest kernels are
        the most efficient.
        """
        totals = [
            self.pricer.corrected(self._total((policy, routes), routes=routes))[:, Q.COMPUTE, 0]
            for routes in self.space.routes
            for policy in self.space.policies
        ]
        seconds = np.stack(totals)
        return float(seconds.min(0).sum() if self.space.apart else seconds.sum(1).min())

    def slower(self, devices: int, limit: float) -> bool:
        """Whether no plan on so many devices is faster than a limit in seconds."""
        return bool(np.isfinite(limit)) and self.seconds / devices >= limit

    @cached_property
    def resting_bytes(self) -> float:
        """Bytes of parameters; however they are sharded, the device that has the most has at least
        its share.
        """
        total = self._total(None, routes=False)[:, :, 0].sum(0)
        return float(total[Q.PARAMETERS] + total[Q.FROZEN]) * min(
            1.0, self.pricer.profile.fragmentation
        )

    def _total(self, key: tuple[str, bool] | None, *, routes: bool) -> Array:
        """Quantities of what rests, or of a program: array [segments, rows, 1]."""
        values = (
            self.pricer.values(self.load.ledger.book, ONE) if self.values is None else self.values
        )
        colouring = self.load.colouring
        choice = Choice(
            batch=colouring.batch_colour,
            context=colouring.sequence_colour,
            expert=self.load.expert if routes else None,
        )
        last = np.array([len(values.shapes) - 1])
        return self.load.ledger.uncut(key).on(values, last).total(choice)[0]
