"""Random numbers. Typed PRNG keys hide their words, so a key array has the dims of its keys
only.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.graph.factors import Dims
from shardlib.tracing.rules.description import Call, Describe, Description, Factors, elements
from shardlib.tracing.rules.elementwise import arithmetic, identity


def drawn(call: Call) -> Description:
    """keys -> keys x shape: counters are positions, so every device can draw its own part
    (partitionable Threefry).
    """
    (keys,), (result,) = call.operands, call.results
    factors = Factors()
    dims: Dims = tuple(factors.parallel(size) for size in result)
    return Description(factors.rule([dims[: len(keys)]], [dims]), "elementwise", elements(result))


def words(call: Call) -> Description:
    """keys <-> their words; the last dim, the words, stays whole."""
    (operand,), (result,) = call.operands, call.results
    shared = min(len(operand), len(result))
    factors = Factors()
    common: Dims = tuple(factors.parallel(size) for size in operand[:shared])
    left = common + tuple(factors.keep(size) for size in operand[shared:])
    right = common + tuple(factors.keep(size) for size in result[shared:])
    return Description(factors.rule([left], [right]), "elementwise")


def sequential(call: Call) -> Description:
    """A generator with hidden state: its results exist only as a whole."""
    factors = Factors()
    dims = [
        tuple(factors.keep(size) for size in shape) for shape in (*call.operands, *call.results)
    ]
    return Description(
        factors.rule(dims[: len(call.operands)], dims[len(call.operands) :]), "elementwise"
    )


TABLE: Mapping[str, Describe] = {
    **dict.fromkeys(("random_bits", "random_split"), drawn),
    **dict.fromkeys(("random_wrap", "random_unwrap"), words),
    **dict.fromkeys(("random_seed", "random_fold_in", "random_gamma"), arithmetic),
    "random_clone": identity,
    **dict.fromkeys(("rng_bit_generator", "rng_uniform"), sequential),
}
