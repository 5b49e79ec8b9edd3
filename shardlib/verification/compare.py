"""Where does what the compiler made differ from what the plan promised?

Every function answers one question and returns findings. What stops a run is an error; what costs
time or memory that nobody planned is a warning; what is only worth knowing is an info.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from shardlib.axes import MESH_AXES
from shardlib.hardware.placement import place
from shardlib.hardware.topology import Topology
from shardlib.layout import Layout
from shardlib.planning.plan import Plan
from shardlib.planning.units.quantity import bytes_text, percent_text
from shardlib.report import SEVERITIES, Finding
from shardlib.verification.hlo.hlo import BITS
from shardlib.verification.hlo.traffic import REDUCTIONS, Found
from shardlib.verification.isolation import Failure
from shardlib.verification.report import CompiledStep, Key, key_text, totals

#: Differences under this part of all bytes of a step are noise.
NOISE = 0.01
#: A collective may move this part more than predicted before it is a finding.
SLACK = 0.1
#: What HLO calls the dtypes that programs reduce gradients in.
HLO_NAMES: Mapping[str, str] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
#: Collectives that the partitioner inserts when two neighbours want different layouts.
RESHARDING = ("all-to-all", "collective-permute")


def compare(
    plan: Plan,
    topology: Topology,
    compiled: CompiledStep,
    found: Sequence[Found],
    log: str,
    donated: int,
    aliased: int,
) -> tuple[Finding, ...]:
    """All findings about a compiled step, the worst first.

    Args:
        plan: what was promised.
        topology: the machine it was promised for.
        compiled: what the compiler made.
        found: its collective instructions.
        log: what the compiler said while it compiled.
        donated: arrays whose memory was offered for reuse.
        aliased: arrays whose memory is reused.
    """
    findings = [
        *memory(plan, topology, compiled),
        *traffic(plan, topology, compiled, found),
        *rematerialised(log),
        *wire_dtypes(plan, compiled),
        *idle_axes(plan, compiled),
        *replicated(plan, topology),
        *donation(plan, compiled, donated, aliased),
        *unread(compiled),
    ]
    return tuple(sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity)))


def other_compiler(plan: Plan, versions: Mapping[str, str]) -> Iterable[Finding]:
    """Corrections of the prediction that were learned from another version of the compiler."""
    for one in plan.estimate.corrections:
        differing = [
            f"{name} {version} ({versions[name]} here)"
            for name, version in one.versions
            if versions.get(name, version) != version
        ]
        if differing:
            yield Finding(
                code="other-compiler",
                severity="info",
                where=one.quantity,
                hint="benchmarks/learn_corrections.py learns them for this one",
                message=(
                    f"the correction of {one.quantity} by {one.factor:.3g} was learned with another"
                    f" compiler: {', '.join(differing)}."
                ),
            )


def failed(failure: Failure, plan: Plan) -> Finding:
    """Why there is no compiled step."""
    if failure.kind == "out-of-memory":
        parts = sorted(
            dataclasses.asdict(plan.estimate.device_bytes).items(), key=lambda part: -part[1]
        )
        predicted = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts[:3])
        return Finding(
            code="out-of-memory",
            severity="error",
            message=(
                f"{out_of_memory_text(failure.message)} The plan's largest parts are {predicted}."
            ),
            hint="cut more: a higher zero stage, remat=full, more microbatches, or a smaller batch",
        )
    hint = {
        "compile-timeout": "allow more seconds, or verify a shallower model",
        "compiler-memory": "allow more memory, or verify on a larger machine",
        "compiler-abort": "this is a fault of the compiler; another mesh or rule may avoid it",
    }.get(failure.kind, "")
    return Finding(code=failure.kind, severity="error", message=failure.message, hint=hint)


#: The two forms in which the TPU compiler says how much is needed and how much there is.
_NEEDED = (
    re.compile(r"Used (?P<need>[\d.]+[KMGT]?) of (?P<have>[\d.]+[KMGT]?) hbm"),
    re.compile(
        r"required for (?P<what>[^()]*?) \((?P<need>[\d.]+[KMGT]?)\) exceeds available HBM"
        r" \((?P<have>[\d.]+[KMGT]?)\)"
    ),
)


def out_of_memory_text(message: str) -> str:
    """What a compiler says about memory that does not suffice, in one line: the sums, then the
    largest buffers where it names them.
    """
    sums = next((found for form in _NEEDED if (found := form.search(message))), None)
    what = f" for {sums['what']}" if sums and sums.re.groups == 3 else ""
    headline = (
        f"the program needs {sums['need']}iB a device{what} and there are {sums['have']}iB"
        if sums
        else message.strip().splitlines()[0][:300].rstrip(".")
    )
    sizes = re.findall(r"\d+\. Size: ([\d.]+\w)", message)
    names = re.findall(r"Operator: op_name=\"([^\"]*)\"", message)
    shapes = re.findall(r"Shape: (\S+)", message)
    largest = [
        " ".join(filter(None, (f"{size}iB", *shapes[i : i + 1], *names[i : i + 1])))
        for i, size in enumerate(sizes[:5])
    ]
    return headline + (f"; largest buffers: {'; '.join(largest)}" if largest else "") + "."


def memory(plan: Plan, topology: Topology, compiled: CompiledStep) -> Iterable[Finding]:
    """Does it fit, and was that foreseen?"""
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
                f"the program needs {bytes_text(peak)} a device and there are {bytes_text(usable)}."
            ),
            hint="cut more: a higher zero stage, remat=full, more microbatches, or a smaller batch",
        )
    if promised and abs(peak - promised) > SLACK * peak:
        yield Finding(
            code="memory-differs",
            severity="info",
            message=(
                f"the peak is {bytes_text(peak)} a device, {bytes_text(promised)} were predicted"
                f" ({percent_text(abs(promised - peak) / peak)} off)."
            ),
        )


def traffic(
    plan: Plan, topology: Topology, compiled: CompiledStep, found: Sequence[Found]
) -> Iterable[Finding]:
    """Which collectives did nobody plan, which planned ones are missing?"""
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
        mine = [item for item in found if (item.kind, item.axes) == key]
        if due and _narrower(size, due, mine):
            yield Finding(
                code="narrow-reduction",
                severity="warning",
                where=key_text(key),
                message=(
                    f"{key_text(key)} is done in"
                    f" {', '.join(sorted({d for item in mine for d in item.dtypes}))}:"
                    f" {bytes_text(size)} a step, {bytes_text(due)} were planned."
                ),
                hint="keep the accumulation in float32 if the sum must not lose digits",
            )
        elif size > due * (1 + SLACK) + noise:
            yield _unplanned(key, size, due, mine, slow)
        elif size < due * (1 - SLACK) - noise:
            yield Finding(
                code="missing-collective",
                severity="info",
                where=key_text(key),
                message=(
                    f"{key_text(key)} moves {bytes_text(size)} a step, {bytes_text(due)} were"
                    " planned."
                ),
            )


def _unplanned(
    key: Key, size: int, due: int, mine: Sequence[Found], slow: frozenset[str]
) -> Finding:
    causes: dict[str, int] = {}
    for item in mine:
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
        message=f"{key_text(key)} moves {bytes_text(size)} a step, {planned}{network}: {worst}.",
        hint=(
            "look at the layouts that meet there, or pin the rule of the dim that is gathered"
            if not due
            else ""
        ),
    )


def _whole_reductions(
    plan: Plan, promised: dict[Key, int], real: dict[Key, int], noise: float, *, tiles: bool
) -> list[Finding]:
    """Axes where the compiler reduces whole arrays although a scatter was planned: up to twice the
    bytes on the wire.
    """
    findings: list[Finding] = []
    for (kind, axes), due in promised.items():
        ways = plan.mesh.ways(axes)
        extra = real.get(("all-reduce", axes), 0) - promised.get(("all-reduce", axes), 0)
        lacking = due - real.get((kind, axes), 0)
        if kind == "reduce-scatter" and lacking * ways > noise and extra > 0.5 * lacking * ways:
            findings.append(
                Finding(
                    code="whole-reduction",
                    severity="warning",
                    where=key_text((kind, axes)),
                    hint=(
                        "cut the parameter along a dim that stays aligned to the tiles, over one"
                        " torus axis at a time"
                        if tiles
                        else ""
                    ),
                    message=(
                        f"reductions over {'·'.join(axes)} were planned as reduce-scatters of"
                        f" {bytes_text(due)} shards; the compiler reduces"
                        f" {bytes_text(real.get(('all-reduce', axes), 0))} whole, up to twice the"
                        " bytes on the wire."
                    ),
                )
            )
    return findings


def _split(where: str) -> Key:
    kind, _, axes = where.partition(" over ")
    return kind, tuple(axes.split("·"))


def _narrower(size: int, due: int, mine: Sequence[Found]) -> bool:
    """Whether a reduction moves a half or a quarter of what was planned, in a type of 16 bits or
    fewer.
    """
    ratio = size / due
    small = bool(mine) and all(
        BITS[dtype] <= 16
        for item in mine
        for dtype in item.dtypes
        if item.bytes * item.count > NOISE * size
    )
    return (
        small
        and mine[0].kind in REDUCTIONS
        and any(abs(ratio - part) < 0.03 for part in (0.5, 0.25))
    )


def _slow_axes(plan: Plan, topology: Topology) -> frozenset[str]:
    """Axes that span the outermost of several tiers."""
    spans = place(plan.mesh, topology)
    if spans is None or len(topology.tiers) < 2 or topology.tiers[0].kind != "network":
        return frozenset()
    return frozenset(axis for axis, parts in spans.items() if any(part.tier == 0 for part in parts))


def wire_dtypes(plan: Plan, compiled: CompiledStep) -> Iterable[Finding]:
    """Gradients that are reduced in another dtype than the plan decides: in reductions over axes
    that cut the batch, those of a few numbers apart.
    """
    wanted = dict(plan.dtypes).get("reduction_dtype")
    if wanted is None:
        return
    mine = [one for one in compiled.reductions if one[1] and "tensor" not in one[1]]
    total = sum(size for *_, size in mine)
    for kind, axes, dtype, size in mine:
        if dtype != HLO_NAMES[wanted] and size > NOISE * total:
            yield Finding(
                code="reduction-dtype",
                severity="warning",
                where=key_text((kind, axes)),
                message=(
                    f"{key_text((kind, axes))} moves {bytes_text(size)} a step in {dtype}, and the"
                    f" plan reduces gradients in {wanted}."
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


def rematerialised(log: str) -> Iterable[Finding]:
    """Values that the partitioner gathered whole because it found no other way between two
    layouts.
    """
    lines = [
        line.strip()
        for line in log.splitlines()
        if re.search(r"[Ii]nvoluntary full rematerialization", line)
    ]
    if lines:
        names = sorted(
            {found[1] for line in lines if (found := re.search(r'op_name="([^"]*)"', line))}
        )
        yield Finding(
            code="full-rematerialisation",
            severity="warning",
            where=", ".join(names[:3]),
            message=(
                f"the partitioner gathers {len(lines)} value{'s' if len(lines) > 1 else ''} whole"
                " to get from one layout to another."
            ),
            hint="look at the layouts that meet there",
        )


def idle_axes(plan: Plan, compiled: CompiledStep) -> Iterable[Finding]:
    """Axes that cut nothing: their devices all do the same work."""
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
            hint="give its devices to another axis, or name a dim that it can cut",
            message=(
                f"the mesh axis {axis} of size {plan.mesh[axis]} cuts nothing: its devices all do"
                " the same work."
            ),
        )


def replicated(plan: Plan, topology: Topology) -> Iterable[Finding]:
    """Large arrays that every device holds whole."""
    large = 0.01 * topology.chip.usable_bytes
    whole = [
        (p.path, math.prod(p.shape) * _itemsize(p.dtype))
        for p in plan.parameters
        if plan.mesh.devices > 1 and p.rest.ways(plan.mesh) == 1
    ]
    for path, size in sorted(
        ((path, size) for path, size in whole if size > large), key=lambda pair: -pair[1]
    )[:5]:
        yield Finding(
            code="large-replicated",
            severity="info",
            where=path,
            message=(
                f"{path}, {bytes_text(size)}, is whole on each of the {plan.mesh.devices} devices."
            ),
            hint="zero=3 cuts parameters at rest",
        )


def _itemsize(dtype: str) -> int:
    bits = re.search(r"(?:float|int|uint|bfloat|complex)(\d+)", dtype)
    return int(bits[1]) // 8 if bits else 1


def donation(plan: Plan, compiled: CompiledStep, donated: int, aliased: int) -> Iterable[Finding]:
    """State whose memory is not reused for the next state."""
    kept = plan.estimate.device_bytes
    state = kept.parameters + kept.frozen + kept.optimizer
    reused = compiled.device_bytes["aliased"]
    if aliased < donated and reused < 0.99 * state:
        yield Finding(
            code="not-donated",
            severity="warning",
            message=(
                f"{donated - aliased} of the {donated} arrays of the state are not updated in"
                f" place; {bytes_text(reused)} a device are, of {bytes_text(state)} of state."
            ),
        )


def unread(compiled: CompiledStep) -> Iterable[Finding]:
    """Parts of the program that the reader does not know."""
    if compiled.unread:
        rest = f" and {len(compiled.unread) - 3} more" if len(compiled.unread) > 3 else ""
        yield Finding(
            code="unread-hlo",
            severity="warning",
            hint="bytes and counts leave these out",
            message=(
                f"{len(compiled.unread)} parts of the compiled program could not be read:"
                f" {'; '.join(compiled.unread[:3])}{rest}."
            ),
        )
