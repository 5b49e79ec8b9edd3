"""The serving plan: devices per layer, requests at a time, with their predictions, as a value with
JSON, as text, and as a card.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import cast

from shardlib.errors import PlanError
from shardlib.findings import Finding
from shardlib.machines.topology import TopologyLike
from shardlib.planner.plan import require_named
from shardlib.report.elements import (
    aligned,
    bytes_text,
    count_text,
    percent_text,
    ratio_text,
    seconds_text,
    short,
    wrapped,
)
from shardlib.report.markup import Box, LogAxis, card, render
from shardlib.serve.cost import ServingBytes
from shardlib.serve.space import (
    CHUNK_SIZES,
    MOST_REQUESTS,
    ServingPin,
    ServingPins,
    ServingPoint,
    ServingProblem,
    ServingWorkload,
    TwoMeshes,
)
from shardlib.untrusted.data import Json, JsonMapping, JsonObject, construct, parse_json, shown

#: Words for what limits a step, by its part.
LIMITS: Mapping[str, str] = {
    "weights": "bytes of the weights, which every step reads",
    "matmuls": "FLOPs of the matmuls",
    "activations": "bytes of activations",
    "cache": "bytes of keys and values",
    "attention": "FLOPs of attention over prompts",
    "all-reduces": "all-reduces between the devices of a layer",
    "fixed": "fixed times of layers, steps and requests",
}


@dataclass(frozen=True, kw_only=True)
class ServingEstimate:
    """Predicted behaviour of a serving plan.

    Attributes:
        ttft_seconds: from a request's begin to its first token, on average.
        tpot_seconds: from token to token, on average.
        output_tokens_per_second_per_chip: of all requests together, for each device that is used.
        requests_per_second: that are served.
        chips: devices that are used.
        decode: seconds of a step of next tokens alone, by what they are for.
        prompt: seconds of a step with a chunk of prompts, the same.
        chunk_share: of the steps that compute a chunk.
        device_bytes: of a device.
    """

    ttft_seconds: float
    tpot_seconds: float
    output_tokens_per_second_per_chip: float
    requests_per_second: float
    chips: int
    decode: tuple[tuple[str, float], ...]
    prompt: tuple[tuple[str, float], ...]
    chunk_share: float
    device_bytes: ServingBytes

    @property
    def parts(self) -> dict[str, float]:
        """Seconds from token to token by what they are for."""
        prompt = dict(self.prompt)
        share = self.chunk_share
        return {
            part: (1 - share) * seconds + share * prompt.get(part, 0.0)
            for part, seconds in self.decode
        }

    @property
    def limited_by(self) -> str:
        """The largest part of the time from token to token."""
        parts = self.parts
        return max(parts, key=lambda part: parts[part])

    @property
    def chip_hours_per_million(self) -> float:
        """Hours of a device for a million tokens of answers."""
        return 1e6 / self.output_tokens_per_second_per_chip / 3600

    def to_json(self) -> JsonObject:
        """The estimate as plain data."""
        return {
            **asdict(self),
            "decode": dict(self.decode),
            "prompt": dict(self.prompt),
            "limited_by": self.limited_by,
            "chip_hours_per_million_output_tokens": self.chip_hours_per_million,
            "device_bytes": self.device_bytes.to_json(),
        }


#: Version of the JSON form; readers refuse others.
FORMAT = "serving-2"


@dataclass(frozen=True, kw_only=True)
class ServingSearch:
    """The record of the search that found a plan.

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
    """The decisions of a serving plan.

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
    """A complete decision on how to serve a model.

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
        source: what it was made from; not part of the value, and absent from JSON.
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
    source: ServingProblem | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        choice, estimate = self.choice, self.estimate
        return short(
            "ServingPlan",
            f"{self.model} on {self.topology}: {choice.replicas} x tensor={choice.tensor}",
            f"{choice.batch} requests each",
            f"{count_text(estimate.output_tokens_per_second_per_chip)} tokens/s a chip",
            f"a token every {seconds_text(estimate.tpot_seconds)}",
        )

    def _repr_html_(self) -> str:
        return serving_card(self, self.pareto() if self.source is not None else ())

    def explain(self) -> str:
        """Returns the decisions, the predictions and their limits, as text of at most 100
        columns.
        """
        lines = [*_head(self), "", *_seconds(self), "", *_memory(self)]
        lines += ["", *_search(self)]
        for finding in self.findings:
            hint = f" Try: {finding.hint}" if finding.hint else ""
            lines += wrapped(f"{finding.severity}: ", f"{finding.message}{hint}")
        return "\n".join(lines) + "\n"

    def pareto(self) -> tuple[ServingPoint, ...]:
        """The choices that no other beats in both: tokens a second and chip, and seconds from token
        to token; within the limits, the fastest from token to token first.
        """
        from shardlib.serve.search import search

        return search(source_of(self)).front()

    def two_meshes(self) -> TwoMeshes | None:
        """Returns the predictions of prompts on a mesh of their own, within the limits and with as
        many requests as can be served; None where there is no such plan.
        """
        from shardlib.serve.space import two_meshes

        return two_meshes(source_of(self))

    def why_not(self, *unnamed: object, **pin: ServingPin) -> str:
        """Returns the best plan under other pins, and its predictions:
        `plan.why_not(tensor=16)`.
        """
        from shardlib.serve.search import why_not

        require_named("why_not", unnamed)
        return why_not(self, pin)

    def diff(self, other: ServingPlan) -> str:
        """Returns the differences of another plan in decisions and predictions, as text of at most
        100 columns.
        """
        one, two = self.estimate, other.estimate
        rows = [["", "this", "other", ""]]
        for name, mine, its in (
            ("model", self.model, other.model),
            ("topology", self.topology, other.topology),
            ("tensor", self.choice.tensor, other.choice.tensor),
            ("replicas", self.choice.replicas, other.choice.replicas),
            ("batch", self.choice.batch, other.choice.batch),
            ("chunk", self.choice.chunk, other.choice.chunk),
            ("page", self.choice.page, other.choice.page),
        ):
            if mine != its:
                rows.append([name, str(mine), str(its), ""])
        for name, mine, its, text in (
            (
                "tokens/s a chip",
                one.output_tokens_per_second_per_chip,
                two.output_tokens_per_second_per_chip,
                count_text,
            ),
            ("from token to token", one.tpot_seconds, two.tpot_seconds, seconds_text),
            ("first token", one.ttft_seconds, two.ttft_seconds, seconds_text),
            ("chips", float(one.chips), float(two.chips), count_text),
            ("memory of a device", one.device_bytes.peak, two.device_bytes.peak, bytes_text),
        ):
            rows.append([name, text(mine), text(its), ratio_text(its / mine)])
        return "\n".join(aligned(rows, right={1, 2, 3})) + "\n"

    def replan(
        self, topology: TopologyLike | None = None, *, lost: Iterable[int] = ()
    ) -> ServingPlan:
        """The best plan for the same workload on another machine, or without some of the devices.

        A replica is a run of neighbouring devices; one that has lost a device is gone, whatever the
        number of devices that share a layer.
        """
        from shardlib.serve.search import replan

        return replan(self, topology, lost)

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(to_data(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> ServingPlan:
        """A plan from its JSON."""
        data: Json = parse_json(text, "the plan", PlanError)
        table = dict(cast("JsonMapping", data)) if isinstance(data, Mapping) else {}
        if table.get("format") != FORMAT:
            raise PlanError(
                f"this is not a serving plan of format {FORMAT}"
                f" (found {shown(table.get('format'))})\nTry: make it with `shardlib plan MODEL"
                " --serve ... --out plan.json`"
            )
        checksum = table.pop("checksum", None)
        if checksum != _checksum(table):
            raise PlanError(
                "the plan was changed since it was written\nTry: make it again with `shardlib plan"
                " MODEL --serve ... --out plan.json`"
            )
        choice = {name: table.get(name) for name in ServingChoice.__dataclass_fields__}
        return construct(
            ServingPlan,
            {**table, "choice": choice, "source": None},
            "the plan",
            PlanError,
            least=0.0,
        )


def source_of(plan: ServingPlan) -> ServingProblem:
    """The problem that a plan was made from."""
    if plan.source is None:
        raise PlanError(
            "this plan was read from a file and does not carry its model\nTry:"
            " shardlib.plan_serving again"
        )
    return plan.source


def to_data(plan: ServingPlan) -> JsonObject:
    """A plan as plain data, its decisions first."""
    content: JsonObject = {
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
        "findings": [finding.to_json() for finding in plan.findings],
    }
    return {**content, "checksum": _checksum(content)}


def _checksum(data: JsonObject) -> str:
    """The checksum of the content without it; it says that nobody changed it, and is not a
    signature.
    """
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


#: Points of the curve that are shown.
SHOWN = 8


def curve(points: Sequence[ServingPoint]) -> str:
    """A curve of choices as a table of at most `SHOWN` rows, evenly spread."""
    step = max(1, (len(points) - 1) / (SHOWN - 1)) if len(points) > SHOWN else 1
    shown = [points[round(position * step)] for position in range(min(SHOWN, len(points)))]
    rows = [["tensor", "replicas", "batch", "chunk", "a token", "first token", "tokens/s a chip"]]
    rows += [
        [
            str(point.tensor),
            str(point.replicas),
            str(point.batch),
            str(point.chunk),
            seconds_text(point.tpot_seconds),
            seconds_text(point.ttft_seconds),
            count_text(point.output_tokens_per_second_per_chip),
        ]
        for point in shown
    ]
    return "\n".join(aligned(rows, right=range(7)))


def _head(plan: ServingPlan) -> list[str]:
    load, choice, estimate = plan.workload, plan.choice, plan.estimate
    lengths = f"prompts of {load.prompt} tokens, answers of {load.output}"
    limits = [
        *([f"{load.rate:g} requests a second"] if load.rate is not None else []),
        *([f"first token within {seconds_text(load.ttft)}"] if load.ttft is not None else []),
        *([f"a token every {seconds_text(load.tpot)}"] if load.tpot is not None else []),
    ]
    several = choice.replicas > 1
    group = f"{choice.tensor} devices" if choice.tensor > 1 else "one device"
    groups = (
        f"{choice.replicas} groups of {group} each serve"
        if several
        else (f"A group of {group} serves" if choice.tensor > 1 else "One device serves")
    )
    return [
        *wrapped("", f"{plan.model} on {plan.topology}: {', '.join([lengths, *limits])}"),
        "",
        *wrapped(
            "",
            (
                f"{groups} {choice.batch} requests at a time, with {choice.chunk} tokens of prompts"
                f" in a step and {choice.pages} pages of {choice.page} tokens; weights"
                f" {load.weights}, cache {load.cache}."
            ),
        ),
        *wrapped(
            "",
            (
                f"{count_text(estimate.output_tokens_per_second_per_chip)} tokens/s a chip"
                f" ({count_text(estimate.requests_per_second)} requests a second on"
                f" {estimate.chips}), {estimate.chip_hours_per_million:.3g} chip-hours a million"
                f" tokens. The first token comes after {seconds_text(estimate.ttft_seconds)}, then"
                f" one every {seconds_text(estimate.tpot_seconds)}."
            ),
        ),
        *wrapped("", f"Most of it goes to the {LIMITS[estimate.limited_by]}."),
    ]


def _seconds(plan: ServingPlan) -> list[str]:
    estimate = plan.estimate
    decode, prompt = dict(estimate.decode), dict(estimate.prompt)
    rows = [["a step", "next tokens", "and a chunk", "from token to token"]]
    for part, seconds in estimate.parts.items():
        if decode.get(part, 0.0) or prompt.get(part, 0.0):
            rows.append(
                [
                    part,
                    seconds_text(decode.get(part, 0.0)),
                    seconds_text(prompt.get(part, 0.0)),
                    f"{seconds_text(seconds)} {percent_text(seconds / estimate.tpot_seconds):>4}",
                ]
            )
    rows.append(
        [
            "all",
            seconds_text(sum(decode.values())),
            seconds_text(sum(prompt.values())),
            f"{seconds_text(estimate.tpot_seconds)} {percent_text(1.0):>4}",
        ]
    )
    return [
        *aligned(rows, right={1, 2, 3}),
        f"{percent_text(estimate.chunk_share)} of the steps compute a chunk of prompts.",
    ]


def _memory(plan: ServingPlan) -> list[str]:
    sizes = plan.estimate.device_bytes
    rows = [
        ["a device", "bytes"],
        ["weights", bytes_text(sizes.weights)],
        ["pages", bytes_text(sizes.cache)],
        ["temporaries", bytes_text(sizes.temporaries)],
        ["all", f"{bytes_text(sizes.peak)} of {bytes_text(sizes.limit)}"],
    ]
    return aligned(rows, right={1})


def _search(plan: ServingPlan) -> list[str]:
    record = plan.search
    within = (
        "" if record.kept == record.candidates else f", {record.kept} of them within the limits"
    )
    return wrapped(
        "",
        (
            f"All {record.candidates} choices that fit were priced{within}, in"
            f" {seconds_text(record.seconds)}: every number of devices that divides, every batch up"
            f" to {MOST_REQUESTS:,} and {len(CHUNK_SIZES)} sizes of chunks; among them and within"
            " the prices no better one exists."
        ),
    )


def meshes(two: TwoMeshes | None) -> str:
    """Describes the predictions of prompts on a mesh of their own, as text."""
    if two is None:
        return "With prompts on a mesh of their own nothing fits, or keeps to the limits."
    return "\n".join(
        wrapped(
            "",
            (
                f"With prompts on a mesh of their own ({two.prefill_replicas} x tensor"
                f" {two.prefill_tensor}) and next tokens on another ({two.decode_replicas} x tensor"
                f" {two.decode_tensor}, {two.batch} requests each):"
                f" {count_text(two.output_tokens_per_second_per_chip)} tokens/s a chip, a token"
                f" every {seconds_text(two.tpot_seconds)}, the first after"
                f" {seconds_text(two.ttft_seconds)}; {bytes_text(two.transfer_bytes)} of a request"
                f" move in {seconds_text(two.transfer_seconds)}. shardlib's engine runs both on one"
                " mesh."
            ),
        )
    )


#: The size of the curve, and its axes.
_BOX = Box(width=640, height=220, left=54, right=628, top=14, bottom=190)


def serving_card(plan: ServingPlan, points: Sequence[ServingPoint] = ()) -> str:
    """A plan as HTML for a notebook."""
    estimate, sizes = plan.estimate, plan.estimate.device_bytes
    memory = [
        (name, size, bytes_text(size))
        for name, size in (
            ("weights", sizes.weights),
            ("pages", sizes.cache),
            ("temporaries", sizes.temporaries),
            ("spare", sizes.limit - sizes.peak),
        )
        if size > 0
    ]
    first, _, remainder = plan.explain().partition("\n\n")
    return card(
        first.replace("\n", " "),
        [remainder.partition("\n\n")[0].replace("\n", " ")],
        bars=(
            (
                "from token to token",
                [(part, size, seconds_text(size)) for part, size in estimate.parts.items() if size],
            ),
            ("memory of a device", memory),
        ),
        text=plan.explain(),
        picture=_curve(points, plan.choice) if len(points) > 1 else "",
    )


def _curve(points: Sequence[ServingPoint], chosen: ServingChoice) -> str:
    """Tokens a second and chip against seconds from token to token, as SVG; the latter on a
    logarithmic axis.
    """
    times = [point.tpot_seconds for point in points]
    low, high = min(times), max(times)
    return render(
        "serve/curve.svg",
        box=_BOX,
        x=LogAxis(low=low, high=high, start=_BOX.left, end=_BOX.right),
        points=points,
        highest=max(point.output_tokens_per_second_per_chip for point in points),
        chosen=(chosen.tensor, chosen.batch, chosen.chunk),
        low=low,
        high=high,
    )
