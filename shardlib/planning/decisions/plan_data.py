"""One complete decision on how to run a training step, with what it is predicted to cost and how it
was found.

`PlanData` is the plain value: frozen, hashable, comparable, with JSON.
`shardlib.planning.plan.Plan` is the same value that can be asked about itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

from shardlib.axes import LogicalAxes, MeshShape
from shardlib.compact import compact
from shardlib.cost.estimate import Estimate
from shardlib.decisions.plain_data import identity, plain
from shardlib.layout import Layout
from shardlib.planning.decisions.activation_layout import ActivationLayout
from shardlib.planning.decisions.compiled_trials import Refined
from shardlib.planning.decisions.landscape import Priced
from shardlib.planning.decisions.purpose import Purpose
from shardlib.report import Finding
from shardlib.rules import Rules
from shardlib.untrusted.json_types import JsonMapping, JsonObject

#: Version of the JSON form; readers refuse others.
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """Where one parameter lives.

    Attributes:
        path: tree path of the parameter, "layers.mlp.up.kernel".
        shape: elements per dim.
        dtype: stored dtype.
        colours: colour per dim; None where the dim has none.
        compute: how it is sharded while it is used.
        rest: how it is sharded between uses (ZeRO 3 differs from `compute`).
        gradient: how its gradient is sharded when the optimizer reads it.
        state: how its optimizer state is sharded (ZeRO 1 and 2 differ from `rest`).
        role: see `shardlib.graph.problem.Parameter`; what is not trained has no gradient and no
            optimizer state, and their layouts are those of use and of rest.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    colours: LogicalAxes
    compute: Layout
    rest: Layout
    gradient: Layout
    state: Layout
    role: str = "trained"

    @property
    def trained(self) -> bool:
        """Whether it has a gradient and optimizer state."""
        return self.role == "trained"


@dataclass(frozen=True, kw_only=True)
class Link:
    """A part of a mesh axis: positions along one dim of one link tier.

    Attributes:
        kind: of the tier, "torus", "mesh", "switch", "network" or "memory".
        ways: number of positions.
    """

    kind: str
    ways: int


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A plan that was not chosen, and why.

    Attributes:
        mesh: its mesh.
        summary: its other decisions in a few words.
        reason: "slower", "memory", "indivisible" or "bound".
        step_seconds: its predicted time, or its lower bound where `reason` is "bound".
        peak_bytes: its predicted bytes per device; 0 where not evaluated.
    """

    mesh: MeshShape
    summary: str
    reason: str
    step_seconds: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Search:
    """The certificate of a search.

    Attributes:
        evaluations: plans priced exactly.
        candidates: plans in the space, priced or cut by a bound.
        lower_bound: seconds that no plan of the space can beat.
        gap: (chosen - lower_bound) / chosen; 0 is optimal within the cost model.
        seconds: wall time of the search.
        rejected: the best plan of each other mesh, the fastest first.
        counts: number of candidates by outcome.
        landscape: plans that were priced, spread over time and memory, the fastest first; all that
            need less memory than every faster one, to about 2%.
    """

    evaluations: int = 0
    candidates: int = 0
    lower_bound: float = 0.0
    gap: float = 0.0
    seconds: float = 0.0
    rejected: tuple[Rejected, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    landscape: tuple[Priced, ...] = ()

    __repr__ = compact


@dataclass(frozen=True, kw_only=True)
class PlanData(Purpose):
    """A complete decision for one model, batch and topology: all of `Decisions`, what they are made
    for, and what follows from them.

    Attributes:
        mesh, rules: as in `Decisions`; a plan has to say them. `rules` are colour -> mesh axes in
            compute, a priority list (see `shardlib.rules`).
        placement: for every axis the links that it runs along, the major one first; see
            `shardlib.hardware.placement`.
        parameters: layout of every parameter, in the order of the model's tree.
        batch_layouts: (path, layout) of every array of the batch.
        activations: layout of the main activations of a step, in the order of the program.
        estimate: predicted cost.
        search: how it was found.
        refined: what the compiler said, where it was asked (`shardlib.plan(..., refine=K)`); the
            estimate stays the prediction.
        findings: what the user should know.
    """

    mesh: MeshShape = field()
    rules: Rules = field()
    placement: tuple[tuple[str, tuple[Link, ...]], ...] = ()
    parameters: tuple[ParameterLayout, ...] = ()
    batch_layouts: tuple[tuple[str, Layout], ...] = ()
    activations: tuple[ActivationLayout, ...] = ()
    estimate: Estimate
    search: Search = Search()
    refined: Refined | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def decisions(self) -> JsonObject:
        """The decisions alone, in the words of pins."""
        return plain(self)

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that identify the decisions, the model and the topology."""
        told_apart = {
            "model": self.model,
            "topology": self.topology,
            **identity(self),
            **({"framework": self.framework.to_json()} if self.framework else {}),
            "parameters": [
                [
                    p.path,
                    list(p.shape),
                    p.rest.to_json(),
                    p.state.to_json(),
                    *(() if p.trained else (p.role,)),
                ]
                for p in self.parameters
            ],
        }
        return hashlib.sha256(json.dumps(told_apart, sort_keys=True).encode()).hexdigest()[:12]

    def with_findings(self, *findings: Finding) -> Self:
        """The same plan with more findings."""
        return replace(self, findings=(*self.findings, *findings))


def plan_to_data(plan: PlanData) -> JsonObject:
    """The plan as plain lists, dicts, strings and numbers."""
    data = _content(plan)
    return {**data, "checksum": checksum(data)}


def checksum(content: JsonMapping) -> str:
    """SHA-256 of a plan as plain data, its own checksum left out; whatever the order of keys, and
    whether a whole number has a point.
    """
    return hashlib.sha256(
        json.dumps(
            _canonical({key: value for key, value in content.items() if key != "checksum"}),
            sort_keys=True,
            separators=(",", ":"),
        ).encode()
    ).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _canonical(one) for key, one in cast("Mapping[str, Any]", value).items()}
    return (
        [_canonical(one) for one in cast("list[Any]", value)]
        if isinstance(value, list | tuple)
        else value
    )


def _content(plan: PlanData) -> JsonObject:
    return {
        "format": FORMAT,
        "digest": plan.digest,
        "model": plan.model,
        "topology": plan.topology,
        **plan.decisions,
        "placement": {
            axis: [[link.kind, link.ways] for link in links] for axis, links in plan.placement
        },
        "estimate": plan.estimate.to_json(),
        "search": {
            "gap": plan.search.gap,
            "seconds": plan.search.seconds,
            "evaluations": plan.search.evaluations,
            "candidates": plan.search.candidates,
            "lower_bound": plan.search.lower_bound,
            "counts": dict(plan.search.counts),
            "rejected": [
                {
                    "mesh": dict(r.mesh),
                    "summary": r.summary,
                    "reason": r.reason,
                    "step_seconds": r.step_seconds,
                    "peak_bytes": r.peak_bytes,
                }
                for r in plan.search.rejected
            ],
            "landscape": [point.to_json() for point in plan.search.landscape],
        },
        "refined": plan.refined.to_json() if plan.refined else None,
        "parameters": [
            {
                "path": p.path,
                "shape": list(p.shape),
                "dtype": p.dtype,
                "colours": list(p.colours),
                "compute": p.compute.to_json(),
                "rest": p.rest.to_json(),
                "gradient": p.gradient.to_json(),
                "state": p.state.to_json(),
                **({} if p.trained else {"role": p.role}),
            }
            for p in plan.parameters
        ],
        "batch_layouts": [[path, layout.to_json()] for path, layout in plan.batch_layouts],
        "activations": [one.to_json() for one in plan.activations],
        "findings": [finding.to_json() for finding in plan.findings],
        "origin": dict(plan.origin),
        **({"framework": plan.framework.to_json()} if plan.framework else {}),
    }
