"""Layouts of an optimizer's matrix updates.

An elementwise update (AdamW) runs on each device's shards. One that multiplies whole matrices
(Muon, Shampoo, SOAP, spectral clipping) does not: as it is written, the partitioner shards its
products, and gathers an operand or reduces partial sums at every one of them. Here it gets whole
matrices, by the plan's `optimizer_layout`:

    sharded    as it is written
    stacked    matrices with the same update are stacked; one all-to-all per sharded dim gives each
               device whole matrices of the stack, which it updates; the reverse returns shards
    gathered   every device gathers all matrices, and updates all of them

    shards [n, rows/fsdp, columns] --all-to-all--> [n/fsdp, rows, columns]  update  --back--> shards

Everything before and after, such as momentum and weight decay, stays elementwise on shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees import Tree
from shardlib.errors import TracingError
from shardlib.jax_types import Value
from shardlib.matrix_updates import Axes, UpdateGroup, update_groups
from shardlib.planner.plan import Plan
from shardlib.tracing.program import Equation, Program
from shardlib.tracing.rewriting import Walk, evaluate_equations
from shardlib.tracing.trace import TracedUpdate, trace_matrix_updates, with_paths
from shardlib.tracing.updates import Span

#: A span, and the same of one matrix (`TracedUpdate.spans`).
Pair = tuple[Span, Span]


def with_layout(
    optimizer: optax.GradientTransformation, plan: Plan, params: Tree, state: Tree
) -> optax.GradientTransformation:
    """The optimizer with its matrix updates in the layout of the plan; it computes the same.

    Args:
        params: the trained parameters, abstract, in the dtypes of the update.
        state: the shardings of their gradients, state and updates.

    Raises:
        TracingError: if the update cannot be traced, and the plan has no finding that says so.
    """
    untraced = any(finding.code == "optimizer-untraced" for finding in plan.findings)
    if untraced or plan.matrix_layout == "sharded":
        return optimizer
    try:
        traced = trace_matrix_updates(optimizer, params)
    except Exception as error:  # whatever the user's update raises without numbers
        raise TracingError(
            "the optimizer's update cannot be traced with abstract gradients"
            f" ({type(error).__name__}), and the plan does not say so\nTry: a new plan with this"
            " optimizer, or optimizer_layout='sharded'"
        ) from error
    groups = (
        [] if traced is None else _groups(traced, dict(with_paths(state, "")), plan.matrix_layout)
    )
    if traced is None or not groups:
        return optimizer

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> Tree:
        loss = jnp.asarray(extra["value"], jnp.float32)
        arguments = jax.tree.leaves((updates, state, params, loss))
        return jax.tree.unflatten(traced.out_tree, _evaluate(traced.program, groups, arguments))

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _groups(
    traced: TracedUpdate, shardings: Mapping[str, NamedSharding], layout: str
) -> list[_Group]:
    if not traced.spans:
        return []
    mesh = next(iter(shardings.values())).mesh
    specs = {
        path: [(dim,) if isinstance(dim, str) else tuple(dim or ()) for dim in sharding.spec]
        for path, sharding in shardings.items()
    }
    pairs = {span.path: (span, unit) for span, unit in traced.spans}
    return [
        _Group(
            group=group,
            pairs=tuple(pairs[update.path] for update in group.updates),
            program=traced.program,
            unit=traced.unit,
            mesh=mesh,
        )
        for group in update_groups(traced.facts, specs, mesh.shape, layout)
        if not group.is_partitioned
    ]


def _evaluate(
    program: Program, groups: Sequence[_Group], arguments: Sequence[Value]
) -> list[Value]:
    """The results of the update's program, its matrix updates by groups as soon as what they read
    is computed.
    """
    env: dict[int, Value] = {
        **program.constants,
        **dict(zip(program.inputs, arguments, strict=True)),
    }
    grouped = {
        equation.path for group in groups for span, _ in group.pairs for equation in span.equations
    }
    equations = [equation for equation in program.equations if equation.path not in grouped]
    while equations or groups:
        later: list[Equation] = []
        for equation in equations:
            if all(number in env for number in equation.inputs):
                evaluate_equations([equation], env, Walk())
            else:
                later.append(equation)
        split = [group.split(env) for group in groups]
        for ready, _ in split:
            if ready is not None:
                ready.run(env)
        equations, groups = later, [waiting for _, waiting in split if waiting is not None]
    return [env[number] for number in program.outputs]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Group:
    """Matrix updates that run together.

    Attributes:
        pairs: for every parameter of the group, its span, and the span of one of its matrices.
        program: the whole update, which has the first spans.
        unit: the update of one matrix per parameter, which has the second spans.
    """

    group: UpdateGroup
    pairs: tuple[Pair, ...]
    program: Program
    unit: Program
    mesh: Mesh | AbstractMesh

    def split(self, env: Mapping[int, Value]) -> tuple[_Group | None, _Group | None]:
        """The parameters whose inputs are computed, and the others."""
        ready = [all(number in env for number in span.inputs) for span, _ in self.pairs]
        indices = [[i for i, flag in enumerate(ready) if flag == value] for value in (True, False)]
        computed, others = (
            replace(
                self,
                group=replace(self.group, updates=tuple(self.group.updates[i] for i in subset)),
                pairs=tuple(self.pairs[i] for i in subset),
            )
            if subset
            else None
            for subset in indices
        )
        return computed, others

    def run(self, env: dict[int, Value]) -> None:
        """Reads the inputs of every span from `env`, and adds the outputs to it."""
        inputs = [[env[number] for number in span.inputs] for span, _ in self.pairs]
        shared = self._shared()
        is_parameter = [
            [self._is_parameter(span, number) for number in (*span.inputs, *span.outputs)]
            for span, _ in self.pairs
        ]
        sharded = PartitionSpec(*(axes or None for axes in self.group.spec))
        count = len(self.pairs[0][0].inputs)
        specs = [[sharded if flag else PartitionSpec() for flag in flags] for flags in is_parameter]
        results = jax.shard_map(
            lambda arrays: self._local(arrays, shared, is_parameter[0]),
            mesh=self.mesh,
            in_specs=([of_span[:count] for of_span in specs],),
            out_specs=[of_span[count:] for of_span in specs],
            check_vma=False,
        )(inputs)
        for (span, _), arrays in zip(self.pairs, results, strict=True):
            env.update(zip(span.outputs, arrays, strict=True))

    def _is_parameter(self, span: Span, number: int) -> bool:
        """Whether a value has the shape of the parameter, and so its sharding."""
        return tuple(self.program.avals[number].shape) == span.facts.shape

    def _shared(self) -> list[bool]:
        """For each input, whether all matrices read the same value."""
        first = self.pairs[0][0]
        return [
            all(span.inputs[i] == first.inputs[i] for span, _ in self.pairs)
            and not self._is_parameter(first, first.inputs[i])
            and not first.stacks[i]
            for i in range(len(first.inputs))
        ]

    def _local(
        self, arrays: list[list[Value]], shared: Sequence[bool], is_parameter: Sequence[bool]
    ) -> list[list[Value]]:
        """The computation of one device: shards of every span's inputs -> shards of its outputs."""
        first, unit = self.pairs[0]
        counts, padding = self.group.counts(), self.group.padded - self.group.matrices

        def stacked(i: int) -> Value:
            rows = jnp.concatenate(
                [
                    self._as_stack(span, i, values[i], n, is_parameter[i])
                    for (span, _), values, n in zip(self.pairs, arrays, counts, strict=True)
                ]
            )
            if padding:  # the first matrix again: zeros could become NaN
                rows = jnp.concatenate([rows, *[rows[:1]] * padding])
            return self._whole(rows) if is_parameter[i] else self._own_matrices(rows)

        inputs = [arrays[0][i] if shared[i] else stacked(i) for i in range(len(first.inputs))]
        axes = [None if flag else 0 for flag in shared]
        results = jax.vmap(lambda *values: self._unit(unit, values), in_axes=axes)(*inputs)
        rows = [
            self._shards(value) if flag else self._all_matrices(value)
            for value, flag in zip(results, is_parameter[len(first.inputs) :], strict=True)
        ]
        outputs, start = list[list[Value]](), 0
        for (span, _), n in zip(self.pairs, counts, strict=True):
            outputs.append(
                [
                    self._from_stack(span, i, value[start : start + n], flag)
                    for i, (value, flag) in enumerate(
                        zip(rows, is_parameter[len(first.inputs) :], strict=True)
                    )
                ]
            )
            start += n
        return outputs

    def _as_stack(self, span: Span, i: int, array: Value, n: int, is_parameter: bool) -> Value:
        """A device's shard of an input as [its matrices, ...]."""
        dims = span.stacks[i]
        if not dims:
            return jnp.broadcast_to(array, (n, *array.shape))
        array = jnp.moveaxis(array, dims, range(len(dims)))
        if not is_parameter:
            for position, dim in enumerate(self.group.stack):
                array = self._slice(array, self.group.spec[dim], position)
        return array.reshape(n, *array.shape[len(dims) :])

    def _from_stack(self, span: Span, i: int, rows: Value, is_parameter: bool) -> Value:
        """A device's shard of an output from [its matrices, ...]."""
        dims = span.stacks[len(span.inputs) + i]
        if not dims:
            return rows[0]
        shape = self.program.avals[span.outputs[i]].shape
        sizes = [
            shape[dim] // self.group.ways(self.group.spec[of])
            for dim, of in zip(dims, self.group.stack, strict=True)
        ]
        array = rows.reshape(*sizes, *rows.shape[1:])
        if not is_parameter:
            for position, dim in enumerate(self.group.stack):
                array = self._gather(array, self.group.spec[dim], position)
        return jnp.moveaxis(array, range(len(dims)), dims)

    def _whole(self, rows: Value) -> Value:
        """Whole matrices from shards of all of them."""
        for dim, axes in self.group.exchanged:
            if self.group.layout == "gathered":
                rows = self._gather(rows, axes, dim + 1)
            else:
                rows = jax.lax.all_to_all(rows, axes, split_axis=0, concat_axis=dim + 1, tiled=True)
        return (
            rows if self.group.layout == "gathered" else self._slice(rows, self.group.replicated, 0)
        )

    def _shards(self, rows: Value) -> Value:
        """The reverse of `_whole`."""
        if self.group.layout != "gathered":
            rows = self._gather(rows, self.group.replicated, 0)
        for dim, axes in reversed(self.group.exchanged):
            if self.group.layout == "gathered":
                rows = self._slice(rows, axes, dim + 1)
            else:
                rows = jax.lax.all_to_all(rows, axes, split_axis=dim + 1, concat_axis=0, tiled=True)
        return rows

    def _own_matrices(self, rows: Value) -> Value:
        """This device's matrices of an array that every device has whole."""
        for axes in self.group.parts:
            rows = self._slice(rows, axes, 0)
        return rows

    def _all_matrices(self, rows: Value) -> Value:
        """The reverse of `_own_matrices`."""
        for axes in reversed(self.group.parts):
            rows = self._gather(rows, axes, 0)
        return rows

    def _slice(self, array: Value, axes: Axes, dim: int) -> Value:
        if not axes:
            return array
        size = array.shape[dim] // self.group.ways(axes)
        start = jax.lax.axis_index(axes) * size
        return jax.lax.dynamic_slice_in_dim(array, start, size, dim)

    def _gather(self, array: Value, axes: Axes, dim: int) -> Value:
        return jax.lax.all_gather(array, axes, axis=dim, tiled=True) if axes else array

    def _unit(self, unit: Span, values: Sequence[Value]) -> list[Value]:
        """The update of one matrix, without the dims of stacks."""
        env: dict[int, Value] = dict(self.unit.constants)
        for number, value in zip(unit.inputs, values, strict=True):
            env[number] = jnp.reshape(value, self.unit.avals[number].shape)
        evaluate_equations(unit.equations, env, Walk())
        first = self.pairs[0][0]
        return [
            env[number].reshape(
                [size for dim, size in enumerate(env[number].shape) if dim not in dims]
            )
            for number, dims in zip(unit.outputs, first.stacks[len(first.inputs) :], strict=True)
        ]
