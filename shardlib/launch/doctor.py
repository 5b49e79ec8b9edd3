"""Faults of hosts, found before a run: what each process sees, rates of kernels and links, and
which hosts reach which.

Every finding names the host, or the two hosts, that it is about.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import resource
import shutil
import socket
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tomli_w
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib import _jax_compat
from shardlib.annotation.trees import Tree
from shardlib.cost.collectives import LinearCost, collective_cost
from shardlib.errors import LaunchError, raise_all
from shardlib.findings import Finding
from shardlib.launch.job import devices_per_host
from shardlib.machines.catalog import CATALOG
from shardlib.machines.chips import Tier
from shardlib.machines.topology import Span, Topology, TopologyLike
from shardlib.machines.topology import topology as parse_topology
from shardlib.processes.code import versions
from shardlib.processes.place import Watchdog, read_place
from shardlib.processes.values import all_say, meet, processes_text
from shardlib.untrusted.data import JsonMapping, JsonObject

# --------------------------------------------------------------------------------------------------
# Facts of one host, as one process sees them.
#
# Nothing here talks to another process, so that it can be asked of a host that cannot reach the
# others.

#: Open files that a process of a job over many hosts may need: every peer is a connection, every
#: shard of a checkpoint a file.
FILES = 4096
#: Free bytes of /dev/shm below which NCCL cannot set up its rings between the GPUs of a host
#: [docs.nvidia.com/deeplearning/nccl, troubleshooting, "Shared memory"; containers have 64 MiB by
#: default].
SHARED_BYTES = 512 << 20
#: Files of a host that say that it has an accelerator, the platform of JAX that uses it, and what
#: to install.
ACCELERATORS: tuple[tuple[str, str, str], ...] = (
    ("/dev/nvidia0", "gpu", 'pip install "jax[cuda13]"'),
    ("/dev/kfd", "gpu", "JAX's plugin for ROCm"),
    ("/dev/accel0", "tpu", 'pip install "jax[tpu]"'),
    ("/dev/vfio/0", "tpu", 'pip install "jax[tpu]"'),
)


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """A host, as one process on it sees it.

    Attributes:
        process: number of the process.
        host: name of the host.
        platform: of JAX's devices: "cpu", "gpu", "tpu".
        kinds: kind of every device of this process, by its number.
        versions: of Python and packages.
        clock: seconds since 1970, when all processes met.
        files: open files that the process may have.
        shared_bytes: free in /dev/shm; -1 where there is none.
        unused: accelerators that the host has and JAX does not use, with what to install.
        run: state of the folder of the run: "" where none was asked about.
        seconds: of a matmul on every device, by its number; empty where none was measured.
    """

    process: int
    host: str
    platform: str
    kinds: Mapping[int, str]
    versions: Mapping[str, str]
    clock: float = 0.0
    files: int = 0
    shared_bytes: int = -1
    unused: Sequence[str] = ()
    run: str = ""
    seconds: Mapping[int, float] = field(default_factory=dict[int, float])

    @property
    def name(self) -> str:
        """Host and process, for messages."""
        return f"process {self.process} on {self.host}"

    def to_json(self) -> JsonObject:
        """The facts as plain data."""
        return {**asdict(self), "unused": list(self.unused)}

    @classmethod
    def from_json(cls, data: JsonMapping) -> HostFacts:
        """Reads the data of `to_json`, also after JSON has made texts of numbers."""
        return cls(
            **{
                **data,
                "unused": tuple(data["unused"]),
                **{
                    name: {int(number): value for number, value in data[name].items()}
                    for name in ("kinds", "seconds")
                },
            }
        )


def look(run: str | None = None) -> HostFacts:
    """Looks at this host.

    Args:
        run: folder of the run, which is tried for writing; None for none.
    """
    devices = _devices()
    shared = Path("/dev/shm")
    return HostFacts(
        process=jax.process_index(),
        host=socket.gethostname(),
        platform=devices[0].platform,
        kinds={device.id: device.device_kind for device in devices},
        versions=versions(),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_bytes=shutil.disk_usage(shared).free if shared.is_dir() else -1,
        unused=_unused(devices[0].platform),
        run="" if run is None else _writable(Path(run)),
    )


def _devices() -> list[jax.Device]:
    """The devices of this process; what keeps JAX from starting them is said with the host's
    name.
    """
    try:
        return jax.local_devices()
    except RuntimeError as error:
        host = socket.gethostname()
        hint = (
            f"give the host an address for its own name, in /etc/hosts or DNS: {host!r} has none,"
            " and collectives between CPU hosts look for it"
            if not _resolves(host)
            else (
                "look at what its plugin says: nvidia-smi, the driver's version, another process"
                " that holds the devices"
            )
        )
        raise LaunchError(
            f"JAX cannot start its devices in process {_process()} on {host}:"
            f" {str(error).strip().splitlines()[-1]}\nTry: {hint}"
        ) from error


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _process() -> int:
    coordination = _jax_compat.coordination()
    return 0 if coordination is None else coordination[1]


def _unused(platform: str) -> tuple[str, ...]:
    if platform != "cpu" or "cpu" in os.environ.get("JAX_PLATFORMS", ""):  # somebody wants it so
        return ()
    return tuple(
        f"{file} is there, and JAX sees CPU devices alone; {hint}"
        for file, _, hint in ACCELERATORS
        if Path(file).exists()
    )


def _writable(folder: Path) -> str:
    """Says what keeps a process from writing into a folder; "writable" where nothing does."""
    probe = folder / f".doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("shardlib doctor\n")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return "writable"


def alone(facts: HostFacts) -> list[Finding]:
    """Findings about one host, whatever the others are."""

    def finding(code: str, severity: str, message: str, hint: str = "") -> Finding:
        return Finding(code=code, severity=severity, where=facts.name, message=message, hint=hint)

    install = "install it in the environment of this host"
    findings = [finding("accelerator-unused", "error", text, install) for text in facts.unused]
    if facts.run not in ("", "writable"):
        message = f"the folder of the run cannot be written: {facts.run}"
        hint = "mount it there, with permission to write"
        findings.append(finding("run-folder", "error", message, hint))
    if 0 < facts.files < FILES:
        message = (
            f"a process may have {facts.files} open files; many hosts and checkpoints may need"
            f" {FILES}"
        )
        findings.append(finding("open-files", "warning", message, f"ulimit -n {FILES}"))
    if facts.platform == "gpu" and len(facts.kinds) > 1 and 0 <= facts.shared_bytes < SHARED_BYTES:
        message = (
            f"/dev/shm has {facts.shared_bytes >> 20} MiB free, of which NCCL may need more"
            " between GPUs"
        )
        hint = (
            "a larger /dev/shm: --shm-size of containers, an emptyDir of medium Memory in"
            " Kubernetes"
        )
        findings.append(finding("shared-memory", "warning", message, hint))
    nvidia = any("NVIDIA" in kind for kind in facts.kinds.values())
    if facts.platform == "gpu" and nvidia and find_spec("nvidia") is None:
        message = (
            "CUDA's libraries come from the system and not from JAX's packages; another host may"
            " have others"
        )
        findings.append(finding("libraries", "info", message))
    return findings


# --------------------------------------------------------------------------------------------------
# Differences between hosts, and the host at fault.
#
# Pure functions from what all processes saw to findings: where most agree, those that do not are
# named.

#: Seconds that clocks may differ: heartbeats and locks of checkpoints are told apart by time.
CLOCK_SECONDS = 2.0
#: Times the median that a device may take for the same matmul; simulated devices share cores and
#: are not a measure.
SLOW = 1.25


def unlike(hosts: Sequence[HostFacts]) -> list[Finding]:
    """Packages and devices that differ between processes."""
    findings: list[Finding] = []
    for name in sorted({name for host in hosts for name in host.versions}):
        findings += _odd(
            hosts,
            [host.versions.get(name, "not installed") for host in hosts],
            "versions-differ",
            name,
            "error",
            "the same packages and the same code on every host",
        )
    findings += _odd(
        hosts,
        [host.platform for host in hosts],
        "platforms-differ",
        "the platform of JAX",
        "error",
        "the same plugin of JAX on every host, and JAX_PLATFORMS",
    )
    findings += _odd(
        hosts,
        [_counted(host.kinds.values()) for host in hosts],
        "devices-differ",
        "what a process sees",
        "error",
        "look for a device that failed (nvidia-smi, dmesg), or a process with another share of the"
        " devices",
    )
    return findings


def _odd(
    hosts: Sequence[HostFacts],
    values: Sequence[str],
    code: str,
    what: str,
    severity: str,
    hint: str,
) -> list[Finding]:
    """One finding for every value that few have, with their hosts."""
    by_value: dict[str, list[HostFacts]] = defaultdict(list)
    for host, value in zip(hosts, values, strict=True):
        by_value[value].append(host)
    if len(by_value) == 1:
        return []
    usual = Counter(values).most_common(1)[0][0]
    return [
        Finding(
            code=code,
            severity=severity,
            where=_named(members),
            message=(
                f"{what} is {value}, and {usual} in"
                f" {processes_text([host.process for host in by_value[usual]])}"
            ),
            hint=hint,
        )
        for value, members in by_value.items()
        if value != usual
    ]


def late_clocks(hosts: Sequence[HostFacts]) -> list[Finding]:
    """Clocks that are away from those of most."""
    middle = statistics.median(host.clock for host in hosts)
    return [
        Finding(
            code="clock",
            severity="warning",
            where=host.name,
            message=(
                f"its clock is {abs(host.clock - middle):.1f} s"
                f" {'ahead of' if host.clock > middle else 'behind'} those of the others"
            ),
            hint="chronyc tracking, or timedatectl: let it follow a time server",
        )
        for host in hosts
        if abs(host.clock - middle) > CLOCK_SECONDS
    ]


def misfit(hosts: Sequence[HostFacts], machine: Topology) -> list[Finding]:
    """Returns whether these are the hosts and devices that a topology has."""
    devices = sum(len(host.kinds) for host in hosts)
    if devices == machine.devices:
        return []
    names = sorted({host.host for host in hosts})
    per_host = Counter[str]()
    for host in hosts:
        per_host[host.host] += len(host.kinds)
    each = devices_per_host(machine)
    host_count = (
        machine.devices // each
        if machine.chip.vendor != "cpu" and machine.devices % each == 0
        else 0
    )
    usual = Counter(per_host.values()).most_common(1)[0][0]
    few = [f"{name} has {count}" for name, count in sorted(per_host.items()) if count != usual]
    text = (
        f"{machine.name} has {machine.devices} devices"
        + (f" on {host_count} hosts" if host_count else "")
        + f"; here are {devices} on {len(names)}"
        f" ({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})"
    )
    return [
        Finding(
            code="topology",
            severity="error",
            where=machine.name,
            message=text + (f"; {usual} on most hosts, but {', '.join(few)}" if few else ""),
            hint="the topology of the hosts that are there, or --elastic",
        )
    ]


def slow_devices(hosts: Sequence[HostFacts]) -> list[Finding]:
    """Devices that take longer for the same matmul than others of their kind."""
    times = [seconds for host in hosts for seconds in host.seconds.values()]
    if len(times) < 3 or any(host.platform == "cpu" for host in hosts):
        return []
    middle = statistics.median(times)
    return [
        Finding(
            code="slow-device",
            severity="warning",
            where=f"device {number} of {host.name}",
            message=f"a matmul takes {seconds / middle:.1f} times as long as on most devices",
            hint=(
                "look for a lower clock: temperature, power, another process on it (nvidia-smi -q"
                " -d PERFORMANCE)"
            ),
        )
        for host in hosts
        for number, seconds in host.seconds.items()
        if seconds > SLOW * middle
    ]


def _counted(kinds: Iterable[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(kinds).items()))


def _named(hosts: Sequence[HostFacts]) -> str:
    return ", ".join(host.name for host in hosts[:8]) + (
        f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    )


# --------------------------------------------------------------------------------------------------
# Rates of kernels on every device, and of collectives along the links.
#
# Times are the best of several runs: whatever else the hosts do makes them longer, and never
# shorter. All processes run the same programs in the same order.

RUNS = 5
#: Rows and columns of the matmul, and bytes that a device gives to a collective: enough for the
#: rate to count and not the latency.
MATMUL = {"cpu": 512}
MATMUL_OTHERS = 8192
BYTES = {"cpu": 1 << 20}
BYTES_OTHERS = 64 << 20
#: Times the median of all pairs of neighbours that a pair may take.
LINKS_SLOW = 2.0
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
        """The bytes that a device sends per second, as people compare all-reduces ("bus bandwidth"
        of nccl-tests): 2 (n - 1) / n times the array.
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
    """Lists the measurements along every tier of links that has several devices: (tier, ways,
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
    slow = [pair for pair in pairs if pair.seconds > LINKS_SLOW * middle]
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


def corrected(machine: Topology, measured: Sequence[Measured], when: str) -> Topology:
    """A topology in which every tier that was measured has the rate that its collectives
    reached.
    """
    by_index = {link.index: link for link in measured}
    return replace(
        machine,
        tiers=tuple(
            _tier(tier, by_index[i], when) if i in by_index else tier
            for i, tier in enumerate(machine.tiers)
        ),
    )


def _tier(tier: Tier, link: Measured, when: str) -> Tier:
    """The tier with the rate at which the collective takes the seconds that were measured; where
    that is more than the peak, the peak rises. Latency stays, but for more than half of these
    seconds.
    """
    share = min(1.0, link.seconds / 2 / link.latency) if link.latency else 1.0
    rate = (
        tier.reached_bytes_per_s
        * (link.predicted - link.latency)
        / (link.seconds - share * link.latency)
    )
    source = (
        f"shardlib doctor, {when}: all-reduce of {link.bytes} bytes over {link.ways} devices in"
        f" {link.seconds:.3g} s"
    )
    return replace(
        tier,
        bytes_per_s=max(tier.bytes_per_s, rate),
        efficiency=min(1.0, rate / max(tier.bytes_per_s, rate)),
        latency_s=tier.latency_s * share,
        sources=(*tier.sources, source),
    )


def to_toml(machine: Topology) -> str:
    """The text of a topology file, which `shardlib.machines.topology.topology` reads."""
    data = machine.to_json()
    name = machine.chip.name
    chip = name if name in CATALOG and CATALOG[name].chip == machine.chip else data["chip"]
    tiers = [
        {key: value for key, value in tier.items() if not (key == "wrap" and not any(value))}
        for tier in data["tiers"]
    ]
    return tomli_w.dumps(
        {
            "chip": chip,
            "tiers": tiers,
            **{key: data[key] for key in ("corrections", "efficiency") if key in data},
        }
    )


# --------------------------------------------------------------------------------------------------
# Reachability between hosts.
#
# The coordinator is reached by everybody who has joined. Collectives open connections of their own
# between hosts, at ports that the system gives out: a firewall that lets the coordinator's port
# through and nothing else shows itself here, and not after the compilation of the first step.

#: Seconds that a connection may take.
CONNECT_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Listener:
    """The port at which a process listens.

    Attributes:
        process: its number.
        host: name of its host.
        address: numeric, by which it reaches the coordinator.
        port: given out by the system.
    """

    process: int
    host: str
    address: str
    port: int


@dataclass(frozen=True, kw_only=True)
class FailedConnection:
    """A connection that was not made."""

    caller: Listener
    listener: Listener
    why: str


def unreached(
    process: int, host: str, coordinator: str, *, seconds: float
) -> tuple[FailedConnection, ...]:
    """Tries connections between the hosts of all processes, both ways; to be called by all."""
    with _listening(coordinator) as (address, port):
        replies = all_say(
            "ears", json.dumps({"host": host, "address": address, "port": port}), seconds=seconds
        )
        ears = {
            number: Listener(process=number, **json.loads(text)) for number, text in replies.items()
        }
        unreached_here = [
            [listener, why]
            for listener in callees(process, ears)
            if (why := _called(ears[listener]))
        ]
        reports = all_say("who could not be reached", json.dumps(unreached_here), seconds=seconds)
        meet("ports", seconds=seconds)
    return tuple(
        FailedConnection(caller=ears[caller], listener=ears[listener], why=why)
        for caller, text in sorted(reports.items())
        for listener, why in json.loads(text)
    )


def callees(process: int, ears: Mapping[int, Listener]) -> list[int]:
    """Whom a process calls: the first process of hosts 1, 2, 4, ... places further, so that every
    host is called by several and nobody calls thousands.

    >>> callees(0, {n: Listener(process=n, host=f"h{n}", address="", port=0) for n in range(8)})
    [1, 2, 4]
    """
    firsts: dict[str, int] = {}
    for number in sorted(ears):
        firsts.setdefault(ears[number].host, number)
    hosts = list(firsts)
    if firsts[ears[process].host] != process:
        return []
    here, steps = (
        hosts.index(ears[process].host),
        [2**k for k in range(len(hosts).bit_length()) if 2**k < len(hosts)],
    )
    return list(dict.fromkeys(firsts[hosts[(here + step) % len(hosts)]] for step in steps))


def at_fault(failures: Sequence[FailedConnection]) -> list[Finding]:
    """Returns the hosts at fault: a host that several others do not reach, or that does not reach
    several others; else both ends of the connection.
    """
    deaf, mute = (
        Counter(failure.listener.host for failure in failures),
        Counter(failure.caller.host for failure in failures),
    )
    findings: list[Finding] = []
    for failure in failures:
        ends = (
            f"process {failure.caller.process} on {failure.caller.host} cannot reach process"
            f" {failure.listener.process} on {failure.listener.host} at"
            f" {failure.listener.address}:{failure.listener.port}: {failure.why}"
        )
        location = (
            failure.listener.host
            if deaf[failure.listener.host] > max(1, mute[failure.caller.host])
            else (
                failure.caller.host
                if mute[failure.caller.host] > 1
                else f"{failure.caller.host} and {failure.listener.host}"
            )
        )
        findings.append(
            Finding(
                code="unreachable",
                severity="error",
                where=location,
                message=ends,
                hint=(
                    "open all ports between the hosts of the job; a firewall, a network policy or"
                    " the wrong interface stands between"
                ),
            )
        )
    return findings


@contextlib.contextmanager
def _listening(coordinator: str) -> Iterator[tuple[str, int]]:
    address = _own_address(coordinator)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as ear:
        ear.bind((address, 0))
        ear.listen(64)
        yield address, ear.getsockname()[1]


def _own_address(coordinator: str) -> str:
    """The address by which this host reaches the coordinator; no packet is sent."""
    host, _, port = coordinator.rpartition(":")
    family, kind, _, _, target = socket.getaddrinfo(
        host.strip("[]") or "127.0.0.1", int(port or 1), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _called(ear: Listener) -> str:
    """Calls an ear and says why it is not reached; empty where it is."""
    try:
        socket.create_connection((ear.address, ear.port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


# --------------------------------------------------------------------------------------------------
# The examination, in bounded time.
#
#     examination = examine("16*h100:8", seconds=60)
#     print(examination)                 # the hosts, their links, findings
#     examination.require()              # raises where something is wrong
#
# Every process calls it, after `shardlib.join()`; all have the same answer. A process that does
# not come is named by those who wait, and one that hangs says where and ends
# (`shardlib.processes.place`).

#: Seconds that an examination may take.
SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The results of an examination.

    Attributes:
        hosts: what every process saw.
        measured: all-reduces along the tiers of the topology; empty where none was measured.
        pairs: exchanges of neighbouring hosts.
        findings: what is wrong, errors first.
        seconds: that it took.
        machine: the topology that was asked about.
    """

    hosts: tuple[HostFacts, ...]
    measured: tuple[Measured, ...] = ()
    pairs: tuple[Pair, ...] = ()
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    machine: Topology | None = None

    @property
    def ok(self) -> bool:
        """True if nothing is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def require(self) -> Examination:
        """This examination."""
        wrong = [
            f"{finding.where}: {finding.message}"
            for finding in self.findings
            if finding.severity == "error"
        ]
        if wrong:
            raise_all(
                LaunchError,
                "these hosts cannot train together",
                wrong,
                hint=next(finding.hint for finding in self.findings if finding.severity == "error")
                or "shardlib doctor shows more",
            )
        return self

    def corrected(self) -> str:
        """The text of a topology file with the rates of links that were measured."""
        if self.machine is None or not self.measured:
            raise LaunchError(
                "no links were measured\nTry: shardlib doctor --topology T on several devices,"
                " without --quick"
            )
        return to_toml(
            corrected(
                self.machine, self.measured, datetime.datetime.now(datetime.UTC).date().isoformat()
            )
        )

    def to_json(self) -> JsonObject:
        """The examination as plain data."""
        return {
            "ok": self.ok,
            "seconds": self.seconds,
            "topology": None if self.machine is None else self.machine.name,
            "hosts": [host.to_json() for host in self.hosts],
            "links": [link.to_json() for link in self.measured],
            "pairs": [{"hosts": list(pair.hosts), "seconds": pair.seconds} for pair in self.pairs],
            "findings": [finding.to_json() for finding in self.findings],
        }

    def __str__(self) -> str:
        lines = [
            f"{host.name:32s} {len(host.kinds)} x {next(iter(host.kinds.values()), 'nothing')}, jax"
            f" {host.versions.get('jax', '?')}"
            + (
                f", matmul {min(host.seconds.values()) * 1e3:.3g} to"
                f" {max(host.seconds.values()) * 1e3:.3g} ms"
                if host.seconds
                else ""
            )
            for host in self.hosts
        ]
        lines += [
            f"{link.tier}: all-reduce of {link.bytes / 2**20:.0f} MiB over {link.ways} devices"
            f" {link.seconds * 1e3:.3g} ms, {link.bytes_per_s / 1e9:.3g} GB/s a device (expected"
            f" {link.predicted * 1e3:.3g} ms)"
            for link in self.measured
        ]
        lines += [
            f"{pair.hosts[0]} <-> {pair.hosts[1]}: {pair.seconds * 1e3:.3g} ms"
            for pair in self.pairs
        ]
        lines += [str(finding) for finding in self.findings] or ["nothing is wrong"]
        return "\n".join([*lines, f"({self.seconds:.1f} s)"])


def examine(
    topology: TopologyLike | None = None,
    *,
    run: str | None = None,
    seconds: float = SECONDS,
    measure: bool = True,
    environ: Mapping[str, str] | None = None,
) -> Examination:
    """Looks at all hosts of the job; to be called by every process.

    Args:
        topology: the machine that these hosts are meant to be; None: not compared.
        seconds: that it may take; a process that hangs longer ends, and says where.
        environ: variables that say which process this is; by default those of this process.
    """
    begin = time.monotonic()
    machine = None if topology is None else parse_topology(topology)
    place = read_place(os.environ if environ is None else environ)
    joined = _jax_compat.coordination()
    with contextlib.closing(
        Watchdog(None, rank=0 if joined is None else joined[1], seconds=seconds)
    ) as watchdog:
        with watchdog.phase("look at this host"):
            facts = look(run)
        with watchdog.phase("compare hosts"):
            facts = replace(facts, clock=_met(seconds))
            hosts = _everybodys(facts, seconds)
        findings = (
            [finding for host in hosts for finding in alone(host)]
            + unlike(hosts)
            + late_clocks(hosts)
        )
        findings += [] if machine is None else misfit(hosts, machine)
        if place is not None and place.coordinator and len({host.host for host in hosts}) > 1:
            with watchdog.phase("reach hosts"):
                findings += at_fault(
                    unreached(facts.process, facts.host, place.coordinator, seconds=seconds)
                )
        measured, pairs = (), ()
        if measure and not any(finding.severity == "error" for finding in findings):
            with watchdog.phase("measure"):
                hosts, measured, pairs = _measured(hosts, facts, machine, seconds)
            findings += (
                slow_devices(hosts)
                + slow_pairs(pairs)
                + ([] if hosts[0].platform == "cpu" else below(measured))
            )
    order = {"error": 0, "warning": 1, "info": 2}
    return Examination(
        hosts=tuple(hosts),
        measured=tuple(measured),
        pairs=tuple(pairs),
        findings=tuple(sorted(findings, key=lambda finding: order[finding.severity])),
        seconds=time.monotonic() - begin,
        machine=machine,
    )


def _met(seconds: float) -> float:
    """The time of this host's clock when all have met."""
    meet("clocks", seconds=seconds)
    return time.time()


def _everybodys(facts: HostFacts, seconds: float) -> list[HostFacts]:
    replies = all_say("what their hosts are", json.dumps(facts.to_json()), seconds=seconds)
    return [HostFacts.from_json(json.loads(replies[number])) for number in sorted(replies)]


def _measured(
    hosts: Sequence[HostFacts], own_facts: HostFacts, machine: Topology | None, seconds: float
) -> tuple[list[HostFacts], list[Measured], list[Pair]]:
    """Matmuls, all-reduces along tiers, and exchanges of neighbours, as the slowest process has
    them.
    """
    hosts = _everybodys(
        replace(own_facts, clock=hosts[own_facts.process].clock, seconds=matmul_seconds()),
        seconds,
    )
    measured: list[Measured] = []
    if machine is not None:
        for index, degree, size, run in tiers(machine):
            slowest = max(
                float(text)
                for text in all_say("seconds of collectives", repr(run()), seconds=seconds).values()
            )
            cost = predicted(machine, index)
            measured.append(
                Measured(
                    tier=machine.tiers[index].name,
                    index=index,
                    ways=degree,
                    bytes=size,
                    seconds=slowest,
                    predicted=cost.seconds(float(size)),
                    latency=cost.latency_s,
                )
            )
    pairs: list[Pair] = []
    of_host = {host.process: host.host for host in hosts}
    for host_pairs, run in exchanges(of_host):
        own_seconds = run()
        replies = all_say("seconds of exchanges", json.dumps(own_seconds), seconds=seconds)
        times = {
            of_host[process]: value
            for process, text in replies.items()
            if (value := json.loads(text)) is not None
        }
        pairs += [
            Pair(hosts=pair, seconds=max(times[host] for host in pair)) for pair in host_pairs
        ]
    return hosts, measured, pairs
