"""How are gradients reduced once a step, when the batch is worked through in several microbatches?

A gradient that rests whole (ZeRO 0 and 1) is a sum over the examples of all devices and all
microbatches. Every device adds up its own examples first: the backward pass of a microbatch leaves
the sums of each device where they are, and that of the last one adds its own and reduces them,
operation by operation, beside the rest of the backward pass. So the bytes on the wire are those of
one microbatch. Gradients of other operations than contractions and lookups (norms, biases, routed
experts) are reduced in every microbatch by the compiler, as are those of weights that several loops
share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib._jax_compat import scan_counts
from shardlib.annotation.trees.paths import Tree
from shardlib.lowering.accumulation.microbatches import averages, split
from shardlib.lowering.loss.forward import placed_loss
from shardlib.lowering.loss.placing import Placing
from shardlib.lowering.mesh.collectives import machine_of
from shardlib.lowering.reading.custom_calls import steps
from shardlib.lowering.reading.parameter_uses import seen_through
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.lowering.weights.deferred import Deferred, deferred
from shardlib.tracing.program import REMAT, Equation, Program, flatten
from shardlib.tracing.rewriting.interpreter import Walk

#: Partial sums of every device, by the path of the operation.
Sums = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class Once:
    """The operations of a loss whose weights' gradients are reduced in the last microbatch.

    Attributes:
        traced: the loss of one microbatch.
        placing: how its values are laid out.
        mesh: the mesh of the program.
        uses: path of an operation -> what runs in its place.
        complete: parameters that nothing else reads: microbatches before the last make no gradient
            of them.
        joined: the trained parameters -> all of them.
    """

    traced: LossJaxpr
    placing: Placing
    mesh: Mesh | AbstractMesh
    uses: Mapping[str, Deferred]
    complete: frozenset[int]
    joined: Callable[[Tree], Tree] = lambda trained: trained

    def zeros(self, sums_in: Callable[[Any], Any]) -> Sums:
        """Where partial sums go, [*lengths of loops, devices, ...], each device's at the device."""
        made = {
            path: jnp.zeros((*use.use.view.lengths, *use.sums.shape), sums_in(use.sums.dtype))
            for path, use in self.uses.items()
        }
        return self.laid_out(made)

    def laid_out(self, sums: Sums) -> Sums:
        """Partial sums, each device's at the device."""
        return {
            path: jax.lax.with_sharding_constraint(
                leaf,
                NamedSharding(
                    self.mesh,
                    PartitionSpec(
                        *(None for _ in self.uses[path].use.view.lengths), *self.uses[path].cuts
                    ),
                ),
            )
            for path, leaf in sums.items()
        }

    def leaving(self, params: Tree, state: Tree, batch: Tree, sums: Sums) -> Any:
        """The loss of a microbatch, whose gradient by `sums` are the partial sums of its
        weights.
        """
        return self._loss(
            params, state, batch, sums, {path: use.run for path, use in self.uses.items()}
        )

    def finishing(self, params: Tree, state: Tree, batch: Tree, sums: Sums) -> Any:
        """The loss of the last microbatch, whose gradient by the weights is that of all of them."""
        return self._loss(
            params, state, batch, sums, {path: use.finish for path, use in self.uses.items()}
        )

    def _loss(
        self, params: Tree, state: Tree, batch: Tree, sums: Sums, beside: Mapping[str, Any]
    ) -> Any:
        def change(walk: Walk) -> Walk:
            return replace(walk, beside=beside, arrays=sums)

        return placed_loss(self.traced, self.placing, change)(self.joined(params), state, batch)


def once(traced: LossJaxpr, placing: Placing) -> Once | None:
    """What can be reduced once a step; None where the plan does otherwise, or nothing can.

    Args:
        traced: the loss of one microbatch.
        placing: how its values are laid out.
    """
    plan, mesh = placing.plan, placing.mesh
    if plan.microbatches == 1 or plan.mesh["stage"] > 1 or plan.zero >= 2:
        return None
    machine, uses = machine_of(plan, mesh), dict[str, Deferred]()
    together = {path for group in placing.together(mesh).values() for path in group.paths}
    for path, use in placing.uses.items():
        if (
            (path, 0) in placing.placements
            and path not in together
            and len(use.view.lengths) == path.count("/body/")
        ):
            found = deferred(
                placing.with_pins(use, mesh),
                placing.placements[path, 0],
                placing.parameter(use, mesh),
                machine,
                lookups=True,
            )
            if found is not None:
                uses[path] = found
    if not uses:
        return None
    program = flatten(traced.closed_jaxpr)
    others = _read_otherwise(
        program, len(placing.compute), {path: use.use.operand for path, use in uses.items()}
    )
    return Once(
        traced=traced,
        placing=placing,
        mesh=mesh,
        uses=uses,
        complete=frozenset(use.use.view.parameter for use in uses.values()) - others,
    )


def accumulated_once(
    found: Once,
    batch: Tree,
    shardings: Tree,
    dims: Mapping[str, int | None],
    parts: int,
    gradient: Tree,
    sums_in: Callable[[Any], Any],
) -> Callable[[Tree, Tree], Any]:
    """Gradients over all microbatches, as `shardlib.lowering.accumulation.microbatches.accumulated`
    has them.

    Args:
        found: what is reduced in the last one.
        batch: the whole batch.
        shardings: tree like the batch.
        dims: batch dim of each array, by path.
        parts: number of microbatches.
        gradient: sharding of every gradient, a tree like the parameters.
        sums_in: dtype of a gradient -> dtype of its accumulator.
    """
    stacked, join = split(batch, shardings, dims, parts)
    cuts = jax.tree.leaves(gradient)
    kept = [i for i in range(len(cuts)) if i not in found.complete]

    def run(params: Tree, state: Tree) -> Any:
        leaves, structure = jax.tree.flatten(params)

        def earlier(others: Sequence[Any], sums: Sums, state: Tree, slices: list[Any]) -> Any:
            changed = dict(zip(kept, others, strict=True))
            return found.leaving(
                structure.unflatten([changed.get(i, leaf) for i, leaf in enumerate(leaves)]),
                state,
                join(slices),
                sums,
            )

        def body(carry: Any, slices: list[Any]) -> Any:
            state, totals, sums = carry
            (value, (metrics, after)), (gradients, own) = jax.value_and_grad(
                earlier, argnums=(0, 1), has_aux=True
            )([leaves[i] for i in kept], sums, state, slices)
            totals = [
                _cut(total + _cut(one, cuts[i]).astype(total.dtype), cuts[i])
                for i, total, one in zip(kept, totals, gradients, strict=True)
            ]
            return (
                after,
                totals,
                found.laid_out({path: sums[path] + one for path, one in own.items()}),
            ), (value, metrics)

        zeros = [_cut(jnp.zeros(leaves[i].shape, sums_in(leaves[i].dtype)), cuts[i]) for i in kept]
        (state, totals, sums), (values, metrics) = jax.lax.scan(
            body, (state, zeros, found.zeros(sums_in)), [leaf[:-1] for leaf in stacked]
        )
        (value, (last, after)), gradients = jax.value_and_grad(found.finishing, has_aux=True)(
            params, state, join([leaf[-1] for leaf in stacked]), sums
        )
        before = dict(zip(kept, totals, strict=True))
        all_of = [
            one.astype(sums_in(leaf.dtype)) + before.get(i, 0)
            for i, (leaf, one) in enumerate(zip(leaves, jax.tree.leaves(gradients), strict=True))
        ]
        means = [
            (_cut(total, cut) / parts).astype(leaf.dtype)
            for total, cut, leaf in zip(all_of, cuts, leaves, strict=True)
        ]
        return averages(values, metrics, value, last, after), structure.unflatten(means)

    return run


def _cut(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(leaf, sharding)


def _read_otherwise(program: Program, parameters: int, uses: Mapping[str, int]) -> set[int]:
    """Parameters that something else reads than certain operands, and what only rearranges them on
    the way there.
    """
    found = {
        number
        for number, value in enumerate(program.inputs[:parameters])
        if value in program.outputs
    }
    for step in steps(program, parameters):
        equation = step.equation
        views = [step.views.get(number) for number in equation.inputs]
        found.update(
            step.views[number].parameter
            for number in equation.outputs
            if number in step.views and number in step.program.outputs
        )
        if equation.name in REMAT or seen_through(equation, views, step.program) is not None:
            continue
        allowed = _followed(equation) | ({uses[equation.path]} if equation.path in uses else set())
        found.update(
            view.parameter
            for at, view in enumerate(views)
            if view is not None and at not in allowed
        )
    return found


def _followed(equation: Equation) -> set[int]:
    """Operands of a scan whose readers are found in its body."""
    if equation.name != "scan":
        return set()
    constants, carried = scan_counts(equation.params)
    return {at for at in range(len(equation.inputs)) if not constants <= at < constants + carried}
