"""The program of a step as bytes, for the process that compiles it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import jax

from shardlib.annotation.model import Model, Tree
from shardlib.annotation.trees.paths import path_text
from shardlib.jax_types import Leaf
from shardlib.lowering.serving.pages import Pages
from shardlib.lowering.serving.program import TracedForward
from shardlib.serving.sampling.choices import choices
from shardlib.serving.scheduling.capacity import Capacity, Shape
from shardlib.serving.step import operands, step_function
from shardlib.serving.weights import Placed
from shardlib.verification.exported import ExportedStep, exported


def exported_step(
    model: Model, traced: TracedForward, on: Placed, size: Capacity, shape: Shape, platform: str
) -> tuple[ExportedStep, dict[str, int]]:
    """The program of a step, and bytes that a device has of weights and pages."""

    params = on.described(model.params)
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on.whole), model.state
    )
    pages = on.of_pages(traced, size.groups, size.page)
    inputs = operands(size, shape, on.grid.groups)
    row_choices = choices(
        [None] * len(inputs.rows), vocab=traced.vocab, longest=size.table * size.page
    )
    beside = (inputs.tokens, inputs.where, inputs.rows, row_choices)
    beside = jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        beside,
        on.grid.by_group(beside),
    )
    function = step_function(traced, size.groups, on.grid)

    def step(pages: Mapping[str, Pages], weights: tuple[Tree, Tree], beside: Tree) -> Tree:
        chosen, after = function(weights, pages, *beside)
        return after, tuple(jax.tree.leaves(chosen))

    step.__name__ = step.__qualname__ = f"shardlib_serve_{len(inputs.tokens)}"
    leaves = jax.tree.leaves(pages)
    step_program = exported(
        step,
        (pages, (params, state), beside),
        results=leaves,
        mesh=on.mesh,
        platform=platform,
        what="the program that serves",
    )
    weight_names = [
        path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path((params, state))
    ]
    others = len(step_program.arguments) - len(leaves) - len(weight_names)
    names = (
        *(f"pages.{number}" for number in range(len(leaves))),
        *(f"weights.{name}" for name in weight_names),
        *(f"operand.{number}" for number in range(others)),
    )
    predicted = {"weights": _bytes((params, state)), "pages": _bytes(pages)}
    return replace(step_program, arguments=names), predicted


def _bytes(tree: Tree) -> int:
    """What a device has of some arrays."""

    def size(leaf: Leaf) -> int:
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))
