"""The search against brute force: every plan of every small world, priced one at a time without
tables.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from shardlib.cost.framework import XLA, framework_profile
from shardlib.cost.roofline import fitting_bytes, without_margin
from shardlib.decisions.table import Decisions
from shardlib.errors import ArgumentError, InfeasibleError, PinError
from shardlib.graph import Problem
from shardlib.layout import MeshShape
from shardlib.machines.topology import Topology, topology
from shardlib.planner import search as planner
from shardlib.planner import space, workload
from shardlib.planner.assembly import price
from shardlib.planner.parts import Candidate
from shardlib.planner.plan import Plan, source_of
from shardlib.planner.priced import Explorer
from shardlib.planner.workload import Workload, prepare
from shardlib.propagation.colours import Choice
from tests.planner import worlds
from tests.planner.brute_force import agreed, every_candidate
from tests.planner.worlds import with_memory

MADE = {
    "mlp": worlds.mlp,
    "unnamed": lambda: worlds.mlp(named=False),
    "layers": worlds.layers,
    "narrow": lambda: worlds.layers(heads=2, hidden=96, vocab=64, batch=4),
    "wide": lambda: worlds.mlp(embed=16384, hidden=65536),
    "deep": lambda: worlds.layers(batch=4, seq=512, embed=2048, hidden=8192, heads=2, vocab=1000),
    "stack": worlds.stack,
    "short stack": lambda: worlds.stack(depth=6, batch=4, seq=16),
    "experts": worlds.experts,
}


@functools.cache
def world_of(name: str) -> Problem:
    return MADE[name]()


@functools.cache
def load_for(world: str, where: str, profile: str = "xla") -> Workload:
    """A world prepared for the chips of a topology."""
    return prepare(world_of(world), topology(where).chip.vendor, framework_profile(profile))


@functools.cache
def load_of(world: str) -> Workload:
    """A world prepared for any chips."""
    return prepare(world_of(world))


SHARES = (0.9, 0.5, 0.25)
#: Worlds on machines: small spaces, and those whose whole space is priced plan by plan.
ROOMY = [
    (world, where)
    for world in ("mlp", "unnamed")
    for where in ("cpu:1", "cpu:8", "v5e:2x2", "h100:8", "2*h100:4")
]
ROOMY += [("narrow", "2*h100:1"), ("wide", "h100:8"), ("wide", "2*h100:4"), ("deep", "2*a100:1")]
JOINT = [
    ("mlp", "cpu:4"),
    ("wide", "2*h100:2"),
    ("stack", "h100:4"),
    ("stack", "2*h100:2"),
    ("stack", "v5e:2x2"),
    ("short stack", "4*h100:1"),
    ("experts", "h100:4"),
    ("experts", "2*a100:2"),
]
#: World, machine, share of the memory that the fastest plan takes, and framework profile.
CASES = [
    *((world, where, None, "xla") for world, where in (*ROOMY, *JOINT)),
    *((w, "h100:2", share, "xla") for w in ("mlp", "stack", "experts") for share in SHARES),
    ("stack", "2*h100:2", None, "megatron-core"),
    ("stack", "h100:4", None, "torchtitan-fp8"),
    ("experts", "h100:4", None, "megatron-2021"),
]
#: These are compared in every run: a wrong bound loses the best plan of most.
ALWAYS = {("mlp", "cpu:4", None, "xla"), ("mlp", "h100:2", 0.5, "xla")}


@pytest.mark.parametrize(
    ("world", "where", "share", "profile"),
    [
        pytest.param(*case, marks=[] if case in ALWAYS else [pytest.mark.long, pytest.mark.matrix])
        for case in CASES
    ],
)
def test_search_equals_brute_force(
    world: str, where: str, share: float | None, profile: str
) -> None:
    place = topology(where)
    if profile != "xla":
        place = with_memory(place, 1 << 50)
    plan = agreed(load_for(world, where, profile), place, share=share)
    assert plan is not None or share is not None


def test_components_are_the_classes_of_tied_colours() -> None:
    groups = [
        frozenset(names)
        for names in (
            {"heads", "head_dim"},
            {"head_dim", "rope"},
            {"mlp"},
            {"vocab", "batch"},
            set[str](),
        )
    ]
    colours = ("vocab", "mlp", "rope", "heads", "head_dim")
    together = (("vocab",), ("mlp",), ("rope", "heads", "head_dim"))
    assert workload.connected_components(groups, colours) == together
    assert space.subsets(("a", "b")) == [(), ("a",), ("b",), ("a", "b")]


def test_memory_may_be_filled_to_the_byte() -> None:
    load, place = load_of("mlp"), without_margin(topology("h100:2"))
    pin = planner.search(load.problem, place, workload=load).decisions
    (only,) = planner.ranked(load.problem, place, pin, workload=load)

    def with_room(size: float) -> Plan:
        chip = replace(place.chip, hbm_bytes=size, reserved_bytes=0)
        return planner.search(load.problem, replace(place, chip=chip), pin, workload=load)

    assert with_room(only.peak_bytes).estimate.step_seconds == only.seconds
    with pytest.raises(InfeasibleError):
        with_room(only.peak_bytes - 1)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("software", "share"),
    [("lockstep", None), ("asynchronous", None), ("lockstep", 0.9), ("lockstep", 0.7)],
)
def test_search_equals_brute_force_with_groups_of_microbatches(
    software: str, share: float | None
) -> None:
    load = prepare(world_of("stack"), "nvidia", replace(XLA, name="test", pipeline=software))
    pin = {"accumulation": 2, "gather": "use"}
    plan = agreed(load, topology("h100:4"), pin, share=share, groups=2)
    assert plan is not None
    assert plan.accumulation == 2
    assert plan.mesh["stage"] > 1
    assert plan.microbatches % 2 == 0


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("depth", "where", "share"),
    [
        (6, "4*h100:1", None),
        (6, "4*h100:1", 0.8),
        (6, "4*h100:1", 0.5),
        (7, "2*a100:2", 0.7),
        (6, "v5e:2x2", 0.9),
    ],
)
def test_search_equals_brute_force_where_stages_may_gather_weights_once(
    depth: int, where: str, share: float | None
) -> None:
    place = topology(where)
    load = prepare(worlds.stack(depth=depth, batch=4, seq=128), place.chip.vendor)
    mesh = {"stage": 2, "fsdp": 2}
    agreed(load, place, {"mesh": mesh}, share=share, mesh=MeshShape(mesh))


@pytest.mark.long
@pytest.mark.parametrize(
    "pin",
    [
        {"mesh": {"stage": 2, "fsdp": 2}, "zero": 3},
        {"mesh.stage": 2, "zero": 3, "microbatches": 4},
        {"schedule": "gpipe", "zero": 3},
    ],
)
def test_stages_that_are_asked_for_gather_weights_as_is_best(pin: dict[str, object]) -> None:
    load = prepare(worlds.stack(depth=8, batch=8, seq=16))
    where = replace(topology("4*h100:1"), chip=replace(topology("h100:1").chip, hbm_bytes=1 << 40))
    free, use, once = (
        planner.search(load.problem, where, {**pin, **more}, workload=load)
        for more in ({}, {"gather": "use"}, {"gather": "once"})
    )
    assert free.estimate.step_seconds == min(use.estimate.step_seconds, once.estimate.step_seconds)
    assert free.gather == "once" and once.estimate.step_seconds < use.estimate.step_seconds
    asynchronous = replace(XLA, name="test", pipeline="asynchronous")
    assert planner.search(load.problem, where, pin, profile=asynchronous).gather == "use"


def all_hides(spelling: str) -> Topology:
    """A machine on which compute hides all gathers and reductions of parameters."""
    return replace(topology(spelling), efficiency={"hidden": 1.0})


def test_weights_are_gathered_at_every_use_where_that_is_as_fast() -> None:
    load = prepare(worlds.stack(depth=4, batch=8, embed=4096, hidden=16384, seq=4096))
    pin = {
        "mesh": {"stage": 2, "fsdp": 2},
        "zero": 3,
        "schedule": "1f1b",
        "microbatches": 2,
        "remat": "full",
    }
    place = all_hides("h100:4")
    free, once = (
        planner.search(load.problem, place, {**pin, **more}, workload=load)
        for more in ({}, {"gather": "once"})
    )
    assert free.gather == "use" and free.estimate.step_seconds == once.estimate.step_seconds


@pytest.mark.long
def test_groups_of_microbatches_fill_the_pipeline_anew_and_remember_less() -> None:
    pin = {
        "mesh": {"stage": 2, "fsdp": 2},
        "schedule": "gpipe",
        "virtual_stages": 2,
        "microbatches": 8,
        "zero": 3,
        "gather": "once",
    }
    together, apart = (
        planner.search(
            world_of("layers"),
            "h100:4",
            {**pin, "accumulation": groups},
            workload=load_of("layers"),
        )
        for groups in (1, 2)
    )
    ours, theirs = together.estimate, apart.estimate
    assert theirs.seconds.bubble == pytest.approx(2 * ours.seconds.bubble)
    assert theirs.seconds.compute == ours.seconds.compute
    assert theirs.device_bytes.activations == pytest.approx(
        ours.device_bytes.activations * 5 / 9, rel=1e-3
    )  # 4 or 8 microbatches of two chunks, and two chunks more
    assert (
        theirs.device_bytes.parameters,
        theirs.device_bytes.gradients,
        theirs.device_bytes.optimizer,
    ) == (ours.device_bytes.parameters, ours.device_bytes.gradients, ours.device_bytes.optimizer)
    layers, microbatches, hops = (
        [sum(c.total_bytes for c in cost.collectives if of(c)) for cost in (ours, theirs)]
        for of in (
            lambda c: c.kind == "all-gather" and c.cause.startswith("layers"),
            lambda c: c.axes == ("stage",) and c.kind != "collective-permute",
            lambda c: c.kind == "collective-permute",
        )
    )
    assert layers[1] == 2 * layers[0] and microbatches[0] == microbatches[1]
    assert hops[1] * 17 == hops[0] * 18  # a tick more for each group
    assert together.digest != apart.digest
    assert Plan.from_json(apart.to_json()) == apart
    assert "8, in 2 groups, one after the other" in apart.explain()
    assert source_of(apart).why_not({"remat": "full"}).accumulation == 2


@pytest.mark.long
def test_the_search_is_deterministic_and_the_plan_survives_json() -> None:
    load = load_of("layers")
    first, second = (planner.search(load.problem, "h100:8", workload=load) for _ in range(2))
    assert first.digest == second.digest
    assert Plan.from_json(first.to_json()) == first


def test_a_fully_pinned_plan_is_priced() -> None:
    load = load_of("layers")
    pin = {
        "mesh": {"fsdp": 2, "tensor": 4},
        "zero": 3,
        "remat": "full",
        "microbatches": 2,
        "sequence_parallel": True,
        "rules": [
            ("batch", ["data", "fsdp"]),
            ("vocab", "tensor"),
            ("mlp", "tensor"),
            ("heads", "tensor"),
            ("seq", "tensor"),
            ("embed", "fsdp"),
        ],
    }
    plan = planner.search(load.problem, "h100:8", pin, workload=load)
    assert dict(plan.mesh) == {"fsdp": 2, "tensor": 4} and (
        plan.zero,
        plan.remat,
        plan.microbatches,
        plan.sequence_parallel,
    ) == (3, "full", 2, True)
    rest = {p.path: str(p.rest) for p in plan.parameters}
    assert rest["gate"] == "[-, fsdp, tensor]" and rest["o"] == "[-, tensor, -, fsdp]"
    choice = Choice(tensor=("vocab", "mlp", "heads"), batch="batch", sequence="seq")
    decisions = Decisions(mesh=plan.mesh, microbatches=2, remat="full", zero=3)
    candidate = Candidate(decisions=decisions, choice=choice)
    assert plan.estimate.step_seconds == pytest.approx(
        float(price(load, topology("h100:8"), candidate).step_seconds[0])
    )


def test_when_nothing_fits_the_error_names_what_would() -> None:
    where = with_memory(topology("h100:8"), 1.8e6)
    with pytest.raises(InfeasibleError) as caught:
        planner.search(world_of("layers"), where, {"mesh": {"data": 8}}, workload=load_of("layers"))
    assert "world does not fit on h100:8: the leanest plan (data=8" in str(caught.value)
    assert "leaving mesh to the planner" in str(caught.value)


def test_what_a_bound_shows_not_to_fit_is_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[Explorer] = []
    monkeypatch.setattr(Explorer, "seed", lambda explorer, counts: seeded.append(explorer))
    where = with_memory(topology("h100:8"), 2e5)
    with pytest.raises(InfeasibleError, match="the leanest plan"):
        planner.search(world_of("layers"), where, workload=load_of("layers"))
    assert not seeded


def test_why_not_says_the_rule_that_the_pins_break() -> None:
    plan = planner.search(worlds.mlp(), "h100:2", {"zero": 3})
    with pytest.raises(PinError) as error:
        plan.why_not(mesh={"data": 2})
    assert str(error.value) == (
        "mesh={'data': 2} is not usable beside zero=3: zero=3 shards over fsdp, which is pinned to"
        " 1\nTry: mesh.fsdp=2 or more, or zero=0"
    )
    with pytest.raises(PinError) as error:
        plan.why_not(fsdp=1)
    assert str(error.value) == (
        "zero=3 shards what is stored over fsdp, expert, context, and none of them can be 2 or more"
        " (pinned to 1: fsdp; of no use for world: expert, context)\nTry: mesh.fsdp=2 or more, or"
        " zero=0"
    )
    assert "ZeRO 0" in plan.why_not(fsdp=1, zero=0)
    with pytest.raises(ArgumentError, match=r"by name; 16 has none\nTry: plan.why_not\(tensor=16"):
        plan.why_not(16)


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(("world", "where"), ROOMY)
def test_the_ranking_is_the_order_of_brute_force(world: str, where: str) -> None:
    load, place = load_for(world, where), topology(where)
    found = list(planner.ranked(load.problem, place, workload=load))
    prices = {
        candidate: price(load, place, candidate) for candidate in every_candidate(load, place)
    }
    fitting = sorted(
        float(p.step_seconds[0])
        for p in prices.values()
        if float(p.peak_bytes[0]) <= fitting_bytes(place)
    )
    assert [entry.seconds for entry in found] == pytest.approx(fitting, rel=1e-8)
    assert len({entry.candidate for entry in found}) == len(found)
    for entry in found:
        assert entry.seconds == pytest.approx(
            float(prices[entry.candidate].step_seconds[0]), rel=1e-9
        )
        assert entry.peak_bytes == pytest.approx(
            float(prices[entry.candidate].peak_bytes[0]), rel=1e-9
        )


@pytest.mark.matrix
@pytest.mark.parametrize(("world", "where"), ROOMY)
def test_the_ranking_starts_with_the_plan_of_the_search(world: str, where: str) -> None:
    load = load_for(world, where)
    ranking = planner.ranked(load.problem, where, workload=load)
    best = planner.search(load.problem, where, workload=load)
    first = next(ranking).build()
    assert first.decisions == best.decisions
    assert first.estimate == best.estimate
    assert first.search.gap == 0
    for entry in itertools.islice(ranking, 5):
        plan = entry.build()
        assert plan.estimate.step_seconds == pytest.approx(entry.seconds, rel=1e-9)
        assert plan.search.gap == pytest.approx(
            1 - best.estimate.step_seconds / entry.seconds, abs=1e-9
        )
        assert plan.mesh not in {rejected.mesh for rejected in plan.search.rejected}


@pytest.mark.long
def test_the_ranking_leaves_out_what_does_not_fit() -> None:
    load, place = load_of("narrow"), topology("h100:2")
    tight = with_memory(
        place, planner.search(load.problem, place, workload=load).estimate.device_bytes.peak * 0.9
    )
    found = list(planner.ranked(load.problem, tight, workload=load))
    assert found and all(entry.peak_bytes <= fitting_bytes(tight) for entry in found)
    with pytest.raises(InfeasibleError, match="more than the"):
        planner.ranked(load.problem, with_memory(place, 1e5), workload=load)


@pytest.mark.long
def test_breadth_first_pipelines_are_certified_and_priced_by_what_they_gather() -> None:
    load = prepare(worlds.layers(batch=24))
    pin = {
        "mesh": {"stage": 2, "fsdp": 2},
        "schedule": "gpipe",
        "virtual_stages": 2,
        "microbatches": 3,
        "zero": 3,
    }  # three microbatches are not a multiple of two stages
    use, once, plain = (
        planner.search(load.problem, "h100:4", {**pin, **more}, workload=load)
        for more in (
            {"gather": "use"},
            {"gather": "once"},
            {"gather": "once", "schedule": "1f1b", "virtual_stages": 1},
        )
    )
    assert [plan.search.gap for plan in (use, once, plain)] == [0.0, 0.0, 0.0]
    assert (once.gather, once.schedule, once.virtual_stages) == ("once", "gpipe", 2)

    def gathered(plan: Plan) -> int:
        return sum(
            c.total_bytes
            for c in plan.estimate.collectives
            if c.kind == "all-gather" and c.axes == ("fsdp",)
        )

    assert gathered(use) == pytest.approx(
        3 * gathered(once), rel=0.1
    )  # counts are whole numbers, rounded up
    assert gathered(once) == pytest.approx(2 * gathered(plain), rel=0.1)
    assert use.estimate.device_bytes.parameters < once.estimate.device_bytes.parameters


@pytest.mark.long
def test_a_plan_of_programs_pinned_to_lockstep_costs_what_lockstep_costs() -> None:
    pin = {"mesh": {"stage": 2, "fsdp": 2}, "schedule": "1f1b", "microbatches": 4, "gather": "use"}
    lockstep, programs = (
        planner.search(world_of("layers"), "h100:4", {**pin, "pipeline": form})
        for form in ("lockstep", "programs")
    )
    again = planner.search(
        world_of("layers"),
        "h100:4",
        pin | {"pipeline": "lockstep"},
        workload=programs.source.workload if programs.source else None,
    )
    assert again.estimate == lockstep.estimate
    assert programs.estimate.device_bytes != lockstep.estimate.device_bytes


def test_zero_bubble_stages_that_recompute_say_what_the_estimate_leaves_out() -> None:
    pin = {"mesh": {"stage": 2, "fsdp": 2}, "schedule": "zero-bubble", "microbatches": 4}
    said = {
        remat: [
            finding.code
            for finding in planner.search(
                world_of("layers"), "h100:4", {**pin, "remat": remat}, workload=load_of("layers")
            ).findings
        ]
        for remat in ("none", "full")
    }
    assert "zero-bubble-keeps" in said["full"] and "zero-bubble-keeps" not in said["none"]


def perceptron(widths: list[int]) -> Problem:
    """Layers of widths that all differ, so that no two are one dimension."""
    kernels = {f"w{n}": worlds.shape(*pair) for n, pair in enumerate(itertools.pairwise(widths))}

    def loss(p: dict[str, Any], b: dict[str, Any]) -> Any:
        return jnp.mean(functools.reduce(lambda x, n: jnp.tanh(x @ p[n]), kernels, b["x"]) ** 2)

    batch = {"x": worlds.shape(4096, widths[0])}
    return worlds.problem(loss, kernels, batch, {}, {"x": ("batch", None)}, remat={})


@pytest.mark.parametrize(
    ("pin", "most"),
    [
        ({"mesh": {"tensor": 8}}, 1),
        pytest.param({"mesh": {"tensor": 8}}, 3, marks=pytest.mark.long),
        pytest.param({}, 6, marks=pytest.mark.long),
    ],
)
def test_dimensions_beyond_those_tried_in_all_sets_are_sharded_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, pin: dict[str, object], most: int
) -> None:
    world = perceptron([512, 4096, 576, 4352, 640, 4608, 704, 4864, 256])
    monkeypatch.setattr(workload, "MAX_TENSOR_COLOURS", 9)
    every = planner.search(world, "h100:8", pin)
    assert len([name for name, axes in every.rules.entries if "tensor" in axes]) >= 4
    monkeypatch.setattr(workload, "MAX_TENSOR_COLOURS", most)
    few = planner.search(world, "h100:8", pin)
    assert few.rules == every.rules and few.mesh == every.mesh
    assert few.estimate.step_seconds == pytest.approx(every.estimate.step_seconds, rel=1e-9)
    first = next(iter(planner.ranked(world, "h100:8", pin, slack=1.0))).build()
    assert first.decisions == few.decisions


def test_equally_fast_plans_that_nearly_fill_the_memory_go_to_the_one_with_more_room() -> None:
    size = {"embed": 1024, "hidden": 4096, "heads": 8, "vocab": 1024, "depth": 8}
    load = worlds.prepared(worlds.layers, batch=64, seq=512, **size)
    place, pin = all_hides("h100:8"), {"mesh": {"fsdp": 8}, "remat": "none", "microbatches": 1}
    each = {
        zero: planner.search(load.problem, place, {**pin, "zero": zero}, workload=load)
        for zero in (1, 3)
    }
    one, three = (each[zero].estimate for zero in (1, 3))
    assert one.step_seconds == pytest.approx(three.step_seconds, rel=1e-9)
    assert one.device_bytes.peak > three.device_bytes.peak
    assert (
        planner.search(load.problem, place, pin, workload=load).zero == 1
    )  # the simpler of the two
    room = place.chip.usable_bytes / fitting_bytes(place)  # held back for what is not predicted
    full = with_memory(place, one.device_bytes.peak * room / 0.97)
    found = planner.search(load.problem, full, pin, workload=load)
    assert found.zero == 3 and found.estimate.step_seconds == three.step_seconds
    assert next(iter(planner.ranked(load.problem, full, pin, workload=load))).build().zero == 3
    assert planner.search(load.problem, full, {**pin, "zero": 1}, workload=load).zero == 1


def test_of_equally_fast_plans_the_one_with_less_context_is_simpler():
    def plan(**mesh: int) -> tuple[object, ...]:
        return Candidate(decisions=Decisions(mesh=MeshShape(mesh)), choice=Choice()).simplicity()

    assert plan(stage=4, fsdp=16) < plan(stage=4, context=16)
    assert plan(fsdp=16, context=2) < plan(fsdp=2, context=16)
