"""What the compiler said about plans: as text, word for word, as HTML, and as JSON both ways."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shardlib.cost.framework import Interval
from shardlib.cost.pricing import Seconds
from shardlib.layout import MeshShape
from shardlib.planner.parts import Refined, Trial
from shardlib.planner.plan import Plan
from shardlib.report.elements import WIDTH
from shardlib.report.pages import html_report
from shardlib.report.text import explain
from tests.planner.fixture_plan import GIB, PLAN, collective

RECORD = Refined(
    wanted=2,
    seconds=Seconds(compute=1.75, exposed=0.125, overhead=0.0001),
    device_bytes=(("arguments", 30 * GIB), ("temporaries", 21 * GIB), ("peak", 51 * GIB)),
    collectives=(collective("all-gather", "fsdp", 64 * 2**20, 192, 0.5, "layers.*.mlp.up.kernel"),),
    kernels="compiler",
    trials=(
        Trial(
            mesh=MeshShape(data=2, fsdp=8),
            summary="ZeRO 3, remat dots",
            predicted_seconds=1.75,
            predicted_bytes=70 * GIB,
            verdict="out-of-memory",
            message="the program needs 83.1GiB per device and there are 80GiB.",
            compile_seconds=31.0,
        ),
        Trial(
            mesh=MeshShape(fsdp=4, tensor=4),
            summary="ZeRO 3, remat full, 2 microbatches",
            predicted_seconds=1.8126,
            predicted_bytes=48 * GIB,
            compiled_seconds=1.8751,
            compiled_bytes=51 * GIB,
            verdict="chosen",
            compile_seconds=40.0,
        ),
        Trial(
            mesh=MeshShape(fsdp=16),
            summary="ZeRO 3",
            predicted_seconds=1.9,
            predicted_bytes=60 * GIB,
            compiled_seconds=2.125,
            compiled_bytes=61 * GIB,
            verdict="slower",
        ),
    ),
    passed_over=1234,
    versions=(("jax", "0.10.2"), ("libtpu", "0.0.42")),
)
PLAN_REFINED = replace(PLAN, refined=RECORD)
SECTION = """\
What the compiler said
  mesh                 step  compiled    memory  compiled  verdict
       other decisions
  data=2 x fsdp=8    1.75 s         -  70.0 GiB         -  out-of-memory
       ZeRO 3, remat dots
  fsdp=4 x tensor=4  1.81 s    1.88 s  48.0 GiB  51.0 GiB  chosen
       ZeRO 3, remat full, 2 microbatches
  fsdp=16            1.90 s    2.12 s  60.0 GiB  61.0 GiB  slower
       ZeRO 3
  - A step takes 1.88 s and 51.0 GiB per device; kernels and collectives are the compiler's, jax
    0.10.2, libtpu 0.0.42.
  - Others predicted within 5% of it: 2; still within 5%: 0; further apart: 1; cannot run: 1.
  - Peak memory is known, not predicted: +6.2% beside the prediction, which allows for 0.0%.
  - 1,234 more candidates were passed over: the compiler found plans like them too large.
"""


def section(plan: Plan) -> str:
    """The part of an explanation that is about the compiler."""
    return next(
        (
            part + "\n"
            for part in explain(plan).split("\n\n")
            if part.startswith("What the compiler said")
        ),
        "",
    )


def test_the_section_of_the_explanation():
    assert section(PLAN_REFINED) == SECTION
    assert all(len(line) <= WIDTH for line in explain(PLAN_REFINED).splitlines())


def test_a_plan_that_no_compiler_saw_says_nothing_about_one():
    assert section(PLAN) == "" and "What the compiler said" not in html_report(PLAN)
    assert explain(PLAN_REFINED).replace(section(PLAN_REFINED) + "\n", "") == explain(PLAN)


def test_where_kernels_are_predicted_the_section_says_so():
    assert "collectives are the compiler's, the time of kernels is predicted" in " ".join(
        section(replace(PLAN, refined=replace(RECORD, kernels="model"))).split()
    )


def test_it_says_what_compiling_and_running_leave_open():
    interval = Interval(
        low=0.8, high=1.5, share=0.8, runs=50, sources=8, profile="", vendor="nvidia"
    )
    compiled = replace(PLAN_REFINED, estimate=replace(PLAN.estimate, interval=interval))
    low, high = compiled.estimate.step_interval or (0.0, 0.0)
    assert f"keeps its interval, {low:.2f} to {high:.2f} s" in " ".join(section(compiled).split())
    ran = tuple(replace(t, run_seconds=1.9 if t.survived else 0.0) for t in RECORD.trials)
    text = section(replace(compiled, refined=replace(RECORD, trials=ran)))
    assert "still within 5%: 1; further apart: 0; cannot run: 1" in text
    assert "It was run: 1.90 s per step, predicted 1.81 s." in text
    assert "keeps its interval" not in text


def test_json_both_ways():
    assert Plan.from_json(PLAN_REFINED.to_json()) == PLAN_REFINED
    data = json.loads(PLAN_REFINED.to_json())
    assert data["refined"]["step_seconds"] == pytest.approx(1.8751)
    assert data["refined"]["trials"][0]["verdict"] == "out-of-memory"
    assert json.loads(PLAN.to_json())["refined"] is None


def test_html_has_the_table():
    page = html_report(PLAN_REFINED)
    assert "<h3>Plans that were compiled</h3>" in page
    assert "<td>out-of-memory</td>" in page
    assert "Peak memory is known, not predicted" in page
    assert '<td class="right">2.12 s</td>' in page
