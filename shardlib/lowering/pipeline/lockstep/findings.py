"""Findings about a pipeline: what every stage does again, and what is gathered at every use."""

from __future__ import annotations

from shardlib.lowering.pipeline.lockstep.stage import Stages
from shardlib.lowering.pipeline.shared.partition import Cut
from shardlib.planning.plan import Plan
from shardlib.report import Finding, diagnostic


@diagnostic
def repeated(stages: Stages) -> tuple[Finding, ...]:
    """A finding where what comes before and after the layers cannot be shared out."""
    if any(dim is not None for dim in stages.spread):
        return ()
    return (
        Finding(
            code="ends-repeated",
            severity="warning",
            where=f"stage={stages.table.stages}",
            message=(
                "no dim of what passes between the layers and the ends of the model divides by the"
                " stages: every stage computes embedding, head and loss."
            ),
            hint=(
                "a sequence, or a microbatch on each device, that is a multiple of the number of"
                " stages"
            ),
        ),
    )


@diagnostic
def not_gathered(stages: Stages, plan: Plan) -> tuple[Finding, ...]:
    """A finding where the plan gathers once, and nothing can be gathered beforehand."""
    gathered = stages.chunk.known
    if plan.gather != "once" or (gathered is not None and gathered.operands):
        return ()
    return (
        Finding(
            code="nothing-gathered-once",
            severity="warning",
            where="gather=once",
            message=(
                "the layers have no matmul whose weight is stored sharded and could be gathered"
                " before the ticks: every operation gathers what it uses."
            ),
            hint=(
                "gather='use', or matmuls of parameters that fsdp shards, on a batch that is"
                " sharded over fsdp or data"
            ),
        ),
    )


@diagnostic
def gathered_at_use(loss_cut: Cut, plan: Plan) -> tuple[Finding, ...]:
    """A finding where the plan gathers once, and layers have frozen sharded weights, which are
    gathered at every use.
    """
    if plan.gather != "once" or plan.zero < 3 or not loss_cut.frozen_tables:
        return ()
    return (
        Finding(
            code="frozen-gathered-at-use",
            severity="warning",
            where="gather=once",
            message=(
                f"{len(loss_cut.frozen_tables)} stacks of frozen weights are gathered by every"
                " operation that uses them, for every microbatch; the price has them gathered"
                " once."
            ),
            hint="zero below 3, or a mesh without stages",
        ),
    )
