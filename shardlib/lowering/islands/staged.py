"""Gradients of a pipeline whose stages are programs of their own, without an update.

Where every value that stages take from parameters is a parameter as it is stored (no cast, nothing
tied to all layers), a step can begin with parts: each stage as soon as its own parameters have
landed, the first one first; and gradients of a stage can be taken as soon as it has gone back with
its last microbatch, the last one first. Elsewhere the stages wait for all parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import jax
import numpy as np

from shardlib import _jax_compat
from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Metrics
from shardlib.layout import Layout
from shardlib.lowering.islands.halves import name_of, require_divided, trained
from shardlib.lowering.mesh import shardings
from shardlib.lowering.mesh.pinning import constrain
from shardlib.lowering.mesh.precision import like
from shardlib.lowering.pipeline.per_stage.around import Made
from shardlib.lowering.pipeline.per_stage.dispatch import Dispatch
from shardlib.lowering.program.program import Program, shardings_of
from shardlib.lowering.program.step import named
from shardlib.lowering.runtime.state import TrainState

#: One of the equal runs of a parameter that stages need one by one: its path, and which.
Run = tuple[str, int]


class Landed(Protocol):
    """Parameters of which some are there."""

    def there(self, runs: tuple[Run, ...]) -> bool:
        """Whether all of these are, or never will be."""
        ...

    def run(self, path: str, number: int) -> np.ndarray:
        """Elements of a run, float32, once they are there."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Gradients as stages have summed them, which may not be computed yet.

    Attributes:
        loss: sum of the loss over microbatches, [1].
        parts: of each run what one stage, or the first and the last, have summed.
        count: number of microbatches.
        model_state: after the step.
    """

    loss: jax.Array
    parts: Mapping[Run, tuple[jax.Array, ...]]
    count: int
    model_state: Tree


@dataclass(kw_only=True, eq=False)
class _GradientUpdate:
    """An update that gives gradients in place of a state; compiled where it is called.

    Attributes:
        program: whose.
        made: what stages leave, abstract.
    """

    program: Program
    made: Made

    def step(self, state: TrainState, batch: Made, /) -> tuple[Any, Metrics]:
        metrics, found, after = self._call(state.params, state.model_state, batch)
        return (found, after), metrics

    def memory(self) -> dict[str, int]:
        return _jax_compat.compiled_memory(self._call)

    @cached_property
    def _call(self) -> jax.stages.Compiled:
        program, parts = self.program, self.program.parts

        def gradients(params: Tree, model_state: Tree, made: Made) -> Any:
            (loss, (metrics, after)), found, _ = parts.run.gradients(
                params, model_state, made, None
            )
            found = like(constrain(found, parts.params.gradient), parts.updated)
            return {"loss": loss, **metrics}, found, after

        named(gradients, "gradients", program.plan.digest)
        state = program.state
        results = (
            shardings.named_sharding(program.mesh, Layout()),
            parts.params.gradient,
            shardings_of(state.model_state),
        )
        with _jax_compat.in_mesh(program.mesh):
            jitted = jax.jit(gradients, out_shardings=results)
            return jitted.lower(state.params, state.model_state, self.made).compile()


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedGradients:
    """The programs of the stages of a pipeline, up to gradients.

    Attributes:
        program: whose step they are part of.
        dispatch: the programs.
    """

    program: Program
    dispatch: Dispatch

    @staticmethod
    def of(program: Program) -> StagedGradients:
        """Compiles them."""
        require_divided(program, staged=True)
        assert program.programs is not None
        dispatch = program.programs.compiled(
            program.state,
            program.batch,
            lambda made: _GradientUpdate(program=program, made=made),
            f"shardlib_{program.plan.digest}",
        )
        return StagedGradients(program=program, dispatch=dispatch)

    def call(self, params: Tree, model_state: Tree, batch: Tree) -> tuple[Metrics, Tree, Tree]:
        """(metrics, gradients, model state) of a step whose parameters are all there."""
        state = replace(self.program.state, params=params, model_state=model_state)
        (found, after), metrics = self.dispatch.step(state, batch)
        return metrics, found, after

    @cached_property
    def runs(self) -> dict[str, int]:
        """Into how many equal runs each parameter is divided that stages need one by one; empty
        where no stage can begin before all parameters are there.
        """
        dispatch, found = self.dispatch, dict[str, int]()
        simple = all(one.gather is None and one.reduce is None for one in dispatch.chunks)
        opening = self._opening
        if not simple or len(dispatch.chunks) != len(dispatch.stages) or self._shared:
            return {}
        given = jax.tree.unflatten(dispatch.opened, list(dispatch.opening.sources))
        sources = [(True, source) for stack in given.stacks for source in stack]
        sources += [(False, source) for source in given.kept.values()]
        for stacked, (fresh, at) in sources:
            if fresh or at >= len(self._names):
                return {}
            found[self._names[at]] = len(dispatch.stages) if stacked else 1
        assert len(given.stacks) == len(opening.dealt), "a turn of each"
        return found if found.keys() >= trained(self.program).keys() else {}

    def begun(self, params: Tree, model_state: Tree, batch: Tree, landed: Landed) -> Sums:
        """Queues a step whose parameters are on their way; returns once all stages have them."""
        arriving = _Arriving(staged=self, params=params, landed=landed)
        step = self.dispatch.begun(params, model_state, batch, arriving)
        last, outside = len(self.dispatch.chunks) - 1, self.dispatch.outside
        parts = dict[Run, tuple[jax.Array, ...]]()
        for stage in range(last + 1):
            for number, sums in zip(self._opening.stacks, step.late[stage], strict=False):
                parts[self._path(number), stage] = (sums,)
        for stage in dict.fromkeys((0, last)):
            for number, sums in zip(outside[stage], step.early[stage], strict=False):
                run = (self._path(number), 0)
                parts[run] = (*parts.get(run, ()), sums)
        after = jax.tree.unflatten(jax.tree.structure(model_state), step.opened.after)
        loss = step.early[last][len(outside[last])]
        return Sums(loss=loss, parts=parts, count=self._opening.microbatches, model_state=after)

    def needs(self, stage: int) -> tuple[Run, ...]:
        """The runs that a stage needs."""
        known = trained(self.program)
        numbers = [(number, stage) for number in self._opening.dealt]
        numbers += [(number, 0) for number in self.dispatch.kept[stage]]
        runs = [(self._path(number), run) for number, run in numbers]
        return tuple(run for run in runs if run[0] in known)

    def _path(self, number: int) -> str:
        """The path of the parameter that a value is."""
        return self._names[self._opening.pipeline.cut.program.inputs.index(number)]

    @property
    def _opening(self) -> Any:
        assert self.program.programs is not None
        return self.program.programs.opening

    @property
    def _shared(self) -> bool:
        """Whether all layers use some parameter."""
        return bool(self._opening.pipeline.cut.roles.shared)

    @cached_property
    def _names(self) -> list[str]:
        leaves = jax.tree_util.tree_leaves_with_path(self.program.state.params)
        return [name_of(path) for path, _ in leaves]


class _Arriving:
    """Parameters of one step; each run is placed once."""

    def __init__(self, *, staged: StagedGradients, params: Tree, landed: Landed) -> None:
        self._staged, self._landed = staged, landed
        known = trained(staged.program)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        self._paths = {id(leaf): name_of(path) for path, leaf in leaves if name_of(path) in known}
        self._known = known
        self._needs = [staged.needs(stage) for stage in range(len(staged.dispatch.stages))]

    def there(self, stage: int) -> bool:
        return self._landed.there(self._needs[stage])

    def part(self, array: jax.Array, stage: int) -> jax.Array | None:
        path = self._paths.get(id(array))
        if path is None:
            return None
        leaf, places = self._known[path], self._staged.dispatch.places
        elements = self._landed.run(path, stage if self._staged.runs[path] > 1 else 0)
        value = elements.reshape(places.shape(leaf)).astype(leaf.dtype)
        return jax.device_put(value, places.at(leaf.sharding, stage))
