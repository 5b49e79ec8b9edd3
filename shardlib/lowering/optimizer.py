"""Layouts of an optimizer's matrix updates.

An elementwise update (AdamW) runs on each device's shards. One that multiplies whole matrices
(Muon, Shampoo, SOAP, spectral clipping) does not: as it is written, the partitioner shards its
products, and gathers an operand or reduces partial sums at every one of them. Here it gets whole
matrices, by the plan's `optimizer_layout`:

    sharded    as it is written
    owned      every matrix has one device that updates it: one all-to-all brings shards of all
               matrices to their owners, and another returns the updated ones
    gathered   every device gathers all matrices, and updates all of them

    shards [owners, elements/fsdp] --all-to-all--> [fsdp, elements/fsdp]  update  --back--> shards

Everything before and after, such as momentum and weight decay, stays elementwise on shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from shardlib.annotation.trees import Tree
from shardlib.errors import TracingError
from shardlib.jax_types import Value
from shardlib.matrix_updates import Axes, UpdateGroup, buffers, dealt, update_groups
from shardlib.planner.plan import Plan
from shardlib.tracing.program import Equation
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
    exchange = (
        _exchange(traced, dict(with_paths(state, "")), plan.matrix_layout)
        if traced is not None and traced.spans
        else None
    )
    if traced is None or exchange is None:
        return optimizer

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> Tree:
        loss = jnp.asarray(extra["value"], jnp.float32)
        arguments = jax.tree.leaves((updates, state, params, loss))
        return jax.tree.unflatten(traced.out_tree, _evaluate(exchange, arguments))

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _exchange(
    traced: TracedUpdate, shardings: Mapping[str, NamedSharding], layout: str
) -> _Exchange | None:
    mesh = next(iter(shardings.values())).mesh
    specs = {
        path: [(dim,) if isinstance(dim, str) else tuple(dim or ()) for dim in sharding.spec]
        for path, sharding in shardings.items()
    }
    listed = update_groups(traced.facts, specs, mesh.shape, layout)
    groups = tuple(group for group in listed if group.layout != "sharded")
    pairs = {span.path: (span, unit) for span, unit in traced.spans}
    return _Exchange(traced=traced, pairs=pairs, groups=groups, mesh=mesh) if groups else None


def _evaluate(exchange: _Exchange, arguments: Sequence[Value]) -> list[Value]:
    """The results of the update's program, its matrix updates as soon as what they read is
    computed.
    """
    program = exchange.traced.program
    env: dict[int, Value] = {
        **program.constants,
        **dict(zip(program.inputs, arguments, strict=True)),
    }
    waiting = {span.path: span for group in exchange.groups for span in exchange.spans(group)}
    inside = {equation.path for span in waiting.values() for equation in span.equations}
    equations = [equation for equation in program.equations if equation.path not in inside]
    while equations or waiting:
        later: list[Equation] = []
        for equation in equations:
            if all(number in env for number in equation.inputs):
                evaluate_equations([equation], env, Walk())
            else:
                later.append(equation)
        ready = {path for path, span in waiting.items() if all(n in env for n in span.inputs)}
        if ready:
            exchange.of(ready).run(env)
        equations, waiting = later, {p: span for p, span in waiting.items() if p not in ready}
    return [env[number] for number in program.outputs]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Exchange:
    """Matrix updates that run together.

    Attributes:
        pairs: the span of every parameter, and the span of one of its matrices.
    """

    traced: TracedUpdate
    pairs: Mapping[str, Pair]
    groups: tuple[UpdateGroup, ...]
    mesh: Mesh | AbstractMesh

    def of(self, paths: set[str]) -> _Exchange:
        """The exchange of some of the parameters."""
        chosen = [tuple(u for u in group.updates if u.path in paths) for group in self.groups]
        if chosen == [group.updates for group in self.groups]:
            return self
        groups = [
            replace(group, updates=updates)
            for group, updates in zip(self.groups, chosen, strict=True)
            if updates
        ]
        return replace(self, groups=dealt(groups))

    def spans(self, group: UpdateGroup) -> list[Span]:
        """The span of each parameter of a group."""
        return [self.pairs[update.path][0] for update in group.updates]

    def run(self, env: dict[int, Value]) -> None:
        """Reads the inputs of every span from `env`, and adds the outputs to it."""
        computed = [_Group(exchange=self, group=group) for group in self.groups]

        def local(arrays: list[list[list[Value]]]) -> list[list[list[Value]]]:
            rows = [group.rows(values) for group, values in zip(computed, arrays, strict=True)]
            owned = _received(self.groups, rows)
            results = [
                group.results(values, matrices)
                for group, values, matrices in zip(computed, rows, owned, strict=True)
            ]
            returned = _returned(self.groups, results)
            return [group.arrays(values) for group, values in zip(computed, returned, strict=True)]

        results = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=([group.specs("reads") for group in computed],),
            out_specs=[group.specs("writes") for group in computed],
            check_vma=False,
        )([[[env[n] for n in span.inputs] for span in group.spans] for group in computed])
        for group, of_spans in zip(computed, results, strict=True):
            for span, arrays in zip(group.spans, of_spans, strict=True):
                env.update(zip(span.outputs, arrays, strict=True))


# --------------------------------------------------------------------------------------------------
# Shards of all groups to the owners of their matrices and back, a buffer at a time.
#
#     rows of a group      [its matrices, *shard]
#     a device's matrices  [devices with shards, matrices, *shard]


def _received(
    groups: Sequence[UpdateGroup], rows: Sequence[Mapping[int, Value]]
) -> list[dict[int, Value]]:
    """This device's matrices."""
    received: list[dict[int, Value]] = [{} for _ in groups]
    for buffer in buffers(groups, [group.shards_read for group in groups]):
        arrays = [rows[number][i] for number, i in buffer.members]
        starts = np.cumsum([0, *map(len, arrays[:-1])])
        sources = np.zeros((*buffer.owned[0].shape[:2], buffer.size + 1), int)
        for start, owned, slots in zip(starts, buffer.owned, buffer.slots, strict=True):
            np.put_along_axis(sources, slots, start + owned, axis=2)
        sources = _of_device(sources[..., :-1], buffer.replicated)
        sent = _taken(jnp.concatenate(arrays), sources, 0)
        if buffer.exchanged and groups[0].layout == "owned":
            sent = jax.lax.all_to_all(sent, buffer.exchanged, 0, 0, tiled=True)
        elif buffer.exchanged:
            sent = jax.lax.all_gather(sent, buffer.exchanged, axis=0, tiled=True)
        for (number, i), slots in zip(buffer.members, buffer.slots, strict=True):
            positions = _of_device(slots, buffer.replicated, buffer.exchanged)
            received[number][i] = _taken(sent, positions, 1)
    return received


def _returned(
    groups: Sequence[UpdateGroup], results: Sequence[Mapping[int, Value]]
) -> list[dict[int, Value]]:
    """Rows of every group from the results of all devices."""
    returned: list[dict[int, Value]] = [{} for _ in groups]
    for buffer in buffers(groups, [group.written for group in groups]):
        arrays = [results[number][i] for number, i in buffer.members]
        sources = np.concatenate(buffer.slots, axis=2).argsort(axis=2, kind="stable")
        sources = _of_device(sources[..., : buffer.size], buffer.replicated, buffer.exchanged)
        sent = _taken(jnp.concatenate(arrays, axis=1), sources, 1)
        if groups[0].layout == "gathered":
            sent = jnp.asarray(_of_device(sent, buffer.exchanged))[None]
        elif buffer.exchanged:
            sent = jax.lax.all_to_all(sent, buffer.exchanged, 0, 0, tiled=True)
        sent = jax.lax.all_gather(sent, buffer.replicated) if buffer.replicated else sent[None]
        sent = sent.reshape(-1, *sent.shape[3:])
        devices = np.arange(len(sent) // buffer.size).reshape(*buffer.owned[0].shape[:2], 1)
        for (number, i), owned, slots in zip(
            buffer.members, buffer.owned, buffer.slots, strict=True
        ):
            positions = (devices * buffer.size + slots)[owned >= 0]
            returned[number][i] = _taken(sent, positions[owned[owned >= 0].argsort()], 0)
    return returned


def _of_device(values: Value | NDArray[Any], *axes: Axes) -> Value | NDArray[Any]:
    """This device's part of values whose dims are groups of devices, or have size 1 for all; an
    array of NumPy where it is the same on every device.
    """
    for group in axes:
        if isinstance(values, np.ndarray) and (values == values[:1]).all():
            values = values[0]
        else:
            index = jax.lax.axis_index(group) if len(values) > 1 else 0
            values = jax.lax.dynamic_index_in_dim(jnp.asarray(values), index, 0, keepdims=False)
    return values


def _taken(values: Value, positions: Value | NDArray[np.int64], dim: int) -> Value:
    """Elements along a dim, which become the dims of the positions."""
    if isinstance(positions, np.ndarray) and np.array_equal(
        positions.ravel(), np.arange(values.shape[dim])
    ):
        return values.reshape(*values.shape[:dim], *positions.shape, *values.shape[dim + 1 :])
    return jnp.take(values, positions, axis=dim, mode="clip")


# --------------------------------------------------------------------------------------------------
# The matrices of one group.


@dataclass(frozen=True, kw_only=True, eq=False)
class _Group:
    """The updates of one group on one device."""

    exchange: _Exchange
    group: UpdateGroup

    @cached_property
    def spans(self) -> list[Span]:
        return self.exchange.spans(self.group)

    def specs(self, which: Literal["reads", "writes"]) -> list[list[PartitionSpec]]:
        """Shardings of the arrays of every parameter."""
        sharded = PartitionSpec(*(axes or None for axes in self.group.spec))
        return [
            [PartitionSpec() if array.replicated else sharded for array in getattr(update, which)]
            for update in self.group.updates
        ]

    def rows(self, arrays: list[list[Value]]) -> dict[int, Value]:
        """This device's shard of every matrix, [matrices, ...], of every input; what all matrices
        share, as it is.
        """
        return {
            i: arrays[0][i]
            if self._is_shared(i)
            else jnp.concatenate(
                [
                    self._as_stack(span, i, values[i], n)
                    for span, values, n in zip(self.spans, arrays, self.group.counts(), strict=True)
                ]
            )
            for i in range(len(self.spans[0].inputs))
        }

    def arrays(self, rows: Mapping[int, Value]) -> list[list[Value]]:
        """This device's shards of the outputs of every parameter, from rows."""
        ends = np.cumsum(self.group.counts())
        return [
            [self._from_stack(span, i, values[end - n : end]) for i, values in sorted(rows.items())]
            for span, end, n in zip(self.spans, ends, self.group.counts(), strict=True)
        ]

    def results(self, rows: Mapping[int, Value], owned: Mapping[int, Value]) -> dict[int, Value]:
        """The results of this device's matrices."""
        numbers = _of_device(self.group.owned, *self.group.divided)
        shared = {i: value for i, value in rows.items() if self._is_shared(i)}
        matrices = {i: self._whole(shards) for i, shards in owned.items()} | {
            i: _taken(rows[i], numbers, 0) for i in rows.keys() - shared.keys() - owned.keys()
        }

        def updated(matrix: dict[int, Value]) -> dict[int, Value]:
            return self._unit(matrix | shared)

        def zeros(matrix: dict[int, Value]) -> dict[int, Value]:
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(updated, matrix))

        results = (
            jax.lax.map(
                lambda x: jax.lax.cond(x[0] >= 0, updated, zeros, x[1]), (numbers, matrices)
            )
            if self.group.extra.any()
            else jax.lax.map(updated, matrices)
        )
        return {
            i: value[None] if self.group.written[i].replicated else self._shards(value)
            for i, value in results.items()
        }

    def _is_shared(self, i: int) -> bool:
        """Whether all matrices read the same value."""
        first = self.spans[0]
        return (
            self.group.updates[0].reads[i].replicated
            and not first.stacks[i]
            and all(span.inputs[i] == first.inputs[i] for span in self.spans)
        )

    def _as_stack(self, span: Span, i: int, array: Value, n: int) -> Value:
        """A device's shard of an input as [its matrices, ...]."""
        dims = span.stacks[i]
        if not dims:
            return jnp.broadcast_to(array, (n, *array.shape))
        array = jnp.moveaxis(array, dims, range(len(dims)))
        if self.group.updates[0].reads[i].replicated:
            for position, dim in enumerate(self.group.stack):
                if axes := self.group.spec[dim]:
                    size = array.shape[position] // self.group.ways(axes)
                    start = jax.lax.axis_index(axes) * size
                    array = jax.lax.dynamic_slice_in_dim(array, start, size, position)
        return array.reshape(n, *array.shape[len(dims) :])

    def _from_stack(self, span: Span, i: int, rows: Value) -> Value:
        """A device's shard of an output from [its matrices, ...]."""
        dims = span.stacks[len(span.inputs) + i]
        if not dims:
            return rows[0]
        shape = self.exchange.traced.program.avals[span.outputs[i]].shape
        sizes = [
            shape[dim] // self.group.ways(self.group.spec[of])
            for dim, of in zip(dims, self.group.stack, strict=True)
        ]
        array = rows.reshape(*sizes, *rows.shape[1:])
        if self.group.written[i].replicated:
            for position, dim in enumerate(self.group.stack):
                if axes := self.group.spec[dim]:
                    array = jax.lax.all_gather(array, axes, axis=position, tiled=True)
        return jnp.moveaxis(array, range(len(dims)), dims)

    def _order(self) -> list[int]:
        """Positions of the dims of matrices, [matrices, *(axes, dim)], in those of shards,
        [*exchanged, matrices, *dims].
        """
        exchanged = self.group.exchanged
        order = [len(exchanged)]
        for dim, axes in enumerate(self.group.matrix_spec):
            order += [*map(exchanged.index, axes), len(exchanged) + 1 + dim]
        return order

    def _whole(self, shards: Value) -> Value:
        """Whole matrices, [matrices, ...], from shards, [devices, matrices, ...]."""
        group = self.group
        sizes = zip(shards.shape[2:], group.matrix_spec, strict=True)
        devices = [group.sizes[axis] for axis in group.exchanged]
        values = shards.reshape(*devices, *shards.shape[1:]).transpose(self._order())
        return values.reshape(shards.shape[1], *(size * group.ways(axes) for size, axes in sizes))

    def _shards(self, matrices: Value) -> Value:
        """The reverse of `_whole`."""
        group, order = self.group, self._order()
        sizes = zip(matrices.shape[1:], group.matrix_spec, strict=True)
        local = [len(matrices), *(size // group.ways(axes) for size, axes in sizes)]
        parts = [*(group.sizes[axis] for axis in group.exchanged), *local]
        values = matrices.reshape([parts[dim] for dim in order]).transpose(np.argsort(order))
        return values.reshape(group.ways(group.exchanged), *local)

    def _unit(self, values: Mapping[int, Value]) -> dict[int, Value]:
        """The update of one matrix, without the dims of stacks."""
        (span, unit), program = self.exchange.pairs[self.spans[0].path], self.exchange.traced.unit
        env: dict[int, Value] = dict(program.constants)
        for i, number in enumerate(unit.inputs):
            env[number] = jnp.reshape(values[i], program.avals[number].shape)
        evaluate_equations(unit.equations, env, Walk())
        return {
            i: env[number].reshape([n for dim, n in enumerate(env[number].shape) if dim not in of])
            for i, (number, of) in enumerate(
                zip(unit.outputs, span.stacks[len(span.inputs) :], strict=True)
            )
        }
