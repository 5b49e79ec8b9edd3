"""A lookup in a table that is sharded, and its gradient: a scatter-add on every device.

What a matmul is for other weights, a scatter-add is here: every device adds the cotangents of its
own examples to its own rows of the table, and the sums are reduced as `reduction.py` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardlib.jax_types import DType, Value
from shardlib.layout import Layout
from shardlib.lowering.mesh.collectives import Cuts, Machine
from shardlib.lowering.reading.use import Use
from shardlib.lowering.weights.gathering import in_use
from shardlib.lowering.weights.operands import WEIGHTS, Apart
from shardlib.lowering.weights.reduction import reduction
from shardlib.planning.plan import ParameterLayout
from shardlib.tracing.program import Equation
from shardlib.tracing.rewriting.binding import bind


def is_lookup(equation: Equation) -> bool:
    """Whether a gather takes whole rows of a matrix: `table[indices]`."""
    numbers, table = equation.params["dimension_numbers"], equation.eqn.invars[0].aval
    rank = equation.eqn.outvars[0].aval.ndim
    return (
        table.ndim == 2
        and numbers.start_index_map == (0,)
        and numbers.collapsed_slice_dims == (0,)
        and numbers.offset_dims == (rank - 1,)
        and not numbers.operand_batching_dims
        and tuple(equation.params["slice_sizes"]) == (1, table.shape[1])
    )


@dataclass(frozen=True, kw_only=True)
class Lookup(Apart):
    """A lookup in a table, taken apart: the activation are the indices.

    Attributes:
        result: layout of the rows that are found.
        machine: where it runs.
    """

    result: Layout
    machine: Machine

    def op(self, indices: Value, table: Value) -> Value:
        """The operation, on a table that may be in a narrower dtype than its own; where rows are on
        several devices, each looks into its own, and what they find is summed.
        """
        rank, dtype = len(self.result), self.use.equation.eqn.outvars[0].aval.dtype
        if not self.held[0]:
            return bind(self.use.equation, (table, indices))[0].astype(dtype)
        cuts = {
            **{
                dim: tuple(a for a in axes if a not in self.held[0])
                for dim, axes in enumerate(self.result[:-1])
            },
            rank - 1: self.held[1],
        }
        scattered = next(
            (
                dim
                for dim, axes in enumerate(self.result[:-1])
                if axes == (*cuts[dim], *self.held[0])
            ),
            None,
        )
        parts = self.machine.parts(self.held[0])

        def local(indices: Value, table: Value) -> Value:
            rows = self._rows(indices, table)
            return (
                jax.lax.psum(rows, parts)
                if scattered is None
                else jax.lax.psum_scatter(rows, parts, scatter_dimension=scattered, tiled=True)
            )

        left = cuts if scattered is None else {**cuts, scattered: self.result[scattered]}
        return self.machine.manual(
            local,
            (self.arguments[0], self.machine.spec(self.held, 2)),
            self.machine.spec(left, rank),
        )(indices, table).astype(dtype)

    def _rows(self, indices: Value, table: Value) -> Value:
        """The rows that one device has, zeros for the others; for indices that are out of range
        what the operation says, on the first device.
        """
        rows = table.at[self._inside(indices)[..., 0]].get(mode="fill", fill_value=0)
        if self._clips:
            return rows
        filled = self.use.equation.params["fill_value"]
        outside = (indices < 0) | (indices >= self.use.shape[0])
        first = jax.lax.axis_index(self.machine.parts(self.held[0])) == 0
        return jnp.where(
            outside & first, jnp.asarray(jnp.nan if filled is None else filled, rows.dtype), rows
        )

    @property
    def _clips(self) -> bool:
        return "clip" in str(self.use.equation.params["mode"]).lower()

    def _inside(self, indices: Value) -> Value:
        """Indices into the rows of one device; their number for rows of others."""
        clipped = jnp.clip(indices, 0, self.use.shape[0] - 1) if self._clips else indices
        here = clipped - (
            jax.lax.axis_index(self.machine.parts(self.held[0])) * self.local_shape[0]
            if self.held[0]
            else 0
        )
        return jnp.where((here >= 0) & (here < self.local_shape[0]), here, self.local_shape[0])

    def moved(self, cotangent: Value) -> Value:
        """The cotangent in the dtype in which the rows are used, of which it was made: compilers
        for TPUs gather it as it is given.
        """
        rows = self.use.rows
        return cotangent if rows is None else cotangent.astype(rows)

    def partial_sums(self, indices: Value, cotangent: Value, dtype: DType) -> Value:
        """The gradient of the table from one device's examples, inside a manual region.

        Args:
            dtype: of the sums.
        """
        rank, inside = len(self.result), self._inside(indices)
        numbers = jax.lax.ScatterDimensionNumbers(
            update_window_dims=(rank - 1,),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0,),
        )
        return jax.lax.scatter_add(
            jnp.zeros(self.local_shape, dtype),
            inside,
            cotangent.astype(dtype),
            numbers,
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        )

    def to_activation(self, indices: Value, table: Value, cotangent: Value) -> None:
        """Nothing: indices have no gradient."""
        return None

    def adds_in(self, sums: DType) -> DType:
        """The dtype in which partial sums are made: that of all sums, since many rows of the
        cotangent may be added to one of the table.
        """
        return sums


def lookup_of(
    use: Use, result: Layout, parameter: ParameterLayout, machine: Machine
) -> Lookup | None:
    """A lookup taken apart; None where the batch is not sharded, or it is no lookup of whole rows."""
    if use.operand != 0 or not is_lookup(use.equation) or None in use.view.dims:
        return None
    weight_cuts: Cuts = {
        i: tuple(a for a in parameter.compute[dim] if a in WEIGHTS)
        for i, dim in enumerate(use.view.dims)
        if dim is not None
    }
    taken = {axis for axes in weight_cuts.values() for axis in axes}
    cuts: Cuts = {
        dim: tuple(a for a in axes if a not in taken) for dim, axes in enumerate(result[:-1])
    }
    partial = tuple(axis for axes in cuts.values() for axis in axes)
    if not any(axis not in WEIGHTS for axis in partial):
        return None
    plan, rank = reduction(use, parameter.gradient, partial, machine, weight_cuts), len(result)
    return Lookup(
        use=use,
        plan=plan,
        held=weight_cuts,
        partial=partial,
        arguments=(
            machine.spec(cuts, rank),
            machine.spec({**cuts, rank - 1: weight_cuts[1]}, rank),
        ),
        kept=machine.spec(
            {dim: (*weight_cuts[dim], *plan.scattered.get(dim, ())) for dim in weight_cuts}, 2
        ),
        local_shape=tuple(
            size // machine.ways(weight_cuts[dim]) for dim, size in enumerate(use.shape)
        ),
        result=result,
        machine=machine,
    )


def reduced_lookup(
    use: Use, result: Layout, parameter: ParameterLayout, machine: Machine
) -> Callable[..., Value] | None:
    """A lookup whose gradient by the table is reduced to the stored layout at once; None where it
    cannot be taken apart.
    """
    lookup = lookup_of(use, result, parameter, machine)
    if lookup is None:
        return None
    gathered, dtype = in_use(use, parameter, machine), use.dtype

    def forward(table: Value, indices: Value) -> Value:
        return lookup.op(indices, gathered(use.moved(table)))

    @jax.custom_vjp
    def run(table: Value, indices: Value) -> Value:
        return forward(table, indices)

    def local(indices: Value, cotangent: Value) -> Value:
        return lookup.plan.apply(lookup.partial_sums(indices, cotangent, dtype), machine)

    def backward(indices: Value, cotangent: Value) -> tuple[Value, None]:
        cotangent = lookup.moved(cotangent)
        return machine.manual(local, lookup.arguments, lookup.kept)(indices, cotangent), None

    run.defvjp(lambda table, indices: (forward(table, indices), indices), backward)
    return run
