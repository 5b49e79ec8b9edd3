"""What is worth a word about matmuls that several devices compute alike
(`shardlib.cost.pricing.variants.replicated`).
"""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.axes import MeshShape
from shardlib.planning.units.quantity import percent_text, seconds_text
from shardlib.report import Finding, diagnostic

#: Share of a step from which it is worth a word.
WORTH = 0.01
#: Ops that are named at most.
NAMED = 4


@diagnostic
def of_replicated(
    found: Mapping[tuple[str, ...], Mapping[str, float]], mesh: MeshShape, step_seconds: float
) -> tuple[Finding, ...]:
    """What the user should know: for each set of mesh axes, how many seconds of a step, and what
    computes the most of them.

    Args:
        found: seconds by axes and op, see `shardlib.cost.pricing.variants.replicated.replicated`.
        step_seconds: of the step.
    """
    worth = {
        axes: ops for axes, ops in sorted(found.items()) if sum(ops.values()) > WORTH * step_seconds
    }
    return tuple(_finding(axes, ops, mesh, step_seconds) for axes, ops in worth.items())


def _finding(
    axes: tuple[str, ...], ops: Mapping[str, float], mesh: MeshShape, step_seconds: float
) -> Finding:
    total, most = sum(ops.values()), sorted(ops.items(), key=lambda one: (-one[1], one[0]))
    listed = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in most[:NAMED]) + (
        f" and {len(most) - NAMED} more" if len(most) > NAMED else ""
    )
    over = " x ".join(f"{axis}={mesh[axis]}" for axis in axes)
    return Finding(
        code="replicated-compute",
        severity="warning",
        where="·".join(axes),
        hint="an axis of a size that divides their dims, or devices on another axis",
        message=(
            f"matmuls and convolutions that take {seconds_text(total)} of a step"
            f" ({percent_text(total / step_seconds)}) are replicated over {over}, and each of its"
            f" {mesh.ways(axes)} devices computes all of them: {listed}."
        ),
    )
