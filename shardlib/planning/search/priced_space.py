"""A space of plans, priced: what is the fastest of it, and under which pins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from shardlib.axes import MeshShape
from shardlib.cost.machine.corrections import fitting_bytes
from shardlib.cost.step.layers import repeated_calls
from shardlib.cost.terms.abilities import ANYTHING
from shardlib.cost.terms.frameworks import Framework
from shardlib.decisions.lowerings import facts_of_pins, require
from shardlib.decisions.pins import Pins
from shardlib.errors import PinError, raise_all
from shardlib.hardware.placement import place
from shardlib.hardware.slices import device_counts
from shardlib.hardware.topology import Topology
from shardlib.planning.decisions.candidate import Candidate
from shardlib.planning.decisions.dtypes import combinations, effective
from shardlib.planning.decisions.landscape import Priced
from shardlib.planning.decisions.pinned_rules import check_rules, fixed_choice
from shardlib.planning.offers.incumbents import Best, Place
from shardlib.planning.offers.ranking import Entry, Ranking
from shardlib.planning.search.best_first import explore
from shardlib.planning.search.branch_and_bound import Counts, Explorer
from shardlib.planning.search.why_no_layers import LayerGroups, layers_lacking
from shardlib.planning.space.attention import strategies
from shardlib.planning.space.meshes import sizes
from shardlib.planning.space.space import Space, build, gaps_of
from shardlib.planning.space.why_empty import explain_empty
from shardlib.planning.space.workload import Workload
from shardlib.rules import Rules

#: Rate of links inside of a part over that of links between parts from which on the parts are
#: searched first.
FAR_SLOWER = 100
#: On more than so many times as many devices as rows, and on more than so many devices, all numbers
#: of devices are searched together, since no bound says beforehand how many of them help.
MANY_PER_ROW, MANY = 8, 200_000


@dataclass(frozen=True, kw_only=True)
class PricedSpace:
    """A priced space.

    Attributes:
        space: the space; of several, the last.
        best: what was seen.
        rules: pinned rules, in the colours of the model.
        rows: the places of candidates that a ranking speaks of.
        devices: the most that a mesh of the space has.
    """

    space: Space
    best: Best
    rules: Rules | None
    rows: list[Place]
    devices: int
    _points: list[Priced] = field(default_factory=list[Priced], init=False, repr=False)

    def landscape(self, count: int) -> tuple[Priced, ...]:
        """What was priced, thinned; made once, when it is first asked for."""
        if not self._points:
            self._points.extend(
                Priced.of(point.what, point.seconds, point.peak_bytes, fits=point.fits)
                for point in self.best.landscape.points(count)
            )
        return tuple(self._points)

    def candidate(self, entry: Entry[Candidate]) -> Candidate:
        """The candidate of an entry of the ranking."""
        return entry.what.on(*self.rows[entry.index])

    def simplicity(self, what: Candidate, index: int) -> tuple[object, ...]:
        """Sorts equally fast entries of the ranking."""
        return what.on(*self.rows[index]).simplicity()


def priced_space(
    load: Workload,
    topology: Topology,
    pins: Pins,
    ranking: Ranking[Candidate] | None = None,
    slack: float = np.inf,
    *,
    any_plan: bool = False,
    all_devices: bool = False,
) -> PricedSpace:
    """Prices the space of a model under pins."""
    rules = _require_possible(load, topology, pins)
    devices_wanted = pins.mesh.devices if pins.mesh is not None else topology.devices
    rooms, runs = _explorers(
        load, topology, pins, rules, devices_wanted, any_plan=any_plan, all_devices=all_devices
    )
    part, largest = within_slow_links(topology), max(devices for devices, _ in runs)
    counts_by_explorer = dict[Explorer, Counts]()
    for devices, explorer in runs:
        if devices:
            counts_by_explorer[explorer] = (*counts_by_explorer.get(explorer, ()), devices)
    many = largest > min(MANY, MANY_PER_ROW * rooms[-1].limits.batch)
    if many and not any_plan and not part:
        _price_together(counts_by_explorer, ranking, slack)
    else:
        if ranking is None and not any_plan:
            if part:
                explore([explorer for devices, explorer in runs if devices == part], (part,))
            together = [explorer for devices, explorer in runs if 0 < devices == largest]
            if together and together[0].is_small((largest,)):  # its plan may exclude all others
                explore(together[:1], (largest,))
                together = together[1:]
            explore(together, (largest,))
        # with all, plans are fastest, unless a slow link joins them
        for devices, explorer in sorted(runs, key=lambda run: (run[0] != part, -run[0])):
            if devices:
                explorer.run((devices,), ranking, slack)
    explorer = runs[0][1]
    if explorer.best.fastest is None and not any_plan:
        for searcher in dict.fromkeys(explorer for _, explorer in runs):
            searcher.minimum_memory()
    if explorer.best.minimum_memory is None and not any_plan:
        lacking = layers_lacking(load.problem.model, _layer_groups(load), pins)
        if lacking:
            raise PinError(lacking)
        raise explain_empty(load.problem, load.colouring, pins, devices_wanted)
    return PricedSpace(
        space=rooms[-1],
        best=explorer.best,
        rules=rules,
        rows=explorer.rows,
        devices=max(devices for devices, _ in runs),
    )


def _price_together(
    counts_by_explorer: Mapping[Explorer, Counts], ranking: Ranking[Candidate] | None, slack: float
) -> None:
    """Prices spaces on all numbers of devices at once, after a simple plan for each number."""
    for explorer, counts in counts_by_explorer.items():
        if explorer.best.fastest is None:
            explorer.seed(counts)
    if ranking is None:
        for counts in dict.fromkeys(counts_by_explorer.values()):
            explore(
                [
                    explorer
                    for explorer, own_counts in counts_by_explorer.items()
                    if own_counts == counts
                ],
                counts,
            )
    for explorer, counts in counts_by_explorer.items():
        explorer.run(counts, ranking, slack)


def within_slow_links(topology: Topology) -> int:
    """Devices of each part of a machine whose parts hang on far slower links than are inside of
    them; 0 where there is none. A plan within one part is soon found, and others are hardly faster.
    """
    first, *others = topology.tiers
    slow = others and first.bytes_per_s * FAR_SLOWER < min(tier.bytes_per_s for tier in others)
    return topology.devices // first.devices if slow else 0


def _layer_groups(load: Workload) -> LayerGroups:
    """The layers of a model, for messages."""
    facts = next(iter(load.programs.values())).facts
    return LayerGroups(
        names=load.class_names,
        counts=load.counts,
        calls=repeated_calls(facts.graph, facts.layers, facts.weights),
    )


def _explorers(
    load: Workload,
    topology: Topology,
    pins: Pins,
    rules: Rules | None,
    device_count: int,
    *,
    any_plan: bool,
    all_devices: bool,
) -> tuple[list[Space], list[tuple[int, Explorer]]]:
    """The spaces, one for each way to compute attention in each dtype, and an explorer for each
    number of devices that a plan may use; 0 devices where a space has no plan.
    """
    able = load.framework.able if load.framework is not None else ANYTHING
    fixed = fixed_choice(rules, load.colouring, pins) if rules is not None else None
    all_dtypes = dict.fromkeys(
        effective(combination, load.problem, load.profile, pins.dtypes)
        for combination in combinations(pins.dtypes, pins.allow)
    )
    all_strategies = strategies(load.problem, pins, load.profile, topology.chip, able)
    rooms: list[Space] = []
    runs: list[tuple[int, Explorer]] = []
    for dtypes, strategy in itertools.product(all_dtypes, all_strategies):
        decisions = replace(strategy.decisions, dtypes=dtypes)
        workload = load.under(dtypes, decisions.fused)
        rooms.append(build(workload, pins, fixed, replace(strategy, decisions=decisions)))
        counts = [
            count
            for count in _counts(rooms[-1], workload, topology, device_count)
            if count == topology.devices or not all_devices
        ]
        explorers: dict[Topology, Explorer] = {}
        for devices in counts or [device_count]:
            machine = topology.in_use(devices)
            if machine not in explorers:
                explorers[machine] = Explorer(
                    workload,
                    rooms[-1],
                    machine,
                    fitting_bytes(topology),
                    runs[0][1] if runs else None,
                    any_plan=any_plan,
                )
            runs.append((devices if counts else 0, explorers[machine]))
    return rooms, runs


def _require_possible(load: Workload, topology: Topology, pins: Pins) -> Rules | None:
    """Whether model and machine can have what is pinned.

    Returns:
        Pinned rules, in the colours of the model; None where none are pinned.
    """
    _require_able(load.framework, pins)
    require(
        facts_of_pins(pins),
        "the pins ask for what has no lowering",
        gaps_of(load),
    )
    rules = check_rules(pins.rules, load.colouring) if pins.rules is not None else None
    if pins.mesh is not None and pins.mesh.devices > topology.devices:
        raise PinError(
            f"the mesh {pins.mesh} has {pins.mesh.devices} devices and {topology.name} has"
            f" {topology.devices}\nTry: a smaller mesh, or a topology of as many devices"
        )
    called, ours = "attention" in load.problem.functions, bool(gaps_of(load))
    if ours and pins.context in ("ring", "ulysses") and not called:
        raise PinError(
            f"context={pins.context!r} is pinned, and {load.problem.model} does not call attention"
            " as a function\nTry: shardlib.attention in the model, or context='all-gather'"
        )
    offloaded = [part for part in pins.offload or () if part != "disk"]
    if offloaded and not topology.chip.host_bytes_per_s:
        raise PinError(
            f"offload={offloaded} needs the rate between host memory and {topology.chip.name},"
            f" which {topology.name} does not give\n"
            "Try: host_bytes_per_s in the chip of a topology file"
        )
    return rules


def _require_able(framework: Framework | None, pins: Pins) -> None:
    """Whether the framework that runs the plan can do what is pinned."""
    if framework is None:
        return
    axes = dict(pins.mesh) if pins.mesh is not None else dict(pins.axes)
    failures = framework.able.refusals(dict(pins.given), axes)
    if failures:
        what = f"framework {framework.name!r} cannot do what is pinned"
        raise_all(PinError, what, failures, hint="other pins, or no framework")


def _counts(space: Space, load: Workload, topology: Topology, device_count: int) -> Iterator[int]:
    """Numbers of devices that a plan may use, the largest first; where none of those that are
    tried has a mesh, the most that one has.
    """

    def some(devices: int) -> bool:
        return len(sizes(space, load.colouring, devices)["micro"]) > 0

    if space.pins.mesh is not None:
        yield device_count
        return
    tried = device_counts(topology, space.limits.batch)
    others = (
        n
        for n in range(device_count, 0, -1)
        if n not in tried and place(MeshShape({"data": n}), topology) is not None
    )
    largest = next((n for n in itertools.chain(tried, others) if some(n)), 0)
    if largest in tried:
        yield from (n for n in tried if n <= largest)
    elif largest:
        yield largest
