"""What is worth knowing of a serving plan before it is used."""

from __future__ import annotations

from shardlib.planning.serving.estimate import ServingEstimate, ServingPoint
from shardlib.planning.serving.space import Asked
from shardlib.planning.units.quantity import bytes_text, percent_text
from shardlib.report import Finding, diagnostic

#: Chips of the runs that the constants were learned from.
LEARNED_ON: frozenset[str] = frozenset({"a100", "h100", "h200", "v4", "v6e"})
#: Share of the memory above which a plan is called tight.
TIGHT = 0.98


@diagnostic
def findings(asked: Asked, point: ServingPoint, estimate: ServingEstimate) -> tuple[Finding, ...]:
    """What is worth knowing."""
    listed: list[Finding] = []
    if asked.topology.chip.name not in LEARNED_ON:
        listed.append(
            Finding(
                code="chip-not-measured",
                severity="info",
                where="topology",
                message=(
                    f"no published run of a {asked.topology.chip.name} was at hand: its seconds"
                    " follow from its data sheet and from what was learned on"
                    f" {', '.join(sorted(LEARNED_ON))}."
                ),
            )
        )
    nbytes = estimate.device_bytes
    if nbytes.peak > TIGHT * nbytes.limit:
        listed.append(
            Finding(
                code="memory-full",
                severity="info",
                where="batch",
                message=(
                    f"a device has {bytes_text(nbytes.peak)} of"
                    f" {bytes_text(nbytes.limit)}, {percent_text(nbytes.peak / nbytes.limit)}: the"
                    " batch is as large as pages of whole requests allow."
                ),
            )
        )
    return tuple(listed)
