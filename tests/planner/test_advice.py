"""Every rule both ways: it speaks where it should, and is silent where it should be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from shardlib.cost.pricing import DeviceBytes, Seconds
from shardlib.cost.roofline import Applied
from shardlib.findings import Finding
from shardlib.layout import Layout, MeshShape, Rules
from shardlib.machines.topology import topology
from shardlib.planner import findings
from shardlib.planner import search as planner
from shardlib.planner.findings import advise, below_ridge, critical_batch_tokens, notes
from shardlib.planner.layouts import AdviceInputs
from shardlib.planner.plan import Link, Plan, Rejected, Search
from shardlib.report.elements import seconds_text
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


def test_critical_batch_of_known_models():
    # arXiv:2001.08361: at a loss of 3.0 nats about a million tokens, at 2.0 about seven million
    # (equation 1.4 by hand)
    assert pytest.approx(1.07e6, rel=0.01) == 2e8 / 3.0 ** (1 / 0.21)
    weights = 8.8e13 / 3.0 ** (1 / 0.076)  # L(N) = 3.0
    assert critical_batch_tokens(int(weights)) == pytest.approx(1.07e6, rel=0.02)
    assert (
        critical_batch_tokens(10**12) > critical_batch_tokens(10**9) > critical_batch_tokens(10**6)
    )


def test_every_rule_names_its_source():
    for rule in findings.RULES:
        assert any(
            word in (rule.__doc__ or "") for word in ("arXiv", "scaling-book", "NVIDIA", "docs/")
        ), rule.__name__


@pytest.mark.long
def test_plans_carry_the_advice():
    plan = planner.search(worlds.layers(), "h100:8", {"mesh": {"data": 8}})
    assert "below-ridge" in {finding.code for finding in plan.findings}  # 512 tokens on 8 devices
    large = planner.search(worlds.layers(batch=4096, seq=64), "h100:1")
    assert "below-ridge" not in {finding.code for finding in large.findings}


def test_dimensions_that_are_left_whole_are_said_with_their_cost() -> None:
    load, where = worlds.prepared(lambda: worlds.mlp(4096, 1024, 4096)), topology("h100:2")
    sharded = planner.search(load.problem, where, {"mesh": {"tensor": 2}}, workload=load)
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


def at(
    where: str = "2*h100:8",
    *,
    weights: int = 7 * 10**9,
    language: bool = True,
    tokens: int | None = None,
    **changes: Any,
) -> AdviceInputs:
    if tokens is not None:
        changes["estimate"] = replace(CALM.estimate, tokens=tokens)
    return AdviceInputs(
        plan=replace(CALM, **changes),
        topology=topology(where),
        compute_dtype="bfloat16",
        itemsize=2,
        weights=weights,
        has_sequence=language,
    )


def slower(times: float, reason: str = "slower") -> Search:
    rejected = Rejected(
        mesh=MeshShape(data=16),
        summary="",
        reason=reason,
        step_seconds=times * CALM.estimate.step_seconds,
        peak_bytes=1,
    )
    return Search(rejected=(rejected,))


def linked(axis: str, *kinds: str, ways: int = 4) -> dict[str, Any]:
    """One axis over links of these kinds."""
    links = tuple(Link(kind=kind, ways=ways) for kind in kinds)
    return {"mesh": MeshShape({axis: 16}), "placement": ((axis, links),)}


def gathered(tokens: int, *ways: int, zero: int = 3) -> dict[str, Any]:
    """Parameters gathered over a network, with the tokens of each of 16 devices."""
    kinds = ["network", "switch"][: len(ways)]
    links = tuple(Link(kind=kind, ways=way) for kind, way in zip(kinds, ways, strict=True))
    placed = (("fsdp", links),)
    return {"mesh": MeshShape(fsdp=16), "placement": placed, "zero": zero, "tokens": 16 * tokens}


def staged(stages: int, microbatches: int, schedule: str) -> dict[str, Any]:
    """A quarter of the step is a bubble."""
    return {
        "mesh": MeshShape(stage=stages, data=4),
        "microbatches": microbatches,
        "schedule": schedule,
        "estimate": replace(CALM.estimate, seconds=Seconds(compute=0.75, bubble=0.25)),
    }


def full(share: float, *corrections: Applied) -> dict[str, Any]:
    """A share of the memory that is usable is taken."""
    peak = DeviceBytes(parameters=int(topology("2*h100:8").chip.usable_bytes * share))
    return {"estimate": replace(CALM.estimate, device_bytes=peak, corrections=corrections)}


def table(vocab: int, layout: Layout, tensor: int = 1) -> dict[str, Any]:
    parameters = (parameter("table", (vocab, 4096), ("vocab", "embed"), layout, layout),)
    return {"parameters": parameters, "mesh": MeshShape(data=16 // tensor, tensor=tensor)}


WHOLE, SPLIT = Layout((), ()), Layout("tensor", ())


IDLE, FASTER = (
    "idle for 25.0% of a step",
    "plain data parallelism over data=16 fits, too, and takes",
)


#: (code of the finding, machine, inputs, whether it is made or what it says).
CASES: list[tuple[str, str, dict[str, Any], bool | str]] = [
    (
        "plain-data-parallel",
        "2*h100:8",
        {"mesh": MeshShape(fsdp=16), "search": slower(1.02)},
        f"{FASTER} 1.02x the time; it is simpler",
    ),
    (
        "plain-data-parallel",
        "2*h100:8",
        {"mesh": MeshShape(fsdp=8, tensor=2), "search": slower(1.0)},
        True,
    ),
    (
        "plain-data-parallel",
        "2*h100:8",
        {"mesh": MeshShape(fsdp=16), "search": slower(1.2)},
        False,
    ),
    (
        "plain-data-parallel",
        "2*h100:8",
        {"mesh": MeshShape(fsdp=16), "search": slower(1.0, "memory")},
        False,
    ),
    ("plain-data-parallel", "2*h100:8", {"mesh": MeshShape(fsdp=16), "search": Search()}, False),
    ("plain-data-parallel", "2*h100:8", {"search": slower(1.0)}, False),
    ("tensor-leaves-fast-domain", "2*h100:8", linked("tensor", "switch"), False),
    ("tensor-leaves-fast-domain", "2*h100:8", linked("tensor", "network", "switch"), True),
    ("tensor-leaves-fast-domain", "2*h100:8", linked("tensor", "torus", "torus"), False),
    ("tensor-leaves-fast-domain", "2*h100:8", linked("tensor", "network"), True),
    ("few-microbatches", "2*h100:8", staged(4, 3, "1f1b"), f"warning: {IDLE}"),
    ("few-microbatches", "2*h100:8", staged(4, 15, "1f1b"), f"info: {IDLE}"),
    ("few-microbatches", "2*h100:8", staged(4, 16, "1f1b"), False),
    ("few-microbatches", "2*h100:8", staged(1, 1, "none"), False),
    ("few-microbatches", "2*h100:8", staged(4, 4, "zero-bubble"), False),
    ("few-microbatches", "2*h100:8", staged(4, 3, "zero-bubble"), f"warning: {IDLE}"),
    # Llama 3 405B, 16 million tokens (arXiv:2407.21783, section 3.4.1)
    (
        "batch-beyond-critical",
        "2*h100:8",
        {"tokens": 16 * 2**20, "weights": 405 * 10**9},
        False,
    ),
    ("batch-beyond-critical", "2*h100:8", {"tokens": 16 * 2**20, "weights": 10**8}, True),
    ("batch-beyond-critical", "2*h100:8", {"tokens": 2**19, "weights": 124 * 10**6}, False),
    (
        "batch-beyond-critical",
        "2*h100:8",
        {"tokens": 16 * 2**20, "weights": 10**8, "language": False},
        False,
    ),
    ("batch-beyond-critical", "2*h100:8", {"tokens": 2**40, "weights": 0}, False),
    (
        "batch-beyond-critical",
        "2*h100:8",
        {"tokens": round(3 * critical_batch_tokens(10**9)), "weights": 10**9},
        "needs 4.00x the tokens of a small batch",
    ),
    ("below-ridge", "2*h100:8", {"tokens": 16 * 290}, True),
    ("below-ridge", "2*h100:8", {"tokens": 16 * 300}, False),
    ("below-ridge", "v5e:4x4", {"tokens": 16 * 235}, True),
    ("below-ridge", "v5e:4x4", {"tokens": 16 * 245}, False),
    ("below-ridge", "v5e:4x4", {"tokens": 64 * 235, "microbatches": 4}, True),
    ("below-ridge", "v5e:4x4", {"tokens": 64 * 245, "microbatches": 4}, False),
    # 2475 tokens across nodes (jax-ml/scaling-book, gpus.md)
    ("fsdp-over-slow-network", "2*h100:8", gathered(2400, 2, 8), True),
    ("fsdp-over-slow-network", "2*h100:8", gathered(2600, 2, 8), False),
    ("fsdp-over-slow-network", "2*h100:8", gathered(2400, 2, 8, zero=2), False),
    ("fsdp-over-slow-network", "2*h100:8", gathered(19000, 16), True),
    ("fsdp-over-slow-network", "2*h100:8", gathered(20000, 16), False),
    (
        "fsdp-over-slow-network",
        "h100:8",
        {**linked("fsdp", "switch", ways=8), "zero": 3, "tokens": 8 * 400},
        False,
    ),
    ("memory-tight", "2*h100:8", full(0.94), False),
    ("memory-tight", "2*h100:8", full(0.96), True),
    (
        "memory-tight",
        "2*h100:8",
        full(0.96, Applied(quantity="margin", factor=1.02)),
        False,
    ),
    ("odd-sizes", "2*h100:8", table(50257, WHOLE), "warning: vocab (50,257)"),
    ("odd-sizes", "2*h100:8", table(50264, WHOLE), "info: vocab (50,264)"),
    ("odd-sizes", "2*h100:8", table(50304, WHOLE), False),
    ("odd-sizes", "v5e:4x4", table(50304, WHOLE), False),
    ("odd-sizes", "v5e:4x4", table(32064, WHOLE), "warning: vocab (32,064)"),
    ("odd-sizes", "cpu:8", table(50257, WHOLE), False),
    ("odd-sizes", "2*h100:8", table(50304, SPLIT, tensor=4), True),
    ("odd-sizes", "2*h100:8", table(50304, SPLIT, tensor=2), False),
]


def test_nothing_to_say():
    assert advise(at()) == ()


@pytest.mark.parametrize(("code", "where", "changes", "said"), CASES)
def test_advice(code: str, where: str, changes: dict[str, Any], said: bool | str):
    matches = [finding for finding in advise(at(where, **changes)) if finding.code == code]
    assert len(matches) == bool(said)
    if isinstance(said, str):
        severity, _, text = said.rpartition(": ")
        assert text in matches[0].message
        assert severity in ("", matches[0].severity)


def test_rows_of_matmuls_are_those_of_all_positions_of_an_image():
    whole = at("v5e:4x4", tokens=16 * 20, language=False)
    weights = sum(math.prod(parameter.shape) for parameter in whole.plan.parameters)
    for flops, rows in ((1, 20), (6 * weights * 16 * 20 * 5, 100), (6 * weights * 16 * 20 * 20, 0)):
        estimate = replace(whole.plan.estimate, model_flops=float(flops))
        found = below_ridge(replace(whole, plan=replace(whole.plan, estimate=estimate)))
        assert (found.where if found else "") == (
            f"{rows} rows of its matmuls per device" if rows else ""
        )
