"""Facts about training frameworks, and the efficiency curves of chips: where they come from, which of
them hold.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published.machines import PRODUCTS
from benchmarks.published.unseen.levels import RANGES
from shardlib import frameworks
from shardlib.cost.framework import XLA, FrameworkProfile
from shardlib.cost.roofline import Curve, Efficiency, curves, efficiency_of, vendor_efficiency
from shardlib.errors import PinError
from shardlib.frameworks import framework_profile, framework_profiles
from shardlib.machines.catalog import CATALOG

CURVES = {**curves(), **frameworks.curves()}


def rows(curve: Curve) -> int:
    """Number of published runs that figures of a curve were fitted to."""
    return len(json.loads(curve.evidence or "{}").get("rows", ()))


def well_founded(curve: Curve) -> bool:
    """At least three runs per fitted figure."""
    return rows(curve) >= 3 * len(curve.fitted)


def pooled(curve: Curve) -> set[str]:
    """Figures that were also fitted to runs of other chips or frameworks."""
    return {source.partition(":")[0] for source in curve.sources if ": pooled" in source} & set(
        dict(curve.values)
    )


def evidence_of(stack: str) -> list[Curve]:
    """The curves of a framework profile that were fitted to published runs."""
    return [curve for curve in CURVES.values() if curve.profile == stack and rows(curve)]


@pytest.mark.parametrize("key", CURVES, ids=str)
def test_curves_name_chips_stacks_and_sources(key: tuple[str, str]) -> None:
    curve, (chip, stack) = CURVES[key], key
    # variants of a product have curves of their own, and all chips of a vendor may share one
    vendor = chip if chip == "nvidia" else CATALOG[PRODUCTS.get(chip, chip)].chip.vendor
    assert chip in CATALOG or stack
    assert not stack or stack in framework_profiles()
    text = " ".join(curve.sources)
    shared = {"attention_backward": "attention", "eight_bit": "float8"}
    for name, _ in curve.values:
        assert shared.get(name, name) in text, name
    found = efficiency_of(chip, vendor, stack or "megatron-2021")
    assert Efficiency.from_json(found.to_json()) == found != vendor_efficiency(vendor)


def test_a_fitted_figure_rests_on_three_runs() -> None:
    fitted = [one for one in CURVES.values() if one.fitted]
    assert fitted
    for curve in fitted:
        assert well_founded(curve) and not set(curve.fitted) & pooled(curve)
        told = json.loads(curve.evidence)
        assert all(3 * len(one["figures"]) <= one["rows"] for one in told.get("levels", ()))
        assert {"median_error_fitted", "median_error_after"} & set(told)
        assert "median_error_unseen" in told, "how well it predicts what it was not fitted to"


def test_figures_of_frameworks_are_in_physical_ranges() -> None:
    # an eager layer launches some 60 kernels, in 4.4 ms; a step of a ring crosses a network
    ranges = {**RANGES, "dispatch_s": (0.0, 1e-4), "ring_step_s": (1e-6, 1e-4)}
    for one in CURVES.values():
        for name, value in one.values:
            if name in {*one.fitted, *pooled(one)}:
                low, high = ranges[name]
                assert low <= value <= max(high, 1.0), (one.chip, one.stack, name)


def test_curves_of_the_default_rest_on_enough_runs() -> None:
    assert all(well_founded(curve) for curve in curves().values() if curve.profile == XLA.name)


def test_the_docs_say_how_many_runs_every_profile_rests_on() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cost_model.md").read_text(encoding="utf-8")
    for name in framework_profiles():
        cell = ", ".join(
            f"{one.chip} {rows(one)} / {len(one.fitted)}{'' if well_founded(one) else ' (few)'}"
            for one in evidence_of(name)
        )
        assert f"| {name} | {cell or NO_RUNS} |" in text, name
    assert sum(len(evidence_of(name)) for name in framework_profiles()) == sum(
        bool(rows(one)) for one in CURVES.values()
    )


#: What the docs say of a profile without runs.
NO_RUNS = "none: pooled figures, or the chip's own"


# Stacks: facts about software, read from data.


@pytest.mark.parametrize("name", sorted(framework_profiles()))
def test_shipped_stacks_have_sources_and_survive_json(name: str) -> None:
    one = framework_profile(name)
    assert one.name == name and one.sources
    assert FrameworkProfile.from_json(one.to_json()) == one
    assert hash(one) == hash(FrameworkProfile.from_json(one.to_json()))


def test_facts_of_published_stacks() -> None:
    assert (
        framework_profile("megatron-2021").attention,
        framework_profile("megatron-flash").attention,
    ) == (
        "traced",
        "fused",
    )
    assert framework_profile("llm-foundry").reduction == "microbatch"
    assert framework_profile("megatron-core").reduction == "step"
    # arXiv:1910.02054, section 3.1: 16 bytes a parameter with float16, of which 12 are the
    # optimizer's
    assert (
        2
        + framework_profile("deepspeed-zero3").gradient_bytes(2)
        + (framework_profile("deepspeed-zero3").state_bytes or 0)
        == 16
    )
    # arXiv:2205.05198 and Megatron-LM: 18 bytes with float32 gradients
    assert (
        2
        + framework_profile("megatron-2021").gradient_bytes(2)
        + (framework_profile("megatron-2021").state_bytes or 0)
        == 18
    )
    assert XLA.gradient_bytes(4) == 4


def test_unknown_profiles_are_refused() -> None:
    with pytest.raises(PinError, match="framework profiles are xla, alpa, "):
        framework_profile("caffe")
