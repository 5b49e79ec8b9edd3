"""Plans chosen by what the compiler makes of them: the CPU compiler for real, and made-up compilers
for what it never does.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import optax
import pytest

import shardlib
from shardlib import models
from shardlib.cost.collectives import collective_cost
from shardlib.errors import (
    InfeasibleError,
    LayoutError,
    MissingPackageError,
    PlanError,
    TopologyError,
    VerificationError,
)
from shardlib.findings import Finding
from shardlib.frontend.verified import COMPILATIONS, one_of_each_policy, refine
from shardlib.machines.topology import Topology, place, topology
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan, Ranked
from shardlib.report.text import explain
from shardlib.verification.report import CompiledStep, Verification
from tests.planner.worlds import workload
from tests.verification.programs import CONFIG

INIT, LOSS = models.build(CONFIG)
BATCH = models.example_batch(CONFIG, 16, 32)
BOX = """
[chip]
name = "box"
vendor = "cpu"
flops_per_s = {{ float32 = 1e10 }}
hbm_bytes = {hbm_bytes}
hbm_bytes_per_s = 1e10
[[tiers]]
name = "memory"
kind = "memory"
shape = [8]
bytes_per_s = 5e9
latency_s = 1e-4
"""


@pytest.fixture
def box(tmp_path: Path):
    """Writes a topology file of eight simulated devices with little memory."""

    def write(hbm_bytes: int, more: str = "") -> str:
        path = tmp_path / "box.toml"
        path.write_text(BOX.format(hbm_bytes=hbm_bytes) + more)
        return str(path)

    return write


def plan(where: str | Topology, **options) -> Plan:
    return shardlib.plan(
        INIT, LOSS, optax.adamw(1e-3), BATCH, topology=where, name="tiny", **options
    )


def verify(where: str, chosen: Plan) -> Verification:
    return shardlib.verify(
        INIT, LOSS, optax.adamw(1e-3), BATCH, topology=where, name="tiny", plan=chosen
    )


@pytest.mark.long
def test_the_record_is_what_the_compiler_makes(box):
    where = box(10**9)
    chosen = plan(where, refine=2)
    record = chosen.refined
    assert record is not None and record.wanted == len(record.trials) == 2 and not record.bounded
    found = verify(where, replace(chosen, refined=None))
    assert found.compiled is not None and dict(record.device_bytes) == dict(
        found.compiled.device_bytes
    )
    spans = place(chosen.mesh, topology(where))
    assert spans is not None
    moved = sum(
        c.count
        * collective_cost(
            c.kind, [s for axis in c.axes for s in spans[axis]], topology(where)
        ).seconds(float(c.bytes))
        for c in found.compiled.collectives
    )
    kernels = chosen.estimate.seconds
    assert record.kernels == "model" and record.step_seconds == pytest.approx(
        kernels.compute + kernels.optimizer + kernels.overhead + moved
    )  # nothing hides on a CPU
    assert min(trial.compiled_seconds for trial in record.trials) == record.step_seconds
    assert Plan.from_json(chosen.to_json()) == chosen
    assert (
        "What the compiler said\n" in explain(chosen)
        and dict(chosen.search.counts)["compiled"] == 2
    )


@pytest.mark.long
def test_a_plan_that_the_compiler_refutes_is_cut(box):
    """The model is told that activations and temporaries are small, so that it believes in plans
    that do not fit.
    """
    believing = "\n[corrections]\nactivations = 0.2\ntemporaries = 0.2\n"
    where = box(10**9, believing)
    predicted = plan(where)
    found = verify(where, predicted)
    assert found.compiled is not None
    size = int(0.8 * found.compiled.device_bytes["peak"])
    where = box(size, believing)
    assert (
        plan(where).decisions == predicted.decisions
    )  # the model says it fits, the compiler says no
    chosen = plan(where, refine=2)
    record = chosen.refined
    assert (
        record is not None and record.peak_bytes <= size and chosen.decisions != predicted.decisions
    )
    first = record.trials[0]
    assert (first.verdict, first.compiled_bytes) == (
        "out-of-memory",
        found.compiled.device_bytes["peak"],
    )
    assert (
        first.predicted_seconds == pytest.approx(predicted.estimate.step_seconds)
        and sum(trial.verdict == "chosen" for trial in record.trials) == 1
    )
    again = verify(where, chosen)
    assert again.compiled is not None and again.compiled.device_bytes["peak"] == record.peak_bytes


@pytest.mark.long
def test_no_refinement_is_the_search_alone(box):
    where = box(10**9)
    without, alone = plan(where, refine=0), plan(where)
    assert without.refined is None and (without.decisions, without.estimate, without.findings) == (
        alone.decisions,
        alone.estimate,
        alone.findings,
    )


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_what_refine_cannot_be(value):
    with pytest.raises(PlanError) as caught:
        plan("cpu:8", refine=value)
    assert (
        str(caught.value)
        == f"refine is {value!r}; it is the number of plans to compile\nTry: refine=3, or refine=0"
        " for none"
    )


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name == "libtpu" else found(name, package),
    )
    with pytest.raises(MissingPackageError, match=r"pip install 'shardlib\[tpu\]'"):
        plan("v5e:2x4", refine=1)


@pytest.mark.long
def test_command_line(box, shell: Callable[..., tuple[int, str, str]]):
    words = ("plan", "demo", "-b", "8", "-s", "16", "-t")
    code, out, _ = shell(*words, box(10**9), "--refine", "1", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["refined"]["wanted"] == 1 and [
        trial["verdict"] for trial in data["refined"]["trials"]
    ] == ["chosen"]
    assert (
        data["refined"]["device_bytes"]["peak"] > 0
        and data["estimate"]["step_seconds"] != data["refined"]["step_seconds"]
    )
    assert shell(*words, "cpu:8", "--refine", "-1")[0] == 2


POD = topology("v5e:2x4")


class MadeUp:
    """A compiler whose memory and kernels are given by functions of the plan; remembers what it was
    asked.
    """

    def __init__(
        self, *, peak=lambda plan: 1000, kernels=lambda plan: 1e-3, failure=lambda plan: None
    ):
        self.peak, self.kernels, self.failure, self.asked = peak, kernels, failure, []

    def __call__(self, chosen: Plan) -> Verification:
        self.asked.append(chosen)
        failure = self.failure(chosen)
        if isinstance(failure, Exception):
            raise failure
        if failure:
            return Verification(
                plan=chosen,
                compiled=None,
                compile_seconds=1.0,
                versions={},
                findings=(Finding(code=failure, severity="error", message="it says so"),),
            )
        compiled = CompiledStep(
            device_bytes={
                "arguments": 1,
                "outputs": 1,
                "aliased": 1,
                "temporaries": 1,
                "peak": self.peak(chosen),
            },
            collectives=chosen.estimate.collectives,
            wire_bytes=0.0,
            compute_seconds=self.kernels(chosen),
            device_kind="made up",
        )
        return Verification(
            plan=chosen,
            compiled=compiled,
            compile_seconds=1.0,
            versions={"xla": "0"},
            findings=(
                Finding(code="idle-axis", severity="warning", message="of the chosen one"),
                Finding(code="x", severity="info", message="not told"),
            ),
        )


def refined(compiler: MadeUp, wanted: int) -> Plan:
    return refine(entries(), wanted, POD, compiler)


@functools.cache
def ranking():
    """The ranking of all plans, made as far as a test reads it, once for all tests."""
    return itertools.tee(planner.ranked(workload().problem, POD, workload=workload()), 1)[0]


def entries():
    return copy.copy(ranking())


@pytest.mark.long
def test_plans_are_asked_about_in_the_order_of_the_ranking_and_ranked_again():
    first = [entry.build() for entry, _ in zip(entries(), range(4), strict=False)]
    compiler = MadeUp(kernels=lambda plan: 1e-3 if plan.decisions == first[2].decisions else 5e-3)
    chosen = refined(compiler, 4)
    assert [plan.decisions for plan in compiler.asked] == [plan.decisions for plan in first]
    assert chosen.decisions == first[2].decisions and chosen.estimate == first[2].estimate
    assert chosen.refined is not None and [trial.verdict for trial in chosen.refined.trials] == [
        "slower",
        "slower",
        "chosen",
        "slower",
    ]
    assert (
        chosen.refined.kernels == "compiler"
        and chosen.refined.seconds.compute == 1e-3
        and chosen.refined.seconds.optimizer == 0
    )
    codes = [finding.code for finding in chosen.findings]
    assert "reranked" in codes and "idle-axis" in codes and "x" not in codes
    assert chosen.search.gap == pytest.approx(
        1 - first[0].estimate.step_seconds / first[2].estimate.step_seconds
    )


@pytest.mark.long
def test_the_fastest_of_each_remat_policy_has_its_turn_first():
    policies = ["dots", "full", "dots", "none", "full"]
    decisions = replace(next(iter(entries())).candidate.decisions, remat="dots")

    def ranked(at: int, remat: str, seconds: float) -> Ranked:
        one = next(iter(entries()))
        chosen = replace(one.candidate, decisions=replace(decisions, remat=remat))
        return replace(one, candidate=chosen, seconds=seconds, peak_bytes=float(at))

    near = [ranked(at, remat, 1 + at / 20) for at, remat in enumerate(policies)]
    assert [one.peak_bytes for one in one_of_each_policy(near)] == [0, 1, 3, 2, 4]
    far = [ranked(at, remat, 1 + at / 10) for at, remat in enumerate(policies)]
    assert [one.peak_bytes for one in one_of_each_policy(far)] == [0, 1, 2, 3, 4]
    assert list(one_of_each_policy([])) == []


def test_a_tie_goes_to_the_prediction():
    chosen = refined(
        MadeUp(
            kernels=lambda plan: (
                1.0 - plan.estimate.seconds.exposed - plan.estimate.seconds.overhead
            )
        ),
        1,
    )
    assert (
        chosen.decisions == planner.search(workload().problem, POD, workload=workload()).decisions
    )


def test_survivors_are_counted_and_refuted_plans_are_not():
    compiler = MadeUp()
    compiler.failure = lambda plan: {1: "compiler-abort", 3: LayoutError("no such cut")}.get(
        len(compiler.asked)
    )
    chosen = refined(compiler, 2)
    assert chosen.refined is not None and not chosen.refined.bounded
    verdicts = [trial.verdict for trial in chosen.refined.trials]
    assert (verdicts[0], verdicts[2], len(verdicts)) == (
        "compiler-abort",
        "not-lowered",
        4,
    ) and sorted(verdicts[1::2]) == ["chosen", "slower"]
    assert chosen.refined.trials[2].message == "no such cut"
    assert (
        "the compiler refused 2 of the 4 plans that were compiled: 1 compiler-abort, 1 not-lowered."
        in {finding.message for finding in chosen.findings}
    )
    assert dict(chosen.search.counts)["refuted"] == 2


@pytest.mark.long
def test_the_number_of_compilations_is_bounded():
    usable = POD.chip.usable_bytes
    best = planner.search(workload().problem, POD, workload=workload())
    compiler = MadeUp(
        failure=lambda plan: None if plan.decisions == best.decisions else "compile-error"
    )
    chosen = refined(compiler, 3)
    assert (
        len(compiler.asked) == 3 * COMPILATIONS
        and chosen.refined is not None
        and chosen.refined.bounded
    )
    assert next(f for f in chosen.findings if f.code == "refine-bound").message.startswith(
        "1 of 3 wanted plans survived the compiler: the bound of 3"
    )
    with pytest.raises(
        VerificationError,
        match=(
            r"refutes each of the 6 plans that were compiled for v5e:2x4:\n(  - .*: compile-error:"
            r" it says so\n){6}Try: more"
        ),
    ):
        refined(MadeUp(failure=lambda plan: "compile-error"), 2)
    with pytest.raises(
        InfeasibleError,
        match=(
            f"out-of-memory: the program needs .* per device and there are {usable / 2**30:.1f} GiB"
        ),
    ):
        refined(MadeUp(peak=lambda plan: usable + 1), 1)


@pytest.mark.long
def test_plans_like_one_out_of_memory_are_passed_over():
    """Those with the same recomputation that are predicted to need as much; nothing is passed over
    otherwise.
    """
    usable = POD.chip.usable_bytes
    lean = sorted(entry.peak_bytes for entry in entries())[10] + 16  # parts are rounded to bytes
    compiler = MadeUp(peak=lambda plan: int(usable * plan.estimate.device_bytes.peak / lean))
    chosen = refined(compiler, 1)
    assert chosen.estimate.device_bytes.peak <= lean * 1.001 and chosen.refined is not None
    assert len(compiler.asked) <= 3 and chosen.refined.passed_over > 0
    order = {
        json.dumps(entry.build().decisions): i
        for i, entry in enumerate(entries())
        if entry.peak_bytes <= lean
    }
    assert min(order.values()) == order[json.dumps(chosen.decisions)]


def test_what_a_stand_in_needs_beyond_the_kernel_is_not_held_against_a_plan():
    """Attention in blocks is compiled where a kernel will run, and needs more memory."""
    usable, extra = POD.chip.usable_bytes, 1 << 30
    compiler = MadeUp(peak=lambda plan: usable + extra)

    def priced(chosen: Plan) -> Verification:
        found = compiler(chosen)
        memory = chosen.estimate.device_bytes
        memory = replace(memory, temporaries=memory.temporaries + extra)
        estimate = replace(chosen.estimate, device_bytes=memory)
        return replace(found, plan=replace(chosen, estimate=estimate))

    chosen = refine(entries(), 1, POD, priced)
    assert chosen.refined is not None and chosen.refined.peak_bytes == usable
    assert [trial.compiled_bytes for trial in chosen.refined.trials] == [usable]


def test_candidates_that_run_out_are_a_finding():
    pin = {"mesh": {"data": 8}, "remat": "none", "microbatches": 1}
    ranked = planner.ranked(workload().problem, POD, pin, workload=workload())
    chosen = refine(ranked, 3, POD, MadeUp())
    assert (
        next(f for f in chosen.findings if f.code == "refine-bound").message
        == "1 of 3 wanted plans survived the compiler: there are no more candidates."
    )


def test_errors_that_concern_every_plan_are_not_swallowed():
    for error in (MissingPackageError("no compiler"), TopologyError("no such machine")):
        with pytest.raises(type(error)):
            refined(MadeUp(failure=lambda plan, error=error: error), 2)


@pytest.mark.compiler("tpu")
def test_tpu():
    chosen = plan("v5e:2x2", refine=2)
    assert (
        chosen.refined is not None
        and chosen.refined.kernels == "compiler"
        and chosen.refined.seconds.compute > 0
    )
