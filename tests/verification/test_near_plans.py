"""Plans whose predictions are near are run where the devices are attached, and the fastest wins."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib import models
from shardlib.frontend.timed import example, is_attached
from shardlib.frontend.verified import NEAR, one_of_each_mesh, refine
from shardlib.machines.topology import topology
from shardlib.planner.plan import Plan, Ranked
from shardlib.report.text import explain
from tests.verification.programs import CONFIG
from tests.verification.test_refine import POD, MadeUp, entries


class Runs:
    """Made-up steps: so many seconds, by the place of a plan among those that are run."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.ran = seconds, list[Plan]()

    def __call__(self, plans: Sequence[Plan]) -> Sequence[float]:
        self.ran = list(plans)
        return self.seconds[: len(plans)]


def kernels(*seconds: float) -> MadeUp:
    """A compiler of so many seconds of kernels, plan by plan, beside which nothing counts."""
    count = itertools.count()
    return MadeUp(kernels=lambda _: seconds[next(count)])


def test_the_fastest_when_run_is_chosen():
    runs = Runs(0.30, 0.20, 0.209)
    chosen = refine(entries(), 3, POD, kernels(10.0, 11.0, 12.0), runs)
    record = chosen.refined
    assert record is not None and len(runs.ran) == 3
    assert chosen.decisions == runs.ran[1].decisions
    assert [trial.run_seconds for trial in record.trials] == [0.30, 0.20, 0.209]
    assert [trial.verdict for trial in record.trials] == ["slower", "chosen", "slower"]
    (said,) = [finding for finding in chosen.findings if finding.code == "run-plans"]
    assert said.message.startswith("3 plans predicted within a third of the fastest were run in")
    assert "this one takes 200 ms per step" in said.message
    assert said.message.count("even with it (within 5%) are") == 1
    assert str(record.trials[2].mesh) in said.message
    assert "chosen, 200 ms when run" in explain(chosen)
    assert Plan.from_json(chosen.to_json()).refined == record
    assert "reranked" not in {finding.code for finding in chosen.findings}


@pytest.mark.parametrize(
    ("seconds", "ran"),
    [((10.0, 13.0, 13.4), 2), ((10.0, 13.4, 14.0), 0), ((10.0, 10.0, 10.0), 3)],
    ids=["one is far", "all others are far", "equal"],
)
def test_plans_within_a_third_of_the_best_are_run(seconds: tuple[float, ...], ran: int):
    runs = Runs(1.0, 2.0, 3.0)
    chosen = refine(entries(), 3, POD, kernels(*seconds), runs)
    assert len(runs.ran) == ran and chosen.refined is not None
    assert sum(trial.run_seconds > 0 for trial in chosen.refined.trials) == ran


@pytest.mark.parametrize(("share", "ran"), [(0.6, 0), (0.5, 2), (0.3, 3)])
def test_programs_that_do_not_fit_beside_each_other_are_not_run(share: float, ran: int):
    runs, compiler = Runs(1.0, 2.0, 3.0), kernels(10.0, 10.0, 10.0)
    compiler.peak = lambda _: int(share * POD.chip.usable_bytes)
    refine(entries(), 3, POD, compiler, runs)
    assert len(runs.ran) == ran


def test_every_mesh_has_its_turn_before_a_second_plan_of_one():
    meshes = [{"data": 8}, {"data": 8}, {"fsdp": 8}, {"data": 8}, {"tensor": 8}, {"fsdp": 4}]
    first = next(iter(entries()))

    def entry(place: int) -> Ranked:
        decisions = replace(first.candidate.decisions, mesh=shardlib.MeshShape(**meshes[place]))
        candidate = replace(first.candidate, decisions=decisions)
        seconds = 1 + place / 10 if place < 5 else 2 * NEAR
        return replace(first, candidate=candidate, seconds=seconds, peak_bytes=float(place))

    order = [one.peak_bytes for one in one_of_each_mesh(map(entry, range(6)))]
    assert order[:2] == [0, 2] and sorted(order) == [0, 1, 2, 3, 4, 5]


def test_devices_of_another_kind_or_too_few_are_not_attached():
    assert is_attached(topology("cpu:8")) and is_attached(topology("cpu:4"))
    assert not is_attached(topology("cpu:16")) and not is_attached(topology("h100:8"))


def test_an_abstract_batch_gets_values_that_index_any_table():
    whole = np.full(3, 7.0)
    tree = {
        "ids": jax.ShapeDtypeStruct((64,), jnp.int32),
        "image": jax.ShapeDtypeStruct((64,), jnp.bfloat16),
        "mask": jax.ShapeDtypeStruct((64,), jnp.bool_),
        "given": whole,
    }
    filled = example(tree)
    assert set(filled["ids"].tolist()) == {0, 1} and filled["ids"].dtype == np.int32
    assert filled["image"].dtype == jnp.bfloat16 and filled["mask"].dtype == np.bool_
    assert float(np.std(filled["image"].astype(np.float32))) > 0.5
    assert filled["given"] is whole


@pytest.mark.long
def test_plans_for_attached_devices_are_run():
    init, loss = models.build(CONFIG)
    batch = models.example_batch(CONFIG, 8, 16)
    chosen = shardlib.plan(
        init, loss, optax.adamw(1e-3), batch, topology="cpu:2", refine=2, name="tiny"
    )
    assert chosen.refined is not None
    ran = [trial for trial in chosen.refined.trials if trial.run_seconds]
    near = [
        trial
        for trial in chosen.refined.trials
        if trial.survived
        and trial.compiled_seconds
        <= NEAR * min(other.compiled_seconds for other in chosen.refined.trials)
    ]
    assert ran == (near if len(near) > 1 else [])
    if ran:
        best = min(ran, key=lambda trial: trial.run_seconds)
        assert best.verdict == "chosen" and best.mesh == chosen.mesh
