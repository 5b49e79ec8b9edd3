"""Matrix products and convolutions: which dims are contracted, which are free?"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardlib.graph.factors import Dim, Dims
from shardlib.tracing.rules.description import Call, Describe, Description, Factors, elements


def dot_general(call: Call) -> Description:
    """[batch, m, k] x [batch, k, n] -> [batch, m, n] for any number and order of dims."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = call.params["dimension_numbers"]
    lhs, rhs = call.operands
    factors = Factors()
    left: dict[int, Dim] = {}
    right: dict[int, Dim] = {}
    for i, j in zip(lhs_batch, rhs_batch, strict=True):
        left[i] = right[j] = factors.parallel(lhs[i])
    for i, j in zip(lhs_contract, rhs_contract, strict=True):
        left[i] = right[j] = factors.sum(lhs[i])
    lhs_free = [i for i in range(len(lhs)) if i not in left]
    rhs_free = [j for j in range(len(rhs)) if j not in right]
    left.update({i: factors.parallel(lhs[i]) for i in lhs_free})
    right.update({j: factors.parallel(rhs[j]) for j in rhs_free})
    result = (
        *(left[i] for i in lhs_batch),
        *(left[i] for i in lhs_free),
        *(right[j] for j in rhs_free),
    )
    flops = 2 * elements(lhs) * math.prod(rhs[j] for j in rhs_free)
    return Description(factors.rule([_ordered(left), _ordered(right)], [result]), "matmul", flops)


def ragged_dot_general(call: Call) -> Description:
    """A product whose rows fall into groups of unequal size, each with its own right-hand side.

    The ragged dim and the group dim stay whole: a part of the rows needs other group sizes than the
    whole.
    """
    numbers = call.params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    ragged, groups = set(numbers.lhs_ragged_dimensions), set(numbers.rhs_group_dimensions)
    lhs, rhs, *group_shapes = call.operands
    factors = Factors()
    left: dict[int, Dim] = {}
    right: dict[int, Dim] = {}
    for i, j in zip(lhs_batch, rhs_batch, strict=True):
        left[i] = right[j] = factors.keep(lhs[i]) if i in ragged else factors.parallel(lhs[i])
    for i, j in zip(lhs_contract, rhs_contract, strict=True):
        left[i] = right[j] = factors.keep(lhs[i]) if i in ragged else factors.sum(lhs[i])
    group = {j: factors.keep(rhs[j]) for j in sorted(groups)}
    right.update(group)
    lhs_free = [i for i in range(len(lhs)) if i not in left]
    rhs_free = [j for j in range(len(rhs)) if j not in right]
    left.update(
        {i: factors.keep(lhs[i]) if i in ragged else factors.parallel(lhs[i]) for i in lhs_free}
    )
    right.update({j: factors.parallel(rhs[j]) for j in rhs_free})
    result: Dims = (
        *(left[i] for i in lhs_batch),
        *(left[i] for i in lhs_free),
        *(right[j] for j in rhs_free),
    )
    if len(result) < len(call.results[0]):  # a ragged contracting dim: the groups lead the result
        result = (factors.keep(call.results[0][0]), *result)
    sizes = [tuple(factors.keep(size) for size in shape) for shape in group_shapes]
    flops = 2 * elements(lhs) * math.prod(rhs[j] for j in rhs_free)
    return Description(
        factors.rule([_ordered(left), _ordered(right), *sizes], [result]), "matmul", flops
    )


def conv_general_dilated(call: Call) -> Description:
    """[batch, in, space] * [out, in, window] -> [batch, out, space], with feature and batch groups.

    Spatial dims stay whole (their parts overlap), except where the window is a single position.
    """
    numbers, groups, batch_groups = (
        call.params[key]
        for key in ("dimension_numbers", "feature_group_count", "batch_group_count")
    )
    lhs, rhs = call.operands
    (result,) = call.results
    (n, c, *space), (o, i, *window), (out_n, out_c, *out_space) = (
        numbers.lhs_spec,
        numbers.rhs_spec,
        numbers.out_spec,
    )
    factors = Factors()
    batch_group, group = factors.parallel(batch_groups), factors.parallel(groups)
    batch, contracted = factors.parallel(lhs[n] // batch_groups), factors.sum(rhs[i])
    features = factors.parallel(rhs[o] // (groups * batch_groups))
    left: dict[int, Dim] = {n: batch_group + batch, c: group + contracted}
    right: dict[int, Dim] = {o: group + batch_group + features, i: contracted}
    out: dict[int, Dim] = {out_n: batch, out_c: group + batch_group + features}
    for k, (a, b, z) in enumerate(zip(space, window, out_space, strict=True)):
        single = (
            rhs[b] == 1
            and lhs[a] == result[z]
            and call.params["window_strides"][k] == 1
            and tuple(call.params["padding"][k]) == (0, 0)
            and call.params["lhs_dilation"][k] == 1
        )
        left[a] = factors.parallel(lhs[a]) if single else factors.keep(lhs[a])
        right[b] = () if single else factors.keep(rhs[b])
        out[z] = left[a] if single else factors.keep(result[z])
    kernel = math.prod(rhs[b] for b in window) * rhs[i]
    flops = 2 * elements(result) * kernel / math.prod(call.params["lhs_dilation"])
    return Description(
        factors.rule([_ordered(left), _ordered(right)], [_ordered(out)]), "convolution", flops
    )


def _ordered(dims: Mapping[int, Dim]) -> Dims:
    return tuple(dims[i] for i in range(len(dims)))


TABLE: Mapping[str, Describe] = {
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot_general,
    "conv_general_dilated": conv_general_dilated,
}
