"""Which weights of the layers are gathered before the ticks that use them, and how do their
gradients come back?

A weight that is stored sharded over fsdp is gathered by every operation that uses it, forward and
backward, for every microbatch, and its gradient is scattered as often. Where the plan gathers once,
the operands that matmuls make of weights (casts, transpositions and reshapes of them) are made and
gathered beforehand, all ticks use them, every device sums up what its own examples say of their
gradients, and these sums are reduced when the last microbatch has gone back. That is less traffic
by the number of microbatches, for the memory of whole weights and whole gradients.

Where gradients are stored replicated (ZeRO 0 and 1), they are summed and reduced in the same way,
with nothing to gather.

Everything else that layers read (scales of norms, biases, weights of experts) is left to the
operations that use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib._jax_compat import scan_counts
from shardlib.jax_types import Index, Value
from shardlib.lowering.loss.placing import Placing
from shardlib.lowering.pipeline.shared.partition import Arrays, Cut
from shardlib.lowering.pipeline.shared.slots import layer_of, with_layer
from shardlib.lowering.reading.use import as_dtype
from shardlib.lowering.weights.deferred import Deferred, deferred
from shardlib.lowering.weights.reduction_plan import DEFERRED
from shardlib.tracing.program import Equation, Program, flatten
from shardlib.tracing.rewriting.dependence import needed
from shardlib.tracing.rewriting.interpreter import evaluate_equations
from shardlib.tracing.rewriting.walk import Walk


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Weights of one layer whose gradients are reduced after all ticks, and which are gathered
    before. Values are numbers of the loop's body.

    Attributes:
        mesh: the mesh around.
        body: what one layer does.
        sources: position among the loop's scanned operands -> number of the value, of weights that
            operands are made from.
        complete: positions of weights that nothing else reads.
        made: the operands.
        operands: those that are gathered.
        uses: path of an operation -> what runs in its place.
        made_by: the equations that make operands from weights.
        rest: the equations of a layer for which gathered operands are given.
    """

    mesh: Mesh | AbstractMesh
    body: Program
    sources: Mapping[int, int]
    complete: frozenset[int]
    made: tuple[int, ...]
    operands: tuple[int, ...]
    uses: Mapping[str, Deferred]
    made_by: tuple[Equation, ...]
    rest: tuple[Equation, ...]

    def pieces(self, weights: Sequence[Value]) -> Arrays:
        """The operands of one layer as they rest, in the order of `made`, for its weights in the
        order of `sources`.
        """
        traced = [
            as_dtype(weight, self.body.avals[number].dtype)
            for number, weight in zip(self.sources.values(), weights, strict=True)
        ]
        env = {**self.body.constants, **dict(zip(self.sources.values(), traced, strict=True))}
        evaluate_equations(self.made_by, env, Walk())
        return [env[number] for number in self.made]

    def gather(self, weights: Sequence[Value]) -> Arrays:
        """The gathered operands, for stacks of weights [layers, ...]."""
        if not self.operands:
            return []
        return jax.lax.scan(
            lambda _, weights: (None, self._layer_gathered(weights)), None, list(weights)
        )[1]

    def gather_over(self, weights: Sequence[Value], slots: Arrays, slot: Index) -> Arrays:
        """The gathered operands over what was in one slot of arrays, each layer's in its place:
        zeros, with which a loop stacks up results, would be there from the first to the last loop.

        Args:
            weights: stacks [layers, ...], in the order of `sources`.
            slots: arrays [slots, layers, ...], in the order of `operands`.
        """

        def layer(index: Index, slots: Arrays) -> Arrays:
            fresh = self._layer_gathered(
                [jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False) for leaf in weights]
            )
            return [
                with_layer(stack, leaf, slot, index)
                for stack, leaf in zip(slots, fresh, strict=True)
            ]

        return jax.lax.fori_loop(0, weights[0].shape[0], layer, list(slots))

    def _layer_gathered(self, weights: Sequence[Value]) -> Arrays:
        """The gathered operands of one layer, in the order of `operands`."""
        gathers = {operand(use): use.gather for use in self.uses.values()}
        pieces = dict(zip(self.made, self.pieces(weights), strict=True))
        return [gathers[number](pieces[number]) for number in self.operands]

    def reduce(self, weights: Sequence[Value], sums: Sequence[Value]) -> Arrays:
        """Gradients of weights [layers, ...], in the order of `sources`, for partial sums [layers,
        ...] in the order of `uses`.
        """
        return jax.lax.scan(
            lambda _, sums: (None, self._layer_reduced(weights, sums)), None, list(sums)
        )[1]

    def reduce_out(
        self, weights: Sequence[Value], sums: Arrays, slot: Index
    ) -> tuple[Arrays, Arrays]:
        """(gradients of weights [layers, ...] for the partial sums in one slot, sums with zeros
        there); emptied layer by layer after it has been read, lest all slots are copied.

        Args:
            weights: stacks [layers, ...], in the order of `sources`.
            sums: arrays [slots, layers, ...], in the order of `uses`.
        """

        def layer(sums: Arrays, index: Value) -> tuple[Arrays, Arrays]:
            sent = [
                layer_of(leaf, slot, index).astype(use.sums.dtype)
                for use, leaf in zip(self.uses.values(), sums, strict=True)
            ]
            partial_sums, sums = jax.lax.optimization_barrier((sent, sums))
            emptied = [
                with_layer(leaf, jnp.zeros(leaf.shape[2:], leaf.dtype), slot, index)
                for leaf in sums
            ]
            return emptied, self._layer_reduced(weights, partial_sums)

        emptied, gradients = jax.lax.scan(layer, list(sums), jnp.arange(weights[0].shape[0]))
        return gradients, emptied

    def _layer_reduced(self, weights: Sequence[Value], sums: Sequence[Value]) -> Arrays:
        """Gradients of the weights of one layer, in the order of `sources`."""
        shapes = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in weights]
        gradients = dict[int, Any]()
        for use, partial_sum in zip(self.uses.values(), sums, strict=True):
            gradient = use.reduce(partial_sum.astype(use.sums.dtype))
            gradients[operand(use)] = (
                gradients[operand(use)] + gradient if operand(use) in gradients else gradient
            )
        return jax.linear_transpose(self.pieces, shapes)(
            [gradients[number] for number in self.made]
        )[0]

    def zeros(self, lead: tuple[int, ...]) -> Arrays:
        """Where partial sums go, [*lead, ...], each device's at the device."""
        return no_sums(self.uses, self.mesh, lead)

    def walk(self, walk: Walk, sums: Sequence[Value]) -> Walk:
        """A walk through one layer whose operations leave the gradients of these weights to
        `sums`.
        """
        return leaving_sums(self.uses, walk, sums)


def no_sums(
    uses: Mapping[str, Deferred], mesh: Mesh | AbstractMesh, lead: tuple[int, ...] = ()
) -> Arrays:
    """Where partial sums go, [*lead, ...], each device's at the device."""
    zeros = [
        (jnp.zeros((*lead, *use.sums.shape), use.sums.dtype), use.cuts) for use in uses.values()
    ]
    return [
        jax.lax.with_sharding_constraint(
            leaf, NamedSharding(mesh, PartitionSpec(*(None for _ in lead), *cuts))
        )
        for leaf, cuts in zeros
    ]


def leaving_sums(
    uses: Mapping[str, Deferred],
    walk: Walk,
    sums: Sequence[Value],
    ready: Mapping[str, Value] | None = None,
) -> Walk:
    """A walk whose operations leave the gradients of some weights to `sums`, with other arrays in
    place of these weights where there are any, by path.
    """
    places, gathered_by_path = dict(zip(uses, sums, strict=True)), ready or {}

    def run(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
        if equation.path in places:
            use, path = uses[equation.path], equation.path
            weight = use.use.operand
            return [
                use.run(
                    [
                        gathered_by_path.get(path, operand_value) if k == weight else operand_value
                        for k, operand_value in enumerate(operands)
                    ],
                    places[path],
                )
            ]
        return walk.run(equation, operands) if walk.run is not None else None

    return replace(walk, run=run)


def operand(use: Deferred) -> int:
    """The value that an operation uses."""
    return use.use.equation.inputs[use.use.operand]


def gathered(placing: Placing, cut: Cut, mesh: Mesh | AbstractMesh) -> Gathered | None:
    """What can be gathered beforehand; None where nothing can, or where gradients do not wait
    for the end of the step.
    """
    if placing.reductions.when != DEFERRED:
        return None
    loop = cut.loop
    body = flatten(loop.params["jaxpr"], f"{loop.path}/body/", loop.scope)
    machine = placing.machine(mesh)
    here = {equation.path for equation in body.equations}
    first = sum(scan_counts(loop.params))
    scanned = {body.inputs[first + k]: k for k in cut.roles.weights}
    uses: dict[str, Deferred] = {}
    for path, use in placing.uses.items():
        if path in here and (path, 0) in placing.placements:
            deferral = deferred(
                placing.with_pins(use, mesh),
                placing.placements[path, 0],
                placing.parameter(use, mesh),
                machine,
            )
            made_by, reads = needed(body.equations, [use.equation.inputs[use.operand]])
            if deferral is not None and reads - {
                n for equation in made_by for n in equation.outputs
            } <= {*scanned, *body.constants}:
                uses[path] = deferral
    if not uses:
        return None
    produced = tuple(dict.fromkeys(operand(use) for use in uses.values()))
    operands = tuple(dict.fromkeys(operand(use) for use in uses.values() if use.gathers))
    made_by, reads = needed(body.equations, produced)
    sources = {
        scanned[number]: number
        for number in sorted(reads & scanned.keys(), key=lambda number: scanned[number])
    }
    return Gathered(
        mesh=mesh,
        body=body,
        sources=sources,
        made=produced,
        operands=operands,
        uses=uses,
        made_by=tuple(made_by),
        rest=tuple(needed(body.equations, body.outputs, operands)[0]),
        complete=frozenset(
            position
            for position, number in sources.items()
            if _only_read_by(number, body, made_by, uses)
        ),
    )


def _only_read_by(
    weight: int, body: Program, made_by: Sequence[Equation], uses: Mapping[str, Deferred]
) -> bool:
    """Whether all that a layer makes of a weight are operands of certain operations."""
    derived, views = {weight}, {equation.path for equation in made_by}
    for equation in body.equations:
        if derived.intersection(equation.inputs):
            if equation.path in uses:
                continue
            if equation.path not in views:
                return False
            derived.update(equation.outputs)
    return not derived.intersection(body.outputs)
