"""The report of a verification: promises of a plan, the compiler's figures, and their differences.

A `Verification` is a frozen value; its JSON can be kept as the baseline that later ones are held
against.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from shardlib.errors import VerificationError
from shardlib.findings import SEVERITIES, Finding, diagnostic
from shardlib.layout import ISLAND, MESH_AXES, Collective, Layout
from shardlib.machines.topology import Topology, place
from shardlib.planner.plan import Plan, plan_to_data
from shardlib.report.elements import bytes_text, percent_text, seconds_text, short
from shardlib.report.markup import card
from shardlib.untrusted.data import JsonObject, construct, parse_json, shown
from shardlib.verification.hlo import BITS
from shardlib.verification.schedule import Schedule
from shardlib.verification.traffic import REDUCTIONS, InstructionTraffic, Scheduled

# --------------------------------------------------------------------------------------------------
# The compiled program of a training step.


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """The compiled program of a training step.

    Attributes:
        device_bytes: bytes per device: "arguments", "outputs", "aliased", "temporaries", "peak".
        collectives: every collective of a step, the most bytes first; their seconds are what the
            cost model gives them.
        wire_bytes: bytes that a device sends in a step, by ring algorithms.
        compute_seconds: the compiler's own estimate of the time of a step's kernels; 0 where it
            gives none (GPU and CPU).
        device_kind: what the compiler calls the device.
        unread: what of the program could not be read, one line each.
        reductions: (kind, axes, dtype, bytes of the results of a step) of every kind of reduction.
        scheduled: the collectives as they stand in the schedule, with the matmuls that they hide
            behind; absent from JSON.
        schedule: seconds of its kernels, and those in which they wait for collectives; None where
            its text tells nothing of that.
        meeting: what it made of the meeting of islands; None where there is one island.
    """

    device_bytes: Mapping[str, int]
    collectives: tuple[Collective, ...]
    wire_bytes: float
    compute_seconds: float
    device_kind: str
    unread: tuple[str, ...] = ()
    reductions: tuple[tuple[str, tuple[str, ...], str, int], ...] = ()
    scheduled: tuple[Scheduled, ...] = ()
    schedule: Schedule | None = None
    meeting: CompiledStep | None = None

    def to_json(self) -> JsonObject:
        """The step as plain data."""
        return {
            "device_bytes": dict(self.device_bytes),
            "wire_bytes": self.wire_bytes,
            "compute_seconds": self.compute_seconds,
            "exposed_seconds": self.schedule.exposed if self.schedule else None,
            "device_kind": self.device_kind,
            "unread": list(self.unread),
            "reductions": [
                [kind, list(axes), dtype, size] for kind, axes, dtype, size in self.reductions
            ],
            "collectives": [
                {
                    "kind": c.kind,
                    "axes": list(c.axes),
                    "count": c.count,
                    "bytes": c.bytes,
                    "cause": c.cause,
                }
                for c in self.collectives
            ],
            **({"meeting": self.meeting.to_json()} if self.meeting else {}),
        }


FORMAT = 1

#: (kind, mesh axes).
Key = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The verdict of a real compiler on a plan.

    Attributes:
        plan: the plan; its estimate is what was promised.
        compiled: what the compiler made of it; None where it made nothing, and a finding says why.
        compile_seconds: wall time of compiling.
        versions: package -> version of the compiler.
        findings: what differs, the worst first.
    """

    plan: Plan
    compiled: CompiledStep | None
    compile_seconds: float
    versions: Mapping[str, str]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if there is no finding of severity "error"."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> str:
        """The verification as JSON text."""
        return json.dumps(verification_to_data(self), indent=1)

    def __str__(self) -> str:
        return verification_text(self)

    def __repr__(self) -> str:
        findings = [finding for finding in self.findings if finding.severity != "info"]
        return short(
            "Verification",
            f"{self.plan.model} on {self.plan.topology}: {self.plan.mesh}",
            "verified" if self.ok else "refuted",
            f"{len(findings)} findings" if findings else "",
        )

    def _repr_html_(self) -> str:
        text = verification_text(self)
        title, _, body = text.partition("\n")
        return card(
            title,
            [str(finding) for finding in self.findings if finding.severity != "info"],
            text=body,
        )


def verification_to_data(verification: Verification) -> JsonObject:
    """The verification as plain data; "predicted" is the plan's estimate, "compiled" is null where
    the compiler failed.

    Returns:
        "format", "ok", "plan", "predicted", "compiled", "compile_seconds", "versions" and
    """
    return {
        "format": FORMAT,
        "ok": verification.ok,
        "plan": plan_to_data(verification.plan),
        "predicted": verification.plan.estimate.to_json(),
        "compiled": verification.compiled.to_json() if verification.compiled else None,
        "compile_seconds": verification.compile_seconds,
        "versions": dict(verification.versions),
        "findings": [finding.to_json() for finding in verification.findings],
    }


def totals(collectives: tuple[Collective, ...]) -> dict[Key, int]:
    """Result bytes of a step by kind and mesh axes."""
    sums: dict[Key, int] = {}
    for c in collectives:
        sums[c.kind, c.axes] = sums.get((c.kind, c.axes), 0) + c.total_bytes
    return sums


def counts(collectives: tuple[Collective, ...]) -> dict[Key, int]:
    """Executions in a step by kind and mesh axes."""
    sums: dict[Key, int] = {}
    for c in collectives:
        sums[c.kind, c.axes] = sums.get((c.kind, c.axes), 0) + c.count
    return sums


@dataclass(frozen=True, kw_only=True)
class _Compiled:
    """The parts of a report that are compared."""

    collectives: tuple[Collective, ...]


def read_baseline(text: str | bytes, source: str) -> tuple[Collective, ...]:
    """The compiled collectives of an earlier verification."""
    again = "make it with `shardlib verify ... --json > report.json`"
    data = parse_json(text, source, VerificationError)
    if not isinstance(data, Mapping) or not isinstance(
        cast("Mapping[str, Any]", data).get("compiled"), Mapping
    ):
        raise VerificationError(
            f"{source} holds no report of a verification that compiled\nTry: {again}"
        )
    table = cast("Mapping[str, Any]", data)
    if table.get("format") != FORMAT:
        raise VerificationError(
            f"{source} is a report of format {shown(table.get('format'))}, this version reads"
            f" {FORMAT}\nTry: make it again"
        )
    return construct(
        _Compiled,
        table["compiled"],
        f"the report {source}",
        VerificationError,
        least=0.0,
        hint=again,
    ).collectives


@diagnostic
def growth(before: tuple[Collective, ...], after: tuple[Collective, ...]) -> tuple[Finding, ...]:
    """One error for each kind and axes with more bytes or executions in `after` than `before`."""
    old_bytes, old_counts, new_counts = totals(before), counts(before), counts(after)
    findings: list[Finding] = []
    for key, size in totals(after).items():
        was, was_count, count = old_bytes.get(key, 0), old_counts.get(key, 0), new_counts[key]
        if size > was or count > was_count:
            findings.append(
                Finding(
                    code="collective-grew",
                    severity="error",
                    where=key_text(key),
                    message=(
                        f"{key_text(key)} grew from {was_count} executions and {bytes_text(was)}"
                        f" per step to {count} and {bytes_text(size)}."
                    ),
                )
            )
    return tuple(findings)


def key_text(key: Key) -> str:
    """A kind and its axes in words."""
    return f"{key[0]} over {'·'.join(key[1]) or 'unknown axes'}"


def verification_text(verification: Verification) -> str:
    """The verification as text for people: predicted beside compiled, then findings."""
    plan = verification.plan
    lines = [
        f"{plan.model} on {plan.topology}, {plan.mesh}:"
        f" {'verified' if verification.ok else 'REFUTED'}",
        "",
    ]
    if verification.compiled:
        lines += (
            _memory_lines(verification)
            + _time_lines(verification)
            + _collective_lines(verification)
        )
    elif verification.findings:
        lines += ["the compiler made no program of it", ""]
    lines += [str(finding) for finding in verification.findings] or ["nothing to report"]
    versions = ", ".join(f"{name} {version}" for name, version in verification.versions.items())
    lines += [
        "",
        f"compiled in {seconds_text(verification.compile_seconds)}"
        + (f" with {versions}" if versions else ""),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, predicted: str, compiled: str, difference: str = "") -> str:
    return f"  {name:34s} {predicted:>12s} {compiled:>12s} {difference:>9s}".rstrip()


def _difference(predicted: float, compiled: float) -> str:
    if not compiled:
        return ""
    sign = "+" if predicted >= compiled else "-"
    return f"{sign}{percent_text(abs(predicted - compiled) / compiled)}"


def _memory_lines(verification: Verification) -> list[str]:
    assert verification.compiled
    parts, real = verification.plan.estimate.device_bytes, verification.compiled.device_bytes
    stored = parts.parameters + parts.frozen + parts.optimizer + parts.batch
    rows = (
        ("state and batch (arguments)", stored, real["arguments"]),
        ("everything else", parts.peak - stored, max(0, real["peak"] - real["arguments"])),
        ("peak", parts.peak, real["peak"]),
    )
    return [
        _row("memory per device", "predicted", "compiled", "error"),
        *(_row(name, bytes_text(a), bytes_text(b), _difference(a, b)) for name, a, b in rows),
        "",
    ]


def _time_lines(verification: Verification) -> list[str]:
    assert verification.compiled
    seconds, compiled = verification.plan.estimate.seconds, verification.compiled
    rows: list[tuple[str, float, float]] = []
    if compiled.compute_seconds:
        predicted = seconds.compute + seconds.optimizer
        rows.append(("compute and optimizer", predicted, compiled.compute_seconds))
    if compiled.schedule is not None:
        rows.append(("exposed communication", seconds.exposed, compiled.schedule.exposed))
    if not rows:
        return []
    return [
        _row("time of a step", "predicted", "compiled", "error"),
        *(_row(name, seconds_text(a), seconds_text(b), _difference(a, b)) for name, a, b in rows),
        "",
    ]


def _collective_lines(verification: Verification) -> list[str]:
    assert verification.compiled
    listed = verification.plan.estimate.collectives
    steps = tuple(c for c in listed if not c.every)
    lines = _compared("result bytes of a step", steps, verification.compiled.collectives)
    if verification.compiled.meeting is None:
        return lines
    met = tuple(c for c in listed if c.every)
    beside = verification.plan.exchange.delay > 0  # what crosses between islands in no program
    copied = tuple(c for c in met if beside and ISLAND.name in c.axes)
    compiled = verification.compiled.meeting.collectives
    return [
        *lines,
        *_compared("result bytes of a meeting", tuple(c for c in met if c not in copied), compiled),
        *(
            f"beside steps, by copies between islands: {bytes_text(collective.total_bytes)}"
            " per device"
            for collective in copied
        ),
    ]


def _compared(
    head: str, planned: tuple[Collective, ...], compiled: tuple[Collective, ...]
) -> list[str]:
    """Bytes of collectives that were planned beside those that were compiled."""
    promised, real = totals(planned), totals(compiled)
    keys = sorted({*promised, *real}, key=lambda key: -max(promised.get(key, 0), real.get(key, 0)))
    rows = [
        _row(
            key_text(key),
            bytes_text(promised.get(key, 0)),
            bytes_text(real.get(key, 0)),
            _difference(promised.get(key, 0), real.get(key, 0)),
        )
        for key in keys
    ]
    return [_row(head, "predicted", "compiled", "error"), *rows, ""] if rows else []


# --------------------------------------------------------------------------------------------------
# Collectives of a compiled step against those of its plan: unplanned, missing, of whole arrays, in
# another dtype, or over the slow network.

#: Differences under this part of all bytes of a step are noise.
NOISE = 0.01
#: A collective may move this part more than predicted before it is a finding.
SLACK = 0.1
#: What HLO calls the dtypes that programs reduce gradients in.
HLO_NAMES: Mapping[str, str] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
#: Collectives that the partitioner inserts when two neighbours want different layouts.
RESHARDING = ("all-to-all", "collective-permute")


@diagnostic
def traffic(
    plan: Plan, topology: Topology, compiled: CompiledStep, found: Sequence[InstructionTraffic]
) -> Iterable[Finding]:
    """Finds collectives that were not planned, and planned ones that are missing."""
    promised, real = totals(plan.estimate.collectives), totals(compiled.collectives)
    noise = NOISE * max(sum(promised.values()), sum(real.values()), 1)
    merged = _whole_reductions(plan, promised, real, noise, tiles=topology.chip.vendor == "google")
    yield from merged
    excused = {axes for _, axes in (_split(finding.where) for finding in merged)}
    slow = _slow_axes(plan, topology)
    for key in sorted({*promised, *real}):
        kind, axes = key
        size, due = real.get(key, 0), promised.get(key, 0)
        if max(size, due) <= noise or (kind in REDUCTIONS and axes in excused):
            continue
        matching = [item for item in found if (item.kind, item.axes) == key]
        if due and _narrower(size, due, matching):
            yield Finding(
                code="narrow-reduction",
                severity="warning",
                where=key_text(key),
                message=(
                    f"{key_text(key)} is done in"
                    f" {', '.join(sorted({d for item in matching for d in item.dtypes}))}:"
                    f" {bytes_text(size)} per step, {bytes_text(due)} were planned."
                ),
                hint="keep the accumulation in float32 if the sum must not lose digits",
            )
        elif size > due * (1 + SLACK) + noise:
            yield _unplanned(key, size, due, matching, slow)
        elif size < due * (1 - SLACK) - noise:
            yield Finding(
                code="missing-collective",
                severity="info",
                where=key_text(key),
                message=(
                    f"{key_text(key)} moves {bytes_text(size)} per step, {bytes_text(due)} were"
                    " planned."
                ),
            )


def _unplanned(
    key: Key, size: int, due: int, matching: Sequence[InstructionTraffic], slow: frozenset[str]
) -> Finding:
    causes: dict[str, int] = {}
    for item in matching:
        causes[item.op_name or item.name] = (
            causes.get(item.op_name or item.name, 0) + item.bytes * item.count
        )
    worst = ", ".join(
        f"{name} ({bytes_text(amount)})"
        for name, amount in sorted(causes.items(), key=lambda pair: -pair[1])[:3]
    )
    code = (
        "slow-link-traffic"
        if slow & {*key[1]}
        else "unexpected-resharding"
        if key[0] in RESHARDING
        else "unplanned-collective"
    )
    planned = f"{bytes_text(due)} were planned" if due else "nobody planned it"
    network = (
        f"; the axis {'·'.join(sorted(slow & {*key[1]}))} runs over the slow network"
        if code == "slow-link-traffic"
        else ""
    )
    return Finding(
        code=code,
        severity="warning",
        where=key_text(key),
        message=f"{key_text(key)} moves {bytes_text(size)} per step, {planned}{network}: {worst}.",
        hint=(
            "shardlib.why(program) names the lines and the layouts that meet there"
            if not due
            else ""
        ),
    )


@diagnostic
def _whole_reductions(
    plan: Plan, promised: dict[Key, int], real: dict[Key, int], noise: float, *, tiles: bool
) -> list[Finding]:
    """Axes where the compiler reduces whole arrays although a scatter was planned: up to twice the
    bytes communicated.
    """
    findings: list[Finding] = []
    for (kind, axes), due in promised.items():
        degree = plan.mesh.ways(axes)
        extra = real.get(("all-reduce", axes), 0) - promised.get(("all-reduce", axes), 0)
        lacking = due - real.get((kind, axes), 0)
        if kind == "reduce-scatter" and lacking * degree > noise and extra > 0.5 * lacking * degree:
            findings.append(
                Finding(
                    code="whole-reduction",
                    severity="warning",
                    where=key_text((kind, axes)),
                    hint=(
                        "shard the parameter along a dim that stays aligned to the tiles, over one"
                        " torus axis at a time"
                        if tiles
                        else ""
                    ),
                    message=(
                        f"reductions over {'·'.join(axes)} were planned as reduce-scatters of"
                        f" {bytes_text(due)} shards; the compiler"
                        f" all-reduces {bytes_text(real.get(('all-reduce', axes), 0))}, up to twice"
                        " the bytes."
                    ),
                )
            )
    return findings


def _split(text: str) -> Key:
    kind, _, axes = text.partition(" over ")
    return kind, tuple(axes.split("·"))


def _narrower(size: int, due: int, matching: Sequence[InstructionTraffic]) -> bool:
    """Returns whether a reduction moves a half or a quarter of what was planned, in a type of 16
    bits or fewer.
    """
    ratio = size / due
    small = bool(matching) and all(
        BITS[dtype] <= 16
        for item in matching
        for dtype in item.dtypes
        if item.bytes * item.count > NOISE * size
    )
    return (
        small
        and matching[0].kind in REDUCTIONS
        and any(abs(ratio - part) < 0.03 for part in (0.5, 0.25))
    )


def _slow_axes(plan: Plan, topology: Topology) -> frozenset[str]:
    """Axes that span the outermost of several tiers."""
    spans = place(plan.mesh, topology, plan.axis_order)
    if spans is None or len(topology.tiers) < 2 or topology.tiers[0].kind != "network":
        return frozenset()
    return frozenset(axis for axis, parts in spans.items() if any(part.tier == 0 for part in parts))


@diagnostic
def wire_dtypes(plan: Plan, compiled: CompiledStep) -> Iterable[Finding]:
    """Gradients that are reduced in another dtype than the plan decides: in reductions over axes
    that shard the batch, those of a few numbers apart.

    Args:
        plan: with the dtype that gradients are reduced in.
    """
    planned = dict(plan.dtypes).get("reduction_dtype")
    if planned is None:
        return
    reductions = [
        reduction
        for reduction in compiled.reductions
        if reduction[1] and "tensor" not in reduction[1]
    ]
    total = sum(size for *_, size in reductions)
    for kind, axes, dtype, size in reductions:
        if dtype != HLO_NAMES[planned] and size > NOISE * total:
            yield Finding(
                code="reduction-dtype",
                severity="warning",
                where=key_text((kind, axes)),
                message=(
                    f"{key_text((kind, axes))} moves {bytes_text(size)} per step in {dtype}, and"
                    f" the plan reduces gradients in {planned}."
                ),
                hint=(
                    "XLA's CPU compiler reduces 16-bit numbers in float32"
                    if plan.topology.startswith("cpu")
                    else (
                        "gradients of matrices, tables and convolutions follow the plan, others"
                        " their own dtype"
                    )
                ),
            )


# --------------------------------------------------------------------------------------------------
# Differences between a compiled step and its plan, as findings.
#
# Every function answers one question and returns findings. What stops a run is an error; what
# costs time or memory that nobody planned is a warning; what is only worth knowing is an info.

#: The compiler's kernels may take so much longer than was predicted before that is said.
OPTIMISTIC = 0.02


@diagnostic
def compare(
    plan: Plan,
    topology: Topology,
    compiled: CompiledStep,
    found: Sequence[InstructionTraffic],
    log: str,
    donated: int,
    aliased: int,
) -> tuple[Finding, ...]:
    """All findings about a compiled step, the worst first."""
    findings = [
        *memory(plan, topology, compiled),
        *kernels(plan, compiled),
        *traffic(plan, topology, compiled, found),
        *rematerialised(log),
        *profile_of_another(log),
        *wire_dtypes(plan, compiled),
        *idle_axes(plan, compiled),
        *replicated(plan, topology),
        *donation(plan, compiled, donated, aliased),
        *unread(compiled),
    ]
    return tuple(sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity)))


@diagnostic
def other_compiler(plan: Plan, versions: Mapping[str, str]) -> Iterable[Finding]:
    """Corrections of the prediction that were learned from another version of the compiler.

    Args:
        versions: package -> version, of the compiler that ran.
    """
    for correction in plan.estimate.corrections:
        if correction.quantity == "margin":  # the largest of all compilers
            continue
        differing = [
            f"{name} {version} ({versions[name]} here)"
            for name, version in correction.versions
            if versions.get(name, version) != version
        ]
        if differing:
            yield Finding(
                code="other-compiler",
                severity="info",
                where=correction.quantity,
                hint="benchmarks/learn_corrections.py learns them for this one",
                message=(
                    f"the correction of {correction.quantity} by {correction.factor:.3g} was"
                    f" learned with another compiler: {', '.join(differing)}."
                ),
            )


@diagnostic
def memory(plan: Plan, topology: Topology, compiled: CompiledStep) -> Iterable[Finding]:
    """Compares the compiled memory with the limit and with the prediction."""
    peak, usable, promised = (
        compiled.device_bytes["peak"],
        topology.chip.usable_bytes,
        plan.estimate.device_bytes.peak,
    )
    if peak > usable and topology.chip.vendor != "cpu":
        yield Finding(
            code="out-of-memory",
            severity="error",
            message=(
                f"the program needs {bytes_text(peak)} per device and there are"
                f" {bytes_text(usable)}."
            ),
            hint=(
                "shard more: a higher zero stage, remat=full, more microbatches, or a smaller batch"
            ),
        )
    if promised and abs(peak - promised) > SLACK * peak:
        judged = topology.chip.vendor != "cpu"
        yield Finding(
            code="memory-differs",
            severity="warning" if judged and peak > promised * plan.estimate.margin else "info",
            message=(
                f"the peak is {bytes_text(peak)} per device, {bytes_text(promised)} were predicted"
                f" ({percent_text(abs(promised - peak) / peak)} off)."
            ),
        )


@diagnostic
def kernels(plan: Plan, compiled: CompiledStep) -> Iterable[Finding]:
    """Compares the predicted step with the compiler's estimate of its kernels alone."""
    parts, compiled_seconds = plan.estimate.seconds, compiled.compute_seconds
    predicted = parts.compute + parts.optimizer
    if compiled_seconds > predicted * (1 + OPTIMISTIC):
        yield Finding(
            code="optimistic",
            severity="warning",
            where="compute",
            message=(
                f"the compiler's own kernels take {seconds_text(compiled_seconds)} per step,"
                f" without those that it does not estimate (attention); {seconds_text(predicted)}"
                f" were predicted, so a step takes at least"
                f" {percent_text((compiled_seconds - predicted) / predicted)} more."
            ),
            hint="believe the compiler: MFU and step time of this plan are too good",
        )


@diagnostic
def profile_of_another(log: str) -> Iterable[Finding]:
    """A finding where a profile that the GPU compiler was given knows nothing of the program."""
    counts = [int(count) for count in re.findall(r"Found (\d+) instructions from the profile", log)]
    if counts and not any(counts):
        yield Finding(
            code="profile-of-another",
            severity="warning",
            message="The profile has no instruction of this program, and changes nothing.",
            hint="a profile of a run of this program, with this version of JAX and these options",
        )


@diagnostic
def rematerialised(log: str) -> Iterable[Finding]:
    """Values that the partitioner replicated because it found no other way between two layouts."""
    lines = [
        line.strip()
        for line in log.splitlines()
        if re.search(r"[Ii]nvoluntary full rematerialization", line)
    ]
    if lines:
        names = sorted(
            {match[1] for line in lines if (match := re.search(r'op_name="([^"]*)"', line))}
        )
        yield Finding(
            code="full-rematerialisation",
            severity="warning",
            where=", ".join(names[:3]),
            message=(
                f"the partitioner replicates {len(lines)} value{'s' if len(lines) > 1 else ''}"
                " to get from one layout to another."
            ),
            hint="look at the layouts that meet there",
        )


@diagnostic
def idle_axes(plan: Plan, compiled: CompiledStep) -> Iterable[Finding]:
    """Axes that shard nothing: their devices all do the same work."""
    layouts: list[Layout] = [
        layout for p in plan.parameters for layout in (p.compute, p.rest, p.state)
    ] + [layout for _, layout in plan.batch_layouts]
    used = {axis for layout in layouts for axis in layout.axes} | {
        axis for c in compiled.collectives for axis in c.axes
    }
    for axis in (axis for axis in MESH_AXES if axis in plan.mesh and axis not in used):
        yield Finding(
            code="idle-axis",
            severity="warning",
            where=axis,
            hint="give its devices to another axis, or name a dim that it can shard",
            message=(
                f"the mesh axis {axis} of size {plan.mesh[axis]} shards nothing: its devices all do"
                " the same work."
            ),
        )


@diagnostic
def replicated(plan: Plan, topology: Topology) -> Iterable[Finding]:
    """Large arrays that are replicated."""
    large = 0.01 * topology.chip.usable_bytes
    sizes = [
        (p.path, math.prod(p.shape) * _itemsize(p.dtype))
        for p in plan.parameters
        if plan.mesh.devices > 1 and p.rest.ways(plan.mesh) == 1
    ]
    for path, size in sorted(
        ((path, size) for path, size in sizes if size > large), key=lambda pair: -pair[1]
    )[:5]:
        yield Finding(
            code="large-replicated",
            severity="info",
            where=path,
            message=(
                f"{path}, {bytes_text(size)}, is replicated on all {plan.mesh.devices} devices."
            ),
            hint="zero=3 shards stored parameters",
        )


def _itemsize(dtype: str) -> int:
    bits = re.search(r"(?:float|int|uint|bfloat|complex)(\d+)", dtype)
    return int(bits[1]) // 8 if bits else 1


@diagnostic
def donation(plan: Plan, compiled: CompiledStep, donated: int, aliased: int) -> Iterable[Finding]:
    """State whose memory is not reused for the next state.

    Args:
        compiled: with the aliased bytes.
    """
    stored = plan.estimate.device_bytes
    state = stored.parameters + stored.frozen + stored.optimizer
    reused = compiled.device_bytes["aliased"]
    if aliased < donated and reused < 0.99 * state:
        yield Finding(
            code="not-donated",
            severity="warning",
            message=(
                f"{donated - aliased} of the {donated} arrays of the state are not updated in"
                f" place; {bytes_text(reused)} per device are, of {bytes_text(state)} of state."
            ),
        )


@diagnostic
def unread(compiled: CompiledStep) -> Iterable[Finding]:
    """Parts of the program that the reader does not know."""
    if compiled.unread:
        remainder = f" and {len(compiled.unread) - 3} more" if len(compiled.unread) > 3 else ""
        yield Finding(
            code="unread-hlo",
            severity="warning",
            hint="bytes and counts leave these out",
            message=(
                f"{len(compiled.unread)} parts of the compiled program could not be read:"
                f" {'; '.join(compiled.unread[:3])}{remainder}."
            ),
        )
