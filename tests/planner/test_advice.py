"""Every rule both ways: it speaks where it should, and is silent where it should be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardlib.cost.estimate import DeviceBytes, Seconds
from shardlib.cost.roofline import Applied
from shardlib.findings import Finding
from shardlib.layout import Layout, MeshShape
from shardlib.machines.topology import topology
from shardlib.planner import findings
from shardlib.planner import search as planner
from shardlib.planner.findings import advise, critical_batch_tokens, notes
from shardlib.planner.layouts import Situation
from shardlib.planner.plan import Link, Plan, Rejected, Search
from shardlib.report.elements import seconds_text
from shardlib.rules import Rules
from tests.planner import worlds
from tests.planner.fixture_plan import PLAN, parameter

#: A plan of 16 devices about which no rule has anything to say.
CALM = replace(
    PLAN,
    mesh=MeshShape(data=16),
    zero=0,
    microbatches=1,
    placement=(("data", (Link(kind="network", ways=2), Link(kind="switch", ways=8))),),
    search=Search(),
)
GIB = 2**30


def at(
    where: str = "2*h100:8", weights: int = 7 * 10**9, language: bool = True, **changes: Any
) -> Situation:
    return Situation(
        plan=replace(CALM, **changes),
        topology=topology(where),
        compute_dtype="bfloat16",
        itemsize=2,
        weights=weights,
        language=language,
    )


def codes(situation: Situation) -> list[str]:
    return [finding.code for finding in advise(situation)]


def tokens(count: int) -> dict[str, Any]:
    return {"estimate": replace(CALM.estimate, tokens=count)}


def test_nothing_to_say():
    assert codes(at()) == []


def slower(times: float, reason: str = "slower") -> Search:
    return Search(
        rejected=(
            Rejected(
                mesh=MeshShape(data=16),
                summary="",
                reason=reason,
                step_seconds=times * CALM.estimate.step_seconds,
                peak_bytes=1,
            ),
        )
    )


@pytest.mark.parametrize(
    ("mesh", "search", "fires"),
    [
        (MeshShape(fsdp=16), slower(1.02), True),
        (MeshShape(fsdp=8, tensor=2), slower(1.0), True),
        (MeshShape(fsdp=16), slower(1.2), False),
        (MeshShape(fsdp=16), slower(1.0, "memory"), False),
        (MeshShape(fsdp=16), Search(), False),
        (MeshShape(data=16), slower(1.0), False),
    ],
)
def test_plain_data_parallel(mesh: MeshShape, search: Search, fires: bool):
    assert ("plain-data-parallel" in codes(at(mesh=mesh, search=search))) == fires


def test_plain_data_parallel_says_what_it_costs():
    finding = findings.plain_data_parallel(at(mesh=MeshShape(fsdp=16), search=slower(1.02)))
    assert finding is not None
    assert (
        finding.message
        == "plain data parallelism over data=16 fits, too, and takes 1.02x the time; it is simpler"
    )


@pytest.mark.parametrize(
    ("kinds", "fires"),
    [
        (("switch",), False),
        (("network", "switch"), True),
        (("torus", "torus"), False),
        (("network",), True),
    ],
)
def test_tensor_leaves_fast_domain(kinds: tuple[str, ...], fires: bool):
    situation = at(
        mesh=MeshShape(tensor=16),
        placement=(("tensor", tuple(Link(kind=kind, ways=4) for kind in kinds)),),
    )
    assert ("tensor-leaves-fast-domain" in codes(situation)) == fires


@pytest.mark.parametrize(
    ("stages", "micro", "schedule", "severity"),
    [
        (4, 3, "1f1b", "warning"),
        (4, 15, "1f1b", "info"),
        (4, 16, "1f1b", None),
        (1, 1, "none", None),
        (4, 4, "zero-bubble", None),
        (4, 3, "zero-bubble", "warning"),
    ],
)
def test_few_microbatches(stages: int, micro: int, schedule: str, severity: str | None):
    seconds = Seconds(compute=0.75, bubble=0.25)
    finding = findings.few_microbatches(
        at(
            mesh=MeshShape(stage=stages, data=4),
            microbatches=micro,
            schedule=schedule,
            estimate=replace(CALM.estimate, seconds=seconds),
        )
    )
    assert (finding.severity if finding else None) == severity
    if finding:
        assert "idle for 25.0% of a step" in finding.message


def test_critical_batch_of_known_models():
    # arXiv:2001.08361: at a loss of 3.0 nats about a million tokens, at 2.0 about seven million
    # (equation 1.4 by hand)
    assert pytest.approx(1.07e6, rel=0.01) == 2e8 / 3.0 ** (1 / 0.21)
    weights = 8.8e13 / 3.0 ** (1 / 0.076)  # L(N) = 3.0
    assert critical_batch_tokens(int(weights)) == pytest.approx(1.07e6, rel=0.02)
    assert (
        critical_batch_tokens(10**12) > critical_batch_tokens(10**9) > critical_batch_tokens(10**6)
    )


@pytest.mark.parametrize(
    ("count", "weights", "language", "fires"),
    [
        (
            16 * 2**20,
            405 * 10**9,
            True,
            False,
        ),  # Llama 3 405B, 16 million tokens (arXiv:2407.21783, section 3.4.1)
        (16 * 2**20, 10**8, True, True),
        (2**19, 124 * 10**6, True, False),
        (16 * 2**20, 10**8, False, False),
        (2**40, 0, True, False),
    ],
)
def test_batch_beyond_critical(count: int, weights: int, language: bool, fires: bool):
    assert (
        "batch-beyond-critical" in codes(at(weights=weights, language=language, **tokens(count)))
    ) == fires


def test_batch_beyond_critical_says_what_it_costs():
    count = round(3 * critical_batch_tokens(10**9))
    finding = findings.batch_beyond_critical(at(weights=10**9, **tokens(count)))
    assert finding is not None and "needs 4.00x the tokens of a small batch" in finding.message


@pytest.mark.parametrize(
    ("where", "per_device", "fires"),
    [
        ("2*h100:8", 290, True),
        ("2*h100:8", 300, False),
        ("v5e:4x4", 235, True),
        ("v5e:4x4", 245, False),
    ],
)
def test_below_ridge(where: str, per_device: int, fires: bool):
    assert ("below-ridge" in codes(at(where, **tokens(16 * per_device)))) == fires
    assert ("below-ridge" in codes(at(where, microbatches=4, **tokens(64 * per_device)))) == fires


@pytest.mark.parametrize(
    ("per_device", "links", "zero", "fires"),
    [
        (2400, (2, 8), 3, True),
        (2600, (2, 8), 3, False),  # 2475 across nodes (jax-ml/scaling-book, gpus.md)
        (2400, (2, 8), 2, False),
        (19000, (16,), 3, True),
        (20000, (16,), 3, False),
    ],
)
def test_fsdp_over_slow_network(per_device: int, links: tuple[int, ...], zero: int, fires: bool):
    placed = tuple(
        Link(kind="switch" if i else "network", ways=ways) for i, ways in enumerate(links)
    )
    situation = at(
        mesh=MeshShape(fsdp=16), placement=(("fsdp", placed),), zero=zero, **tokens(16 * per_device)
    )
    assert ("fsdp-over-slow-network" in codes(situation)) == fires


def test_fsdp_inside_the_fast_domain_is_fine():
    situation = at(
        "h100:8",
        mesh=MeshShape(fsdp=8),
        placement=(("fsdp", (Link(kind="switch", ways=8),)),),
        zero=3,
        **tokens(8 * 400),
    )
    assert codes(situation) == []


@pytest.mark.parametrize(("share", "fires"), [(0.94, False), (0.96, True)])
def test_memory_tight(share: float, fires: bool):
    peak = DeviceBytes(parameters=int(topology("2*h100:8").chip.usable_bytes * share))
    assert (
        "memory-tight" in codes(at(estimate=replace(CALM.estimate, device_bytes=peak)))
    ) == fires
    held = (Applied(quantity="margin", factor=1.02),)
    estimate = replace(CALM.estimate, device_bytes=peak, corrections=held)
    assert "memory-tight" not in codes(at(estimate=estimate))


@pytest.mark.parametrize(
    ("where", "stage", "pipeline", "fires"),
    [
        ("2*h100:8", 2, "lockstep", True),
        ("2*h100:8", 2, "programs", False),
        ("2*h100:8", 1, "lockstep", False),
        ("v5e:4x4", 2, "lockstep", False),
    ],
)
def test_pipeline_on_gpus(where: str, stage: int, pipeline: str, fires: bool):
    mesh = MeshShape(data=16 // stage, stage=stage)
    assert ("pipeline-on-gpus" in codes(at(where, mesh=mesh, pipeline=pipeline))) == fires


@pytest.mark.parametrize(
    ("where", "vocab", "severity"),
    [
        ("2*h100:8", 50257, "warning"),
        ("2*h100:8", 50264, "info"),
        ("2*h100:8", 50304, None),
        ("v5e:4x4", 50304, None),
        ("v5e:4x4", 32064, "warning"),
        ("cpu:8", 50257, None),
    ],
)
def test_odd_sizes(where: str, vocab: int, severity: str | None):
    table = parameter("table", (vocab, 4096), ("vocab", "embed"), Layout((), ()), Layout((), ()))
    finding = findings.odd_sizes(at(where, parameters=(*CALM.parameters, table)))
    assert (finding.severity if finding else None) == severity
    if finding:
        assert finding.where == "vocab" and f"vocab ({vocab:,})" in finding.message


def test_odd_sizes_are_those_of_the_parts():
    table = parameter(
        "table", (50304, 4096), ("vocab", "embed"), Layout("tensor", ()), Layout("tensor", ())
    )
    assert "odd-sizes" in codes(at(mesh=MeshShape(data=4, tensor=4), parameters=(table,)))
    assert "odd-sizes" not in codes(at(mesh=MeshShape(data=8, tensor=2), parameters=(table,)))


def test_every_rule_names_its_source():
    for rule in findings.RULES:
        assert any(
            word in (rule.__doc__ or "") for word in ("arXiv", "scaling-book", "NVIDIA", "docs/")
        ), rule.__name__


@pytest.mark.long
def test_plans_carry_the_advice():
    plan = planner.search(worlds.layers(), "h100:8")
    assert "below-ridge" in {finding.code for finding in plan.findings}  # 512 tokens on 8 devices
    large = planner.search(worlds.layers(batch=4096, seq=64), "h100:1")
    assert "below-ridge" not in {finding.code for finding in large.findings}


def test_dimensions_that_are_left_whole_are_said_with_their_cost() -> None:
    load, where = worlds.prepared(lambda: worlds.mlp(4096, 1024, 4096)), topology("h100:2")
    sharded = planner.search(load.problem, where, {"mesh": {"tensor": 2}}, load=load)
    whole = replace(sharded, rules=Rules(()))  # as if both devices computed all matmuls

    def found(plan: Plan) -> list[Finding]:
        every = notes(load, where, plan, ("mlp",), 2, False)
        return [one for one in every if one.code == "dimensions-left-out"]

    assert not found(sharded)
    (finding,) = found(whole)
    half = whole.estimate.seconds.compute / 2
    assert finding.severity == "warning"
    assert f"at most {seconds_text(half)} of a step" in finding.message
    assert "colour" not in f"{finding}" and "the same logical axis" in finding.hint
