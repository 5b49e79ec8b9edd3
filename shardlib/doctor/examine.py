"""All that is looked at, in bounded time.

    examination = examine("16*h100:8", seconds=60)
    print(examination)                 # what every host has, links against the catalogue, findings
    examination.require()              # raises where something is wrong

Every process calls it, after `shardlib.join()`; all have the same answer. A process that does not
come is named by those who wait, and one that hangs says where and ends
(`shardlib.processes.watchdog`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardlib import _jax_compat
from shardlib.doctor import links, machine
from shardlib.doctor.host import HostFacts, alone, look
from shardlib.doctor.hosts import late_clocks, misfit, slow_devices, unlike
from shardlib.doctor.links import Measured, Pair
from shardlib.doctor.ports import at_fault, unreached
from shardlib.errors import LaunchError, raise_all
from shardlib.hardware.topology import Topology, TopologyLike
from shardlib.hardware.topology import topology as parse_topology
from shardlib.processes.agreement import all_say, meet
from shardlib.processes.place import read_place
from shardlib.processes.watchdog import Watchdog
from shardlib.report import Finding
from shardlib.untrusted.json_types import JsonObject

#: Seconds that an examination may take.
SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found.

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
        """Whether nothing is an error."""
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
        return machine.to_toml(
            machine.corrected(
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
                + links.slow_pairs(pairs)
                + ([] if hosts[0].platform == "cpu" else links.below(measured))
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
        replace(own_facts, clock=hosts[own_facts.process].clock, seconds=links.matmul_seconds()),
        seconds,
    )
    measured: list[Measured] = []
    if machine is not None:
        for index, degree, size, run in links.tiers(machine):
            slowest = max(
                float(text)
                for text in all_say("seconds of collectives", repr(run()), seconds=seconds).values()
            )
            cost = links.predicted(machine, index)
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
    for host_pairs, run in links.exchanges(of_host):
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
