"""Plans written by hand, from a mesh and rules alone: they test the lowering without the
planner.
"""

from __future__ import annotations

import jax

from shardlib.annotation.trees import path_text
from shardlib.cost.pricing import DeviceBytes, Estimate, Seconds
from shardlib.layout import Layout, MeshShape, Rules
from shardlib.lowering.mesh import batch_path
from shardlib.planner.plan import ParameterLayout, Plan

RULES = [("batch", ("data", "fsdp")), ("mlp", "tensor"), ("heads", "tensor"), ("vocab", "tensor")]


def hand_plan(model, batch, mesh, *, rules=RULES, zero=0, **decisions):
    mesh, rules = MeshShape(mesh), Rules.parse(rules)
    parameters = [
        _parameter(path_text(path), leaf, model.axes, rules, mesh, zero)
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.params)
    ]
    batch_layouts = tuple(
        (
            batch_path(path),
            rules.resolve(("batch", *[None] * (leaf.ndim - 1)), leaf.shape, mesh).layout,
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    )
    return Plan(
        model=model.name,
        topology=f"cpu:{mesh.devices}",
        mesh=mesh,
        rules=rules,
        zero=zero,
        parameters=tuple(parameters),
        batch_layouts=batch_layouts,
        estimate=Estimate(seconds=Seconds(), device_bytes=DeviceBytes()),
        **decisions,
    )


def _parameter(path, leaf, axes, rules, mesh, zero):
    names = axes.get(path, (None,) * len(leaf.shape))
    compute = rules.resolve(names, leaf.shape, mesh).layout
    cut = with_fsdp(compute, names, leaf.shape, mesh)
    return ParameterLayout(
        path=path,
        shape=leaf.shape,
        dtype=str(leaf.dtype),
        colours=names,
        compute=compute,
        rest=cut if zero >= 3 else compute,
        gradient=cut if zero >= 2 else compute,
        state=cut if zero >= 1 else compute,
    )


def with_fsdp(layout, names, shape, mesh):
    for dim, size in enumerate(shape):
        if (
            "fsdp" in mesh
            and names[dim] != "layers"
            and not layout[dim]
            and size % mesh["fsdp"] == 0
        ):
            return Layout(*(("fsdp",) if i == dim else axes for i, axes in enumerate(layout)))
    return layout
