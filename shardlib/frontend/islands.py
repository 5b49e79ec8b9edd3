"""Several islands: the batch of one of them, and the programs of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import jax

from shardlib.annotation.trees import Tree
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import BatchError, PinError, TopologyError, raise_all
from shardlib.exchanges import EXACT, Compressed, DiLoCo, Exact, Exchange, Several
from shardlib.frontend.model import TracedModel, traced_again
from shardlib.graph import Problem
from shardlib.planner.islands import of_one_island
from shardlib.planner.plan import Plan
from shardlib.tracing.trace import abstract, describe_batch

if TYPE_CHECKING:
    from shardlib.lowering.islands.program import IslandsProgram
    from shardlib.lowering.program import BuildOption, Program
    from shardlib.lowering.uses import LossJaxpr


def exchange_of(plan: Plan | None, pin: PinMapping | Pins | None) -> Exchange:
    """Returns how islands meet, as a plan that is given says it, or else pins.

    Args:
        plan: None for none.
    """
    return plan.exchange if plan is not None else Pins.parse(pin).exchange


def rows_of_one(batch: Tree, batch_axes: Tree, exchange: Exchange) -> Tree:
    """The batch of one island: of every array the first rows; the batch as it is where there is one
    island.

    Args:
        batch_axes: logical axes of the batch; None for the convention.
    """
    if exchange.islands == 1:
        return batch
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
    leaves, structure = jax.tree.flatten(abstract(batch))
    parts = [
        _part(leaf, axes.index("batch"), exchange.islands) if "batch" in axes else leaf
        for leaf, (_, _, _, axes) in zip(leaves, described, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


def problem_on_islands(model: TracedModel, now: int, islands: int) -> Problem:
    """Returns what the planner takes of one of so many islands."""
    described = model.traced.problem.batch
    leaves, structure = jax.tree.flatten(abstract(model.batch))
    global_batch = [
        _scaled(leaf, axes.index("batch"), now) if "batch" in axes else leaf
        for leaf, (_, _, _, axes) in zip(leaves, described, strict=True)
    ]
    axes = structure.unflatten([axes for *_, axes in described])
    exchange = DiLoCo(islands=islands) if islands > 1 else EXACT
    island_batch = rows_of_one(structure.unflatten(global_batch), axes, exchange)
    problem = traced_again(model, island_batch, axes).problem
    return replace(problem, rows=model.traced.problem.rows)


def _part(leaf: jax.ShapeDtypeStruct, dim: int, islands: int) -> jax.ShapeDtypeStruct:
    shape = list(leaf.shape)
    shape[dim] //= islands
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)


def lower_all(
    model: TracedModel,
    plan: Plan,
    *,
    devices: Sequence[jax.Device] | None = None,
    **where: BuildOption,
) -> Program:
    """Lowers a plan of one island or of several: then it is an `IslandsProgram`, which has the
    calls of a `Program` that users make.

    Args:
        devices: of all islands, one island after the other; by default the first that JAX sees.
    """
    from shardlib.frontend.lowered import lower

    if not isinstance(plan.exchange, Exact):
        several = _lower_islands(model, plan, plan.exchange, devices, where)
        return cast("Program", several)
    return lower(model, plan, devices=devices, **where)


def _lower_islands(
    model: TracedModel,
    plan: Plan,
    exchange: Several,
    devices: Sequence[jax.Device] | None,
    options: Mapping[str, BuildOption],
) -> IslandsProgram:
    """A program for each island, and their meetings."""
    from shardlib.frontend.lowered import lower
    from shardlib.lowering.islands.compression import CompressedProgram
    from shardlib.lowering.islands.delayed import DelayedProgram
    from shardlib.lowering.islands.program import IslandsProgram, require_divided
    from shardlib.lowering.random_keys import with_keys

    require_carried(model, plan, exchange)
    inner = of_one_island(plan)
    groups = _devices_of(exchange, inner.mesh.devices, devices)
    programs = tuple(lower(model, inner, devices=group, **options) for group in groups)
    dims = with_keys(_dims(model.traced.problem.batch), abstract(model.batch), model.traced.program)

    def again() -> LossJaxpr:
        return _retraced(model, exchange.islands)

    if isinstance(exchange, Compressed):
        require_divided(programs[0])
        return CompressedProgram(
            plan=plan, exchange=exchange, programs=programs, dims=dims, retraced=again
        )
    if isinstance(exchange, DiLoCo) and exchange.delay:
        return DelayedProgram(
            plan=plan, exchange=exchange, programs=programs, dims=dims, retraced=again
        )
    return IslandsProgram(
        plan=plan, exchange=exchange, programs=programs, dims=dims, retraced=again
    )


def _retraced(model: TracedModel, islands: int) -> LossJaxpr:
    """The loss traced for the batch of all islands."""
    from shardlib.lowering.uses import LossJaxpr

    axes = [axes for _, _, _, axes in model.traced.problem.batch]
    leaves, structure = jax.tree.flatten(abstract(model.batch))
    global_batch = [
        _scaled(leaf, names.index("batch"), islands) if "batch" in names else leaf
        for leaf, names in zip(leaves, axes, strict=True)
    ]
    traced = traced_again(model, structure.unflatten(global_batch), structure.unflatten(axes))
    return LossJaxpr(closed_jaxpr=traced.closed_jaxpr, out_tree=traced.out_tree)


def _scaled(leaf: jax.ShapeDtypeStruct, dim: int, by: int) -> jax.ShapeDtypeStruct:
    shape = list(leaf.shape)
    shape[dim] *= by
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)


def _dims(
    batch: Sequence[tuple[str, tuple[int, ...], str, tuple[str | None, ...]]],
) -> Mapping[str, int | None]:
    """The batch dim of each array of a batch, by path."""
    return {path: axes.index("batch") if "batch" in axes else None for path, _, _, axes in batch}


def require_carried(model: TracedModel, plan: Plan, exchange: Several) -> None:
    """Refuses what islands cannot carry."""
    updated = [
        parameter.path
        for parameter in model.traced.problem.parameters
        if parameter.role == "updated"
    ]
    failures: list[str] = []
    if updated:
        failures.append(
            f"steps update {', '.join(updated[:4])}{' and others' if len(updated) > 4 else ''},"
            " which are no parameters: each island would have its own, and nothing says which is"
            " right"
        )
    if plan.pipeline == "programs" and isinstance(exchange, Compressed):
        failures.append(
            "pipeline='programs' makes a program of every stage, whose gradients do not leave it"
        )
    if "disk" in plan.offload:
        failures.append("offload=['disk'] keeps optimizer state in files, which islands share")
    if failures:
        raise_all(
            PinError,
            f"exchange={exchange} cannot be carried out",
            failures,
            hint="exchange='exact'",
        )


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
