"""`--perfetto` and `--run` of `shardlib timeline`: a trace of a step, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardlib.cli.output import write
from shardlib.errors import PlanError
from shardlib.planning.plan import Plan
from shardlib.planning.text.timeline import Timeline
from shardlib.planning.units.quantity import seconds_text


def write_trace(
    plan: Plan, timeline: Timeline | None, trace: Path, run: Path | None
) -> dict[str, float]:
    """Writes the trace of a plan, beside what a run recorded of its steps.

    Args:
        timeline: of its stages; None where it has none.
        run: with profiles; None for the prediction alone.
    """
    from shardlib.planning.pictures.step_trace import step_trace
    from shardlib.verification.profiles.recorded_steps import newest_profile, recorded_steps

    steps = () if run is None else recorded_steps(newest_profile(run), plan.digest)
    staged = None if timeline is None or not timeline.stages else timeline
    write(trace, step_trace(plan, steps, staged))
    return {
        "predicted": plan.estimate.step_seconds,
        **{step.name: step.seconds for step in steps},
    }


def told(steps: Mapping[str, float], trace: Path) -> str:
    """What is in a trace.

    Args:
        steps: seconds of its steps.
    """
    rows = [f"{name}: {seconds_text(seconds)} a step" for name, seconds in steps.items()]
    return "\n".join([*rows, f"{trace}: open it with https://ui.perfetto.dev", ""])


def timeline_of(plan: Plan, *, needed: bool) -> Timeline | None:
    """The timeline of the plan's stages; None where it has none and none is needed."""
    try:
        return plan.timeline()
    except PlanError:
        if needed:
            raise
        return None
