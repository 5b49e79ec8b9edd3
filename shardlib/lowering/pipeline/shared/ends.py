"""Which weights outside of the layers (embedding, head) are gathered before the ticks, and whose
gradients are reduced after them?

Those of matmuls and lookups, where the plan reduces gradients of layers once a step, too: every
device sums up what its own examples say, and the sums are reduced when the last microbatch has gone
back. See `gathered_weights.py`, which does the same inside of the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from shardlib.jax_types import Value
from shardlib.lowering.loss.placing import Placing
from shardlib.lowering.pipeline.shared.gathered_weights import leaving_sums, no_sums, operand
from shardlib.lowering.pipeline.shared.partition import Arrays, Cut, Values
from shardlib.lowering.weights.deferred import Deferred, deferred
from shardlib.tracing.rewriting.walk import Walk


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Operations outside of the layers whose weights' gradients are reduced after all ticks.

    Attributes:
        mesh: the mesh of the program.
        uses: path of an operation -> what runs in its place.
        complete: values made from parameters that nothing else reads.
    """

    mesh: Mesh | AbstractMesh
    uses: Mapping[str, Deferred]
    complete: frozenset[int]

    def ready(self, outside: Values) -> dict[str, Value]:
        """The operands that are gathered beforehand, by path of the operation."""
        return {
            path: use.gather(outside[operand(use)])
            for path, use in self.uses.items()
            if use.gathers
        }

    def zeros(self) -> Arrays:
        """Where partial sums go, each device's at the device."""
        return no_sums(self.uses, self.mesh)

    def walk(self, walk: Walk, ready: Mapping[str, Value], sums: Sequence[Value]) -> Walk:
        """A walk whose operations use gathered operands and leave gradients to `sums`."""
        return leaving_sums(self.uses, walk, sums, ready)

    def reduce(self, sums: Sequence[Value]) -> Values:
        """Gradients of values that operations use, for partial sums in the order of `uses`."""
        gradients: Values = {}
        for use, partial_sums in zip(self.uses.values(), sums, strict=True):
            gradient = use.reduce(partial_sums.astype(use.sums.dtype)).astype(partial_sums.dtype)
            gradients[operand(use)] = (
                gradients[operand(use)] + gradient if operand(use) in gradients else gradient
            )
        return gradients


def ends(placing: Placing, cut: Cut, mesh: Mesh | AbstractMesh) -> Ends:
    """Finds the operations outside of the layers that can leave their gradients to the end."""
    machine, derived = placing.machine(mesh), set(cut.kept)
    equations = {equation.path: equation for equation in (*cut.before, *cut.after)}
    uses: dict[str, Deferred] = {}
    for path, use in placing.uses.items():
        if (
            path in equations
            and (path, 0) in placing.placements
            and use.equation.inputs[use.operand] in derived
        ):
            deferral = deferred(
                placing.with_pins(use, mesh),
                placing.placements[path, 0],
                placing.parameter(use, mesh),
                machine,
                lookups=True,
            )
            if deferral is not None:
                uses[path] = deferral
    others = (
        {
            number
            for path, equation in equations.items()
            if path not in uses
            for number in equation.inputs
        }
        | set(cut.entering)
        | set(cut.results)
    )
    return Ends(
        mesh=mesh, uses=uses, complete=frozenset(operand(use) for use in uses.values()) - others
    )
