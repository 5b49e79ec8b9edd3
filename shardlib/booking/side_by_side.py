"""The question before all others: which machine, and how large?"""

from __future__ import annotations

from collections.abc import Sequence

import optax

from shardlib.annotation.read import Init
from shardlib.annotation.trees.paths import Tree
from shardlib.annotation.trees.wrt import Filter
from shardlib.booking.comparison import Comparison
from shardlib.booking.looking import Step, offers
from shardlib.booking.sizes import machines, spelled
from shardlib.booking.target import Target
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import ArgumentError, PinError
from shardlib.frontend.arguments import require_arguments
from shardlib.frontend.traced_model import Loss, problem
from shardlib.graph.problem import Problem
from shardlib.hardware.topology import Topology
from shardlib.planning.plan import Plan
from shardlib.planning.planner import search
from shardlib.planning.questions.least_work import least_device_seconds
from shardlib.planning.search.search import prepared
from shardlib.planning.space.workload import Workload

#: Devices of the largest machines that are looked at, unless it is said.
LARGEST = 16_384


def compare(
    init: Init,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    *,
    topologies: Sequence[str],
    target: Target,
    largest: int = LARGEST,
    pin: PinMapping | None = None,
    batch_axes: Tree = None,
    name: str | None = None,
    wrt: Filter = None,
    rows: str = "prove",
) -> Comparison:
    """For each kind of machine the smallest and the cheapest size that ends a run in time.

    Args:
        loss: (model, batch) -> scalar or (scalar, metrics).
    """
    require_arguments("compare", loss=loss, optimizer=optimizer, pin=pin, name=name)
    spellings = [spelled(topology) for topology in topologies]
    if not spellings or len(set(spellings)) < len(spellings):
        raise ArgumentError(
            f"topologies is {list(topologies)!r}; it names kinds of machines, each once\nTry:"
            ' topologies=["h100:8", "v5p"]'
        )
    pins = Pins.parse(pin)
    if pins.exchange.islands > 1:
        raise PinError("an exchange of islands is pinned; sizes of one island are compared")
    sizes = {family: machines(family, largest) for family in spellings}
    _require_prices_of(target, [machine for many in sizes.values() for machine in many])
    traced = problem(
        init, loss, optimizer, batch, batch_axes=batch_axes, name=name, wrt=wrt, rows=rows
    )
    step = step_of(traced, pins)
    return Comparison(
        model=traced.model,
        target=target,
        tokens_per_step=traced.tokens,
        families=tuple(offers(family, sizes[family], step, target) for family in spellings),
    )


def _require_prices_of(target: Target, compared: Sequence[Topology]) -> None:
    """Raises where there is a price of a chip that no machine has."""
    chips = list(dict.fromkeys(machine.chip.name for machine in compared))
    if unused := [chip for chip in target.prices if chip not in chips]:
        raise ArgumentError(
            f"there is a price of {', '.join(unused)}, and the machines that are compared are of"
            f" {', '.join(chips)}\nTry: a price of these, or another machine"
        )


def step_of(traced: Problem, pins: Pins) -> Step:
    """A traced step that is planned on one machine after another, prepared once a vendor."""
    loads: dict[str, Workload] = {}

    def load(machine: Topology) -> Workload:
        vendor = machine.chip.vendor
        loads[vendor] = prepared(traced, machine, loads.get(vendor), None, pins)
        return loads[vendor]

    def planned(machine: Topology) -> Plan:
        return search(traced, machine, pins, load=load(machine))

    def least(machine: Topology) -> float:
        return least_device_seconds(load(machine), machine, pins)

    return Step(tokens=traced.tokens, planned=planned, least=least)
