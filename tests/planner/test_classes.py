"""Recomputation by class of layers: the search against every policy and number of layers of each
class, and what pins and plans say of it.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

from shardlib.cost.pricing import Totals
from shardlib.cost.variants import NO_REMAT, best_mixture, corners, partly_rematerialised, patterns
from shardlib.machines.topology import Topology, topology
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan
from shardlib.planner.workload import Workload, prepare
from tests.planner import worlds
from tests.planner.brute_force import agreed
from tests.planner.worlds import with_memory

#: Lets classes of layers differ.
ANY = {"remat_classes": "any"}


@functools.cache
def _load(vendor: str = "nvidia", depth: tuple[int, int] = (2, 2)) -> Workload:
    return prepare(
        worlds.two_stacks(batch=2, seq=32, embed=64, hidden=(128, 512), depth=depth), vendor
    )


def _sizes(where: str) -> tuple[Workload, Topology, float, float]:
    """A world on a machine, with the bytes of the fastest plan that recomputes nothing on one
    device's mesh, and of the one that recomputes all.
    """
    place = topology(where)
    load = _load(place.chip.vendor)
    few, many = (
        planner.search(
            load.problem, place, {"remat": policy}, workload=load
        ).estimate.device_bytes.peak
        for policy in ("full", "none")
    )
    return load, place, float(min(few, many)), float(max(few, many))


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("where", "share"),
    (
        ("cpu:1", 0.1),
        ("cpu:1", 0.5),
        ("cpu:1", 0.9),
        ("h100:1", 0.3),
        ("h100:1", 0.7),
        ("v5e:1x1", 0.5),
        ("cpu:2", 0.6),
    ),
)
def test_the_search_equals_brute_force(where: str, share: float) -> None:
    load, place, few, many = _sizes(where)
    tight = with_memory(place, few + (many - few) * share)
    assert agreed(load, tight, ANY, all_variants=True, by_class=True)


@pytest.mark.long
def test_classes_of_unlike_layers_recompute_differently_where_memory_binds() -> None:
    load, place, few, many = _sizes("cpu:1")
    assert load.layer_counts == (2, 2) and load.group_names == ("first", "second")
    found = [
        planner.search(
            load.problem, with_memory(place, few + (many - few) * share), ANY, workload=load
        )
        for share in (0.1, 0.3, 0.5, 0.7, 0.9)
    ]
    unlike = [plan for plan in found if plan.remat_classes]
    assert unlike
    seconds = [plan.estimate.step_seconds for plan in found]
    assert (
        seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    )  # more memory is never slower
    for plan in unlike:
        names = [name for name, _, _ in plan.remat_classes]
        assert names == ["first", "second"]
        assert plan.remat_layers == sum(number for _, _, number in plan.remat_classes)
        assert all(name in plan.explain() for name in names)
        assert Plan.from_json(plan.to_json()) == replace(plan, source=None)
        again = planner.search(
            load.problem, with_memory(place, 1e15), plan.decisions, workload=load
        )  # a plan whose decisions are all pinned is simply priced
        assert again.decisions == plan.decisions
        assert again.estimate == plan.estimate
        assert again.digest != planner.search(load.problem, place, workload=load).digest


@pytest.mark.long
def test_pinned_classes_are_priced_between_their_corners() -> None:
    load, place, _, _ = _sizes("cpu:1")

    def planned(**classes: object) -> Plan:
        return planner.search(load.problem, place, {"remat_classes": classes}, workload=load)

    none, first, second, both = (
        planned(**dict.fromkeys(names, "full"))
        for names in (["first"] * 0, ["first"], ["second"], ["first", "second"])
    )
    uniform = [
        planner.search(load.problem, place, {"remat": policy}, workload=load)
        for policy in ("none", "full")
    ]
    assert none.remat_classes == () == both.remat_classes
    assert [none.estimate, both.estimate] == [plan.estimate for plan in uniform]
    for plan in (first, second):
        assert none.estimate.step_seconds < plan.estimate.step_seconds < both.estimate.step_seconds
        assert (
            both.estimate.hardware_flops
            > plan.estimate.hardware_flops
            > none.estimate.hardware_flops
        )
    extra = [
        plan.estimate.hardware_flops - none.estimate.hardware_flops
        for plan in (first, second, both)
    ]
    assert extra[0] + extra[1] == pytest.approx(
        extra[2], rel=1e-9
    )  # each class recomputes its own work
    half = planned(first=["full", 1])
    assert half.estimate.step_seconds == pytest.approx(
        (none.estimate.step_seconds + first.estimate.step_seconds) / 2, rel=1e-9
    )
    assert half.decisions["remat_classes"] == {"first": ["full", 1], "second": ["none", 0]}
    assert half.diff(first).count("remat policy") == 2
    total = planner.search(
        load.problem, place, {"remat": "full", "remat_layers": 3, **ANY}, workload=load
    )
    every = [planned(first=["full", one], second=["full", 3 - one]) for one in (1, 2)]
    assert total.estimate.step_seconds == pytest.approx(
        min(plan.estimate.step_seconds for plan in every), rel=1e-12
    )


@pytest.mark.long
def test_one_class_is_told_in_the_words_for_all() -> None:
    load = prepare(worlds.layers(batch=2, depth=4))
    (name,) = load.group_names
    by_class, by_word = (
        planner.search(load.problem, "h100:1", pin, workload=load)
        for pin in ({"remat_classes": {name: ["full", 2]}}, {"remat": "full", "remat_layers": 2})
    )
    assert by_class.decisions == by_word.decisions
    assert by_class.estimate == by_word.estimate
    assert not by_class.remat_classes


def _random_prices(seed: int, classes: int, rows: int) -> dict[tuple[str, ...], Totals]:
    """Corners that cost and save at random: recomputing may even be quicker, or larger."""
    rng = np.random.default_rng(seed)
    return {
        corner: Totals(
            seconds={"compute": rng.uniform(1, 2, rows), "exposed": rng.uniform(0, 1, rows)},
            flops=rng.uniform(1, 2, rows),
            stacks=rng.uniform(0, 1, rows),
            in_flight=np.ones(rows),
            largest_state=np.zeros(rows),
            device_bytes={
                "activations": rng.uniform(1, 9, rows),
                "temporaries": rng.uniform(0, 2, rows),
            },
        )
        for corner in corners((NO_REMAT, "dots", "full"), classes)
    }


@pytest.mark.parametrize(("seed", "most"), ((0, (3, 4)), (1, (1, 5)), (2, (2, 2, 3)), (3, (6, 1))))
@pytest.mark.parametrize("total", (None, 3))
def test_the_best_mixture_is_that_of_an_enumeration(
    seed: int, most: tuple[int, ...], total: int | None
) -> None:
    rows, classes = 12, len(most)
    prices = _random_prices(seed, classes, rows)
    layers = [np.full(rows, float(n)) for n in most]
    capacity = 6.0
    found = best_mixture(
        prices, patterns((NO_REMAT, "dots", "full"), classes), layers, capacity, total=total
    )
    options = [
        [(NO_REMAT, 0), *((policy, n) for policy in ("dots", "full") for n in range(1, count + 1))]
        for count in most
    ]
    best = np.full(rows, np.inf)
    for each in itertools.product(*options):
        whole = len({policy for policy, _ in each}) == 1 and all(
            n in (0, count) for (_, n), count in zip(each, most, strict=True)
        )
        if whole or total not in (None, sum(n for _, n in each)):
            continue
        price = partly_rematerialised(each, layers, lambda corner: prices[corner])
        best = np.where(price.peak_bytes <= capacity, np.minimum(best, price.step_seconds), best)
    assert np.isfinite(best).any()
    np.testing.assert_allclose(found.seconds, best, rtol=1e-12)
