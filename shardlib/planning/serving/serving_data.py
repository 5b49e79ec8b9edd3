"""The plain value of a serving plan: what was decided, and what that is predicted to do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TypeVar, cast

from shardlib.errors import PlanError
from shardlib.planning.serving.estimate import ServingEstimate
from shardlib.planning.serving.pins import ServingPins
from shardlib.planning.serving.workload import ServingWorkload
from shardlib.report import Finding
from shardlib.untrusted import construct, shown
from shardlib.untrusted.documents import parse_json
from shardlib.untrusted.json_types import Json, JsonMapping, JsonObject

#: Version of the JSON form; readers refuse others.
FORMAT = "serving-2"
P = TypeVar("P", bound="ServingData")


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
class ServingData:
    """A serving plan without what it was made from.

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


def to_data(plan: ServingData) -> JsonObject:
    """A plan as plain data, with what is decided at the top.

    Args:
        plan: the plan.
    """
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


def from_text(form: type[P], text: str) -> P:
    """A plan from its JSON.

    Args:
        form: the class of the plan.
        text: what `to_json` gave.

    Raises:
        PlanError: it is no plan that serves, a changed one, or has values that no plan has.
    """
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
        form, {**table, "choice": choice, "asked": None}, "the plan", PlanError, least=0.0
    )


def _checksum(data: JsonObject) -> str:
    """Of the content without the checksum; it says that nobody changed it, and is no signature."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
