"""May the batch be worked through in parts, and what does a plan say of it?"""

from __future__ import annotations

from shardlib.errors import PinError, raise_all
from shardlib.graph.rows import Rows
from shardlib.report import Finding, diagnostic

#: What is computed in every part of the batch by itself: note -> (what it is, what to try).
_BY_ITSELF = {
    "balance": (
        (
            "the loss that balances the load of experts is a product of two means over tokens:"
            " every microbatch has its own, and their mean takes the place of that of the whole"
            " batch"
        ),
        (
            "pin microbatches to 1, or balance the experts of every sequence by itself, which is a"
            " mean over rows"
        ),
    ),
}
_TRY = (
    "pin microbatches to 1, or return shardlib.WeightedMean(total, weight) for a ratio of sums over"
    " rows, or say rows='mean' where it is a mean all the same"
)
_ANY_NUMBER = (
    "take the number of rows from an array, x.shape[0], or -1 in a reshape, in place of a literal"
)


def require_whole(rows: Rows, microbatches: int) -> None:
    """Raises where a batch is to be worked through in parts, and that would change the results."""
    if microbatches > 1 and not rows.splits:
        raise_all(
            PinError,
            f"{microbatches} microbatches cannot be computed: the loss is written for one number of"
            " rows"
            if rows.loss.fixed
            else f"{microbatches} microbatches would change the numbers: the rows of the batch meet"
            " before the end",
            list(rows.reasons),
            hint=_ANY_NUMBER if rows.loss.fixed else _TRY,
        )


def require_unstaged(rows: Rows, microbatches: int, stages: int) -> None:
    """Raises where microbatches are to go through stages, and the loss has results that stages
    cannot put together.
    """
    if microbatches > 1 and stages > 1 and rows.by_row:
        raise_all(
            PinError,
            f"{microbatches} microbatches cannot go through {stages} pipeline stages: results have"
            " a value for every row",
            [name for name, _ in rows.by_row],
            hint="return a sum or a mean over the rows, or pin stage to 1",
        )


@diagnostic
def coupled(rows: Rows, microbatches: int) -> list[Finding]:
    """Findings about a loss whose rows meet."""
    if not rows.splits:
        why = "no part of it can be" if rows.loss.fixed else "its rows meet before the end"
        return [
            Finding(
                code="rows-coupled",
                severity="info",
                where="the batch",
                message=(
                    f"the batch is worked through at once, since {why}: {'; '.join(rows.reasons)}"
                ),
                hint=_ANY_NUMBER if rows.loss.fixed else _TRY.partition(", or ")[2],
            )
        ]
    if microbatches == 1:
        return []
    return [
        Finding(
            code=f"{note}-per-microbatch",
            severity="warning",
            where=f"microbatches={microbatches}",
            message=_BY_ITSELF[note][0],
            hint=_BY_ITSELF[note][1],
        )
        for note in rows.notes
    ]
