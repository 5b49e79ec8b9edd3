"""How a model is served on a machine, with what that is predicted to do and how it was found.

The value is frozen and has JSON. A plan that was just made can be asked on: `why_not`, `pareto`,
`replan`; one that was read from a file does not carry its model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shardlib.cost.serving.memory import ServingBytes, limit, temporaries
from shardlib.cost.serving.step_price import Load
from shardlib.errors import InfeasibleError, PinError, PlanError, TopologyError
from shardlib.hardware.topology import TopologyLike
from shardlib.hardware.topology import topology as parse_topology
from shardlib.planning.serving.card import serving_card, serving_line
from shardlib.planning.serving.estimate import ServingEstimate, ServingPoint
from shardlib.planning.serving.findings import findings
from shardlib.planning.serving.pins import ServingPin, ServingPins
from shardlib.planning.serving.search import Found, search
from shardlib.planning.serving.serving_data import (
    ServingChoice,
    ServingData,
    ServingSearch,
    from_text,
    to_data,
)
from shardlib.planning.serving.space import Asked
from shardlib.planning.serving.text import differences, explained
from shardlib.planning.serving.two_meshes import TwoMeshes, two_meshes


@dataclass(frozen=True, kw_only=True)
class ServingPlan(ServingData):
    """How a model is served; what it consists of is listed at `ServingData`.

    Attributes:
        asked: what it was made from; not part of the value, and absent from JSON.
    """

    asked: Asked | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        return serving_line(self)

    def _repr_html_(self) -> str:
        return serving_card(self, self.pareto() if self.asked is not None else ())

    def explain(self) -> str:
        """What was chosen, what it is predicted to do, and what limits it, as text of at most 100
        columns.
        """
        return explained(self)

    def pareto(self) -> tuple[ServingPoint, ...]:
        """The choices that no other beats in both: tokens a second and chip, and seconds from token
        to token; within the limits, the fastest from token to token first.

        Raises:
            PlanError: the plan was read from a file and does not carry its model.
        """
        return search(_asked(self)).front()

    def two_meshes(self) -> TwoMeshes | None:
        """What prompts on a mesh of their own would give, within the limits and with as many
        requests as can be served; None where there is no such plan.

        Raises:
            PlanError: the plan was read from a file and does not carry its model.
        """
        return two_meshes(_asked(self))

    def why_not(self, **pin: ServingPin) -> str:
        """What the best plan under other pins would do: `plan.why_not(tensor=16)`.

        Args:
            pin: decisions by their words, see `shardlib.plan_serving`.

        Returns:
            The difference to this plan as text, or why there is no such plan.

        Raises:
            PinError: a pin is misspelt, or out of range.
            PlanError: the plan was read from a file and does not carry its model.
        """
        asked = _asked(self)
        pins = asked.pins.changed(ServingPins.parse(pin))
        try:
            other = plan_served(replace(asked, pins=pins))
        except (InfeasibleError, PinError) as error:
            return str(error)
        return self.diff(other)

    def diff(self, other: ServingPlan) -> str:
        """What another plan decides and does differently, as text of at most 100 columns.

        Args:
            other: a plan of any model or machine.
        """
        return differences(self, other)

    def replan(
        self, topology: TopologyLike | None = None, *, lost: Iterable[int] = ()
    ) -> ServingPlan:
        """The best plan for the same workload on another machine, or without some of the devices.

        A replica is a run of neighbouring devices; one that has lost a device is gone, whatever the
        number of devices that share a layer.

        Args:
            topology: the machine; the same if left out.
            lost: numbers of devices that are gone.

        Raises:
            TopologyError: the machine has no such devices.
            InfeasibleError: nothing fits what is left, or keeps to the limits.
            PlanError: the plan was read from a file and does not carry its model.
        """
        asked = _asked(self)
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

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(to_data(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> ServingPlan:
        """A plan from its JSON.

        Args:
            text: what `to_json` gave.

        Raises:
            PlanError: it is no plan that serves.
        """
        return from_text(cls, text)


def plan_served(asked: Asked) -> ServingPlan:
    """The best plan.

    Args:
        asked: what is planned.

    Raises:
        PinError: the pins leave no choice.
        InfeasibleError: the model does not fit, or nothing keeps to the limits.
    """
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


def _asked(plan: ServingPlan) -> Asked:
    if plan.asked is None:
        raise PlanError(
            "this plan was read from a file and does not carry its model\nTry:"
            " shardlib.plan_serving again"
        )
    return plan.asked


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
