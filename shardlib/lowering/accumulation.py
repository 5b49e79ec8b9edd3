"""Gradient accumulation over microbatches, with gradients reduced in each or once per step, and the
contribution of a microbatch to the loss of the whole batch.

Random numbers are drawn at the positions that rows have in the whole batch:

>>> key, rows = jax.random.key(0), jnp.arange(1, 8, 2, dtype=jnp.uint32)
>>> whole = jax.random.bits(key, (3, 8))
>>> part = bits(key, rows, Draw(dim=1, inner=1), shape=(3, 4), count=2, width=32)
>>> bool((part == whole[:, 1::2]).all())
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.extend.random import threefry2x32_p
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib._jax_compat import open_jaxpr, scan_counts
from shardlib.annotation.model import no_mesh
from shardlib.annotation.names import Model
from shardlib.annotation.trees import Partition, Tree
from shardlib.errors import BatchError, PinError, TracingError, raise_all
from shardlib.functions.attention import form_of
from shardlib.functions.losses import WeightedMeanForm
from shardlib.graph import RowDim, Rows
from shardlib.jax_types import Atom, Aval, Eqn, Jaxpr, KeyPath
from shardlib.layout import Layout
from shardlib.lowering.loss import loss_in_layouts
from shardlib.lowering.loss_layouts import LossLayouts
from shardlib.lowering.mesh import batch_path, named_sharding
from shardlib.lowering.random_keys import BatchDims, KeyFold, is_key, with_same_keys
from shardlib.lowering.uses import LossFacts, LossJaxpr, view_of_result
from shardlib.lowering.weights import LAST_MICROBATCH, DeferredOp, GradientReductions
from shardlib.planner.plan import Plan
from shardlib.planner.space import require_no_row_results
from shardlib.tracing.program import (
    INLINED,
    REMAT,
    Equation,
    Program,
    callee,
    find_repeats,
    flatten,
)
from shardlib.tracing.rewriting import LoopSums, Walk, evaluate_equations, needed, typed
from shardlib.tracing.row_kinds import DifferentPrograms, Draw, Kind, WholeBatchValue, draws
from shardlib.tracing.rows import LossInputs, Proof, ResultNames, compare
from shardlib.tracing.trace import result_names

# --------------------------------------------------------------------------------------------------
# A global batch divided into microbatches, whose gradients are summed.
#
# Every device takes each microbatch from its own rows: the batch dim of B rows is reshaped to
# [B / count, count], and microbatch i is column i. No row changes its device; a microbatch is a
# strided sample of the batch. Losses and metrics are averaged over the microbatches
# (`contribution` has changed their loss so that this average is the loss of the whole batch).
# Per-row metrics are reassembled in the order of the batch.


def microbatch_of(batch: Tree, dims: Mapping[str, int | None], count: int) -> Tree:
    """The abstract batch of one microbatch.

    Args:
        dims: dim of the rows of each array, by path; None if it has none.
    """
    if count == 1:
        return batch
    failures = (
        []
        if any(dim is not None for dim in dims.values())
        else ["no array has a dim called 'batch'"]
    )

    def microbatch(path: KeyPath, leaf: Any) -> jax.ShapeDtypeStruct:
        dim = dims[batch_path(path)]
        shape = list(leaf.shape)
        if dim is not None:
            if shape[dim] % count:
                failures.append(f"{batch_path(path)} has {shape[dim]} rows in dim {dim}")
            shape[dim] //= count
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    tree = jax.tree_util.tree_map_with_path(microbatch, batch)
    if failures:
        raise_all(
            BatchError,
            f"the batch cannot be divided into {count} microbatches",
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
        fixed_state: see `Contribution`.
        row_dims: dim of rows of each array of the metrics; None, or no entry, for one that is
            averaged.
    """

    shardings: Tree
    dims: BatchDims
    count: int
    fixed_state: frozenset[int] = frozenset()
    row_dims: tuple[RowDim | None, ...] = ()

    def whole_metrics(self, metrics: Tree) -> Tree:
        """Metrics of the whole batch."""
        leaves, structure = jax.tree.flatten(metrics)
        return structure.unflatten(
            [
                _mean(leaf) if rows is None else _unstack(leaf, rows)
                for leaf, rows in zip_longest(leaves, self.row_dims[: len(leaves)])
            ]
        )

    def state_before(self, initial: Tree, state: Tree) -> Tree:
        """The model state that a microbatch reads.

        Args:
            initial: model state before the step.
            state: model state after the microbatch before.
        """
        leaves, structure = jax.tree.flatten(state)
        return structure.unflatten(
            [
                before if index in self.fixed_state else leaf
                for index, (before, leaf) in enumerate(
                    zip(jax.tree.leaves(initial), leaves, strict=True)
                )
            ]
        )

    def split(self, batch: Tree) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Tree]]:
        """(arrays of the batch [microbatches, ...], function from their slices to the batch of one
        microbatch).
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
        dims = [self.dims[batch_path(path)] for path, _ in leaves]
        stacked = [
            dim.microbatch_keys(leaf, self.count)
            if isinstance(dim, KeyFold)
            else _stack(leaf, dim, self.count, sharding)
            for (_, leaf), dim, sharding in zip(
                leaves, dims, jax.tree.leaves(self.shardings), strict=True
            )
            if dim is not None
        ]

        def join(slices: list[jax.Array]) -> Tree:
            remaining = iter(slices)
            return structure.unflatten(
                [
                    leaf if dim is None else next(remaining)
                    for (_, leaf), dim in zip(leaves, dims, strict=True)
                ]
            )

        return stacked, join


def _stack(leaf: jax.Array, dim: int, count: int, sharding: NamedSharding) -> jax.Array:
    shape = (*leaf.shape[:dim], leaf.shape[dim] // count, count, *leaf.shape[dim + 1 :])
    stacked = jnp.moveaxis(leaf.reshape(shape), dim + 1, 0)
    return jax.lax.with_sharding_constraint(
        stacked, NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    )


def _unstack(stacked: jax.Array, rows: RowDim) -> jax.Array:
    """The rows of the whole batch from those of its microbatches (the inverse of `_stack`)."""
    count, dim, inner = stacked.shape[0], rows.dim, rows.inner
    shape = stacked.shape[1:]
    grouped = stacked.reshape(count, *shape[:dim], shape[dim] // inner, inner, *shape[dim + 1 :])
    return jnp.moveaxis(grouped, 0, dim + 1).reshape(
        *shape[:dim], count * shape[dim], *shape[dim + 1 :]
    )


def _mean(values: jax.Array) -> jax.Array:
    return jnp.mean(values, axis=0, dtype=jnp.promote_types(values.dtype, jnp.float32))


# --------------------------------------------------------------------------------------------------
# Deferred gradient reduction: once per step, over all microbatches.
#
# A gradient that is stored replicated (ZeRO 0 and 1) is a sum over the examples of all devices and
# all microbatches. Its reduction is deferred: the backward pass of a microbatch leaves per-device
# partial sums, and that of the last one adds to them and all-reduces them, operation by operation,
# overlapped with the rest of the backward pass. So the communicated bytes are those of one
# microbatch. Gradients of operations other than contractions and lookups (norms, biases, routed
# experts) are reduced in every microbatch by the compiler, as are those of weights that several
# loops share.

#: Per-device partial sums, by the path of the operation.
PartialSums = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class AccumulatedLoss:
    """The loss of one microbatch, and how its gradients are summed.

    Attributes:
        traced: the loss of one microbatch.
        layouts: layouts of its values.
        mesh: the mesh of the program.
        partition: which parameters are trained.
        deferred: path of an operation whose weight gradient is reduced in the last microbatch ->
            its replacement.
        fully_deferred: trained parameters that nothing else reads: microbatches before the last
            compute no gradient of them.
        slices: path of what a loop slices -> trained parameter; nothing else reads it, and the loop
            adds its gradients to their sums.
        loops: paths of the loops that can carry sums.
    """

    traced: LossJaxpr
    layouts: LossLayouts
    mesh: Mesh | AbstractMesh
    partition: Partition
    deferred: Mapping[str, DeferredOp]
    fully_deferred: frozenset[int]
    slices: Mapping[str, int]
    loops: frozenset[str]

    @staticmethod
    def of(
        traced: LossJaxpr, layouts: LossLayouts, microbatches: int, partition: Partition
    ) -> AccumulatedLoss:
        """The loss of one of so many microbatches."""
        repeated = microbatches > 1
        defers = repeated and layouts.reductions.when == LAST_MICROBATCH
        deferred = _deferred_ops(layouts) if defers else {}
        others = _read_elsewhere(
            layouts.facts, {path: op.use.position for path, op in deferred.items()}
        )
        loops = _outer_loops(layouts.facts.program) if repeated else frozenset[str]()
        numbers = partition.numbers
        fully_deferred = frozenset(
            numbers[op.use.view.parameter]
            for op in deferred.values()
            if op.use.view.parameter not in others
        )
        return AccumulatedLoss(
            traced=traced,
            layouts=layouts,
            mesh=layouts.mesh,
            partition=partition,
            deferred=deferred,
            fully_deferred=fully_deferred,
            slices={
                path: numbers[parameter]
                for path, parameter in layouts.facts.stacked_slices.items()
                if path.rpartition("/enter/")[0] in loops
                and parameter in numbers
                and numbers[parameter] not in fully_deferred
            },
            loops=loops,
        )

    @property
    def reductions(self) -> GradientReductions:
        """The reductions of all gradients."""
        return self.layouts.reductions

    def sums_sharding(self, path: str) -> NamedSharding:
        """The sharding of the partial sums of an operation: each device has its own."""
        op = self.deferred[path]
        return NamedSharding(
            self.mesh, PartitionSpec(*(None for _ in op.use.view.lengths), *op.sums_spec)
        )

    def zero_partial_sums(self) -> PartialSums:
        """Zeros for the partial sums, [*lengths of loops, devices, ...]."""
        accumulator, sums = self.reductions.accumulator, dict[str, jax.Array]()
        for path, op in self.deferred.items():
            shape = (*op.use.view.lengths, *op.sums_aval.shape)
            zeros = jnp.zeros(shape, accumulator(op.sums_aval.dtype))
            sums[path] = _constrain(zeros, self.sums_sharding(path))
        return sums

    def run(
        self,
        params: Tree,
        state: Tree,
        batch: Tree,
        partial_sums: PartialSums,
        loop_sums: LoopSums,
        *,
        last: bool,
    ) -> Tree:
        """The loss of a microbatch. Before the last, the gradient with respect to `partial_sums` is
        that of the microbatch; in the last, that of the weights is the one of all microbatches.
        """
        extra = {path: op.run_last if last else op.run for path, op in self.deferred.items()}

        def change(walk: Walk) -> Walk:
            return replace(walk, extra=extra, arrays=partial_sums, sums=loop_sums)

        return loss_in_layouts(self.traced, self.layouts, change)(params, state, batch)


def _deferred_ops(layouts: LossLayouts) -> Mapping[str, DeferredOp]:
    """The operations whose weight gradients can be reduced once per step, by path."""
    mesh, ops = layouts.mesh, dict[str, DeferredOp]()
    ring_paths = {path for group in layouts.ring_loops(mesh).values() for path in group.paths}
    for path, use in layouts.uses.items():
        if (
            path not in ring_paths
            and len(use.view.lengths) == path.count("/body/")
            and (op := layouts.deferred(path, mesh, lookups=True)) is not None
        ):
            ops[path] = op
    return ops


def _outer_loops(program: Program) -> frozenset[str]:
    """Paths of the loops that are not inside of other equations or of unrolled layers."""
    unrolled = {k for run in find_repeats(program) for k in range(run.start, run.stop)}
    return frozenset(
        equation.path
        for k, equation in enumerate(program.equations)
        if equation.name == "scan" and k not in unrolled
    )


def accumulated_gradients(
    loss: AccumulatedLoss, batch: Tree, microbatches: Microbatches, gradient: Tree
) -> Callable[[Tree, Tree], Tree]:
    """Gradients over all microbatches: (params, state) -> ((loss, (metrics, state)), gradients of
    the trained parameters).

    Args:
        gradient: shardings of the gradients.
    """
    partition, shardings = loss.partition, jax.tree.leaves(gradient)
    outside = {path for path in loss.deferred if path.partition("/")[0] not in loss.loops}
    sum_shardings = {path: loss.sums_sharding(path) for path in loss.deferred} | {
        path: shardings[i] for path, i in loss.slices.items()
    }
    summed_by_loops = set(loss.slices.values())
    others = [
        i
        for i in range(len(shardings))
        if i not in loss.fully_deferred and i not in summed_by_loops
    ]

    def differentiated(
        params: Tree,
        state: Tree,
        batch: Tree,
        numbers: Sequence[int],
        partial_sums: PartialSums,
        loop_sums: PartialSums,
        *,
        last: bool = False,
    ) -> Any:
        """((loss, (metrics, state)), gradients of the parameters with these numbers, gradients of
        `partial_sums` unless this is the last microbatch, `loop_sums` with those that loops add).
        """
        leaves, structure = jax.tree.flatten(partition.trained(params))

        def run(read: list[Any], own_sums: PartialSums, arrays: PartialSums) -> Any:
            values = dict(enumerate(leaves)) | dict(zip(numbers, read, strict=True))
            trained = structure.unflatten([values[i] for i in range(len(leaves))])
            carried = LoopSums(arrays=arrays, shardings=sum_shardings)
            value, aux = loss.run(
                partition.joined(trained, params),
                state,
                batch,
                partial_sums if last else own_sums,
                carried,
                last=last,
            )
            return (value, carried.returned), aux

        arrays = {path: jnp.zeros_like(total) for path, total in loop_sums.items()}
        (value, _), backward, aux = jax.vjp(
            run, [leaves[i] for i in numbers], {} if last else partial_sums, arrays, has_aux=True
        )
        return (value, aux), *backward((jnp.ones_like(value), loop_sums))

    def of_whole_batch(params: Tree, state: Tree) -> Any:
        numbers = range(len(shardings))
        results, gradients, _, _ = differentiated(params, state, batch, numbers, {}, {})
        return results, jax.tree.unflatten(jax.tree.structure(gradient), gradients)

    if microbatches.count == 1:
        return of_whole_batch
    stacked, join = microbatches.split(batch)
    before_last = [leaf[:-1] for leaf in stacked] if loss.deferred else stacked

    def run(params: Tree, initial_state: Tree) -> Any:
        leaves = jax.tree.leaves(partition.trained(params))
        accumulator = loss.reductions.accumulator

        def zeros(i: int) -> jax.Array:
            return _constrain(
                jnp.zeros(leaves[i].shape, accumulator(leaves[i].dtype)), shardings[i]
            )

        def body(carry: Any, slices: list[Any]) -> Any:
            state, totals, sums, loop_sums = carry
            (value, (metrics, after)), gradients, partial_sums, loop_sums = differentiated(
                params,
                microbatches.state_before(initial_state, state),
                join(slices),
                others,
                sums,
                loop_sums,
            )
            totals = [
                _constrain(
                    total + _constrain(gradient, shardings[i]).astype(total.dtype), shardings[i]
                )
                for i, total, gradient in zip(others, totals, gradients, strict=True)
            ]
            sums = {
                path: _constrain(sums[path] + partial_sum, sum_shardings[path])
                for path, partial_sum in partial_sums.items()
            }
            return (after, totals, sums, loop_sums), (value, metrics)

        partial_sums = loss.zero_partial_sums()
        sums = {path: partial_sums[path] for path in outside}
        loop_sums = {path: leaf for path, leaf in partial_sums.items() if path not in outside} | {
            path: zeros(i) for path, i in loss.slices.items()
        }
        (state, totals, sums, loop_sums), (values, metrics) = jax.lax.scan(
            body, (initial_state, [zeros(i) for i in others], sums, loop_sums), before_last
        )
        if loss.deferred:
            numbers = [i for i in range(len(leaves)) if i not in summed_by_loops]

            def last_microbatch() -> Any:
                return differentiated(
                    params,
                    microbatches.state_before(initial_state, state),
                    join([leaf[-1] for leaf in stacked]),
                    numbers,
                    {
                        path: leaf
                        for path, leaf in {**sums, **loop_sums}.items()
                        if path in loss.deferred
                    },
                    {path: loop_sums[path] for path in loss.slices},
                    last=True,
                )

            in_order = loss.layouts.regions(loss.mesh).torus
            (value, (last_metrics, state)), gradients, _, loop_sums = (
                last_microbatch() if in_order else _after(values, last_microbatch)
            )
            values, metrics = jax.tree.map(
                lambda earlier, last: jnp.concatenate([earlier, last[None]]),
                (values, metrics),
                (value, last_metrics),
            )
            earlier = dict(zip(others, totals, strict=True))
            totals = [
                gradient.astype(accumulator(leaves[i].dtype)) + earlier.get(i, 0)
                for i, gradient in zip(numbers, gradients, strict=True)
            ]
        else:
            numbers = others
        all_totals = dict(zip(numbers, totals, strict=True)) | {
            i: loop_sums[path] for path, i in loss.slices.items()
        }
        means = [
            (_constrain(all_totals[i], shardings[i]) / microbatches.count).astype(leaf.dtype)
            for i, leaf in enumerate(leaves)
        ]
        mean = _mean(values).astype(values.dtype)
        results = mean, (microbatches.whole_metrics(metrics), state)
        return results, jax.tree.unflatten(jax.tree.structure(gradient), means)

    return run


def _after(values: jax.Array, run: Callable[[], Tree]) -> Tree:
    """What `run` returns, computed in memory that is taken once some values are there.

    XLA for GPUs would run the forward pass of the last microbatch, or allocate the stacks of its
    loops, before the others: the activations of two microbatches. It does not reorder a branch,
    whose condition, which is always true, it cannot know.
    """
    condition, _ = jax.lax.optimization_barrier((jnp.bool_(True), values))
    shapes = jax.eval_shape(run)
    return jax.lax.cond(
        condition, run, lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    )


def _constrain(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(leaf, sharding)


def _read_elsewhere(loss: LossFacts, uses: Mapping[str, int]) -> set[int]:
    """Parameters that are read by operations other than the given ones and those that make the
    views that these read.

    Args:
        uses: path of an operation -> position of the operand that is a view of a parameter.
    """
    parameters_read = {
        number
        for number, value in enumerate(loss.program.inputs[: loss.num_parameters])
        if value in loss.program.outputs
    }
    # For each program, the results that are read outside of it, and all values that are read. The
    # equations of a body directly follow the equation that it belongs to, of which
    # `results_read` has the positions of the results that are read.
    live: dict[int, tuple[set[int], set[int]]] = {}
    results_read: list[int] | None = None
    for entry in loss.equations:
        equation, program = entry.equation, entry.program
        if id(program) not in live:
            numbers = program.outputs
            results = {*(numbers if results_read is None else (numbers[k] for k in results_read))}
            operands = {number for inner in program.equations for number in inner.inputs}
            live[id(program)] = results, results | operands
        results, read = live[id(program)]
        results_read = _read_results(equation, read)
        returned = _returned_unchanged(equation, read)
        parameters_read.update(
            view.parameter for position, view in entry.parameter_operands if position in returned
        )
        view = view_of_result(equation, list(entry.views), entry.program)
        if view is not None and equation.outputs[0] in results:
            parameters_read.add(view.parameter)
        if equation.name in REMAT or view is not None:
            continue
        allowed = _operands_of_body(equation) | (
            {uses[equation.path]} if equation.path in uses else set()
        )
        parameters_read.update(
            view.parameter for position, view in entry.parameter_operands if position not in allowed
        )
    return parameters_read


def _operands_of_body(equation: Equation) -> set[int]:
    """Operands of a scan whose readers are those inside its body."""
    if equation.name != "scan":
        return set()
    constants, carried = scan_counts(equation.params)
    return {
        position
        for position in range(len(equation.inputs))
        if not constants <= position < constants + carried
    }


def _returned_unchanged(equation: Equation, read: Collection[int]) -> set[int]:
    """Operands of a loop over layers, or of a rematerialised call, that the body returns unchanged
    and that are read after it; their readers are not known.
    """
    if equation.name != "scan" and equation.name not in REMAT:
        return set()
    body = open_jaxpr(callee(equation.eqn))[0]
    returned = [
        variable
        for number, variable in zip(equation.outputs, body.outvars, strict=True)
        if number in read
    ]
    return {position for position, variable in enumerate(body.invars) if variable in returned}


def _read_results(equation: Equation, read: Collection[int]) -> list[int] | None:
    """Positions of the results of a body that are read outside, or by its next iteration; None for
    an equation that has no body in `LossFacts.equations`.
    """
    if equation.name != "scan" and equation.name not in REMAT:
        return None
    carried = scan_counts(equation.params)[1] if equation.name == "scan" else 0
    return [k for k, number in enumerate(equation.outputs) if k < carried or number in read]


# --------------------------------------------------------------------------------------------------
# Random numbers of a microbatch: those that the whole batch draws for its rows.

_LOW = 0xFFFFFFFF


def whole_batch_draw(
    eqn: Eqn, keys: jax.Array, rows: jax.Array, draw: Draw, count: int
) -> tuple[jax.Array, ...]:
    """The results of a draw of random numbers."""
    shape = tuple(eqn.params["shape"])
    if eqn.primitive.name == "random_bits":
        return (bits(keys, rows, draw, shape=shape, count=count, width=eqn.params["bit_width"]),)
    words = jnp.stack(_threefry(keys, rows, draw, shape, count), axis=-1)
    return (jax.random.wrap_key_data(words, impl=jax.random.key_impl(keys)),)


def bits(
    keys: jax.Array, rows: jax.Array, draw: Draw, *, shape: Sequence[int], count: int, width: int
) -> jax.Array:
    """Random bits [*keys.shape, *shape], equal to those of `jax.random.bits` for the whole
    batch.
    """
    high, low = _threefry(keys, rows, draw, shape, count)
    if width == 64:
        return high.astype(jnp.uint64) << 32 | low.astype(jnp.uint64)
    return (high ^ low).astype(f"uint{width}")


def _threefry(
    keys: jax.Array, rows: jax.Array, draw: Draw, shape: Sequence[int], count: int
) -> list[jax.Array]:
    """Two words for each position, [*keys.shape, *shape] each."""
    words = jax.random.key_data(keys)
    full_shape = (*keys.shape, *shape)
    ones = (1,) * len(shape)
    return threefry2x32_p.bind(
        *(
            jnp.broadcast_to(words[..., index].reshape(*keys.shape, *ones), full_shape)
            for index in (0, 1)
        ),
        *(jnp.broadcast_to(word, full_shape) for word in draw_positions(rows, draw, shape, count)),
    )


def draw_positions(
    rows: jax.Array, draw: Draw, shape: Sequence[int], count: int
) -> tuple[jax.Array, jax.Array]:
    """The positions of the elements of a microbatch's draw in that of the whole batch: the high and
    the low 32 bits, of a shape that broadcasts to `shape`.
    """
    sizes = [size * (count if dim == draw.dim else 1) for dim, size in enumerate(shape)]
    high = low = jnp.zeros((1,) * len(shape), jnp.uint32)
    for dim, size in enumerate(shape):
        offsets = jnp.arange(size, dtype=jnp.uint32)
        if dim == draw.dim:
            inner = jnp.arange(draw.inner, dtype=jnp.uint32)
            offsets = (rows[:, None] * jnp.uint32(draw.inner) + inner).reshape(size)
        more = [
            word.reshape(*(-1 if axis == dim else 1 for axis in range(len(shape))))
            for word in _times_64(offsets, math.prod(sizes[dim + 1 :]))
        ]
        after = low + more[1]
        high, low = high + more[0] + (after < low).astype(jnp.uint32), after
    return high, low


def _times_64(numbers: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """The products of 32-bit numbers and a factor of up to 64 bits: the high and the low 32
    bits.
    """
    factor_low, factor_high = factor & 0xFFFF, (factor >> 16) & 0xFFFF
    low, high = numbers & 0xFFFF, numbers >> 16
    low_low, low_high, high_low = low * factor_low, low * factor_high, high * factor_low
    middle = (low_low >> 16) + (low_high & 0xFFFF) + (high_low & 0xFFFF)
    upper = high * factor_high + (low_high >> 16) + (high_low >> 16) + (middle >> 16)
    return upper + numbers * jnp.uint32((factor >> 32) & _LOW), numbers * jnp.uint32(factor & _LOW)


# --------------------------------------------------------------------------------------------------
# Evaluation of the program of a microbatch, with some operands scaled or replaced by values of the
# whole batch, and with the draws of the whole batch.

#: In place of a factor: the result is a `shardlib.WeightedMean`, divided after the last microbatch.
WEIGHTED_MEAN = "weighted mean"
#: Operand of an equation, by (path, index).
OperandKey = tuple[str, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluator:
    """An evaluation of the program of a microbatch with some of its operands changed; every
    equation keeps its path.

    Attributes:
        factors: factors of operands.
        whole_values: operands that are replaced.
        values: their replacements.
        weighted_means: (result, total, weight) of every weighted mean, added as it is evaluated.
        draws: by path, draws at positions in the whole batch.
        rows: positions of the microbatch's rows; None without draws.
        count: number of microbatches.
    """

    factors: Mapping[OperandKey, float]
    whole_values: Mapping[OperandKey, WholeBatchValue]
    values: Mapping[WholeBatchValue, jax.Array]
    weighted_means: list[tuple[Any, Any, Any]]
    draws: Mapping[str, Draw]
    rows: jax.Array | None
    count: int

    def run(
        self, jaxpr: Jaxpr, arguments: Sequence[jax.Array], prefix: str, scope: str
    ) -> list[jax.Array]:
        """Results of a jaxpr.

        Args:
            prefix: of the paths of its equations.
            scope: name stack of the equation that it belongs to.
        """
        opened, constants = open_jaxpr(jaxpr)
        env = dict(zip(opened.constvars, constants, strict=True))
        env.update(zip(opened.invars, arguments, strict=True))

        def read(atom: Atom) -> jax.Array:
            return atom.val if isinstance(atom, jex.Literal) else env[atom]

        for index, eqn in enumerate(opened.eqns):
            path, operands = f"{prefix}{index}", [read(atom) for atom in eqn.invars]
            full = str(eqn.source_info.name_stack)
            relative = full[len(scope) :].lstrip("/") if scope and full.startswith(scope) else full
            with jax.named_scope(relative) if relative else nullcontext():
                results = self._equation(eqn, operands, path, full)
            if isinstance(form_of(eqn), WeightedMeanForm):
                self.weighted_means.append((results[0], operands[0], operands[1]))
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in opened.outvars]

    def _equation(
        self, eqn: Any, operands: list[jax.Array], path: str, scope: str
    ) -> Sequence[jax.Array]:
        name = eqn.primitive.name
        if (name in INLINED or name in REMAT) and self._has_edits(path):
            return self._call(eqn, operands, path, scope)
        if path in self.draws:
            draw, rows, count = self.draws[path], self.rows, self.count
            return jax.jit(lambda keys, rows: whole_batch_draw(eqn, keys, rows, draw, count))(
                operands[0], rows
            )
        if name in _CONTROL_FLOW and self._has_edits(path):
            return _CONTROL_FLOW[name](self, eqn, operands, path, scope)
        for position, variable in enumerate(eqn.invars):
            value = self.whole_values.get((path, position))
            if value is not None:
                operands[position] = self.values[value]
                assert (operands[position].shape, operands[position].dtype) == (
                    variable.aval.shape,
                    variable.aval.dtype,
                ), (path, position, operands[position], variable.aval)
        factors = {
            position: self.factors[path, position]
            for position in range(len(operands))
            if (path, position) in self.factors
        }
        if not factors:
            return _bind(eqn, operands)
        return jax.jit(
            lambda *arguments: tuple(
                _bind(
                    eqn,
                    [
                        times(leaf, factors.get(position, 1.0))
                        for position, leaf in enumerate(arguments)
                    ],
                )
            )
        )(*operands)

    def _has_edits(self, path: str) -> bool:
        """True if an equation inside of the one at a path is changed."""
        return any(
            key.startswith(f"{path}/") for key, _ in (*self.whole_values, *self.factors)
        ) or any(draw_path.startswith(f"{path}/") for draw_path in self.draws)

    def _call(
        self, eqn: Eqn, operands: list[jax.Array], path: str, scope: str
    ) -> Sequence[jax.Array]:
        """A call whose body is changed."""

        def body(*arguments: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(self.run(callee(eqn), arguments, f"{path}/", scope))

        if eqn.primitive.name in REMAT:
            return jax.checkpoint(
                body,
                policy=eqn.params.get("policy"),
                prevent_cse=eqn.params.get("prevent_cse", True),
            )(*operands)
        body.__name__ = body.__qualname__ = str(eqn.params.get("name", "body"))
        return jax.jit(body)(*operands)

    def _scan(
        self, eqn: Eqn, operands: list[jax.Array], path: str, scope: str
    ) -> Sequence[jax.Array]:
        params, (constants, carried) = eqn.params, scan_counts(eqn.params)
        fixed, initial = operands[:constants], operands[constants : constants + carried]

        def body(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[Any, Any]:
            results = self.run(params["jaxpr"], [*fixed, *carry, *slices], f"{path}/body/", scope)
            return tuple(results[:carried]), tuple(results[carried:])

        carry, stacked = jax.lax.scan(
            body,
            tuple(_strong(initial, eqn.invars[constants:])),
            tuple(operands[constants + carried :]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacked]

    def _while(
        self, eqn: Eqn, operands: list[jax.Array], path: str, scope: str
    ) -> Sequence[jax.Array]:
        params, cond = eqn.params, eqn.params["cond_nconsts"]
        body = cond + params["body_nconsts"]
        return jax.lax.while_loop(
            lambda state: self.run(
                params["cond_jaxpr"], [*operands[:cond], *state], f"{path}/cond/", scope
            )[0],
            lambda state: tuple(
                self.run(
                    params["body_jaxpr"], [*operands[cond:body], *state], f"{path}/body/", scope
                )
            ),
            tuple(_strong(operands[body:], eqn.invars[body:])),
        )

    def _cond(
        self, eqn: Eqn, operands: list[jax.Array], path: str, scope: str
    ) -> Sequence[jax.Array]:
        def branch(number: int, jaxpr: Jaxpr) -> Any:
            return lambda *arguments: tuple(
                self.run(jaxpr, arguments, f"{path}/branch{number}/", scope)
            )

        branches = [branch(*numbered) for numbered in enumerate(eqn.params["branches"])]
        return jax.jit(lambda index, *arguments: jax.lax.switch(index, branches, *arguments))(
            *operands
        )


#: Loops and branches, whose bodies are evaluated with changes.
_CONTROL_FLOW = {"scan": Evaluator._scan, "while": Evaluator._while, "cond": Evaluator._cond}


def _strong(values: Sequence[Any], variables: Sequence[Any]) -> list[jax.Array]:
    """Initial carries as arrays of a dtype that is not weak; literals are Python numbers."""
    return [typed(value, variable.aval) for value, variable in zip(values, variables, strict=False)]


def _bind(eqn: Eqn, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def times(leaf: jax.Array, factor: float) -> jax.Array:
    """A value times a number, in its own dtype; unchanged for 1."""
    return leaf if factor == 1.0 else leaf * jnp.asarray(factor, jnp.result_type(leaf))


def microbatch_aval(aval: Aval, value: WholeBatchValue, count: int) -> jax.ShapeDtypeStruct:
    """The slice of a whole-batch value that a microbatch receives, abstract."""
    shape = tuple(aval.shape)
    if value.dim is not None:
        shape = (*shape[: value.dim], shape[value.dim] // count, *shape[value.dim + 1 :])
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def strided_by_rows(leaf: jax.Array, value: WholeBatchValue, count: int) -> jax.Array:
    """A value reordered so that every `count`-th element along the dim of rows forms a microbatch;
    rows of several elements stay together.
    """
    if value.dim is None or value.inner == 1:
        return leaf
    before, after = leaf.shape[: value.dim], leaf.shape[value.dim + 1 :]
    rows = leaf.reshape(*before, -1, count, value.inner, *after)
    return jnp.swapaxes(rows, value.dim + 1, value.dim + 2).reshape(leaf.shape)


def value_numbers(program: Program, values: Sequence[WholeBatchValue]) -> list[int]:
    """The numbers of values in the program of the whole batch."""
    results = {
        (equation.path, position): number
        for equation in program.equations
        for position, number in enumerate(equation.outputs)
    }
    return [results[value.origin] for value in values]


# --------------------------------------------------------------------------------------------------
# The loss of a microbatch as its share of the loss of the whole batch.


@dataclass(frozen=True, kw_only=True, eq=False)
class Contribution:
    """The loss of a microbatch as its contribution to that of the whole batch.

    Attributes:
        traced: the loss of a microbatch, over the leaves of (params, state, batch with the
            whole-batch values added).
        prologue: (model state, batch) -> batch with the whole-batch values added.
        dims: for each array of that batch, by path, its dim of rows.
        shardings: of each array of that batch.
        finish: ((loss, (metrics, state)), gradients), averaged over the microbatches -> the same
            for the whole batch.
        whole_value_layouts: of the whole-batch values.
        fixed_state: positions of the arrays of model state that every microbatch reads as they were
            before the step; the others are carried from microbatch to microbatch.
        row_dims: for each metric, its dim of rows; None for one that is averaged.
    """

    traced: LossJaxpr
    prologue: Callable[[Tree, Tree], Tree]
    dims: BatchDims
    shardings: Tree
    finish: Callable[[Tree, Tree], tuple[Tree, Tree]]
    whole_value_layouts: tuple[Layout, ...] = ()
    fixed_state: frozenset[int] = frozenset()
    row_dims: tuple[RowDim | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WholeBatch:
    """The program of the whole batch, and the kinds of its inputs.

    Attributes:
        traced: the loss of the whole batch.
        rows: its dependence on the rows, if proven.
        inputs, names: see `shardlib.tracing.rows`.
        size: number of rows.
    """

    traced: LossJaxpr
    rows: Rows
    inputs: LossInputs
    names: ResultNames
    size: int


@dataclass(frozen=True, kw_only=True)
class TracedMicrobatch:
    """The traced loss of a microbatch.

    Attributes:
        dims: for each array of the batch, by path, its dim of rows.
        shardings: of each array of the batch.
    """

    traced: LossJaxpr
    dims: BatchDims
    shardings: Tree


def unchanged(traced: LossJaxpr, dims: BatchDims, shardings: Tree) -> Contribution:
    """The contribution of a loss whose mean over microbatches is that of the whole batch."""
    return Contribution(
        traced=traced,
        prologue=lambda state, batch: batch,
        dims=dims,
        shardings=shardings,
        finish=lambda results, gradients: (results, gradients),
    )


# --------------------------------------------------------------------------------------------------
# Edits of the program of a microbatch, and its evaluation with them.
#
# Operands are multiplied by powers of the number of microbatches, or replaced by whole-batch
# values; every equation keeps its path.


@dataclass(frozen=True, kw_only=True, eq=False)
class MicrobatchEdits:
    """Changes to the program of a microbatch.

    Attributes:
        count: number of microbatches.
        factors: factors of operands.
        whole_values: operands that are replaced by whole-batch values.
        results: for each result a factor, a whole-batch value that replaces it, or
            `WEIGHTED_MEAN`; no entry for no change.
        draws: by path, draws at the positions of the rows in the whole batch.
    """

    count: int
    factors: Mapping[OperandKey, float] = field(default_factory=dict)
    whole_values: Mapping[OperandKey, WholeBatchValue] = field(default_factory=dict)
    results: tuple[float | WholeBatchValue | str, ...] = ()
    draws: Mapping[str, Draw] = field(default_factory=dict)

    @staticmethod
    def of(
        proof: Proof, count: int, whole: WholeBatch, draws: Mapping[str, Draw]
    ) -> MicrobatchEdits:
        """The changes needed for a loss whose terms are sums over rows."""
        analysis = proof.analysis
        assert analysis is not None
        states = len(whole.names.states)
        results = [_result(kind, count) for kind in proof.kinds[: len(proof.kinds) - states]] + [
            1.0
        ] * states
        return MicrobatchEdits(
            count=count,
            factors={
                operand: _factor(exponent, count) for operand, exponent in analysis.scales.items()
            },
            whole_values=dict(analysis.whole_values),
            results=tuple(results),
            draws=draws,
        )

    def __bool__(self) -> bool:
        return bool(
            self.factors
            or self.whole_values
            or self.draws
            or any(result != 1.0 for result in self.results)
        )

    @property
    def values(self) -> tuple[WholeBatchValue, ...]:
        """Unique whole-batch values passed to every microbatch."""
        return tuple(
            dict.fromkeys(
                (
                    *self.whole_values.values(),
                    *(result for result in self.results if isinstance(result, WholeBatchValue)),
                )
            )
        )

    def contribution(
        self, plan: Plan, whole: WholeBatch, microbatch: TracedMicrobatch, mesh: Mesh | AbstractMesh
    ) -> Contribution:
        """The contribution of the changed loss."""
        original, dims, shardings = microbatch.traced, microbatch.dims, microbatch.shardings
        closed = original.closed_jaxpr
        means = sum(result == WEIGHTED_MEAN for result in self.results)
        program = flatten(whole.traced.closed_jaxpr, remat=True)
        numbers = value_numbers(program, self.values)
        avals = [
            microbatch_aval(program.avals[number], value, self.count)
            for number, value in zip(numbers, self.values, strict=True)
        ]
        value_dims = [value.dim for value in self.values]
        if self.draws:
            avals.append(jax.ShapeDtypeStruct((whole.size // self.count,), jnp.uint32))
            value_dims.append(0)

        def run(arguments: list[Any], passed: list[Any]) -> Any:
            values = dict(zip(self.values, passed, strict=False))
            evaluator = Evaluator(
                factors=self.factors,
                whole_values=self.whole_values,
                values=values,
                weighted_means=[],
                draws=self.draws,
                rows=passed[-1] if self.draws else None,
                count=self.count,
            )
            outputs, weights = self._results(evaluator.run(closed, arguments, "", ""), evaluator)
            loss, (metrics, state) = jax.tree.unflatten(original.out_tree, outputs)
            return loss, ({"metrics": metrics, "weights": weights} if means else metrics, state)

        avals_in = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.in_avals]
        with no_mesh():
            retraced, shapes = jax.make_jaxpr(run, return_shape=True)(avals_in, avals)
        traced = LossJaxpr(closed_jaxpr=retraced, out_tree=jax.tree.structure(shapes))
        finish = self.finisher(original, means)
        if not avals:
            return Contribution(
                traced=traced,
                prologue=lambda state, batch: batch,
                dims=dims,
                shardings=shardings,
                finish=finish,
            )
        batch_dims = {f"batch.0{path.removeprefix('batch')}": dim for path, dim in dims.items()}
        added_dims = {f"batch.1.{index}": dim for index, dim in enumerate(value_dims)}
        rows = _row_axes(plan, dims)
        layouts = tuple(
            Layout(*(rows if dim == row_dim else () for dim in range(len(aval.shape))))
            for row_dim, aval in zip(value_dims, avals, strict=True)
        )
        whole_shardings = [named_sharding(mesh, layout) for layout in layouts]
        return Contribution(
            traced=traced,
            prologue=lambda state, batch: (
                batch,
                _whole_batch_values(program, numbers, self, whole, state, batch, whole_shardings),
            ),
            dims={**batch_dims, **added_dims},
            shardings=(shardings, whole_shardings),
            finish=finish,
            whole_value_layouts=layouts,
        )

    def _results(
        self, outputs: list[jax.Array], evaluator: Evaluator
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Results of a microbatch, and the weights of those that are weighted means."""
        values, weights = list[Any](), list[Any]()
        results = self.results or (1.0,) * len(outputs)
        for output, result in zip(outputs, results, strict=True):
            if result == WEIGHTED_MEAN:
                total, weight = next(
                    (total, weight)
                    for product, total, weight in evaluator.weighted_means
                    if product is output
                )
                values.append(total)
                weights.append(weight.astype(total.dtype))
            elif isinstance(result, WholeBatchValue):
                values.append(evaluator.values[result])
            else:
                assert isinstance(result, float)
                values.append(times(output, result))
        return values, weights

    def finisher(self, loss: LossJaxpr, means: int) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
        """The function `Contribution.finish`: it divides weighted means, and casts counts and
        booleans, which are floats after averaging over microbatches, back to their dtypes.

        Args:
            loss: that of a microbatch.
            means: number of weighted means.
        """
        avals = list(loss.closed_jaxpr.out_avals)

        def finish(results: Tree, gradients: Tree) -> tuple[Tree, Tree]:
            loss, (metrics, state) = results
            weights = list(metrics["weights"]) if means else []
            metrics = metrics["metrics"] if means else metrics
            leaves, structure = jax.tree.flatten((loss, metrics))
            divisor = None
            for index, result in enumerate(self.results[: len(leaves)]):
                if result == WEIGHTED_MEAN:
                    weight = weights.pop(0)
                    divisor = weight if index == 0 else divisor
                    leaves[index] = leaves[index] / weight.astype(leaves[index].dtype)
                elif leaves[index].dtype != avals[index].dtype and not jnp.issubdtype(
                    avals[index].dtype, jnp.inexact
                ):
                    leaves[index] = jnp.round(leaves[index]).astype(avals[index].dtype)
            loss, metrics = structure.unflatten(leaves)
            if divisor is not None:
                gradients = jax.tree.map(
                    lambda gradient: (gradient / divisor.astype(gradient.dtype)).astype(
                        gradient.dtype
                    ),
                    gradients,
                )
            return (loss, (metrics, state)), gradients

        return finish


def _factor(exponent: Fraction, count: int) -> float:
    return float(count) ** float(exponent)


def _result(kind: Kind, count: int) -> float | WholeBatchValue | str:
    """The change of a result that makes its mean over microbatches that of the whole batch."""
    if kind.declared_mean:
        return WEIGHTED_MEAN
    if kind.family == "data":
        assert kind.origin is not None
        return WholeBatchValue(origin=kind.origin)
    assert kind.family in ("free", "sum", "row") and kind.power is not None, kind
    return _factor(kind.power + (1 if kind.family == "sum" else 0), count)


def _row_axes(plan: Plan, dims: BatchDims) -> tuple[str, ...]:
    """The mesh axes that shard the rows of the batch."""
    layouts = dict(plan.batch_layouts)
    axes = [
        tuple(layouts[path])[dim]
        for path, dim in dims.items()
        if isinstance(dim, int) and path in layouts and dim < len(tuple(layouts[path]))
    ]
    return axes[0] if axes else ()


def _whole_batch_values(
    program: Program,
    numbers: Sequence[int],
    edits: MicrobatchEdits,
    whole: WholeBatch,
    state: Tree,
    batch: Tree,
    shardings: Sequence[NamedSharding],
) -> list[jax.Array]:
    """Computes the whole-batch values, and the positions of the batch's rows if a microbatch draws
    random numbers. None of them depends on parameters, so zeros are passed for these where a loop
    computes other values as well.
    """
    start = whole.inputs.parameters
    leaves = [*jax.tree.leaves(state)[: whole.inputs.states], *jax.tree.leaves(batch)]
    equations, reads = needed(program.equations, numbers)
    env = dict(program.constants)
    for index, number in enumerate(program.inputs):
        if number in reads or number in numbers:
            aval = program.avals[number]
            env[number] = (
                leaves[index - start] if index >= start else jnp.zeros(aval.shape, aval.dtype)
            )
    evaluate_equations(
        equations,
        env,
        Walk(
            run=lambda equation, operands: (
                list(operands) if equation.name == "sharding_constraint" else None
            )
        ),
    )
    results = [
        strided_by_rows(jax.lax.stop_gradient(env[number]), value, edits.count)
        for number, value in zip(numbers, edits.values, strict=True)
    ]
    if edits.draws:
        results.append(jnp.arange(whole.size, dtype=jnp.uint32))
    return [
        jax.lax.with_sharding_constraint(leaf, sharding)
        for leaf, sharding in zip(results, shardings, strict=True)
    ]


# --------------------------------------------------------------------------------------------------
# The contribution of a microbatch to the loss of the whole batch.
#
# The loss of a microbatch is changed so that the mean of its results, and of its gradients, over
# all microbatches is that of the whole batch. A mean over rows needs no change. Other losses have
# four (located by `shardlib.tracing.rows`):
#
# - values of the whole batch (the sum of a mask) are computed once (`Contribution.prologue`), and
#   passed to every microbatch along with its rows;
# - where terms that scale differently with the number of rows are added, each is multiplied by the
#   power of the number of microbatches that makes it a mean over them;
# - so is every result;
# - random numbers for the rows are drawn at the positions that these have in the whole batch, from
#   the same keys, and every microbatch starts from the model state before the step.
#
# A `shardlib.WeightedMean` is left as its two sums, which are divided after the last microbatch
# (`Contribution.finish`).


def whole_batch(
    traced: LossJaxpr, rows: Rows, model: Model, batch: Tree, dims: BatchDims
) -> WholeBatch:
    """The loss of the whole batch."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    row_dims = tuple(
        dim if isinstance(dim := dims[batch_path(path)], int) else None for path, _ in leaves
    )
    size = next(
        (
            leaf.shape[dim]
            for (_, leaf), dim in zip(leaves, row_dims, strict=True)
            if dim is not None
        ),
        1,
    )
    inputs = LossInputs(
        parameters=len(jax.tree.leaves(model.params)),
        states=len(jax.tree.leaves(model.state)),
        dims=row_dims,
    )
    return WholeBatch(
        traced=traced,
        rows=rows,
        inputs=inputs,
        names=result_names(jax.tree.unflatten(traced.out_tree, range(traced.out_tree.num_leaves))),
        size=size,
    )


def contribution(
    plan: Plan, whole: WholeBatch, microbatch: TracedMicrobatch, mesh: Mesh | AbstractMesh
) -> Contribution:
    """Computes the contribution of a microbatch."""
    if plan.microbatches == 1:
        return unchanged(microbatch.traced, microbatch.dims, microbatch.shardings)
    if whole.rows.asserted:
        return _asserted(plan, whole, microbatch, mesh)
    _require_splits(plan, whole.rows, "a plan with one microbatch")
    require_no_row_results(whole.rows, plan.microbatches, plan.mesh["stage"])
    try:
        proof = compare(
            whole.traced.closed_jaxpr,
            microbatch.traced.closed_jaxpr,
            whole.inputs,
            whole.names,
            (whole.size, whole.size // plan.microbatches),
        )
    except DifferentPrograms as error:
        raise TracingError(
            "the loss computes different operations on a microbatch than on the whole batch\nTry:"
            f" microbatches=1, or a number other than {plan.microbatches}"
        ) from error
    _require_splits(plan, proof.rows, "another number of microbatches, or one")
    assert proof.programs is not None
    draw_by_path = draws(*proof.programs, (whole.size, whole.size // plan.microbatches))
    edits = MicrobatchEdits.of(
        proof,
        plan.microbatches,
        whole,
        {path: draw for path, draw in draw_by_path.items() if draw is not None},
    )
    microbatch = replace(microbatch, dims=with_same_keys(microbatch.dims))
    contributed = (
        edits.contribution(plan, whole, microbatch, mesh)
        if edits
        else replace(
            unchanged(microbatch.traced, microbatch.dims, microbatch.shardings),
            finish=edits.finisher(microbatch.traced, 0),
        )
    )
    return replace(
        contributed,
        fixed_state=frozenset(range(whole.inputs.states)),
        row_dims=tuple(metric.rows for _, metric in proof.rows.metrics),
    )


def _require_splits(plan: Plan, rows: Rows, hint: str) -> None:
    """Raises if microbatches would change the numbers of a loss."""
    if not rows.splits:
        raise_all(
            PinError,
            f"{plan.microbatches} microbatches would change the numbers: rows of the batch are"
            " combined other than by a final sum or mean",
            list(rows.reasons),
            hint=hint,
        )


def _asserted(
    plan: Plan, whole: WholeBatch, microbatch: TracedMicrobatch, mesh: Mesh | AbstractMesh
) -> Contribution:
    """The contribution of a microbatch to a loss that the user asserts to be a mean over rows: it
    draws the whole batch's numbers for its rows, or, if their positions are unknown, from its own
    keys.
    """
    without_draws = unchanged(microbatch.traced, microbatch.dims, microbatch.shardings)
    sizes = (whole.size, whole.size // plan.microbatches)
    programs = [flatten(loss.traced.closed_jaxpr) for loss in (whole, microbatch)]
    try:
        draw_by_path = draws(programs[0], programs[1], sizes)
    except DifferentPrograms:
        return without_draws
    draws_by_row = {path: draw for path, draw in draw_by_path.items() if draw is not None}
    if len(draws_by_row) < len(draw_by_path):
        return without_draws
    microbatch = replace(microbatch, dims=with_same_keys(microbatch.dims))
    edits = MicrobatchEdits(count=plan.microbatches, draws=draws_by_row)
    parameters = whole.inputs.parameters
    states = microbatch.traced.closed_jaxpr.in_avals[parameters : parameters + whole.inputs.states]
    return replace(
        replace(edits.contribution(plan, whole, microbatch, mesh), finish=without_draws.finish)
        if draws_by_row
        else replace(without_draws, dims=microbatch.dims),
        fixed_state=frozenset(
            index for index, aval in enumerate(states) if is_key(aval) or aval.dtype == jnp.uint32
        ),
    )
