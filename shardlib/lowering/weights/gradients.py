"""How does an operation get the weight that it uses, and how is the gradient of that weight
reduced?

A weight at rest in pieces is gathered where it is used, in the dtype of use, and again in the
backward pass: what is kept between the two are the pieces. Left to automatic partitioning, the
partial sums of its gradient become an all-reduce of the whole array, of which every device then
keeps its part: twice the bytes on the wire of a reduce-scatter. So the gradient of a contraction is
taken in a manual region: every device multiplies its own examples by its own part of the weight's
dims, the result is scattered over fsdp, and what is left is summed over data (and over tensor,
where that cuts the sequence and not the weight). The forward pass and the gradient of the
activation stay automatic.

On a TPU torus the compiler makes a reduce-scatter only along one physical dim at a time, and only
of the rows of a matrix. So the sums are laid out as rows, and scattered over the physical parts of
fsdp one after another, the major one first.

A lookup is the same with a scatter-add for the matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib.layout import Layout
from shardlib.lowering.mesh.collectives import Cuts, Machine, row_major
from shardlib.lowering.reading.parameter_uses import Use
from shardlib.lowering.weights.frozen import regathered
from shardlib.planning.decisions.plan_data import ParameterLayout
from shardlib.tracing.program import Equation
from shardlib.tracing.rewriting.interpreter import bind

#: Mesh axes that cut weights in use; the others cut the batch.
WEIGHTS: tuple[str, ...] = ("tensor",)

#: Columns of a tile in TPU memory, elements (jax-ml/jax docs/pallas/tpu/details.rst).
LANES = 128


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How the partial sums of one gradient become the gradient that the optimizer reads.

    Attributes:
        scattered: dims of the operand that the gradient at rest is cut along, beyond what cuts them
            already.
        summed: mesh axes that hold partial sums and cut no dim.
    """

    scattered: Cuts
    summed: tuple[str, ...]

    def apply(self, partial: jax.Array, machine: Machine, *, stacked: bool = False) -> jax.Array:
        """Reduces one device's partial sums, inside a manual region.

        Args:
            partial: the sums.
            machine: where it runs.
            stacked: whether they are several matrices, of which no dim can be expected to be
                innermost.
        """
        dtype = partial.dtype
        if machine.wire is not None and jnp.issubdtype(dtype, jnp.floating):
            partial = partial.astype(machine.wire)
        for dim, axes in self.scattered.items():
            partial = (
                _scattered_rows(partial, dim, machine.parts(axes), stacked)
                if machine.torus
                else _scattered(partial, dim, machine.parts(axes))
            )
        return (
            jax.lax.psum(partial, machine.parts(self.summed)) if self.summed else partial
        ).astype(dtype)


def _scattered(partial: jax.Array, dim: int, parts: Sequence[str]) -> jax.Array:
    found = jax.lax.psum_scatter(partial, tuple(parts), scatter_dimension=dim, tiled=True)
    return row_major(found) if dim else found


def _scattered_rows(partial: jax.Array, dim: int, parts: Sequence[str], stacked: bool) -> jax.Array:
    """Scatters sums along a dim, one part after another, with that dim outside of the tiles of
    memory.

    Along a dim inside of tiles the TPU compiler has no reduce-scatter, or one with padding and an
    exchange of rows between neighbours.
    """
    first = jnp.moveaxis(partial, dim, 0)
    rest = first.size // first.shape[0]
    rows = (
        first.reshape(first.shape[0], rest // LANES, LANES)
        if rest % LANES == 0
        else first.reshape(first.shape[0], rest)
    )
    for part in parts:
        if (
            stacked or rows.ndim == 2 or first.shape[0] > rest
        ):  # else the matmul puts the longer dim innermost by itself
            rows = row_major(rows)
        rows = jax.lax.psum_scatter(rows, part, scatter_dimension=0, tiled=True)
    return jnp.moveaxis(rows.reshape(rows.shape[0], *first.shape[1:]), 0, dim)


def reduction(
    use: Use, gradient: Layout, partial: tuple[str, ...], machine: Machine, held: Cuts | None = None
) -> Reduction:
    """Plans the reduction of the gradient of one operand.

    Args:
        use: how the operand relates to the parameter.
        gradient: how the optimizer wants the parameter's gradient cut.
        partial: mesh axes that hold partial sums.
        machine: where it runs.
        held: what cuts the operand already, inside the region.
    """
    scattered: Cuts = {}
    for dim, source in enumerate(use.view.dims):
        axes = () if source is None else gradient[source]
        before = (held or {}).get(dim, ())
        wanted = axes[len(before) :]
        if (
            wanted
            and axes[: len(before)] == before
            and set(wanted) <= set(partial)
            and use.shape[dim] % machine.ways(axes) == 0
        ):
            scattered[dim] = wanted
    done = {axis for axes in scattered.values() for axis in axes}
    return Reduction(
        scattered=scattered, summed=tuple(axis for axis in partial if axis not in done)
    )


def in_use(use: Use, parameter: ParameterLayout, machine: Machine) -> Callable[[Any], Any]:
    """Gathers an operand that rests in pieces, as the plan has its parameter in use.

    Where the pieces at rest are no pieces of the operand, the compiler is left to find a way.
    """
    if parameter.rest == parameter.compute:
        return lambda operand: operand
    known = [(dim, source) for dim, source in enumerate(use.view.dims) if source is not None]
    held: Cuts = {dim: parameter.compute[source] for dim, source in known}
    rest: Cuts = {dim: parameter.rest[source] for dim, source in known}
    if {axis for cut in held.values() for axis in cut} != set(parameter.compute.axes):
        return lambda operand: operand
    in_pieces = {axis for cut in rest.values() for axis in cut} == set(parameter.rest.axes)
    return machine.gather(use.shape, rest if in_pieces else None, held)


def reduced(
    use: Use, result: Layout, parameter: ParameterLayout, machine: Machine
) -> Callable[..., Any] | None:
    """An operation whose weight is gathered, and its gradient reduced, as the plan says.

    Args:
        use: the operation.
        result: layout of its result.
        parameter: layouts of the parameter.
        machine: where it runs.

    Returns:
        A function of the operands; None where the batch is not cut, or the gradient cannot be taken
        one device at a time.
    """
    if not parameter.trained:
        return (
            None
            if parameter.rest == parameter.compute
            else regathered(use, in_use(use, parameter, machine))
        )
    return (_lookup if use.equation.name == "gather" else _contraction)(
        use, result, parameter, machine
    )


@dataclass(frozen=True, kw_only=True)
class Deferred:
    """An operation whose weight is gathered before it runs, and whose gradient is reduced after
    several runs.

    Attributes:
        use: the operation.
        run: (operands in order, sums) -> result. The gradient of the weight is left to `sums`, any
            array of the shape `sums`: their gradient are the partial sums of every device.
        finish: (operands in order, sums) -> result, in the last run: `sums` are those of all runs
            before, and the gradient of the weight is that of all runs, reduced.
        gathers: whether the weight rests in pieces.
        gather: the operand as it rests -> in use.
        sums: shape and dtype of partial sums, [devices that have some, ...].
        cuts: how they are cut.
        reduce: partial sums -> the gradient of the operand, as it rests.
    """

    use: Use
    run: Callable[[Sequence[Any], Any], Any]
    finish: Callable[[Sequence[Any], Any], Any]
    gathers: bool
    gather: Callable[[Any], Any]
    sums: jax.ShapeDtypeStruct
    cuts: PartitionSpec
    reduce: Callable[[Any], Any]


def deferred(
    use: Use, result: Layout, parameter: ParameterLayout, machine: Machine, *, lookups: bool = False
) -> Deferred | None:
    """The same operation as `reduced`, in the form of `Deferred`; None for lookups unless they are
    asked for.
    """
    looks = use.equation.name == "gather"
    if (looks and not lookups) or not parameter.trained:
        return None
    found = (_looking if looks else _parts)(use, result, parameter, machine)
    if found is None:
        return None
    rank, ways = len(use.shape), machine.ways(found.partial)
    cuts = PartitionSpec(machine.parts(found.partial), *machine.spec(found.held, rank))

    @jax.custom_vjp
    def run(activation: Any, weight: Any, sums: Any) -> Any:
        return found.op(activation, weight)

    def backward(saved: tuple[Any, Any, Any], cotangent: Any) -> tuple[Any, Any, Any]:
        activation, weight, sums = saved

        def local(activation: Any, cotangent: Any) -> Any:
            return found.partial_sums(activation, cotangent, found.adds_in(sums.dtype))[
                None
            ].astype(sums.dtype)

        own = machine.manual(local, found.arguments, cuts)(activation, cotangent)
        return found.to_activation(activation, weight, cotangent), jnp.zeros_like(weight), own

    # Of what holds the sums, the backward pass wants the dtype alone.
    run.defvjp(
        lambda activation, weight, sums: (
            found.op(activation, weight),
            (activation, weight, jnp.zeros((), sums.dtype)),
        ),
        backward,
    )

    @jax.custom_vjp
    def finish(activation: Any, weight: Any, sums: Any) -> Any:
        return found.op(activation, weight)

    def backward_of_all(saved: tuple[Any, Any, Any], cotangent: Any) -> tuple[Any, Any, Any]:
        activation, weight, sums = saved

        def local(activation: Any, cotangent: Any, sums: Any) -> Any:
            own = found.partial_sums(activation, cotangent, found.adds_in(sums.dtype)).astype(
                sums.dtype
            )
            return found.plan.apply(own + sums[0], machine).astype(weight.dtype)

        return (
            found.to_activation(activation, weight, cotangent),
            machine.manual(local, (*found.arguments, cuts), found.kept)(
                activation, cotangent, sums
            ),
            jnp.zeros_like(sums),
        )

    finish.defvjp(
        lambda activation, weight, sums: (found.op(activation, weight), (activation, weight, sums)),
        backward_of_all,
    )

    def in_order(function: Callable[..., Any]) -> Callable[[Sequence[Any], Any], Any]:
        return lambda operands, sums: function(
            use.kept(operands[1 - use.operand]), operands[use.operand], sums
        )

    gathered = in_use(use, parameter, machine)
    return Deferred(
        use=use,
        run=in_order(run),
        finish=in_order(finish),
        gathers=parameter.rest != parameter.compute,
        gather=lambda operand: gathered(use.moved(operand)),
        sums=jax.ShapeDtypeStruct((ways, *use.shape), use.dtype),
        cuts=cuts,
        reduce=machine.manual(lambda sums: found.plan.apply(sums[0], machine), (cuts,), found.kept),
    )


@dataclass(frozen=True, kw_only=True)
class Apart:
    """An operation on a weight, taken apart.

    Attributes:
        use: the operation.
        plan: the reduction of its gradient.
        held: how the weight is cut in use.
        partial: mesh axes that hold partial sums.
        arguments: how activation and cotangent are cut where partial sums are made.
        kept: how the gradient is cut in the end.
        local_shape: shape of the weight in use on one device.
    """

    use: Use
    plan: Reduction
    held: Cuts
    partial: tuple[str, ...]
    arguments: tuple[PartitionSpec, PartitionSpec]
    kept: PartitionSpec
    local_shape: tuple[int, ...]


class Parts(Apart):
    """A contraction of a weight, taken apart."""

    def op(self, activation: Any, weight: Any) -> Any:
        """The operation."""
        return self.use.pinned((activation, weight) if self.use.operand else (weight, activation))

    def partial_sums(self, activation: Any, cotangent: Any, dtype: Any) -> Any:
        """The gradient of the weight from one device's examples, inside a manual region."""
        return self.use.gradient(
            self.use.operand, activation, cotangent, jax.ShapeDtypeStruct(self.local_shape, dtype)
        )

    def to_activation(self, activation: Any, weight: Any, cotangent: Any) -> Any:
        """The gradient of the activation."""
        return self.use.to_activation(activation, weight, cotangent)

    def adds_in(self, sums: Any) -> Any:
        """The dtype in which partial sums are made: that of the weight."""
        return self.use.dtype


def _parts(use: Use, result: Layout, parameter: ParameterLayout, machine: Machine) -> Parts | None:
    """A contraction taken apart; None where the batch is not cut, or the gradient cannot be taken
    one device at a time.
    """
    held = held_in_use(use, parameter)
    cuts = None if held is None else _operand_cuts(use, result, held)
    if held is None or cuts is None:
        return None
    plan = reduction(use, parameter.gradient, cuts.partial, machine, held)
    return Parts(
        use=use,
        plan=plan,
        held=held,
        partial=cuts.partial,
        arguments=(
            machine.spec(cuts.activation, use.other.ndim),
            machine.spec(cuts.result, len(result)),
        ),
        kept=machine.spec(
            {
                dim: (*held.get(dim, ()), *plan.scattered.get(dim, ()))
                for dim in range(len(use.shape))
            },
            len(use.shape),
        ),
        local_shape=tuple(
            size // machine.ways(held.get(dim, ())) for dim, size in enumerate(use.shape)
        ),
    )


def _contraction(
    use: Use, result: Layout, parameter: ParameterLayout, machine: Machine
) -> Callable[..., Any] | None:
    found = _parts(use, result, parameter, machine)
    if found is None:
        return None
    gathered = in_use(use, parameter, machine)

    def forward(activation: Any, weight: Any) -> Any:
        return found.op(activation, gathered(use.moved(weight)))

    @jax.custom_vjp
    def run(activation: Any, weight: Any) -> Any:
        return forward(activation, weight)

    def backward(saved: tuple[Any, Any], cotangent: Any) -> tuple[Any, Any]:
        activation, weight = saved

        def local(activation: Any, cotangent: Any) -> Any:
            return found.plan.apply(
                found.partial_sums(activation, cotangent, weight.dtype), machine
            )

        return found.to_activation(
            activation, gathered(use.moved(weight)), cotangent
        ), machine.manual(local, found.arguments, found.kept)(activation, cotangent)

    run.defvjp(
        lambda activation, weight: (forward(activation, weight), (activation, weight)), backward
    )
    return (
        (lambda activation, weight: run(use.kept(activation), weight))
        if use.operand
        else lambda weight, activation: run(use.kept(activation), weight)
    )


@dataclass(frozen=True, kw_only=True)
class _OperandCuts:
    """How the operands of a weight's gradient are cut inside the region.

    Attributes:
        activation: cuts of the activation.
        result: cuts of the cotangent of the result.
        partial: mesh axes that cut what is summed over.
    """

    activation: Cuts
    result: Cuts
    partial: tuple[str, ...]


def held_in_use(use: Use, parameter: ParameterLayout) -> Cuts | None:
    """How a weight in use is cut; None where the batch is cut along one of its dims, or a dim of
    the parameter is none of the operand's.
    """
    held: Cuts = {
        dim: parameter.compute[source]
        for dim, source in enumerate(use.view.dims)
        if source is not None and parameter.compute[source]
    }
    axes = {axis for cut in held.values() for axis in cut}
    return held if axes == set(parameter.compute.axes) and axes <= set(WEIGHTS) else None


def _operand_cuts(use: Use, result: Layout, held: Cuts) -> _OperandCuts | None:
    """Cuts that agree: dims of the weight as it is in use, dims of the activation alone as the
    result has them; None where the batch is not cut.
    """
    dims = dims_of(use.equation, use.operand)
    taken = {axis for cut in held.values() for axis in cut}
    own = {dim: tuple(axis for axis in result[dim] if axis not in taken) for dim in dims.own}
    partial = tuple(axis for dim in dims.own for axis in own[dim])
    if not any(axis not in WEIGHTS for axis in partial) or any(
        axis not in WEIGHTS
        for dim in range(len(result))
        if dim not in dims.own
        for axis in result[dim]
    ):
        return None
    activation = {
        **{dims.own[dim]: cut for dim, cut in own.items()},
        **{to: held[dim] for dim, to in dims.activation.items() if dim in held},
    }
    return _OperandCuts(
        activation=activation,
        result={**own, **{to: held[dim] for dim, to in dims.result.items() if dim in held}},
        partial=partial,
    )


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Which dims of a contraction are one.

    Attributes:
        own: result dim -> activation dim, of those that the weight does not have.
        activation: weight dim -> activation dim.
        result: weight dim -> result dim.
    """

    own: dict[int, int]
    activation: dict[int, int]
    result: dict[int, int]


def dims_of(equation: Equation, weight: int) -> Dims:
    """The dims that a matmul or convolution matches, for the operand that is the weight."""
    numbers = equation.params["dimension_numbers"]
    if equation.name == "conv_general_dilated":
        whole = (
            equation.params["batch_group_count"] == 1
            and equation.params["feature_group_count"] == 1
            and weight == 1
        )
        own = {numbers.out_spec[0]: numbers.lhs_spec[0]} if whole else {}
        return Dims(
            own=own,
            activation={numbers.rhs_spec[1]: numbers.lhs_spec[1]},
            result={numbers.rhs_spec[0]: numbers.out_spec[1]},
        )
    contracted, batch = numbers
    ranks = [variable.aval.ndim for variable in equation.eqn.invars]
    free = [
        [dim for dim in range(ranks[side]) if dim not in (*contracted[side], *batch[side])]
        for side in (0, 1)
    ]
    places = {0: len(batch[0]), 1: len(batch[0]) + len(free[0])}
    activation = 1 - weight
    return Dims(
        own={places[activation] + i: dim for i, dim in enumerate(free[activation])},
        activation={
            **dict(zip(contracted[weight], contracted[activation], strict=True)),
            **dict(zip(batch[weight], batch[activation], strict=True)),
        },
        result={
            **{dim: places[weight] + i for i, dim in enumerate(free[weight])},
            **{dim: i for i, dim in enumerate(batch[weight])},
        },
    )


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
class _Looking(Apart):
    """A lookup in a table, taken apart: the activation are the indices.

    Attributes:
        result: layout of the rows that are found.
        machine: where it runs.
    """

    result: Layout
    machine: Machine

    def op(self, indices: Any, table: Any) -> Any:
        """The operation, on a table that may be in a narrower dtype than its own; where rows are on
        several devices, each looks into its own, and what they find is summed up.
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

        def local(indices: Any, table: Any) -> Any:
            found = self._rows(indices, table)
            return (
                jax.lax.psum(found, parts)
                if scattered is None
                else jax.lax.psum_scatter(found, parts, scatter_dimension=scattered, tiled=True)
            )

        left = cuts if scattered is None else {**cuts, scattered: self.result[scattered]}
        return self.machine.manual(
            local,
            (self.arguments[0], self.machine.spec(self.held, 2)),
            self.machine.spec(left, rank),
        )(indices, table).astype(dtype)

    def _rows(self, indices: Any, table: Any) -> Any:
        """The rows that one device has, zeros for the others; for indices that are out of range
        what the operation says, on the first device.
        """
        found = table.at[self._inside(indices)[..., 0]].get(mode="fill", fill_value=0)
        if self._clips:
            return found
        filled = self.use.equation.params["fill_value"]
        outside = (indices < 0) | (indices >= self.use.shape[0])
        first = jax.lax.axis_index(self.machine.parts(self.held[0])) == 0
        return jnp.where(
            outside & first, jnp.asarray(jnp.nan if filled is None else filled, found.dtype), found
        )

    @property
    def _clips(self) -> bool:
        return "clip" in str(self.use.equation.params["mode"]).lower()

    def _inside(self, indices: Any) -> Any:
        """Indices into the rows of one device; their number for rows of others."""
        wanted = jnp.clip(indices, 0, self.use.shape[0] - 1) if self._clips else indices
        here = wanted - (
            jax.lax.axis_index(self.machine.parts(self.held[0])) * self.local_shape[0]
            if self.held[0]
            else 0
        )
        return jnp.where((here >= 0) & (here < self.local_shape[0]), here, self.local_shape[0])

    def partial_sums(self, indices: Any, cotangent: Any, dtype: Any) -> Any:
        """The gradient of the table from one device's examples, inside a manual region."""
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

    def to_activation(self, indices: Any, table: Any, cotangent: Any) -> Any:
        """Nothing: indices have no gradient."""
        return None

    def adds_in(self, sums: Any) -> Any:
        """The dtype in which partial sums are made: that of all sums, since many rows of the
        cotangent may be added to one of the table.
        """
        return sums


def _looking(
    use: Use, result: Layout, parameter: ParameterLayout, machine: Machine
) -> _Looking | None:
    """A lookup taken apart; None where the batch is not cut, or it is no lookup of whole rows."""
    if use.operand != 0 or not is_lookup(use.equation) or None in use.view.dims:
        return None
    held: Cuts = {
        i: tuple(a for a in parameter.compute[dim] if a in WEIGHTS)
        for i, dim in enumerate(use.view.dims)
        if dim is not None
    }
    taken = {axis for axes in held.values() for axis in axes}
    cuts: Cuts = {
        dim: tuple(a for a in axes if a not in taken) for dim, axes in enumerate(result[:-1])
    }
    partial = tuple(axis for axes in cuts.values() for axis in axes)
    if not any(axis not in WEIGHTS for axis in partial):
        return None
    plan, rank = reduction(use, parameter.gradient, partial, machine, held), len(result)
    return _Looking(
        use=use,
        plan=plan,
        held=held,
        partial=partial,
        arguments=(machine.spec(cuts, rank), machine.spec({**cuts, rank - 1: held[1]}, rank)),
        kept=machine.spec({dim: (*held[dim], *plan.scattered.get(dim, ())) for dim in held}, 2),
        local_shape=tuple(size // machine.ways(held[dim]) for dim, size in enumerate(use.shape)),
        result=result,
        machine=machine,
    )


def _lookup(
    use: Use, result: Layout, parameter: ParameterLayout, machine: Machine
) -> Callable[..., Any] | None:
    found = _looking(use, result, parameter, machine)
    if found is None:
        return None
    gathered, dtype = in_use(use, parameter, machine), use.dtype

    def forward(table: Any, indices: Any) -> Any:
        return found.op(indices, gathered(use.moved(table)))

    @jax.custom_vjp
    def run(table: Any, indices: Any) -> Any:
        return forward(table, indices)

    def local(indices: Any, cotangent: Any) -> Any:
        return found.plan.apply(found.partial_sums(indices, cotangent, dtype), machine)

    def backward(indices: Any, cotangent: Any) -> tuple[Any, None]:
        return machine.manual(local, found.arguments, found.kept)(indices, cotangent), None

    run.defvjp(lambda table, indices: (forward(table, indices), indices), backward)
    return run
