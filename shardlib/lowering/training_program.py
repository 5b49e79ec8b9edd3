"""The protocol of programs that train: of a loss (`Program`), of a step of the user's own
(`StepProgram`), and of several islands. Training, checkpoints and verification use programs through
it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
from jax.sharding import AbstractMesh, Mesh

from shardlib.annotation.names import Seed, UserLoss
from shardlib.annotation.trees import Tree
from shardlib.findings import Finding
from shardlib.lowering.program import Options, Program
from shardlib.lowering.runtime import TrainState
from shardlib.lowering.uses import LossJaxpr
from shardlib.planner.plan import Plan

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class TrainingProgram(Protocol):
    """A program that trains. Implementations do not inherit from it: a dataclass would treat its
    properties as defaults.
    """

    @property
    def plan(self) -> Plan:
        """The plan that it implements."""
        ...

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """Its devices."""
        ...

    @property
    def state(self) -> Any:
        """Abstract state, each leaf with its sharding."""
        ...

    @property
    def batch(self) -> Tree:
        """Abstract batch as a step takes it, each leaf with its sharding."""
        ...

    @property
    def rows(self) -> Tree:
        """Abstract global batch, each leaf with its sharding."""
        ...

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of the plan and of the lowering."""
        ...

    @property
    def source(self) -> LossJaxpr | None:
        """The loss, or the whole step, as it was traced for the global batch."""
        ...

    @property
    def loss_program(self) -> Program | None:
        """The program with the model, the loss and the optimizer: the first one of several islands;
        None for a step of the user's own, which contains all of them.
        """
        ...

    @property
    def metrics(self) -> Tree:
        """Abstract metrics of a step; None if they are not known, except that "loss" is among
        them.
        """
        ...

    def init(self, seed: Seed = 0) -> Any:
        """The state before the first step."""
        ...

    def step(self, state: Any, batch: Tree) -> tuple[Any, Any]:
        """Runs one step: the next state, and metrics."""
        ...

    def prepare(self) -> None:
        """Compiles everything that a step runs."""
        ...

    def compiled(self) -> jax.stages.Compiled:
        """The compiled step."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes per device of the compiled step, by name."""
        ...

    def verify(self, *, limits: Any = None, options: Options | None = None) -> Any:
        """Compares the plan with what the compiler of its machine makes of the step."""
        ...

    def learned(self, state: Any) -> Any:
        """The state that evaluations and exports read: for islands, that of one of them, with the
        outer parameters.
        """
        ...

    def evaluation(self, loss: UserLoss | None = None, *, batch_axes: Tree = None) -> Any:
        """An evaluation of a loss with such a state (`shardlib.lowering.step.Evaluation`)."""
        ...


_MEMBERS = ("plan", "state", "loss_program", "init", "step", "prepare", "learned", "evaluation")


def is_program(value: object) -> TypeIs[TrainingProgram]:
    """True if a value is a training program, by its type: reading a property may trace a loss."""
    fields = getattr(type(value), "__dataclass_fields__", {})
    return all(hasattr(type(value), name) or name in fields for name in _MEMBERS)


@runtime_checkable
class CompositeState(Protocol):
    """The states of several programs as one, which checkpoints store in a form of its own."""

    def mapped(self, function: Callable[[TrainState], TrainState]) -> Any:
        """The states after a function is applied to each."""
        ...

    def stored_form(self) -> Tree:
        """The arrays as a tree in their stored form."""
        ...

    def of_stored_form(self, form: Tree) -> Any:
        """The states from a tree in their stored form."""
        ...

    def is_stored_in(self, paths: Any) -> bool:
        """True if a checkpoint with these paths and shapes has states like these."""
        ...
