"""A program as its compiled functions: the step, the first state, and what they are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from shardlib import _jax_compat
from shardlib.annotation.model import Model
from shardlib.annotation.trees.paths import Tree
from shardlib.errors import PlanError
from shardlib.jax_types import Metrics
from shardlib.layout import Layout
from shardlib.lowering.host_memory.disk.arrays import Writer
from shardlib.lowering.host_memory.disk.compiling import Where
from shardlib.lowering.host_memory.disk.step import DiskStep
from shardlib.lowering.mesh import shardings
from shardlib.lowering.pipeline.per_stage.around import Made, OneUpdate, Update
from shardlib.lowering.pipeline.per_stage.dispatch import Dispatch
from shardlib.lowering.pipeline.per_stage.programs import StagePrograms
from shardlib.lowering.program.step import (
    apply_function,
    gradients_function,
    init_function,
    named,
    step_function,
)
from shardlib.lowering.program.update.parts import StepParts
from shardlib.lowering.runtime.state import Gradients, TrainState
from shardlib.planning.plan import Plan
from shardlib.planning.text.card import plan_card, plan_line
from shardlib.report import Finding
from shardlib.schedules import picture

#: Options of a compiler, by its own names.
Options: TypeAlias = Mapping[str, str | bool | int]
#: (program, limits, options) -> `shardlib.Verification`.
Verifier: TypeAlias = Callable[[Any, Any, Options | None], Any]


def verified_by(
    verifier: Verifier | None, program: Any, limits: Any, options: Options | None
) -> Any:
    """The verification of a program.

    Args:
        verifier: of the program; None where it was lowered to be a part of another.
        program, limits, options: see `LoweredProgram.verify`.

    Raises:
        PlanError: there is no verifier.
    """
    if verifier is None:
        raise PlanError(
            "this program is a part of another, which is verified as a whole\nTry:"
            " shardlib.compile(...).verify()"
        )
    return verifier(program, limits, options)


def shardings_of(tree: Tree) -> Tree:
    """The shardings of abstract arrays, as a tree like them.

    Args:
        tree: tree of `jax.ShapeDtypeStruct` with shardings, or of arrays.
    """
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoweredProgram:
    """The functions of a program, compiled at their first use.

    Attributes:
        plan: the decisions it carries out.
        mesh: its devices.
        model: the user's model.
        optimizer: the user's optimizer.
        state: abstract training state, each leaf with its sharding.
        batch: abstract batch, each leaf with its sharding.
        findings: what lowering noticed, after what the plan has to say.
        parts: what a step is made of.
        programs: the stages of a pipeline, where they are programs of their own.
        disk: where the optimizer's state is stored, where that is on disk.
        verifier: what `verify` calls, which stands above this room.
    """

    plan: Plan
    mesh: Mesh | AbstractMesh
    model: Model
    optimizer: optax.GradientTransformation
    state: TrainState
    batch: Tree
    findings: tuple[Finding, ...]
    parts: StepParts
    programs: StagePrograms | None = None
    disk: Writer | None = None
    verifier: Verifier | None = None

    @property
    def rows(self) -> Tree:
        """Abstract global batch, each leaf with its sharding."""
        return self.batch

    def __repr__(self) -> str:
        return plan_line(self.plan, type(self).__name__)

    def _repr_html_(self) -> str:
        return plan_card(self.plan)

    def lower(self) -> jax.stages.Lowered:
        """The step lowered for its mesh, with nothing executed; works on meshes of devices that are
        not there.

        Raises:
            PlanError: the stages of the pipeline are programs of their own, or the optimizer's
                state is on disk.
        """
        self._one_program()
        with _jax_compat.in_mesh(self.mesh):
            return self._jitted_step.lower(self.state, self.batch)

    @cached_property
    def _jitted_step(self) -> jax.stages.Wrapped:
        return jax.jit(
            self.step_function(),
            donate_argnums=(0,),
            in_shardings=shardings_of((self.state, self.batch)),
            out_shardings=(
                shardings_of(self.state),
                shardings.named_sharding(self.mesh, Layout()),
            ),
        )

    @cached_property
    def _run_step(self) -> Callable[[TrainState, Tree], tuple[TrainState, Metrics]]:
        """The compiled step."""
        return _jax_compat.runnable(
            self._jitted_step, self.compiled(), (self.state, self.batch), self.mesh
        )

    def step_function(self) -> Callable[[TrainState, Tree], tuple[TrainState, Metrics]]:
        """The step before it is compiled, for those who compile it otherwise.

        Returns:
            (state, batch) -> (state, metrics), not jitted.

        Raises:
            PlanError: see `lower`.
        """
        self._one_program()
        return named(step_function(self.parts), "step", self.plan.digest)

    def compiled(self) -> jax.stages.Compiled:
        """The compiled step; compiled at the first call.

        Raises:
            PlanError: see `lower`.
        """
        return self._compiled_step

    def verify(self, *, limits: Any = None, options: Options | None = None) -> Any:
        """Compiles the step for the machine of its plan, which need not be here, and compares what
        the compiler made with the plan: `shardlib.verify(program)`.

        Args:
            limits: `shardlib.verification.isolation.Limits`, seconds and bytes of memory that the
                compiler may take.
            options: options of the compiler, by its own names.

        Returns:
            A `shardlib.Verification`.

        Raises:
            ShardlibError: see `shardlib.verify`.
        """
        return verified_by(self.verifier, self, limits, options)

    def prepare(self) -> None:
        """Compiles all that a step runs, if that has not been done."""
        if self.programs is not None:
            _ = self._dispatch
        elif self.disk is not None:
            self._on_disk.prepare()
        else:
            _ = self._compiled_step

    def memory(self) -> dict[str, int]:
        """Bytes per device of the compiled step: "arguments", "outputs", "aliased", "temporaries"
        and "peak".

        Where a step is several programs, of the one that needs the most; what stages that are
        programs of their own keep beside it is not counted.

        Returns:
            Bytes by name.
        """
        several = self._several
        return _jax_compat.compiled_memory(self.compiled()) if several is None else several.memory()

    def timeline(self) -> str:
        """The schedule of the pipeline as text, a column a tick, or a task where stages are
        programs of their own; empty without stages.
        """
        if self.programs is not None:
            return picture.orders_text(self.programs.order)
        return "" if self.parts.run.table is None else picture.text(self.parts.run.table)

    @cached_property
    def _gradients(self) -> Callable[[TrainState, Tree], Gradients]:
        """The first half of a step; it leaves the state alone."""
        self._one_program()
        run = named(gradients_function(self.parts), "gradients", self.plan.digest)
        with _jax_compat.in_mesh(self.mesh):
            found = jax.jit(run, in_shardings=shardings_of((self.state, self.batch)))
            compiled = found.lower(self.state, self.batch).compile()
        return _jax_compat.runnable(found, compiled, (self.state, self.batch), self.mesh)

    @cached_property
    def _apply(self) -> Callable[[TrainState, Gradients], tuple[TrainState, Metrics]]:
        """The second half of a step, which takes the state over."""
        self._one_program()
        run = named(apply_function(self.parts), "apply", self.plan.digest)
        whole = shardings.named_sharding(self.mesh, Layout())
        return jax.jit(run, donate_argnums=(0,), out_shardings=(shardings_of(self.state), whole))

    @property
    def _several(self) -> Dispatch | DiskStep | None:
        """What runs a step that is several programs; None where it is one."""
        return (
            self._dispatch
            if self.programs is not None
            else self._on_disk
            if self.disk is not None
            else None
        )

    def _one_program(self) -> None:
        if self.disk is not None:
            raise PlanError(
                "a step whose optimizer state is on disk is no single program\nTry:"
                " offload=['optimizer'], or shardlib.verify(init, loss, optimizer, batch,"
                " plan=program.plan), which compiles it with that state in host memory"
            )
        if self.programs is not None:
            raise PlanError(
                "a step whose stages are programs of their own (pipeline='programs') is no single"
                " program\nTry: pipeline='lockstep'"
            )

    @cached_property
    def _compiled_step(self) -> jax.stages.Compiled:
        return self.lower().compile()

    @cached_property
    def _dispatch(self) -> Dispatch:
        assert self.programs is not None
        return self.programs.compiled(
            self.state,
            self.batch,
            self._update,
            f"shardlib_{self.plan.digest}",
        )

    def _update(self, made: Made) -> Update:
        """What stages that are programs of their own leave to be done, compiled.

        Args:
            made: what it is given beside the state, abstract.
        """
        if self.disk is not None:
            step = self._with_disk(made)
            step.prepare()
            return step
        run = named(step_function(self.parts), "update", self.plan.digest)
        metrics = shardings.named_sharding(self.mesh, Layout())
        jitted = jax.jit(
            run, donate_argnums=(0,), out_shardings=(shardings_of(self.state), metrics)
        )
        compiled = jitted.lower(self.state, made).compile()
        runs = _jax_compat.runnable(jitted, compiled, (self.state, made), None)
        return OneUpdate(call=compiled, run=runs)

    @property
    def _first(self) -> Callable[[Any], TrainState]:
        """seed -> the state before the first step."""
        parts = self.parts
        return init_function(
            self.model, parts.optimizer, parts.precision, parts.guards, parts.run.kept
        )

    @cached_property
    def _on_disk(self) -> DiskStep:
        """Where stages are programs of their own, for the first state alone."""
        return self._with_disk(self.batch)

    def _with_disk(self, batch: Tree) -> DiskStep:
        """The step with its state on disk, for an abstract batch, or what stages leave of it."""
        assert self.disk is not None and isinstance(self.mesh, Mesh)
        where = Where(
            mesh=self.mesh,
            state=self.state,
            whole=shardings.named_sharding(self.mesh, Layout()),
            digest=self.plan.digest,
        )
        return DiskStep(
            where=where,
            batch=batch,
            function=step_function(self.parts),
            first=self._first,
            writer=self.disk,
        )

    @cached_property
    def _init(self) -> Callable[[Any], TrainState]:
        """A seed, or the data of a key -> the state before the first step."""
        init = named(
            self._first,
            "init",
            self.plan.digest,
        )
        return jax.jit(init, out_shardings=shardings_of(self.state))
