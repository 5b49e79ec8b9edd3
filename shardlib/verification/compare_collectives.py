"""Collectives of a compiled step against those of its plan: nobody planned them, they are missing,
they reduce whole arrays or another dtype, or they run over the slow network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardlib.hardware.placement import place
from shardlib.hardware.topology import Topology
from shardlib.planning.plan import Plan
from shardlib.planning.units.quantity import bytes_text
from shardlib.report import Finding, diagnostic
from shardlib.verification.compiled_step import CompiledStep
from shardlib.verification.hlo.found import REDUCTIONS, Found
from shardlib.verification.hlo.shapes import BITS
from shardlib.verification.report import Key, key_text, totals

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
        matching = [item for item in found if (item.kind, item.axes) == key]
        if due and _narrower(size, due, matching):
            yield Finding(
                code="narrow-reduction",
                severity="warning",
                where=key_text(key),
                message=(
                    f"{key_text(key)} is done in"
                    f" {', '.join(sorted({d for item in matching for d in item.dtypes}))}:"
                    f" {bytes_text(size)} a step, {bytes_text(due)} were planned."
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
                    f"{key_text(key)} moves {bytes_text(size)} a step, {bytes_text(due)} were"
                    " planned."
                ),
            )


def _unplanned(
    key: Key, size: int, due: int, matching: Sequence[Found], slow: frozenset[str]
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
        message=f"{key_text(key)} moves {bytes_text(size)} a step, {planned}{network}: {worst}.",
        hint=(
            "look at the layouts that meet there, or pin the rule of the dim that is gathered"
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


def _narrower(size: int, due: int, matching: Sequence[Found]) -> bool:
    """Whether a reduction moves a half or a quarter of what was planned, in a type of 16 bits or
    fewer.
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
                    f"{key_text((kind, axes))} moves {bytes_text(size)} a step in {dtype}, and the"
                    f" plan reduces gradients in {planned}."
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
