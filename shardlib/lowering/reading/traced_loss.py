"""The loss as a jaxpr, over the leaves of (params, state, batch)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
from jax.extend import core as jex

from shardlib.annotation.activations import no_mesh
from shardlib.annotation.model import PureLoss
from shardlib.annotation.trees.paths import Tree
from shardlib.errors import ShardlibError, TracingError
from shardlib.lowering.mesh.shardings import (
    batch_path,
)
from shardlib.lowering.reading.loss import LossReading
from shardlib.tracing.layouts import NO_MESH, brings_layouts, freed
from shardlib.tracing.program import Program, flatten


@dataclass(frozen=True, kw_only=True)
class LossJaxpr:
    """A loss as a jaxpr.

    Attributes:
        closed_jaxpr: over the leaves of (params, state, batch).
        out_tree: structure of (loss, (metrics, state)).
    """

    closed_jaxpr: jex.ClosedJaxpr
    out_tree: jax.tree_util.PyTreeDef

    @cached_property
    def program(self) -> Program:
        """The loss, flattened."""
        return flatten(self.closed_jaxpr)

    def read(self, parameters: int) -> LossReading:
        """What is known of the loss, whose first inputs are so many parameters; read once."""
        return self._readings.setdefault(
            parameters, LossReading(program=self.program, parameters=parameters)
        )

    @cached_property
    def _readings(self) -> dict[int, LossReading]:
        return {}


def trace_loss(
    loss: PureLoss,
    params: Tree,
    state: Tree,
    batch: Tree,
    *,
    what: str = "one microbatch,",
) -> LossJaxpr:
    """Traces a loss, without the layouts that it brings along."""

    def traced(loss: PureLoss) -> tuple[jex.ClosedJaxpr, Tree]:
        with no_mesh():
            return jax.make_jaxpr(loss, return_shape=True)(params, state, batch)

    def free() -> tuple[jex.ClosedJaxpr, Tree]:
        return traced(freed(loss, NO_MESH))

    try:
        try:
            closed_jaxpr, shapes = traced(loss)
            if brings_layouts(closed_jaxpr):
                closed_jaxpr, shapes = free()
        except ShardlibError:
            raise
        except Exception:  # axes of a mesh where none is in force
            closed_jaxpr, shapes = free()
    except ShardlibError:
        raise
    except Exception as error:
        arrays = ", ".join(
            f"{batch_path(path)} {leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        )
        raise TracingError(
            f"the loss does not trace for {what} {arrays}: {type(error).__name__}: {error}"
        ) from error
    return LossJaxpr(closed_jaxpr=closed_jaxpr, out_tree=jax.tree.structure(shapes))


def same_program(first: LossJaxpr, second: LossJaxpr) -> bool:
    """Whether two traces have the same equations in the same places, whatever their shapes."""
    return [(e.path, e.name) for e in first.program.equations] == [
        (e.path, e.name) for e in second.program.equations
    ]
