"""Compiler options of programs: those of plans are known to the compilers, and a user's win."""

from __future__ import annotations

import re

import jax
import numpy as np
import optax
import pytest

import shardlib
from shardlib import models
from shardlib.cost.roofline import efficiency_of
from shardlib.errors import ArgumentError
from shardlib.planner.compiler_flags import PROFILE
from shardlib.verification import verify as verification
from tests.verification.programs import CONFIG

INIT, LOSS = models.build(CONFIG)
BATCH = models.example_batch(CONFIG, 16, 32)
PINS = {"mesh": {"fsdp": 8}, "microbatches": 1, "remat": "none", "zero": 3}
NAME = "xla_gpu_all_gather_combine_threshold_bytes"
GPU = pytest.mark.compiler("gpu")


def verify(where, **options):
    return shardlib.verify(
        INIT, LOSS, optax.adamw(1e-3), BATCH, topology=where, pin=PINS, name="tiny", **options
    )


def gathers(found):
    return sum(c.count for c in found.compiled.collectives if c.kind == "all-gather")


@GPU
def test_the_compiler_combines_up_to_the_threshold_of_a_plan():
    """The option has its meaning: with a small threshold all-gathers stay apart."""
    apart, whole = (
        verify("h100:8", options={NAME: size, "xla_gpu_enable_latency_hiding_scheduler": True})
        for size in (1, 64 << 20)
    )
    assert gathers(whole) < gathers(apart)
    unknown = verify("h100:8", options={"xla_no_such": True})
    assert "No such compile option" in str(unknown.findings[0])


@GPU
def test_a_plan_is_verified_with_its_options(monkeypatch):
    asked = []
    compile_apart = verification.compile_apart

    def kept(step, machine, limits, options):
        asked.append(options)
        return compile_apart(step, machine, limits, options)

    monkeypatch.setattr(verification, "compile_apart", kept)
    monkeypatch.setattr(shardlib.Plan, "compiler_options", property(lambda _: {NAME: 7}))
    verify("h100:8")
    verify("h100:8", options={})
    assert asked == [{NAME: 7}, {}]


@GPU
def test_profiles_reach_the_compiler(tmp_path):
    """A profile that knows nothing of the program is a finding; one of its kernels is none."""
    file, texts = tmp_path / "profile.pbtxt", []
    file.write_text('costs { name: "nobody.1" cost_us: 5 }')
    foreign = verify("h100:8", options={PROFILE: str(file)})
    assert "profile-of-another" in {finding.code for finding in foreign.findings}
    names = {f"loop_fusion.{number}" for number in range(64)} | {"all-gather-start"}
    names |= {f"{kind}.{number}" for kind in ("fusion", "all-gather-start") for number in range(64)}
    file.write_text("".join(f'costs {{ name: "{name}" cost_us: 5 }}\n' for name in names))
    texts.append(verify("h100:8", options={PROFILE: str(file)}))
    assert "profile-of-another" not in {finding.code for finding in texts[0].findings}
    with pytest.raises(ArgumentError, match="is not a profile"):
        verify("h100:8", options={PROFILE: str(tmp_path / "missing.pb")})


@GPU
def test_waits_of_a_gpu_program_are_in_the_report():
    found = verify("2*h100:4")
    assert found.compiled is not None and found.compiled.schedule is not None
    seconds = sum(c.seconds for c in found.compiled.collectives)
    assert 0 < found.compiled.schedule.exposed <= seconds * (1 + 1e-9)
    assert found.compiled.schedule.kernels > 0
    assert re.search(r"exposed communication +[\d.]+ .s +[\d.]+ .s", str(found))


def trained(**options):
    program = shardlib.compile(
        INIT, LOSS, optax.adamw(1e-3), BATCH, topology="cpu:8", pin=PINS, name="tiny", **options
    )
    numbers = np.random.default_rng(0)
    batch = jax.tree.map(
        lambda leaf: numbers.integers(0, 256, leaf.shape).astype(leaf.dtype), BATCH
    )
    state, metrics = program.step(program.init(0), batch)
    return program, state, metrics["loss"]


@pytest.mark.long
def test_options_of_a_user_reach_the_compiler_and_change_no_bit_here():
    """`xla_gpu_*` options mean nothing to the CPU compiler, as a plan's would."""
    program, state, loss = trained()
    assert program.compiler_options == {}
    other, same, equal = trained(compiler_options={NAME: 64 << 20})
    assert other.compiler_options == {NAME: 64 << 20}
    assert loss == equal
    jax.tree.map(np.testing.assert_array_equal, state.params, same.params)
    with pytest.raises(ArgumentError, match=r"refuses compiler_options \{'xla_no_such': True\}"):
        trained(compiler_options={"xla_no_such": True})
    with pytest.raises(ArgumentError, match="compiler_options"):
        trained(compiler_options=["xla_no_such"])


def test_kernels_of_gpus_have_the_rates_of_the_cost_model():
    from shardlib.verification.schedule import Rates

    machine = shardlib.topology("h100:8")
    rates = Rates.of(machine, 0.0)
    reached = efficiency_of("h100", "nvidia", "xla", dict(machine.efficiency))
    assert rates.bytes_per_s == machine.chip.hbm_bytes_per_s * reached.memory
    assert rates.flops_per_s("bfloat16") < machine.chip.peak("bfloat16")
