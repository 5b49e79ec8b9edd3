"""What may be better where a plan does not fit: something offloaded, and where more than enough is
rematerialised, less of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.totals import Totals
from shardlib.cost.pricing.variants.offload_and_partial_remat import (
    fullest,
    mix,
    offloaded,
    rematerialised_share,
)
from shardlib.cost.tables.pricer import Pricer
from shardlib.cost.terms.abilities import Abilities
from shardlib.decisions.lowerings import along, facts, lowered
from shardlib.decisions.readers import HOSTED
from shardlib.planning.offers.incumbents import Seen
from shardlib.planning.offers.offer import Offer
from shardlib.planning.space.space import Space
from shardlib.planning.space.workload import Workload

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Variants:
    """Offers prices, and what may be better where a plan does not fit.

    Attributes:
        load, space: the model and the space.
        pricer: the machine.
        capacity: usable bytes of a device.
    """

    load: Workload
    space: Space
    pricer: Pricer
    capacity: float

    def offer(
        self,
        offer: Offer,
        rows: Array,
        totals: Totals,
        fast: Totals | None,
        c: Candidates,
        seen: Seen,
    ) -> None:
        """Offers a price; where it does not fit also with something in host memory, and where more
        than enough is recomputed with less of it.
        """
        pins, pinned_layers = self.space.pins, self.space.pins.remat_layers
        pinned = pins.offload or ()
        if pinned:
            totals = offloaded(totals, pinned, self.pricer, c)
            fast = fast and offloaded(fast, pinned, self.pricer, c)
            offer = offer.but(offload=pinned)
        if not pinned_layers:
            seen.offer(offer, totals, rows)
        self._mixed(offer, rows, totals, fast, c, seen)
        lacking = (totals.step_seconds < seen.limit) & (
            totals.peak_bytes > self.capacity
        )  # what follows only adds seconds
        if fast is not None:  # with something in host memory, fewer layers need to be recomputed
            lacking |= (fast.step_seconds < np.minimum(seen.limit, totals.step_seconds)) & (
                fast.peak_bytes > self.capacity
            )
        short = np.flatnonzero(lacking)
        if not len(short) or pinned_layers:
            return
        part, c = offer.take(short), c.take(short)
        for parts in self.offloads():
            less = offloaded(totals.take(short), parts, self.pricer, c)
            moved = part.but(offload=parts)
            seen.offer(moved, less, rows[short])
            if fast is not None:
                self._mixed(
                    moved,
                    rows[short],
                    less,
                    offloaded(fast.take(short), parts, self.pricer, c),
                    c,
                    seen,
                )

    @property
    def _able(self) -> Abilities:
        return self.space.limits.able

    def offloads(self) -> list[tuple[str, ...]]:
        """What may be put in host memory, beside nothing."""
        pinned = self.space.pins.offload
        if self.pricer.topology.chip.host_bytes_per_s <= 0 or pinned is not None:
            return []
        options = (*((part,) for part in HOSTED), HOSTED)
        return [parts for parts in options if {*parts} <= {*self._able.offload}]

    def _mixed(
        self,
        offer: Offer,
        rows: Array,
        rematerialised: Totals,
        fast: Totals | None,
        c: Candidates,
        seen: Seen,
    ) -> None:
        """Offers the plans that recompute no more layers than memory asks for."""
        pinned_layers = self.space.pins.remat_layers
        if (
            fast is None
            or pinned_layers == 0
            or self.space.apart
            or "partly" not in self._able.remat
        ):
            return
        legal = fast.step_seconds < seen.limit
        legal &= lowered(facts(offer.decisions), along(c.sizes), self.space.gaps)
        if pinned_layers is None:
            legal &= (fast.peak_bytes > self.capacity) & (
                fast.step_seconds < rematerialised.step_seconds
            )
        if not legal.any():
            return
        layers = fullest(offer.decisions, self.load.model, c)
        if pinned_layers:
            needed = np.where(layers > pinned_layers, float(pinned_layers), 0.0)
        else:
            saved, less = (
                fast.device_bytes["activations"],
                rematerialised.device_bytes["activations"],
            )
            others = sum(
                (
                    np.maximum(size, rematerialised.device_bytes[name])
                    for name, size in fast.device_bytes.items()
                    if name != "activations"
                ),
                np.zeros(len(c)),
            )
            needed = np.ceil(
                (others + saved - self.capacity) / np.maximum(saved - less, 1e-9) * layers - 1e-9
            )
            needed = np.round(self._share(needed, offer, c) * layers)
        mixed = np.flatnonzero(legal & (needed >= 1) & (needed < layers))
        if len(mixed):
            share = self._share(needed, offer, c)[mixed]
            seen.offer(
                replace(offer.take(mixed), layers=needed[mixed].astype(np.int64)),
                mix(fast.take(mixed), rematerialised.take(mixed), share),
                rows[mixed],
            )

    def _share(self, number: Array, offer: Offer, c: Candidates) -> Array:
        """Part of the layers that rematerialise where so many of the fullest stage are to."""
        return rematerialised_share(
            number, offer.decisions, self.load.model, c, self.pricer.profile
        )
