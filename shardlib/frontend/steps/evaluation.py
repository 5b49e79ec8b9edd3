"""A loss of a state of the user's own step, on any number of rows, with nothing updated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from shardlib import _jax_compat
from shardlib.annotation.result import loss_and_metrics
from shardlib.annotation.trees.paths import Tree
from shardlib.errors import BatchError
from shardlib.frontend.steps.step_program import StepProgram
from shardlib.jax_types import Metrics, Value
from shardlib.layout import Layout
from shardlib.lowering.mesh.shardings import named_sharding
from shardlib.lowering.runtime.batches import placed, shapes_of_batch
from shardlib.processes.values import in_every_process
from shardlib.tracing.batch import describe_batch
from shardlib.tracing.layouts import NO_MESH, freed
from shardlib.tracing.row_proofs import rows_of


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEvaluation:
    """A loss to be evaluated on batches of any number of rows, with a state of a step.

    Arrays of the state stay as the plan shards them, and rows are sharded over those axes of the
    plan's batch that divide them; the rest is left to the compiler.

    Attributes:
        program: the step.
        loss: (state, batch) -> scalar or (scalar, metrics).
        programs: those that have been compiled, by structure, shapes and dtypes of the batch.
    """

    program: StepProgram
    loss: Callable[[Tree, Tree], Tree]
    programs: dict[Any, tuple[Callable[..., dict[str, Any]], Tree]] = field(default_factory=dict)

    def metrics(self, state: Tree, batch: Tree) -> tuple[Value, Metrics]:
        """The loss and the user's own metrics, to be traced; layouts of their own are left out."""
        return loss_and_metrics(freed(self.loss, NO_MESH)(state, batch))

    def evaluate(self, state: Tree, batch: Tree) -> dict[str, Tree]:
        """The metrics of a batch: "loss", and the user's own. The state stays usable."""
        shapes = shapes_of_batch(batch)
        leaves, structure = jax.tree.flatten(shapes)
        key = (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self.programs:
            self.programs[key] = self._compiled(shapes)
        call, asked = self.programs[key]
        return in_every_process(call(state, placed(batch, asked)))

    def _compiled(self, shapes: Tree) -> tuple[Callable[..., dict[str, Any]], Tree]:
        dims, sizes = rows_of(describe_batch(shapes))
        if not sizes or not all(sizes):
            raise BatchError("a batch to evaluate has no rows\nTry: at least one row")
        mesh, axes = self.program.mesh, self._axes(sizes)
        leaves, structure = jax.tree.flatten(shapes)
        asked = structure.unflatten(
            [
                jax.ShapeDtypeStruct(
                    leaf.shape,
                    leaf.dtype,
                    sharding=named_sharding(
                        mesh, Layout(*(axes if at == dim else () for at in range(leaf.ndim)))
                    ),
                )
                for leaf, dim in zip(leaves, dims, strict=True)
            ]
        )

        def evaluate(state: Tree, batch: Tree) -> dict[str, Any]:
            value, metrics = self.metrics(state, batch)
            return {"loss": value, **metrics}

        with _jax_compat.in_mesh(mesh):
            call = jax.jit(evaluate, out_shardings=named_sharding(mesh, Layout()))
            compiled = call.lower(self.program.state, asked).compile()
        arguments = (self.program.state, asked)
        return _jax_compat.runnable(call, compiled, arguments, mesh), asked

    def _axes(self, sizes: tuple[int, ...]) -> tuple[str, ...]:
        """Those axes of the plan's batch that divide all numbers of rows the most ways."""
        plan = self.program.plan
        known = max((dim for _, one in plan.batch_layouts for dim in one), key=len, default=())
        subsets = [
            subset
            for count in range(len(known), -1, -1)
            for subset in itertools.combinations(known, count)
            if all(size % plan.mesh.ways(subset) == 0 for size in sizes)
        ]
        return max(subsets, key=plan.mesh.ways)
