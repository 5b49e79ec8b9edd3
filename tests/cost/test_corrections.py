"""Corrections: what is learned from compiled programs, what is applied, and what the user is told
about it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import learn_corrections, learn_margins
from benchmarks.learn_corrections import (
    Sample,
    corrections,
    errors,
    file_name,
    fit,
    held_out_error,
    learn,
    read,
)
from shardlib.cost import roofline as room
from shardlib.cost.pricing import combine
from shardlib.cost.roofline import (
    UNKNOWN_MARGIN,
    Applied,
    Correction,
    applied,
    fitting_bytes,
    margin,
    without_margin,
)
from shardlib.cost.stages import Meshes, ModelFacts, Plans, step_costs
from shardlib.cost.tables import ROWS, Pricer, Quantity
from shardlib.cost.terms import OUTSIDE_LAYERS
from shardlib.decisions.table import Decisions
from shardlib.errors import TopologyError
from shardlib.layout import MeshShape
from shardlib.machines.catalog import CATALOG
from shardlib.machines.topology import Topology, place, topology
from shardlib.planner import search as planner
from shardlib.planner.assembly import price
from shardlib.planner.plan import Plan
from shardlib.report.text import explain
from shardlib.verification.report import other_compiler
from tests.planner.worlds import workload

PIN = {"mesh": {"fsdp": 2, "tensor": 2}, "zero": 3, "remat": "full", "microbatches": 2}
KEY = ("v5e", (("jax", "0.10.2"), ("jaxlib", "0.10.2"), ("libtpu", "0.0.42")))
PATH = {
    "quantity": "temporaries",
    "median_error_before": 0.2,
    "median_error_after": 0.1,
    "held_out_error": 0.1,
}


def samples(rng: np.random.Generator, count: int, factor: float | None = None) -> list[Sample]:
    """Programs of three families; with a factor, compiled as it says but for a tenth of noise."""
    found = []
    for i in range(count):
        fixed, part = rng.uniform(0.1, 1), rng.uniform(0.1, 1)
        truth = (
            rng.uniform(0.2, 3)
            if factor is None
            else (fixed + factor * part) * rng.uniform(0.95, 1.05)
        )
        found.append(
            Sample(case=str(i), family=f"family {i % 3}", fixed=fixed, part=part, compiled=truth)
        )
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_factor_is_better_than_the_fitted_one(seed: int):
    rng = np.random.default_rng(seed)
    found = samples(rng, int(rng.integers(1, 12)))
    fixed, part, compiled = np.array([(s.fixed, s.part, s.compiled) for s in found]).T
    every = np.geomspace(1e-3, 1e3, 2001)[:, None]
    best = np.median(np.abs((fixed + every * part) / compiled - 1), axis=1).min()
    assert float(np.median(errors(found, fit(found)))) <= best + 1e-9


def test_a_factor_in_the_programs_is_found_and_helps_every_family():
    found = samples(np.random.default_rng(0), 24, factor=1.7)
    one = learn(KEY, "temporaries", found)
    assert isinstance(one, Correction)
    assert one.factor == pytest.approx(1.7, rel=0.1)
    assert one.n == 24
    assert len(one.evidence) == 24
    assert one.held_out_error < 0.05 < one.median_error_before
    assert one.median_error_after == pytest.approx(float(np.median(errors(found, one.factor))))
    assert Correction.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_what_does_not_help_other_families_is_not_learned():
    """One family is off by two, the other by a half: each teaches the other what is wrong for
    it.
    """
    rng = np.random.default_rng(2)
    found = [
        replace(
            s,
            family="up" if s.case in "02468" else "down",
            fixed=0.0,
            compiled=s.part * (2 if s.case in "02468" else 0.5),
        )
        for s in samples(rng, 10)
    ]
    assert fit(found) != 1 and held_out_error(found) > float(np.median(errors(found, 1.0)))
    why = learn(KEY, "temporaries", found)
    assert isinstance(why, str) and "does not help other families" in why
    assert (
        learn(KEY, "temporaries", [s for s in found if s.family == "up"])
        == "5 programs of 1 families; it takes 8 of 2"
    )


def row(
    case: int,
    family: str,
    *,
    temporaries: float,
    compiled: float,
    seconds: float,
    cycles: float,
    corrected: float = 1.0,
) -> dict[str, Any]:
    """A row of a result, predicted with a factor on temporaries."""
    parts = {
        "parameters": 100.0,
        "gradients": 50.0,
        "optimizer": 100.0,
        "activations": 30.0 + case,
        "temporaries": temporaries * corrected,
        "communication": 0.0,
        "batch": 1.0,
    }
    return {
        "case": {"model": family, "topology": "v5e:2x2", "batch": case, "seq": 1},
        "versions": dict(KEY[1]),
        "device_bytes": {
            "predicted": {**parts, "peak": sum(parts.values())},
            "compiled": {"peak": compiled},
        },
        "seconds": {"compute": seconds, "optimizer": 1.0},
        "corrections": [{"quantity": "temporaries", "factor": corrected}] if corrected != 1 else [],
        "compute": {"predicted": seconds + 1, "compiled": cycles},
    }


def rows(corrected: float = 1.0) -> list[dict[str, Any]]:
    """Programs that need 1.5 times the temporaries and 1.25 times the seconds that were
    predicted.
    """
    return [
        {"case": {}, "failed": "no"},
        *(
            row(
                i,
                "ab"[i % 2],
                temporaries=40.0 + 7 * i,
                compiled=281.0 + i + 1.5 * (40 + 7 * i),
                seconds=10.0 + i,
                cycles=1 + 1.25 * (10 + i),
                corrected=corrected,
            )
            for i in range(8)
        ),
    ]


@pytest.mark.parametrize("corrected", [1.0, 1.2])
def test_learning_from_results(corrected: float):
    """What the predictions were corrected by already is taken out first."""
    found, left_out = corrections(KEY, read(rows(corrected))[KEY])
    assert {one.quantity: one.factor for one in found} == {
        "compute": pytest.approx(1.25),
        "temporaries": pytest.approx(1.5),
    }
    assert "activations" in left_out and "communication" in left_out
    seen = read(rows(corrected))[KEY]["temporaries"]
    assert [s.part for s in seen] == pytest.approx([40.0 + 7 * i for i in range(8)]) and [
        s.fixed for s in seen
    ] == pytest.approx([281.0 + i for i in range(8)])


def test_the_tool_writes_files_that_are_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "results.json").write_text(json.dumps({"rows": rows()}))
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "learn_corrections.py",
            str(tmp_path / "results.json"),
            "--out",
            str(tmp_path / "learned"),
        ],
    )
    learn_corrections.main()
    written = json.loads((tmp_path / "learned" / file_name(KEY)).read_text())
    assert file_name(KEY) == "v5e-libtpu-0.0.42.json"
    known = tuple(Correction.from_json(entry) for entry in written)
    assert [one.factor for one in applied(topology("v5e:2x2"), known)] == [
        pytest.approx(1.25),
        UNKNOWN_MARGIN,
        pytest.approx(1.5),
    ]
    said = capsys.readouterr().out
    table = "".join(line.split("#")[0] + "\n" for line in said.splitlines())
    import tomllib

    assert tomllib.loads(table)["corrections"] == {"compute": 1.25, "temporaries": 1.5}


def test_which_corrections_apply():
    old = Correction(chip="h100", versions=(("jaxlib", "0.9.9"),), factor=2.0, n=4, **PATH)
    new = replace(old, versions=(("jaxlib", "0.10.2"),), factor=3.0)
    other = replace(old, chip="v5e")
    where = topology("2*h100:8")
    assert [one.factor for one in applied(where, (new, old, other))] == [
        UNKNOWN_MARGIN,
        3.0,
    ]
    own = replace(where, corrections={"temporaries": 1.5, "compute": 1.1})  # pyright: ignore[reportArgumentType]
    assert [(one.quantity, one.factor, one.n) for one in applied(own, (new, old))] == [
        ("compute", 1.1, 0),
        ("margin", UNKNOWN_MARGIN, 0),
        ("temporaries", 1.5, 0),
    ]
    none = (("margin", 1.0), ("temporaries", 1.0))
    assert applied(replace(where, corrections=none), (new,)) == ()
    assert Topology.from_json(own.to_json()) == own


def test_the_margin_is_the_largest_that_is_known():
    """Of all compilers of the chip, else of the vendor's chips; devices of none are simulated."""
    old = Correction(
        chip="h100",
        versions=(("jaxlib", "0.10.2"),),
        factor=1.06,
        n=4,
        **{**PATH, "quantity": "margin"},
    )
    new = replace(old, versions=(("jaxlib", "0.12.0"),), factor=1.03)
    tpu = replace(old, chip="v5e", factor=1.2)

    def held(where: str, *known: Correction) -> list[tuple[float, int, bool]]:
        found = applied(topology(where), known)
        return [(one.factor, one.n, one.unknown) for one in found]

    assert held("h100:8", old, new, tpu) == held("h100:8", new, old) == [(1.06, 4, False)]
    assert held("a100:8", new, tpu) == [(1.03, 4, False)]
    assert held("v5p:2x2x1", new, tpu) == [(1.2, 4, False)]
    assert held("v5p:2x2x1", new) == [(UNKNOWN_MARGIN, 0, True)]
    assert held("cpu:8", new, tpu) == []
    own = replace(topology("h100:8"), corrections=(("margin", 1.3),))
    assert margin(own) == 1.3 and fitting_bytes(own) == own.chip.usable_bytes / 1.3
    assert margin(without_margin(own)) == margin(without_margin(topology("a100:8"))) == 1


@pytest.mark.parametrize("factor", [0.9, 0.0, -1.0, float("nan"), "1.1", True])
def test_a_margin_is_at_least_one(factor: object):
    with pytest.raises(TopologyError, match="margin is"):
        replace(topology("h100:8"), corrections=(("margin", factor),))  # pyright: ignore[reportArgumentType]


@pytest.mark.long
def test_a_plan_leaves_the_margin_free_and_says_so():
    where = topology("h100:4")
    free = planner.search(workload().problem, without_margin(where), workload=workload())
    peak = free.estimate.device_bytes.peak
    chip = replace(where.chip, hbm_bytes=int(peak * 1.05), reserved_bytes=0)
    narrow = replace(where, chip=chip, corrections=(("margin", 1.1),))
    tight = planner.search(workload().problem, without_margin(narrow), workload=workload())
    # a full memory may change the ZeRO stage of equally fast plans, not their seconds
    assert tight.estimate.step_seconds == free.estimate.step_seconds
    lean = planner.search(workload().problem, narrow, workload=workload())
    assert lean.estimate.device_bytes.peak * 1.1 <= chip.usable_bytes
    assert lean.estimate.step_seconds >= free.estimate.step_seconds and lean.estimate.margin == 1.1
    text = explain(lean, topology=narrow)
    assert "10.0% more than predicted" in " ".join(text.split())
    assert [line.split()[0] for line in text.splitlines() if "margin" in line] == ["margin"]


def program(predicted: float, compiled: float, family: str) -> dict[str, Any]:
    """A compiled program, by shares of a v5e's memory."""
    usable = topology("v5e:2x2").chip.usable_bytes
    return {
        "case": {"model": family, "topology": "v5e:2x2"},
        "versions": dict(KEY[1]),
        "plan": {"mesh": {}},
        "device_bytes": {
            "predicted": {"peak": predicted * usable},
            "compiled": {"peak": compiled * usable},
        },
    }


def test_the_margin_is_learned_from_what_programs_need():
    """Beyond the prediction: of themselves where they take half of a device, of the device where
    they do not.
    """
    large = [program(0.5, 0.5 * (1 + i / 200), "ab"[i % 2]) for i in range(9)]
    staged = {**program(0.5, 0.9, "a"), "plan": {"mesh": {"stage": 2}}}
    seen = learn_margins.read([*large, program(0.01, 0.02, "b"), staged, {"failed": "no"}])
    learned = learn_margins.learn(KEY, seen[KEY])
    assert isinstance(learned, Correction) and learned.n == 10
    assert learned.factor == pytest.approx(1.04)
    assert learned.held_out_error == pytest.approx(1.04 / 1.035 - 1)
    odd = learn_margins.read([*large, program(0.01, 0.11, "b")])
    worse = learn_margins.learn(KEY, odd[KEY])
    assert isinstance(worse, Correction) and worse.factor == pytest.approx(1.115)  # 1 / 0.9
    few = learn_margins.learn(KEY, seen[KEY][:7])
    assert few == "7 programs of 2 families; it takes 8 of 2"


@pytest.mark.parametrize("name", sorted({one.chip for one in room.learned_corrections()}))
def test_every_program_behind_a_margin_fits_where_it_is_predicted_to(name: str):
    """However many bytes a device has besides, from the share of a device that the program takes."""
    for one in room.learned_corrections():
        if one.quantity != "margin" or one.chip != name:
            continue
        usable = CATALOG[name].chip.usable_bytes
        for program in one.evidence:
            assert learn_margins.needed(program, usable) <= one.factor, program.case


def priced(
    *factors: tuple[str, float], **quantities: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds and bytes that quantities add up to under factors, with parameters cut at rest."""
    where = replace(topology("h100:4"), corrections=factors)
    mesh = MeshShape(fsdp=4)
    placed = place(mesh, where)
    assert placed is not None
    c, tally = Meshes.placed([(mesh, placed)], [1], where), np.zeros((2, ROWS, 1))
    for name, value in quantities.items():
        if name in Quantity.__members__:
            tally[OUTSIDE_LAYERS, Quantity[name]] = value
    model, pricer = ModelFacts(layer_counts=(), batch_bytes=0.0, state_bytes=0.0), Pricer(where)
    known = step_costs(tally, tally, [tally], model, pricer, c)
    roles = {
        name: np.array([[0.0], [value]])
        for name, value in quantities.items()
        if name not in Quantity.__members__
    }
    known = replace(known, collectives=replace(known.collectives, **roles))
    decisions = Decisions(zero=3, context="all-gather")
    totals = combine(known, Plans(decisions=decisions, model=model, pricer=pricer, meshes=c))
    return {name: float(found[0]) for name, found in totals.seconds.items()}, {
        name: float(found[0]) for name, found in totals.device_bytes.items()
    }


@pytest.mark.parametrize(
    ("part", "quantity"),
    [
        ("temporaries", "TEMPORARY"),
        ("activations", "SAVED"),
        ("activations", "COPY_SHARDED"),
        ("communication", "GATHERED"),
    ],
)
def test_memory_is_multiplied_where_the_factor_says(part: str, quantity: str):
    quantities = {
        "TEMPORARY": 10.0,
        "SAVED": 20.0,
        "GATHERED": 40.0,
        "GRADIENT_SHARDED": 80.0,
        "PARAMETERS_SHARDED": 160.0,
        "STATE_SHARDED": 320.0,
    } | {quantity: 1000.0}
    (seconds, before), (same, after) = (
        priced((part, 1.0), **quantities),
        priced((part, 2.0), **quantities),
    )
    assert before[part] >= 1000 and after == {**before, part: 2 * before[part]} and same == seconds


def test_compute_is_multiplied_and_hides_more():
    (before, size), (after, same) = (
        priced(COMPUTE=1.0, block=0.5, scatter=3.0),
        priced(("compute", 1.5), COMPUTE=1.0, block=0.5, scatter=3.0),
    )
    assert same == size and after["compute"] == 1.5 * before["compute"] == 1.5
    assert before["exposed"] == pytest.approx(0.5 + 3.0 - 0.9 * 1.0) and after[
        "exposed"
    ] == pytest.approx(0.5 + 3.0 - 0.9 * 1.5)
    assert {**after, "compute": 0, "exposed": 0} == {**before, "compute": 0, "exposed": 0}


@pytest.mark.long
@pytest.mark.matrix
def test_the_search_is_still_that_of_brute_force():
    """A factor on temporaries makes plans not fit that would without it."""
    where = without_margin(topology("h100:2"))
    roomy = planner.search(workload().problem, where, workload=workload())
    tight = replace(
        where,
        chip=replace(where.chip, hbm_bytes=roomy.estimate.device_bytes.peak + 1, reserved_bytes=0),
    )
    corrected = replace(
        tight, corrections=(("temporaries", 4.0), ("activations", 2.0), ("margin", 1.1))
    )
    full = planner.search(workload().problem, tight, workload=workload())
    assert full.estimate.step_seconds == roomy.estimate.step_seconds
    alike = {"offload": [], "remat": "none"}  # no mixtures, which the ranking lacks
    found = planner.search(workload().problem, corrected, alike, workload=workload())
    prices = [
        price(workload(), corrected, entry.candidate)
        for entry in planner.ranked(workload().problem, tight, alike, workload=workload())
    ]
    fitting = [
        float(p.step_seconds[0])
        for p in prices
        if float(p.peak_bytes[0]) <= fitting_bytes(corrected)
    ]
    assert 0 < len(fitting) < len(prices) and found.estimate.step_seconds == pytest.approx(
        min(fitting), rel=1e-9
    )


@pytest.mark.long
def test_the_user_is_told(monkeypatch: pytest.MonkeyPatch):
    entry = Correction(
        chip="h100",
        versions=(("jaxlib", "0.10.2"), ("xla-cuda", "13.1")),
        factor=1.25,
        n=24,
        **PATH,
    )
    monkeypatch.setattr(room, "learned_corrections", lambda: (entry,))
    plan = planner.search(workload().problem, "h100:4", PIN, workload=workload())
    assert plan.estimate.corrections == (
        Applied(quantity="margin", factor=UNKNOWN_MARGIN, unknown=True),
        Applied(quantity="temporaries", factor=1.25, n=24, versions=entry.versions),
    )
    assert Plan.from_json(plan.to_json()) == plan
    said = (
        "the prediction is corrected: temporaries x 1.25, learned from 24 programs compiled with"
        " jaxlib 0.10.2 xla-cuda 13.1"
    )
    assert said in " ".join(explain(plan).split())
    assert list(other_compiler(plan, {"jaxlib": "0.10.2", "xla-cuda": "13.1"})) == []
    (finding,) = other_compiler(plan, {"jaxlib": "0.12.0", "xla-cuda": "13.1"})
    assert finding.severity == "info"
    assert (
        finding.message
        == "the correction of temporaries by 1.25 was learned with another compiler: jaxlib 0.10.2"
        " (0.12.0 here)."
    )
    assert (
        planner.search(workload().problem, "cpu:4", PIN, workload=workload()).estimate.corrections
        == ()
    )


def test_a_topology_file_brings_its_own(tmp_path: Path):
    text = (
        'chip = "h100"\n[[tiers]]\nname = "NVLink"\nkind = "switch"\nshape = [4]\nbytes_per_s ='
        " 450e9\n[corrections]\n"
    )
    path = tmp_path / "mine.toml"
    path.write_text(text + "temporaries = 1.5\n")
    plan = planner.search(workload().problem, str(path), PIN, workload=workload())
    assert "the prediction is corrected: temporaries x 1.5, from the topology file" in " ".join(
        explain(plan).split()
    )
    path.write_text(text + 'temporary = 1.5\ncompute = -1\nactivations = "much"\n')
    with pytest.raises(TopologyError) as caught:
        topology(str(path))
    assert (
        str(caught.value)
        == f"the corrections of topology {str(path)!r} are not usable:\n  - 'temporary' is unknown;"
        " quantities are compute, activations, temporaries, communication, margin\n  - activations"
        " is 'much'; it must be a positive number\n  - compute is -1; it must be a positive number"
    )
    path.write_text(text.replace("[corrections]\n", "").replace("chip", "corrections = 3\nchip"))
    with pytest.raises(TopologyError, match="'corrections' is not a table from quantity to factor"):
        topology(str(path))


def test_what_comes_with_shardlib_can_be_read():
    for entry in room.learned_corrections():
        assert entry.n == len(entry.evidence) >= 4
        if entry.quantity != "margin":
            assert entry.held_out_error < entry.median_error_before
