"""Chips: peaks, fallbacks, and what is refused."""

from __future__ import annotations

import pytest

from shardlib.errors import TopologyError
from shardlib.machines.catalog import CATALOG
from shardlib.machines.chips import VENDORS, Chip


def chip(**changes: object) -> Chip:
    given = {
        "name": "toy",
        "vendor": "cpu",
        "flops_per_s": {"bfloat16": 4.0, "float32": 1.0},
        "hbm_bytes": 10,
        "hbm_bytes_per_s": 1.0,
    }
    return Chip(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "peak"),
    [
        ("bfloat16", 4.0),
        ("float16", 4.0),
        ("float32", 1.0),
        ("float64", 1.0),
        ("int32", 1.0),
        ("int8", 4.0),
        ("float8_e5m2", 4.0),
        ("bool", 1.0),
    ],
)
def test_peak_falls_back_as_documented(dtype: str, peak: float):
    assert chip().peak(dtype) == peak


@pytest.mark.parametrize(
    ("name", "shares"), [("gb200", [4, 2, 2]), ("h100", [2, 2, 2]), ("a100", [1, 1, 1])]
)
def test_formats_of_blocks_run_in_what_the_matrix_unit_has(name: str, shares: list[int]):
    peaks = [CATALOG[name].chip.peak(dtype) for dtype in ("nvfp4", "mxfp8", "float8_e5m2")]
    wide = CATALOG[name].chip.peak("bfloat16")
    assert [peak / wide for peak in peaks] == pytest.approx(shares, rel=1e-3)


def test_all_faults_of_a_chip_are_listed():
    with pytest.raises(TopologyError) as caught:
        chip(vendor="acme", flops_per_s={}, hbm_bytes_per_s=0.0, reserved_bytes=10)
    assert (
        str(caught.value) == "chip 'toy' is not usable:\n"
        "  - vendor is 'acme'; vendors are google, nvidia, cpu\n"
        "  - flops_per_s is empty; give at least one dtype, e.g. bfloat16 = 1e14\n"
        "  - hbm_bytes_per_s is 0.0; it must be positive\n"
        "  - reserved_bytes is 10, which leaves nothing of 10 hbm_bytes"
    )


@pytest.mark.parametrize("name", CATALOG)
def test_every_product_is_complete(name: str):
    product = CATALOG[name]
    one = product.chip
    assert one.name == name
    assert one.vendor in VENDORS
    assert one.sources
    assert product.fast.sources
    assert product.slow.sources
    assert one.peak("float32") <= one.peak("bfloat16") or one.vendor == "cpu"
    assert 0.85 * one.hbm_bytes < one.usable_bytes <= one.hbm_bytes
    assert product.slow.bytes_per_s < product.fast.bytes_per_s < one.hbm_bytes_per_s
    assert (one.devices_per_chip > 1) == (product.on_chip is not None)


@pytest.mark.parametrize(
    ("name", "tflops", "gigabytes", "gigabytes_per_s"),
    [  # per chip, data sheets, as the scaling book prints them
        ("v4", 275, 32, 1200),
        ("v5e", 197, 16, 810),
        ("v5p", 459, 96, 2800),
        ("v6e", 920, 32, 1600),
        ("tpu7x", 2307, 192, 7400),
        ("a100", 312, 80, 2039),
        ("a100-40gb", 312, 40, 1555),
        ("h100", 989, 80, 3350),
        ("h200", 989, 141, 4800),
        ("b200", 2250, 180, 8000),
        ("gb200", 2500, 186, 8000),
    ],
)
def test_figures_agree_with_data_sheets(
    name: str, tflops: float, gigabytes: float, gigabytes_per_s: float
):
    one = CATALOG[name].chip
    assert one.peak("bfloat16") * one.devices_per_chip == pytest.approx(tflops * 1e12, rel=0.01)
    assert one.hbm_bytes * one.devices_per_chip == pytest.approx(gigabytes * 2**30, rel=0.02)
    assert one.hbm_bytes_per_s * one.devices_per_chip == pytest.approx(
        gigabytes_per_s * 1e9, rel=0.05
    )
