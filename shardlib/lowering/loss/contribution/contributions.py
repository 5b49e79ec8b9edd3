"""What does a part of the batch contribute to the loss of the whole?

The loss of a microbatch is changed so that the mean over all microbatches of what it returns is
what the whole batch returns, and so are the gradients. For a mean over rows that is the loss as it
is. Of other losses four things change (`shardlib.tracing.rows` notes where):

- numbers that the whole batch says beforehand (the sum of a mask) are made once, from the whole
  batch (`Contribution.prologue`), and handed to every microbatch beside its rows;
- where terms are added up that the number of rows scales differently, each is multiplied with the
  power of the number of microbatches that makes it a mean over them;
- so is every result;
- random numbers for the rows are drawn at the positions that these have in the whole batch, from
  the same keys, and every microbatch begins with the model state before the step.

A `shardlib.WeightedMean` is left as its two sums, which are divided after the last microbatch
(`Contribution.finish`).
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from shardlib.annotation.model import Model
from shardlib.annotation.trees.paths import Tree
from shardlib.errors import PinError, TracingError, raise_all
from shardlib.graph.rows import Rows
from shardlib.lowering.loss.contribution.edits import Edits
from shardlib.lowering.loss.contribution.share import Contribution, Share, Whole, as_it_is
from shardlib.lowering.mesh.shardings import batch_path
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.lowering.runtime.random_keys import BatchDims, is_key, of_the_whole
from shardlib.planning.plan import Plan
from shardlib.planning.space.microbatching import require_unstaged
from shardlib.tracing.program import flatten
from shardlib.tracing.row_proofs import result_names
from shardlib.tracing.rows.draws import draws
from shardlib.tracing.rows.handed import Unlike
from shardlib.tracing.rows.proof import Inputs, compare


def whole_batch(traced: LossJaxpr, rows: Rows, model: Model, batch: Tree, dims: BatchDims) -> Whole:
    """The loss of the whole batch."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    row_dims = tuple(
        dim if isinstance(dim := dims[batch_path(path)], int) else None for path, _ in leaves
    )
    size = next(
        (
            leaf.shape[dim]
            for (_, leaf), dim in zip(leaves, row_dims, strict=True)
            if dim is not None
        ),
        1,
    )
    inputs = Inputs(
        parameters=len(jax.tree.leaves(model.params)),
        states=len(jax.tree.leaves(model.state)),
        dims=row_dims,
    )
    return Whole(
        traced=traced,
        rows=rows,
        inputs=inputs,
        names=result_names(jax.tree.unflatten(traced.out_tree, range(traced.out_tree.num_leaves))),
        size=size,
    )


def contribution(
    plan: Plan,
    full_loss: Whole,
    share: Share,
    mesh: Mesh | AbstractMesh,
) -> Contribution:
    """What a microbatch contributes."""
    if plan.microbatches == 1:
        return as_it_is(share.traced, share.dims, share.shardings)
    if full_loss.rows.asserted:
        return _asserted(plan, full_loss, share, mesh)
    if not full_loss.rows.splits:
        raise_all(
            PinError,
            f"{plan.microbatches} microbatches would change the numbers: the rows of the batch meet"
            " before the end",
            list(full_loss.rows.reasons),
            hint="a plan with one microbatch",
        )
    require_unstaged(full_loss.rows, plan.microbatches, plan.mesh["stage"])
    try:
        proof = compare(
            full_loss.traced.closed_jaxpr,
            share.traced.closed_jaxpr,
            full_loss.inputs,
            full_loss.names,
            (full_loss.size, full_loss.size // plan.microbatches),
        )
    except Unlike as error:
        raise TracingError(
            "the loss computes other operations on a microbatch than on the whole batch\nTry:"
            f" microbatches=1, or another number than {plan.microbatches}"
        ) from error
    if not proof.rows.splits:
        raise_all(
            PinError,
            f"{plan.microbatches} microbatches would change the numbers: the rows of the batch meet"
            " before the end",
            list(proof.rows.reasons),
            hint="another number of microbatches, or one",
        )
    assert proof.programs is not None
    draw_by_path = draws(*proof.programs, (full_loss.size, full_loss.size // plan.microbatches))
    edits = Edits.of(
        proof,
        plan.microbatches,
        full_loss,
        {path: draw for path, draw in draw_by_path.items() if draw is not None},
    )
    share = replace(share, dims=of_the_whole(share.dims))
    contributed = (
        edits.applied(plan, full_loss, share, mesh)
        if edits
        else replace(
            as_it_is(share.traced, share.dims, share.shardings),
            finish=edits.finish(share.traced, 0),
        )
    )
    return replace(
        contributed,
        repeated=frozenset(range(full_loss.inputs.states)),
        by_row=tuple(metric.rows for _, metric in proof.rows.metrics),
    )


def _asserted(
    plan: Plan, full_loss: Whole, share: Share, mesh: Mesh | AbstractMesh
) -> Contribution:
    """What a microbatch contributes to a loss that the user says is a mean over rows: it draws what
    the whole batch draws for its rows, or, where that is not known, from keys of its own.
    """
    written = as_it_is(share.traced, share.dims, share.shardings)
    sizes = (full_loss.size, full_loss.size // plan.microbatches)
    programs = [flatten(loss.traced.closed_jaxpr) for loss in (full_loss, share)]
    try:
        draw_by_path = draws(programs[0], programs[1], sizes)
    except Unlike:
        return written
    draws_by_row = {path: draw for path, draw in draw_by_path.items() if draw is not None}
    if len(draws_by_row) < len(draw_by_path):
        return written
    share = replace(share, dims=of_the_whole(share.dims))
    edits = Edits(parts=plan.microbatches, draws=draws_by_row)
    first = full_loss.inputs.parameters
    states = share.traced.closed_jaxpr.in_avals[first : first + full_loss.inputs.states]
    return replace(
        replace(edits.applied(plan, full_loss, share, mesh), finish=written.finish)
        if draws_by_row
        else replace(written, dims=share.dims),
        repeated=frozenset(
            index for index, aval in enumerate(states) if is_key(aval) or aval.dtype == jnp.uint32
        ),
    )
