"""How what a loss returns depends on the rows of its batch.

A batch may be worked through in several parts, one after the other, only where that changes no
number. That is known of sums over rows, whatever they are multiplied with or divided by; where rows
meet before the end (a contrastive loss, statistics of a batch) no sum over parts gives the result
of the whole.

>>> Rows(loss=Dependence(kind="mean")).splits
True
>>> where = "dot_general at loss.py:12"
>>> Rows(loss=Dependence(kind="coupled", why="rows meet other rows", where=where)).reasons
('the loss: rows meet other rows (dot_general at loss.py:12)',)
"""

from __future__ import annotations

from dataclasses import dataclass

#: What a result can be, by what happens to it when the batch is worked through in parts.
KINDS: tuple[str, ...] = (
    "mean",
    "sum",
    "additive",
    "weighted mean",
    "constant",
    "rows",
    "coupled",
)


@dataclass(frozen=True, kw_only=True)
class RowDim:
    """Where an array has its rows.

    Attributes:
        dim: its dim of rows.
        inner: elements along that dim that belong to one row, side by side.
        bytes: of the array.
    """

    dim: int
    inner: int = 1
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Dependence:
    """How one result depends on the rows of the batch.

    Attributes:
        kind: "mean" of a function of each row; "sum" of it; "additive": several such sums that are
            scaled differently by the number of rows; "weighted mean": a sum over rows with
            coefficients that are made from the data of the whole batch; "constant": no row is
            looked at; "rows": an array with a value for every row, which looks at that row alone;
            "coupled": rows meet before the end.
        why: what couples the rows.
        where: the operation and the line of the source where they meet.
        notes: what is computed in every part by itself although the rows meet in it, by the
            function's own declaration: "balance".
        fixed: whether the rows are coupled since the loss computes for their number alone.
        rows: where the rows are, of "rows".
    """

    kind: str
    why: str = ""
    where: str = ""
    notes: tuple[str, ...] = ()
    fixed: bool = False
    rows: RowDim | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert self.rows is None or self.kind == "rows"

    def __str__(self) -> str:
        return f"{self.why} ({self.where})" if self.where else self.why or f"a {self.kind}"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How all results of a loss depend on the rows of the batch.

    Attributes:
        loss: the loss.
        metrics: every metric, by path.
        state: every array of the model's state that is not what it was, by path.
        asserted: whether the user vouched for it (`rows="mean"`), so that nothing was proven.
    """

    loss: Dependence
    metrics: tuple[tuple[str, Dependence], ...] = ()
    state: tuple[tuple[str, Dependence], ...] = ()
    asserted: bool = False

    @property
    def all(self) -> tuple[tuple[str, Dependence], ...]:
        """Every result with what to call it."""
        return (
            ("the loss", self.loss),
            *((f"metric {path!r}", dependence) for path, dependence in self.metrics),
            *((f"model state {path!r}", dependence) for path, dependence in self.state),
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the batch cannot be worked through in parts; empty where it can."""
        if self.loss.fixed:
            return (f"the loss: {self.loss}",)
        return tuple(
            f"{name}: {dependence}" for name, dependence in self.all if dependence.kind == "coupled"
        )

    @property
    def splits(self) -> bool:
        """Whether the batch can be worked through in parts with the numbers of the whole."""
        return not self.reasons

    @property
    def by_row(self) -> tuple[tuple[str, RowDim], ...]:
        """The results that have a value for every row, with what to call them; microbatches are put
        together to the rows of the whole batch, which are kept until the last.
        """
        return tuple(
            (name, dependence.rows) for name, dependence in self.all if dependence.rows is not None
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What every part computes by itself, see `Dependence.notes`."""
        return tuple(dict.fromkeys(note for _, dependence in self.all for note in dependence.notes))
