"""Ops that work position by position; any dim may be sharded."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.graph.factors import Dims, elementwise
from shardlib.tracing.rules.description import Call, Describe, Description, Factors, elements

ARITHMETIC: tuple[str, ...] = (
    "abs",
    "acos",
    "acosh",
    "add",
    "add_any",
    "and",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bessel_i0e",
    "bessel_i1e",
    "cbrt",
    "ceil",
    "clamp",
    "clz",
    "complex",
    "conj",
    "cos",
    "cosh",
    "digamma",
    "div",
    "eq",
    "eq_to",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "ge",
    "gt",
    "igamma",
    "igamma_grad_a",
    "igammac",
    "imag",
    "integer_pow",
    "is_finite",
    "le",
    "le_to",
    "lgamma",
    "log",
    "log1p",
    "log2",
    "logistic",
    "lt",
    "lt_to",
    "max",
    "min",
    "mul",
    "mulhi",
    "ne",
    "neg",
    "nextafter",
    "not",
    "one_minus_square",
    "or",
    "polygamma",
    "population_count",
    "polynomial",
    "pow",
    "real",
    "regularized_incomplete_beta",
    "rem",
    "round",
    "rsqrt",
    "select_n",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "sub",
    "tan",
    "tanh",
    "threefry2x32",
    "xor",
    "zeta",
)
COPIES: tuple[str, ...] = (
    "convert_element_type",
    "copy",
    "copy_p",
    "custom_lin",
    "device_put",
    "layout_constraint",
    "name",
    "optimization_barrier",
    "pcast",
    "pvary",
    "reduce_precision",
    "reshard",
    "shard_alike",
    "sharding_constraint",
    "stop_gradient",
    "with_memory_space_constraint",
)


def arithmetic(call: Call) -> Description:
    """One floating-point operation per element of the result, transcendental or not."""
    return Description(
        elementwise(call.operands, call.results[0], len(call.results)),
        "elementwise",
        elements(call.results[0]),
    )


def identity(call: Call) -> Description:
    """Each result is its operand, perhaps in another dtype or place."""
    factors = Factors()
    dims: list[Dims] = [tuple(factors.parallel(size) for size in shape) for shape in call.results]
    operands = dims + [((),) * len(shape) for shape in call.operands[len(dims) :]]
    return Description(factors.rule(operands, dims), "elementwise")


def bitcast_convert_type(call: Call) -> Description:
    """Same bits, another dtype; a change of width adds or removes a last dim, which stays whole."""
    (operand,), (result,) = call.operands, call.results
    shared = min(len(operand), len(result))
    factors = Factors()
    common: Dims = tuple(factors.parallel(size) for size in operand[:shared])

    def extra(shape: tuple[int, ...]) -> Dims:
        return common + tuple(factors.keep(size) for size in shape[shared:])

    return Description(factors.rule([extra(operand)], [extra(result)]), "elementwise")


TABLE: Mapping[str, Describe] = {
    **dict.fromkeys(ARITHMETIC, arithmetic),
    **dict.fromkeys(COPIES, identity),
    "bitcast_convert_type": bitcast_convert_type,
}
