"""Compiler flags of plans: where they are, why, and where they are shown."""

from __future__ import annotations

import pytest

import shardlib
from shardlib.cli.inputs import inputs_of
from shardlib.errors import ArgumentError
from shardlib.planner.compiler_flags import COMBINED, LARGEST, PROFILE, combined, require_profile

NAME = "xla_gpu_all_gather_combine_threshold_bytes"
PINS = {"microbatches": 1, "remat": "full", "zero": 3}


def plan(where, mesh, batch=256, model="llama2-7b", seq=2048):
    given = inputs_of(model, batch, seq)
    return shardlib.plan(**given, topology=where, pin={**PINS, "mesh": mesh})


def test_small_gathers_over_many_hosts_are_combined():
    """The projections of attention are 32 MiB each in bfloat16: XLA leaves them apart."""
    found = plan("8*h100:8", {"fsdp": 64})
    (flag,) = found.compiler_flags
    assert found.compiler_options == {NAME: 128 << 20} == {flag.name: flag.value}
    assert "a layer gathers 386 MiB in 7 arrays over fsdp" in flag.reason
    assert f"compiler flags {NAME}=134217728" in " ".join(found.explain().split())
    assert shardlib.Plan.from_json(found.to_json()).compiler_flags == (flag,)
    sizes = [c.bytes for c in found.estimate.collectives if c.kind == "all-gather" and c.count > 1]
    assert sorted(sizes)[:4] == [32 << 20] * 4
    assert len(combined(sorted(sizes), COMBINED)) == 7
    assert len(combined(sorted(sizes), LARGEST)) == 4


@pytest.mark.parametrize(
    ("where", "mesh"),
    [
        ("8*h100:8", {"data": 8, "fsdp": 8}),  # gathers stay on NVLink
        ("8*h100:8", {"fsdp": 8, "tensor": 8}),  # others wait where gathers are large
        ("v5e:8x8", {"fsdp": 64}),
    ],
)
def test_other_plans_leave_the_compiler_alone(where, mesh):
    found = plan(where, mesh, batch=64)
    assert found.compiler_flags == () and found.compiler_options == {}
    assert "compiler flags" not in found.explain()


def test_the_cpu_compiler_has_no_flags():
    found = plan("cpu:8", {"fsdp": 8}, 8, "demo", seq=256)
    assert found.compiler_flags == ()


def test_profiles_are_files_with_costs(tmp_path):
    file = tmp_path / "profile.pbtxt"
    with pytest.raises(
        ArgumentError,
        match=r"profile.pbtxt is not a profile of instructions.*\nTry: jax.experimental",
    ):
        require_profile({PROFILE: str(file)})
    file.write_text("no profile")
    with pytest.raises(ArgumentError, match="is not a profile of instructions"):
        require_profile({PROFILE: str(file)})
    file.write_text('costs { name: "fusion.1" cost_us: 5 }')
    require_profile({PROFILE: str(file)})
    require_profile({PROFILE: str(tmp_path)})
    require_profile({})
