"""The machine that is asked about, its figures those that the plan was priced with; its parts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from shardlib.decisions.pins import Pins
from shardlib.hardware.placement import divisors
from shardlib.hardware.tier import Tier
from shardlib.hardware.topology import Topology, TopologyLike
from shardlib.hardware.topology import topology as parse_topology
from shardlib.planning.plan import Source
from shardlib.planning.space import limits


def machine_like(old: Topology, requested: TopologyLike) -> Topology:
    """The machine that is asked for. Simulated devices have the figures that the plan has of them,
    which were measured, and not the rough ones of the catalogue.

    >>> from shardlib.hardware.catalog import CPU
    >>> measured = replace(parse_topology("cpu:8"), chip=replace(CPU.chip, hbm_bytes_per_s=4e9))
    >>> machine_like(measured, "cpu:8") == measured
    True
    >>> machine_like(measured, "cpu:16").chip.hbm_bytes_per_s
    2000000000.0

    Args:
        old: the machine that the plan was priced for.
        requested: a spelling or a value.

    Raises:
        TopologyError: the spelling does not parse.
        MissingFileError: it is a file that is not there.
    """
    machine = parse_topology(requested)
    simulated = all(topology.name.startswith("cpu:") for topology in (old, machine))
    return _resized(old, machine) if simulated and isinstance(requested, str) else machine


def same_chips(old: Topology, new: Topology) -> bool:
    """Whether two machines have chips of one kind, whatever figures each has of them."""
    return old.chip.name == new.chip.name


def parts_of(source: Source, machine: Topology, pins: Pins) -> list[Topology]:
    """The parts of a machine that are worth a search, the largest first; some of its outermost
    domains, or all of them.
    """
    outer, inner = machine.tiers[0], machine.tiers[1:]
    if pins.mesh is not None or len(outer.shape) > 1:
        return [machine]
    count, domain = outer.devices, machine.devices // outer.devices
    usable = _usable_counts(source, machine.devices)
    full = next((number for number in range(count, 0, -1) if number * domain in usable), count)
    numbers = sorted({full, 1 << (count.bit_length() - 1)}, reverse=True)
    return [
        (
            machine
            if number == count
            else replace(
                machine,
                tiers=(replace(outer, shape=(number,)), *inner),
                alone=min(machine.alone, number * domain),
            )
        )
        for number in numbers
    ]


def _usable_counts(source: Source, limit: int) -> set[int]:
    """Numbers of devices that are products of a divisor of the batch, one that two colours share,
    and one of a stack of layers.

    A tensor axis of a size that divides one colour alone, such as an odd factor of the vocabulary,
    leaves most matmuls uncut.
    """
    load = source.load
    shapes = {parameter.path: parameter.shape for parameter in load.problem.parameters}
    colours = [colour.divisor for colour in load.colouring.colours.values() if colour.matmuls]
    shared = [math.gcd(a, b) for a, b in itertools.combinations(colours, 2)]
    stacks = [shapes[path][dim] for path, dim in load.frozen]
    counts = {1}
    for group in ([limits.batch_size(load.problem, load.colouring)], shared, stacks):
        factors = {1, *(number for size in group for number in divisors(size))}
        counts = {a * b for a in counts for b in factors if a * b <= limit}
    return counts


def _resized(old: Topology, machine: Topology) -> Topology:
    """A machine of simulated devices with another number of them: they share the same cores and the
    same memory.
    """
    if machine.devices == old.devices:
        return old
    share = old.devices / machine.devices
    faster = min(old.alone, share)
    chip = replace(
        old.chip,
        flops_per_s=tuple((dtype, rate * faster) for dtype, rate in old.chip.flops_per_s),
        hbm_bytes=max(1, int(old.chip.hbm_bytes * share)),
        hbm_bytes_per_s=old.chip.hbm_bytes_per_s * faster,
        launch_s=old.chip.launch_s / faster,
    )
    return replace(
        old,
        name=machine.name,
        chip=chip,
        tiers=(_memory(old.tiers[0], machine.devices, max(1.0, 1 / share)),),
        alone=old.alone / faster,
    )


def _memory(tier: Tier, devices: int, slower: float) -> Tier:
    """The memory through which devices exchange, for another number of them."""
    return replace(
        tier,
        shape=(devices,),
        exchanges=tuple(
            replace(
                exchange,
                latency_s=exchange.latency_s * slower,
                seconds_per_byte=exchange.seconds_per_byte * slower,
            )
            for exchange in tier.exchanges
            if exchange.ways <= devices
        ),
    )
