"""Linear algebra on stacks of matrices and Fourier transforms: stacked dims are free, the last ones
stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardlib.graph.factors import Dims
from shardlib.tracing.rules.description import Call, Describe, Description, Factors, Shape, elements

#: Primitives that work on vectors.
_VECTORS = frozenset({"lu_pivots_to_permutation", "tridiagonal_solve"})


def whole_dims(name: str, params: Mapping[str, Any]) -> int:
    """How many of the last dims of the first operand of a primitive are worked on as a whole; those
    before are a stack.
    """
    return len(params["fft_lengths"]) if name == "fft" else 1 if name in _VECTORS else 2


def matrices(call: Call) -> Description:
    """Each matrix or vector of the stack is worked on as a whole; about n^3 operations for an n x n
    matrix, n for a vector.
    """
    shape, whole_rank = call.operands[0], whole_dims(call.name, call.params)
    stack = max(0, len(shape) - whole_rank)
    flops = elements(shape) * (shape[-1] if whole_rank == 2 and call.name != "fft" else 1)
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
            "custom_linear_solve",
            "fft",
            *_VECTORS,
        ),
        matrices,
    ),
}
