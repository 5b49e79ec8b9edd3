"""Validation: the exact loss of a whole set of rows during training, for any number of rows.

settings = Settings(validation=Validation(data=held_out, every=200))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import jax
import numpy as np

from shardlib.annotation.names import UserLoss
from shardlib.annotation.trees import Tree
from shardlib.errors import BatchError, ModelError, SettingsError, raise_all
from shardlib.functions.losses import WeightedMean
from shardlib.graph import Dependence, Rows
from shardlib.lowering.runtime import shapes_of_batch
from shardlib.lowering.training_program import TrainingProgram
from shardlib.tracing.rows import LossInputs, prove
from shardlib.tracing.trace import describe_batch, result_names, rows_of, with_rows
from shardlib.training.states import averaged
from shardlib.untrusted.data import require_types

#: A function () -> batches of any number of rows; or a dataset (`shardlib.data.open.read`); or a
#: tree of host arrays with all rows.
Data = Tree


@dataclass(frozen=True, kw_only=True, eq=False)
class Validation:
    """A loss of a set of rows, evaluated at intervals; it has no effect on training.

    The result is exactly that of the whole set: batches may have any number of rows, nothing is
    padded or left out, means are weighted by rows, sums are added, and a `shardlib.WeightedMean` is
    divided once. A loss that cannot be combined from batches, since it mixes rows of different
    batches, is an error; `rows=None` evaluates the whole set at once.

    Attributes:
        data: a tree of host arrays with all rows; or a dataset; or a function without arguments
            that returns the batches, each time from the first one on.
        every: steps between two validations; the last step is followed by one, too.
        loss: (model, batch) -> scalar or (scalar, metrics); for a user's own step it is required,
            as (state, batch) -> the same. By default that of `program.evaluate`.
        rows: evaluated at a time, of a tree or a dataset; 0 for as many as in a training batch,
            None for all at once.
        batch_axes: logical axes of one of its batches; by default those of a training batch, or by
            convention.
        average: whether the average of the parameters is validated instead, if the optimizer has
            one (`shardlib.training.states`).
        name: prefix of its metrics: "validation/loss".

    Raises:
        ModelError: values of another kind or out of range, all of them listed.
    """

    data: Data
    every: int = 100
    loss: UserLoss | None = None
    rows: int | None = 0
    batch_axes: Tree = None
    average: bool = False
    name: str = "validation"

    def __post_init__(self) -> None:
        require_types(self, "shardlib.training.validation.Validation", SettingsError)
        failures = [f"every is {self.every!r}; it must be at least 1"] if self.every < 1 else []
        if self.rows is not None and self.rows < 0:
            failures.append(f"rows is {self.rows!r}; it must be at least 1, or None for all")
        if not self.name:
            failures.append("name is empty")
        if failures:
            raise_all(ModelError, "the validation is not usable", failures)


# --------------------------------------------------------------------------------------------------
# A set of rows in batches; the last one has the remaining rows.


def batches_of(validation: Validation, usual: int) -> Iterator[Tree]:
    """The batches of a validation, in order."""
    data, rows = validation.data, validation.rows
    if callable(data):
        return iter(cast("Callable[[], Iterable[Tree]]", data)())
    size = usual if rows == 0 else rows
    if hasattr(data, "examples_per_epoch"):
        return _of_dataset(data, size)
    return _of_tree(data, validation.batch_axes, size)


def dims_and_rows(batch: Tree, batch_axes: Tree) -> tuple[tuple[int | None, ...], int]:
    """The row dim of each array of a batch (None if it has none), and the number of rows.

    Args:
        batch_axes: logical axes, a tree like it; None for those by convention.
    """
    dims, sizes = rows_of(describe_batch(shapes_of_batch(batch), batch_axes))
    if len(sizes) != 1 or not sizes[0]:
        rows_text = f"{', '.join(map(str, sizes))} rows" if sizes and sizes[0] else "no rows"
        raise BatchError(
            f"a batch of the validation has {rows_text}\nTry: arrays with one number of rows, or"
            " batch_axes, which says where they are"
        )
    return dims, sizes[0]


def _of_dataset(data: Tree, size: int | None) -> Iterator[Tree]:
    total = int(data.examples_per_epoch)
    step = total if size is None else size
    for start in range(0, total, step):
        yield data.batch(start, min(step, total - start))


def _of_tree(data: Tree, batch_axes: Tree, size: int | None) -> Iterator[Tree]:
    dims, total = dims_and_rows(data, batch_axes)
    leaves, structure = jax.tree.flatten(data)
    step = total if size is None else size
    for start in range(0, total, step):
        stop = min(start + step, total)
        yield structure.unflatten(
            [
                leaf
                if dim is None
                else np.asarray(leaf)[(slice(None),) * dim + (slice(start, stop),)]
                for leaf, dim in zip(leaves, dims, strict=True)
            ]
        )


# --------------------------------------------------------------------------------------------------
# Metrics of batches combined to those of the whole set, exactly.
#
# Whether a metric is a mean over rows, a sum or a ratio of sums is proven from its function
# (`shardlib.tracing.rows`); metrics with methods `merge` and `compute`, like those of `clu`,
# combine themselves.

#: Prefixes of the two sums of a ratio among the metrics of a batch.
TOTAL, WEIGHT = "of the total: ", "of the weight: "


def with_parts(loss: UserLoss) -> UserLoss:
    """A loss that also returns the two sums of every `shardlib.WeightedMean` as metrics.

    Args:
        loss: (model, batch) -> scalar or (scalar, metrics).
    """

    def parted(model: Tree, batch: Tree) -> Tree:
        result = loss(model, batch)
        value, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(metrics, Mapping):
            return result
        ratios = {
            name: metric
            for name, metric in {"loss": value, **metrics}.items()
            if isinstance(metric, WeightedMean)
        }
        if not ratios:
            return result
        return value, {
            **metrics,
            **{TOTAL + name: metric.total for name, metric in ratios.items()},
            **{WEIGHT + name: metric.weight for name, metric in ratios.items()},
        }

    return parted


def is_metric(value: object) -> bool:
    """True if a metric combines itself, like those of `clu`."""
    return callable(getattr(value, "merge", None)) and callable(getattr(value, "compute", None))


def named_numbers(name: str, value: Tree) -> dict[str, float]:
    """The numbers of a metric by name; {} if it is an array."""
    computed = value.compute() if is_metric(value) else value
    if isinstance(computed, Mapping):
        return {
            key: number
            for inner, metric in computed.items()
            for key, number in named_numbers(f"{name}.{inner}", metric).items()
        }
    return {name: float(computed)} if getattr(computed, "ndim", 0) == 0 else {}


@dataclass(kw_only=True)
class Combination:
    """Metrics of the batches so far."""

    _batches: list[tuple[int, Mapping[str, Tree]]] = field(
        default_factory=list[tuple[int, Mapping[str, Tree]]]
    )

    def add(self, rows: int, metrics: Mapping[str, Tree]) -> None:
        """Adds the metrics of a batch."""
        values = {
            name: metric if is_metric(metric) else float(metric)
            for name, metric in metrics.items()
            if is_metric(metric) or getattr(metric, "ndim", 0) == 0
        }
        self._batches.append((rows, values))

    def result(self, proof: Callable[[], Rows]) -> dict[str, float]:
        """The metrics of all rows, by name."""
        if not self._batches:
            raise BatchError("the validation has no rows\nTry: at least one batch")
        names = [name for name in self._batches[0][1] if not name.startswith((TOTAL, WEIGHT))]
        if len(self._batches) == 1:
            combined = {name: self._batches[0][1][name] for name in names}
        else:
            combined = self._combined(names, proof())
        return {
            key: number
            for name, metric in combined.items()
            for key, number in named_numbers(name, metric).items()
        }

    def _combined(self, names: list[str], rows: Rows) -> dict[str, Any]:
        dependences = {"loss": rows.loss, **dict(rows.metrics)}
        combined: dict[str, Any] = {}
        failures: list[str] = []
        for name in names:
            if is_metric(self._batches[0][1][name]):
                metric, why = self._merged(name)
            else:
                dependence = dependences.get(name)
                metric, why = (
                    self._added(name, dependence),
                    dependence or "nothing is known of its rows",
                )
            if metric is None:
                failures.append(f"{name}: {why}")
            combined[name] = metric
        if failures:
            raise_all(
                BatchError,
                "metrics of the validation cannot be put together from batches",
                failures,
                hint=(
                    "shardlib.WeightedMean(total=..., weight=...) for a ratio of sums, or"
                    " Validation(rows=None), which evaluates all rows at once"
                ),
            )
        return combined

    def _merged(self, name: str) -> tuple[Any, str]:
        """The merged metric, or None and the reason why it cannot be merged."""
        merged: Any = None
        for _, metrics in self._batches:
            metric = metrics[name]
            try:
                merged = metric if merged is None else merged.merge(metric)
            except NotImplementedError:
                return None, f"{type(metric).__name__}.merge is not implemented"
        return merged, ""

    def _added(self, name: str, dependence: Dependence | None) -> float | None:
        """A scalar of all rows; None if it cannot be combined from batches."""
        values = [metrics[name] for _, metrics in self._batches]
        if TOTAL + name in self._batches[0][1]:
            total, weight = (self._sum(part + name) for part in (TOTAL, WEIGHT))
            return total / weight if weight else math.nan
        if dependence is None:
            return None
        if dependence.kind == "mean":
            rows = [count for count, _ in self._batches]
            pairs = zip(rows, values, strict=True)
            return math.fsum(count * value for count, value in pairs) / sum(rows)
        if dependence.kind == "sum":
            return math.fsum(values)
        return values[0] if dependence.kind == "constant" else None

    def _sum(self, name: str) -> float:
        return math.fsum(metrics[name] for _, metrics in self._batches)


# --------------------------------------------------------------------------------------------------
# A validator: the loss of a set of rows with the parameters of a state.

#: Abstract batch, row dim of each of its arrays, number of rows.
_Rows = tuple[Tree, tuple[int | None, ...], int]


class Evaluates(Protocol):
    """An evaluation of a loss on a batch of any number of rows."""

    @property
    def pure(self) -> tuple[Callable[..., Any], Tree, Tree]:
        """(params, model state, batch) -> (loss, (metrics, state)), and its abstract first two
        arguments, for the proof about rows.
        """
        ...

    def evaluate(self, state: Tree, batch: Tree) -> Mapping[str, Tree]:
        """Metrics of a batch by name, "loss" among them."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Validator:
    """Validates states of one program.

    Attributes:
        asked: the validation.
        evaluation: the loss, compiled for each number of rows that occurs.
        state_of: training state -> state for `evaluation`.
        usual: rows of a training batch.
    """

    asked: Validation
    evaluation: Evaluates
    state_of: Callable[[Tree], Tree]
    usual: int

    def validate(self, state: Tree) -> dict[str, float]:
        """The metrics of the whole set by name, "validation/loss" among them; the state stays
        usable.
        """
        learned, combination, seen = self.state_of(state), Combination(), list[_Rows]()
        for batch in batches_of(self.asked, self.usual):
            dims, rows = dims_and_rows(batch, self.asked.batch_axes)
            seen = seen or [(shapes_of_batch(batch), dims, rows)]
            combination.add(rows, self.evaluation.evaluate(learned, batch))
        combined = combination.result(lambda: self._proof(*seen[0]))
        return {f"{self.asked.name}/{name}": value for name, value in combined.items()}

    def _proof(self, batch: Tree, dims: tuple[int | None, ...], rows: int) -> Rows:
        loss, params, state = self.evaluation.pure
        number = max(rows, 2)

        def at(count: int) -> Any:
            return jax.make_jaxpr(loss)(params, state, with_rows(batch, dims, count))

        out = jax.eval_shape(loss, params, state, with_rows(batch, dims, number))
        inputs = LossInputs(
            parameters=len(jax.tree.leaves(params)),
            states=len(jax.tree.leaves(state)),
            dims=dims,
            independent=True,
        )
        return prove(at(number), at, inputs, result_names(out), number).rows


def validator(validation: Validation, program: TrainingProgram) -> Validator:
    """The validator of a program's states."""
    loss_program = program.loss_program
    if validation.average and (loss_program is None or loss_program is not program):
        raise ModelError(
            "the average of parameters is validated of programs of shardlib.compile alone\nTry:"
            " of a step of your own, a loss that takes the average from the state"
        )
    written = validation.loss or (
        None if loss_program is None else loss_program.evaluated.user_loss
    )
    evaluation = (
        program.evaluation()
        if written is None
        else program.evaluation(with_parts(written), batch_axes=validation.batch_axes)
    )
    return Validator(
        asked=validation,
        evaluation=evaluation,
        state_of=partial(averaged, loss_program)
        if loss_program and validation.average
        else program.learned,
        usual=_rows(program.rows),
    )


def _rows(batch: Tree) -> int:
    """Rows of a training batch: the leading dim of its first array that has one."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape), 1)
