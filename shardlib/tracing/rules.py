"""Factor rules of primitives.

Data movement maps dims of the operand to dims of the result. In a reshape both shapes are walked
from the major side and split into common factors:

>>> call = RuleInput(name="reshape", operands=((2, 12),), results=((6, 4),), params={})
>>> print(reshape(call).rule)
[a b*c] -> [a*b c] where a=2 b=3 c=4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from shardlib.graph import Dim, Dims, FactorRule, OpDim, Window, elementwise

# --------------------------------------------------------------------------------------------------
# Input and output of a rule.
#
# Every rule is a function from `RuleInput` to `Description` (`primitives.py` maps primitives to
# rules). Neither depends on JAX except for the parameters, so every rule can be read as a small
# theorem about shapes.

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RuleInput:
    """The part of an equation that a rule reads.

    Attributes:
        name: the primitive.
        operands, results: their shapes.
        params: the primitive's parameters.
    """

    name: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Description:
    """The part of an equation that the graph keeps.

    Attributes:
        flops: floating-point operations.
    """

    rule: FactorRule
    category: str
    flops: float = 0.0


Describe = Callable[[RuleInput], Description]


class Factors:
    """Collects the factors of one op."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.summed: set[int] = set()
        self.whole: set[int] = set()

    def parallel(self, size: int) -> Dim:
        """A new factor that may be sharded; `()` for a dim of size 1."""
        if size <= 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def sum(self, size: int) -> Dim:
        """A new factor that is contracted."""
        dim = self.parallel(size)
        self.summed.update(dim)
        return dim

    def keep(self, size: int) -> Dim:
        """A new factor that must stay unsharded."""
        dim = self.parallel(size)
        self.whole.update(dim)
        return dim

    def dims(self, shape: Shape, whole: Container[int] = ()) -> Dims:
        """New factors for the dims of a shape; those of `whole` must stay unsharded."""
        return tuple(
            self.keep(size) if dim in whole else self.parallel(size)
            for dim, size in enumerate(shape)
        )

    def rule(self, operands: Sequence[Dims], results: Sequence[Dims]) -> FactorRule:
        """The finished rule."""
        return FactorRule(
            sizes=tuple(self.sizes),
            operands=tuple(operands),
            results=tuple(results),
            summed=frozenset(self.summed),
            whole=frozenset(self.whole),
        )


def unsharded(shapes: Sequence[Shape]) -> list[Dims]:
    """The dims of operands without factors: scalars, sizes and positions."""
    return [((),) * len(shape) for shape in shapes]


def elements(shape: Shape) -> float:
    """Number of elements of a shape."""
    return float(math.prod(shape))


# --------------------------------------------------------------------------------------------------
# Matrix products and convolutions: contracted and free dims.


def dot_general(call: RuleInput) -> Description:
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


def ragged_dot_general(call: RuleInput) -> Description:
    """A product whose rows are in groups of unequal size, each with its own right-hand side.

    The ragged dim and the group dim stay unsharded: a shard of the rows needs other group sizes.
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
    sizes = [tuple(map(factors.keep, shape)) for shape in group_shapes]
    flops = 2 * elements(lhs) * math.prod(rhs[j] for j in rhs_free)
    return Description(
        factors.rule([_ordered(left), _ordered(right), *sizes], [result]), "matmul", flops
    )


def conv_general_dilated(call: RuleInput) -> Description:
    """[batch, in, space] * [out, in, window] -> [batch, out, space], with feature and batch groups.

    Spatial dims stay unsharded (their shards overlap), except where the window is a single
    position.
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


# --------------------------------------------------------------------------------------------------
# Element-wise ops; any dim may be sharded.

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


def arithmetic(call: RuleInput) -> Description:
    """One floating-point operation per element of the result, transcendental or not."""
    return Description(
        elementwise(call.operands, call.results[0], len(call.results)),
        "elementwise",
        elements(call.results[0]),
    )


def identity(call: RuleInput) -> Description:
    """Each result is its operand, perhaps in another dtype or memory."""
    factors = Factors()
    dims: list[Dims] = [factors.dims(shape) for shape in call.results]
    operands = dims + [((),) * len(shape) for shape in call.operands[len(dims) :]]
    return Description(factors.rule(operands, dims), "elementwise")


def same_bits(call: RuleInput) -> Description:
    """The same bits in another dtype, or keys as their words; a change of width adds or removes a
    last dim, which stays unsharded.
    """
    (operand,), (result,) = call.operands, call.results
    shared = min(len(operand), len(result))
    factors = Factors()
    common = factors.dims(operand[:shared])
    left = common + tuple(map(factors.keep, operand[shared:]))
    right = common + tuple(map(factors.keep, result[shared:]))
    return Description(factors.rule([left], [right]), "elementwise")


# --------------------------------------------------------------------------------------------------
# Linear algebra on stacks of matrices and Fourier transforms: stack dims may be sharded, the last
# dims stay unsharded.

#: Primitives that work on vectors.
_VECTORS = frozenset({"lu_pivots_to_permutation", "tridiagonal_solve"})


def unit_rank(name: str, params: Mapping[str, Any]) -> int:
    """Number of trailing dims of the first operand that a primitive transforms as a unit; the
    leading ones are a stack.
    """
    return len(params["fft_lengths"]) if name == "fft" else 1 if name in _VECTORS else 2


def matrices(call: RuleInput) -> Description:
    """Each matrix or vector of the stack is a unit; about n^3 operations for an n x n matrix, n for
    a vector.
    """
    shape, rank = call.operands[0], unit_rank(call.name, call.params)
    stack = max(0, len(shape) - rank)
    flops = elements(shape) * (shape[-1] if rank == 2 and call.name != "fft" else 1)
    factors = Factors()
    common = factors.dims(call.operands[0][:stack])

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


def broadcast_in_dim(call: RuleInput) -> Description:
    """Operand dim i becomes result dim `broadcast_dimensions[i]`; along every other result dim the
    operand is repeated.
    """
    operand, result = call.operands[0], call.results[0]
    targets = {target: i for i, target in enumerate(call.params["broadcast_dimensions"])}
    factors = Factors()
    dims = factors.dims(result)
    source: list[Dim] = [()] * len(operand)
    for target, i in targets.items():
        source[i] = dims[target] if operand[i] == result[target] else ()
    size_operands = unsharded(call.operands[1:])
    return Description(factors.rule([tuple(source), *size_operands], [dims]), "movement")


def reshape(call: RuleInput) -> Description:
    """Splits and merges dims; if the shapes have no common factorisation, these dims stay
    unsharded.
    """
    operand, result = call.operands[0], call.results[0]
    if call.params.get("dimensions") is not None:
        factors = Factors()
        dims = [tuple(map(factors.keep, shape)) for shape in (operand, result)]
        return Description(factors.rule(dims[:1], dims[1:]), "movement")
    factors = Factors()
    left, right = _common_factors(factors, operand, result)
    size_operands = unsharded(call.operands[1:])
    return Description(factors.rule([left, *size_operands], [right]), "movement")


def _common_factors(factors: Factors, operand: Shape, result: Shape) -> tuple[Dims, Dims]:
    """Walks both shapes from the major side; a common divisor of the remaining sizes becomes a
    shared factor.
    """
    dims: tuple[list[Dim], list[Dim]] = ([()] * len(operand), [()] * len(result))
    if 0 in operand:
        return tuple(dims[0]), tuple(dims[1])
    i = j = 0
    p, q = (operand or (1,))[0], (result or (1,))[0]
    while i < len(operand) or j < len(result):
        if p == 1 and i < len(operand):
            i += 1
            p = operand[i] if i < len(operand) else 1
        elif q == 1 and j < len(result):
            j += 1
            q = result[j] if j < len(result) else 1
        elif (shared := math.gcd(p, q)) > 1:
            dim = factors.parallel(shared)
            dims[0][i] += dim
            dims[1][j] += dim
            p, q = p // shared, q // shared
        else:
            i, j, p, q = _misaligned(factors, operand, result, dims, (i, j, p, q))
    return tuple(dims[0]), tuple(dims[1])


def _misaligned(
    factors: Factors,
    operand: Shape,
    result: Shape,
    dims: tuple[list[Dim], list[Dim]],
    progress: tuple[int, int, int, int],
) -> tuple[int, int, int, int]:
    """Keeps the rest of both dims unsharded, and further dims until both sides have the same number
    of elements.
    """
    i, j, left, right = progress
    dims[0][i] += factors.keep(left)
    dims[1][j] += factors.keep(right)
    while left != right:
        if left < right:
            i += 1
            left *= operand[i]
            dims[0][i] += factors.keep(operand[i])
        else:
            j += 1
            right *= result[j]
            dims[1][j] += factors.keep(result[j])
    return i, j, 1, 1


def squeeze(call: RuleInput) -> Description:
    """Removes dims of size 1."""
    factors = Factors()
    dims = factors.dims(call.operands[0])
    dropped = {axis % len(dims) for axis in call.params["dimensions"]}
    return Description(
        factors.rule([dims], [tuple(dim for i, dim in enumerate(dims) if i not in dropped)]),
        "movement",
    )


def transpose(call: RuleInput) -> Description:
    """Permutes dims."""
    factors = Factors()
    dims = factors.dims(call.operands[0])
    return Description(
        factors.rule([dims], [tuple(dims[i] for i in call.params["permutation"])]), "movement"
    )


def slice_(call: RuleInput) -> Description:
    """Sliced dims stay unsharded; dims taken in full may be sharded."""
    starts, strides = call.params["start_indices"], call.params["strides"]
    sliced = [
        i
        for i, (before, after) in enumerate(zip(call.operands[0], call.results[0], strict=True))
        if before != after
    ]
    plain = len(sliced) == 1 and (strides is None or strides[sliced[0]] == 1)
    return _with_windows(
        resize(call),
        [
            Window((False, 0, i), (True, 0, i), int(starts[i]), call.results[0][i])
            for i in sliced
            if plain
        ],
    )


def pad(call: RuleInput) -> Description:
    """Padded dims stay unsharded; the padding value is a scalar."""
    padded = {
        i: tuple(config)
        for i, config in enumerate(call.params["padding_config"])
        if tuple(config) != (0, 0, 0)
    }
    plain = len(padded) == 1 and all(
        low >= 0 and high >= 0 and not inner for low, high, inner in padded.values()
    )
    windows = [
        Window((True, 0, i), (False, 0, i), int(low), call.operands[0][i])
        for i, (low, _, _) in padded.items()
        if plain
    ]
    return _with_windows(resize(call, touched=padded.keys()), windows)


def _with_windows(description: Description, windows: Iterable[Window]) -> Description:
    return replace(description, rule=replace(description.rule, windows=tuple(windows)))


def _consecutive_windows(
    sizes: Iterable[int], dims_of: Callable[[int], tuple[OpDim, OpDim | None]]
) -> Iterator[Window]:
    """Consecutive windows of the given lengths; `dims_of` gives the two dims of each."""
    start = 0
    for position, size in enumerate(sizes):
        long, short = dims_of(position)
        yield Window(long, short, start, int(size))
        start += int(size)


def resize(call: RuleInput, *, touched: AbstractSet[int] = frozenset()) -> Description:
    """A result of the operand's rank: dims of equal size that are not `touched` are shared, the
    others stay unsharded.
    """
    operand, result = call.operands[0], call.results[0]
    factors = Factors()
    source: list[Dim] = []
    target: list[Dim] = []
    for i, (size, after) in enumerate(zip(operand, result, strict=True)):
        same = size == after and i not in touched
        source.append(factors.parallel(size) if same else factors.keep(size))
        target.append(source[-1] if same else factors.keep(after))
    scalars = unsharded(call.operands[1:])
    return Description(factors.rule([tuple(source), *scalars], [tuple(target)]), "movement")


def in_parts(key: str, *, joins: bool, stacks: bool = False) -> Describe:
    """Parts that are joined along a dim of the whole, which stays unsharded, or split from it.

    Args:
        key: the parameter that has the dim.
        stacks: whether the parts do not have that dim.
    """

    def describe(call: RuleInput) -> Description:
        axis = call.params[key]
        parts, whole = (
            (call.operands, call.results[0]) if joins else (call.results, call.operands[0])
        )
        factors = Factors()
        dims = factors.dims(whole, {axis})
        part_dims: list[Dims] = [
            (*dims[:axis], *(() if stacks else (factors.keep(shape[axis]),)), *dims[axis + 1 :])
            for shape in parts
        ]
        windows = _consecutive_windows(
            (1 if stacks else shape[axis] for shape in parts),
            lambda i: ((joins, 0, axis), None if stacks else (not joins, i, axis)),
        )
        rule = factors.rule(part_dims, [dims]) if joins else factors.rule([dims], part_dims)
        return _with_windows(Description(rule, "movement"), windows)

    return describe


def tile(call: RuleInput) -> Description:
    """Repeats an array along its dims: a tiled dim of the result is (copy, position)."""
    operand, result = call.operands[0], call.results[0]
    factors = Factors()
    dims = factors.dims(operand)
    copies = [after // size if size else 1 for size, after in zip(operand, result, strict=True)]
    return Description(
        factors.rule(
            [dims], [tuple(factors.parallel(n) + dim for n, dim in zip(copies, dims, strict=True))]
        ),
        "movement",
    )


def generated(call: RuleInput) -> Description:
    """A result made from its position alone (iota): every device can make its own shard."""
    factors = Factors()
    results = [factors.dims(shape) for shape in call.results]
    return Description(factors.rule(unsharded(call.operands), results), "movement")


# --------------------------------------------------------------------------------------------------
# Gather, scatter and dynamic slices.
#
# A sharded dim that a gather looks up (an embedding table's vocabulary) is a lookup in the local
# shard, zero if the position is in another shard, and a sum over the shards: a *summed* factor.
# Sharding the target of a scatter is parallel: every shard applies the updates that fall into it;
# sharding the updates of a scatter-add leaves partial sums.


def gather(call: RuleInput) -> Description:
    """`jax.lax.gather`, from its dimension numbers."""
    numbers, slices = call.params["dimension_numbers"], call.params["slice_sizes"]
    (operand, indices), (result,) = call.operands, call.results
    factors = Factors()
    index_dims: list[Dim] = [factors.parallel(size) for size in indices[:-1]] + [
        factors.keep(indices[-1])
    ]
    batch_dims = [i for i in range(len(result)) if i not in numbers.offset_dims]
    results: list[Dim] = [()] * len(result)
    for position, i in enumerate(batch_dims):
        results[i] = index_dims[position]
    source: list[Dim] = [()] * len(operand)
    for d, i in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        source[d] = index_dims[i]
    for d in numbers.collapsed_slice_dims:
        source[d] = (
            factors.sum(operand[d]) if d in numbers.start_index_map else factors.keep(operand[d])
        )
    window = [
        d
        for d in range(len(operand))
        if d not in numbers.collapsed_slice_dims and d not in numbers.operand_batching_dims
    ]
    for d, i in zip(window, numbers.offset_dims, strict=True):
        full = slices[d] == operand[d]
        source[d] = factors.parallel(operand[d]) if full else factors.keep(operand[d])
        results[i] = source[d] if full else factors.keep(result[i])
    return Description(factors.rule([tuple(source), tuple(index_dims)], [tuple(results)]), "gather")


def scatter(call: RuleInput) -> Description:
    """The scatter family, from its dimension numbers; an overwriting scatter must apply its updates
    in order.
    """
    numbers = call.params["dimension_numbers"]
    operand, indices, updates = call.operands
    factors = Factors()
    combine = factors.keep if call.name in ("scatter", "scatter-sub") else factors.sum
    index_dims: list[Dim] = [
        (factors.parallel if i in numbers.scatter_indices_batching_dims else combine)(size)
        for i, size in enumerate(indices[:-1])
    ] + [factors.keep(indices[-1])]
    target: list[Dim] = [()] * len(operand)
    update: list[Dim] = [()] * len(updates)
    batch_dims = [i for i in range(len(updates)) if i not in numbers.update_window_dims]
    for position, i in enumerate(batch_dims):
        update[i] = index_dims[position]
    for d, i in zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    ):
        target[d] = index_dims[i]
    for d in numbers.inserted_window_dims:
        target[d] = factors.parallel(operand[d])
    window = [
        d
        for d in range(len(operand))
        if d not in numbers.inserted_window_dims and d not in numbers.operand_batching_dims
    ]
    for d, i in zip(window, numbers.update_window_dims, strict=True):
        full = updates[i] == operand[d]
        target[d] = factors.parallel(operand[d]) if full else factors.keep(operand[d])
        update[i] = target[d] if full else factors.keep(updates[i])
    rule = factors.rule([tuple(target), tuple(index_dims), tuple(update)], [tuple(target)])
    return Description(rule, "scatter", 0.0 if call.name == "scatter" else elements(updates))


def dynamic_slice(call: RuleInput) -> Description:
    """A window at a position known only at run time; dims that it covers in full may be sharded."""
    return Description(resize(call).rule, "gather")


def dynamic_update_slice(call: RuleInput) -> Description:
    """(operand, window, position) -> the operand with the window written into it."""
    operand, update, *starts = call.operands
    factors = Factors()
    target: list[Dim] = []
    window: list[Dim] = []
    for size, part in zip(operand, update, strict=True):
        target.append(factors.parallel(size) if size == part else factors.keep(size))
        window.append(target[-1] if size == part else factors.keep(part))
    scalars: list[Dims] = unsharded(starts)
    return Description(
        factors.rule([tuple(target), tuple(window), *scalars], [tuple(target)]), "scatter"
    )


# --------------------------------------------------------------------------------------------------
# Random numbers. Typed PRNG keys hide their words, so a key array has the dims of its keys only.


def drawn(call: RuleInput) -> Description:
    """keys -> keys x shape: counters are positions, so every device can draw its own shard
    (partitionable Threefry).
    """
    (keys,), (result,) = call.operands, call.results
    factors = Factors()
    dims = factors.dims(result)
    return Description(factors.rule([dims[: len(keys)]], [dims]), "elementwise", elements(result))


def sequential(call: RuleInput) -> Description:
    """A generator with hidden state: its results cannot be sharded."""
    factors = Factors()
    dims = [tuple(map(factors.keep, shape)) for shape in (*call.operands, *call.results)]
    return Description(
        factors.rule(dims[: len(call.operands)], dims[len(call.operands) :]), "elementwise"
    )


# --------------------------------------------------------------------------------------------------
# Ops that combine positions along a dim: reductions, running sums, windows, sorts.
#
# The reduced dim of a reduction can be sharded, and the partial results combined afterwards; that
# of an argmax, a running sum or a sort cannot.


def reduction(key: str, *, partial: bool) -> Describe:
    """A reduction along dims.

    Args:
        key: the parameter that has the dims.
        partial: whether shards of a reduced dim leave partial results; reduced dims stay unsharded
            where these cannot be combined (argmax), or where an initial value would be counted once
            per shard (`jax.lax.reduce`).
    """

    def describe(call: RuleInput) -> Description:
        shape, reduced = call.operands[0], {int(axis) for axis in call.params[key]}
        factors = Factors()
        dims: Dims = tuple(
            (factors.sum if partial else factors.keep)(size)
            if i in reduced
            else factors.parallel(size)
            for i, size in enumerate(shape)
        )
        result: Dims = tuple(dim for i, dim in enumerate(dims) if i not in reduced)
        operands = [dims if s == shape else ((),) * len(s) for s in call.operands]
        return Description(
            factors.rule(operands, [result] * len(call.results)), "reduction", elements(shape)
        )

    return describe


def unsharded_along(key: str, category: str) -> Describe:
    """Running sums, sorts, reversals: unsharded along their dims.

    Args:
        key: the parameter that has the dim, or several.
    """

    def describe(call: RuleInput) -> Description:
        axes, shape = call.params[key], call.operands[0]
        factors = Factors()
        dims = factors.dims(shape, {axes} if isinstance(axes, int) else set(axes))
        return Description(
            factors.rule([dims] * len(call.operands), [dims] * len(call.results)),
            category,
            elements(shape) if category == "reduction" else 0.0,
        )

    return describe


def top_k(call: RuleInput) -> Description:
    """The k largest along one dim, with their positions."""
    shape = call.operands[0]
    axis = call.params.get("axis", call.params.get("reduction_dimension", -1)) % len(shape)
    factors = Factors()
    operand = factors.dims(shape, {axis})
    chosen = factors.keep(call.results[0][axis])
    result: Dims = tuple(chosen if i == axis else dim for i, dim in enumerate(operand))
    return Description(factors.rule([operand], [result] * len(call.results)), "sort")


def window_reduction(call: RuleInput) -> Description:
    """Pooling, and its tangent. A dim can be sharded freely if windows are single positions, and
    between windows if they tile the dim.
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


def _window(call: RuleInput, factors: Factors, i: int, size: int, count: int) -> tuple[Dim, Dim]:
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


def select_and_scatter_add(call: RuleInput) -> Description:
    """The gradient of max-pooling: (one value per window, operand) -> the operand's shape."""
    source, shape = call.operands[0], call.operands[1]
    factors = Factors()
    pairs = [_window(call, factors, i, shape[i], source[i]) for i in range(len(shape))]
    operand: Dims = tuple(inside for inside, _ in pairs)
    window = elements(tuple(call.params["window_dimensions"]))
    scalars = unsharded(call.operands[2:])
    return Description(
        factors.rule([tuple(outside for _, outside in pairs), operand, *scalars], [operand]),
        "scatter",
        elements(source) * window,
    )
