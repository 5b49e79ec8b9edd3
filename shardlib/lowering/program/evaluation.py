"""What is the loss of any number of rows, with no gradients and nothing updated?

    program = shardlib.compile(init, loss, optimizer, batch, evaluation=validation_loss)
    metrics = program.evaluate(state, rows)                      # any number of rows

A call evaluates the loss of exactly the rows that it is given, all at once: they are neither padded
nor worked through in microbatches, so that the result is exact for every loss, mean or sum or
anything else. Each number of rows is a program of its own, with the plan's shardings of the
parameters, compiled at its first use and kept. Rows are sharded over as many devices as they divide
over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh

from shardlib import _jax_compat
from shardlib.annotation.model import Model, PureLoss, UserLoss
from shardlib.annotation.trees.paths import Tree
from shardlib.axes import LogicalAxes
from shardlib.errors import PlanError
from shardlib.layout import Layout
from shardlib.lowering.accumulation.microbatches import Microbatches
from shardlib.lowering.loss.evaluation_layouts import LaidOut, abstract_batch, laid_out_for
from shardlib.lowering.loss.forward import placed_loss
from shardlib.lowering.loss.placing import Placing
from shardlib.lowering.mesh import shardings
from shardlib.lowering.pipeline.lockstep.build import StagedLayouts, pipeline
from shardlib.lowering.program.checks.belonging import FOREIGN, require_own, require_state
from shardlib.lowering.runtime.batches import placed, shapes_of_batch
from shardlib.lowering.runtime.donated import require_present
from shardlib.lowering.runtime.random_keys import key_inputs, with_keys
from shardlib.lowering.runtime.state import TrainState
from shardlib.planning.plan import Plan
from shardlib.processes.values import in_every_process
from shardlib.report import Finding
from shardlib.schedules.gpipe import GPIPE


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationProgram:
    """An evaluation compiled for certain rows.

    Attributes:
        call: (parameters, model state, batch) -> metrics.
        batch: abstract batch, each leaf with its sharding.
        findings: what lowering noticed.
    """

    call: Callable[..., dict[str, Any]]
    batch: Tree
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """A loss to be evaluated on batches of any number of rows; made by `Program.evaluation`.

    Attributes:
        plan: the decisions of the training step.
        mesh: its devices.
        model: the user's model.
        loss: what is evaluated.
        params: shardings of the parameters.
        state: abstract training state, each leaf with its sharding.
        axes: logical axes of the batch of a step, by path.
        batch_axes: logical axes of batches, a tree like them; None for those of a step, or else by
            convention.
        written: the loss as the user wrote it; None where it is not known.
        programs: those that have been compiled, by structure, shapes and dtypes of the batch.
    """

    plan: Plan
    mesh: Any
    model: Model
    loss: PureLoss
    params: shardings.ParameterShardings
    state: TrainState
    axes: Mapping[str, LogicalAxes]
    batch_axes: Tree = None
    written: UserLoss | None = None
    programs: dict[Any, EvaluationProgram] = field(default_factory=dict)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was noticed in all that has been evaluated so far."""
        return tuple(
            dict.fromkeys(
                finding for program in self.programs.values() for finding in program.findings
            )
        )

    def evaluate(self, state: TrainState, batch: Tree) -> dict[str, jax.Array]:
        """The metrics of a batch: "loss", and the user's own. The state stays usable and unchanged."""
        require_state("evaluate", state)
        require_present("evaluate", state.inference)
        program = self.compiled(batch)
        rows = placed(batch, program.batch)
        try:
            return in_every_process(program.call(state.params, state.model_state, rows))
        except FOREIGN as error:
            require_own("evaluate", state.inference, self.state.inference, error=error)
            raise

    def compiled(self, batch: Tree) -> EvaluationProgram:
        """The program for batches of these shapes, arrays or abstract; compiled at the first call.

        Args:
            batch: arrays, or `jax.ShapeDtypeStruct`; only shapes and dtypes matter.
        """
        shapes = shapes_of_batch(batch)
        leaves, structure = jax.tree.flatten(shapes)
        key = (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self.programs:
            self.programs[key] = self._compiled(shapes)
        return self.programs[key]

    def _compiled(self, batch: Tree) -> EvaluationProgram:
        if not isinstance(self.mesh, Mesh):
            raise PlanError(
                "a program for devices that are not here cannot evaluate\nTry:"
                " shardlib.compile(...) on the devices themselves"
            )
        found = laid_out_for(
            _at_once(self.plan),
            self.model,
            self._unchanging,
            batch,
            self.batch_axes,
            self.axes,
        )
        whole = shardings.named_sharding(self.mesh, Layout())
        sharded = abstract_batch(
            batch, found, lambda layout: shardings.named_sharding(self.mesh, layout)
        )
        loss, findings = self._lowered(found, sharded)

        def evaluate(params: Tree, model_state: Tree, batch: Tree) -> dict[str, Any]:
            value, (metrics, _) = loss(params, model_state, batch)
            return {"loss": value, **metrics}

        evaluate.__name__ = evaluate.__qualname__ = f"shardlib_evaluate_{self.plan.digest}"
        arguments = (self.state.params, self.state.model_state, sharded)
        with _jax_compat.in_mesh(self.mesh):
            jitted = jax.jit(
                evaluate,
                in_shardings=jax.tree.map(lambda leaf: leaf.sharding, arguments),
                out_shardings=whole,
            )
            compiled = jitted.lower(*arguments).compile()
        call = _jax_compat.runnable(jitted, compiled, arguments, self.mesh)
        return EvaluationProgram(call=call, batch=sharded, findings=(*found.findings, *findings))

    def _unchanging(self, params: Tree, state: Tree, batch: Tree) -> Any:
        """The loss, whose model state stays as it is."""
        value, (metrics, _) = self.loss(params, state, batch)
        return value, (metrics, state)

    def _lowered(self, found: LaidOut, batch: Tree) -> tuple[PureLoss, tuple[Finding, ...]]:
        """The laid-out loss, through the stages where there are some."""
        plan, cuts = found.plan, jax.tree.map(lambda leaf: leaf.sharding, batch)
        if plan.mesh["stage"] > 1:
            dims = with_keys(shardings.batch_dims(found.axes), batch, found.traced.program)
            try:
                staged, told = pipeline(
                    plan,
                    found.traced,
                    self.model.state,
                    self.mesh,
                    self.params,
                    StagedLayouts(layers=found.placements, around={}),
                    key_inputs(dims, found.traced.closed_jaxpr),
                )
            except PlanError as error:
                return self._unpiped(found), (
                    Finding(
                        code="evaluation-without-stages",
                        severity="warning",
                        where=f"stage={plan.mesh['stage']}",
                        message=(
                            "the evaluation does not go through the stages, and every device"
                            f" gathers all layers: {error}"
                        ),
                    ),
                )
            return (
                lambda params, state, batch: staged.loss(
                    params, state, *Microbatches(shardings=cuts, dims=dims, count=1).split(batch)
                ),
                told,
            )
        return self._unpiped(found), ()

    def _unpiped(self, found: LaidOut) -> PureLoss:
        return placed_loss(
            found.traced,
            Placing.of(found.traced, found.plan, self.mesh, self.params, found.placements),
        )

    def of(self, loss: UserLoss | None, batch_axes: Tree) -> Evaluation:
        """The same of another loss of the user's.

        Args:
            loss: (model, batch) -> scalar or (scalar, metrics); None for this one.
            batch_axes: logical axes of its batches; None for the convention.
        """
        return replace(
            self,
            loss=self.loss if loss is None else self.model.evaluated(loss),
            batch_axes=batch_axes,
            written=self.written if loss is None else loss,
            programs={},
        )


def _at_once(plan: Plan) -> Plan:
    """A plan for all rows at once: one microbatch, which goes through the stages once, and nothing
    to be kept for a backward pass.
    """
    return replace(
        plan,
        microbatches=1,
        accumulation=1,
        virtual_stages=1,
        schedule=GPIPE.name if plan.mesh["stage"] > 1 else plan.schedule,
        gather="use",
        remat="none",
        remat_layers=0,
        remat_classes=(),
        offload=(),
        pipeline="lockstep",
    )
