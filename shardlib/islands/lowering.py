"""Several islands: the batch of one of them, and the programs of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import jax

from shardlib.annotation.trees import Tree
from shardlib.errors import BatchError, TopologyError, raise_all
from shardlib.frontend.model import TracedModel, traced_again
from shardlib.graph import Problem
from shardlib.islands.exchanges import Compressed, DiLoCo, Several
from shardlib.islands.planning import of_one_island, require_carried
from shardlib.planner.plan import Plan
from shardlib.tracing.trace import abstract, describe_batch

if TYPE_CHECKING:
    from shardlib.islands.program import IslandsProgram
    from shardlib.lowering.program import BuildOption
    from shardlib.lowering.uses import LossJaxpr


def rows_of_one(batch: Tree, batch_axes: Tree, exchange: Several) -> Tree:
    """The abstract batch of one island: of every array the first rows.

    Args:
        batch_axes: logical axes of the batch; None for the convention.
    """
    described = describe_batch(batch, batch_axes)
    failures = [
        f"{path}: {shape[axes.index('batch')]} rows"
        for path, shape, _, axes in described
        if "batch" in axes and shape[axes.index("batch")] % exchange.islands
    ]
    if failures:
        raise_all(
            BatchError,
            f"the rows of the batch do not divide among {exchange.islands} islands",
            failures,
            hint=f"a number of rows that {exchange.islands} divides",
        )
    return _scaled(batch, [axes for *_, axes in described], over=exchange.islands)


def problem_on_islands(model: TracedModel, now: int, islands: int) -> Problem:
    """The problem of one of so many islands, from a model that was traced for one of `now`."""
    batch, axes = _global_batch(model, now)
    if islands > 1:
        batch = rows_of_one(batch, axes, DiLoCo(islands=islands))
    problem = traced_again(model, batch, axes).problem
    return replace(problem, rows=model.traced.problem.rows)


def _global_batch(model: TracedModel, islands: int) -> tuple[Tree, Tree]:
    """The abstract batch of all islands, and its logical axes, of a model traced for one island."""
    axes = [axes for *_, axes in model.traced.problem.batch]
    structure = jax.tree.structure(model.batch)
    return _scaled(model.batch, axes, by=islands), structure.unflatten(axes)


def _scaled(
    batch: Tree, axes: Sequence[tuple[str | None, ...]], *, by: int = 1, over: int = 1
) -> Tree:
    """The abstract batch with `by / over` times as many rows."""

    def scaled(leaf: jax.ShapeDtypeStruct, names: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        sizes = zip(leaf.shape, names, strict=True)
        shape = tuple(size * by // over if name == "batch" else size for size, name in sizes)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    leaves, structure = jax.tree.flatten(abstract(batch))
    return structure.unflatten(map(scaled, leaves, axes))


def lower_islands(
    model: TracedModel,
    plan: Plan,
    *,
    devices: Sequence[jax.Device] | None = None,
    **options: BuildOption,
) -> IslandsProgram:
    """A program for each island, and their meetings.

    Args:
        devices: of all islands, one island after the other; by default the first that JAX sees.
    """
    from shardlib.frontend.lowered import lower
    from shardlib.islands.compression import CompressedProgram
    from shardlib.islands.delayed import DelayedProgram
    from shardlib.islands.program import IslandsProgram, require_divided
    from shardlib.lowering.random_keys import with_folds

    exchange = cast("Several", plan.exchange)
    require_carried(model.traced.problem, plan, exchange)
    inner = of_one_island(plan)
    groups = _devices_of(exchange, inner.mesh.devices, devices)
    programs = tuple(lower(model, inner, devices=group, **options) for group in groups)
    dims = {
        path: axes.index("batch") if "batch" in axes else None
        for path, _, _, axes in model.traced.problem.batch
    }
    form: Any = IslandsProgram
    if isinstance(exchange, Compressed):
        require_divided(programs[0])
        form = CompressedProgram
    elif exchange.delay:
        form = DelayedProgram
    return form(
        plan=plan,
        exchange=exchange,
        programs=programs,
        dims=with_folds(dims, abstract(model.batch), model.traced.program),
        retraced=lambda: _retraced(model, exchange.islands),
    )


def _retraced(model: TracedModel, islands: int) -> LossJaxpr:
    """The loss traced for the batch of all islands."""
    from shardlib.lowering.uses import LossJaxpr

    traced = traced_again(model, *_global_batch(model, islands))
    return LossJaxpr(closed_jaxpr=traced.closed_jaxpr, out_tree=traced.out_tree)


def _devices_of(
    exchange: Several, each: int, devices: Sequence[jax.Device] | None
) -> list[list[jax.Device]]:
    """The devices of every island, `each` of them, neighbours in JAX's order."""
    if jax.process_count() > 1:
        raise TopologyError(
            "islands inside one program need a process that has all devices, and there are"
            f" {jax.process_count()} processes\nTry: shardlib launch --islands, where each island"
            " is a job of its own"
        )
    available = list(jax.devices() if devices is None else devices)
    needed = exchange.islands * each
    if devices is not None and len(available) != needed:
        raise TopologyError(
            f"{exchange.islands} islands of {each} devices are {needed}, argument `devices` gives"
            f" {len(available)}\nTry: exactly the devices that they use"
        )
    if len(available) < needed:
        raise TopologyError(
            f"{exchange.islands} islands of {each} devices need {needed}, JAX sees"
            f" {len(available)} ({available[0].platform})\nTry: JAX_PLATFORMS=cpu"
            f" JAX_NUM_CPU_DEVICES={needed} in the environment simulates them"
        )
    if hasattr(available[0], "slice_index"):
        available.sort(key=lambda device: device.slice_index)
    stride = len(available) // exchange.islands
    return [available[k * stride : k * stride + each] for k in range(exchange.islands)]
