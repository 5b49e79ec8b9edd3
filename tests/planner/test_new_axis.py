"""A mesh axis is added by one entry in the table of axes: what it splits, where it lies and what it
pays are attributes of it, which planning, pricing and placing read.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import python

ROOT = Path(__file__).parents[2]
#: A second data axis, whose place is on slower links than those of the first.
ENTRY = """
CLUSTER = Axis(
    name="cluster",
    aliases=("replica_of_data",),
    shards="the batch",
    splits="batch",
    stores=False,
    computes=False,
    collectives={},
    waits=False,
    links=-1,
)
"""
#: Axes are constants of modules, so that the table with the entry must be there before any other
#: module is imported.
PROGRAM = """
import json, sys, types
from pathlib import Path

import shardlib

path = Path(shardlib.__file__).parent / "layout.py"
head, table = path.read_text().split("_ALL = (")
changed = head + ENTRY + "_ALL = (" + table.replace("STAGE, DATA,", "STAGE, CLUSTER, DATA,")
module = types.ModuleType("shardlib.layout")
sys.modules["shardlib.layout"] = module
exec(compile(changed, str(path), "exec"), module.__dict__)

from shardlib.layout import INNER_AXES, MeshShape
from shardlib.machines.topology import topology
from shardlib.planner import search as planner
from tests.planner import worlds

WORLD = worlds.layers(depth=4, vocab=512)


def plan(machine, **mesh):
    found = planner.search(WORLD, topology(machine), {"mesh": mesh, "microbatches": 1})
    estimate = found.estimate
    return {
        "seconds": estimate.step_seconds,
        "peak": estimate.device_bytes.peak,
        "zero": found.zero,
        "collectives": [[c.kind, list(c.axes), c.bytes, c.count] for c in estimate.collectives],
    }


print(json.dumps({
    "axes": INNER_AXES,
    "alias": str(MeshShape(replica_of_data=2)),
    "one": plan("h100:4", data=4),
    "two": plan("h100:4", cluster=2, data=2),
    "stored": plan("h100:4", data=2, fsdp=2),
    "stored, two": plan("h100:4", cluster=2, fsdp=2),
    "inside": plan("h100:4", cluster=2, tensor=2),
    "between": plan("2*h100:2", cluster=2, tensor=2),
    "free": dict(planner.search(WORLD, topology("h100:4"), {}).mesh),
}))
"""


@pytest.mark.long
@pytest.mark.processes
def test_an_axis_is_one_entry() -> None:
    done = python("-c", f"ENTRY = {ENTRY!r}\n{PROGRAM}")
    found = json.loads(done.stdout)
    assert found["axes"] == ["cluster", "stage", "data", "fsdp", "expert", "context", "tensor"]
    assert found["alias"] == "cluster=2"
    for usual, new, axes in (
        ("one", "two", {"cluster", "data"}),
        ("stored", "stored, two", {"cluster", "fsdp"}),
    ):
        # what splits the batch divides the work, and gradients are reduced over it
        assert found[new]["seconds"] == pytest.approx(found[usual]["seconds"])
        assert found[new]["peak"] == found[usual]["peak"]
        assert found[new]["zero"] == found[usual]["zero"]
        reduced = [set(c[1]) for c in found[new]["collectives"] if c[0] == "all-reduce"]
        assert axes in reduced
    # it lies on the links between hosts, which cost more than those inside
    assert found["between"]["seconds"] > found["inside"]["seconds"]
    assert set(found["free"]) <= set(found["axes"])
