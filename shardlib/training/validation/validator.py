"""A program that validates: the loss of a set of rows with the parameters of a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import ModelError
from shardlib.frontend.steps.evaluation import StepEvaluation
from shardlib.frontend.steps.step_program import StepProgram
from shardlib.graph.rows import Rows
from shardlib.lowering.islands.learned import first_of, learned
from shardlib.lowering.program.evaluation import Evaluation
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.batches import shapes_of_batch
from shardlib.tracing.row_proofs import result_names, with_rows
from shardlib.tracing.rows.proof import Inputs, prove
from shardlib.training.states.average import averaged
from shardlib.training.states.programs import AnyProgram
from shardlib.training.validation.asked import Validation
from shardlib.training.validation.batches import batches_of, dims_and_rows
from shardlib.training.validation.combining import Combination, with_parts

#: Abstract batch, dim of the rows in each of its arrays, rows.
_Rows = tuple[Tree, tuple[int | None, ...], int]


class Evaluates(Protocol):
    """What evaluates a loss on a batch of any number of rows."""

    def evaluate(self, state: Tree, batch: Tree) -> Mapping[str, Tree]:
        """Metrics of a batch by name, "loss" among them."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Validator:
    """Validates states of one program.

    Attributes:
        asked: what is validated.
        evaluation: the loss, compiled for each number of rows that comes.
        state_of: state of the training -> what `evaluation` takes.
        pure: (params, model state, batch) -> (loss, (metrics, state)), and the abstract first two
            of them: what is proven about rows.
        usual: rows of a batch of the training.
    """

    asked: Validation
    evaluation: Evaluates
    state_of: Callable[[Tree], Tree]
    pure: tuple[Callable[..., Any], Tree, Tree]
    usual: int

    def validate(self, state: Tree) -> dict[str, float]:
        """The metrics of the whole set by name, "validation/loss" among them; the state stays
        usable.
        """
        held, found, seen = self.state_of(state), Combination(), list[_Rows]()
        for batch in batches_of(self.asked, self.usual):
            dims, rows = dims_and_rows(batch, self.asked.batch_axes)
            seen = seen or [(shapes_of_batch(batch), dims, rows)]
            found.add(rows, self.evaluation.evaluate(held, batch))
        combined = found.result(lambda: self._proof(*seen[0]))
        return {f"{self.asked.name}/{name}": value for name, value in combined.items()}

    def _proof(self, batch: Tree, dims: tuple[int | None, ...], rows: int) -> Rows:
        loss, params, state = self.pure
        number = max(rows, 2)

        def at(count: int) -> Any:
            return jax.make_jaxpr(loss)(params, state, with_rows(batch, dims, count))

        out = jax.eval_shape(loss, params, state, with_rows(batch, dims, number))
        inputs = Inputs(
            parameters=len(jax.tree.leaves(params)),
            states=len(jax.tree.leaves(state)),
            dims=dims,
            apart=True,
        )
        return prove(at(number), at, inputs, result_names(out), number).rows


def validator(asked: Validation, program: AnyProgram) -> Validator:
    """What validates states of a program."""
    if asked.average and not isinstance(program, Program):
        raise ModelError(
            "the average of parameters is validated of programs of shardlib.compile alone\nTry:"
            " of a step of your own, a loss that takes the average from the state"
        )
    if isinstance(program, StepProgram):
        return _of_step(asked, program)
    first = first_of(program)
    written = asked.loss or first.evaluated.written
    evaluation: Evaluation = (
        first.evaluated
        if written is None
        else first.evaluation(with_parts(written), batch_axes=asked.batch_axes)
    )
    return Validator(
        asked=asked,
        evaluation=evaluation,
        state_of=_averaging(first) if asked.average else lambda state: learned(program, state),
        pure=(evaluation.loss, first.model.params, first.model.state),
        usual=_rows(program.rows),
    )


def _averaging(program: Program) -> Callable[[Tree], Tree]:
    return lambda state: averaged(program, state)


def _of_step(asked: Validation, program: StepProgram) -> Validator:
    if asked.loss is None:
        raise ModelError(
            "a step of your own does not say what a validation computes\nTry:"
            " Validation(data=..., loss=lambda state, batch: ...)"
        )
    evaluation = StepEvaluation(program=program, loss=with_parts(asked.loss))
    return Validator(
        asked=asked,
        evaluation=evaluation,
        state_of=lambda state: state,
        pure=(
            lambda state, _, batch: (lambda found: (found[0], (found[1], ())))(
                evaluation.metrics(state, batch)
            ),
            program.traced.state,
            (),
        ),
        usual=_rows(program.rows),
    )


def _rows(batch: Tree) -> int:
    """Rows of a batch of the training: the leading dim of its first array that has one."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape), 1)
