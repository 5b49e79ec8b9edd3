"""Which hosts reach which.

The coordinator is reached by everybody who has joined. Collectives open connections of their own
between hosts, at ports that the system gives out: a firewall that lets the coordinator's port
through and nothing else shows itself here, and not after the compilation of the first step.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardlib.processes.agreement import all_say, meet
from shardlib.report import Finding

#: Seconds that a connection may take.
CONNECT_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Ear:
    """Where a process listens.

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
class Unheard:
    """A connection that was not made.

    Attributes:
        caller, listener: the processes.
        why: in the words of the system.
    """

    caller: Ear
    listener: Ear
    why: str


def unreached(process: int, host: str, coordinator: str, *, seconds: float) -> tuple[Unheard, ...]:
    """Tries connections between the hosts of all processes, both ways; to be called by all.

    Args:
        seconds: how long to wait for the others.
    """
    with _listening(coordinator) as (address, port):
        replies = all_say(
            "ears", json.dumps({"host": host, "address": address, "port": port}), seconds=seconds
        )
        ears = {number: Ear(process=number, **json.loads(text)) for number, text in replies.items()}
        unreached_here = [
            [listener, why]
            for listener in callees(process, ears)
            if (why := _called(ears[listener]))
        ]
        reports = all_say("who could not be reached", json.dumps(unreached_here), seconds=seconds)
        meet("ports", seconds=seconds)
    return tuple(
        Unheard(caller=ears[caller], listener=ears[listener], why=why)
        for caller, text in sorted(reports.items())
        for listener, why in json.loads(text)
    )


def callees(process: int, ears: Mapping[int, Ear]) -> list[int]:
    """Whom a process calls: the first process of hosts 1, 2, 4, ... places further, so that every
    host is called by several and nobody calls thousands.

    >>> callees(0, {n: Ear(process=n, host=f"h{n}", address="", port=0) for n in range(8)})
    [1, 2, 4]

    Args:
        process: number of the process.
        ears: where each process listens, by its number.
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


def at_fault(failures: Sequence[Unheard]) -> list[Finding]:
    """Who is to blame: a host that several others do not reach, or that does not reach several
    others; else both ends of the connection.
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


def _called(ear: Ear) -> str:
    """Why an ear is not reached; empty where it is."""
    try:
        socket.create_connection((ear.address, ear.port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""
