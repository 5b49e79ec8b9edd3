"""Colours that no op ties together are independent, and tallies that are made of measures are those
of the items.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardlib.cost.framework import framework_profile
from shardlib.cost.stages import distinct
from shardlib.cost.tables import Pricer
from shardlib.decisions.pins import Pins
from shardlib.decisions.table import Decisions
from shardlib.machines.topology import topology
from shardlib.planner.space import Scope, Strategy, build
from shardlib.planner.workload import components, prepare, subsets
from tests.planner import worlds

STRATEGY = Strategy(decisions=Decisions(context="all-gather"))


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
    assert components(groups, ("vocab", "mlp", "rope", "heads", "head_dim")) == (
        ("vocab",),
        ("mlp",),
        ("rope", "heads", "head_dim"),
    )
    assert subsets(("a", "b")) == [(), ("a",), ("b",), ("a", "b")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "software"),
    (("layers", "xla"), ("experts", "megatron-core"), ("mlp", "xla"), ("two stacks", "xla")),
)
def test_tallies_of_components_add_up_to_those_of_the_items(world: str, software: str) -> None:
    problem = {
        "layers": worlds.layers,
        "experts": worlds.experts,
        "mlp": worlds.mlp,
        "two stacks": lambda: worlds.two_stacks(hidden=(512, 512), depth=(2, 2)),
    }[world]()
    load = prepare(problem, "nvidia", framework_profile(software))
    pricer = Pricer(topology("2*h100:4"), framework_profile(software))
    room = build(load, Pins(), None, STRATEGY)
    shapes, _ = distinct(room.mesh_sizes(load.colouring, 8))
    scope = Scope(
        load=load,
        space=room,
        cuttable=room.tensor,
        along=load.colouring.sequence_colour,
        routes=True,
    )
    accounts, values = scope.accounts, pricer.values(load.ledger.book, shapes)
    at = np.arange(0, len(shapes), 2)
    for routes in room.routes:
        for given in room.choices[::3]:
            choice = replace(scope, routes=routes).choice(given)
            for policy in room.policies:
                program = load.programs[policy, routes]
                total = [
                    accounts.work[policy, routes].on(values, at).total(choice)[0],
                    *accounts.points[policy, routes].on(values, at).total(choice),
                ]
                for found, items in zip(total, [program.work, *program.points], strict=True):
                    wanted = pricer.tally(items, choice, shapes, len(load.counts))[..., at]
                    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(
                accounts.rest.on(values, at).total(choice)[0],
                pricer.tally(load.rest, choice, shapes, len(load.counts))[..., at],
                rtol=1e-12,
            )
