"""How is a loss laid out that is evaluated on another number of rows than a step is compiled for,
or that is another loss?

The plan says how parameters rest and which mesh axes shard which logical axes. The loss is traced
for the rows at hand, its values get the colours of the plan through the parameters and the batch
that they are made of, and the plan's rules lay them out. Where the rows do not divide over all axes
that shard the batch, those that divide the most ways do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardlib.annotation.model import Model, PureLoss
from shardlib.annotation.trees.paths import Tree
from shardlib.axes import LogicalAxes, MeshShape
from shardlib.errors import BatchError
from shardlib.graph.problem import Parameter, Problem
from shardlib.layout import Layout
from shardlib.lowering.loss.placing import Placements
from shardlib.lowering.reading.custom_calls import operands
from shardlib.lowering.reading.traced_loss import LossJaxpr, trace_loss
from shardlib.planning.assembly.layouts import batch_layouts
from shardlib.planning.plan import Plan
from shardlib.propagation.colours import Colouring, colour
from shardlib.propagation.placements import placements
from shardlib.report import Finding
from shardlib.rules import Rules
from shardlib.tracing.batch import describe_batch
from shardlib.tracing.jaxpr_to_graph import graph_from_program
from shardlib.tracing.parameters import named


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """A loss for certain rows, and the layouts of its values.

    Attributes:
        traced: the loss.
        placements: of activations.
        batch: of every array of the batch, by path.
        axes: logical axes of every array of the batch, by path.
        plan: the plan, as it is carried out for these rows.
        findings: what the user should know.
    """

    traced: LossJaxpr
    placements: Placements
    batch: tuple[tuple[str, Layout], ...]
    axes: Mapping[str, LogicalAxes]
    plan: Plan
    findings: tuple[Finding, ...]


def laid_out_for(
    plan: Plan,
    model: Model,
    loss: PureLoss,
    batch: Tree,
    batch_axes: Tree,
    axes_by_path: Mapping[str, LogicalAxes],
) -> LaidOut:
    """Traces a loss and lays it out.

    Args:
        batch_axes: logical axes of the batch, a tree like it; None for those that are known, or
            else by convention.
    """
    described = _described(batch, batch_axes, axes_by_path)
    if not described or any(
        shape[axes.index("batch") if "batch" in axes else 0] == 0
        for _, shape, _, axes in described
        if shape
    ):
        raise BatchError(
            "a batch to evaluate has no rows:"
            f" {', '.join(f'{path} {list(shape)}' for path, shape, *_ in described) or 'no arrays'}"
            "\nTry: at least one row"
        )
    traced = trace_loss(loss, model.params, model.state, batch, what="an evaluation of")
    program = traced.program
    inputs = [(path or "params", "parameter") for path, _ in named(model.params, "")]
    count = len(inputs)
    inputs += [(path, "state") for path, _ in named(model.state, "state")] + [
        (path, "batch") for path, _ in named(batch, "batch")
    ]
    graph = graph_from_program(program, inputs)
    problem = Problem(
        model=model.name,
        forward=graph,
        steps={},
        parameters=_coloured(plan),
        batch=described,
        state_bytes=0,
        tokens=0,
        compute_dtype="float32",
    )
    colouring = colour(problem)
    rules, findings = _divided(plan.rules, colouring, described, plan.mesh)
    layouts = placements(
        graph,
        colouring.forward,
        rules,
        plan.mesh,
        colouring.batch_colour,
        operands(traced.read(count).calls),
    )
    if findings and plan.experts != "none":
        plan, findings = replace(plan, experts="none"), (*findings, _experts_as_written())
    return LaidOut(
        traced=traced,
        placements=layouts,
        batch=batch_layouts(problem, colouring.batch, plan.mesh, rules),
        axes={path: axes for path, _, _, axes in described},
        plan=plan,
        findings=findings,
    )


def _described(
    batch: Tree, batch_axes: Tree, axes_by_path: Mapping[str, LogicalAxes]
) -> tuple[Any, ...]:
    if batch_axes is not None:
        return describe_batch(batch, batch_axes)
    leaves = named(batch, "batch")
    if all(
        len(axes_by_path.get(path, ())) == len(leaf.shape)
        and (path in axes_by_path or not leaf.shape)
        for path, leaf in leaves
    ):
        return tuple(
            (path, tuple(leaf.shape), leaf.dtype.name, tuple(axes_by_path.get(path, ())))
            for path, leaf in leaves
        )
    return describe_batch(batch)


def _coloured(plan: Plan) -> tuple[Parameter, ...]:
    """The parameters under the names that the plan's rules have for their dims."""
    return tuple(
        Parameter(
            path=parameter.path,
            shape=parameter.shape,
            dtype=parameter.dtype,
            axes=parameter.colours
            if len(parameter.colours) == len(parameter.shape)
            else (None,) * len(parameter.shape),
            state_bytes_per_element=0.0,
            state_arrays=0,
        )
        for parameter in plan.parameters
    )


def _divided(
    rules: Rules, colouring: Colouring, described: tuple[Any, ...], mesh: MeshShape
) -> tuple[Rules, tuple[Finding, ...]]:
    """The rules, where the batch is sharded over as many devices as its rows divide over; a finding
    where that is not all.
    """
    name = colouring.batch_colour
    rows = math.gcd(
        *(
            shape[dim]
            for path, shape, _, _ in described
            for dim, colour in enumerate(colouring.batch[path])
            if name is not None and colour == name
        )
    )
    rows = rows or 1  # a single row has no colour
    batch_names = {name, "batch"} if name is not None else {"batch"}
    fewer: dict[tuple[str, ...], tuple[str, ...]] = {}
    entries: list[tuple[str, tuple[str, ...]]] = []
    for logical, axes in rules.entries:
        if logical in batch_names:
            dividing = _most(tuple(axis for axis in axes if axis in mesh), rows, mesh)
            if mesh.ways(dividing) < mesh.ways(tuple(axis for axis in axes if axis in mesh)):
                fewer[axes] = dividing
            entries.append((logical, dividing))
        else:
            entries.append((logical, axes))
    if not fewer:
        return rules, ()
    axes, kept_axes = max(fewer.items(), key=lambda item: len(item[0]))
    finding = Finding(
        code="evaluation-replicated",
        severity="info",
        where=f"{rows} rows",
        message=(
            f"{rows} rows do not divide over {'·'.join(axes)}"
            f" ({mesh.ways(tuple(axis for axis in axes if axis in mesh))} ways): they are"
            f" {'sharded over ' + '·'.join(kept_axes) + ' alone' if kept_axes else 'replicated'},"
            " and the devices along the rest compute the same."
        ),
        hint="rows that divide",
    )
    return Rules(tuple(entries)), (finding,)


def _most(axes: tuple[str, ...], rows: int, mesh: MeshShape) -> tuple[str, ...]:
    """Those of some axes that divide the rows the most ways; of equals, the first."""
    subsets = [
        subset
        for count in range(len(axes), -1, -1)
        for subset in itertools.combinations(axes, count)
        if rows % mesh.ways(subset) == 0
    ]
    return max(subsets, key=mesh.ways)


def _experts_as_written() -> Finding:
    return Finding(
        code="experts-as-written",
        severity="info",
        where="experts=none",
        message=(
            "rows that do not divide over the devices are not exchanged between experts: these are"
            " computed as the model is written."
        ),
    )


def abstract_batch(
    batch: Tree, laid_out: LaidOut, shard: Callable[[Layout], NamedSharding]
) -> Tree:
    """A batch with the shardings that `shard` makes of its layouts.

    Args:
        shard: layout -> sharding.
    """
    layouts = [layout for _, layout in laid_out.batch]
    leaves, structure = jax.tree.flatten(batch)
    return structure.unflatten(
        [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shard(layout))
            for leaf, layout in zip(leaves, layouts, strict=True)
        ]
    )
