"""Verification of plans and programs with the compiler, the best of several plans by its figures,
and the best plan for every number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import optax

from shardlib import wings
from shardlib.annotation.model import Init
from shardlib.annotation.trees import Filter, Tree
from shardlib.cost.framework import INDISTINGUISHABLE
from shardlib.cost.pricing import reprice
from shardlib.cost.roofline import without_margin
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import (
    InfeasibleError,
    MissingPackageError,
    PinError,
    ShardlibError,
    TopologyError,
    VerificationError,
    raise_all,
)
from shardlib.findings import Finding, diagnostic
from shardlib.frontend.choice import island_batch, measured_under_load
from shardlib.frontend.lowered import lower
from shardlib.frontend.model import Loss, TracedModel, problem, require_arguments
from shardlib.frontend.timed import is_attached, step_seconds
from shardlib.graph import Problem
from shardlib.lowering.program import Options
from shardlib.lowering.training_program import TrainingProgram
from shardlib.machines.topology import Topology, TopologyLike, of_size
from shardlib.planner.parts import CHOSEN, SLOWER, Refined, Trial
from shardlib.planner.plan import Plan, Ranked
from shardlib.planner.questions import pinned, priced_on, with_unlimited_memory
from shardlib.planner.scaling import ScalingCurve, curve
from shardlib.planner.search import ranked, search
from shardlib.processes.progress import Progress
from shardlib.report.elements import bytes_text, seconds_text
from shardlib.verification.isolation import PLATFORMS, Limits, require_compiler
from shardlib.verification.report import CompiledStep, Verification
from shardlib.verification.verify import verify_program


def scale(
    init: Init,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree | Callable[[int], Tree],
    *,
    topology: TopologyLike,
    devices: Sequence[int],
    pin: PinMapping | None = None,
    batch_axes: Tree = None,
    name: str | None = None,
    wrt: Filter = None,
    rows: str = "prove",
) -> ScalingCurve:
    """The best plan for every number of devices of a family of machines.

    Args:
        init: a model, see `shardlib.plan`; so all that says no more here.
        loss: (model, batch) -> scalar or (scalar, metrics).
        optimizer: an optax transformation.
        batch: the global batch, for strong scaling: the model is traced once; or a function from a
            number of devices to the batch, for weak scaling: it is traced once per number.
        topology: a member of the family, "16*h100:8" or "v5e:16x16" (`shardlib.machines.topology`).
        devices: numbers of devices, in any order; one point of the curve each.
        pin: decisions fixed by hand, in the plan of every point.
        batch_axes: logical axes of the batch.
        name: what to call the model.
        wrt: what is trained.
        rows: "prove" or "mean", how the loss depends on the rows of the batch.

    Returns:
        The curve: a point for every number of devices, ascending, with its plan; one where no plan
        fits or the pins allow none says why. `print` shows it as a table.

    Raises:
        ShardlibError: as `shardlib.plan`, `InfeasibleError` apart.
        TopologyError: the topology does not parse, or its family has no machine of that size.
    """
    require_arguments(
        "scale", loss=loss, optimizer=optimizer, batch=batch, topology=topology, pin=pin, name=name
    )
    machines = [of_size(topology, number) for number in devices]
    weak, exchange = callable(batch), Pins.parse(pin).exchange
    traced: dict[int, Problem] = {}
    fastest: dict[int, Plan] = {}

    def planned(machine: Topology) -> Plan:
        key = machine.devices if weak else 0
        if key not in traced:
            traced[key] = problem(
                init,
                loss,
                optimizer,
                island_batch(batch(key) if callable(batch) else batch, batch_axes, None, pin),
                batch_axes=batch_axes,
                name=name,
                wrt=wrt,
                rows=rows,
            )
        best = fastest.get(key)
        load = best.source.workload if best is not None and best.source is not None else None
        try:
            plan = search(traced[key], machine, pin, workload=load)
        except TopologyError as error:
            if exchange.islands == 1:
                raise
            raise PinError(str(error)) from error  # islands are not parts of this machine
        if (
            best is not None
            and exchange.islands == 1
            and best.estimate.step_seconds < plan.estimate.step_seconds
        ):
            plan = (
                priced_on(best, machine) or plan
            )  # a part of the machine is faster than all of it
        fastest[key] = plan
        return plan

    found = curve(name or "the model", "weak" if weak else "strong", machines, planned)
    model = next(iter(traced.values())).model if traced else found.model
    return replace(found, model=model)


# --------------------------------------------------------------------------------------------------
# The best of several plans by the compiler's figures, and estimates of a given plan.


def with_compiler(machine: Topology) -> Topology:
    """The machine, if its compiler is installed."""
    require_compiler(PLATFORMS[machine.chip.vendor])
    return machine


def priced_as_compiled(model: TracedModel, plan: Plan, machine: Topology) -> Plan:
    """The plan with the estimate of what the compiler is given: where there is no GPU, attention in
    blocks stands in the place of the kernel of cuDNN, and needs the memory of its scores.
    """
    if plan.attention != "cudnn":
        return plan
    pins = pinned(plan).replace(attention="blocks")
    try:
        listed = search(model.traced.problem, with_unlimited_memory(machine), pins)
    except (InfeasibleError, PinError):
        return plan
    return replace(plan, estimate=listed.estimate)


def refined_by_compiler(
    model: TracedModel,
    machine: Topology,
    pin: PinMapping | None,
    wanted: int,
    limits: Limits | None,
) -> Plan:
    """The best of the first `wanted` plans that the compiler of the machine confirms; no margin of
    memory is held back, as the compiler says what is needed.

    Args:
        limits: seconds and bytes that the compiler may take for each.
    """

    def compiled(candidate: Plan) -> Verification:
        priced = priced_as_compiled(model, candidate, machine)
        return verify_program(lower(model, priced, abstract=True), machine, limits)

    def run(plans: Sequence[Plan]) -> list[float]:
        return step_seconds([lower(model, plan) for plan in plans])

    machine = without_margin(machine)
    ranking = ranked(model.traced.problem, machine, pin)
    here = run if is_attached(machine) else None
    if here is not None:
        ranking = one_of_each_mesh(ranking)
    return refine(ranking, wanted, machine, compiled, here).with_findings(
        *model.model.findings, *measured_under_load(machine)
    )


def verified(
    model: TracedModel,
    plan: Plan,
    machine: Topology,
    limits: Limits | None,
    options: Options | None,
) -> Verification:
    """A plan against what the compiler makes of its step, and of the meetings of its islands."""
    if plan.exchange.islands > 1:
        several = wings.islands("verification")
        return several.verified(model, plan, machine, limits, options)
    program = lower(model, priced_as_compiled(model, plan, machine), abstract=True)
    return verify_program(program, machine, limits, options)


def verified_program(
    program: TrainingProgram, machine: Topology, limits: Limits | None, options: Options | None
) -> Verification:
    """The same of a program."""
    plan, step = program.plan, program.loss_program
    if step is None:
        return program.verify(limits=limits, options=options)
    if plan.exchange.islands > 1:
        several = wings.islands("verification")
        return several.verify_islands(plan, plan.exchange, step, machine, limits, options)
    return verify_program(step, machine, limits, options)


# --------------------------------------------------------------------------------------------------
# Findings of refinement: another plan than predicted, plans that the compiler refuted, too few that
# survived.

#: Compilations for each plan that is wanted, at most.
COMPILATIONS = 3


def trial_name(trial: Trial) -> str:
    return f"{trial.mesh}{f' ({trial.summary})' if trial.summary else ''}"


def search_counts(plan: Plan, trials: tuple[Trial, ...]) -> tuple[tuple[str, int], ...]:
    """Outcomes of the search, with how many plans were compiled and how many of these the compiler
    refuted.
    """
    refuted = sum(not trial.survived for trial in trials)
    return (
        *plan.search.counts,
        ("compiled", len(trials)),
        *((("refuted", refuted),) if refuted else ()),
    )


@diagnostic
def refine_findings(record: Refined, chosen: int) -> list[Finding]:
    """Returns what refinement changed: another plan than predicted, plans that were cut, the
    bound.
    """
    findings: list[Finding] = []
    first, best = record.trials[0], record.trials[chosen]
    ran = [trial for trial in record.trials if trial.run_seconds]
    if ran:
        findings.append(_run_finding(best, ran))
    elif chosen and first.survived:
        findings.append(
            Finding(
                code="reranked",
                severity="info",
                message=(
                    f"{trial_name(first)} was predicted to be the fastest; by the compiler's"
                    f" figures it takes {seconds_text(first.compiled_seconds)} per step, and this"
                    " plan"
                    f" {seconds_text(best.compiled_seconds)}."
                ),
            )
        )
    cut = [trial.verdict for trial in record.trials if not trial.survived]
    if cut:
        reasons = ", ".join(f"{cut.count(reason)} {reason}" for reason in dict.fromkeys(cut))
        findings.append(
            Finding(
                code="refuted-plans",
                severity="info",
                message=(
                    f"the compiler refused {len(cut)} of the {len(record.trials)} plans that were"
                    f" compiled: {reasons}."
                ),
            )
        )
    survived = sum(trial.survived for trial in record.trials)
    if record.bounded or survived < record.wanted:
        why = (
            f"the bound of {COMPILATIONS} compilations for each was reached"
            if record.bounded
            else "there are no more candidates"
        )
        findings.append(
            Finding(
                code="refine-bound",
                severity="warning",
                message=f"{survived} of {record.wanted} wanted plans survived the compiler: {why}.",
                hint=(
                    "pin what saves memory, or look at what the compiler says about the plans it"
                    " refutes"
                    if record.bounded
                    else ""
                ),
            )
        )
    return findings


def _run_finding(best: Trial, ran: Sequence[Trial]) -> Finding:
    """Says what the plans took that were run, and which are even with the chosen one."""
    even = [
        trial_name(trial)
        for trial in ran
        if trial is not best and trial.run_seconds <= (1 + INDISTINGUISHABLE) * best.run_seconds
    ]
    return Finding(
        code="run-plans",
        severity="info",
        message=(
            f"{len(ran)} plans predicted within a third of the fastest were run in turns; this one"
            f" takes {seconds_text(best.run_seconds)} per step"
            f" ({seconds_text(best.predicted_seconds)} predicted)"
            + (
                f", and even with it (within {INDISTINGUISHABLE:.0%}) are {', '.join(even)}."
                if even
                else "."
            )
        ),
    )


# --------------------------------------------------------------------------------------------------
# Plans to compile first.
#
# What a compiler keeps for the backward pass is what a cost model knows least about, so the
# fastest plan of every remat policy has its turn before a second one of any policy.

#: Times the seconds of the fastest, up to which a plan has its turn early. Predicted times are up
#: to 19% off the TPU compiler's order (`benchmarks/results/order_by_compiler.json`).
SLACK = 1.25
#: Times the seconds of the fastest, up to which plans are run where the devices are attached.
NEAR = 4 / 3
#: Plans of meshes that had their turn, after which the order of the ranking counts again.
LOOKED = 200


def one_of_each_policy(ranking: Iterable[Ranked]) -> Iterator[Ranked]:
    """Plans in the order in which they are compiled."""
    plans = iter(ranking)
    fastest, later = dict[str, Ranked](), list[Ranked]()
    for plan in plans:
        policy = plan.candidate.decisions.remat
        if fastest and plan.seconds > SLACK * next(iter(fastest.values())).seconds:
            later.append(plan)
            break
        if policy in fastest:
            later.append(plan)
        else:
            fastest[policy] = plan
    yield from fastest.values()
    yield from later
    yield from plans


def one_of_each_mesh(ranking: Iterable[Ranked]) -> Iterator[Ranked]:
    """The fastest plan of every mesh that is predicted within a third of the fastest, then the
    others: plans that differ by less take nearly the same time.
    """
    plans, meshes, later = iter(ranking), set[object](), list[Ranked]()
    fastest = math.inf
    for plan in plans:
        fastest = min(fastest, plan.seconds)
        if plan.seconds > NEAR * fastest or len(later) >= LOOKED:
            later.append(plan)
            break
        mesh = plan.candidate.mesh
        if mesh in meshes:
            later.append(plan)
        else:
            meshes.add(mesh)
            yield plan
    yield from later
    yield from plans


# --------------------------------------------------------------------------------------------------
# Refinement: the first plans of a ranking compiled, and ranked again by the compiler's figures.
#
# A cost model ranks plans by predictions; the compiler knows better what it makes of each.
# `refine` takes plans in the order of their predicted time, one of each remat policy first, has
# each compiled, drops those that the compiler refutes (out of memory, no program), and goes on
# until as many as wanted survive. Those are ranked again, with the compiler's memory and
# collectives and, on a TPU, its estimate of the kernels (`shardlib.cost.pricing` has the formula).
#
# A plan that is out of memory says something about others with the same remat policy. Those are
# passed over that are predicted to need at least as much, or that would not fit if their
# prediction were as wrong as the best one seen. At most `COMPILATIONS` plans are compiled for each
# that is wanted.

#: Has a plan compiled for its machine.
Verify = Callable[[Plan], Verification]


#: Runs plans on attached devices and returns the seconds of a step of each.
Run = Callable[[Sequence[Plan]], Sequence[float]]


def refine(
    ranking: Iterable[Ranked],
    count: int,
    topology: Topology,
    verify: Verify,
    run: Run | None = None,
) -> Plan:
    """The best of the first plans of a ranking that the compiler confirms; where the devices are
    attached, those within a third of the best are run.

    Args:
        run: runs plans; None where the devices are elsewhere.
    """
    bench = _Bench(count=count, topology=topology, verify=verify, run=run)
    with Progress("confirming plans", of=count) as progress:
        for number, entry in enumerate(one_of_each_policy(ranking), start=1):
            progress.to(len(bench.survivors), f"plan {number}")
            if bench.full:
                break
            bench.take(entry)
    return bench.verdict()


@dataclass(frozen=True, kw_only=True)
class _Survivor:
    """A compiled plan that fits; `number` is its place among the trials."""

    number: int
    plan: Plan
    found: Verification
    refined: Refined


class _Bench:
    """Plans that were compiled so far."""

    def __init__(
        self, *, count: int, topology: Topology, verify: Verify, run: Run | None = None
    ) -> None:
        self.wanted, self.topology, self._verify, self._run = count, topology, verify, run
        self.trials: list[Trial] = []
        self.survivors: list[_Survivor] = []
        self.passed_over = 0
        self._too_much: dict[str, float] = {}
        self._ratio: dict[str, float] = {}

    @property
    def bounded(self) -> bool:
        """True if fewer plans survived than wanted when the compilations were used up."""
        return len(self.survivors) < self.wanted and len(self.trials) >= COMPILATIONS * self.wanted

    @property
    def full(self) -> bool:
        return len(self.survivors) >= self.wanted or self.bounded

    def take(self, entry: Ranked) -> None:
        """Compiles one plan, unless a leaner one was out of memory."""
        policy = entry.candidate.decisions.remat
        if self._hopeless(policy, entry.peak_bytes):
            self.passed_over += 1
            return
        plan = entry.build()
        trial = Trial(
            mesh=plan.mesh,
            summary=entry.candidate.summary,
            predicted_seconds=plan.estimate.step_seconds,
            predicted_bytes=plan.estimate.device_bytes.peak,
            verdict=SLOWER,
        )
        try:
            verification = self._verify(plan)
        except (MissingPackageError, TopologyError):
            raise
        except ShardlibError as error:
            self.trials.append(replace(trial, verdict="not-lowered", message=str(error)))
            return
        trial = replace(trial, compile_seconds=verification.compile_seconds)
        if verification.compiled is None:
            trial = replace(
                trial,
                verdict=verification.findings[0].code,
                message=verification.findings[0].message,
            )
        else:
            trial = self._measured(trial, plan, verification, verification.compiled)
        if trial.verdict == "out-of-memory":
            self._too_much[policy] = min(
                entry.peak_bytes, self._too_much.get(policy, entry.peak_bytes)
            )
        if trial.compiled_bytes:
            ratio = trial.compiled_bytes / entry.peak_bytes
            self._ratio[policy] = min(ratio, self._ratio.get(policy, ratio))
        self.trials.append(trial)

    def _hopeless(self, policy: str, peak_bytes: float) -> bool:
        """Returns whether plans like it were out of memory and this one is no leaner."""
        if policy not in self._too_much:
            return False
        return (
            peak_bytes >= self._too_much[policy]
            or peak_bytes * self._ratio.get(policy, 0.0) > self.topology.chip.usable_bytes
        )

    def _measured(
        self, trial: Trial, plan: Plan, verification: Verification, compiled: CompiledStep
    ) -> Trial:
        """The trial of a plan that compiles; one that fits becomes a survivor.

        A stand-in for a kernel, which the compiler was given where there is no GPU, needs more
        memory than the kernel: that much by the cost model does not count.
        """
        stand_in = verification.plan.estimate.device_bytes.peak - plan.estimate.device_bytes.peak
        peak, usable = (compiled.device_bytes["peak"] - stand_in, self.topology.chip.usable_bytes)
        seconds = reprice(
            plan.estimate.seconds,
            compiled.collectives,
            compiled.compute_seconds,
            self.topology.chip.vendor,
            zero=plan.zero,
        )
        trial = replace(trial, compiled_seconds=seconds.total, compiled_bytes=peak)
        if peak > usable:
            return replace(
                trial,
                verdict="out-of-memory",
                message=(
                    f"the program needs {bytes_text(peak)} per device and there are"
                    f" {bytes_text(usable)}."
                ),
            )
        self.survivors.append(
            _Survivor(
                number=len(self.trials),
                plan=plan,
                found=verification,
                refined=Refined(
                    wanted=self.wanted,
                    seconds=seconds,
                    device_bytes=tuple({**compiled.device_bytes, "peak": peak}.items()),
                    collectives=compiled.collectives,
                    kernels="compiler" if compiled.compute_seconds else "model",
                    trials=(),
                    versions=tuple(verification.versions.items()),
                ),
            )
        )
        return trial

    def verdict(self) -> Plan:
        """The fastest survivor, with the record of all trials."""
        if not self.survivors:
            self._nothing()
        order = sorted(
            self.survivors, key=lambda survivor: (survivor.refined.step_seconds, survivor.number)
        )
        seconds = self._run_near(order)
        best = min(order, key=lambda s: (seconds.get(s.number, math.inf), s.refined.step_seconds))
        trials = tuple(
            replace(
                trial,
                verdict=CHOSEN if number == best.number else trial.verdict,
                run_seconds=seconds.get(number, 0.0),
            )
            for number, trial in enumerate(self.trials)
        )
        record = replace(
            best.refined, trials=trials, passed_over=self.passed_over, bounded=self.bounded
        )
        plan = replace(
            best.plan,
            refined=record,
            search=replace(best.plan.search, counts=search_counts(best.plan, trials)),
        )
        warnings = [finding for finding in best.found.findings if finding.severity != "info"]
        return plan.with_findings(*refine_findings(record, best.number), *warnings)

    def _run_near(self, order: Sequence[_Survivor]) -> dict[int, float]:
        """Seconds of a step of the plans within a third of the first, by number, as far as their
        programs fit beside each other; nothing where there is one, or devices are not attached.
        """
        near: list[_Survivor] = []
        room = self.topology.chip.usable_bytes
        for survivor in order:
            room -= survivor.refined.peak_bytes
            if room < 0 or survivor.refined.step_seconds > NEAR * order[0].refined.step_seconds:
                break
            near.append(survivor)
        if self._run is None or len(near) < 2:
            return {}
        seconds = self._run([survivor.plan for survivor in near])
        return {survivor.number: taken for survivor, taken in zip(near, seconds, strict=True)}

    def _nothing(self) -> NoReturn:
        too_large = all(trial.verdict == "out-of-memory" for trial in self.trials)
        lines = [
            f"{trial_name(trial)}:"
            f" {trial.verdict}{': ' + trial.message.splitlines()[0] if trial.message else ''}"
            for trial in self.trials
        ]
        more = f"more candidates, refine={self.wanted + 2}; or "
        raise_all(
            InfeasibleError if too_large else VerificationError,
            f"the compiler refutes each of the {len(lines)} plans that were compiled for"
            f" {self.topology.name}",
            lines,
            hint=more
            + (
                "pin what saves memory: remat=full, zero=3, more microbatches"
                if too_large
                else "pin another mesh, or leave refine out and look at one plan with verify"
            ),
        )
