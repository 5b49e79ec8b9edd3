"""The search with a source of answers on every plan that it finds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from shardlib.compact import compact
from shardlib.cost.framework import FrameworkProfile, framework, framework_profile
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import PinError
from shardlib.graph import Problem
from shardlib.machines.topology import Topology, TopologyLike
from shardlib.machines.topology import topology as parse_topology
from shardlib.planner import search as searching
from shardlib.planner.plan import Plan, Ranked, Source
from shardlib.planner.priced import garbage_put_off, one_thread
from shardlib.planner.questions import divided_badly
from shardlib.planner.stored import effective, under
from shardlib.planner.workload import Workload, prepare


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared problem under some pins: the source of all plans for it.

    Attributes:
        load: the prepared problem.
        topology: the machine of the plan.
        pins: the pins it was made under.
        on_islands: the problem of one of so many islands, each with its part of the rows; None
            where the model is not at hand.
        written: (plan, mode of its mesh axes) -> a file of plain JAX; None where the model is not
            at hand.
    """

    load: Workload
    topology: Topology
    pins: Pins
    on_islands: Callable[[int], Problem] | None = field(default=None, repr=False, compare=False)
    written: Callable[[Plan, str], str] | None = field(default=None, repr=False, compare=False)
    _answered: dict[tuple[Topology, Pins], Plan] = field(
        default_factory=dict[tuple[Topology, Pins], Plan], init=False, repr=False, compare=False
    )

    __repr__ = compact

    def under(self, pins: Pins) -> Prepared:
        """The same problem under other pins."""
        return replace(self, pins=pins)

    def search(self, topology: Topology, pins: Pins) -> Plan:
        """The best plan for the same problem; all questions end here or in `ranked`. What was
        asked before is not searched again.
        """
        asked = topology, pins
        if asked not in self._answered:
            self._answered[asked] = search(self.load.problem, topology, pins, load=self.load)
        return self._answered[asked]

    def ranked(
        self, topology: Topology, *, slack: float = math.inf, front: bool = False
    ) -> Iterator[Ranked]:
        """Plans for the same problem under the same pins, the fastest first; all up to `slack`
        times the fastest.

        Args:
            slack: up to how many times the seconds of the fastest.
        """
        return ranked(
            self.load.problem,
            topology,
            self.pins,
            load=self.load,
            slack=slack,
            front=front,
        )

    def on_all_devices(self) -> Plan:
        """The best plan for the same problem that leaves no device idle, under the same pins but
        for those of the mesh.
        """
        pins = self.pins.but(mesh=None, axes=())
        found = searching.search(
            self.load.problem, self.topology, pins, load=self.load, all_devices=True
        )
        return replace(found, source=self.under(pins))

    def why_not(self, pin: PinMapping) -> Plan:
        """The best plan under different pins, for the same model and topology."""
        pins = self.pins.changed(Pins.parse(pin))
        before, after = self.pins.exchange, pins.exchange
        if before.islands == after.islands:
            return self.search(self.topology, pins)
        if self.on_islands is None:
            raise PinError(
                f"the plan is for {before.islands} island{'s'[: before.islands != 1]} and {after}"
                f" has {after.islands}: the model is traced for the rows of one island\nTry:"
                f" plan.diff(shardlib.plan(..., pin={{'exchange': '{after}'}}))"
            )
        return search(self.on_islands(after.islands), self.topology, pins)


@garbage_put_off()
@one_thread()
def search(
    problem: Problem,
    topology: TopologyLike,
    pin: PinMapping | Pins | None = None,
    *,
    load: Workload | None = None,
    profile: FrameworkProfile | str | None = None,
) -> Plan:
    """The fastest plan that fits, see `shardlib.planner.search.search`, with its source."""
    started = time.perf_counter()
    source = _source(problem, topology, pin, load, profile)
    preparing = time.perf_counter() - started
    found = searching.search(problem, source.topology, source.pins, load=source.load)
    if load is None and source.pins.exchange.islands == 1:
        first = divided_badly(found, source.load, source.topology, source.pins)
        found = replace(found, findings=(*first, *found.findings))
    return _sourced(found, source, preparing)


def prepared_for(name: str, problem: Problem, topology: Topology) -> Workload:
    """A problem prepared for a training framework, with parameters stored as it stores them; to
    search it is to plan within what the framework can do.
    """
    vendor = topology.chip.vendor
    one = framework(name, vendor)
    profile = framework_profile(one.profile)
    stored = (("param_dtype", one.param_dtype),) if one.param_dtype else ()
    wanted = effective(stored, problem, profile)
    problem, profile = under(wanted, problem, profile)
    return prepare(problem, vendor, profile, one)


def ranked(
    problem: Problem,
    topology: TopologyLike,
    pin: PinMapping | Pins | None = None,
    *,
    load: Workload | None = None,
    slack: float = math.inf,
    profile: FrameworkProfile | str | None = None,
    front: bool = False,
) -> Iterator[Ranked]:
    """All plans that fit, the fastest first, see `shardlib.planner.search.ranked`, each
    with its source.
    """
    started = time.perf_counter()
    source = _source(problem, topology, pin, load, profile)
    preparing = time.perf_counter() - started
    found = searching.ranked(
        problem,
        source.topology,
        source.pins,
        load=source.load,
        slack=slack,
        front=front,
    )
    return (replace(one, make=partial(_made, one, source, preparing)) for one in found)


def _made(one: Ranked, source: Source, preparing: float) -> Plan:
    return _sourced(one.make(), source, preparing)


def _sourced(plan: Plan, source: Source, preparing: float) -> Plan:
    """The plan with its source; preparing the problem counts as searching."""
    return replace(
        plan, source=source, search=replace(plan.search, seconds=plan.search.seconds + preparing)
    )


def _source(
    problem: Problem,
    topology: TopologyLike,
    pin: PinMapping | Pins | None,
    load: Workload | None,
    profile: FrameworkProfile | str | None,
) -> Prepared:
    machine, pins = parse_topology(topology), Pins.parse(pin)
    return Prepared(
        load=searching.prepared(problem, machine, load, profile, pins),
        topology=machine,
        pins=pins,
    )
