"""The search for a plan: best-first branch and bound over the space, and its results (the fastest
plan that fits, a ranking, or the error where nothing fits).
"""

from __future__ import annotations

import gc
import heapq
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeVar

import numpy as np
import threadpoolctl  # pyright: ignore[reportMissingTypeStubs]

from shardlib import wings
from shardlib.compact import compact
from shardlib.cost.facts import traits
from shardlib.cost.framework import XLA, FrameworkProfile, framework_profile
from shardlib.cost.roofline import fitting_bytes
from shardlib.decisions.lowerings import facts_of_decisions, facts_of_mesh, lowerable
from shardlib.decisions.pins import PinMapping, Pins, require_obeyed
from shardlib.decisions.table import ANY
from shardlib.errors import InfeasibleError, PinError
from shardlib.findings import Finding, diagnostic
from shardlib.graph import Problem
from shardlib.layout import MeshShape
from shardlib.machines.topology import Topology, TopologyLike, divisors, island_of
from shardlib.machines.topology import topology as parse_topology
from shardlib.planner.assembly import PricedCandidate, assemble, price
from shardlib.planner.findings import without_effect
from shardlib.planner.incumbents import BestPlans, RankedEntry, Ranking
from shardlib.planner.parts import Candidate, dtype_changes, with_dtypes
from shardlib.planner.plan import Plan, Ranked, Rejected, Search, Source
from shardlib.planner.priced import PricedSpace, priced_space
from shardlib.planner.workload import Workload, batch_size, most_specific_first, prepare
from shardlib.report.elements import TIE, ratio_text

# --------------------------------------------------------------------------------------------------
# Left-out colours (beyond those of which every set is tried), added one by one to the fastest
# plans.

#: Least relative speedup for which another dimension is sharded.
MIN_SPEEDUP = 1e-3
#: Number of other meshes whose fastest plans are tried too, and their largest step time in
#: multiples of that of the fastest plan.
MAX_RIVALS, MAX_SLOWDOWN = 3, 1.25


def fastest_with_left_out(
    workload: Workload,
    topology: Topology,
    priced: PricedSpace,
    candidate: Candidate,
    seconds: float,
) -> tuple[Candidate, float]:
    """The fastest plan, and its seconds, after adding left-out colours to the best plans of a
    search wherever that is faster and fits.

    Args:
        seconds: step time of `candidate`.
    """
    if not priced.space.left_out:
        return candidate, seconds
    others = sorted(
        (
            (rival_s, rival)
            for rival_s, _, rival in priced.best.by_mesh.values()
            if rival.mesh["tensor"] > 1
            and rival_s <= MAX_SLOWDOWN * seconds
            and rival.mesh != candidate.mesh
        ),
        key=lambda pair: (pair[0], str(pair[1].mesh)),
    )
    best = candidate, seconds
    for rival_s, start in [(seconds, candidate), *others[:MAX_RIVALS]]:
        improved = with_left_out(workload, topology, priced, start, rival_s)
        best = improved if improved[1] < best[1] else best
    return best


def with_left_out(
    workload: Workload,
    topology: Topology,
    priced: PricedSpace,
    candidate: Candidate,
    seconds: float,
) -> tuple[Candidate, float]:
    """A plan with each left-out colour sharded where that is faster and fits, and its
    seconds.
    """
    degree, colours = candidate.mesh["tensor"], workload.colouring.colours
    for name in priced.space.left_out if degree > 1 else ():
        if colours[name].divisor % degree:
            continue
        tensor = most_specific_first({*candidate.choice.tensor, name}, workload.colouring)
        alternative = replace(candidate, choice=replace(candidate.choice, tensor=tensor))
        totals = price(workload, topology, alternative)
        rival_s = float(totals.step_seconds[0])
        if rival_s < seconds * (1 - MIN_SPEEDUP) and totals.peak_bytes[0] <= fitting_bytes(
            topology
        ):
            candidate, seconds = alternative, rival_s
    return candidate, seconds


# --------------------------------------------------------------------------------------------------
# Of equally fast plans, where memory is nearly full, the one that leaves more free.

#: Share of the usable memory above which free memory counts for more than simplicity.
FULL_MEMORY_SHARE = 0.9


def with_more_free_memory(
    workload: Workload,
    topology: Topology,
    pins: Pins,
    priced: PricedSpace,
    candidate: Candidate,
    seconds: float,
) -> Candidate:
    """For a plan that nearly fills the memory: the same plan with the ZeRO stage that needs the
    least memory among those that are as fast (the lowest of these); other plans unchanged.

    Args:
        seconds: step time of `candidate`.
    """
    decisions = candidate.decisions
    if pins.zero is not None or not (1 <= decisions.zero < 3):
        return candidate
    _, peak, best_of_mesh = priced.best.by_mesh.get(candidate.mesh, (0.0, math.inf, None))
    if best_of_mesh == candidate and peak < FULL_MEMORY_SHARE * fitting_bytes(topology):
        return candidate
    fewest_bytes = float(price(workload, topology, candidate).peak_bytes[0])
    if fewest_bytes < FULL_MEMORY_SHARE * fitting_bytes(topology):
        return candidate
    stages = facts_of_mesh({"stage": np.array([decisions.mesh["stage"]])})
    for zero in (zero for zero in priced.space.limits.abilities.zero if zero > decisions.zero):
        alternative = candidate.replace(zero=zero)
        if not lowerable(
            facts_of_decisions(alternative.decisions), stages, priced.space.unsupported
        ).all():
            continue
        totals = price(workload, topology, alternative)
        peak, rival_s = float(totals.peak_bytes[0]), float(totals.step_seconds[0])
        if rival_s <= seconds * (1 + TIE) and peak < fewest_bytes * (1 - TIE):
            candidate, fewest_bytes = alternative, peak
    return candidate


# --------------------------------------------------------------------------------------------------
# Stages in one program or as per-stage programs, where a pin leaves that open.
#
# `pipeline="any"` searches both and takes the faster; a tie goes to one program. Per-stage programs
# (MPMD) need one process that has all devices, so they are never chosen unasked: a plan tried on
# simulated devices would not be what several hosts run.

T = TypeVar("T")
#: The finding for per-stage programs that the planner chose.
ONE_PROCESS = Finding(
    code="one-process",
    severity="info",
    where="pipeline=programs",
    message="per-stage programs are called by one process, which has to have all devices",
    hint="pipeline=lockstep, which runs in any number of processes",
)
#: Forms of a pipeline, the simpler first.
PIPELINE_FORMS = ("lockstep", "programs")


def pipeline_left_open(workload: Workload, pins: Pins) -> bool:
    """True if the planner decides how stages run, which is only where shardlib makes the
    programs.
    """
    return pins.pipeline == ANY and workload.profile.name == XLA.name


def fastest_form(pins: Pins, search: Callable[[Pins], Plan]) -> Plan:
    """The faster of the best plans of both forms, with a certificate over both."""
    plans = _both_forms(pins, search)
    chosen = min(plans, key=lambda plan: plan.estimate.step_seconds)
    counts = Counter[str]()
    for plan in plans:
        counts.update(dict(plan.search.counts))
    bound = min(plan.estimate.step_seconds * (1 - plan.search.gap) for plan in plans)
    certificate = replace(
        chosen.search,
        evaluations=sum(plan.search.evaluations for plan in plans),
        candidates=sum(plan.search.candidates for plan in plans),
        seconds=sum(plan.search.seconds for plan in plans),
        lower_bound=min(plan.search.lower_bound for plan in plans),
        gap=max(0.0, 1 - bound / chosen.estimate.step_seconds),
        counts=tuple(sorted(counts.items())),
    )
    faster = replace(chosen, search=certificate)
    return faster.with_findings(*([ONE_PROCESS] if faster.pipeline == "programs" else []))


def forms_in_order(
    pins: Pins,
    ranked: Callable[[Pins], Iterator[Ranked]],
    *,
    slack: float = math.inf,
    pareto: bool = False,
) -> Iterator[Ranked]:
    """Plans of both forms, fastest first.

    Args:
        slack: largest step time, in multiples of that of the fastest.
    """
    fewest_bytes, limit = math.inf, math.inf
    for entry in heapq.merge(*_both_forms(pins, ranked), key=lambda entry: entry.seconds):
        limit = min(limit, slack * entry.seconds)
        if entry.seconds > limit:
            return
        if not pareto or entry.peak_bytes < fewest_bytes:
            yield entry
        fewest_bytes = min(fewest_bytes, entry.peak_bytes)


def _both_forms(pins: Pins, answer: Callable[[Pins], T]) -> list[T]:
    """The answers for both forms, or for the one that has any."""
    answers: list[T] = []
    refused: list[PinError | InfeasibleError] = []
    for form in PIPELINE_FORMS:
        try:
            answers.append(answer(pins.changed(Pins.parse({"pipeline": form}))))
        except (PinError, InfeasibleError) as error:
            refused.append(error)
    if not answers:
        raise refused[0]
    return answers


# --------------------------------------------------------------------------------------------------
# Collective matmuls over tensor: where pinned, or where left to the planner and faster.

#: Most plans that are priced with collective matmuls, where the planner decides on them.
MAX_COLLECTIVE_MATMUL_PLANS = 32
#: Largest tensor axis whose best plan is searched for separately, to be priced with collective
#: matmuls.
MAX_COLLECTIVE_MATMUL_TENSOR = 32


def with_tp_overlap(
    workload: Workload, topology: Topology, candidate: Candidate, pins: Pins, step_seconds: float
) -> tuple[Candidate, float]:
    """The candidate, with collective matmuls over tensor where they are pinned, or left to the
    planner and predicted to be faster; and its step time.
    """
    if pins.collective_matmul not in ("loop", "any") or (
        pins.collective_matmul == "any" and not can_overlap_tp(workload, topology, candidate.mesh)
    ):
        return candidate, step_seconds
    alternative = candidate.replace(collective_matmul="loop")
    saving = PricedCandidate.of(workload, topology, alternative).saving()
    seconds = step_seconds - (saving.seconds if saving else 0.0)
    return (
        (alternative, seconds)
        if pins.collective_matmul == "loop" or seconds < step_seconds
        else (candidate, step_seconds)
    )


def can_overlap_tp(workload: Workload, topology: Topology, mesh: MeshShape) -> bool:
    """True if collective matmuls can be faster on a mesh: in a JAX program without stages, where
    links work concurrently with compute, which those of simulated devices do not.
    """
    return (
        workload.profile.name == XLA.name
        and mesh["tensor"] > 1
        and mesh["stage"] == 1
        and all(tier.kind != "memory" for tier in topology.tiers)
    )


def fastest_with_tp_overlap(
    workload: Workload, topology: Topology, pins: Pins, priced: PricedSpace
) -> tuple[Candidate, float, float]:
    """The fastest candidate with or without collective matmuls, its step time, and a lower bound
    for all plans.

    The fastest plan for each size of the tensor axis is priced with collective matmuls. A plan with
    all collectives over tensor hidden is at least as fast, so its price is a lower bound: other
    plans are priced in the order of that bound, until it is no less than the step time of the
    best plan, or `MAX_COLLECTIVE_MATMUL_PLANS` have been priced.
    """
    assert priced.best.fastest is not None
    best = with_tp_overlap(workload, topology, priced.best.fastest, pins, priced.best.seconds)
    for sharded in _by_tensor(workload, topology, pins):
        assert sharded.best.fastest is not None
        best = min(
            best,
            with_tp_overlap(workload, topology, sharded.best.fastest, pins, sharded.best.seconds),
            key=lambda pair: pair[1],
        )
    all_hidden = prepare(
        workload.problem, topology.chip.vendor, replace(workload.profile, tensor_overlap=1.0)
    )
    fastest = priced_space(all_hidden, topology, pins).best.seconds
    ranking, num_priced = Ranking[Candidate](), 0
    hidden_space = priced_space(all_hidden, topology, pins, ranking, max(1.0, best[1] / fastest))
    for entry in ranking.ordered(hidden_space.simplicity):
        if entry.seconds >= best[1] or num_priced == MAX_COLLECTIVE_MATMUL_PLANS:
            return *best, min(best[1], entry.seconds)
        candidate = hidden_space.candidate(entry)
        if can_overlap_tp(workload, topology, candidate.mesh):
            alternative = with_tp_overlap(
                workload,
                topology,
                candidate,
                pins,
                float(price(workload, topology, candidate).step_seconds[0]),
            )
            best = min(best, alternative, key=lambda pair: pair[1])
            num_priced += 1
    return *best, best[1]


def _by_tensor(workload: Workload, topology: Topology, pins: Pins) -> Iterator[PricedSpace]:
    """The priced spaces without stages, for every size of the tensor axis for which a plan fits,
    where pins leave the size open.
    """
    fixed = dict(pins.axes)
    if pins.mesh is not None or "tensor" in fixed or pins.always_staged:
        return
    for degree in (n for n in divisors(topology.devices) if 1 < n <= MAX_COLLECTIVE_MATMUL_TENSOR):
        try:
            axes = tuple(sorted({**fixed, "tensor": degree, "stage": 1}.items()))
            priced = priced_space(workload, topology, pins.replace(axes=axes))
        except PinError:
            continue
        if priced.best.fastest is not None:
            yield priced


# --------------------------------------------------------------------------------------------------
# The fastest plan that fits.
#
# The search prices every legal plan that no lower bound excludes, so its answer is optimal within
# the cost model: gap 0, or the gap that the certificate states. The space is defined in
# `planner/space.py`, its prices in `planner/priced.py`. Dimensions beyond `MAX_TENSOR_COLOURS` are
# added one by one to the fastest plans. Ties go to the simpler plan, and where memory is nearly
# full to the ZeRO stage that needs less.

#: Most plans of other meshes that a certificate lists.
MAX_REJECTED = 200
#: Most points of the landscape in a certificate.
MAX_POINTS = 240


def _fastest(
    workload: Workload, topology: Topology, pins: Pins, *, all_devices: bool = False
) -> Plan:
    """The fastest plan that fits, without its source."""
    started = time.perf_counter()
    if pins.exchange.islands > 1:
        search_island = partial(
            _fastest, workload, pins=pins.of_one_island, all_devices=all_devices
        )
        return wings.islands("planning").planned_on_islands(pins.exchange, topology, search_island)
    workload = prepared_workload(workload.problem, topology, workload, None, pins)
    if pipeline_left_open(workload, pins):
        return fastest_form(
            pins, lambda form: _fastest(workload, topology, form, all_devices=all_devices)
        )
    priced = priced_space(workload, topology, pins, all_devices=all_devices)
    if priced.best.fastest is None:
        raise _infeasible(workload, topology, pins, priced)
    fastest, priced_seconds = fastest_with_left_out(
        workload, topology, priced, priced.best.fastest, priced.best.seconds
    )
    fastest = with_more_free_memory(workload, topology, pins, priced, fastest, priced_seconds)
    candidate, step_seconds = with_tp_overlap(workload, topology, fastest, pins, priced_seconds)
    bound = min(priced_seconds, step_seconds)
    if pins.collective_matmul == "any" and workload.profile.name == XLA.name:
        candidate, step_seconds, bound = fastest_with_tp_overlap(workload, topology, pins, priced)
    seconds = time.perf_counter() - started
    return _plan(
        workload,
        topology,
        pins,
        priced,
        candidate,
        _certificate(priced, candidate, step_seconds, seconds, bound),
    )


def prepared_workload(
    problem: Problem,
    topology: Topology,
    workload: Workload | None,
    profile: FrameworkProfile | str | None,
    pins: Pins,
) -> Workload:
    """The problem prepared for a machine and a framework profile; `workload` itself where it
    already is.

    Args:
        profile: framework profile or its name; None for that of `workload`, or else of JAX and XLA.
    """
    chosen_profile = (
        framework_profile(profile)
        if profile is not None
        else workload.profile
        if workload is not None
        else XLA
    )
    if pins.pipeline == "programs":  # stages wait only for their neighbours
        chosen_profile = replace(chosen_profile, pipeline="asynchronous")
    elif pins.pipeline is not None and chosen_profile.name == XLA.name:
        # `workload` may come from a plan of per-stage programs
        chosen_profile = replace(chosen_profile, pipeline=XLA.pipeline)
    if (
        workload is not None
        and traits(workload.vendor) == traits(topology.chip.vendor)
        and workload.profile == chosen_profile
    ):
        return workload
    framework = workload.framework if workload is not None else None
    return prepare(problem, topology.chip.vendor, chosen_profile, framework)


def _in_order(
    workload: Workload, topology: Topology, pins: Pins, slack: float, pareto: bool
) -> Iterator[Ranked]:
    """All plans that fit, fastest first, without their sources; each is built lazily."""
    started = time.perf_counter()
    if pins.exchange.islands > 1:
        island = island_of(topology, pins.exchange.islands)
        inner = _in_order(workload, island, pins.of_one_island, slack, pareto)
        return wings.islands("planning").met_in_order(inner, pins.exchange, topology)
    workload = prepared_workload(workload.problem, topology, workload, None, pins)
    if pipeline_left_open(workload, pins):
        return forms_in_order(
            pins,
            lambda form: _in_order(workload, topology, form, slack, pareto),
            slack=slack,
            pareto=pareto,
        )
    ranking = Ranking[Candidate]()
    priced = priced_space(workload, topology, pins, ranking, slack)
    if priced.best.fastest is None:
        raise _infeasible(workload, topology, pins, priced)
    seconds = time.perf_counter() - started

    def plan(candidate: Candidate, entry: RankedEntry[Candidate]) -> Plan:
        changed, priced_seconds = with_left_out(
            workload, topology, priced, candidate, entry.seconds
        )
        changed = with_more_free_memory(workload, topology, pins, priced, changed, priced_seconds)
        chosen, step_seconds = with_tp_overlap(workload, topology, changed, pins, priced_seconds)
        bound = min(priced.best.seconds, step_seconds)
        certificate = _certificate(priced, chosen, step_seconds, seconds, bound)
        return _plan(workload, topology, pins, priced, chosen, certificate)

    def entries() -> Iterator[Ranked]:
        for entry in ranking.pareto_front() if pareto else ranking.ordered(priced.simplicity):
            candidate = priced.candidate(entry)
            yield Ranked(
                candidate=candidate,
                seconds=entry.seconds,
                peak_bytes=entry.peak_bytes,
                build=partial(plan, candidate, entry),
            )

    return entries()


def _plan(
    workload: Workload,
    topology: Topology,
    pins: Pins,
    priced: PricedSpace,
    candidate: Candidate,
    certificate: Search,
) -> Plan:
    plan = assemble(
        workload,
        topology,
        candidate,
        certificate,
        rules=priced.rules,
        left_out=priced.space.left_out,
        devices=priced.devices,
        pinned=pins.mesh is not None,
    )
    require_obeyed(pins, plan)
    return plan.with_findings(*without_effect(priced.space.pins, plan))


def _certificate(
    priced: PricedSpace, candidate: Candidate, step_seconds: float, seconds: float, bound: float
) -> Search:
    """The certificate of a search for one of its plans, with a lower bound on the step time; the
    gap is 0 where the plan is as fast as the bound.
    """
    best = priced.best
    candidates = best.counts["priced"] + best.counts["bound"]
    return Search(
        evaluations=best.counts["priced"],
        candidates=candidates,
        lower_bound=min(bound, step_seconds),  # sums round differently
        gap=max(0.0, 1 - bound / step_seconds),
        seconds=seconds,
        rejected=_rejected(best, candidate),
        counts=tuple(sorted(best.counts.items())),
        landscape=priced.landscape(MAX_POINTS),
    )


def _rejected(best: BestPlans, chosen: Candidate) -> tuple[Rejected, ...]:
    """The best plan of each other mesh that was priced (fastest first), then meshes for which
    nothing fits (least memory first).
    """
    rejected = [
        Rejected(
            mesh=mesh,
            summary=candidate.summary,
            reason="slower" if np.isfinite(seconds) else "memory",
            step_seconds=seconds if np.isfinite(seconds) else 0.0,
            peak_bytes=int(size),
        )
        for mesh, (seconds, size, candidate) in best.by_mesh.items()
        if mesh != chosen.mesh
    ]
    return tuple(
        sorted(
            rejected,
            key=lambda r: (r.reason != "slower", r.step_seconds, r.peak_bytes, str(r.mesh)),
        )
    )[:MAX_REJECTED]


def _infeasible(
    workload: Workload, topology: Topology, pins: Pins, priced: PricedSpace
) -> InfeasibleError:
    from shardlib.planner.no_plan import infeasible

    assert priced.best.minimum_memory is not None

    def fits(machine: Topology, other_pins: Pins) -> bool:
        try:
            priced = priced_space(workload, machine, other_pins, any_fit=True)
        except PinError:
            return False
        return priced.best.fastest is not None

    candidate = priced.best.minimum_memory
    return infeasible(
        workload, topology, pins, candidate, price(workload, topology, candidate), fits
    )


# --------------------------------------------------------------------------------------------------
# Batches of a similar size that divide better.
#
# A batch of 255 rows on 256 chips leaves every axis that splits it at 1: the chips share the
# sequence or the layers, or stay idle. Batches of a similar size that divide better are priced with
# the same graphs, whose costs are those of the rows that were traced.

#: Largest relative difference in size between the batch and those that are tried.
MAX_BATCH_CHANGE = 0.25
#: How many are tried, and the relative time per row below which one counts as faster.
MAX_BATCHES, MAX_ROW_TIME_RATIO = 2, 0.9
#: Largest divisor of the number of devices that is considered.
MAX_DIVISOR = 1 << 20


def nearby_batches(rows: int, devices: int) -> tuple[int, ...]:
    """Batch sizes near `rows` that divide over more devices, the nearest first, each further one
    over still more.

    >>> [nearby_batches(*sizes) for sizes in ((255, 256), (100, 64), (512, 256), (64, 3))]
    [(256,), (96,), (), (63,)]
    """
    divided, best = math.gcd(rows, devices), list[int]()
    candidates = {
        multiple * degree
        for degree in divisors(devices, MAX_DIVISOR)
        if degree > divided
        for multiple in (rows // degree, rows // degree + 1)
        if 0 < abs(multiple * degree - rows) <= MAX_BATCH_CHANGE * rows and multiple
    }
    for candidate in sorted(candidates, key=lambda n: (abs(n - rows), -math.gcd(n, devices))):
        if math.gcd(candidate, devices) > divided:
            divided = math.gcd(candidate, devices)
            best.append(candidate)
    return tuple(best)


@diagnostic
def batch_divides_badly(
    plan: Plan, workload: Workload, topology: Topology, pins: Pins
) -> tuple[Finding, ...]:
    """A finding where the batch does not divide over the devices, and one of a similar size is
    faster.
    """
    rows = batch_size(workload.problem, workload.colouring)
    if rows == 1:
        return ()
    for candidate in nearby_batches(rows, topology.devices)[:MAX_BATCHES]:
        try:
            best = priced_space(_with_rows(workload, rows, candidate), topology, pins).best
        except PinError:
            continue
        ratio = best.seconds * max(1.0, rows / candidate) / plan.estimate.step_seconds
        if best.fastest is None or ratio > MAX_ROW_TIME_RATIO:
            continue
        idle = topology.devices - plan.mesh.devices
        return (
            Finding(
                code="batch-divides-badly",
                severity="warning",
                where=f"batch of {rows}",
                message=(
                    f"divisibility, not speed, chose the mesh {plan.mesh}"
                    + (f" and left {idle} devices idle" if idle else "")
                    + f": {rows} rows divide over {math.gcd(rows, topology.devices)} of"
                    f" {topology.devices} devices at most. With {candidate} a step would take about"
                    f" {ratio_text(ratio)} the time per row ({best.fastest.mesh})"
                ),
                hint=f"a batch of {candidate} rows",
            ),
        )
    return ()


def _with_rows(workload: Workload, rows: int, new_rows: int) -> Workload:
    """The problem with the batch size of `new_rows` and the costs of the traced one."""
    name = workload.colouring.batch_colour

    def shape(path: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
        axes = workload.colouring.batch[path]
        return tuple(
            size // rows * new_rows if axis == name else size
            for size, axis in zip(sizes, axes, strict=True)
        )

    batch = tuple(
        (path, shape(path, sizes), dtype, axes)
        for path, sizes, dtype, axes in workload.problem.batch
    )
    return replace(workload, problem=replace(workload.problem, batch=batch))


# --------------------------------------------------------------------------------------------------
# Settings of the process during a search.
#
# Garbage: tracing and searching allocate many small objects that live until the end, and hardly any
# cycles. Each full collection walks all of them, and all that JAX allocated before: it took a fifth
# of the planning time. The threshold is a number of objects, so memory stays bounded.
#
# Threads of BLAS: the matrix products of a search are small. More threads took up to twice the
# processor time for the same, and longer where other work ran on the machine.

#: Minimum thresholds of the three generations (`gc.set_threshold`): new objects, and collections of
#: the generation before.
THRESHOLDS: tuple[int, int, int] = (100_000, 20, 100)


class ForAllThreads:
    """A process-wide setting: the first thread to enter changes it, the last to leave restores it.

    Args:
        change: changes the setting and returns a function that restores it.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change, self._lock, self._inside = change, threading.Lock(), 0
        self._restore: Callable[[], None] = lambda: None

    @contextmanager
    def __call__(self) -> Generator[None]:
        """A context manager, which also works as a decorator: `@setting()`."""
        with self._lock:
            if not self._inside:
                self._restore = self._change()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._restore()


def _raise_thresholds() -> Callable[[], None]:
    """Raises the thresholds of garbage collection; where it is switched off (0) it stays off."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(*map(max, before, THRESHOLDS))
    return lambda: gc.set_threshold(*before)


@cache
def _controller() -> threadpoolctl.ThreadpoolController:
    return threadpoolctl.ThreadpoolController()  # scans the libraries loaded in the process


def _limit_threads() -> Callable[[], None]:
    own = _controller().limit(limits=1, user_api="blas")  # pyright: ignore[reportUnknownMemberType]
    return own.restore_original_limits


#: Garbage in cycles is collected rarely.
rare_garbage_collection = ForAllThreads(_raise_thresholds)
#: Matrix products of NumPy run on the calling thread alone.
single_threaded_blas = ForAllThreads(_limit_threads)


@dataclass(frozen=True, kw_only=True)
class PlanSource:
    """A prepared problem under some pins: the source of all plans for it.

    Attributes:
        topology: the machine of the plan.
        pins: the pins under which the plan was made.
        island_problem: number of islands -> the problem of one island, with its share of the rows;
            None where the model is not available.
        plain_jax: (plan, mode of its mesh axes) -> source of a plain JAX file; None where the model
            is not available.
    """

    workload: Workload
    topology: Topology
    pins: Pins
    island_problem: Callable[[int], Problem] | None = field(default=None, repr=False, compare=False)
    plain_jax: Callable[[Plan, str], str] | None = field(default=None, repr=False, compare=False)
    _answers: dict[tuple[Topology, Pins], Plan] = field(
        default_factory=dict[tuple[Topology, Pins], Plan], init=False, repr=False, compare=False
    )

    __repr__ = compact

    def with_pins(self, pins: Pins) -> PlanSource:
        """The same problem under other pins."""
        return replace(self, pins=pins)

    def search(self, topology: Topology, pins: Pins) -> Plan:
        """The best plan for the same problem; cached by topology and pins. All questions end here
        or in `ranked`.
        """
        if (topology, pins) not in self._answers:
            self._answers[topology, pins] = search(
                self.workload.problem, topology, pins, workload=self.workload
            )
        return self._answers[topology, pins]

    def ranked(
        self, topology: Topology, *, slack: float = math.inf, pareto: bool = False
    ) -> Iterator[Ranked]:
        """Plans for the same problem under the same pins, fastest first, up to `slack` times
        the step time of the fastest.
        """
        return ranked(
            self.workload.problem,
            topology,
            self.pins,
            workload=self.workload,
            slack=slack,
            pareto=pareto,
        )

    def on_all_devices(self) -> Plan:
        """The best plan for the same problem that leaves no device idle, under the same pins
        without those of the mesh.
        """
        pins = self.pins.replace(mesh=None, axes=())
        plan = _fastest(self.workload, self.topology, pins, all_devices=True)
        return replace(plan, source=self.with_pins(pins))

    def why_not(self, pin: PinMapping) -> Plan:
        """The best plan under different pins, for the same model and topology."""
        pins = self.pins.changed(Pins.parse(pin))
        before, after = self.pins.exchange, pins.exchange
        if before.islands == after.islands:
            return self.search(self.topology, pins)
        if self.island_problem is None:
            raise PinError(
                f"the plan is for {before.islands} island{'s'[: before.islands != 1]} and {after}"
                f" has {after.islands}: the model is traced for the rows of one island\nTry:"
                f" plan.diff(shardlib.plan(..., pin={{'exchange': '{after}'}}))"
            )
        return search(self.island_problem(after.islands), self.topology, pins)


@rare_garbage_collection()
@single_threaded_blas()
def search(
    problem: Problem,
    topology: TopologyLike,
    pin: PinMapping | Pins | None = None,
    *,
    workload: Workload | None = None,
    profile: FrameworkProfile | str | None = None,
) -> Plan:
    """Finds the fastest plan that fits; it carries its source.

    Args:
        profile: profile (or its name) of the framework that will run the plan; by default that of
            `workload`, or one JAX program ("xla").
    """
    started = time.perf_counter()
    source = _source(problem, topology, pin, workload, profile)
    preparing = time.perf_counter() - started
    plan = _fastest(source.workload, source.topology, source.pins)
    if workload is None and source.pins.mesh is None and source.pins.exchange.islands == 1:
        first = batch_divides_badly(plan, source.workload, source.topology, source.pins)
        plan = replace(plan, findings=(*first, *plan.findings))
    return _sourced(plan, source, preparing)


def workload_for_framework(name: str, problem: Problem, topology: Topology) -> Workload:
    """A problem prepared for a training framework, with parameters in the dtype in which that
    stores them; a search for it stays within what the framework supports.
    """
    vendor = topology.chip.vendor
    frameworks = wings.required("shardlib.frameworks", f"framework {name!r}")
    chosen = frameworks.framework(name, vendor)
    profile = framework_profile(chosen.profile)
    stored = (("param_dtype", chosen.param_dtype),) if chosen.param_dtype else ()
    problem, profile = with_dtypes(dtype_changes(stored, problem, profile), problem, profile)
    return prepare(problem, vendor, profile, chosen)


def ranked(
    problem: Problem,
    topology: TopologyLike,
    pin: PinMapping | Pins | None = None,
    *,
    workload: Workload | None = None,
    slack: float = math.inf,
    profile: FrameworkProfile | str | None = None,
    pareto: bool = False,
) -> Iterator[Ranked]:
    """All plans that fit, fastest first, each with its source."""
    started = time.perf_counter()
    source = _source(problem, topology, pin, workload, profile)
    preparing = time.perf_counter() - started
    entries = _in_order(source.workload, source.topology, source.pins, slack, pareto)
    return (replace(entry, build=partial(_build, entry, source, preparing)) for entry in entries)


def _build(entry: Ranked, source: Source, preparing: float) -> Plan:
    return _sourced(entry.build(), source, preparing)


def _sourced(plan: Plan, source: Source, preparing: float) -> Plan:
    """The plan with its source; its search time includes the time to prepare the problem."""
    return replace(
        plan, source=source, search=replace(plan.search, seconds=plan.search.seconds + preparing)
    )


def _source(
    problem: Problem,
    topology: TopologyLike,
    pin: PinMapping | Pins | None,
    workload: Workload | None,
    profile: FrameworkProfile | str | None,
) -> PlanSource:
    machine, pins = parse_topology(topology), Pins.parse(pin)
    prepared = prepared_workload(problem, machine, workload, profile, pins)
    return PlanSource(workload=prepared, topology=machine, pins=pins)
