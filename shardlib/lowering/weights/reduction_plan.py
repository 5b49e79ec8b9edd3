"""How the gradient of every parameter is reduced: over which mesh axes, when, to which sharding, in
which dtype.

Made once from a plan and its loss; every driver of a step (one batch, accumulated microbatches,
gradients reduced in the last of them, both pipelines, state on disk) carries it out:

    embed.kernel   partial sums over data, fsdp; in the last microbatch; to A[I_F, J_T]; bfloat16
    norm.scale     partial sums over data, fsdp; each microbatch; to A[I]; its own dtype

Another exchange (compression, error feedback) is another `GradientExchange`, named in `exchange_of`
or given to `build_program`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardlib.axes import MESH_AXES
from shardlib.errors import PlanError
from shardlib.layout import Layout
from shardlib.lowering.mesh.collectives import Machine
from shardlib.lowering.mesh.gradient_exchange import GradientExchange, InDtype
from shardlib.lowering.mesh.precision import Precision
from shardlib.lowering.mesh.shardings import without_axes
from shardlib.lowering.reading.use import Use
from shardlib.lowering.weights.contraction import contraction_of
from shardlib.lowering.weights.lookup import lookup_of
from shardlib.planning.plan import ParameterLayout, Plan

#: When partial sums are reduced: as soon as a microbatch has made them; by the backward pass of the
#: last microbatch, together with those of all before; or when the last one has left the pipeline.
EACH, IN_LAST, DEFERRED = "each microbatch", "in the last", "deferred"


@dataclass(frozen=True, kw_only=True)
class GradientReduction:
    """How the gradient of one parameter is reduced.

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
    """How all gradients of a step are reduced.

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
    """How a plan exchanges partial sums."""
    return InDtype(Precision.of(plan).wire)


def moment(plan: Plan, exchange: GradientExchange) -> str:
    """When a plan reduces the gradients that can wait; see `EACH`."""
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
    """How a plan reduces the gradients of a loss."""
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
    """Whether the devices are simulated ones of one process: all that counts there is the number of
    collectives, and XLA's CPU compiler combines all-reduces and no reduce-scatters.
    """
    return all(link.kind == "memory" for _, links in plan.placement for link in links)
