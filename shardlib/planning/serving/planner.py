"""The search for the best serving plan, and the questions that search again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardlib.cost.serving.memory import ServingBytes, limit, temporaries
from shardlib.cost.serving.step_price import Load
from shardlib.errors import InfeasibleError, PinError, TopologyError
from shardlib.hardware.topology import TopologyLike
from shardlib.hardware.topology import topology as parse_topology
from shardlib.planning.serving.estimate import ServingEstimate, ServingPoint
from shardlib.planning.serving.findings import findings
from shardlib.planning.serving.pins import ServingPin, ServingPins
from shardlib.planning.serving.search import Found, search
from shardlib.planning.serving.serving_plan import (
    ServingChoice,
    ServingPlan,
    ServingSearch,
    asked_of,
)
from shardlib.planning.serving.space import Asked


def plan_served(asked: Asked) -> ServingPlan:
    """The best plan."""
    started = time.perf_counter()
    found = search(asked)
    return _made(found, found.point(found.best()), started)


def _made(found: Found, point: ServingPoint, started: float) -> ServingPlan:
    asked = found.asked
    replica = asked.replica(point.tensor)
    assert replica is not None
    estimate = _estimate(asked, point)
    return ServingPlan(
        model=asked.model.name,
        parameters=asked.model.parameters,
        topology=asked.topology.name,
        workload=asked.workload,
        pins=asked.pins,
        choice=ServingChoice(
            mesh={"tensor": point.tensor},
            replicas=point.replicas,
            batch=point.batch,
            page=replica.page,
            pages=replica.pages(point.batch, point.chunk)[0],
            chunk=point.chunk,
        ),
        estimate=estimate,
        findings=findings(asked, point, estimate),
        search=ServingSearch(
            candidates=found.priced,
            kept=len(found.choices),
            gap=0.0,
            seconds=time.perf_counter() - started,
        ),
        asked=asked,
    )


def _estimate(asked: Asked, point: ServingPoint) -> ServingEstimate:
    replica = asked.replica(point.tensor)
    assert replica is not None
    load, pricing = asked.workload, replica.pricing
    rows = float(point.running)
    alone = Load(rows=rows, context=load.context)
    beside = replace(
        alone,
        prompt=float(point.chunk),
        before=load.prompt / 2,
        ended=point.chunk / load.prompt,
    )

    def parts(one: Load) -> tuple[tuple[str, float], ...]:
        return tuple((part, float(seconds)) for part, seconds in pricing.parts(one).items())

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
            limit=limit(asked.topology.chip),
        ),
    )


def why_not(plan: ServingPlan, pin: Mapping[str, ServingPin]) -> str:
    """What the best plan under other pins would do, see `ServingPlan.why_not`."""
    asked = asked_of(plan)
    pins = asked.pins.changed(ServingPins.parse(pin))
    try:
        other = plan_served(replace(asked, pins=pins))
    except (InfeasibleError, PinError) as error:
        return str(error)
    return plan.diff(other)


def replan(plan: ServingPlan, topology: TopologyLike | None, lost: Iterable[int]) -> ServingPlan:
    """The best plan on another machine, see `ServingPlan.replan`."""
    asked = asked_of(plan)
    machine = asked.topology if topology is None else parse_topology(topology)
    gone = {*lost}
    wrong = sorted(str(n) for n in gone if not 0 <= n < machine.devices)
    if wrong:
        raise TopologyError(
            f"{machine.name} has no devices {', '.join(wrong)}; they are numbered from 0 to"
            f" {machine.devices - 1}"
        )
    other = replace(asked, topology=machine)
    return _without(other, gone) if gone else plan_served(other)


def _without(asked: Asked, gone: set[int]) -> ServingPlan:
    """The best plan of the replicas that have all their devices."""
    started = time.perf_counter()
    best: tuple[Found, int] | None = None
    failures: list[InfeasibleError | PinError] = []
    for tensor in asked.tensors():
        whole = sum(
            gone.isdisjoint(range(first, first + tensor))
            for first in range(0, asked.topology.devices, tensor)
        )
        whole = min(whole, asked.pins.replicas or whole)
        if not whole:
            continue
        counts = [whole] if asked.workload.rate is None else range(1, whole + 1)
        for count in counts:
            pins = replace(asked.pins, tensor=tensor, replicas=count)
            try:
                found = search(replace(asked, pins=pins))
            except (InfeasibleError, PinError) as error:
                failures.append(error)
                continue
            row = found.best()
            if best is None or _better(found, row, *best):
                best = found, row
    if best is None:
        raise (
            failures[0]
            if failures
            else InfeasibleError(
                f"no group of devices of {asked.topology.name} is whole without"
                f" {len(gone)} of them",
                short_bytes=0,
            )
        )
    found, row = best
    made = _made(found, found.point(row), started)
    return replace(made, pins=asked.pins, asked=asked)


def _better(found: Found, row: int, other: Found, at: int) -> bool:
    def key(one: Found, here: int) -> tuple[float, float]:
        tpot = float(one.choices[here, 5])
        served = -float(one.choices[here, 7])
        if one.asked.workload.rate is not None:
            served = float(one.choices[here, 8])
        return (tpot, served) if one.asked.workload.objective == "latency" else (served, tpot)

    return key(found, row) < key(other, at)
