"""Smaller and larger machines of one kind: the shapes, and that they parse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardlib.errors import TopologyError
from shardlib.machines.catalog import CATALOG
from shardlib.machines.topology import of_size, topology

DOUBLINGS = [2**n for n in range(15)]


@pytest.mark.parametrize(
    ("family", "devices", "name"),
    [
        ("h100:8", 4, "h100:4"),
        ("h100:8", 64, "8*h100:8"),
        ("16*h100:4", 64, "16*h100:4"),
        ("16*h100:4", 6, "2*h100:3"),
        ("h100:8", 12, "2*h100:6"),
        ("2*gb200:72", 144, "2*gb200:72"),
        ("2*gb200:72", 128, "2*gb200:64"),
        ("cpu:8", 100, "cpu:100"),
        ("v5e:4x4", 8, "v5e:2x4"),
        ("v5e:4x4", 256, "v5e:16x16"),
        ("v5e:4x4", 512, "2*v5e:16x16"),
        ("v6e:2x2", 1, "v6e:1x1"),
        ("v5p:4x4x4", 8, "v5p:2x2x2"),
        ("v5p:4x4x4", 16, "v5p:2x2x4"),
        ("v5p:4x4x4", 128, "v5p:4x4x8"),
        ("v5p:4x4x4", 2048, "v5p:8x16x16"),
        ("v4:4x4x4", 4096, "v4:16x16x16"),
        ("v4:4x4x4", 16384, "4*v4:16x16x16"),
        ("tpu7x:4x4x4", 256, "tpu7x:4x4x8"),
        ("tpu7x:4x4x4", 2, "tpu7x:1x1x1"),
    ],
)
def test_members(family: str, devices: int, name: str):
    found = of_size(family, devices)
    assert (found.name, found.devices) == (name, devices)


@pytest.mark.parametrize("chip", CATALOG)
def test_every_family_has_every_doubling(chip: str):
    for devices in DOUBLINGS if CATALOG[chip].chip.devices_per_chip == 1 else DOUBLINGS[1:]:
        found = of_size(CATALOG[chip].example, devices)
        assert found.devices == devices
        assert found == topology(found.name)
        assert found.chip == CATALOG[chip].chip


def test_a_machine_of_ones_own_changes_in_its_outermost_parts():
    own = replace(topology("13*h100:8"), name="mine.toml")
    found = of_size(own, 40)
    assert found.devices == 40
    assert found.name == "mine.toml (40 devices)"
    assert [tier.shape for tier in found.tiers] == [(5,), (8,)]
    assert of_size(own, 104) is own
    with pytest.raises(
        TopologyError,
        match=(
            r"mine\.toml has no member of 12 devices: its outermost parts are 8 devices each\nTry:"
            r" a multiple of 8"
        ),
    ):
        of_size(own, 12)
    changed = replace(
        topology("2*h100:8"),
        chip=replace(topology("h100:8").chip, hbm_bytes=10**10, reserved_bytes=0),
    )
    assert (
        of_size(changed, 32).chip.hbm_bytes == 10**10
    )  # a changed chip is not taken for the catalogue's


def test_no_such_member():
    with pytest.raises(TopologyError, match="a machine of 0 devices was asked for"):
        of_size("h100:8", 0)
    with pytest.raises(
        TopologyError,
        match="tpu7x has 2 devices a chip, and 7 devices are not a whole number of chips",
    ):
        of_size("tpu7x:4x4x4", 7)
