"""Dtypes as decisions: what is searched, what pins and plans say of it, and what arithmetic says of
its price.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardlib.cost.framework import XLA
from shardlib.cost.tables import Pricer
from shardlib.decisions.table import Decisions, Dtypes
from shardlib.errors import PinError
from shardlib.layout import MeshShape
from shardlib.machines.topology import Topology, topology
from shardlib.planner import search as planner
from shardlib.planner.assembly import assemble
from shardlib.planner.parts import Candidate, dtype_combinations
from shardlib.planner.plan import Plan, Search
from shardlib.planner.workload import Workload, prepare
from shardlib.propagation.colours import Choice
from tests.planner import worlds
from tests.planner.brute_force import fastest
from tests.planner.worlds import with_memory

ALLOW = {
    "moment_dtype": ["bfloat16"],
    "reduction_dtype": ["bfloat16"],
    "param_dtype": ["bfloat16"],
    "gradient_dtype": ["bfloat16"],
}


@functools.cache
def _load(vendor: str = "nvidia") -> Workload:
    return prepare(worlds.stack(batch=2, seq=12, embed=64, hidden=256, depth=2), vendor)


def _priced(
    where: Topology, dtypes: Dtypes = (), *, zero: int = 0, micro: int = 1, **mesh: int
) -> Plan:
    decisions = Decisions(mesh=MeshShape(mesh), microbatches=micro, zero=zero, dtypes=dtypes)
    return assemble(
        _load(where.chip.vendor),
        where,
        Candidate(decisions=decisions, choice=Choice(batch="batch")),
        Search(),
    )


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("where", "share"), (("h100:1", None), ("cpu:2", None), ("2*h100:1", 0.9), ("cpu:2", 0.7))
)
def test_the_search_equals_brute_force(where: str, share: float | None) -> None:
    place = topology(where)
    load = _load(place.chip.vendor)
    if share is not None:
        roomy = planner.search(load.problem, place, workload=load)
        place = with_memory(place, roomy.estimate.device_bytes.peak * share)
    allow = dict(list(ALLOW.items())[:2])
    best = min(
        fastest(load.variant(dtypes), place, all_variants=share is not None)[0]
        for dtypes in dtype_combinations(
            (), tuple((word, tuple(some)) for word, some in allow.items())
        )
    )
    plan = planner.search(load.problem, place, {"allow": allow}, workload=load)
    assert plan.estimate.step_seconds == pytest.approx(best, rel=1e-9)
    assert plan.search.gap == 0
    assert plan.dtypes
    assert set(dict(plan.dtypes)) <= set(allow)


@pytest.mark.long
def test_what_is_not_allowed_is_not_searched() -> None:
    load = _load()
    plain, every = (
        planner.search(load.problem, "2*h100:1", pin, workload=load)
        for pin in (None, {"allow": ALLOW})
    )
    assert (
        plain.dtypes
        == ()
        == planner.search(
            load.problem, "2*h100:1", {"allow": {"moment_dtype": ["float32"]}}, workload=load
        ).dtypes
    )
    assert every.estimate.step_seconds < plain.estimate.step_seconds
    assert every.search.candidates > plain.search.candidates
    for pin in (
        {"allow": {**ALLOW, "moment_dtype": ["bfloat16", "float8_e5m2"]}},
        {"moment_dtype": "float8_e5m2"},
    ):  # no program is made of 8 bits
        with pytest.raises(PinError, match="has no lowering: a dtype other than float32"):
            planner.search(load.problem, "2*h100:1", pin, workload=load)


@pytest.mark.long
def test_plans_say_their_dtypes_and_pins_fix_them() -> None:
    load = _load()
    free = planner.search(load.problem, "2*h100:1", {"allow": ALLOW}, workload=load)
    pinned = planner.search(load.problem, "2*h100:1", free.decisions, workload=load)
    assert pinned.dtypes == free.dtypes
    assert pinned.estimate == free.estimate
    assert pinned.digest == free.digest
    assert Plan.from_json(free.to_json()) == replace(free, source=None)
    one = planner.search(load.problem, "2*h100:1", {"moment_dtype": "bfloat16"}, workload=load)
    plain = planner.search(load.problem, "2*h100:1", workload=load)
    assert one.dtypes == (("moment_dtype", "bfloat16"),)
    assert one.decisions["dtypes"] == {"moment_dtype": "bfloat16"}
    assert one.digest != plain.digest
    assert "moment bfloat16" in one.explain() and "+ dtypes: moment bfloat16" in plain.diff(one)
    assert one.why_not(moment_dtype="float16").count("dtypes") == 2


@pytest.mark.long
def test_a_quick_replan_keeps_dtypes_and_moves_the_bytes_that_they_take() -> None:
    load = _load()
    plan = planner.search(
        load.problem,
        "h100:2",
        {"mesh": {"fsdp": 2}, "allow": {"moment_dtype": ["bfloat16"]}},
        workload=load,
    )
    kept = plan.replan("h100:1")
    assert plan.dtypes == kept.plan.dtypes == (("moment_dtype", "bfloat16"),)
    sizes = {
        what: sum(part.bytes for part in kept.parts if part.what == what)
        for what in ("parameter", "optimizer state")
    }
    assert sizes["parameter"] == sizes["optimizer state"]  # two numbers of 2 bytes beside one of 4


def test_moments_take_the_bytes_of_their_dtype() -> None:
    place, elements = topology("h100:1"), sum(2 * 64 * 256 for _ in range(2))
    before, after = (
        _priced(place, dtypes).estimate for dtypes in ((), (("moment_dtype", "bfloat16"),))
    )
    assert (
        before.device_bytes.optimizer == 8 * elements
        and after.device_bytes.optimizer == 4 * elements
    )  # Adam: two numbers a parameter
    less = (
        2 * 4 * elements / (place.chip.hbm_bytes_per_s * Pricer(place).efficiency.update_share)
    )  # read and written
    assert before.seconds.optimizer - after.seconds.optimizer == pytest.approx(less, rel=1e-9)
    assert replace(before.device_bytes, optimizer=0) == replace(after.device_bytes, optimizer=0)
    assert before.seconds.compute == after.seconds.compute


def test_gradients_on_the_wire_take_the_bytes_of_their_dtype() -> None:
    place = topology("64*h100:1")
    slow = replace(
        place,
        tiers=tuple(
            replace(tier, bytes_per_s=tier.bytes_per_s / 1e4, latency_s=0.0) for tier in place.tiers
        ),
    )
    four, two, one = (
        _priced(slow, dtypes, data=2).estimate.seconds
        for dtypes in (
            (),
            (("reduction_dtype", "bfloat16"),),
            (("reduction_dtype", "float8_e5m2"),),
        )
    )
    assert four.exposed - two.exposed == pytest.approx(
        2 * (two.exposed - one.exposed), rel=1e-9
    )  # 4, 2 and 1 bytes a gradient
    assert two.exposed == pytest.approx(four.exposed / 2, rel=1e-3)
    assert two.compute == four.compute == one.compute


def test_products_in_eight_bits_are_those_of_a_stack() -> None:
    def block(x: Any, p: Any) -> Any:
        return jax.nn.relu(x @ p["up"]) @ p["down"], None

    half = functools.partial(worlds.shape, dtype=jnp.bfloat16)
    model = worlds.problem(
        lambda p, b: jnp.mean(jax.lax.scan(block, b["x"], p)[0].astype(jnp.float32) ** 2),
        {"up": half(4, 8192, 32768), "down": half(4, 32768, 8192)},
        {"x": half(8192, 8192)},
        {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")},
        {"x": ("batch", None)},
        remat={},
    )
    model = replace(model, compute_dtype="bfloat16")
    wide, narrow = (
        planner.search(model, "h100:8", pin)
        for pin in (None, {"allow": {"matmul_dtype": ["float8_e4m3fn"]}})
    )
    assert narrow.dtypes == (("matmul_dtype", "float8_e4m3fn"),)
    assert narrow.estimate.step_seconds < wide.estimate.step_seconds
    decided = {word: value for word, value in narrow.decisions.items() if word != "dtypes"}
    stacked = planner.search(
        model, "h100:8", decided, profile=replace(XLA, matmul_dtype="float8_e4m3fn")
    )
    assert stacked.estimate.seconds == narrow.estimate.seconds
    assert stacked.estimate.device_bytes == narrow.estimate.device_bytes


def test_gradients_and_parameters_at_rest_take_the_bytes_of_their_dtype() -> None:
    place = topology("h100:1")
    before, kept, rest = (
        _priced(place, dtypes, micro=2).estimate
        for dtypes in ((), (("gradient_dtype", "bfloat16"),), (("param_dtype", "bfloat16"),))
    )
    assert rest.device_bytes.parameters * 2 == before.device_bytes.parameters
    assert rest.device_bytes.optimizer == before.device_bytes.optimizer
    whole = 4 * sum(2 * 64 * 256 for _ in range(2))
    assert before.device_bytes.gradients - kept.device_bytes.gradients == whole / 2
    assert kept.device_bytes.parameters == before.device_bytes.parameters
    assert rest.seconds.optimizer < before.seconds.optimizer
    assert kept.seconds.optimizer == before.seconds.optimizer
    assert rest.device_bytes.peak < before.device_bytes.peak


def test_a_stack_that_says_its_bytes_of_state_has_no_moments_to_change() -> None:
    with pytest.raises(PinError, match="state_bytes"):
        planner.search(
            _load().problem,
            "h100:1",
            {"moment_dtype": "bfloat16"},
            profile=replace(XLA, name="own", state_bytes=12),
        )
