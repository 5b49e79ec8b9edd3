"""What was decided, and why, in words that a person understands at a glance."""

from __future__ import annotations

from shardlib.errors import MissingFileError, TopologyError
from shardlib.hardware.topology import Topology
from shardlib.hardware.topology import topology as find_topology
from shardlib.planning.decisions.compiled_trials import Refined
from shardlib.planning.plan import Plan
from shardlib.planning.text.decision_lines import decisions_section
from shardlib.planning.text.figures import collectives_section, memory_section, time_section
from shardlib.planning.text.parameters import parameters_section
from shardlib.planning.text.reasons import why_section
from shardlib.planning.units.quantity import bytes_text, count_text, percent_text, seconds_text
from shardlib.planning.units.tables import aligned, wrapped
from shardlib.untrusted import printable


def explain(plan: Plan, *, topology: Topology | None = None) -> str:
    """Explains a plan in plain text, at most 100 columns wide.

    Args:
        topology: the machine it is for; None looks it up by the plan's spelling of it.
    """
    hbm_bytes = usable_bytes(plan, topology)
    parts = [
        headline(plan),
        decisions_section(plan),
        why_section(plan, hbm_bytes),
        _compiler(plan),
        time_section(plan),
        memory_section(plan, hbm_bytes),
        collectives_section(plan),
        parameters_section(plan),
        _findings(plan),
        _search(plan),
    ]
    return printable("\n\n".join(part for part in parts if part) + "\n")


def usable_bytes(plan: Plan, topology: Topology | None = None) -> int | None:
    """Memory of a device that a program can use; None where the plan's topology is a file that is
    not on this machine.
    """
    try:
        return (topology or find_topology(plan.topology)).chip.usable_bytes
    except (TopologyError, MissingFileError):
        return None


def headline(plan: Plan) -> str:
    """Two lines: what runs where, and how fast."""
    estimate, n = plan.estimate, plan.mesh.devices
    return "\n".join(
        [
            f"{plan.model} on {plan.topology}{_software(plan)}: {n} device{'s' if n > 1 else ''},"
            f" mesh {plan.mesh}",
            (
                f"{seconds_text(estimate.step_seconds)} a step ·"
                f" {count_text(estimate.tokens_per_second)} tokens/s · MFU"
                f" {percent_text(estimate.mfu)} · {bytes_text(estimate.device_bytes.peak)} a device"
            ),
        ]
    )


def _software(plan: Plan) -> str:
    """The framework that runs the plan, where it is not shardlib."""
    return f" under {plan.framework.name}" if plan.framework is not None else ""


TRIAL_HEAD = ("mesh", "step", "compiled", "memory", "compiled", "verdict", "other decisions")


def trial_rows(record: Refined) -> list[tuple[str, ...]]:
    """The plans that were compiled, a row for each under `TRIAL_HEAD`."""
    return [
        (
            str(t.mesh),
            seconds_text(t.predicted_seconds),
            seconds_text(t.compiled_seconds) if t.compiled_seconds else "-",
            bytes_text(t.predicted_bytes),
            bytes_text(t.compiled_bytes) if t.compiled_bytes else "-",
            t.verdict,
            t.summary,
        )
        for t in record.trials
    ]


def _compiler(plan: Plan) -> str:
    """The plans that were compiled: predicted beside compiled, and the verdict."""
    record = plan.refined
    if record is None:
        return ""
    kernels = {
        "compiler": "kernels and collectives are the compiler's",
        "model": "collectives are the compiler's, the time of kernels is predicted",
    }
    sums = (
        f"A step takes {seconds_text(record.step_seconds)} and {bytes_text(record.peak_bytes)} a"
        f" device; {kernels[record.kernels]}"
        + (
            f", {', '.join(' '.join(pair) for pair in record.versions)}."
            if record.versions
            else "."
        )
    )
    skipped = (
        [
            f"{record.passed_over:,} more candidates were passed over: the compiler found plans"
            " like them too large."
        ]
        if record.passed_over
        else []
    )
    return "\n".join(
        [
            "What the compiler said",
            *aligned([TRIAL_HEAD, *trial_rows(record)], right={1, 2, 3, 4}),
            *(line for text in (sums, *skipped) for line in wrapped("  - ", text)),
        ]
    )


def _findings(plan: Plan) -> str:
    if not plan.findings:
        return ""
    return "\n".join(
        ["Findings", *(line for finding in plan.findings for line in wrapped("  - ", str(finding)))]
    )


def _search(plan: Plan) -> str:
    search = plan.search
    if not search.evaluations:
        return ""
    proof = (
        "no plan in the space is faster within the cost model"
        if search.gap <= 0
        else (
            f"no plan in the space can beat {seconds_text(search.lower_bound)} (gap"
            f" {percent_text(search.gap)})"
        )
    )
    text = (
        f"{search.evaluations:,} of {search.candidates:,} candidates priced in"
        f" {seconds_text(search.seconds)}; {proof}."
    )
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in search.counts)
    return "\n".join(
        [
            "Search",
            *wrapped("  - ", text),
            *(wrapped("  - ", f"Candidates by outcome: {counts}.") if counts else []),
        ]
    )
