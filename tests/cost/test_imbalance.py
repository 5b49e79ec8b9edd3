"""The load of the busiest device against simulated routing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardlib.cost.roofline import BALANCED_SKEW, load_factor
from shardlib.cost.tables import BYTES, Pricer, Quantity
from shardlib.cost.terms import Compute, Degrees, Transfer, local
from shardlib.machines.topology import topology
from shardlib.planner.workload import prepare
from shardlib.propagation.colours import Choice
from tests.planner import worlds


def simulated(assignments: int, devices: int, experts: int, skew: float) -> float:
    """Mean over draws of the largest load over the mean: popularities from a normal law,
    assignments from a multinomial one.
    """
    draw = np.random.default_rng(7)
    found: list[float] = []
    for _ in range(300):
        popularity = draw.normal(1.0, skew, size=experts).clip(0.01)
        loads = (
            draw.multinomial(assignments * devices, popularity / popularity.sum())
            .reshape(devices, -1)
            .sum(axis=1)
        )
        found.append(float(loads.max()) / assignments)
    return float(np.mean(found))


@pytest.mark.parametrize(
    ("assignments", "devices", "experts"),
    [(500, 8, 8), (4096, 8, 64), (4096, 64, 256), (20000, 32, 128), (8192, 2, 8)],
)
@pytest.mark.parametrize("skew", [0.0, 0.1, BALANCED_SKEW])
def test_busiest_device(assignments: int, devices: int, experts: int, skew: float) -> None:
    predicted = float(
        load_factor(np.array([float(assignments)]), np.array([devices]), experts, skew)[0]
    )
    assert predicted == pytest.approx(simulated(assignments, devices, experts, skew), rel=0.03)


def test_bounds() -> None:
    devices = np.array([1, 2, 4, 8, 64])
    few, many = (load_factor(np.full(5, tokens), devices, 64) for tokens in (10.0, 1e6))
    assert few[0] == many[0] == 1.0
    assert (few >= many).all() and (many[1:] > 1).all() and (few <= devices).all()
    assert (np.diff(few) > 0).all()  # the more devices, the busier is the busiest


def test_grouped_matmuls_and_all_to_alls_of_a_model_grow_with_the_skew() -> None:
    load = prepare(worlds.experts(count=4))
    assert load.expert is not None
    choice = Choice(batch=load.colouring.batch_colour, expert=load.expert)
    four, one = np.array([4]), np.array([1])
    shapes = Degrees(batch=four, context=one, tensor=one, expert=four, fsdp=one)
    terms = [
        term
        for item in load.programs["none", True].work
        for term in item.terms(choice)
        if getattr(term, "routed", None) is not None
    ]
    assert {type(term) for term in terms} == {Compute, Transfer}
    rows = {
        float(local(term.routed.assignments, shapes)[0])
        for term in terms
        if isinstance(term, Compute) and term.routed is not None
    }
    assert rows == {4 * 512 / 4}  # one expert a token, a quarter of the tokens

    def tallied(skew: float | None, kind: type[Compute] | type[Transfer]) -> np.ndarray:
        pricer = Pricer(topology("h100:4"))
        pricer.efficiency = replace(pricer.efficiency, skew=skew)
        return pricer.tally_terms(
            [(0, term) for term in terms if isinstance(term, kind)], shapes, 1
        )[0]

    factor = float(load_factor(np.array([512.0]), four, 4, 0.25)[0])
    seconds = [float(tallied(skew, Compute)[Quantity.COMPUTE, 0]) for skew in (None, 0.25)]
    assert 1 < seconds[1] / seconds[0] <= factor * (1 + 1e-9)
    moved = [float(tallied(skew, Transfer)[BYTES:].sum()) for skew in (None, 0.25)]
    assert moved[1] / moved[0] == pytest.approx(factor)
