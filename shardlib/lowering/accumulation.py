"""Gradient accumulation over microbatches, with gradients reduced in each or once per step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib._jax_compat import open_jaxpr, scan_counts
from shardlib.annotation.names import PureLoss
from shardlib.annotation.trees import Tree
from shardlib.errors import BatchError, raise_all
from shardlib.graph import RowDim
from shardlib.jax_types import KeyPath
from shardlib.lowering.loss import placed_loss
from shardlib.lowering.mesh import batch_path
from shardlib.lowering.placing import Placing
from shardlib.lowering.random_keys import BatchDims, Fold
from shardlib.lowering.uses import LossJaxpr, LossReading, seen_through
from shardlib.lowering.weights import IN_LAST, Deferred, GradientReductions
from shardlib.tracing.program import REMAT, Equation, callee
from shardlib.tracing.rewriting import Walk

# --------------------------------------------------------------------------------------------------
# A global batch divided into microbatches, whose gradients are summed.
#
# Every device takes each microbatch from its own rows: the batch dim of B rows is reshaped to
# [B / parts, parts], and microbatch i is column i. No row changes its device; a microbatch is a
# strided sample of the batch. Losses and metrics are averaged over the microbatches
# (`contribution.py` has rewritten their loss so that this average is the loss of the whole batch).
# Per-row metrics are reassembled in the order of the batch.


def part_of(batch: Tree, dims: Mapping[str, int | None], parts: int) -> Tree:
    """The abstract batch of one microbatch.

    Args:
        dims: dim of the rows of each array, by path; None if it has none.
    """
    if parts == 1:
        return batch
    failures = (
        []
        if any(dim is not None for dim in dims.values())
        else ["no array has a dim called 'batch'"]
    )

    def part(path: KeyPath, leaf: Any) -> jax.ShapeDtypeStruct:
        dim = dims[batch_path(path)]
        shape = list(leaf.shape)
        if dim is not None:
            if shape[dim] % parts:
                failures.append(f"{batch_path(path)} has {shape[dim]} rows in dim {dim}")
            shape[dim] //= parts
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    tree = jax.tree_util.tree_map_with_path(part, batch)
    if failures:
        raise_all(
            BatchError,
            f"the batch cannot be worked through in {parts} microbatches",
            failures,
            hint="pin microbatches to a divisor of the batch",
        )
    return tree


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """The division of a batch into microbatches.

    Attributes:
        shardings: of each array of the batch, a tree like it.
        dims: batch dim of each array, by path; None if it has none.
        count: number of microbatches.
        repeated: see `shardlib.lowering.contribution.Contribution`.
        by_row: dim of rows of each array of the metrics; None, or no entry, for one that is
            averaged.
    """

    shardings: Tree
    dims: BatchDims
    count: int
    repeated: frozenset[int] = frozenset()
    by_row: tuple[RowDim | None, ...] = ()

    def whole(self, metrics: Tree) -> Tree:
        """Metrics of the whole batch."""
        leaves, structure = jax.tree.flatten(metrics)
        return structure.unflatten(
            [
                _mean(leaf) if rows is None else _unstack(leaf, rows)
                for leaf, rows in zip_longest(leaves, self.by_row[: len(leaves)])
            ]
        )

    def averages(
        self, values: jax.Array, metrics: Tree, value: jax.Array, last: Tree, after: Tree
    ) -> Tree:
        """(loss, (metrics, state)) of all microbatches, from those of all but the last, stacked,
        and of the last.
        """

        def joined(earlier: jax.Array, latest: jax.Array) -> jax.Array:
            return jnp.concatenate([earlier, latest[None]])

        mean = _mean(joined(values, value)).astype(values.dtype)
        return mean, (self.whole(jax.tree.map(joined, metrics, last)), after)

    def entering(self, first: Tree, state: Tree) -> Tree:
        """The model state at the start of a microbatch."""
        leaves, structure = jax.tree.flatten(state)
        return structure.unflatten(
            [
                before if index in self.repeated else leaf
                for index, (before, leaf) in enumerate(
                    zip(jax.tree.leaves(first), leaves, strict=True)
                )
            ]
        )

    def split(self, batch: Tree) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Tree]]:
        """Stacks the microbatches along a new leading dim."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
        cuts = [self.dims[batch_path(path)] for path, _ in leaves]
        stacked = [
            dim.stacked(leaf, self.count)
            if isinstance(dim, Fold)
            else _stack(leaf, dim, self.count, sharding)
            for (_, leaf), dim, sharding in zip(
                leaves, cuts, jax.tree.leaves(self.shardings), strict=True
            )
            if dim is not None
        ]

        def join(slices: list[jax.Array]) -> Tree:
            remaining = iter(slices)
            return structure.unflatten(
                [
                    leaf if dim is None else next(remaining)
                    for (_, leaf), dim in zip(leaves, cuts, strict=True)
                ]
            )

        return stacked, join


def _stack(leaf: jax.Array, dim: int, parts: int, sharding: NamedSharding) -> jax.Array:
    shape = (*leaf.shape[:dim], leaf.shape[dim] // parts, parts, *leaf.shape[dim + 1 :])
    stacked = jnp.moveaxis(leaf.reshape(shape), dim + 1, 0)
    return jax.lax.with_sharding_constraint(
        stacked, NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    )


def _unstack(stacked: jax.Array, rows: RowDim) -> jax.Array:
    """The rows of the whole batch from those of its microbatches (the inverse of `_stack`)."""
    parts, dim, inner = stacked.shape[0], rows.dim, rows.inner
    shape = stacked.shape[1:]
    seen = stacked.reshape(parts, *shape[:dim], shape[dim] // inner, inner, *shape[dim + 1 :])
    return jnp.moveaxis(seen, 0, dim + 1).reshape(
        *shape[:dim], parts * shape[dim], *shape[dim + 1 :]
    )


def accumulated(
    loss: PureLoss,
    batch: Tree,
    microbatches: Microbatches,
    cut: Callable[[Tree], Tree],
    reductions: GradientReductions,
) -> Callable[[Tree, Tree], Tree]:
    """Gradients over all microbatches: (params, state) -> ((loss, (metrics, state)), gradients).

    Args:
        reductions: how gradients are reduced, with the dtypes of the accumulators.
    """
    differentiate = jax.value_and_grad(loss, has_aux=True)
    if microbatches.count == 1:
        return lambda params, state: differentiate(params, state, batch)
    stacked, join = microbatches.split(batch)

    def run(params: Tree, first: Tree) -> Any:
        def body(carry: Any, slices: list[Any]) -> Any:
            state, sums = microbatches.entering(first, carry[0]), carry[1]
            (value, (metrics, after)), gradients = differentiate(params, state, join(slices))
            sums = jax.tree.map(
                lambda total, gradient: total + gradient.astype(total.dtype), sums, cut(gradients)
            )
            return (after, cut(sums)), (value, metrics)

        zeros = cut(
            jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, reductions.accumulator(leaf.dtype)), params
            )
        )
        (after, sums), (values, metrics) = jax.lax.scan(body, (first, zeros), stacked)
        gradients = jax.tree.map(
            lambda total, leaf: (total / microbatches.count).astype(leaf.dtype), sums, params
        )
        return (values.mean(0), (microbatches.whole(metrics), after)), gradients

    return run


def _mean(values: jax.Array) -> jax.Array:
    return jnp.mean(values, axis=0, dtype=jnp.promote_types(values.dtype, jnp.float32))


# --------------------------------------------------------------------------------------------------
# Deferred gradient reduction: once per step, over all microbatches.
#
# A gradient that is stored replicated (ZeRO 0 and 1) is a sum over the examples of all devices and
# all microbatches. Its reduction is deferred: the backward pass of a microbatch leaves per-device
# partial sums, and that of the last one adds to them and all-reduces them, operation by operation,
# overlapped with the rest of the backward pass. So the communicated bytes are those of one
# microbatch. Gradients of other operations than contractions and lookups (norms, biases, routed
# experts) are reduced in every microbatch by the compiler, as are those of weights that several
# loops share.

#: Per-device partial sums, by the path of the operation.
Sums = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class Once:
    """The operations of a loss whose weight gradients are reduced in the last microbatch.

    Attributes:
        traced: the loss of one microbatch.
        placing: layouts of its values.
        mesh: the mesh of the program.
        uses: path of an operation -> its replacement.
        complete: parameters that nothing else reads: microbatches before the last compute no
            gradient of them.
        joined: the trained parameters -> all parameters.
    """

    traced: LossJaxpr
    placing: Placing
    mesh: Mesh | AbstractMesh
    uses: Mapping[str, Deferred]
    complete: frozenset[int]
    joined: Callable[[Tree], Tree] = lambda trained: trained

    @property
    def reductions(self) -> GradientReductions:
        """The reductions of all gradients."""
        return self.placing.reductions

    @property
    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of partial sums, [*lengths of loops, devices, ...]."""
        return {
            path: jax.ShapeDtypeStruct(
                (*use.use.view.lengths, *use.sums.shape),
                self.reductions.accumulator(use.sums.dtype),
                sharding=self._sharding(path),
            )
            for path, use in self.uses.items()
        }

    def zeros(self) -> Sums:
        """Zeros for the partial sums, [*lengths of loops, devices, ...], sharded so that each
        device has its own.
        """
        return self.laid_out(
            {path: jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in self.abstract.items()}
        )

    def _sharding(self, path: str) -> NamedSharding:
        use = self.uses[path]
        return NamedSharding(
            self.mesh, PartitionSpec(*(None for _ in use.use.view.lengths), *use.cuts)
        )

    def laid_out(self, sums: Sums) -> Sums:
        """Partial sums, constrained so that each device has its own."""
        return {
            path: jax.lax.with_sharding_constraint(leaf, self._sharding(path))
            for path, leaf in sums.items()
        }

    def leaving(self, params: Tree, state: Tree, batch: Tree, sums: Sums) -> Tree:
        """The loss of a microbatch, whose gradient with respect to `sums` is its partial sums."""
        return self._loss(
            params, state, batch, sums, {path: use.run for path, use in self.uses.items()}
        )

    def finishing(self, params: Tree, state: Tree, batch: Tree, sums: Sums) -> Tree:
        """The loss of the last microbatch, whose gradient with respect to the weights is that of
        all microbatches, and with respect to `sums` what devices keep for the next step.
        """
        return self._loss(
            params, state, batch, sums, {path: use.finish for path, use in self.uses.items()}
        )

    def _loss(
        self, params: Tree, state: Tree, batch: Tree, sums: Sums, beside: Mapping[str, Any]
    ) -> Tree:
        def change(walk: Walk) -> Walk:
            return replace(walk, beside=beside, arrays=sums)

        return placed_loss(self.traced, self.placing, change)(self.joined(params), state, batch)


def once(traced: LossJaxpr, placing: Placing) -> Once | None:
    """The gradients that can be reduced once per step; None if there are none, or if the plan
    reduces at another time.
    """
    mesh, reductions = placing.mesh, placing.reductions
    if reductions.when != IN_LAST:
        return None
    uses = dict[str, Deferred]()
    together = {path for group in placing.together(mesh).values() for path in group.paths}
    for path, use in placing.uses.items():
        if (
            path not in together
            and len(use.view.lengths) == path.count("/body/")
            and (deferral := placing.deferral(path, mesh, lookups=True)) is not None
        ):
            uses[path] = deferral
    if not uses:
        return None
    others = _read_otherwise(placing.loss, {path: use.use.operand for path, use in uses.items()})
    return Once(
        traced=traced,
        placing=placing,
        mesh=mesh,
        uses=uses,
        complete=frozenset(use.use.view.parameter for use in uses.values()) - others,
    )


def accumulated_once(
    deferred: Once, batch: Tree, microbatches: Microbatches, gradient: Tree
) -> Callable[[Tree, Tree, Sums | None], Tree]:
    """Gradients over all microbatches: (params, state, kept) -> ((loss, (metrics, state)),
    gradients, kept), where `kept` are partial sums that devices keep from step to step.
    """
    stacked, join = microbatches.split(batch)
    sums_in, keeps = deferred.reductions.accumulator, deferred.reductions.exchange.keeps
    cuts = jax.tree.leaves(gradient)
    others = [i for i in range(len(cuts)) if i not in deferred.complete]

    def run(params: Tree, first: Tree, before_step: Sums | None) -> Any:
        leaves, structure = jax.tree.flatten(params)

        def earlier(read: Sequence[Any], sums: Sums, state: Tree, slices: list[Any]) -> Any:
            changed = dict(zip(others, read, strict=True))
            return deferred.leaving(
                structure.unflatten([changed.get(i, leaf) for i, leaf in enumerate(leaves)]),
                state,
                join(slices),
                sums,
            )

        def body(carry: Any, slices: list[Any]) -> Any:
            state, totals, sums = microbatches.entering(first, carry[0]), *carry[1:]
            (value, (metrics, after)), (gradients, to_sums) = jax.value_and_grad(
                earlier, argnums=(0, 1), has_aux=True
            )([leaves[i] for i in others], sums, state, slices)
            totals = [
                _cut(total + _cut(gradient, cuts[i]).astype(total.dtype), cuts[i])
                for i, total, gradient in zip(others, totals, gradients, strict=True)
            ]
            return (
                after,
                totals,
                deferred.laid_out(
                    {path: sums[path] + partial_sum for path, partial_sum in to_sums.items()}
                ),
            ), (value, metrics)

        zeros = [
            _cut(jnp.zeros(leaves[i].shape, sums_in(leaves[i].dtype)), cuts[i]) for i in others
        ]
        (state, totals, sums), (values, metrics) = jax.lax.scan(
            body,
            (first, zeros, deferred.zeros() if before_step is None else before_step),
            [leaf[:-1] for leaf in stacked],
        )
        state = microbatches.entering(first, state)
        argnums = (0, 3) if keeps else (0,)
        (value, (last, after)), (gradients, *cotangents) = jax.value_and_grad(
            deferred.finishing, argnums=argnums, has_aux=True
        )(params, state, join([leaf[-1] for leaf in stacked]), sums)
        before = dict(zip(others, totals, strict=True))
        all_of = [
            last_gradient.astype(sums_in(leaf.dtype)) + before.get(i, 0)
            for i, (leaf, last_gradient) in enumerate(
                zip(leaves, jax.tree.leaves(gradients), strict=True)
            )
        ]
        means = [
            (_cut(total, cut) / microbatches.count).astype(leaf.dtype)
            for total, cut, leaf in zip(all_of, cuts, leaves, strict=True)
        ]
        results = microbatches.averages(values, metrics, value, last, after)
        return (
            results,
            structure.unflatten(means),
            deferred.laid_out(cotangents[0]) if keeps else None,
        )

    return run


def _cut(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(leaf, sharding)


def _read_otherwise(loss: LossReading, uses: Mapping[str, int]) -> set[int]:
    """Parameters that are read by anything other than given operands and the operations that only
    rearrange them on the way there.
    """
    numbers_read = {
        number
        for number, value in enumerate(loss.program.inputs[: loss.parameters])
        if value in loss.program.outputs
    }
    # For each program, the results that are read outside of it, and all values that are read.
    live: dict[int, tuple[set[int], set[int]]] = {}
    entered: list[int] | None = None
    for step in loss.steps:
        equation, program = step.equation, step.program
        if id(program) not in live:
            numbers = program.outputs
            results = {*(numbers if entered is None else (numbers[k] for k in entered))}
            operands = {number for inner in program.equations for number in inner.inputs}
            live[id(program)] = results, results | operands
        results, read = live[id(program)]
        entered = _read_results(equation, read)
        passed = _passed_on(equation, read)
        numbers_read.update(
            view.parameter for position, view in step.operands if position in passed
        )
        view = seen_through(equation, list(step.views), step.program)
        if view is not None and equation.outputs[0] in results:
            numbers_read.add(view.parameter)
        if equation.name in REMAT or view is not None:
            continue
        allowed = _followed(equation) | ({uses[equation.path]} if equation.path in uses else set())
        numbers_read.update(
            view.parameter for position, view in step.operands if position not in allowed
        )
    return numbers_read


def _followed(equation: Equation) -> set[int]:
    """Operands of a scan whose readers are those inside its body."""
    if equation.name != "scan":
        return set()
    constants, carried = scan_counts(equation.params)
    return {
        position
        for position in range(len(equation.inputs))
        if not constants <= position < constants + carried
    }


def _passed_on(equation: Equation, read: Collection[int]) -> set[int]:
    """Operands of a loop over layers, or of a rematerialised call, that the body returns unchanged
    and that are read after it; their readers are not known.
    """
    if equation.name != "scan" and equation.name not in REMAT:
        return set()
    body = open_jaxpr(callee(equation.eqn))[0]
    handed_on = [
        variable
        for number, variable in zip(equation.outputs, body.outvars, strict=True)
        if number in read
    ]
    return {position for position, variable in enumerate(body.invars) if variable in handed_on}


def _read_results(equation: Equation, read: Collection[int]) -> list[int] | None:
    """Positions of the results of a body that are read outside, or by its next iteration; None for
    an equation without a body that is entered.
    """
    if equation.name != "scan" and equation.name not in REMAT:
        return None
    carried = scan_counts(equation.params)[1] if equation.name == "scan" else 0
    return [k for k, number in enumerate(equation.outputs) if k < carried or number in read]
