"""One complete decision on how to run a training step, with what it is predicted to cost and how it
was found.

`PlanData` is the plain value: frozen, hashable, comparable, with JSON.
`shardlib.planning.plan.Plan` is the same value that can be asked about itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from shardlib.axes import LogicalAxes, MeshShape
from shardlib.cost.estimate import Estimate
from shardlib.layout import Layout
from shardlib.planning.decisions.compiled_trials import Refined
from shardlib.report import Finding
from shardlib.rules import Rules

#: Version of the JSON form; readers refuse others.
FORMAT = 1
#: Decisions that plans of older versions do not have, with what those did: where they are that,
#: they are no part of the identity.
LATER: Mapping[str, Any] = {
    "remat_classes": {},
    "dtypes": {},
    "accumulation": 1,
    "pipeline": "lockstep",
    "attention": "traced",
    "collective_matmul": "none",
}


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """Where one parameter lives.

    Attributes:
        path: tree path of the parameter, "layers.mlp.up.kernel".
        shape: elements per dim.
        dtype: dtype at rest.
        colours: colour per dim; None where the dim has none.
        compute: how it is cut while it is used.
        rest: how it is cut between uses (ZeRO 3 differs from `compute`).
        gradient: how its gradient is cut when the optimizer reads it.
        state: how its optimizer state is cut (ZeRO 1 and 2 differ from `rest`).
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
    """

    evaluations: int = 0
    candidates: int = 0
    lower_bound: float = 0.0
    gap: float = 0.0
    seconds: float = 0.0
    rejected: tuple[Rejected, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlanData:
    """A complete decision for one model, batch and topology.

    Attributes:
        model: name of the model, for people.
        topology: spelling of the topology it was made for.
        mesh: sizes of the mesh axes.
        placement: for every axis the links that it runs along, the major one first; see
            `shardlib.hardware.placement`.
        axis_order: mesh axes from the outermost to the innermost links, where it is not the usual
            order (`shardlib.axes.MESH_AXES`).
        rules: colour -> mesh axes in compute, a priority list (see `shardlib.rules`).
        sequence_parallel: whether activations without a tensor-cut dim are cut along the sequence
            instead.
        zero: what is cut over fsdp at rest: 0 nothing, 1 optimizer state, 2 gradients too, 3
            parameters too.
        remat: recomputation in the backward pass: "none" (as the model is written), "full" or a
            named policy.
        remat_layers: layers of the fullest stage that recompute; the others do not. 0 where all do
            as `remat` says.
        remat_classes: (class of layers, policy, layers of the fullest stage that follow it) of
            every class, where they differ; `remat` is then that of the most layers.
        microbatches: gradient accumulation steps; with stages, microbatches of the pipeline.
        accumulation: groups of microbatches that go through the pipeline one after the other;
            gradients are accumulated in pieces between them. 1 without stages.
        schedule: pipeline schedule; "none" without stages.
        virtual_stages: chunks of layers on each stage.
        gather: when a stage gathers weights that rest in pieces: "use", for every operation, or
            "once", for all microbatches of a group; see `docs/pipelines.md`.
        pipeline: how stages run: "lockstep", one program for all devices, or "programs", programs
            of their own that one process calls; see `docs/pipelines.md`.
        context: how keys and values meet queries along the context axis, "all-gather", "ring" or
            "ulysses"; "none" without one.
        attention: how the core of attention is computed: as the model is written ("traced"), or in
            one of the ways of `shardlib.graph.kernels`: in "blocks", by "splash" attention or by
            "cudnn".
        experts: "dropless" or "capacity", as the model says, where tokens are sent to their experts
            between devices; "none" where they are sorted as the model is written.
        collective_matmul: how the sequence is gathered for matmuls that tensor cuts, and their
            results are scattered: "none", by collectives before and after; "loop", piece by piece
            while others are multiplied; see `docs/collective_matmul.md`.
        offload: what rests in host memory: "optimizer", "activations"; "disk" for optimizer state
            on disk.
        dtypes: (what, dtype) of what is in another dtype than in the traced model, see
            `shardlib.planning.decisions.dtypes`.
        parameters: layout of every parameter, in the order of the model's tree.
        batch_layouts: (path, layout) of every array of the batch.
        estimate: predicted cost.
        search: how it was found.
        refined: what the compiler said, where it was asked (`shardlib.plan(..., refine=K)`); the
            estimate stays the prediction.
        findings: what the user should know.
        origin: (word, value) pairs with which the command line can trace the model again.
    """

    model: str
    topology: str
    mesh: MeshShape
    placement: tuple[tuple[str, tuple[Link, ...]], ...] = ()
    axis_order: tuple[str, ...] = ()
    rules: Rules
    sequence_parallel: bool = False
    zero: int = 0
    remat: str = "none"
    remat_layers: int = 0
    remat_classes: tuple[tuple[str, str, int], ...] = ()
    microbatches: int = 1
    accumulation: int = 1
    schedule: str = "none"
    virtual_stages: int = 1
    gather: str = "use"
    pipeline: str = "lockstep"
    context: str = "none"
    attention: str = "traced"
    experts: str = "none"
    collective_matmul: str = "none"
    offload: tuple[str, ...] = ()
    dtypes: tuple[tuple[str, str], ...] = ()
    parameters: tuple[ParameterLayout, ...] = ()
    batch_layouts: tuple[tuple[str, Layout], ...] = ()
    estimate: Estimate
    search: Search = Search()
    refined: Refined | None = None
    findings: tuple[Finding, ...] = ()
    origin: tuple[tuple[str, str], ...] = ()

    @property
    def decisions(self) -> dict[str, Any]:
        """The decisions alone, in the words of pins."""
        return {
            "mesh": dict(self.mesh),
            "rules": self.rules.to_json(),
            "sequence_parallel": self.sequence_parallel,
            "zero": self.zero,
            "remat": self.remat,
            "remat_layers": self.remat_layers,
            "remat_classes": {
                name: [policy, layers] for name, policy, layers in self.remat_classes
            },
            "microbatches": self.microbatches,
            "accumulation": self.accumulation,
            "schedule": self.schedule,
            "virtual_stages": self.virtual_stages,
            "gather": self.gather,
            "pipeline": self.pipeline,
            "context": self.context,
            "attention": self.attention,
            "experts": self.experts,
            "collective_matmul": self.collective_matmul,
            "offload": list(self.offload),
            "axis_order": list(self.axis_order or self.mesh),
            "dtypes": dict(self.dtypes),
        }

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that identify the decisions, the model and the topology."""
        decided = {
            word: value
            for word, value in self.decisions.items()
            if word not in LATER or value != LATER[word]
        }
        identity = {
            "model": self.model,
            "topology": self.topology,
            **decided,
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
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

    def with_findings(self, *findings: Finding) -> Self:
        """The same plan with more findings."""
        return replace(self, findings=(*self.findings, *findings))


def plan_to_data(plan: PlanData) -> dict[str, Any]:
    """The plan as plain lists, dicts, strings and numbers."""
    data = _content(plan)
    return {**data, "checksum": checksum(data)}


def checksum(content: Mapping[str, Any]) -> str:
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


def _content(plan: PlanData) -> dict[str, Any]:
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
        "findings": [finding.to_json() for finding in plan.findings],
        "origin": dict(plan.origin),
    }
