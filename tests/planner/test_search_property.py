"""The search against brute force on random models, machines and memories."""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardlib.machines.topology import topology
from shardlib.planner.workload import Workload, prepare
from tests.planner import worlds
from tests.planner.brute_force import agreed

#: One chip, prime numbers of chips, one fast domain, several, and some that a slow link joins.
MACHINES = (
    *("cpu:1", "cpu:3", "h100:2", "h100:3", "h100:4", "3*h100:1", "2*h100:2", "v5e:2x2"),
    *("2@10gbit-1ms*h100:2", "2@100gbit-0.01ms*h100:2", "2@1gbit-20ms*2*h100:1"),
)
SIZES = st.sampled_from((6, 16, 30, 512, 2048))


@functools.cache
def _load(kind: str, vendor: str, batch: int, embed: int, hidden: int, depth: int) -> Workload:
    problem = (
        worlds.mlp(batch, embed, hidden)
        if kind == "mlp"
        else worlds.stack(batch=batch, seq=12, embed=embed, hidden=hidden, depth=depth)
    )
    return prepare(problem, vendor)


@pytest.mark.long
@pytest.mark.matrix
@settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@example(
    kind="stack",
    where="3*h100:1",
    batch=1,
    embed=30,
    hidden=2048,
    depth=3,
    share=0.8977218366492039,
)  # recompute less, with activations in host memory
@given(
    kind=st.sampled_from(("mlp", "stack")),
    where=st.sampled_from(MACHINES),
    batch=st.sampled_from((1, 2, 3)),
    embed=SIZES,
    hidden=SIZES,
    depth=st.integers(1, 3),
    share=st.none() | st.floats(0.2, 1.1),
)
def test_the_search_equals_brute_force(
    kind: str, where: str, batch: int, embed: int, hidden: int, depth: int, share: float | None
) -> None:
    place = topology(where)
    agreed(_load(kind, place.chip.vendor, batch, embed, hidden, depth), place, share=share)
