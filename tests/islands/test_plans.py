"""Plans of several islands can be asked what plans of one can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardlib.decisions.pins import Pins
from shardlib.errors import InfeasibleError, PinError
from shardlib.islands.exchanges import DiLoCo
from shardlib.islands.planning import of_one_island, used_by
from shardlib.layout import MeshShape
from shardlib.machines.topology import place, topology
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan
from shardlib.planner.questions import pinned
from tests.planner import worlds

WORLD = worlds.made(worlds.stack, depth=8, seq=64, embed=64, hidden=256, batch=512)
ISLANDS = {"exchange": "diloco:2:10"}


def planned(where: Any, **pins: Any) -> Plan:
    return planner.search(WORLD, where, pins)


@pytest.mark.parametrize(("where", "one"), [("2*h100:8", "h100:8"), ("4*v5e:2x4", "2*v5e:2x4")])
def test_an_island_is_planned_as_the_machine_that_it_has(where: str, one: str):
    made, alone = planned(where, **ISLANDS), planned(one)
    inner = of_one_island(made)
    assert inner.decisions == alone.decisions and inner.topology == one
    assert inner.estimate == alone.estimate and inner.parameters == alone.parameters
    assert made.mesh == MeshShape(island=2, **alone.mesh)
    assert made.search.gap == 0 and made.search.evaluations == alone.search.evaluations
    assert made.estimate.tokens == 2 * alone.estimate.tokens
    assert made.estimate.mfu == pytest.approx(
        alone.estimate.mfu * alone.estimate.step_seconds / made.estimate.step_seconds
    )


def test_what_it_keeps_and_moves_is_arithmetic():
    made = planned("2*h100:8", **ISLANDS, zero=1, **{"mesh.fsdp": 8})
    elements = sum(a * b * c for a, b, c in (p.shape for p in made.parameters))
    assert made.estimate.device_bytes.exchange == 2 * 4 * elements / 8
    crossing = [c for c in made.estimate.collectives if "island" in c.axes]
    assert [(c.kind, c.bytes, c.count, c.every) for c in crossing] == [
        ("all-reduce", 4 * elements // 8, 1, 10)
    ]
    seldom = planned("2*h100:8", exchange="diloco:2:1000", zero=1, **{"mesh.fsdp": 8})
    assert seldom.estimate.seconds.exchange == pytest.approx(made.estimate.seconds.exchange / 100)


@pytest.mark.long
def test_plans_can_be_asked():
    made = planned("2*v5e:2x4", **ISLANDS)
    others = made.alternatives(3)
    assert all(one.differs and one.mesh["island"] == 2 and one.ratio >= 1 for one in others)
    assert "diloco:2:50" in made.why_not(exchange="diloco:2:50")
    assert made.why_not(zero=3) and str(made.constraints()) and str(made.sensitivity())
    again = planner.search(WORLD, "2*v5e:2x4", pinned(made))
    assert again.decisions == made.decisions and again.estimate == made.estimate
    assert "diloco:2:10" in made.explain()


def test_what_is_kept_for_meetings_is_held_back():
    """The fastest plan of an island fills it; with what is kept, another one is found, or none."""
    free = planned("2*h100:8", **ISLANDS)
    peak = free.estimate.device_bytes.peak * free.estimate.margin
    machine = topology("2*h100:8")

    def with_memory(size: float):
        chip = replace(machine.chip, hbm_bytes=int(size), reserved_bytes=0)
        return replace(machine, chip=chip)

    tight = planned(with_memory(peak - 1), **ISLANDS)
    assert tight.decisions != free.decisions
    assert tight.estimate.device_bytes.peak * tight.estimate.margin <= peak
    with pytest.raises(InfeasibleError):
        planned(with_memory(1 << 20), **ISLANDS)


def test_the_pins_of_all_islands_are_read_by_the_words_of_one():
    pins = Pins.parse({"exchange": {"kind": "diloco", "islands": 2}, "mesh": {"island": 2}})
    assert isinstance(pins.exchange, DiLoCo) and pins.mesh == MeshShape(island=2)


def test_a_meeting_is_no_part_of_what_a_step_moves():
    one, both = planned("h100:8"), planned("2*h100:8", **ISLANDS)

    def line(plan: Plan, start: str) -> list[str]:
        return [line for line in plan.explain().splitlines() if line.startswith(start)]

    assert line(both, "Collectives: ") == line(one, "Collectives: ")
    assert "over island" in line(both, "Every 10 steps a meeting")[0]
    assert not line(one, "Every ")


@pytest.mark.parametrize(
    ("where", "used", "left"),
    [
        ("2*v5e:4x4", 8, "2*v5e:4x4"),
        ("2*h100:8", 4, "2*h100:8"),
        ("8*h100:8", 16, "8*h100:8"),
    ],
)
def test_islands_that_leave_devices_idle_still_meet_over_what_joins_them(
    where: str, used: int, left: str
):
    joined = used_by(topology(where), 2, used)
    assert joined.devices == 2 * used and joined.tiers[0].kind == "network"
    placed = place(MeshShape(island=2, fsdp=used), joined)
    assert placed is not None and [span.tier for span in placed["island"]] == [0]
    assert used_by(topology(left), 2, topology(left).devices // 2) == topology(left)


def test_other_plans_take_their_part_of_the_exchange() -> None:
    made = planned("2@1gbit*h100:8", **ISLANDS)
    assert made.estimate.seconds.exchange > made.estimate.step_seconds / 3
    slower = [one for one in made.search.rejected if one.reason == "slower"]
    assert slower and all(one.step_seconds >= made.estimate.step_seconds for one in slower)


def test_another_number_of_islands_is_another_problem() -> None:
    with pytest.raises(PinError, match="traced for the rows of one island"):
        planned("2*h100:8").why_not(exchange="diloco:2:10")
    made = planned("4*h100:8", exchange="gossip:4")
    with pytest.raises(PinError, match=r"4 islands and diloco:2:100 has 2"):
        made.why_not(exchange="diloco:2:100")
    assert "compressed:4:sign" in made.why_not(exchange="compressed:4:sign")
