"""Operations that run otherwise on the mesh of a program than they were traced: those at computed
positions in manual regions.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from shardlib.lowering.loss.constraints import manual_axes, whole
from shardlib.tracing.element_lookup import by_elements, is_element_lookup
from shardlib.tracing.program import Equation
from shardlib.tracing.rewriting.binding import bind

#: Operations at computed positions. In a region where some axes are manual, XLA's partitioner
#: aborts the process on those of arrays that two automatic axes shard (seen on CPU with JAX 0.12:
#: "Check failed" in spmd_partitioner_util.cc); there, they and their gradients work on whole
#: arrays.
INDEXED: frozenset[str] = frozenset({"gather", "scatter", "scatter-add"})


def on_this_mesh(
    equation: Equation, operands: Sequence[jax.Array], mesh: Mesh | AbstractMesh
) -> list[jax.Array] | None:
    """The results of an operation that must run otherwise; None for all others."""
    if is_element_lookup(equation):
        return by_elements(equation, operands)
    if equation.name in INDEXED and manual_axes(mesh):
        results = bind(equation, [whole(operand, mesh) for operand in operands])
        return [whole(result, mesh) for result in results]
    return None
