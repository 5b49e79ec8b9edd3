"""In which layouts do the contractions of a loss run that is not the one that was planned?"""

from __future__ import annotations

from collections.abc import Sequence

from shardlib.layout import Layout
from shardlib.lowering.loss.placing import Placements
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.planning.plan import Plan
from shardlib.propagation.contractions import followed_layouts
from shardlib.tracing.jaxpr_to_graph import graph_from_program


def followed(
    plan: Plan,
    traced: LossJaxpr,
    order: Sequence[int],
    states: int,
    handed: Sequence[Layout] = (),
) -> Placements:
    """Layouts that are followed from the parameters and the batch on, where those of the plan have
    no equations any more.
    """
    program = traced.program
    ranks = [len(program.avals[number].shape) for number in program.inputs]
    input_layouts = [plan.parameters[i].compute for i in order]
    input_layouts += [
        Layout.replicated(rank) for rank in ranks[len(input_layouts) : len(input_layouts) + states]
    ]
    input_layouts += [*(layout for _, layout in plan.batch_layouts), *handed]
    inputs = [
        layout if len(layout) == rank else Layout.replicated(rank)
        for layout, rank in zip(input_layouts, ranks, strict=True)
    ]
    return followed_layouts(
        graph_from_program(program, [("", "internal")] * len(ranks)), inputs, plan.mesh
    )
