"""Topologies: spelling, TPU wrap-around, files, JSON, and literal error messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardlib.errors import MissingFileError, TopologyError
from shardlib.machines.chips import Tier
from shardlib.machines.topology import Topology, topology

SPELLINGS = [
    "cpu:8",
    "cpu:7",
    "cpu:1",
    "2*cpu:4",
    "v5e:16x16",
    "v5e:1x1",
    "v5e:4x8",
    "2*v5e:16x16",
    "v6e:16x16",
    "v4:4x4x4",
    "v5p:4x4x8",
    "tpu7x:4x4x4",
    "tpu7x:2x2x1",
    "h100:8",
    "h100:4",
    "a100:8",
    "a100-40gb:8",
    "h200:8",
    "b200:8",
    "gb200:72",
    "16*h100:8",
    "13*h100:8",
    "2048*h100:8",
]
EXAMPLES = (
    "'cpu:8', 'h100:8', '16*h100:8', 'v5e:16x16', 'v5p:4x4x8', '2*v5e:16x16', or a path to a .toml"
    " file"
)
CHIPS = "v4, v5e, v5p, v6e, tpu7x, a100, a100-40gb, h100, h200, b200, gb200, cpu"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling_and_json_round_trip(spelling: str):
    machine = topology(spelling)
    assert machine.name == spelling
    assert topology(machine.name) == machine and topology(machine) is machine
    again = Topology.from_json(json.loads(json.dumps(machine.to_json())))
    assert again == machine and hash(again) == hash(machine)


@pytest.mark.parametrize(
    ("spelling", "devices", "shapes"),
    [
        ("cpu:7", 7, [(7,)]),
        ("13*h100:8", 104, [(13,), (8,)]),
        ("1*h100:8", 8, [(8,)]),
        ("v5e:1x1", 1, [(1, 1)]),
        ("2*v5e:16x16", 512, [(2,), (16, 16)]),
        ("tpu7x:4x4x4", 128, [(4, 4, 4), (2,)]),
        (" H100:8 ", 8, [(8,)]),
    ],
)
def test_devices_and_tiers(spelling: str, devices: int, shapes: list[tuple[int, ...]]):
    machine = topology(spelling)
    assert machine.devices == devices
    assert [tier.shape for tier in machine.tiers] == shapes


@pytest.mark.parametrize(
    ("spelling", "wrap"),
    [  # scaling book, tpus.md: the sentences beside each
        ("v5e:16x16", (True, True)),
        ("v5e:8x16", (False, True)),  # "a TPU v5e 8x16 will have a wraparound on the longer axis"
        ("v5e:8x8", (False, False)),
        ("v6e:4x16", (False, True)),
        ("v5p:4x4x4", (True, True, True)),
        (
            "v4:4x4x8",
            (True, True, True),
        ),  # "a 4x4x4 or 4x4x8 will still have wraparounds along all axes"
        ("v5p:2x2x4", (False, False, False)),
        ("v4:2x2x1", (False, False, False)),  # "a 2x2x4 won't have any wraparounds"
        ("tpu7x:8x12x16", (True, True, True)),
    ],
)
def test_wrap_around(spelling: str, wrap: tuple[bool, ...]):
    assert topology(spelling).tiers[0].wrap == wrap


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("h100", f"topology 'h100' does not parse. Did you mean 'h100:8'? Spellings: {EXAMPLES}"),
        ("cpu8", f"topology 'cpu8' does not parse. Did you mean 'cpu:8'? Spellings: {EXAMPLES}"),
        (
            "16xh100:8",
            (
                "topology '16xh100:8' names the unknown chip '16xh100'. Did you mean '16*h100:8'?"
                f" Chips: {CHIPS}; any other cluster can be described in a .toml file"
            ),
        ),
        ("", f"topology '' does not parse. Spellings: {EXAMPLES}"),
        (
            "h10:8",
            (
                "topology 'h10:8' names the unknown chip 'h10'. Did you mean 'h100:8'? Chips:"
                f" {CHIPS}; any other cluster can be described in a .toml file"
            ),
        ),
        (
            "zzz:8",
            (
                f"topology 'zzz:8' names the unknown chip 'zzz'. Chips: {CHIPS}; any other cluster"
                " can be described in a .toml file"
            ),
        ),
        (
            "v5e:16",
            "topology 'v5e:16' has 1 size; v5e takes 2 sizes joined by 'x', e.g. 'v5e:16x16'",
        ),
        ("h100:2x4", "topology 'h100:2x4' has 2 sizes; h100 takes a count, e.g. 'h100:8'"),
        (
            "v5p:0x4x4",
            "topology 'v5p:0x4x4' has a size of 0; sizes are at least 1, e.g. 'v5p:4x4x4'",
        ),
        ("0*h100:8", "topology '0*h100:8' has a size of 0; sizes are at least 1, e.g. 'h100:8'"),
        (
            "999999999*h100:8",
            ("topology '999999999*h100:8' has 7999999992 devices; at most 1048576 are planned for"),
        ),
        (
            "h100:16",
            (
                "topology 'h100:16' asks for 16 GPUs in one NVLink domain; h100 has at most 8. "
                "Write '2*h100:8' for 2 domains joined by InfiniBand"
            ),
        ),
        (
            "h100:12",
            (
                "topology 'h100:12' asks for 12 GPUs in one NVLink domain; h100 has at most 8. "
                "Write '2*h100:6' for 2 domains joined by InfiniBand"
            ),
        ),
        (
            "gb200:144",
            (
                "topology 'gb200:144' asks for 144 GPUs in one NVLink domain; gb200 has at most 72."
                " Write '2*gb200:72' for 2 domains joined by InfiniBand"
            ),
        ),
        (
            "v5e:32x8",
            (
                "topology 'v5e:32x8' is larger than a v5e pod, which has at most 16x16. "
                "Write e.g. '2*v5e:16x16' for several slices joined by DCN"
            ),
        ),
        (
            "v4:16x16x32",
            (
                "topology 'v4:16x16x32' is larger than a v4 pod, which has at most 4096 chips. "
                "Write e.g. '2*v4:4x4x4' for several slices joined by DCN"
            ),
        ),
    ],
)
def test_bad_spellings_say_what_to_write(spelling: str, message: str):
    with pytest.raises(TopologyError) as caught:
        topology(spelling)
    assert str(caught.value) == message


def test_a_file_describes_any_cluster(tmp_path: Path):
    path = tmp_path / "ring.toml"
    path.write_text("""
        [chip]
        name = "toy"
        vendor = "nvidia"
        hbm_bytes = 1000
        hbm_bytes_per_s = 1e9
        flops_per_s = { bfloat16 = 1e12 }
        [[tiers]]
        name = "slow"
        kind = "network"
        shape = [5]
        bytes_per_s = 1e6
        latency_s = 1e-5
        [[tiers]]
        name = "ring"
        kind = "torus"
        shape = [3, 4]
        wrap = [false, true]
        bytes_per_s = 1e8
    """)
    machine = topology(str(path))
    assert (machine.name, machine.devices, machine.chip.peak("bfloat16")) == (str(path), 60, 1e12)
    assert machine.tiers[1] == Tier(
        name="ring", kind="torus", shape=(3, 4), wrap=(False, True), bytes_per_s=1e8
    )


def test_a_file_can_name_a_chip_of_the_catalogue(tmp_path: Path):
    path = tmp_path / "c.toml"
    path.write_text(
        'chip = "h100"\n[[tiers]]\nname = "x"\nkind = "switch"\nshape = [13]\nbytes_per_s = 1e9\n'
    )
    assert topology(str(path)).chip == topology("h100:8").chip


def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingFileError) as caught:
        topology("no.toml")
    assert (
        str(caught.value)
        == f"topology file 'no.toml' is not there (looked in {tmp_path}). Spellings: {EXAMPLES}"
    )
    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'chips = "h100"\n[[tiers]]\nname = "x"\nkind = "switch"\nsize = [8]\n',
            (
                "topology file 'c.toml' is not usable:\n  - 'chip' is missing\n  - 'chips' is"
                " unknown; keys are chip, tiers, name, corrections, efficiency,"
                " alone, measured\n  -"
                " 'tiers[0].shape' is missing\n  - 'tiers[0].bytes_per_s' is missing\n  -"
                " 'tiers[0].size' is unknown; keys are name, kind, shape, bytes_per_s, latency_s,"
                " wrap, efficiency, ring, ring_sums, exchanges, sources"
            ),
        ),
        (
            'chip = "h101"\ntiers = 3\n',
            (
                "topology file 'c.toml' is not usable:\n"
                f"  - chip 'h101' is unknown; chips are {CHIPS}\n"
                "  - 'tiers' is not a list of tables ([[tiers]])"
            ),
        ),
        (
            'tiers = []\n[chip]\nname = "toy"\nflops_per_s = 3\n',
            (
                "topology file 'c.toml' is not usable:\n"
                "  - 'chip.vendor' is missing\n"
                "  - 'chip.hbm_bytes' is missing\n"
                "  - 'chip.hbm_bytes_per_s' is missing\n"
                "  - 'chip.flops_per_s' is not a table from dtype to FLOP/s"
            ),
        ),
        (
            'chip = "h100"\ntiers = []\n',
            "topology 'c.toml' has no tiers; give at least one, e.g. a switch with shape [1]",
        ),
        (
            (
                'chip = "h100"\n[[tiers]]\nname = "x"\nkind = "web"\nshape = [8, 0]\nbytes_per_s ='
                " 0\nwrap = [true]\nefficiency = 2\n"
            ),
            (
                "tier 'x' is not usable:\n"
                "  - kind is 'web'; kinds are torus, mesh, switch, network, memory\n"
                "  - shape is [8, 0]; it needs integers of at least 1\n"
                "  - wrap has 1 entries for 2 dims\n"
                "  - wrap is set, which only a torus has; the kind is 'web'\n"
                "  - bytes_per_s is 0; it must be positive\n"
                "  - efficiency is 2; it must be above 0 and at most 1"
            ),
        ),
        (
            (
                'chip = "h100"\n[[tiers]]\nname = "x"\nkind = "switch"\nshape = [8]\nbytes_per_s ='
                ' "fast"\n'
            ),
            "topology file 'c.toml' is not usable: tiers[0].bytes_per_s is 'fast'; it is a number",
        ),
        ("chip = ", "topology file 'c.toml' is not valid TOML: Invalid value (at end of document)"),
    ],
)
def test_bad_files_list_every_fault(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(text)
    with pytest.raises(TopologyError) as caught:
        topology("c.toml")
    assert str(caught.value) == message


def test_machines_that_a_slow_link_joins_share_it() -> None:
    found, one = topology("2@10Gbit-50ms*16*h100:8"), topology("16*h100:8")
    assert found.tiers[1:] == one.tiers and found.devices == 256
    outer = found.tiers[0]
    assert (outer.kind, outer.shape, outer.latency_s) == ("network", (2,), 0.05)
    assert outer.bytes_per_s * 128 == 10e9 / 8
    assert topology(found.name) == found
    slow = topology("3@500mbit*cpu:2").tiers[0]
    assert (slow.bytes_per_s * 2, slow.latency_s) == (0.5e9 / 8, 0.01)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2@10*h100:8", "Machines that a slow link joins are spelled"),
        ("2@10gbit", "Machines that a slow link joins are spelled"),
        ("1@10gbit*h100:8", "they are 2 or more"),
        ("2@0gbit*h100:8", "a link has a rate"),
        ("2@10gbit*h100:9", "asks for 9"),
        ("2@10gbit*2@1gbit*h100:8", "Machines that a slow link joins are spelled"),
    ],
)
def test_slow_links_that_do_not_parse_say_how_they_are_spelled(text: str, says: str) -> None:
    with pytest.raises(TopologyError, match=says):
        topology(text)
