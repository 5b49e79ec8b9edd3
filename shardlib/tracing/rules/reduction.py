"""Ops that combine positions along a dim: reductions, running sums, windows, sorts.

A reduction can be sharded along the reduced dim, the parts combined afterwards; an argmax, a
running sum or a sort cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardlib.graph.factors import Dim, Dims
from shardlib.tracing.rules.description import Call, Describe, Description, Factors, elements


def reduction(call: Call) -> Description:
    """Sum, maximum, ...: the reduced dims leave partial results when cut."""
    return _reduction(call, call.params["axes"], cut=True)


def argument_reduction(call: Call) -> Description:
    """argmax, argmin: the position is known only to who sees the whole dim."""
    return _reduction(call, call.params["axes"], cut=False)


def generic_reduction(call: Call) -> Description:
    """`jax.lax.reduce` with any function; its initial value would be counted once per part, so the
    dims stay whole.
    """
    return _reduction(call, call.params["dimensions"], cut=False)


def _reduction(call: Call, axes: Sequence[int], *, cut: bool) -> Description:
    shape, reduced = call.operands[0], {int(axis) for axis in axes}
    factors = Factors()
    dims: Dims = tuple(
        (factors.sum if cut else factors.keep)(size) if i in reduced else factors.parallel(size)
        for i, size in enumerate(shape)
    )
    result: Dims = tuple(dim for i, dim in enumerate(dims) if i not in reduced)
    operands = [dims if s == shape else ((),) * len(s) for s in call.operands]
    return Description(
        factors.rule(operands, [result] * len(call.results)), "reduction", elements(shape)
    )


def cumulative(call: Call) -> Description:
    """Running sum, product, maximum: whole along its axis."""
    return _along(call, {call.params["axis"]}, "reduction", elements(call.operands[0]))


def sort(call: Call) -> Description:
    """Sorts one or more arrays together along one dim."""
    return _along(call, {call.params["dimension"]}, "sort", 0.0)


def reverse(call: Call) -> Description:
    """Reverses dims, which stay whole."""
    return _along(call, set(call.params["dimensions"]), "movement", 0.0)


def _along(call: Call, unsplit: set[int], category: str, flops: float) -> Description:
    factors = Factors()
    dims: Dims = tuple(
        factors.keep(size) if i in unsplit else factors.parallel(size)
        for i, size in enumerate(call.operands[0])
    )
    return Description(
        factors.rule([dims] * len(call.operands), [dims] * len(call.results)), category, flops
    )


def top_k(call: Call) -> Description:
    """The k largest along one dim, with their positions."""
    shape = call.operands[0]
    axis = call.params.get("axis", call.params.get("reduction_dimension", -1)) % len(shape)
    factors = Factors()
    operand: Dims = tuple(
        factors.keep(size) if i == axis else factors.parallel(size) for i, size in enumerate(shape)
    )
    chosen = factors.keep(call.results[0][axis])
    result: Dims = tuple(chosen if i == axis else dim for i, dim in enumerate(operand))
    return Description(factors.rule([operand], [result] * len(call.results)), "sort")


def window_reduction(call: Call) -> Description:
    """Pooling. A dim is sharded freely where windows are single positions, window by window where
    they tile the dim.
    """
    result, *_ = call.results
    shape = call.operands[0]
    factors = Factors()
    pairs = [_window(call, factors, i, shape[i], result[i]) for i in range(len(shape))]
    operand: Dims = tuple(inside for inside, _ in pairs)
    operands = [operand if s == shape else ((),) * len(s) for s in call.operands]
    window = elements(tuple(call.params["window_dimensions"]))
    results = [tuple(outside for _, outside in pairs)] * len(call.results)
    return Description(factors.rule(operands, results), "reduction", elements(result) * window)


def _window(call: Call, factors: Factors, i: int, size: int, count: int) -> tuple[Dim, Dim]:
    window, stride = call.params["window_dimensions"][i], call.params["window_strides"][i]
    dilated = any(
        call.params.get(key, (1,) * (i + 1))[i] != 1 for key in ("base_dilation", "window_dilation")
    )
    padded = tuple(call.params["padding"][i]) != (0, 0)
    if window == stride and not dilated and not padded and window * count == size:
        outside = factors.parallel(count)
        combine = (
            factors.keep if "select" in call.name or call.name == "reduce_window" else factors.sum
        )
        return outside + combine(window), outside
    return factors.keep(size), factors.keep(count)


def select_and_gather_add(call: Call) -> Description:
    """The tangent of pooling: (tangents, operand) of one shape -> one value per window."""
    return window_reduction(call)


def select_and_scatter_add(call: Call) -> Description:
    """The gradient of max-pooling: (one value per window, operand) -> the operand's shape."""
    source, shape = call.operands[0], call.operands[1]
    factors = Factors()
    pairs = [_window(call, factors, i, shape[i], source[i]) for i in range(len(shape))]
    operand: Dims = tuple(inside for inside, _ in pairs)
    window = elements(tuple(call.params["window_dimensions"]))
    scalars = [((),) * len(s) for s in call.operands[2:]]
    return Description(
        factors.rule([tuple(outside for _, outside in pairs), operand, *scalars], [operand]),
        "scatter",
        elements(source) * window,
    )


TABLE: Mapping[str, Describe] = {
    **dict.fromkeys(
        (
            "reduce_sum",
            "reduce_max",
            "reduce_min",
            "reduce_prod",
            "reduce_and",
            "reduce_or",
            "reduce_xor",
        ),
        reduction,
    ),
    **dict.fromkeys(("argmax", "argmin"), argument_reduction),
    "reduce": generic_reduction,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), cumulative),
    "sort": sort,
    "rev": reverse,
    **dict.fromkeys(("top_k", "approx_top_k"), top_k),
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window"),
        window_reduction,
    ),
    "select_and_gather_add": select_and_gather_add,
    **dict.fromkeys(("select_and_scatter_add", "select_and_scatter"), select_and_scatter_add),
}
