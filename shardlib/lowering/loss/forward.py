"""How does the user's loss become a loss with the plan's layouts in it?

The loss is traced once for the shapes of one microbatch, under the plan's mesh, so that annotations
of the user's own keep their meaning; then it is evaluated again with a constraint on every value
that the plan places. The gradient of a parameter is laid out for the optimizer where it is made: of
a stacked one inside the scan, layer by layer.

Parameters that are stored sharded (ZeRO 3) are gathered by the operations that use them, and again
in the backward pass, see `lowering/weights/gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from shardlib.annotation.model import PureLoss
from shardlib.annotation.trees.paths import Tree
from shardlib.lowering.loss.placing import Placements, Placing
from shardlib.lowering.loss.remat import apart
from shardlib.lowering.mesh.shardings import (
    ParameterShardings,
)
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.planning.plan import Plan
from shardlib.report import Finding, diagnostic
from shardlib.tracing.program import (
    with_frozen,
)
from shardlib.tracing.rewriting.binding import as_array
from shardlib.tracing.rewriting.interpreter import evaluate_program
from shardlib.tracing.rewriting.walk import Walk


def placed_loss(
    traced: LossJaxpr, placing: Placing, change: Callable[[Walk], Walk] = lambda walk: walk
) -> PureLoss:
    """The traced loss with the plan's layouts and rematerialisation, as a function of stored
    parameters; `change` has the last word on the walk.

    Args:
        change: walk -> walk, has the last word.

    Returns:
        (params, state, batch) -> (loss, (metrics, state)).
    """
    plan, program = (
        placing.plan,
        with_frozen(
            traced.program,
            [k for k, i in enumerate(placing.order) if not placing.plan.parameters[i].trained],
        ),
    )
    policies = apart(plan, program, placing.loss, [plan.parameters[i].path for i in placing.order])
    walk = change(
        replace(
            placing.walk(),
            remat=plan.remat,
            apart=policies,
            offloaded="activations" in plan.offload,
        )
    )

    def loss(params: Tree, state: Tree, batch: Tree) -> Any:
        arguments = [*placing.start(jax.tree.leaves(params)), *jax.tree.leaves((state, batch))]
        results = zip(program.outputs, evaluate_program(program, arguments, walk), strict=True)
        return jax.tree.unflatten(
            traced.out_tree, [as_array(program, number, leaf) for number, leaf in results]
        )

    return loss


@diagnostic
def unused_loops(
    traced: LossJaxpr,
    plan: Plan,
    mesh: Mesh | AbstractMesh,
    params: ParameterShardings,
    placements: Placements,
) -> tuple[Finding, ...]:
    """What the user should know when a plan has loops over the tensor axis, and the program
    none.
    """
    if plan.collective_matmul != "loop" or (
        plan.mesh["stage"] == 1
        and Placing.of(traced, plan, mesh, params, placements).together(mesh)
    ):
        return ()
    return (
        Finding(
            code="collective-matmul-unused",
            severity="warning",
            where="program",
            message=(
                "collective_matmul='loop' changes nothing: the program has no matmul of a weight"
                " that gathers or scatters the sequence over tensor, or it has stages"
            ),
            hint="a mesh with tensor and without stages, and sequence_parallel=True",
        ),
    )


def lost_placements(count: int) -> Finding:
    """What the user should know when the loss of a microbatch is another program than the loss of
    the batch.
    """
    return Finding(
        code="placements-lost",
        severity="warning",
        message=(
            "the loss computes other operations on a microbatch than on the whole batch; "
            f"{count} layouts of activations were left to the compiler."
        ),
        hint="pin microbatches to 1",
    )
