"""What is validated during a run, on what, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.annotation.model import UserLoss
from shardlib.annotation.trees.paths import Tree
from shardlib.errors import ModelError, raise_all

#: () -> batches of any number of rows; or a dataset (`shardlib.data.open.read`); or a tree of host
#: arrays that holds all rows.
Data = Tree


@dataclass(frozen=True, kw_only=True, eq=False)
class Validation:
    """A loss of a set of rows, evaluated every so many steps; training does not see it.

    The result is that of the whole set, exactly: batches may have any number of rows, nothing is
    padded or left out, and means are weighted by rows, sums are added, and a
    `shardlib.WeightedMean` is divided once. What cannot be put together from batches, since rows of
    different batches meet in it, is an error; `rows=None` evaluates the whole set at once.

    Attributes:
        data: a tree of host arrays with all rows; or a dataset; or a function without arguments
            that gives batches, each time from the first one on.
        every: steps between two validations; the last step is followed by one, too.
        loss: (model, batch) -> scalar or (scalar, metrics); of a step of the user's own,
            (state, batch) -> the same, and then it is needed. By default that of
            `program.evaluate`.
        rows: that are evaluated at a time, of a tree or a dataset; 0 for as many as a batch of the
            training has, None for all at once.
        batch_axes: logical axes of a batch of it; by default those of a step, or by convention.
        average: whether the average of the parameters is validated in their place, where the
            optimizer keeps one (`shardlib.training.states.average`).
        name: comes before the names of its metrics: "validation/loss".

    Raises:
        ModelError: numbers out of range, all of them listed.
    """

    data: Data
    every: int = 100
    loss: UserLoss | None = None
    rows: int | None = 0
    batch_axes: Tree = None
    average: bool = False
    name: str = "validation"

    def __post_init__(self) -> None:
        failures = [f"every is {self.every!r}; it must be at least 1"] if self.every < 1 else []
        if self.rows is not None and self.rows < 0:
            failures.append(f"rows is {self.rows!r}; it must be at least 1, or None for all")
        if not self.name:
            failures.append("name is empty")
        if failures:
            raise_all(ModelError, "the validation is not usable", failures)
