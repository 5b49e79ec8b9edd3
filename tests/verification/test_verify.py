"""From a model to a verdict: with the CPU compiler always, with those of TPU and GPU where they are
installed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import shardlib
from shardlib import models
from shardlib.errors import VerificationError
from shardlib.findings import Finding
from shardlib.layout import Collective, MeshShape
from shardlib.machines.topology import topology
from shardlib.verification import report as compare
from shardlib.verification.isolation import Limits
from shardlib.verification.report import CompiledStep, growth, read_baseline, totals
from shardlib.verification.traffic import InstructionTraffic, read_traffic
from tests.verification.programs import CONFIG

INIT, LOSS = models.build(CONFIG)
BATCH = models.example_batch(CONFIG, 16, 32)
PINS = {"mesh": {"fsdp": 4, "tensor": 2}, "microbatches": 1, "remat": "none", "zero": 3}
#: As the partitioner of jaxlib 0.10.2 and 0.12.0.1 says it.
REMATERIALISED = """W1121 06:27:12.913713   29860 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding \
{devices=[2,1,1,4]<=[8] last_tile_dim_replicate} to {devices=[1,4,1,2]<=[2,2,2]T(1,0,2) last_tile_dim_replicate} efficiently for HLO operation %copy = \
f32[8,16,16]{2,1,0} copy(%tanh.0), metadata={op_name="jit(f)/gather" stack_frame_id=3}. As the last resort, SPMD will replicate the tensor.
"""


def verify(where: str, **options):
    return shardlib.verify(
        INIT,
        LOSS,
        optax.adamw(1e-3),
        BATCH,
        topology=where,
        name="tiny",
        **{"pin": PINS, **options},
    )


@pytest.fixture(scope="module")
def program():
    return shardlib.compile(
        INIT, LOSS, optax.adamw(1e-3), BATCH, topology="cpu:8", pin=PINS, name="tiny"
    )


@pytest.fixture(scope="module")
def verified(program):
    return shardlib.verify(program)


@pytest.mark.long
def test_the_program_compiled_apart_is_the_program_that_runs(program, verified):
    """Exported for an abstract mesh and compiled elsewhere: the same collectives and memory as
    compiled here.
    """
    here = read_traffic(program.compiled().as_text(), program.plan.mesh)
    apart = verified.compiled
    assert apart is not None and apart.unread == () and here.problems == ()
    assert totals(apart.collectives) == totals(here.collectives)
    memory = program.memory()
    assert {key: apart.device_bytes[key] for key in ("arguments", "aliased")} == {
        key: memory[key] for key in ("arguments", "aliased")
    }
    assert abs(apart.device_bytes["peak"] - memory["peak"]) < 0.02 * memory["peak"]


@pytest.mark.long
def test_the_state_has_the_bytes_that_its_layouts_say(program, verified):
    local = [
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves((program.state, program.batch))
    ]
    assert verified.compiled.device_bytes["arguments"] == sum(local)


@pytest.mark.long
def test_report(verified):
    data = json.loads(verified.to_json())
    assert (
        data["ok"]
        and data["plan"]["mesh"] == PINS["mesh"]
        and data["predicted"]["device_bytes"]["peak"] > 0
    )
    assert {"arguments", "temporaries", "peak"} <= set(data["compiled"]["device_bytes"])
    assert all(
        set(row) == {"kind", "axes", "count", "bytes", "cause"}
        for row in data["compiled"]["collectives"]
    )
    assert (
        data["compiled"]["compute_seconds"] == 0
        and data["compile_seconds"] > 0
        and data["versions"]["jax"] == jax.__version__
    )
    assert str(verified).startswith("tiny on cpu:8, fsdp=4 x tensor=2: verified\n")
    causes = {row["cause"] for row in data["compiled"]["collectives"]}
    assert any(cause.startswith("params.") for cause in causes)


@pytest.mark.long
def test_from_the_model_alone():
    found = verify("cpu:4", pin={"mesh": {"data": 4}})
    assert found.ok and found.compiled is not None
    assert set(totals(found.compiled.collectives)) == {("all-reduce", ("data",))}


def test_a_time_limit_is_a_finding():
    found = verify("cpu:8", limits=Limits(seconds=0.2))
    assert not found.ok and found.compiled is None
    assert [finding.code for finding in found.findings] == ["compile-timeout"]
    assert json.loads(found.to_json())["compiled"] is None


def test_a_plan_is_verified_on_its_own_machine(program):
    with pytest.raises(VerificationError, match="made for cpu:8 and cannot be verified on h100:8"):
        shardlib.verify(program, topology="h100:8")
    with pytest.raises(VerificationError, match="lacks the loss"):
        shardlib.verify(INIT)


def judged(
    verified,
    *,
    predicted=(),
    compiled=(),
    found=(),
    log="",
    donated=0,
    aliased=0,
    where="cpu:8",
    **changes,
):
    """Findings of a made-up step: code -> finding."""
    plan = dataclasses.replace(verified.plan, **changes)
    plan = dataclasses.replace(
        plan, estimate=dataclasses.replace(plan.estimate, collectives=tuple(predicted))
    )
    step = dataclasses.replace(verified.compiled, collectives=tuple(compiled))
    return {
        finding.code: finding
        for finding in compare.compare(plan, topology(where), step, found, log, donated, aliased)
    }


def moved(
    kind: str, *axes: str, size: int, dtype: str = "f32", cause: str = ""
) -> tuple[Collective, InstructionTraffic]:
    return (
        Collective(kind=kind, axes=axes, bytes=size, cause=cause),
        InstructionTraffic(
            kind=kind,
            bytes=size,
            dtypes=(dtype,),
            axes=axes,
            members=4,
            count=1,
            op_name=cause,
            name="x",
        ),
    )


def test_what_was_promised_and_done_is_no_finding(verified):
    gather, found = moved("all-gather", "fsdp", size=10**6)
    assert not {"unplanned-collective", "missing-collective"} & set(
        judged(verified, predicted=[gather], compiled=[gather], found=[found])
    )


def test_unplanned_and_missing_collectives(verified):
    gather, found = moved("all-gather", "fsdp", size=10**6, cause="params.head")
    unplanned = judged(verified, compiled=[gather], found=[found])["unplanned-collective"]
    assert (
        unplanned.message
        == "all-gather over fsdp moves 977 KiB per step, nobody planned it: params.head (977 KiB)."
    )
    missing = judged(verified, predicted=[gather])["missing-collective"]
    assert (missing.severity, missing.where) == ("info", "all-gather over fsdp")
    exchange, found = moved("all-to-all", "tensor", size=10**6)
    assert "unexpected-resharding" in judged(verified, compiled=[exchange], found=[found])


def test_reductions_in_fewer_digits_than_planned(verified):
    wide, _ = moved("all-reduce", "fsdp", size=10**6)
    narrow, found = moved("all-reduce", "fsdp", size=5 * 10**5, dtype="bf16")
    assert (
        "bf16"
        in judged(verified, predicted=[wide], compiled=[narrow], found=[found])[
            "narrow-reduction"
        ].message
    )


def test_a_scatter_that_became_a_whole_reduction_is_one_finding(verified):
    shard, _ = moved("reduce-scatter", "fsdp", size=10**6)
    whole, found = moved("all-reduce", "fsdp", size=4 * 10**6)
    codes = judged(verified, predicted=[shard], compiled=[whole], found=[found])
    assert "whole-reduction" in codes and not {"unplanned-collective", "missing-collective"} & set(
        codes
    )


def test_unplanned_traffic_over_the_slow_network(verified):
    gather, found = moved("all-gather", "fsdp", size=10**6)
    codes = judged(
        verified,
        compiled=[gather],
        found=[found],
        where="2*h100:8",
        mesh=MeshShape(fsdp=2, tensor=8),
    )
    assert "the axis fsdp runs over the slow network" in codes["slow-link-traffic"].message


def test_idle_axis_large_replicas_donation_and_rematerialisation(verified):
    codes = judged(
        verified,
        mesh=MeshShape(fsdp=4, tensor=2, context=2),
        donated=3,
        aliased=1,
        where="h100:8",
        log=REMATERIALISED,
    )
    assert codes["idle-axis"].where == "context"
    assert codes["full-rematerialisation"].where == "jit(f)/gather"
    assert "not-donated" not in codes  # the bytes of the state are reused
    lost = dataclasses.replace(
        verified,
        compiled=dataclasses.replace(
            verified.compiled, device_bytes={**verified.compiled.device_bytes, "aliased": 0}
        ),
    )
    assert judged(lost, donated=3, aliased=1)["not-donated"].message.startswith(
        "2 of the 3 arrays of the state are not updated in place"
    )


def test_kernels_that_take_longer_than_predicted_are_said(verified):
    parts = verified.plan.estimate.seconds
    predicted = parts.compute + parts.optimizer

    def codes(share: float) -> dict[str, Finding]:
        compiled = dataclasses.replace(verified.compiled, compute_seconds=predicted * share)
        return judged(dataclasses.replace(verified, compiled=compiled))

    assert "optimistic" not in codes(0.0) and "optimistic" not in codes(1.01)
    found = codes(1.5)["optimistic"]
    assert found.severity == "warning" and "takes at least 50.0% more" in found.message


def test_memory_that_does_not_suffice(verified):
    usable = topology("h100:8").chip.usable_bytes

    def codes(peak: float) -> dict[str, Finding]:
        sizes = {**verified.compiled.device_bytes, "peak": peak}
        compiled = dataclasses.replace(verified.compiled, device_bytes=sizes)
        return judged(dataclasses.replace(verified, compiled=compiled), where="h100:8")

    assert codes(usable + 1)["out-of-memory"].severity == "error"
    assert "out-of-memory" not in codes(usable)


def test_what_could_not_be_read_is_a_finding(verified):
    step = CompiledStep(
        device_bytes=verified.compiled.device_bytes,
        collectives=(),
        wire_bytes=0.0,
        compute_seconds=0.0,
        device_kind="cpu",
        unread=tuple("abcde"),
    )
    (finding,) = compare.unread(step)
    assert (
        finding.message == "5 parts of the compiled program could not be read: a; b; c and 2 more."
    )


def test_baseline_names_what_grew(verified):
    before = verified.compiled.collectives
    assert growth(before, before) == ()
    more, _ = moved("all-to-all", "tensor", size=4096)
    (finding,) = growth(before, (*before, more))
    assert (finding.code, finding.severity) == ("collective-grew", "error")
    assert (
        finding.message
        == "all-to-all over tensor grew from 0 executions and 0 B per step to 1 and 4.00 KiB."
    )
    halves = dataclasses.replace(more, bytes=2048, count=2)
    larger = dataclasses.replace(more, bytes=4097)
    assert [len(growth((more,), (after,))) for after in (more, halves, larger)] == [0, 1, 1]
    assert totals(read_baseline(verified.to_json(), "x.json")) == totals(before)
    for text in ("", "[]", '{"format": 1, "compiled": null}', '{"format": 9}'):
        with pytest.raises(VerificationError, match=r"x\.json"):
            read_baseline(text, "x.json")


@pytest.mark.long
def test_command_line(tmp_path: Path, shell: Callable[..., tuple[int, str, str]]):
    words = ("verify", "demo", "-b", "8", "-s", "16", "-t", "cpu:8", "--json")
    report = tmp_path / "report.json"
    code, out, _ = shell(*words, "--pin", "mesh.data=8", "--out", str(report))
    assert (
        code == 0
        and json.loads(out)["ok"]
        and json.loads(report.read_text())["compiled"]["collectives"]
    )
    code, out, _ = shell(*words, "--pin", "mesh.tensor=4", "--baseline", str(report))
    assert code == 1 and "collective-grew" in {
        finding["code"] for finding in json.loads(out)["findings"]
    }
    code, out, _ = shell(*words, "--baseline", str(tmp_path / "nothing.json"))
    assert code == 2 and json.loads(out)["error"]["kind"] == "MissingFileError"


#: Two stages of a layer each, with sharded parameters.
STAGES = {
    "mesh": {"stage": 2, "fsdp": 4},
    "microbatches": 2,
    "remat": "full",
    "zero": 3,
    "schedule": "1f1b",
}


TPU, GPU = pytest.mark.compiler("tpu"), pytest.mark.compiler("gpu")


@pytest.mark.parametrize(
    ("where", "pin"),
    [
        pytest.param("v5e:2x4", PINS, marks=TPU),
        pytest.param("2*v6e:2x2", PINS, marks=TPU),
        pytest.param("h100:8", PINS, marks=GPU),
        pytest.param("2*a100:4", PINS, marks=GPU),
        pytest.param("v5e:2x4", STAGES, marks=TPU),
        pytest.param("h100:8", STAGES, marks=GPU),
    ],
)
def test_programs_compile_for_accelerators(where: str, pin: dict[str, Any]):
    found = verify(where, pin=pin)
    assert found.ok and found.compiled is not None and found.compiled.unread == ()
    assert set(pin["mesh"]) <= {axis for c in found.compiled.collectives for axis in c.axes}
    if topology(where).chip.vendor == "google":
        assert found.compiled.compute_seconds > 0
    if "stage" in pin["mesh"]:
        assert ("collective-permute", ("stage",)) in totals(found.compiled.collectives)


@pytest.mark.compiler("tpu")
def test_groups_lie_where_another_order_of_axes_says():
    """Groups are mapped to axes by the devices that the program was compiled for."""
    usual, other = (
        verify("2*v6e:2x2", pin={**PINS, "axis_order": order})
        for order in (["fsdp", "tensor"], ["tensor", "fsdp"])
    )
    assert other.ok and other.plan.axis_order == ("tensor", "fsdp")
    assert other.plan.placement != usual.plan.placement
    assert usual.compiled is not None and other.compiled is not None
    over = [
        {(c.kind, c.axes) for c in one.compiled.collectives if c.bytes > 1 << 12}
        for one in (usual, other)
    ]
    assert over[0] == over[1] and {axis for _, axes in over[1] for axis in axes} == {
        "fsdp",
        "tensor",
    }
