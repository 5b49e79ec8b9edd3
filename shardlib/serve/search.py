"""The search for a serving plan: the best choice under the limits, the curve of the best plans, and
questions that search again.

Every choice of the space is priced, so the answer is exact within the prices, and nothing has to be
bounded. Without a rate, all devices work and as many requests come as can be served. With one, the
fewest requests run at a time that sustain it, slots are kept for chance (three standard deviations
of a Poisson number), and devices that are not needed stay unused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardlib.errors import InfeasibleError, PinError, TopologyError
from shardlib.findings import Finding, diagnostic
from shardlib.machines.topology import TopologyLike
from shardlib.machines.topology import topology as parse_topology
from shardlib.report.elements import (
    bytes_text,
    count_text,
    percent_text,
    seconds_text,
)
from shardlib.serve.cost import ServingBytes, limit, temporaries
from shardlib.serve.plan import (
    ServingChoice,
    ServingEstimate,
    ServingPlan,
    ServingSearch,
    source_of,
)
from shardlib.serve.space import (
    NO_CHOICES,
    Choices,
    Replica,
    ServingPin,
    ServingPins,
    ServingPoint,
    ServingProblem,
    all_priced,
    saturated,
    sustained,
)


@dataclass(frozen=True, kw_only=True)
class PricedSpace:
    """The choices of a problem.

    Attributes:
        choices: with their predictions.
        priced: how many were priced, those included that do not keep to the limits.
    """

    problem: ServingProblem
    choices: Choices
    priced: int

    def within(self, *, ttft: bool = True, tpot: bool = True) -> PricedSpace:
        """The choices that keep to the limits."""
        load, choices = self.problem.workload, self.choices
        keep = np.ones(len(choices), bool)
        if tpot and load.tpot is not None:
            keep &= choices.tpot_seconds <= load.tpot
        if ttft and load.ttft is not None:
            keep &= choices.ttft_seconds <= load.ttft
        return replace(self, choices=choices.take(keep))

    def best(self) -> ServingPoint:
        """The best choice by the objective."""
        choices = self.choices
        tpot, per_chip = choices.tpot_seconds, -choices.output_tokens_per_second_per_chip
        latency = self.problem.workload.objective == "latency"
        first, second = (tpot, per_chip) if latency else (per_chip, tpot)
        return choices.point(int(np.lexsort((choices.ttft_seconds, second, first))[0]))

    def front(self) -> tuple[ServingPoint, ...]:
        """The choices with more tokens a second and chip than all that are as fast from token to
        token, the fastest first.
        """
        choices = self.choices
        per_chip = choices.output_tokens_per_second_per_chip
        order = np.lexsort((choices.ttft_seconds, -per_chip, choices.tpot_seconds))
        per_chip = per_chip[order]
        before = np.concatenate([[-np.inf], np.maximum.accumulate(per_chip)[:-1]])
        return tuple(choices.point(int(row)) for row in order[per_chip > before * (1 + 1e-12)])


def search(problem: ServingProblem) -> PricedSpace:
    """Every choice that keeps to the limits."""
    space = all_choices(problem)
    within_limits = space.within()
    if not len(within_limits.choices):
        raise _infeasible(space)
    return within_limits


def all_choices(problem: ServingProblem) -> PricedSpace:
    """Every choice, whatever the limits."""
    tables, count = [NO_CHOICES], 0
    for replica, choices in all_priced(problem):
        count += len(choices)
        rate = problem.workload.rate
        tables.append(sustained(replica, choices, rate) if rate else saturated(replica, choices))
    return PricedSpace(problem=problem, choices=Choices.joined(tables), priced=count)


def _infeasible(space: PricedSpace) -> PinError | InfeasibleError:
    """The error where there is no choice."""
    problem, load = space.problem, space.problem.workload
    name, machine = problem.model.name, problem.topology.name
    pinned = f" under the pins {problem.pins.to_json()}" if problem.pins.to_json() else ""
    replicas = problem.replicas()
    if not replicas:
        return PinError(
            f"{machine} has no group of {problem.pins.tensor} devices among"
            f" {problem.topology.devices}"
        )
    fewest = min(replica.tensor for replica in replicas)
    if (problem.pins.replicas or 1) * fewest > problem.topology.devices:
        return PinError(
            f"{problem.pins.replicas} groups of {fewest} devices are more than the"
            f" {problem.topology.devices} of {machine}"
        )
    if not space.priced:
        chunk = problem.chunks()[0]
        batch = problem.pins.batch or 1
        short_bytes = min(replica.short(batch, chunk) for replica in replicas)
        if short_bytes > 0:
            return InfeasibleError(
                f"{name} does not fit {machine}{pinned}: with {batch} requests of {load.tokens}"
                f" tokens a device lacks {bytes_text(short_bytes)}\nTry: more devices,"
                " weights='int8', cache='int8', or shorter requests",
                short_bytes=math.ceil(short_bytes),
            )
        return PinError(
            f"prompts come faster than chunks of {problem.chunks()[-1]} tokens compute"
            f" them{pinned}: a request has {load.prompt} tokens of prompt for {load.output} of"
            " answer\nTry: a larger chunk, or a smaller batch"
        )
    if not len(space.choices):
        best = max(
            float(choices.requests_per_second.max()) * max(replica.counts, default=0)
            for replica, choices in all_priced(problem)
        )
        return InfeasibleError(
            f"{name} on {machine} serves {count_text(best)} requests a second at"
            f" most{pinned}, and {load.rate:g} are asked for\nTry: more devices, or a longer tpot",
            short_bytes=0,
        )
    return InfeasibleError(
        f"no plan for {name} on {machine}{pinned} keeps to the limits: {_least_limits(space)}"
        "\nTry: longer limits, more devices, or weights='int8'",
        short_bytes=0,
    )


def _least_limits(space: PricedSpace) -> str:
    """Describes the best value of each bound under the other."""
    load = space.problem.workload
    reached: list[str] = []
    for name, bound, others in (
        ("tpot", load.tpot, space.within(tpot=False).choices),
        ("ttft", load.ttft, space.within(ttft=False).choices),
    ):
        if bound is None:
            continue
        field, text = f"{name}_seconds", f"{name} {seconds_text(bound)}"
        alone = float(getattr(space.choices, field).min())
        reached.append(f"{text} is asked for, and {seconds_text(alone)} can be reached")
        if len(others) and alone <= bound:
            lowest = float(getattr(others, field).min())
            reached[-1] += f", {seconds_text(lowest)} within the other bound"
    return "; ".join(reached)


def plan_served(problem: ServingProblem) -> ServingPlan:
    """The best plan."""
    started = time.perf_counter()
    return _plan(search(problem), started)


def _plan(space: PricedSpace, started: float) -> ServingPlan:
    problem, point = space.problem, space.best()
    replica = problem.replica(point.tensor)
    assert replica is not None
    estimate = _estimate(replica, point)
    return ServingPlan(
        model=problem.model.name,
        parameters=problem.model.parameters,
        topology=problem.topology.name,
        workload=problem.workload,
        pins=problem.pins,
        choice=ServingChoice(
            mesh={"tensor": point.tensor},
            replicas=point.replicas,
            batch=point.batch,
            page=replica.page,
            pages=replica.pages(point.batch, point.chunk)[0],
            chunk=point.chunk,
        ),
        estimate=estimate,
        findings=findings(problem, point, estimate),
        search=ServingSearch(
            candidates=space.priced,
            kept=len(space.choices),
            gap=0.0,
            seconds=time.perf_counter() - started,
        ),
        source=problem,
    )


def _estimate(replica: Replica, point: ServingPoint) -> ServingEstimate:
    load, pricing = replica.problem.workload, replica.pricing
    decode, prompt = (
        tuple((part, float(seconds)) for part, seconds in pricing.parts(step).items())
        for step in replica.steps(float(point.running), point.chunk)
    )
    split = pricing.split
    return ServingEstimate(
        ttft_seconds=point.ttft_seconds,
        tpot_seconds=point.tpot_seconds,
        output_tokens_per_second_per_chip=point.output_tokens_per_second_per_chip,
        requests_per_second=point.requests_per_second,
        chips=point.chips,
        decode=decode,
        prompt=prompt,
        chunk_share=point.running * load.prompt / (load.output * point.chunk),
        device_bytes=ServingBytes(
            weights=split.weights,
            cache=replica.cache_bytes(point.batch, point.chunk),
            temporaries=temporaries(split, tokens=point.batch + point.chunk, rows=point.batch),
            limit=limit(pricing.chip),
        ),
    )


def why_not(plan: ServingPlan, pin: Mapping[str, ServingPin]) -> str:
    """Returns the best plan under other pins, see `ServingPlan.why_not`."""
    problem = source_of(plan)
    pins = problem.pins.changed(ServingPins.parse(pin))
    try:
        alternative = plan_served(replace(problem, pins=pins))
    except (InfeasibleError, PinError) as error:
        return str(error)
    return plan.diff(alternative)


def replan(plan: ServingPlan, topology: TopologyLike | None, lost: Iterable[int]) -> ServingPlan:
    """The best plan on another machine, see `ServingPlan.replan`."""
    problem = source_of(plan)
    machine = problem.topology if topology is None else parse_topology(topology)
    gone = {*lost}
    wrong = sorted(str(n) for n in gone if not 0 <= n < machine.devices)
    if wrong:
        raise TopologyError(
            f"{machine.name} has no devices {', '.join(wrong)}; they are numbered from 0 to"
            f" {machine.devices - 1}"
        )
    elsewhere = replace(problem, topology=machine)
    return _without(elsewhere, gone) if gone else plan_served(elsewhere)


def _without(problem: ServingProblem, gone: set[int]) -> ServingPlan:
    """The best plan of the replicas that have all their devices."""
    started = time.perf_counter()
    spaces: list[PricedSpace] = []
    failures: list[InfeasibleError | PinError] = []
    for tensor in problem.tensors():
        replicas = sum(
            gone.isdisjoint(range(first, first + tensor))
            for first in range(0, problem.topology.devices, tensor)
        )
        replicas = min(replicas, problem.pins.replicas or replicas)
        if not replicas:
            continue
        counts = [replicas] if problem.workload.rate is None else range(1, replicas + 1)
        for count in counts:
            pins = replace(problem.pins, tensor=tensor, replicas=count)
            try:
                spaces.append(search(replace(problem, pins=pins)))
            except (InfeasibleError, PinError) as error:
                failures.append(error)
    if spaces:
        plan = _plan(min(spaces, key=_rank), started)
        return replace(plan, pins=problem.pins, source=problem)
    if failures:
        raise failures[0]
    raise InfeasibleError(
        f"no group of devices of {problem.topology.name} is whole without {len(gone)} of them",
        short_bytes=0,
    )


def _rank(space: PricedSpace) -> tuple[float, float]:
    """Order of the best choices under several numbers of replicas: with a rate the fewest chips
    first, else the most requests.
    """
    point, load = space.best(), space.problem.workload
    served = -point.requests_per_second if load.rate is None else float(point.chips)
    latency = load.objective == "latency"
    return (point.tpot_seconds, served) if latency else (served, point.tpot_seconds)


#: Chips of the runs that the constants were learned from.
LEARNED_ON: frozenset[str] = frozenset({"a100", "h100", "h200", "v4", "v6e"})


#: Share of the memory above which a plan is called tight.
TIGHT = 0.98


@diagnostic
def findings(
    problem: ServingProblem, point: ServingPoint, estimate: ServingEstimate
) -> tuple[Finding, ...]:
    """Findings about a serving plan."""
    listed: list[Finding] = []
    if problem.topology.chip.name not in LEARNED_ON:
        listed.append(
            Finding(
                code="chip-not-measured",
                severity="info",
                where="topology",
                message=(
                    f"no published run of a {problem.topology.chip.name} was at hand: its seconds"
                    " follow from its data sheet and from what was learned on"
                    f" {', '.join(sorted(LEARNED_ON))}."
                ),
            )
        )
    nbytes = estimate.device_bytes
    if nbytes.peak > TIGHT * nbytes.limit:
        listed.append(
            Finding(
                code="memory-full",
                severity="info",
                where="batch",
                message=(
                    f"a device has {bytes_text(nbytes.peak)} of"
                    f" {bytes_text(nbytes.limit)}, {percent_text(nbytes.peak / nbytes.limit)}: the"
                    " batch is as large as pages of whole requests allow."
                ),
            )
        )
    return tuple(listed)
