"""Why a plan was chosen: what limits the step, what memory forces, which meshes come next."""

from __future__ import annotations

from dataclasses import fields

from shardlib.cost.estimate import Estimate
from shardlib.planning.plan import Plan, Rejected
from shardlib.planning.text.figures import LABELS, in_every_step, limit_bytes, limit_text
from shardlib.planning.units.quantity import (
    bytes_text,
    count_text,
    percent_text,
    ratio_text,
    seconds_text,
)
from shardlib.planning.units.tables import wrapped

_MOST_RUNNERS = 4
#: Share of the kernels' time that FLOPs take at the peak where they are what limits them.
_MOSTLY = 0.5


def reasons(plan: Plan, hbm_bytes: float | None = None) -> list[str]:
    """One sentence per reason: what limits the step, what memory forces, which meshes come next.

    Args:
        hbm_bytes: that a program can use of a device; None where it is not known.
    """
    estimate, seconds = plan.estimate, plan.estimate.seconds
    total = estimate.step_seconds or 1.0
    name, most = max(
        ((field.name, getattr(seconds, field.name)) for field in fields(seconds)),
        key=lambda item: item[1],
    )
    share = f"{seconds_text(most)} of {seconds_text(total)} ({percent_text(most / total)})"
    lines = [
        _kernels_reason(estimate, most, share)
        if name == "compute"
        else f"{LABELS.get(name, name).capitalize()} limits the step: {share}."
    ]
    if estimate.model_flops:
        again = estimate.hardware_flops / estimate.model_flops - 1
        lines.append(
            f"The step needs {count_text(estimate.model_flops, 'FLOP')}"
            + (
                f" and executes {percent_text(again)} more to recompute activations"
                if again > 0.005
                else ""
            )
            + f"; the devices peak at {count_text(estimate.peak_flops_per_s, 'FLOP/s')} together."
        )
    lines += _communication_reason(plan)
    if hbm_bytes:
        limit = limit_bytes(estimate, hbm_bytes)
        spare = limit - estimate.device_bytes.peak
        lines.append(
            f"Memory: {bytes_text(estimate.device_bytes.peak)} of"
            f" {limit_text(estimate, hbm_bytes)} a device, "
            + (
                f"{percent_text(spare / limit)} spare"
                if spare >= 0
                else f"{bytes_text(-spare)} too much"
            )
            + (
                f", as programs may need {percent_text(estimate.margin - 1)} more than predicted."
                if estimate.margin > 1
                else "."
            )
        )
    return lines + _offload_reason(plan, hbm_bytes) + _runner_reasons(plan)


def _kernels_reason(estimate: Estimate, seconds: float, share: str) -> str:
    """What limits a step of kernels: their FLOPs, where these alone take most of that time at the
    peak of the chips.

    Args:
        seconds: of its kernels.
    """
    least = estimate.hardware_flops / (estimate.peak_flops_per_s or 1.0)
    if not least or least >= _MOSTLY * seconds:
        return f"Compute limits the step: {share}."
    return (
        f"Kernels (compute and memory traffic) limit the step: {share}. At the peak of the chips"
        f" their FLOPs alone would take {seconds_text(least)}; the rest is memory traffic, launches"
        " and matmuls that do not reach that peak."
    )


def _communication_reason(plan: Plan) -> list[str]:
    by_axes: dict[tuple[str, ...], float] = {}
    for collective in in_every_step(plan.estimate.collectives):
        by_axes[collective.axes] = by_axes.get(collective.axes, 0.0) + collective.seconds
    everything = sum(by_axes.values())
    if not everything:
        return [] if plan.mesh.devices > 1 else ["One device needs no communication."]
    axes, most = max(by_axes.items(), key=lambda item: item[1])
    exposed = min(plan.estimate.seconds.exposed, everything)
    return [
        f"Communication takes {seconds_text(everything)}, of which"
        f" {percent_text(1 - exposed / everything)} hides behind compute; the most is over"
        f" {'·'.join(axes)} ({seconds_text(most)})."
    ]


def _offload_reason(plan: Plan, hbm_bytes: float | None) -> list[str]:
    """Why something is offloaded, however much memory is spare with it."""
    one = plan.estimate.offloaded
    if one is None:
        return []
    whole = plan.estimate.device_bytes.peak + one.device_bytes
    limit = hbm_bytes / plan.estimate.margin if hbm_bytes else None
    why = (
        f"more than the {bytes_text(limit)} that a plan may take"
        if limit is not None and whole > limit
        else "which would fit"
    )
    what = " and ".join(
        {"optimizer": "optimizer state", "disk": "optimizer state"}.get(part, part)
        for part in plan.offload
    )
    return [
        f"Offloaded: {what}, {bytes_text(one.device_bytes)} per device. With that in device memory"
        f" the same plan would need {bytes_text(whole)}, {why}; all of it is moved or nothing,"
        f" which costs {seconds_text(one.seconds)} of a step."
    ]


def _runner_reasons(plan: Plan) -> list[str]:
    slower = [r for r in plan.search.rejected if r.reason in ("slower", "bound")][:_MOST_RUNNERS]
    too_big = [r for r in plan.search.rejected if r.reason == "memory"]
    groups: dict[tuple[str, str], list[str]] = {}
    for r in slower:
        groups.setdefault((r.summary, _speed(plan, r)), []).append(str(r.mesh))
    told = [
        f"{' or '.join(meshes)}{f' ({summary})' if summary else ''}, {speed}"
        for (summary, speed), meshes in groups.items()
    ]
    lines = [f"Next best: {'; '.join(told)}."] if told else []
    if too_big:
        least = min(too_big, key=lambda r: (r.peak_bytes == 0, r.peak_bytes))
        need = f", which needs {bytes_text(least.peak_bytes)} a device" if least.peak_bytes else ""
        many = (
            f"{len(too_big)} other meshes do not fit in memory; the nearest is"
            if len(too_big) > 1
            else "Another mesh does not fit in memory:"
        )
        lines.append(f"{many} {least.mesh}{need}.")
    return lines


def _speed(plan: Plan, rejected: Rejected) -> str:
    at_least = "at least " if rejected.reason == "bound" else ""
    ratio = rejected.step_seconds / (plan.estimate.step_seconds or 1.0)
    return (
        "equally fast"
        if 0.995 < ratio < 1.005 and not at_least
        else f"{at_least}{ratio_text(ratio)} the time"
    )


def why_section(plan: Plan, hbm_bytes: float | None) -> str:
    """The reasons as text.

    Args:
        hbm_bytes: that a program can use of a device; None where it is not known.
    """
    return "\n".join(
        ["Why", *(line for reason in reasons(plan, hbm_bytes) for line in wrapped("  - ", reason))]
    )
