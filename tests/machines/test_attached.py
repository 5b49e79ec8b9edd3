"""Prices of attached devices: measured collectives give the links back that made them, and a
machine of measured figures is one that plans are made for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import pytest
import tomli_w

from shardlib import calibration
from shardlib.calibration import (
    along_tier,
    figure_list,
    intervals,
    known,
    machine,
    prices,
    require_attached,
)
from shardlib.cost.collectives import collective_cost
from shardlib.cost.roofline import efficiency_of, with_reached_rates
from shardlib.errors import TopologyError
from shardlib.layout import MeshShape
from shardlib.machines.topology import Topology, place, topology


def made_up(base: Topology) -> Topology:
    """The machine with other links than those of the catalogue."""
    tiers = tuple(
        replace(
            tier, bytes_per_s=tier.bytes_per_s * (0.4 + n), efficiency=0.7, latency_s=7e-6 * (n + 1)
        )
        for n, tier in enumerate(base.tiers)
    )
    return replace(base, name="made up", tiers=tiers)


def figures_of(truth: Topology, share: float = 0.6) -> dict[str, float]:
    """What a measurement of a machine finds whose matmuls and memory reach a share of the peak."""
    listed = known(truth)
    return {
        **{n: v * share if n.startswith(("matmul", "memory")) else v for n, v in listed.items()},
        "overlap": 0.5,
    }


@pytest.mark.parametrize("name", ["2*h100:8", "v5e:4x4", "v5p:4x4x4", "2*v5e:4x4", "4*a100:4"])
def test_measured_collectives_give_the_links_that_made_them(name: str):
    base, truth = topology(name), made_up(topology(name))
    found = machine(base, figures_of(truth))
    for tier, true in zip(found.tiers, truth.tiers, strict=True):
        assert tier.reached_bytes_per_s == pytest.approx(true.reached_bytes_per_s)
        assert tier.latency_s == pytest.approx(true.latency_s)
        assert 0 < tier.efficiency <= 1


@pytest.mark.parametrize("stack", ["xla", "megatron-core"])
def test_plans_price_collectives_as_they_were_measured(stack: str):
    """Over every axis, whatever the framework profile takes off the links of the catalogue."""
    base, truth = topology("2*h100:8"), made_up(topology("2*h100:8"))
    found = machine(base, figures_of(truth))
    constants = efficiency_of("h100", "nvidia", stack, dict(found.efficiency))
    priced = with_reached_rates(found, constants)
    spans = place(MeshShape(data=2, tensor=8), truth)
    assert spans is not None
    for axis in ("data", "tensor"):
        for kind in ("all-gather", "all-reduce", "all-to-all"):
            ours, theirs = (collective_cost(kind, spans[axis], one) for one in (priced, truth))
            assert ours.seconds(1e7) == pytest.approx(theirs.seconds(1e7))


@pytest.mark.parametrize(("share", "peak"), [(0.6, 1.0), (1.2, 1.2)])
def test_matmuls_run_at_the_measured_rate(share: float, peak: float):
    """The share of the peak; a rate above the peak of the data sheet is the peak."""
    base = topology("h100:8")
    found = machine(base, figures_of(base, share))
    constants = efficiency_of("h100", "nvidia", "xla", dict(found.efficiency))
    for dtype in ("bfloat16", "float32", "float8_e4m3fn"):
        rate = found.chip.peak(dtype) * constants.peak_share(dtype)
        assert rate == pytest.approx(base.chip.peak(dtype) * share), dtype
    assert found.chip.peak("bfloat16") == pytest.approx(peak * base.chip.peak("bfloat16"))
    assert found.chip.hbm_bytes_per_s * constants.memory == pytest.approx(
        base.chip.hbm_bytes_per_s * share
    )


def test_groups_lie_along_one_tier():
    devices = list(range(16))
    base = topology("2*h100:8")
    grids = [along_tier(base, tier, devices).devices.tolist() for tier in (0, 1)]  # pyright: ignore[reportArgumentType]
    assert grids[0] == [[n, n + 8] for n in range(8)]
    assert grids[1] == [devices[:8], devices[8:]]


def test_an_interval_holds_all_passes():
    assert intervals([{"a": 3.0, "b": 1.0}, {"a": 2.0, "b": 1.0}]) == {
        "a": (2.0, 3.0),
        "b": (1.0, 1.0),
    }


def test_devices_of_another_machine_are_refused():
    with pytest.raises(TopologyError) as caught:
        require_attached(topology("h100:8"), jax.devices())
    assert str(caught.value) == (
        "h100:8 has 8 devices h100, and 8 of cpu (cpu) are attached\nTry: the topology of these"
        " devices, or leave it out; --dry-run says what would be measured without them"
    )


@pytest.mark.long
def test_measured_prices_are_a_topology_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"LEAST_PASSES": 1, "MOST_PASSES": 2, "ATTACHED_S": 1e-3}.items():
        monkeypatch.setattr(calibration, name, value)
    base = topology("cpu:2")
    found = prices(base, jax.devices()[:2], 1e-6)
    assert found.figures.keys() == figure_list(base).keys()
    assert found.machine.measured is not None
    ranges = {name: (low, high) for name, low, high in found.machine.measured.intervals}
    assert ranges.keys() == found.figures.keys()
    assert all(ranges[name][0] <= value <= ranges[name][1] for name, value in found.figures.items())
    file = tmp_path / "here.toml"
    file.write_text(tomli_w.dumps(found.machine.to_json()))
    assert replace(topology(str(file)), name="cpu:2") == found.machine
