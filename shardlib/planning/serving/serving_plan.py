"""How a model is served on a machine, with what that is predicted to do and how it was found.

The value is frozen and has JSON. A plan that was just made can be asked on: `why_not`, `pareto`,
`replan`; one that was read from a file does not carry its model. The answers are functions of a
plan, which its methods import when they are called.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, cast

from shardlib.errors import PlanError
from shardlib.hardware.topology import TopologyLike
from shardlib.planning.serving.estimate import ServingEstimate, ServingPoint
from shardlib.planning.serving.pins import ServingPin, ServingPins
from shardlib.planning.serving.space import Asked
from shardlib.planning.serving.workload import ServingWorkload
from shardlib.report import Finding
from shardlib.untrusted import construct, shown
from shardlib.untrusted.documents import parse_json
from shardlib.untrusted.json_types import Json, JsonMapping, JsonObject

if TYPE_CHECKING:
    from shardlib.planning.serving.two_meshes import TwoMeshes

#: Version of the JSON form; readers refuse others.
FORMAT = "serving-2"


@dataclass(frozen=True, kw_only=True)
class ServingSearch:
    """How a plan was found.

    Attributes:
        candidates: choices that were priced: all that fit.
        kept: those that keep to the limits.
        gap: by how much a better one could be missed; 0, since every one was priced.
        seconds: of the search, without tracing; not part of the value.
    """

    candidates: int
    kept: int
    gap: float
    seconds: float = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class ServingChoice:
    """What a serving plan decides.

    Attributes:
        mesh: sizes of the mesh axes of a replica: "tensor", devices that share every layer.
        replicas: groups of such devices, each of which serves requests of its own.
        batch: requests that a replica serves at a time.
        page: tokens of a page of the cache.
        pages: of a replica: those of a whole batch of requests at their ends.
        chunk: tokens of prompts that a step computes at most.
    """

    mesh: Mapping[str, int]
    replicas: int
    batch: int
    page: int
    pages: int
    chunk: int

    def __hash__(self) -> int:
        return hash((frozenset(self.mesh.items()), self.replicas, self.batch, self.pages))

    @property
    def tensor(self) -> int:
        """Devices that share every layer."""
        return self.mesh.get("tensor", 1)


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """How a model is served.

    Attributes:
        model: its name.
        parameters: elements of its weights.
        topology: the machine's.
        workload: what was asked for.
        pins: what was fixed by hand.
        choice: what was decided.
        estimate: what that is predicted to do.
        search: how it was found.
        findings: what is worth knowing before it is used.
        asked: what it was made from; not part of the value, and absent from JSON.
    """

    model: str
    parameters: int
    topology: str
    workload: ServingWorkload
    pins: ServingPins
    choice: ServingChoice
    estimate: ServingEstimate
    search: ServingSearch
    findings: tuple[Finding, ...] = ()
    asked: Asked | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        from shardlib.planning.serving.card import serving_line

        return serving_line(self)

    def _repr_html_(self) -> str:
        from shardlib.planning.serving.card import serving_card

        return serving_card(self, self.pareto() if self.asked is not None else ())

    def explain(self) -> str:
        """What was chosen, what it is predicted to do, and what limits it, as text of at most 100
        columns.
        """
        from shardlib.planning.serving.text import explained

        return explained(self)

    def pareto(self) -> tuple[ServingPoint, ...]:
        """The choices that no other beats in both: tokens a second and chip, and seconds from token
        to token; within the limits, the fastest from token to token first.
        """
        from shardlib.planning.serving.search import search

        return search(asked_of(self)).front()

    def two_meshes(self) -> TwoMeshes | None:
        """What prompts on a mesh of their own would give, within the limits and with as many
        requests as can be served; None where there is no such plan.
        """
        from shardlib.planning.serving.two_meshes import two_meshes

        return two_meshes(asked_of(self))

    def why_not(self, **pin: ServingPin) -> str:
        """What the best plan under other pins would do: `plan.why_not(tensor=16)`."""
        from shardlib.planning.serving.planner import why_not

        return why_not(self, pin)

    def diff(self, other: ServingPlan) -> str:
        """What another plan decides and does differently, as text of at most 100 columns."""
        from shardlib.planning.serving.text import differences

        return differences(self, other)

    def replan(
        self, topology: TopologyLike | None = None, *, lost: Iterable[int] = ()
    ) -> ServingPlan:
        """The best plan for the same workload on another machine, or without some of the devices.

        A replica is a run of neighbouring devices; one that has lost a device is gone, whatever the
        number of devices that share a layer.
        """
        from shardlib.planning.serving.planner import replan

        return replan(self, topology, lost)

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(to_data(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> ServingPlan:
        """A plan from its JSON."""
        return plan_from_text(text)


def asked_of(plan: ServingPlan) -> Asked:
    """What a plan was made from."""
    if plan.asked is None:
        raise PlanError(
            "this plan was read from a file and does not carry its model\nTry:"
            " shardlib.plan_serving again"
        )
    return plan.asked


def to_data(plan: ServingPlan) -> JsonObject:
    """A plan as plain data, with what is decided at the top."""
    found: JsonObject = {
        "format": FORMAT,
        "model": plan.model,
        "parameters": plan.parameters,
        "topology": plan.topology,
        "workload": asdict(plan.workload),
        "pins": dict(plan.pins.to_json()),
        **asdict(plan.choice),
        "mesh": dict(plan.choice.mesh),
        "estimate": plan.estimate.to_json(),
        "search": asdict(plan.search),
        "findings": [one.to_json() for one in plan.findings],
    }
    return {**found, "checksum": _checksum(found)}


def plan_from_text(text: str) -> ServingPlan:
    """A plan from its JSON."""
    data: Json = parse_json(text, "the plan", PlanError)
    table = dict(cast("JsonMapping", data)) if isinstance(data, Mapping) else {}
    if table.get("format") != FORMAT:
        raise PlanError(
            f"this is no serving plan of format {FORMAT} (found {shown(table.get('format'))})\nTry:"
            " make it with `shardlib plan MODEL --serve ... --out plan.json`"
        )
    said = table.pop("checksum", None)
    if said != _checksum(table):
        raise PlanError(
            "the plan was changed since it was written\nTry: make it again with `shardlib plan"
            " MODEL --serve ... --out plan.json`"
        )
    choice = {name: table.get(name) for name in ServingChoice.__dataclass_fields__}
    return construct(
        ServingPlan, {**table, "choice": choice, "asked": None}, "the plan", PlanError, least=0.0
    )


def _checksum(data: JsonObject) -> str:
    """Of the content without the checksum; it says that nobody changed it, and is no signature."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
