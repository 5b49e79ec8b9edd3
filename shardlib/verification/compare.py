"""Differences between a compiled step and its plan, as findings.

Every function answers one question and returns findings. What stops a run is an error; what costs
time or memory that nobody planned is a warning; what is only worth knowing is an info.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from shardlib.axes import MESH_AXES
from shardlib.hardware.topology import Topology
from shardlib.layout import Layout
from shardlib.planning.plan import Plan
from shardlib.planning.units.quantity import bytes_text, percent_text, seconds_text
from shardlib.report import SEVERITIES, Finding, diagnostic
from shardlib.verification.compare_collectives import SLACK, traffic, wire_dtypes
from shardlib.verification.compiled_step import CompiledStep
from shardlib.verification.hlo.found import Found

#: The compiler's kernels may take so much longer than was predicted before that is said.
OPTIMISTIC = 0.02


@diagnostic
def compare(
    plan: Plan,
    topology: Topology,
    compiled: CompiledStep,
    found: Sequence[Found],
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
                f"the peak is {bytes_text(peak)} a device, {bytes_text(promised)} were predicted"
                f" ({percent_text(abs(promised - peak) / peak)} off)."
            ),
        )


@diagnostic
def kernels(plan: Plan, compiled: CompiledStep) -> Iterable[Finding]:
    """Is the predicted step shorter than what the compiler thinks of its kernels alone?"""
    parts, compiled_seconds = plan.estimate.seconds, compiled.compute_seconds
    predicted = parts.compute + parts.optimizer
    if compiled_seconds > predicted * (1 + OPTIMISTIC):
        yield Finding(
            code="optimistic",
            severity="warning",
            where="compute",
            message=(
                f"the compiler's own kernels take {seconds_text(compiled_seconds)} a step, without"
                f" those that it does not estimate (attention); {seconds_text(predicted)} were"
                f" predicted, so a step takes at least"
                f" {percent_text((compiled_seconds - predicted) / predicted)} more."
            ),
            hint="believe the compiler: MFU and step time of this plan are too good",
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
                f" place; {bytes_text(reused)} a device are, of {bytes_text(state)} of state."
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
