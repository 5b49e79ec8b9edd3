"""The load of the busiest device against simulated routing."""

from __future__ import annotations

import numpy as np
import pytest

from shardlib.cost.imbalance import BALANCED, load_factor


def simulated(assignments: int, devices: int, experts: int, skew: float) -> float:
    """Mean over draws of the largest load over the mean: popularities from a normal law, assignments from a multinomial one."""
    draw = np.random.default_rng(7)
    found: list[float] = []
    for _ in range(300):
        popularity = draw.normal(1.0, skew, size=experts).clip(0.01)
        loads = draw.multinomial(assignments * devices, popularity / popularity.sum()).reshape(devices, -1).sum(axis=1)
        found.append(float(loads.max()) / assignments)
    return float(np.mean(found))


@pytest.mark.parametrize(("assignments", "devices", "experts"), [(500, 8, 8), (4096, 8, 64), (4096, 64, 256), (20000, 32, 128), (8192, 2, 8)])
@pytest.mark.parametrize("skew", [0.0, 0.1, BALANCED])
def test_busiest_device(assignments: int, devices: int, experts: int, skew: float) -> None:
    predicted = float(load_factor(np.array([float(assignments)]), np.array([devices]), experts, skew)[0])
    assert predicted == pytest.approx(simulated(assignments, devices, experts, skew), rel=0.03)


def test_bounds() -> None:
    devices = np.array([1, 2, 4, 8, 64])
    few, many = (load_factor(np.full(5, tokens), devices, 64) for tokens in (10.0, 1e6))
    assert few[0] == many[0] == 1.0
    assert (few >= many).all() and (many[1:] > 1).all() and (few <= devices).all()
    assert (np.diff(few) > 0).all()  # the more devices, the busier is the busiest
