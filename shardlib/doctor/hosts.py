"""What the hosts do not have in common, and which of them is at fault.

Pure functions from what all processes saw to findings: where most agree, those that do not are
named.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from shardlib.doctor.host import HostFacts
from shardlib.hardware.hosts import devices_per_host
from shardlib.hardware.topology import Topology
from shardlib.processes.agreement import processes_text
from shardlib.report import Finding

#: Seconds that clocks may differ: heartbeats and locks of checkpoints are told apart by time.
CLOCK_SECONDS = 2.0
#: Times the median that a device may take for the same matmul; simulated devices share cores and
#: are no measure.
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
    """Whether these are the hosts and devices that a topology has."""
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
