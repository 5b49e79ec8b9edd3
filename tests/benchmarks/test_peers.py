"""The tables of docs/peers.md are those of the stored result, and so is its picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.peers.products import product_flops

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "peers.md").read_text()
STORED = json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text())
DEVICES, TPU = STORED["simulated"], STORED["tpu"]["peers"]


def table(name: str) -> dict[str, list[str]]:
    lines = PAGE.split(f"<!-- {name} -->\n")[1].split("\n<!--")[0].splitlines()[2:]
    cells = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in lines]
    return {name: rest for name, *rest in cells}


def test_the_first_table_is_what_was_measured() -> None:
    shown = table("peers")
    assert shown.keys() == DEVICES.keys()
    for name, (_, step, traced, compiled, sent, size, work) in shown.items():
        one = DEVICES[name]
        assert step == f"{one['over_flax_fsdp']:.2f}"
        assert traced == f"{one['trace_seconds']:.1f} s"
        assert compiled == f"{one['compile_seconds']:.1f} s"
        assert sent == f"{one['traffic'].get('wire_bytes', 0.0) / 2**20:,.1f} MiB"
        assert size == f"{one['parameters'] / 1e6:.2f} M"
        assert work == f"{one['product_flops'] / 1e9:.1f} G"


def test_the_second_is_what_the_compiler_of_a_tpu_said() -> None:
    shown = table("tpu")
    assert shown.keys() == TPU.keys() == DEVICES.keys()
    for name, (_, _, memory, sent, cycles, size) in shown.items():
        one = TPU[name]
        assert memory == f"{one['peak_bytes'] / 2**20:,.1f} MiB"
        assert sent == f"{one['wire_bytes'] / 2**20:,.1f} MiB"
        assert cycles == f"{one['cycles'] / 1e6:.1f} M"
        assert size == f"{one['parameters'] / 1e6:.2f} M"


def test_the_third_is_what_was_priced() -> None:
    frameworks = STORED["priced"]["frameworks"]
    shown = table("priced")
    assert shown.keys() == frameworks.keys()
    for name, (step, mfu, *_) in shown.items():
        assert step == f"{frameworks[name]['step_seconds']:.2f} s"
        assert mfu == f"{frameworks[name]['mfu']:.1%}"


def test_all_have_the_losses_of_the_same_job() -> None:
    assert len(DEVICES) == 8
    assert sum("reference" in one for one in DEVICES.values()) == 2
    for one in DEVICES.values():
        wanted = one.get("reference", DEVICES["flax-fsdp"]["losses"])
        assert all(abs(a - b) < 1e-4 for a, b in zip(one["losses"], wanted, strict=True))
        assert one["losses"][0] > one["losses"][1] > one["losses"][2]


def test_all_have_models_of_the_same_size_and_one_compiler() -> None:
    for table in (DEVICES, TPU):
        assert len({one["parameters"] for one in table.values()}) == 1
    assert len({one["versions"]["libtpu"] for one in TPU.values()}) == 1
    least = min(one["product_flops"] for one in DEVICES.values())
    assert least == DEVICES["flax-fsdp"]["product_flops"]


def test_the_plan_that_the_compiler_chose_is_told_and_has_less_of_all_than_fsdp_by_hand() -> None:
    chosen = json.loads((ROOT / "benchmarks" / "results" / "peers_refined.json").read_text())
    size, wire = chosen["peak_bytes"] / 2**20, chosen["wire_bytes"] / 2**20
    said = f"{size:.1f} MiB a chip, {wire:.1f} MiB of wire bytes, {chosen['cycles'] / 1e6:.1f} M cycles"
    assert said in PAGE
    by_hand = TPU["flax-fsdp"]
    assert all(chosen[one] < by_hand[one] for one in ("peak_bytes", "wire_bytes", "cycles"))


def test_the_picture_has_every_ratio_of_a_step() -> None:
    picture = (ROOT / "docs" / "pictures" / "peers.svg").read_text()
    found = re.findall(r">(\d+\.\d\d)<", picture)
    assert [f"{one['over_flax_fsdp']:.2f}" for one in DEVICES.values()] == found[: len(DEVICES)]


LOOPED = """HloModule m, num_partitions=8

%twice (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %t = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%t), index=1
  %f = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%twice
  ROOT %u = (s32[], f32[8,8]) tuple(%i, %f)
}

%condition (t.1: (s32[], f32[8,8])) -> pred[] {
  %t.1 = (s32[], f32[8,8]) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x.1: f32[8,8]) -> f32[8,2] {
  %x.1 = f32[8,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %s = (s32[], f32[8,8]) tuple(%zero, %x.1)
  %w = (s32[], f32[8,8]) while(%s), condition=%condition, body=%body, TRIPS
  %y = f32[8,8]{1,0} get-tuple-element(%w), index=1
  %z = f32[8,2]{1,0} slice(%y), slice={[0:8], [0:2]}
  ROOT %r = f32[8,2]{1,0} dot(%y, %z), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_products_are_counted_as_often_as_they_run_and_on_all_devices() -> None:
    known = LOOPED.replace("TRIPS", 'backend_config={"known_trip_count":{"n":"5"}}')
    assert product_flops(known) == 8 * (5 * 2 * 8**3 + 2 * 8 * 8 * 2)
    with pytest.raises(ValueError, match="trip count of the loop w is unknown"):
        product_flops(LOOPED.replace(", TRIPS", ""))


def test_products_of_the_plain_model_are_those_that_its_sizes_say() -> None:
    job = STORED["jobs"]["cpu"]
    weights = job["layers"] * (4 * job["embed"] ** 2 + 3 * job["embed"] * job["mlp"])
    weights += job["vocab"] * job["embed"]
    tokens = job["batch"] * job["seq"]
    scores = 12 * job["layers"] * tokens * job["seq"] * job["embed"]
    assert DEVICES["flax-fsdp"]["product_flops"] == 6 * weights * tokens + scores
