"""An operation on a weight, with the weight gathered and its gradient reduced in every run."""

from __future__ import annotations

from collections.abc import Callable

from shardlib.jax_types import Value
from shardlib.layout import Layout
from shardlib.lowering.mesh.collectives import Machine
from shardlib.lowering.reading.use import Use
from shardlib.lowering.weights.contraction import reduced_contraction
from shardlib.lowering.weights.frozen import regathered
from shardlib.lowering.weights.gathering import in_use
from shardlib.lowering.weights.lookup import reduced_lookup
from shardlib.planning.plan import ParameterLayout


def reduced(
    use: Use, result: Layout, parameter: ParameterLayout, machine: Machine
) -> Callable[..., Value] | None:
    """An operation whose weight is gathered, and its gradient reduced, as the plan says.

    Returns:
        A function of the operands; None where the batch is not sharded, or the gradient cannot be
    """
    if not parameter.trained:
        return (
            None
            if parameter.rest == parameter.compute
            else regathered(use, in_use(use, parameter, machine))
        )
    return (reduced_lookup if use.equation.name == "gather" else reduced_contraction)(
        use, result, parameter, machine
    )
