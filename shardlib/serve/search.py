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
from collections.abc import Iterable, Iterator, Mapping
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
from shardlib.serve.cost import Load, ServingBytes, limit, temporaries
from shardlib.serve.plan import (
    ServingChoice,
    ServingEstimate,
    ServingPlan,
    ServingPoint,
    ServingSearch,
    asked_of,
)
from shardlib.serve.space import (
    Asked,
    Numbers,
    Priced,
    ServingPin,
    ServingPins,
    all_priced,
)

#: Columns of the table of choices.
_COLUMNS = 9


@dataclass(frozen=True, kw_only=True)
class Found:
    """All choices of a space.

    Attributes:
        asked: what is planned.
        choices: one row each: tensor, replicas, batch, chunk, running, tpot, ttft, requests a
            second, chips.
        priced: how many were priced, those included that do not keep to the limits.
    """

    asked: Asked
    choices: Numbers
    priced: int

    @property
    def per_chip(self) -> Numbers:
        """Tokens of answers a second and chip, of each choice."""
        return self.choices[:, 7] * self.asked.workload.output / self.choices[:, 8]

    def within(self, *, ttft: bool = True, tpot: bool = True) -> Found:
        """The choices that keep to the limits."""
        load = self.asked.workload
        keep = np.ones(len(self.choices), bool)
        if tpot and load.tpot is not None:
            keep &= self.choices[:, 5] <= load.tpot
        if ttft and load.ttft is not None:
            keep &= self.choices[:, 6] <= load.ttft
        return Found(asked=self.asked, choices=self.choices[keep], priced=self.priced)

    def point(self, row: int) -> ServingPoint:
        """A choice."""
        tensor, replicas, batch, chunk, running, tpot, ttft, requests, chips = self.choices[row]
        return ServingPoint(
            tensor=int(tensor),
            replicas=int(replicas),
            batch=int(batch),
            chunk=int(chunk),
            running=int(running),
            tpot_seconds=float(tpot),
            ttft_seconds=float(ttft),
            requests_per_second=float(requests),
            output_tokens_per_second_per_chip=float(self.per_chip[row]),
            chips=int(chips),
        )

    def best(self) -> int:
        """The row of the best choice by the objective."""
        tpot, ttft, per_chip = self.choices[:, 5], self.choices[:, 6], -self.per_chip
        first = tpot if self.asked.workload.objective == "latency" else per_chip
        second = per_chip if self.asked.workload.objective == "latency" else tpot
        return int(np.lexsort((ttft, second, first))[0])

    def front(self) -> tuple[ServingPoint, ...]:
        """The choices with more tokens a second and chip than all that are as fast from token to
        token, the fastest first.
        """
        order = np.lexsort((self.choices[:, 6], -self.per_chip, self.choices[:, 5]))
        per_chip = self.per_chip[order]
        before = np.concatenate([[-np.inf], np.maximum.accumulate(per_chip)[:-1]])
        return tuple(self.point(int(row)) for row in order[per_chip > before * (1 + 1e-12)])


def search(request: Asked) -> Found:
    """Every choice that keeps to the limits."""
    choices = all_choices(request)
    within_limits = choices.within()
    if not len(within_limits.choices):
        raise _infeasible(choices)
    return within_limits


def all_choices(request: Asked) -> Found:
    """Every choice, whatever the limits."""
    rows: list[Numbers] = []
    count = 0
    for prices in all_priced(request):
        count += len(prices.batch)
        rows.append(_sustained(prices) if request.workload.rate else _saturated(prices))
    table = np.concatenate(rows) if rows else np.zeros((0, _COLUMNS))
    return Found(asked=request, choices=table, priced=count)


def _replicas(prices: Priced) -> Iterator[int]:
    """Numbers of replicas that the devices and the pins allow."""
    request = prices.replica.asked
    limit = request.topology.devices // prices.replica.tensor
    pinned = request.pins.replicas
    if pinned is None:
        yield from range(1, limit + 1)
    elif pinned <= limit:
        yield pinned


def _saturated(prices: Priced) -> Numbers:
    """All devices, and requests in every slot."""
    replicas = max(_replicas(prices), default=0)
    tensor, batch = prices.replica.tensor, prices.batch
    if not replicas:
        return np.zeros((0, _COLUMNS))
    same = np.ones_like(batch)
    return np.stack(
        [
            tensor * same,
            replicas * same,
            batch,
            prices.chunk * same,
            batch,
            prices.tpot,
            prices.ttft,
            replicas * prices.requests,
            tensor * replicas * same,
        ],
        axis=1,
    )


def _sustained(prices: Priced) -> Numbers:
    """For each number of replicas the fewest requests at a time that sustain the rate."""
    request = prices.replica.asked
    rate = request.workload.rate or 0.0
    replicas = np.array(list(_replicas(prices)), float)
    reached = np.maximum.accumulate(prices.requests)
    positions = np.searchsorted(reached, rate / replicas)
    feasible = positions < len(reached)
    replicas, positions = replicas[feasible], positions[feasible]
    running = prices.batch[positions]
    slots = np.ceil(running + 3 * np.sqrt(running))
    if request.pins.batch is not None:
        slots = np.full_like(running, request.pins.batch)
    feasible = slots <= prices.replica.most(prices.chunk)
    replicas, positions, running, slots = (
        replicas[feasible],
        positions[feasible],
        running[feasible],
        slots[feasible],
    )
    tensor = np.full_like(running, prices.replica.tensor)
    return np.stack(
        [
            tensor,
            replicas,
            slots,
            np.full_like(running, prices.chunk),
            running,
            prices.tpot[positions],
            prices.ttft[positions],
            np.full_like(running, rate),
            tensor * replicas,
        ],
        axis=1,
    )


def _infeasible(outcome: Found) -> PinError | InfeasibleError:
    """Returns the error where there is no choice."""
    request, load = outcome.asked, outcome.asked.workload
    name, machine = request.model.name, request.topology.name
    pinned = f" under the pins {request.pins.to_json()}" if request.pins.to_json() else ""
    replicas = [
        replica for tensor in request.tensors() if (replica := request.replica(tensor)) is not None
    ]
    if not replicas:
        return PinError(
            f"{machine} has no group of {request.pins.tensor} devices among"
            f" {request.topology.devices}"
        )
    fewest = min(replica.tensor for replica in replicas)
    if (request.pins.replicas or 1) * fewest > request.topology.devices:
        return PinError(
            f"{request.pins.replicas} groups of {fewest} devices are more than the"
            f" {request.topology.devices} of {machine}"
        )
    if not outcome.priced:
        chunk = request.chunks()[0]
        batch = request.pins.batch or 1
        short_bytes = min(replica.short(batch, chunk) for replica in replicas)
        if short_bytes > 0:
            return InfeasibleError(
                f"{name} does not fit {machine}{pinned}: with {batch} requests of {load.tokens}"
                f" tokens a device lacks {bytes_text(short_bytes)}\nTry: more devices,"
                " weights='int8', cache='int8', or shorter requests",
                short_bytes=math.ceil(short_bytes),
            )
        return PinError(
            f"prompts come faster than chunks of {request.chunks()[-1]} tokens compute"
            f" them{pinned}: a request has {load.prompt} tokens of prompt for {load.output} of"
            " answer\nTry: a larger chunk, or a smaller batch"
        )
    if not len(outcome.choices):
        best = max(
            float(prices.requests.max()) * _most_replicas(prices) for prices in all_priced(request)
        )
        return InfeasibleError(
            f"{name} on {machine} serves {count_text(best)} requests a second at"
            f" most{pinned}, and {load.rate:g} are asked for\nTry: more devices, or a longer tpot",
            short_bytes=0,
        )
    return InfeasibleError(
        f"no plan for {name} on {machine}{pinned} keeps to the limits: {_least_limits(outcome)}"
        "\nTry: longer limits, more devices, or weights='int8'",
        short_bytes=0,
    )


def _most_replicas(prices: Priced) -> int:
    return max(_replicas(prices), default=0)


def _least_limits(outcome: Found) -> str:
    """Describes the best value of each bound under the other."""
    load = outcome.asked.workload
    reached: list[str] = []
    for name, bound, column, others in (
        ("tpot", load.tpot, 5, outcome.within(tpot=False)),
        ("ttft", load.ttft, 6, outcome.within(ttft=False)),
    ):
        if bound is None:
            continue
        alone, text = float(outcome.choices[:, column].min()), f"{name} {seconds_text(bound)}"
        reached.append(f"{text} is asked for, and {seconds_text(alone)} can be reached")
        if len(others.choices) and alone <= bound:
            lowest = float(others.choices[:, column].min())
            reached[-1] += f", {seconds_text(lowest)} within the other bound"
    return "; ".join(reached)


def plan_served(request: Asked) -> ServingPlan:
    """The best plan."""
    started = time.perf_counter()
    choices = search(request)
    return _plan(choices, choices.point(choices.best()), started)


def _plan(choices: Found, point: ServingPoint, started: float) -> ServingPlan:
    request = choices.asked
    replica = request.replica(point.tensor)
    assert replica is not None
    estimate = _estimate(request, point)
    return ServingPlan(
        model=request.model.name,
        parameters=request.model.parameters,
        topology=request.topology.name,
        workload=request.workload,
        pins=request.pins,
        choice=ServingChoice(
            mesh={"tensor": point.tensor},
            replicas=point.replicas,
            batch=point.batch,
            page=replica.page,
            pages=replica.pages(point.batch, point.chunk)[0],
            chunk=point.chunk,
        ),
        estimate=estimate,
        findings=findings(request, point, estimate),
        search=ServingSearch(
            candidates=choices.priced,
            kept=len(choices.choices),
            gap=0.0,
            seconds=time.perf_counter() - started,
        ),
        asked=request,
    )


def _estimate(request: Asked, point: ServingPoint) -> ServingEstimate:
    replica = request.replica(point.tensor)
    assert replica is not None
    load, pricing = request.workload, replica.pricing
    rows = float(point.running)
    alone = Load(rows=rows, context=load.context)
    beside = replace(
        alone,
        prompt=float(point.chunk),
        before=load.prompt / 2,
        ended=point.chunk / load.prompt,
    )

    def parts(load: Load) -> tuple[tuple[str, float], ...]:
        return tuple((part, float(seconds)) for part, seconds in pricing.parts(load).items())

    split = pricing.split
    return ServingEstimate(
        ttft_seconds=point.ttft_seconds,
        tpot_seconds=point.tpot_seconds,
        output_tokens_per_second_per_chip=point.output_tokens_per_second_per_chip,
        requests_per_second=point.requests_per_second,
        chips=point.chips,
        decode=parts(alone),
        prompt=parts(beside),
        chunk_share=point.running * load.prompt / (load.output * point.chunk),
        device_bytes=ServingBytes(
            weights=split.weights,
            cache=replica.cache_bytes(point.batch, point.chunk),
            temporaries=temporaries(split, tokens=point.batch + point.chunk, rows=point.batch),
            limit=limit(request.topology.chip),
        ),
    )


def why_not(plan: ServingPlan, pin: Mapping[str, ServingPin]) -> str:
    """Returns the best plan under other pins, see `ServingPlan.why_not`."""
    request = asked_of(plan)
    pins = request.pins.changed(ServingPins.parse(pin))
    try:
        alternative = plan_served(replace(request, pins=pins))
    except (InfeasibleError, PinError) as error:
        return str(error)
    return plan.diff(alternative)


def replan(plan: ServingPlan, topology: TopologyLike | None, lost: Iterable[int]) -> ServingPlan:
    """The best plan on another machine, see `ServingPlan.replan`."""
    request = asked_of(plan)
    machine = request.topology if topology is None else parse_topology(topology)
    gone = {*lost}
    wrong = sorted(str(n) for n in gone if not 0 <= n < machine.devices)
    if wrong:
        raise TopologyError(
            f"{machine.name} has no devices {', '.join(wrong)}; they are numbered from 0 to"
            f" {machine.devices - 1}"
        )
    elsewhere = replace(request, topology=machine)
    return _without(elsewhere, gone) if gone else plan_served(elsewhere)


def _without(request: Asked, gone: set[int]) -> ServingPlan:
    """The best plan of the replicas that have all their devices."""
    started = time.perf_counter()
    best: tuple[Found, int] | None = None
    failures: list[InfeasibleError | PinError] = []
    for tensor in request.tensors():
        replicas = sum(
            gone.isdisjoint(range(first, first + tensor))
            for first in range(0, request.topology.devices, tensor)
        )
        replicas = min(replicas, request.pins.replicas or replicas)
        if not replicas:
            continue
        counts = [replicas] if request.workload.rate is None else range(1, replicas + 1)
        for count in counts:
            pins = replace(request.pins, tensor=tensor, replicas=count)
            try:
                choices = search(replace(request, pins=pins))
            except (InfeasibleError, PinError) as error:
                failures.append(error)
                continue
            row = choices.best()
            if best is None or _better(choices, row, *best):
                best = choices, row
    if best is None:
        raise (
            failures[0]
            if failures
            else InfeasibleError(
                f"no group of devices of {request.topology.name} is whole without"
                f" {len(gone)} of them",
                short_bytes=0,
            )
        )
    choices, row = best
    plan = _plan(choices, choices.point(row), started)
    return replace(plan, pins=request.pins, asked=request)


def _better(choices: Found, row: int, others: Found, index: int) -> bool:
    def key(choices: Found, here: int) -> tuple[float, float]:
        tpot = float(choices.choices[here, 5])
        served = -float(choices.choices[here, 7])
        if choices.asked.workload.rate is not None:
            served = float(choices.choices[here, 8])
        return (tpot, served) if choices.asked.workload.objective == "latency" else (served, tpot)

    return key(choices, row) < key(others, index)


#: Chips of the runs that the constants were learned from.
LEARNED_ON: frozenset[str] = frozenset({"a100", "h100", "h200", "v4", "v6e"})


#: Share of the memory above which a plan is called tight.
TIGHT = 0.98


@diagnostic
def findings(request: Asked, point: ServingPoint, estimate: ServingEstimate) -> tuple[Finding, ...]:
    """Findings about a serving plan."""
    listed: list[Finding] = []
    if request.topology.chip.name not in LEARNED_ON:
        listed.append(
            Finding(
                code="chip-not-measured",
                severity="info",
                where="topology",
                message=(
                    f"no published run of a {request.topology.chip.name} was at hand: its seconds"
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
