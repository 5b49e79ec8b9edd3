"""Plans for islands, from a search for one: the fastest that leaves room for what is kept for
meetings, and all in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from shardlib.cost.estimate import Estimate
from shardlib.cost.machine.corrections import fitting_bytes, margin
from shardlib.errors import HINT, BatchError, InfeasibleError, PinError
from shardlib.exchanges.values import Several
from shardlib.hardware.islands import island_of
from shardlib.hardware.topology import Topology
from shardlib.planning.islands.spread import on_islands
from shardlib.planning.plan import Plan, Ranked
from shardlib.planning.units.quantity import bytes_text

#: Searches, each but the first with more memory held back, at most.
ROUNDS = 5


def planned_on_islands(
    exchange: Several, machine: Topology, search: Callable[[Topology], Plan]
) -> Plan:
    """The fastest plan of an island that fits with what is kept for meetings, for all islands.

    What is kept follows from the plan: it is held back from the island's memory, and the search
    repeated, until plan and meetings fit together.
    """
    island, held_bytes, rounds = island_of(machine, exchange.islands), 0, 0
    while True:
        rounds += 1
        try:
            island_plan = search(_holding(island, held_bytes))
        except (PinError, BatchError) as error:
            raise _of_an_island(error, exchange, machine, island) from error
        plan = on_islands(island_plan, exchange, machine)
        parts, limit = plan.estimate.device_bytes, fitting_bytes(island)
        if parts.peak <= limit:
            return plan
        held_bytes = max(held_bytes + 1, math.ceil(parts.exchange * margin(island)))
        if rounds == ROUNDS or held_bytes >= island.chip.usable_bytes:
            raise InfeasibleError(
                f"{plan.model} does not fit on the islands of {machine.name}: what {exchange} keeps"
                f" for meetings is {bytes_text(parts.exchange)} a device, and with it"
                f" {bytes_text(parts.peak)} are needed of {bytes_text(limit)}\nTry: zero=3, which"
                " shards it; or fewer islands",
                short_bytes=int(parts.peak - limit),
            )


def _of_an_island(
    error: PinError | BatchError, exchange: Several, machine: Topology, island: Topology
) -> PinError | BatchError:
    """The error of a search for one island, which says that it is of one."""
    text, hint, remainder = str(error).partition(HINT)
    each = f"{island.devices} device{'s'[: island.devices != 1]}"
    return type(error)(
        f"{text}\nThat is of one island: each of {exchange.islands} on {machine.name} has"
        f" {each} ({island.name}) and its part of the rows{hint}{remainder}"
    )


def met_in_order(inner: Iterator[Ranked], exchange: Several, machine: Topology) -> Iterator[Ranked]:
    """Plans for an island, the fastest first, as plans for all islands; meetings take each as long
    as the fastest.
    """
    met: Estimate | None = None
    for entry in inner:
        if met is None:
            met = on_islands(entry.make(), exchange, machine).estimate
        yield replace(
            entry,
            seconds=entry.seconds + met.seconds.exchange,
            peak_bytes=entry.peak_bytes + met.device_bytes.exchange,
            make=partial(_met, entry, exchange, machine),
        )


def _met(entry: Ranked, exchange: Several, machine: Topology) -> Plan:
    return on_islands(entry.make(), exchange, machine)


def _holding(island: Topology, held_bytes: int) -> Topology:
    """An island with so much less memory."""
    chip = replace(island.chip, reserved_bytes=island.chip.reserved_bytes + held_bytes)
    return replace(island, chip=chip)
