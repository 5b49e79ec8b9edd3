"""Ops that only move data: which dim of the result is which dim of the operand?

A reshape is the interesting one. Both shapes are walked from the major side and split into common
factors:

>>> call = Call(name="reshape", operands=((2, 12),), results=((6, 4),), params={})
>>> print(reshape(call).rule)
[a b*c] -> [a*b c] where a=2 b=3 c=4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from shardlib.graph.factors import Dim, Dims, Place, Window
from shardlib.tracing.rules.description import Call, Describe, Description, Factors, Shape


def broadcast_in_dim(call: Call) -> Description:
    """Operand dim i becomes result dim `broadcast_dimensions[i]`; every other result dim is a
    copy.
    """
    operand, result = call.operands[0], call.results[0]
    targets = {target: i for i, target in enumerate(call.params["broadcast_dimensions"])}
    factors = Factors()
    dims: Dims = tuple(factors.parallel(size) for size in result)
    source: list[Dim] = [()] * len(operand)
    for target, i in targets.items():
        source[i] = dims[target] if operand[i] == result[target] else ()
    size_operands = [((),) * len(shape) for shape in call.operands[1:]]
    return Description(factors.rule([tuple(source), *size_operands], [dims]), "movement")


def reshape(call: Call) -> Description:
    """Splits and merges dims; where the shapes share no common factorisation, the dims involved
    stay whole.
    """
    operand, result = call.operands[0], call.results[0]
    if call.params.get("dimensions") is not None:
        factors = Factors()
        dims = [tuple(factors.keep(size) for size in shape) for shape in (operand, result)]
        return Description(factors.rule(dims[:1], dims[1:]), "movement")
    factors = Factors()
    left, right = _common_factors(factors, operand, result)
    size_operands = [((),) * len(shape) for shape in call.operands[1:]]
    return Description(factors.rule([left, *size_operands], [right]), "movement")


def _common_factors(factors: Factors, operand: Shape, result: Shape) -> tuple[Dims, Dims]:
    """Walks both shapes from the major side; a shared divisor of what is left of the two dims
    becomes a shared factor.
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
    """Keeps the rest of both dims whole, and further dims until the two sides have the same number
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


def squeeze(call: Call) -> Description:
    """Drops dims of size 1."""
    factors = Factors()
    dims: Dims = tuple(factors.parallel(size) for size in call.operands[0])
    dropped = {axis % len(dims) for axis in call.params["dimensions"]}
    return Description(
        factors.rule([dims], [tuple(dim for i, dim in enumerate(dims) if i not in dropped)]),
        "movement",
    )


def transpose(call: Call) -> Description:
    """Reorders dims."""
    factors = Factors()
    dims: Dims = tuple(factors.parallel(size) for size in call.operands[0])
    return Description(
        factors.rule([dims], [tuple(dims[i] for i in call.params["permutation"])]), "movement"
    )


def slice_(call: Call) -> Description:
    """Dims that are taken as a whole may be sharded, sliced ones not."""
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


def pad(call: Call) -> Description:
    """Padded dims stay whole; the padding value is a scalar."""
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


def _side_by_side(
    sizes: Iterable[int], place: Callable[[int], tuple[Place, Place | None]]
) -> Iterator[Window]:
    """Runs of the given lengths, one after the other; `place` says of which dim in which."""
    start = 0
    for position, size in enumerate(sizes):
        long, short = place(position)
        yield Window(long, short, start, int(size))
        start += int(size)


def resize(call: Call, *, touched: AbstractSet[int] = frozenset()) -> Description:
    """A result of the operand's rank: dims of equal size that are not `touched` are shared, the
    others stay whole.
    """
    operand, result = call.operands[0], call.results[0]
    factors = Factors()
    source: list[Dim] = []
    target: list[Dim] = []
    for i, (size, after) in enumerate(zip(operand, result, strict=True)):
        same = size == after and i not in touched
        source.append(factors.parallel(size) if same else factors.keep(size))
        target.append(source[-1] if same else factors.keep(after))
    scalars = [((),) * len(shape) for shape in call.operands[1:]]
    return Description(factors.rule([tuple(source), *scalars], [tuple(target)]), "movement")


def concatenate(call: Call) -> Description:
    """Joins arrays along one dim, which stays whole."""
    axis, (result,) = call.params["dimension"], call.results
    factors = Factors()
    dims: Dims = tuple(
        factors.keep(size) if i == axis else factors.parallel(size) for i, size in enumerate(result)
    )
    operands = [
        (*dims[:axis], factors.keep(shape[axis]), *dims[axis + 1 :]) for shape in call.operands
    ]
    windows = _side_by_side(
        (shape[axis] for shape in call.operands), lambda i: ((True, 0, axis), (False, i, axis))
    )
    return _with_windows(Description(factors.rule(operands, [dims]), "movement"), windows)


def stack(call: Call) -> Description:
    """Joins arrays along a new dim, which stays whole."""
    axis, (result,) = call.params["axis"], call.results
    factors = Factors()
    dims: Dims = tuple(
        factors.keep(size) if i == axis else factors.parallel(size) for i, size in enumerate(result)
    )
    windows = _side_by_side((1 for _ in call.operands), lambda _: ((True, 0, axis), None))
    return _with_windows(
        Description(
            factors.rule([dims[:axis] + dims[axis + 1 :]] * len(call.operands), [dims]), "movement"
        ),
        windows,
    )


def unstack(call: Call) -> Description:
    """Takes an array apart along a dim, which goes away."""
    axis, (operand,) = call.params["axis"], call.operands
    factors = Factors()
    dims: Dims = tuple(
        factors.keep(size) if i == axis else factors.parallel(size)
        for i, size in enumerate(operand)
    )
    windows = _side_by_side((1 for _ in call.results), lambda _: ((False, 0, axis), None))
    return _with_windows(
        Description(
            factors.rule([dims], [dims[:axis] + dims[axis + 1 :]] * len(call.results)), "movement"
        ),
        windows,
    )


def tile(call: Call) -> Description:
    """Repeats an array along its dims: a tiled dim of the result is (copy, position)."""
    operand, result = call.operands[0], call.results[0]
    factors = Factors()
    dims: Dims = tuple(factors.parallel(size) for size in operand)
    copies = [after // size if size else 1 for size, after in zip(operand, result, strict=True)]
    return Description(
        factors.rule(
            [dims], [tuple(factors.parallel(n) + dim for n, dim in zip(copies, dims, strict=True))]
        ),
        "movement",
    )


def split(call: Call) -> Description:
    """Takes an array apart along one dim, which stays whole."""
    axis, (operand,) = call.params["axis"], call.operands
    factors = Factors()
    dims: Dims = tuple(
        factors.keep(size) if i == axis else factors.parallel(size)
        for i, size in enumerate(operand)
    )
    results = [
        (*dims[:axis], factors.keep(shape[axis]), *dims[axis + 1 :]) for shape in call.results
    ]
    windows = _side_by_side(
        (shape[axis] for shape in call.results), lambda i: ((False, 0, axis), (True, i, axis))
    )
    return _with_windows(Description(factors.rule([dims], results), "movement"), windows)


def generated(call: Call) -> Description:
    """A result made from its position alone (iota): every device can make its own part."""
    factors = Factors()
    results = [tuple(factors.parallel(size) for size in shape) for shape in call.results]
    return Description(
        factors.rule([((),) * len(shape) for shape in call.operands], results), "movement"
    )


TABLE: Mapping[str, Describe] = {
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "squeeze": squeeze,
    "transpose": transpose,
    "slice": slice_,
    "pad": pad,
    "concatenate": concatenate,
    "split": split,
    "stack": stack,
    "unstack": unstack,
    "tile": tile,
    **dict.fromkeys(("iota", "iota_2x32_shape", "empty2", "platform_index"), generated),
}
