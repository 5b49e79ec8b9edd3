"""Kernel time: the laws that planning relies on, and the figures of chips and stacks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.environment import RESULTS
from benchmarks.published.machines import PRODUCTS
from shardlib import frameworks
from shardlib.cost.attention import BACKWARD, FORWARD
from shardlib.cost.framework import (
    FIELD_CHOICES,
    XLA,
    FrameworkProfile,
    framework_profile,
)
from shardlib.cost.roofline import (
    Efficiency,
    curves,
    efficiency_of,
    kernel_seconds,
    load_factor,
    matmul_seconds,
    vendor_efficiency,
    with_reached_rates,
)
from shardlib.cost.terms import Amount, AttentionCore, Compute, Elements, Matmul, RoutedRows
from shardlib.errors import PinError, TopologyError
from shardlib.lowering.experts import ExpertSharding
from shardlib.machines.catalog import CATALOG
from shardlib.machines.topology import Topology, topology

H100 = CATALOG["h100"].chip


def vendor_of(chip: str) -> str:
    """The vendor of a chip, or of all of its own."""
    return chip if chip == "nvidia" else CATALOG[PRODUCTS.get(chip, chip)].chip.vendor


CURVES = [
    efficiency_of(chip, vendor_of(chip), stack or "megatron-2021")
    for chip, stack in {**curves(), **frameworks.curves()}
]
SIZES = st.integers(1, 1 << 16)


def whole(total: float) -> Amount:
    return Amount(total=total, batch=False, tensor=False)


def cut(total: float) -> Amount:
    return Amount(total=total, batch=True, tensor=False)


def matmul(
    rows: float, columns: float, depth: float, batches: float = 1.0, dtype: str = "bfloat16"
) -> Compute:
    return Compute(
        flops=cut(2 * rows * columns * depth * batches),
        dtype=dtype,
        traffic=(),
        trips=1,
        matmul=Matmul(
            rows=cut(rows), columns=whole(columns), depth=whole(depth), batches=whole(batches)
        ),
        kind="dot_general",
        category="matmul",
    )


def seconds(term: Compute, constants: Efficiency, ways: int = 1) -> float:
    return float(
        kernel_seconds(
            term,
            lambda amount: np.array([amount.total / (ways if amount.batch else 1)]),
            H100,
            constants,
        )[0]
    )


@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(
    shape=st.tuples(SIZES, SIZES, SIZES, st.integers(1, 64)),
    more=st.tuples(*[st.integers(0, 4096)] * 4),
    curve=st.sampled_from([curve for curve in CURVES if curve.tiles]),
)
def test_more_work_is_never_faster(
    shape: tuple[int, int, int, int], more: tuple[int, int, int, int], curve: Efficiency
) -> None:
    def timed(sizes: tuple[int, ...]) -> float:
        return float(matmul_seconds(*(np.array([float(size)]) for size in sizes), 1e15, curve)[0])

    assert timed(shape) <= timed(tuple(one + plus for one, plus in zip(shape, more, strict=True)))


@settings(deadline=None, max_examples=200)
@given(shape=st.tuples(SIZES, SIZES, SIZES), curve=st.sampled_from(CURVES))
def test_no_matmul_is_faster_than_the_roofline(
    shape: tuple[int, int, int], curve: Efficiency
) -> None:
    rows, columns, depth = shape
    assert seconds(matmul(rows, columns, depth), curve) >= 2 * rows * columns * depth / (
        H100.peak("bfloat16") * curve.matmul
    ) * (1 - 1e-12)


@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(
    shape=st.tuples(SIZES, SIZES, SIZES),
    ways=st.tuples(st.integers(1, 512), st.integers(1, 512)),
    curve=st.sampled_from([vendor_efficiency("cpu"), *CURVES]),
)
def test_more_devices_are_never_slower_but_no_more_than_so_many_times_faster(
    shape: tuple[int, int, int], ways: tuple[int, int], curve: Efficiency
) -> None:
    few, many = sorted(ways)
    before, after = seconds(matmul(*shape), curve, few), seconds(matmul(*shape), curve, many)
    assert after <= before * (1 + 1e-12)
    assert seconds(matmul(*shape), replace(curve, depth=0.0), 1) <= many * seconds(
        matmul(*shape), replace(curve, depth=0.0), many
    ) * (1 + 1e-12)


@settings(deadline=None, max_examples=100)
@given(
    shape=st.tuples(SIZES, SIZES, SIZES),
    vendor=st.sampled_from(["nvidia", "google", "cpu"]),
    bytes_=st.floats(0, 1e12),
    simple=st.floats(0, 1e12),
    hard=st.floats(0, 1e10),
)
def test_the_default_is_padding_and_three_shares(
    shape: tuple[int, int, int], vendor: str, bytes_: float, simple: float, hard: float
) -> None:
    """The formula written out."""
    e = vendor_efficiency(vendor)
    padded = 1.0
    for size in shape:
        padded *= np.ceil(size / e.tile) * e.tile / size if size >= e.tile else 1.0
    term = replace(
        matmul(*shape),
        traffic=(whole(bytes_),),
        elements=Elements(simple=(whole(simple),), transcendental=(whole(hard),)),
    )
    vector = (simple + e.transcendental * hard) / (H100.peak("bfloat16") * e.vector)
    product = 2.0 * shape[0] * shape[1] * shape[2] * padded / (H100.peak("bfloat16") * e.matmul)
    assert seconds(term, e) == pytest.approx(
        max(vector, product, bytes_ / (H100.hbm_bytes_per_s * e.memory)) + H100.launch_s, rel=1e-12
    )


def test_waves() -> None:
    """132 blocks are one wave of an H100, one more block is a second wave."""
    curve = replace(efficiency_of("h100", "nvidia", ""), tiles=((128, 128, 1.0),), depth=0.0)
    one, two = (
        seconds(matmul(128 * blocks, 128, 4096), curve) - H100.launch_s for blocks in (132, 133)
    )
    assert two == pytest.approx(2 * one)
    assert one == pytest.approx(2 * 132 * 128 * 128 * 4096 / (H100.peak("bfloat16") * curve.matmul))
    assert seconds(matmul(128, 128, 4096, batches=132), curve) == pytest.approx(one + H100.launch_s)


def test_small_and_shallow_matmuls_reach_less() -> None:
    curve = efficiency_of("h100", "nvidia", "")

    def share(rows: int, columns: int, depth: int) -> float:
        return (
            2
            * rows
            * columns
            * depth
            / (seconds(matmul(rows, columns, depth), curve) * H100.peak("bfloat16"))
        )

    assert share(8192, 8192, 8192) > 0.7 > share(1024, 1024, 1024)
    assert share(8192, 8192, 8192) > share(8192, 8192, 128)
    assert share(8192, 8192, 8192) > share(64, 8192, 8192)


def test_classes_of_kernels() -> None:
    curve = efficiency_of("h100", "nvidia", "")
    peak, bandwidth = H100.peak("bfloat16"), H100.hbm_bytes_per_s
    work = Compute(flops=whole(1e15), dtype="bfloat16", traffic=(whole(1e9),), trips=1)
    for kind, category, share in (
        ("ragged_dot_general", "matmul", curve.matmul * curve.grouped),
        ("conv_general_dilated", "convolution", curve.matmul * curve.convolution),
        (FORWARD, "opaque", curve.attention),
        (BACKWARD, "opaque", curve.attention_backward),
        ("add", "elementwise", curve.vector),
    ):
        assert seconds(replace(work, kind=kind, category=category), curve) == pytest.approx(
            1e15 / (peak * share) + H100.launch_s
        ), kind
    for head, width, times in (
        (128, 256, 2.0),
        (256, 256, 1.0),
        (192, 128, 256 / 192),
        (64, 1, 1.0),
        (0, 256, 1.0),
    ):  # a head fills whole columns of the matrix unit
        expected = times * 1e15 / (peak * curve.attention) + H100.launch_s
        assert seconds(
            replace(
                work,
                kind=FORWARD,
                category="opaque",
                core=AttentionCore(query_width=head, scores_per_flop=0.0),
            ),
            replace(curve, width=width),
        ) == pytest.approx(expected), (head, width)
    for kind, equal, width, times in (  # 192 wide queries, 128 wide values
        (FORWARD, True, 1, (192 + 192) / (192 + 128)),
        (BACKWARD, True, 1, 5 * 192 / (3 * 192 + 2 * 128)),
        (FORWARD, False, 1, 1.0),
        (FORWARD, False, 128, (256 + 128) / (192 + 128)),
        (BACKWARD, False, 128, (3 * 256 + 2 * 128) / (3 * 192 + 2 * 128)),
    ):
        share = curve.attention if kind == FORWARD else curve.attention_backward
        core = AttentionCore(query_width=192, value_width=128, scores_per_flop=0.0)
        assert seconds(
            replace(work, kind=kind, category="opaque", core=core),
            replace(curve, equal_widths=equal, width=width),
        ) == pytest.approx(times * 1e15 / (peak * share) + H100.launch_s), (kind, equal, width)
    moving = replace(work, flops=whole(0.0))
    own = replace(curve, gather=0.5, sort=8.0)
    for category, share in (
        ("gather", 0.5),
        ("scatter", 0.5),
        ("reduction", curve.memory),
        ("sort", curve.memory / 8),
    ):
        assert seconds(replace(moving, category=category), own) == pytest.approx(
            1e9 / (bandwidth * share) + H100.launch_s
        ), category
    eager = replace(curve, unfused=2.0)
    for category, times in (("elementwise", 2), ("reduction", 2), ("matmul", 1), ("gather", 1)):
        assert seconds(replace(moving, category=category), eager) == pytest.approx(
            times * 1e9 / (bandwidth * curve.memory) + H100.launch_s
        ), category


def test_eight_bits_reach_their_own_share() -> None:
    curve = efficiency_of("h100", "nvidia", "megatron-core-fp8")
    times = [
        seconds(matmul(8192, 8192, 8192, dtype=dtype), curve)
        for dtype in ("bfloat16", "float8_e4m3fn")
    ]
    assert 1.5 < times[0] / times[1] < 2.0  # twice the peak, of which a smaller share is reached


def test_misaligned_matmuls_are_slower_where_a_curve_says_so() -> None:
    curve = replace(efficiency_of("a100", "nvidia", "megatron-2021"), misaligned=0.25)
    whole_, ragged, narrow = (
        seconds(matmul(4096, columns, depth), curve) - H100.launch_s
        for columns, depth in ((4096, 4096), (4096, 4095), (4100, 4096))
    )
    assert ragged > 3.9 * whole_ and narrow > 3.9 * whole_
    assert seconds(matmul(4095, 4096, 4096), curve) == whole_ + H100.launch_s


def test_alignment_is_that_of_whole_numbers() -> None:
    """What is left of a dim on one device may miss a whole number by a rounding error, 2048 x (1 -
    1e-16).
    """
    curve = replace(vendor_efficiency("nvidia"), misaligned=0.1)
    assert seconds(matmul(4096, 4096, 2048 * (1 - 1e-12)), curve) == pytest.approx(
        seconds(matmul(4096, 4096, 2048), curve), rel=1e-9
    )


def test_all_wait_for_the_busiest_device_of_experts() -> None:
    curve = replace(efficiency_of("h100", "nvidia", ""), skew=0.25)
    routed = RoutedRows(assignments=whole(4096.0), experts=cut(64.0))
    term = Compute(
        flops=whole(1e15),
        dtype="bfloat16",
        traffic=(),
        trips=1,
        kind="ragged_dot_general",
        category="matmul",
        routed=routed,
    )
    for devices in (1, 8, 64):
        even, uneven = (
            seconds(term, figures, devices) - H100.launch_s
            for figures in (replace(curve, skew=None), curve)
        )
        assert uneven / even == pytest.approx(
            float(load_factor(np.array([4096.0]), np.array([devices]), 64, 0.25)[0])
        )


# Figures of chips and stacks: where they come from and which of them hold.


def test_the_default_stack_has_the_constants_of_the_vendor_and_matmuls_of_the_compiler() -> None:
    stored = [
        json.loads((RESULTS / name).read_text(encoding="utf-8"))
        for name in ("matmul_cycles.json", "default_profile.json", "default_profile_nvidia.json")
    ]
    shares = {chip: found["share"] for chip, found in stored[0]["chips"].items()}
    assert shares == stored[1]["compiler_shares"] and 0.7 < stored[1]["factor"] < 1
    for product in CATALOG.values():
        chip = product.chip
        found, vendor = efficiency_of(chip.name, chip.vendor, "xla"), vendor_efficiency(chip.vendor)
        if chip.vendor == "nvidia":
            share = round(vendor.matmul * stored[2]["factor"], 4)
            ring = {"ring_step_s": found.ring_step_s}
            assert found == replace(vendor, matmul=share, hidden=stored[2]["hidden"], **ring)
            assert 1.9e-6 < found.ring_step_s < 4.0e-6, "between NCCL's steps in and between nodes"
            continue
        if chip.vendor != "google":
            assert found == vendor
            continue
        share = round(shares[chip.name] * stored[1]["factor"], 4)
        assert found == replace(vendor, matmul=share) and share < vendor.matmul
    assert efficiency_of("unknown", "nvidia", "megatron-core") == vendor_efficiency("nvidia")


def test_measured_figures_come_last() -> None:
    found = efficiency_of(
        "h100", "nvidia", "nanotron", {"matmul": 0.61, "tiles": [[128, 128, 0.9]]}
    )
    fitted = efficiency_of("h100", "nvidia", "nanotron").attention
    assert (found.matmul, found.tiles, found.attention) == (
        0.61,
        ((128.0, 128.0, 0.9),),
        fitted,
    ) and fitted != efficiency_of("h100", "nvidia", "").attention
    with pytest.raises(PinError, match="'speed' is not a figure"):
        vendor_efficiency("cpu").with_values({"speed": 1})
    with pytest.raises(PinError, match=r"matmul is 1.5; it is above 0 and at most 1"):
        vendor_efficiency("cpu").with_values({"matmul": 1.5})


def test_links_of_a_stack() -> None:
    place = topology("2*h100:8")
    assert with_reached_rates(place, vendor_efficiency("nvidia")) is place
    slower = with_reached_rates(place, replace(vendor_efficiency("nvidia"), fast=0.5, slow=0.8))
    assert [
        after.efficiency / before.efficiency
        for before, after in zip(place.tiers, slower.tiers, strict=True)
    ] == pytest.approx([0.8, 0.5])
    assert (
        with_reached_rates(place, replace(vendor_efficiency("nvidia"), fast=9.0))
        .tiers[1]
        .efficiency
        == 1.0
    )


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
    default = efficiency_of("h100", "nvidia", "xla")
    assert found == replace(default, matmul=0.66, tiles=((128.0, 256.0, 1.0),)) != default
    with pytest.raises(TopologyError, match="'efficiency' is not a table"):
        Topology.from_json({**place.to_json(), "efficiency": 3})


def test_the_default_says_nothing_but_what_lowering_does() -> None:
    assert replace(
        XLA,
        sources=(),
        exchange_room=1.0,
        layers="looped",
        routed_saves="as others",
        reduction="microbatch",
        gathered_inputs="again",
    ) == FrameworkProfile(name="xla")
    assert XLA.exchange_room == ExpertSharding(expert=(), ways=1).slack
    assert framework_profile("xla") is XLA is framework_profile(XLA)


def test_all_faults_are_listed() -> None:
    with pytest.raises(PinError) as caught:
        FrameworkProfile(
            name="mine",
            attention="flash",
            gather_overlap=1.5,
            reduction_dtype="half",
            runtime_bytes=-1,
            fragmentation=0.5,
        )
    assert (
        str(caught.value) == "framework profile 'mine' is not usable:\n"
        "  - attention is 'flash'; it is one of traced, fused, blocks, rematerialised\n"
        "  - gather_overlap is 1.5; it is a share from 0 to 1\n"
        "  - reduction_dtype is 'half', which is not a dtype\n"
        "  - runtime_bytes is -1; it must not be negative\n"
        "  - fragmentation is 0.5; it is at least 1"
    )


@pytest.mark.parametrize("field", sorted(FIELD_CHOICES))
def test_every_word_is_checked(field: str) -> None:
    for word in FIELD_CHOICES[field]:
        assert getattr(FrameworkProfile(name="mine", **{field: word}), field) == word
    with pytest.raises(PinError, match=field):
        FrameworkProfile(name="mine", **{field: "no such word"})


def test_unknown_names_and_fields() -> None:
    with pytest.raises(PinError, match="'speed' is not a field"):
        FrameworkProfile.from_json({"name": "mine", "speed": 1})
