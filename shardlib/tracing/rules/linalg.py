"""Linear algebra on stacks of matrices and Fourier transforms: stacked dims are free, the last ones
stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.graph.factors import Dims
from shardlib.tracing.rules.description import Call, Describe, Description, Factors, Shape, elements


def matrices(call: Call) -> Description:
    """Each matrix of the stack is worked on as a whole; about n^3 operations for an n x n
    matrix.
    """
    shape = call.operands[0]
    return _stacked(call, len(shape) - 2, elements(shape) * shape[-1])


def fourier(call: Call) -> Description:
    """A transform over the last dims."""
    shape = call.operands[0]
    return _stacked(call, len(shape) - len(call.params["fft_lengths"]), elements(shape))


def _stacked(call: Call, stack: int, flops: float) -> Description:
    factors = Factors()
    common: Dims = tuple(factors.parallel(size) for size in call.operands[0][:stack])

    def dims(shape: Shape) -> Dims:
        shared = shape[:stack] == call.operands[0][:stack]
        return (common if shared else tuple(map(factors.keep, shape[:stack]))) + tuple(
            map(factors.keep, shape[stack:])
        )

    return Description(
        factors.rule([dims(s) for s in call.operands], [dims(s) for s in call.results]),
        "opaque",
        flops,
    )


TABLE: Mapping[str, Describe] = {
    **dict.fromkeys(
        (
            "cholesky",
            "triangular_solve",
            "eigh",
            "eig",
            "qr",
            "geqrf",
            "householder_product",
            "svd",
            "lu",
            "schur",
        ),
        matrices,
    ),
    "fft": fourier,
}
