"""Figures of chips and stacks: where they come from and which of them hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.environment import RESULTS
from benchmarks.published.machines import PRODUCTS
from benchmarks.published.unseen.levels import RANGES
from shardlib.cost.framework import framework_profiles
from shardlib.cost.roofline import (
    Efficiency,
    curves,
    efficiency,
    efficiency_of,
    evidence_of,
    linked,
)
from shardlib.errors import PinError, TopologyError
from shardlib.machines.catalog import CATALOG
from shardlib.machines.topology import Topology, topology


def test_curves_name_chips_stacks_and_sources() -> None:
    for key in curves():
        _names_chip_stack_and_sources(key)


def _names_chip_stack_and_sources(key: tuple[str, str]) -> None:
    curve, (chip, stack) = curves()[key], key
    product = CATALOG[
        PRODUCTS.get(chip, chip)
    ]  # variants of a product have runs, and curves, of their own
    assert (chip in CATALOG or stack) and (not stack or stack in framework_profiles())
    text = " ".join(curve.sources)
    shared = {"attention_backward": "attention", "eight_bit": "float8"}
    for name, _ in curve.values:
        assert shared.get(name, name) in text, name
    found = efficiency_of(chip, product.chip.vendor, stack or "megatron-2021")
    assert Efficiency.from_json(found.to_json()) == found != efficiency(product.chip.vendor)


def test_a_fitted_figure_rests_on_three_runs() -> None:
    fitted = [one for one in curves().values() if one.fitted]
    assert fitted
    for curve in fitted:
        assert curve.well_founded and not set(curve.fitted) & set(curve.pooled)
        told = json.loads(curve.evidence)
        assert all(3 * len(one["figures"]) <= one["rows"] for one in told.get("levels", ()))
        assert {"median_error_fitted", "median_error_after"} & set(told)
        assert "median_error_unseen" in told, "how well it predicts what it was not fitted to"


def test_figures_of_frameworks_are_in_physical_ranges() -> None:
    for one in curves().values():
        for name, value in one.values:
            if name in (*one.fitted, *one.pooled):
                low, high = RANGES[name]
                assert low <= value <= max(high, 1.0), (one.chip, one.stack, name)


def test_the_default_stack_has_the_constants_of_the_vendor_and_matmuls_of_the_compiler() -> None:
    stored = [
        json.loads((RESULTS / name).read_text(encoding="utf-8"))
        for name in ("matmul_cycles.json", "default_profile.json")
    ]
    shares = {chip: found["share"] for chip, found in stored[0]["chips"].items()}
    assert shares == stored[1]["compiler_shares"] and 0.7 < stored[1]["factor"] < 1
    for product in CATALOG.values():
        chip = product.chip
        found, vendor = efficiency_of(chip.name, chip.vendor, "xla"), efficiency(chip.vendor)
        if chip.vendor != "google":
            assert found == vendor
            continue
        share = round(shares[chip.name] * stored[1]["factor"], 4)
        assert found == replace(vendor, matmul=share) and share < vendor.matmul
        assert curves()[chip.name, "xla"].well_founded
    assert efficiency_of("unknown", "nvidia", "megatron-core") == efficiency("nvidia")


def test_measured_figures_come_last() -> None:
    found = efficiency_of(
        "h100", "nvidia", "nanotron", {"matmul": 0.61, "tiles": [[128, 128, 0.9]]}
    )
    fitted = dict(curves()["h100", "nanotron"].values)["attention"]
    assert (found.matmul, found.tiles, found.attention) == (
        0.61,
        ((128.0, 128.0, 0.9),),
        fitted,
    ) and fitted != efficiency_of("h100", "nvidia", "").attention
    with pytest.raises(PinError, match="'speed' is no figure"):
        efficiency("cpu").with_values({"speed": 1})
    with pytest.raises(PinError, match=r"matmul is 1.5; it is above 0 and at most 1"):
        efficiency("cpu").with_values({"matmul": 1.5})


def test_links_of_a_stack() -> None:
    place = topology("2*h100:8")
    assert linked(place, efficiency("nvidia")) is place
    slower = linked(place, replace(efficiency("nvidia"), fast=0.5, slow=0.8))
    assert [
        after.efficiency / before.efficiency
        for before, after in zip(place.tiers, slower.tiers, strict=True)
    ] == pytest.approx([0.8, 0.5])
    assert linked(place, replace(efficiency("nvidia"), fast=9.0)).tiers[1].efficiency == 1.0


def test_a_topology_brings_its_own_figures(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'chip = "h100"\n[[tiers]]\nname = "NVLink"\nkind = "switch"\nshape = [8]\nbytes_per_s ='
        " 4.5e11\nlatency_s = 2e-6\n[efficiency]\nmatmul = 0.66\ntiles = [[128, 256, 1.0]]\n",
        encoding="utf-8",
    )
    place = topology(str(file))
    assert Topology.from_json(place.to_json()) == place
    found = efficiency_of(place.chip.name, place.chip.vendor, "xla", dict(place.efficiency))
    assert found == replace(efficiency("nvidia"), matmul=0.66, tiles=((128.0, 256.0, 1.0),))
    with pytest.raises(TopologyError, match="'efficiency' is no table"):
        Topology.from_json({**place.to_json(), "efficiency": 3})


def test_the_docs_say_how_many_runs_every_profile_rests_on() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cost_model.md").read_text(encoding="utf-8")
    for name in framework_profiles():
        cell = ", ".join(
            f"{one.chip} {one.rows} / {len(one.fitted)}{'' if one.well_founded else ' (few)'}"
            for one in evidence_of(name)
        )
        assert f"| {name} | {cell or NO_RUNS} |" in text, name
    assert sum(len(evidence_of(name)) for name in framework_profiles()) == sum(
        bool(one.rows) for one in curves().values()
    )


#: What the docs say of a profile without runs.
NO_RUNS = "none: pooled figures, or the chip's own"
