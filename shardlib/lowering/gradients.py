"""Gradients of weights: gathered weights, partial sums, and their reduction in each microbatch or
once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardlib.errors import PlanError
from shardlib.jax_types import Value
from shardlib.layout import MESH_AXES, Layout
from shardlib.lowering.collectives import GradientExchange, InDtype, Machine, Precision
from shardlib.lowering.contractions import Use
from shardlib.lowering.mesh import without_axes
from shardlib.lowering.weights import (
    Contraction,
    Lookup,
    after,
    contraction_of,
    in_use,
    lookup_of,
    mark,
    reduced_contraction,
    reduced_lookup,
    regathered,
)
from shardlib.planner.plan import ParameterLayout, Plan

# --------------------------------------------------------------------------------------------------
# An operation on a weight, whose partial sums are kept over several runs and reduced once.
#
# run(activation, weight, sums) d/d sums = this device's partial sums; d/d weight = 0
# finish(activation, weight, sums) d/d weight = the reduced gradient of this run and of `sums`

#: (activation, weight, sums) -> result.
Operation = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Deferred:
    """An operation whose weight is gathered before it runs, and whose gradient is reduced after
    several runs.

    Attributes:
        use: the operation.
        run: (operands in order, sums) -> result. The gradient of the weight is left to `sums`, any
            array of the shape `sums`: their gradient are the partial sums of every device.
        finish: (operands in order, sums) -> result, in the last run: `sums` are those of all runs
            before, and the gradient of the weight is that of all runs, reduced. The gradient of
            `sums` is what every device keeps for the next step; zeros where it keeps nothing.
        gathers: whether the weight is stored sharded.
        gather: the operand as it rests -> in use.
        sums: shape and dtype of partial sums, [devices that have some, ...].
        cuts: how they are sharded.
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
    operation = (lookup_of if looks else contraction_of)(use, result, parameter, machine)
    if operation is None:
        return None
    rank, size = len(use.shape), machine.ways(operation.partial)
    cuts = PartitionSpec(machine.parts(operation.partial), *machine.spec(operation.held, rank))

    def in_order(function: Callable[..., Any]) -> Callable[[Sequence[Any], Any], Any]:
        return lambda operands, sums: function(
            use.kept(operands[1 - use.operand]), operands[use.operand], sums
        )

    gathered = in_use(use, parameter, machine)
    return Deferred(
        use=use,
        run=in_order(_run(use, operation, machine, cuts)),
        finish=in_order(_finish(use, operation, machine, cuts)),
        gathers=parameter.rest != parameter.compute,
        gather=lambda operand: gathered(use.moved(operand)),
        sums=jax.ShapeDtypeStruct((size, *use.shape), use.dtype),
        cuts=cuts,
        reduce=machine.manual(
            lambda sums: operation.plan.apply(sums[0], machine), (cuts,), operation.kept
        ),
    )


def _run(
    use: Use, operation: Contraction | Lookup, machine: Machine, cuts: PartitionSpec
) -> Operation:
    """(activation, weight, sums) -> result, whose partial sums are the gradient of `sums`."""
    marks = operation.marks(machine)

    @jax.custom_vjp
    def run(activation: Any, weight: Any, sums: Any) -> Any:
        return operation.op(activation, weight)

    def backward(saved: tuple[Any, Any, Any], cotangent: Any) -> tuple[Any, Any, Any]:
        activation, weight, sums = saved

        def local(activation: Any, cotangent: Any) -> tuple[Any, ...]:
            partial = operation.partial_sums(activation, cotangent, operation.adds_in(sums.dtype))
            return partial[None].astype(sums.dtype), *(mark(partial) for _ in marks)

        partial_sums, *marked = machine.manual(local, operation.arguments, (cuts, *marks))(
            activation, operation.moved(cotangent)
        )
        back = after(operation.to_activation(activation, weight, cotangent), marked)
        return back, jnp.zeros_like(weight), partial_sums

    def forward(activation: Any, weight: Any, sums: Any) -> tuple[Any, tuple[Any, Any, Any]]:
        read = use.found_again(activation)
        # of what holds the sums, the backward pass wants the dtype alone
        return operation.op(read, weight), (read, weight, jnp.zeros((), sums.dtype))

    run.defvjp(forward, backward)
    return run


def _finish(
    use: Use, operation: Contraction | Lookup, machine: Machine, cuts: PartitionSpec
) -> Operation:
    """(activation, weight, sums) -> result, whose gradient of the weight is that of all runs."""
    marks = operation.marks(machine)

    def forward(activation: Any, weight: Any, sums: Any) -> tuple[Any, tuple[Any, Any, Any]]:
        read = use.found_again(activation)
        return operation.op(read, weight), (read, weight, sums)

    @jax.custom_vjp
    def finish(activation: Any, weight: Any, sums: Any) -> Any:
        return operation.op(activation, weight)

    def backward_of_all(saved: tuple[Any, Any, Any], cotangent: Any) -> tuple[Any, Any, Any]:
        activation, weight, sums = saved

        def local(activation: Any, cotangent: Any, sums: Any) -> tuple[Any, ...]:
            partial = operation.partial_sums(activation, cotangent, operation.adds_in(sums.dtype))
            gradient, residual = operation.plan.exchanged(
                partial.astype(sums.dtype) + sums[0], machine
            )
            return (
                gradient.astype(weight.dtype),
                *(mark(partial) for _ in marks),
                *(() if residual is None else (residual[None],)),
            )

        results = (operation.kept, *marks, *((cuts,) if machine.exchange.keeps else ()))
        gradient, *outputs = machine.manual(local, (*operation.arguments, cuts), results)(
            activation, operation.moved(cotangent), sums
        )
        marked, residual = outputs[: len(marks)], outputs[len(marks) :]
        return (
            after(operation.to_activation(activation, weight, cotangent), marked),
            gradient,
            residual[0] if residual else jnp.zeros_like(sums),
        )

    finish.defvjp(forward, backward_of_all)
    return finish


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


# --------------------------------------------------------------------------------------------------
# The reduction of every parameter's gradient: over which mesh axes, when, to which sharding, in
# which dtype.
#
# Made once from a plan and its loss; every driver of a step (one batch, accumulated microbatches,
# gradients reduced in the last of them, both pipelines, state on disk) carries it out:
#
#     embed.kernel   partial sums over data, fsdp; in the last microbatch; to A[I_F, J_T]; bfloat16
#     norm.scale     partial sums over data, fsdp; each microbatch; to A[I]; its own dtype
#
# Another exchange (compression, error feedback) is another `GradientExchange`, named in
# `exchange_of` or given to `build_program`.

#: When partial sums are reduced: as soon as a microbatch has made them; by the backward pass of the
#: last microbatch, together with those of all before; or when the last one has left the pipeline.
EACH, IN_LAST, DEFERRED = "each microbatch", "in the last", "deferred"


@dataclass(frozen=True, kw_only=True)
class GradientReduction:
    """The reduction of the gradient of one parameter.

    Attributes:
        path: of the parameter.
        axes: mesh axes whose devices have partial sums of it, in the order of the mesh.
        when: `EACH`, `IN_LAST` or `DEFERRED`. Partial sums that no operation of the loss makes one
            device at a time (those of the scale of a norm) are reduced for each microbatch.
        to: layout of the gradient as the optimizer reads it.
        dtype: in which partial sums are sent; None for their own.
    """

    path: str
    axes: tuple[str, ...]
    when: str
    to: Layout
    dtype: Any


@dataclass(frozen=True, kw_only=True)
class GradientReductions:
    """The reductions of all gradients of a step.

    Attributes:
        parameters: for every parameter of the loss, in its order; None for frozen ones.
        when: when those are reduced that can wait.
        exchange: how partial sums are exchanged.
        explicit: whether operations reduce the gradients of their weights themselves; otherwise it
            is left to the compiler, but for what waits for the last microbatch.
        precision: the dtypes of the plan.
    """

    parameters: tuple[GradientReduction | None, ...]
    when: str
    exchange: GradientExchange
    explicit: bool
    precision: Precision

    def accumulator(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which gradients of a dtype are added up over microbatches."""
        return self.precision.sums(dtype)


def exchange_of(plan: Plan) -> GradientExchange:
    """Returns how a plan exchanges partial sums."""
    return InDtype(Precision.of(plan).wire)


def moment(plan: Plan, exchange: GradientExchange) -> str:
    """Returns when a plan reduces the gradients that can wait; see `EACH`."""
    if exchange.keeps and (plan.mesh["stage"] > 1 or plan.zero >= 2):
        raise PlanError(
            "a gradient exchange that keeps what it does not send needs gradients that are reduced"
            " once a step and are not sharded between microbatches\nTry: a mesh without stages, and"
            " zero below 2"
        )
    if plan.mesh["stage"] > 1:
        return DEFERRED if plan.gather == "once" or plan.zero < 2 else EACH
    once = plan.microbatches > 1 or exchange.keeps
    return IN_LAST if once and plan.zero < 2 else EACH


def gradient_reductions(
    plan: Plan,
    order: Sequence[int],
    uses: Mapping[str, Use],
    placements: Mapping[tuple[str, int], Layout],
    machine: Machine,
    together: Collection[str],
) -> GradientReductions:
    """Returns how a plan reduces the gradients of a loss."""
    when, exchange = moment(plan, machine.exchange), machine.exchange
    layouts = [without_axes(plan.parameters[i], ("stage",)) for i in order]
    partial: dict[int, set[str]] = {}
    for path, use in uses.items():
        number = use.view.parameter
        if (path, 0) in placements and path not in together and layouts[number].trained:
            axes = _partial(use, placements[path, 0], layouts[number], machine)
            if axes:
                partial.setdefault(number, set()).update(axes)
    batch = {axis for _, layout in plan.batch_layouts for axis in layout.axes}

    def reduction(number: int, parameter: ParameterLayout) -> GradientReduction | None:
        if not parameter.trained:
            return None
        axes = partial.get(number, batch.difference(parameter.compute.axes))
        return GradientReduction(
            path=parameter.path,
            axes=tuple(axis for axis in MESH_AXES if axis in axes),
            when=when if number in partial else EACH,
            to=plan.parameters[order[number]].gradient,
            dtype=exchange.dtype,
        )

    return GradientReductions(
        parameters=tuple(reduction(number, layout) for number, layout in enumerate(layouts)),
        when=when,
        exchange=exchange,
        explicit=exchange != InDtype() or not _shares_memory(plan),
        precision=Precision.of(plan),
    )


def _partial(
    use: Use, result: Layout, parameter: ParameterLayout, machine: Machine
) -> tuple[str, ...]:
    """Mesh axes whose devices have partial sums of the gradient of an operand, where they can be
    made one device at a time.
    """
    taken_apart = lookup_of if use.equation.name == "gather" else contraction_of
    operation = taken_apart(use, result, parameter, machine)
    return () if operation is None else operation.partial


def _shares_memory(plan: Plan) -> bool:
    """Returns whether the devices are simulated ones of one process: all that counts there is the
    number of collectives, and XLA's CPU compiler combines all-reduces and no reduce-scatters.
    """
    return all(link.kind == "memory" for _, links in plan.placement for link in links)
