"""How is a loss multiplied by a scale that changes from step to step?

Gradients in float16 are lost under 6e-8; those of a loss that is multiplied by a scale are not, and
are divided by it before the update (arXiv:1710.03740, section 3.2). The scale enters the traced
loss beside the model state, so that it reaches the loss wherever that is computed: in microbatches,
and in both forms of pipelines.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from shardlib.annotation.activations import no_mesh
from shardlib.errors import TracingError
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.lowering.runtime.state import scaled_state
from shardlib.tracing.program import flatten


def scaled(traced: LossJaxpr, parameters: int, states: int) -> LossJaxpr:
    """The loss of (params, state, batch) as one of (params, {"model": state, "scale": scale},
    batch), multiplied by the scale in float32 at least.
    """
    before = parameters + states
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.closed_jaxpr.in_avals]

    def run(first: list[Any], scale: Any, rest: list[Any]) -> Any:
        loss, (metrics, state) = jax.tree.unflatten(
            traced.out_tree, jex.jaxpr_as_fun(traced.closed_jaxpr)(*first, *rest)
        )
        return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)) * scale, (
            metrics,
            scaled_state(state, scale),
        )

    with no_mesh():
        again, shapes = jax.make_jaxpr(run, return_shape=True)(
            avals[:before], jax.ShapeDtypeStruct((), jnp.float32), avals[before:]
        )
    old, new = (
        [(equation.path, equation.name) for equation in flatten(one).equations]
        for one in (traced.closed_jaxpr, again)
    )
    if new[: len(old)] != old:
        raise TracingError(
            "the loss does not trace again with a scale: its equations change\nTry: no scale of the"
            " loss"
        )
    return LossJaxpr(closed_jaxpr=again, out_tree=jax.tree.structure(shapes))
