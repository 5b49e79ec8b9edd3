"""The loss of one microbatch, with the layouts that were planned for the loss of the whole batch.

The loss is traced again for the shapes of a microbatch. Where it then computes other operations,
layouts are followed from the parameters and the batch on.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from shardlib.annotation.model import Model, PureLoss
from shardlib.annotation.trees.paths import Tree
from shardlib.graph.rows import Rows
from shardlib.lowering.loss.followed import followed
from shardlib.lowering.loss.forward import lost_placements
from shardlib.lowering.loss.placing import Placements, parameter_order
from shardlib.lowering.reading.fused_dims import Interleaving
from shardlib.lowering.reading.traced_loss import LossJaxpr, same_program, trace_loss
from shardlib.planning.plan import Plan
from shardlib.report import Finding, diagnostic


@dataclass(frozen=True, kw_only=True)
class PlannedLoss:
    """What planning knows of a loss.

    Attributes:
        traced: the loss traced for the global batch; None where it was not.
        placements: layouts of activations.
        around: the same outside of the layers of a pipeline, where the stages may shard them too.
        rows: how the loss depends on the rows of the batch; None where it is the mean over them.
        interleaving: what the loss does otherwise where fused dims are interleaved.
    """

    traced: LossJaxpr | None = None
    placements: Placements | None = None
    around: Placements | None = None
    rows: Rows | None = None
    interleaving: Interleaving | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """The loss of one microbatch.

    Attributes:
        traced: it.
        placements: layouts for its values.
        findings: what the user should know where these are not the layouts of the plan.
    """

    traced: LossJaxpr
    placements: Placements
    findings: tuple[Finding, ...] = ()

    @property
    def lost(self) -> bool:
        """Whether the layouts of the plan are not those of this loss."""
        return bool(self.findings)


def part_as_planned(
    plan: Plan,
    model: Model,
    loss: PureLoss,
    part: Tree,
    planned: PlannedLoss,
) -> Part:
    """The loss of one microbatch, with the layouts of the plan where it computes what was planned."""
    traced, placements = planned.traced, planned.placements or {}
    if traced is not None and plan.microbatches == 1:
        return Part(traced=traced, placements=placements)
    again = trace_loss(loss, model.params, model.state, part)
    if traced is not None and not same_program(traced, again):
        return Part(
            traced=again,
            placements=followed(
                plan,
                again,
                parameter_order(plan, model.params),
                len(jax.tree.leaves(model.state)),
            ),
            findings=(lost_placements(len(placements)),),
        )
    return Part(traced=again, placements=placements)


@diagnostic
def kernel_findings(chosen: Plan, lowered: Plan, lost: bool) -> tuple[Finding, ...]:
    """Attention that is not computed as it was planned."""
    if chosen.attention != lowered.attention:
        return (
            Finding(
                code="kernel-left-out",
                severity="info",
                where=f"attention={chosen.attention}",
                message=(
                    "JAX lowers the kernel of cuDNN only where the GPUs are; in its place stands"
                    " attention in blocks, which keeps no scores either and is slower"
                ),
            ),
        )
    if lost and lowered.attention != "traced":
        return (
            Finding(
                code="attention-as-written",
                severity="warning",
                where=f"attention={lowered.attention}",
                message=(
                    "the loss computes other operations on a microbatch than on the whole batch, so"
                    " that attention is left to the compiler as the model is written: it keeps"
                    " scores, unlike what is predicted"
                ),
                hint="pin microbatches to 1, or attention to 'traced'",
            ),
        )
    return ()
