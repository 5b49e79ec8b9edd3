"""Rates of kernels on every device, and of collectives along the links.

Times are the best of several runs: whatever else the hosts do makes them longer, and never shorter.
All processes run the same programs in the same order.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import Tree
from shardlib.cost.machine.collectives import LinearCost, collective_cost
from shardlib.hardware.placement import Span
from shardlib.hardware.topology import Topology
from shardlib.report import Finding
from shardlib.untrusted.json_types import JsonObject

RUNS = 5
#: Rows and columns of the matmul, and bytes that a device gives to a collective: enough for the
#: rate to count and not the latency.
MATMUL = {"cpu": 512}
MATMUL_OTHERS = 8192
BYTES = {"cpu": 1 << 20}
BYTES_OTHERS = 64 << 20
#: Times the median of all pairs of neighbours that a pair may take.
SLOW = 2.0
#: Times the predicted seconds that a collective may take before somebody is told.
BELOW = 1.5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An all-reduce along one tier of links, in all groups of devices at once.

    Attributes:
        tier: name of the links.
        index: place of the tier in the topology.
        ways: devices of a group.
        bytes: that every device gives.
        seconds: of the slowest group, at its best.
        predicted: seconds as the topology says.
        latency: those of them that do not depend on the bytes.
    """

    tier: str
    index: int
    ways: int
    bytes: int
    seconds: float
    predicted: float
    latency: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """What a device sends a second, as people compare all-reduces ("bus bandwidth" of
        nccl-tests): 2 (n - 1) / n times the array.
        """
        return 2 * (self.ways - 1) / self.ways * self.bytes / self.seconds

    def to_json(self) -> JsonObject:
        """The measurement as plain data."""
        return {**asdict(self), "bytes_per_s": self.bytes_per_s}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two neighbouring hosts that exchange messages.

    Attributes:
        hosts: their names.
        seconds: of an exchange, at its best, of the slower of the two.
    """

    hosts: tuple[str, str]
    seconds: float


def matmul_seconds() -> dict[int, float]:
    """Seconds of the same matmul on every device of this process, by its number."""
    seconds: dict[int, float] = {}
    for device in jax.local_devices():
        size = MATMUL.get(device.platform, MATMUL_OTHERS)
        x = jax.device_put(
            jnp.ones((size, size), jnp.bfloat16 if device.platform != "cpu" else jnp.float32),
            device,
        )
        product = jax.jit(jnp.matmul)
        seconds[device.id] = best(lambda product=product, x=x: product(x, x))
    return seconds


def best(run: Callable[[], Tree]) -> float:
    """Seconds of a call and what it starts on devices: the least of several, after one that
    compiles.
    """
    jax.block_until_ready(run())
    times: list[float] = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return min(times)


def tiers(machine: Topology) -> list[tuple[int, int, int, Callable[[], float]]]:
    """What is to be measured along every tier of links that has several devices: (tier, ways,
    bytes, seconds of this process); devices are taken in the order of the topology's numbers.
    """
    shape = [tier.devices for tier in machine.tiers]
    devices = np.array(sorted(jax.devices(), key=lambda device: device.id), dtype=object).reshape(
        shape
    )
    names = tuple(f"tier{i}" for i in range(len(shape)))
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    size = BYTES.get(devices.flat[0].platform, BYTES_OTHERS)
    return [
        (i, degree, size, lambda name=names[i]: _all_reduce(mesh, name, size))
        for i, degree in enumerate(shape)
        if degree > 1
    ]


def _all_reduce(mesh: Mesh, axis: str, size: int) -> float:
    everywhere = PartitionSpec(mesh.axis_names)
    x = jax.jit(
        lambda: jnp.ones((mesh.size, size // 4), jnp.float32),
        out_shardings=NamedSharding(mesh, everywhere),
    )()
    summed = jax.jit(
        jax.shard_map(
            lambda part: jax.lax.psum(part, axis),
            mesh=mesh,
            in_specs=everywhere,
            out_specs=everywhere,
        )
    )
    return best(lambda: summed(x))


def predicted(machine: Topology, tier: int) -> LinearCost:
    """The cost of an all-reduce along a tier, as the topology says.

    Returns:
        Latency in seconds, and seconds per byte.
    """
    return collective_cost(
        "all-reduce",
        tuple(
            Span(tier, dim, degree)
            for dim, degree in enumerate(machine.tiers[tier].shape)
            if degree > 1
        ),
        machine,
    )


def exchanges(
    hosts: Mapping[int, str],
) -> list[tuple[list[tuple[str, str]], Callable[[], float | None]]]:
    """Rounds in which neighbouring hosts exchange messages, every host with one other: (pairs,
    seconds of this process; None where it has no part).
    """
    firsts: dict[str, int] = {}
    for process in sorted(hosts):
        firsts.setdefault(hosts[process], process)
    names = list(firsts)
    count = len(names)
    if count < 2:
        return []
    device = {
        process: min(
            (device for device in jax.devices() if device.process_index == process),
            key=lambda device: device.id,
        )
        for process in firsts.values()
    }
    mesh = Mesh(
        np.array([device[process] for process in firsts.values()], dtype=object),
        ("hosts",),
        axis_types=(AxisType.Auto,),
    )
    size = BYTES.get(mesh.devices.flat[0].platform, BYTES_OTHERS)
    rounds = [[(i, i + 1) for i in range(first, count - 1, 2)] for first in (0, 1)]
    if count > 2 and count % 2 == 0:
        rounds[1].append((count - 1, 0))
    elif count > 2:
        rounds.append([(count - 1, 0)])
    return [
        ([(names[a], names[b]) for a, b in pairs], lambda pairs=pairs: _exchange(mesh, pairs, size))
        for pairs in rounds
        if pairs
    ]


def _exchange(mesh: Mesh, pairs: Sequence[tuple[int, int]], size: int) -> float | None:
    if jax.process_index() not in {device.process_index for device in mesh.devices.flat}:
        return None
    x = jax.jit(
        lambda: jnp.ones((mesh.size, size // 4), jnp.float32),
        out_shardings=NamedSharding(mesh, PartitionSpec("hosts")),
    )()
    directed = [*pairs, *((b, a) for a, b in pairs)]
    passed = jax.jit(
        jax.shard_map(
            lambda part: jax.lax.ppermute(part, "hosts", directed),
            mesh=mesh,
            in_specs=PartitionSpec("hosts"),
            out_specs=PartitionSpec("hosts"),
        )
    )
    return best(lambda: passed(x))


def slow_pairs(pairs: Sequence[Pair]) -> list[Finding]:
    """Hosts, or links between two, that are slower than most: a host both of whose links are slow
    is at fault itself.

    >>> timed = {"ab": 9.0, "bc": 8.0, "cd": 1.0, "de": 1.0, "ea": 1.1}
    >>> pairs = [Pair(hosts=tuple(hosts), seconds=seconds) for hosts, seconds in timed.items()]
    >>> [finding.where for finding in slow_pairs(pairs)]
    ['b']
    """
    if len(pairs) < 3:
        return []
    middle = statistics.median(pair.seconds for pair in pairs)
    slow = [pair for pair in pairs if pair.seconds > SLOW * middle]
    often = Counter(host for pair in slow for host in pair.hosts)
    ratios: dict[str, float] = {}
    for pair in slow:
        bad = max(pair.hosts, key=lambda host: often[host])
        location = bad if often[bad] > 1 else " and ".join(pair.hosts)
        ratios[location] = max(ratios.get(location, 0.0), pair.seconds / middle)
    return [
        Finding(
            code="slow-link",
            severity="warning",
            where=location,
            message=f"messages take {times:.1f} times as long as between most hosts",
            hint="look at the adapter, its cable and port, and its rate (ibstat, ethtool)",
        )
        for location, times in ratios.items()
    ]


def below(measured: Sequence[Measured]) -> list[Finding]:
    """Tiers whose collectives take longer than the topology says."""
    return [
        Finding(
            code="links-below-catalogue",
            severity="warning",
            where=link.tier,
            hint=(
                "shardlib doctor --out machine.toml writes a topology with the measured rates, to"
                " plan for"
            ),
            message=(
                f"an all-reduce of {link.bytes / 2**20:.0f} MiB over {link.ways} devices takes"
                f" {link.seconds * 1e3:.3g} ms where {link.predicted * 1e3:.3g} ms are expected"
                f" ({link.seconds / link.predicted:.1f} times)"
            ),
        )
        for link in measured
        if link.seconds > BELOW * link.predicted and math.isfinite(link.predicted)
    ]
