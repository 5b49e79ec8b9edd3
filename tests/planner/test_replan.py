"""Replanning: bytes that move, against sets of elements counted one by one; and what is said about
it.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace

import numpy as np
import pytest

from shardlib.cli.inputs import numbers, sizes
from shardlib.errors import InfeasibleError, PlanError, TopologyError
from shardlib.layout import Layout, MeshShape
from shardlib.machines.topology import device_order, topology
from shardlib.planner import search as planner
from shardlib.planner.answers import Replan, Shards, lost_elements, moved_elements
from shardlib.planner.plan import Plan
from shardlib.planner.scaling import KEPT_KEYS
from shardlib.report.elements import WIDTH
from tests.planner import worlds
from tests.planner.worlds import planned, with_memory, workload


def held(shards: Shards, device: int) -> set[int]:
    """Flat numbers of the elements that a device holds, by cutting the array for real."""
    grid = np.arange(int(np.prod(shards.shape))).reshape(shards.shape)
    places = {
        int(number): place
        for place, number in zip(
            itertools.product(*(range(shards.mesh[axis]) for axis in AXES)),
            shards.order,
            strict=True,
        )
    }
    if device not in places:
        return set()
    at = dict(zip(AXES, places[device], strict=True))
    for dim, axes in enumerate(shards.layout):
        for axis in axes:  # cutting again and again is what "the major axis first" means
            grid = np.split(grid, shards.mesh[axis], axis=dim)[at[axis]]
    return set(grid.reshape(-1).tolist())


AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
LAYOUTS = [
    Layout((), ()),
    Layout("data", ()),
    Layout(("data", "tensor"), ()),
    Layout(("tensor", "data"), ()),
    Layout("tensor", "data"),
    Layout((), ("fsdp", "tensor")),
    Layout("fsdp", "tensor"),
]
MESHES = [
    MeshShape(),
    MeshShape(data=2),
    MeshShape(data=4, tensor=2),
    MeshShape(data=2, fsdp=2, tensor=2),
    MeshShape(fsdp=4),
    MeshShape(tensor=2, data=3),
]


@pytest.mark.long
@pytest.mark.parametrize("lost", [(), (0,), (1, 2), (5, 6, 7)])
def test_moved_and_lost_elements_are_counted_exactly(lost: tuple[int, ...]):
    shape, where = (24, 24), topology("h100:8")
    pairs = [
        (layout, mesh, np.asarray(device_order(mesh, where)).reshape(-1))
        for layout in LAYOUTS
        for mesh in MESHES
    ]
    survivors = np.array([n for n in range(8) if n not in lost], np.int64)
    seen_lost = seen_moved = 0
    for (old_layout, old_mesh, old_order), (new_layout, new_mesh, new_order) in itertools.product(
        pairs, pairs
    ):
        if new_mesh.devices > len(survivors):
            continue
        old = Shards(shape, old_layout, old_mesh, old_order)
        new = Shards(shape, new_layout, new_mesh, new_order)
        want = [held(new, device) for device in range(int(new_order.max()) + 1)]
        have = [held(old, int(survivors[device])) for device in range(len(want))]
        moved = moved_elements(old, new, survivors)
        assert moved.tolist() == [len(w - h) for w, h in zip(want, have, strict=True)]
        gone = 24 * 24 - len(set().union(*(held(old, int(device)) for device in survivors)))
        assert lost_elements(old, survivors) == gone
        seen_lost, seen_moved = seen_lost + gone, seen_moved + int(moved.sum())
    assert seen_moved > 0 and (seen_lost > 0) == bool(lost)


def test_ranges_are_the_elements():
    shards = Shards(
        (8, 6), Layout(("data", "tensor"), ()), MeshShape(data=2, tensor=2), np.array([3, 1, 0, 2])
    )
    grid = np.arange(48).reshape(8, 6)
    for device in range(4):
        ranges = shards.ranges(device)
        assert ranges is not None
        (a, b), (c, d) = ranges
        assert set(grid[a:b, c:d].reshape(-1).tolist()) == held(shards, device)
    assert shards.ranges(4) is None


def counted(change: Replan) -> list[int]:
    """Bytes that every device receives, from the ranges of every part."""
    sizes = {p.path: p.state_bytes_per_element for p in workload().problem.parameters}
    total = [0.0] * change.machine.devices
    for part in change.parts:
        size = 4.0 if part.what == "parameter" else sizes[part.path]
        for device in range(change.machine.devices):
            before, after = part.ranges(device, change.survivors)
            if after is None:
                continue
            need = np.prod([end - start for start, end in after])
            both = (
                np.prod(
                    [
                        max(0, min(b[1], a[1]) - max(b[0], a[0]))
                        for b, a in zip(before, after, strict=True)
                    ]
                )
                if before is not None
                else 0
            )
            total[device] += float(need - both) * size
    return [round(x) for x in total]


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new", "pin"),
    [
        ("2*h100:4", "h100:4", None),
        ("2*h100:4", "h100:4", {"mesh.tensor": 2}),
        ("4*h100:2", "3*h100:2", None),
        ("h100:4", "2*h100:4", None),
        ("h100:8", "h100:8", None),
    ],
)
def test_a_replan_adds_up(old: str, new: str, pin: dict[str, object] | None):
    plan = planned(old, pin)
    change = plan.replan(new)
    assert list(change.moved_bytes_per_device) == counted(change)
    assert sum(change.moved_bytes_per_device) == sum(part.received_bytes for part in change.parts)
    assert {(part.path, part.what) for part in change.parts} == {
        (p.path, what)
        for p in workload().problem.parameters
        for what in ("parameter", "optimizer state")
    }
    assert change.plan.topology == new and change.slowdown == pytest.approx(
        change.plan.estimate.step_seconds / plan.estimate.step_seconds
    )
    kept = {word: getattr(plan, word) for word in KEPT_KEYS}
    assert {word: getattr(change.plan, word) for word in KEPT_KEYS} == kept
    assert (
        f"Kept from the old plan: {', '.join(KEPT_KEYS)}. A new search (anew) may find a faster plan."
        in change.notes
    )
    again, anew = planned(new, {**(pin or {}), **kept}), planned(new, pin)
    assert change.plan.estimate.step_seconds <= again.estimate.step_seconds * (1 + 1e-9)
    assert plan.replan(new, anew=True).plan.estimate.step_seconds <= anew.estimate.step_seconds * (
        1 + 1e-9
    )
    assert change.plan.estimate.tokens == plan.estimate.tokens


@pytest.mark.long
def test_the_same_machine_moves_nothing():
    change = planned("h100:8").replan("h100:8")
    assert change.moved_bytes_per_device == (0,) * 8
    assert change.changed == ()
    assert change.slowdown == 1
    assert change.lost_bytes == 0
    assert "nothing is decided differently" in change.text
    assert "no checkpoint is needed" in change.text


@pytest.mark.long
def test_what_is_cut_over_lost_hosts_is_lost():
    cut = planned("2*h100:4", {"mesh": {"fsdp": 8}, "zero": 3}).replan("h100:4")
    state = [part for part in cut.parts if part.old.axes]
    assert state and all(part.lost_bytes == part.bytes // 2 for part in state)
    assert "are on no surviving device and must come from a checkpoint" in cut.text
    whole = planned("2*h100:4", {"mesh": {"data": 8}}).replan("h100:4")
    assert whole.lost_bytes == 0


def test_which_devices_are_lost_matters():
    plan = planned("2*h100:4", {"mesh": {"data": 2, "fsdp": 4}, "zero": 3})
    first, last = plan.replan("h100:4", lost=range(4)), plan.replan("h100:4")
    assert first.survivors == (4, 5, 6, 7) and last.survivors == (0, 1, 2, 3)
    assert plan.replan("h100:4", lost=(0, 1, 2, 7)).survivors == (3, 4, 5, 6)
    assert first.lost_bytes == last.lost_bytes == 0  # each half has a copy
    assert plan.replan("h100:4", lost=(0, 4)).lost_bytes > 0  # both copies of one shard


def test_the_global_batch_stays_and_the_text_says_how():
    plan = planned("h100:8", {"mesh": {"fsdp": 8}, "remat": "none", "offload": []})
    small = with_memory(topology("h100:2"), plan.estimate.device_bytes.peak * 1.2)
    change = plan.replan(small)
    assert change.plan.microbatches > plan.microbatches
    assert change.plan.batch_layouts and change.plan.source.workload is workload()
    assert (
        f"The global batch stays the same: {plan.microbatches} microbatches of gradient"
        f" accumulation become {change.plan.microbatches}." in change.notes
    )
    assert change.slowdown > 1


@pytest.mark.long
def test_an_odd_number_of_hosts_is_never_slower_than_its_even_part():
    change = planned("4*h100:2").replan("3*h100:2")
    assert change.plan.estimate.step_seconds <= planned("2*h100:2").estimate.step_seconds * (
        1 + 1e-9
    )
    assert (
        f"The plan uses {change.plan.mesh.devices} of the 6 devices." in change.notes
        or change.plan.mesh.devices == 6
    )


def test_simulated_devices_keep_the_figures_that_they_were_priced_with():
    rough = topology("cpu:4")
    chip = replace(rough.chip, hbm_bytes_per_s=2e10, sources=("measured here",))
    plan = planned(replace(rough, chip=chip, alone=3.0), {"mesh": {"data": 4}})
    same = plan.replan("cpu:4", lost=[0])
    assert same.slowdown == 1 and same.changed == () and same.machine.chip == chip
    fewer, more = plan.replan("cpu:2").machine, plan.replan("cpu:8").machine
    rates = [one.chip.hbm_bytes_per_s for one in (fewer, more)]
    assert rates == [4e10, 1e10] and (fewer.alone, more.alone) == (1.5, 6.0)
    assert fewer.chip.hbm_bytes == 2 * chip.hbm_bytes and (fewer.devices, more.devices) == (2, 8)
    assert plan.replan("cpu:7").machine.devices == 7
    assert not any("chips" in note or "figures" in note for note in same.notes)
    other = plan.replan(rough)
    assert not other.other_chips and other.notes[1].startswith("The figures of cpu have changed")
    assert "measured here before" in other.notes[1]


@pytest.mark.long
def test_growth_and_other_chips_are_said():
    grown = planned("v5e:2x2").replan("v5e:2x4")
    assert (
        "The machine has grown from 4 to 8 devices; the new ones hold nothing yet." in grown.notes
    )
    assert all(grown.moved_bytes_per_device[4:])
    other = planned("h100:8", {"mesh": {"fsdp": 8}}).replan("h200:8")
    assert any(note.startswith("The chips differ: h100 before, h200 now.") for note in other.notes)
    assert all(other.moved_bytes_per_device) and other.other_chips and not grown.other_chips
    text = " ".join(other.text.split())
    assert "surviving device" not in text and "no checkpoint is needed" not in text
    assert "they come from a checkpoint, or from the old machine while it is still there" in text
    google = planned("h100:4").replan("v5e:2x2")
    assert google.plan.topology == "v5e:2x2"


@pytest.mark.long
def test_a_pinned_mesh_that_does_not_fit_is_given_up_and_said():
    change = planned("h100:8", {"mesh": {"data": 8}}).replan("h100:4")
    assert (
        change.notes[0]
        == "The pinned mesh was dropped: the mesh data=8 has 8 devices and h100:4 has 4."
    )
    kept = planned("h100:8", {"remat": "full"}).replan("h100:4")
    assert kept.plan.remat == "full"


@pytest.mark.long
def test_bad_questions():
    with pytest.raises(
        TopologyError, match="the lost devices 8, 9 are none of h100:8, whose devices are 0 to 7"
    ):
        planned("h100:8").replan("h100:4", lost=(8, 9))
    tiny = with_memory(topology("h100:2"), 100_000)
    with pytest.raises(InfeasibleError, match="does not fit") as caught:
        planned("h100:8").replan(tiny, anew=True)
    assert caught.value.short_bytes > 0


@pytest.mark.long
def test_json_and_width():
    change = planned("4*h100:2", {"mesh.tensor": 2}).replan("3*h100:2")
    data = json.loads(json.dumps(change.to_json()))
    assert Plan.from_json(json.dumps(data["plan"])) == change.plan and data["moved_bytes"] == sum(
        change.moved_bytes_per_device
    )
    assert max(map(len, change.text.splitlines())) <= WIDTH and str(change) == change.text


@pytest.mark.long
def test_replanning_a_large_machine_is_quick():
    world = worlds.layers(batch=4096)
    plan = planner.search(world, "256*h100:8")
    start = time.process_time()
    change = plan.replan("255*h100:8")
    assert len(change.moved_bytes_per_device) == 255 * 8
    assert time.process_time() - start < 3  # a fraction of it on a core of one's own


def test_numbers_of_a_command_line():
    assert numbers("", "--lost") == () and numbers("3, 1-2,2", "--lost") == (1, 2, 3)
    assert sizes("8..48") == (8, 16, 32) and sizes("7") == (7,)
    for text in ("a", "3-1", "1,,x", "-1"):
        with pytest.raises(PlanError, match="--lost has"):
            numbers(text, "--lost")
    for text in ("", "0", "0..8", "16..8", "8..", "8;9"):
        with pytest.raises(PlanError, match="says no numbers of devices"):
            sizes(text)
