"""What is wrong with hosts is found, and the host is named: on hosts that are made up, and on
processes whose host names are their own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardlib.cost.collectives import collective_cost
from shardlib.errors import LaunchError
from shardlib.launch import doctor as links
from shardlib.launch.doctor import (
    Examination,
    FailedConnection,
    HostFacts,
    Listener,
    Measured,
    alone,
    at_fault,
    callees,
    late_clocks,
    misfit,
    slow_devices,
    unlike,
    unreached,
)
from shardlib.machines.topology import Span, topology
from shardlib.processes.machine import _DRIVERS, _LENT
from tests.processes import python

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def hosts(count: int = 4, **changed: object) -> list[HostFacts]:
    """Hosts of eight GPUs; the last is changed."""
    made = [
        HostFacts(
            process=n,
            host=f"node{n}",
            platform="gpu",
            kinds={8 * n + k: "NVIDIA H100" for k in range(8)},
            versions={"jax": "0.12.0", "code of shardlib": "abc"},
            clock=1000.0,
            files=65536,
            shared_bytes=64 * GIB,
            run="writable",
            seconds={8 * n + k: 1e-3 for k in range(8)},
        )
        for n in range(count)
    ]
    return [*made[:-1], replace(made[-1], **changed)]  # pyright: ignore[reportArgumentType]


def codes(findings) -> list[tuple[str, str, str]]:
    return [(finding.code, finding.severity, finding.where) for finding in findings]


def test_healthy_hosts_are_left_in_peace():
    some = hosts()
    assert [
        *unlike(some),
        *late_clocks(some),
        *misfit(some, topology("4*h100:8")),
        *slow_devices(some),
        *(one for host in some for one in alone(host) if one.severity != "info"),
    ] == []


@pytest.mark.parametrize(
    ("changed", "found"),
    (
        (
            {"versions": {"jax": "0.10.2", "code of shardlib": "abc"}},
            ("versions-differ", "error", "process 3 on node3"),
        ),
        (
            {"versions": {"jax": "0.12.0", "code of shardlib": "old"}},
            ("versions-differ", "error", "process 3 on node3"),
        ),
        (
            {"kinds": {24 + k: "NVIDIA H100" for k in range(7)}},
            ("devices-differ", "error", "process 3 on node3"),
        ),
        ({"platform": "cpu"}, ("platforms-differ", "error", "process 3 on node3")),
        ({"clock": 1009.0}, ("clock", "warning", "process 3 on node3")),
        (
            {"seconds": {24: 1e-3, 25: 2e-3}},
            ("slow-device", "warning", "device 25 of process 3 on node3"),
        ),
        (
            {"unused": ("/dev/nvidia0 is there",)},
            ("accelerator-unused", "error", "process 3 on node3"),
        ),
        ({"files": 1024}, ("open-files", "warning", "process 3 on node3")),
        ({"shared_bytes": 64 << 20}, ("shared-memory", "warning", "process 3 on node3")),
        ({"run": "Read-only file system"}, ("run-folder", "error", "process 3 on node3")),
    ),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value[0],
)
def test_the_odd_one_out_is_named(changed, found):
    some = hosts(**changed)
    assert codes(
        [
            *unlike(some),
            *late_clocks(some),
            *slow_devices(some),
            *(one for host in some for one in alone(host) if one.severity != "info"),
        ]
    ) == [found]


def test_hosts_that_are_not_those_of_the_topology():
    (finding,) = misfit(hosts(3), topology("4*h100:8"))
    assert "32 devices on 4 hosts; here are 24 on 3 (node0, node1, node2)" in finding.message
    (finding,) = misfit(hosts(4, kinds={24: "NVIDIA H100"}), topology("4*h100:8"))
    assert "8 on most hosts, but node3 has 1" in finding.message
    with pytest.raises(LaunchError, match="these hosts cannot train together: 4\\*h100:8: "):
        Examination(hosts=(), findings=(finding,)).require()


def test_who_is_to_blame_for_connections_that_fail():
    ears = {n: Listener(process=n, host=f"node{n}", address="10.0.0.1", port=1) for n in range(5)}

    def blamed(*ends: tuple[int, int]) -> list[str]:
        return list(
            dict.fromkeys(
                finding.where
                for finding in at_fault(
                    [
                        FailedConnection(caller=ears[a], listener=ears[b], why="timed out")
                        for a, b in ends
                    ]
                )
            )
        )

    assert (
        blamed((0, 3), (1, 3), (2, 3)) == ["node3"]
        and blamed((3, 0), (3, 1)) == ["node3"]
        and blamed((0, 1)) == ["node0 and node1"]
    )
    heard = {listener for caller in ears for listener in callees(caller, ears)}
    assert heard == set(ears) and all(caller not in callees(caller, ears) for caller in ears)


def test_a_port_that_nobody_listens_at():
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        from shardlib.launch.doctor import _called

        assert (
            "refused"
            in _called(
                Listener(process=0, host="here", address="127.0.0.1", port=taken.getsockname()[1])
            ).lower()
        )
    assert unreached(0, socket.gethostname(), "127.0.0.1:9", seconds=5) == ()


@pytest.mark.parametrize("name", ("4*h100:8", "v5e:4x4", "cpu:8"))
def test_the_corrected_topology_takes_the_seconds_that_were_measured(name, tmp_path):
    before = topology(name)
    measured = []
    for index, tier in enumerate(before.tiers):
        cost = links.predicted(before, index)
        measured.append(
            Measured(
                tier=tier.name,
                index=index,
                ways=tier.devices,
                bytes=1 << 26,
                seconds=3 * cost.seconds(float(1 << 26)),
                predicted=cost.seconds(float(1 << 26)),
                latency=cost.latency_s,
            )
        )
    file = tmp_path / "machine.toml"
    file.write_text(links.to_toml(links.corrected(before, measured, "2026-11-22")))
    after = topology(str(file))
    for one in measured:
        spans = tuple(
            Span(one.index, dim, ways)
            for dim, ways in enumerate(after.tiers[one.index].shape)
            if ways > 1
        )
        assert collective_cost("all-reduce", spans, after).seconds(
            float(one.bytes)
        ) == pytest.approx(one.seconds, rel=1e-6)
    assert after.chip == before.chip and all(
        "shardlib doctor" in tier.sources[-1] for tier in after.tiers
    )
    assert len(links.below(measured)) == len(before.tiers)


def launched(words: list[str], *, processes: int = 2) -> subprocess.CompletedProcess[str]:
    command = f"-m shardlib launch --processes {processes} --devices-per-process 1 --"
    return python(*command.split(), *words, check=False)


def names_of_their_own(known: Path) -> list[str]:
    """The beginning of a command whose process has a host name of its own, and a table of hosts."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", "--uts", "--mount", "true"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("this user cannot make namespaces (unshare --uts --mount)")
    known.write_text("127.0.0.1 localhost node0 node1 node2\n")
    named = f'mount --bind {known} /etc/hosts; hostname node$SHARDLIB_PROCESS; exec "$@"'
    return ["unshare", "--uts", "--mount", "bash", "-c", named, "begin"]


@pytest.mark.long
def test_three_hosts_are_examined(tmp_path):
    words = f"doctor --topology cpu:3 --run {tmp_path / 'run'} --out {tmp_path / 'machine.toml'}"
    doctor = [sys.executable, "-m", "shardlib", *words.split(), "--json"]
    found = launched([*names_of_their_own(tmp_path / "hosts"), *doctor], processes=3)
    assert found.returncode == 0, found.stderr
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("[0] {")]
    data = json.loads(line[4:])
    assert (
        data["ok"]
        and [host["host"] for host in data["hosts"]] == ["node0", "node1", "node2"]
        and all(host["run"] == "writable" for host in data["hosts"])
    )
    assert sorted(tuple(sorted(pair["hosts"])) for pair in data["pairs"]) == [
        ("node0", "node1"),
        ("node0", "node2"),
        ("node1", "node2"),
    ]
    assert data["links"][0]["ways"] == 3 and topology(str(tmp_path / "machine.toml")).devices == 3


@pytest.mark.long
def test_a_host_without_a_name_and_one_with_other_devices(tmp_path):
    begin = names_of_their_own(tmp_path / "hosts")
    doctor = [sys.executable, "-m", "shardlib", "doctor", "--quick"]
    lost = 'hostname lost$SHARDLIB_PROCESS; exec "$@"'
    found = launched(["unshare", "--uts", "bash", "-c", lost, "begin", *doctor])
    assert found.returncode == 2 and "'lost" in found.stderr and "/etc/hosts" in found.stderr
    other = (
        "if [ $SHARDLIB_PROCESS = 1 ]; then export SHARDLIB_HOST_DEVICES=2 JAX_NUM_CPU_DEVICES=2;"
        ' fi; exec "$@"'
    )
    found = launched([*begin, "bash", "-c", other, "begin", *doctor])
    assert (
        found.returncode == 1
        and "what a process sees is 2 cpu, and 1 cpu in process 0 (process 1 on node1)"
        in found.stdout
    )


@pytest.mark.long
@pytest.mark.skipif(
    any(file for form in _DRIVERS for file in Path("/dev").glob(form)),
    reason="this machine has an accelerator",
)
def test_a_plugin_without_its_accelerator_says_nothing(tmp_path: Path):
    plugin = tmp_path / "jax_plugins" / "broken" / "__init__.py"
    plugin.parent.mkdir(parents=True)
    # As the plugin for CUDA does: it looks for its libraries unless JAX is told to leave it out.
    plugin.write_text(
        "import jax\n\ndef initialize():\n"
        "    if not jax.config.values['jax_platforms']:\n"
        "        raise RuntimeError('cuDNN not found.')\n"
    )
    left_out = {"JAX_PLATFORMS", "XLA_FLAGS", *_LENT}
    environ = {key: value for key, value in os.environ.items() if key not in left_out}
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])

    def said(*words: str) -> str:
        ended = python(*words, env=environ, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stderr

    assert "cuDNN not found." in said("-c", "import jax; jax.devices()")
    assert said("-m", "shardlib", "doctor", "--quick") == ""
