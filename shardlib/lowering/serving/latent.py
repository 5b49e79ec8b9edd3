"""Keys and values that are linear in one small vector (latent attention, arXiv:2405.04434).

    keys    K_n = c A_n         one matrix a head
    values  V_n = c B_n

A cache keeps c alone, beside parts of keys that are kept as they are: a score q_n . K_n is
(q_n A_n^T) . c, and what is mixed of values is what is mixed of c, times B_n. So attention is that
of one key head, as wide as c (section 2.1.2, the absorbed form). It is found in the traced program,
where a key and the value are products of one value of the token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.functions.attention import Attention
from shardlib.tracing.program import Call, Equation, Program

#: Times that keys and values have to be larger than the vector that they are made of.
LARGER = 4


@dataclass(frozen=True, kw_only=True)
class Latent:
    """What keys and values are made of.

    Attributes:
        part: which of the parts of keys is linear in it; the others are kept.
        source: number of the vector in the program of the call.
        key: number of the matrices [L, N, H] of the key.
        value: number of those of the value, [L, N, V].
    """

    part: int
    source: int
    key: int
    value: int


def latent(program: Program, call: Call) -> Latent | None:
    """What the keys and values of a call are made of; None where it is not worth it."""
    producers = {number: equation for equation in program.equations for number in equation.outputs}
    shapes = [tuple(aval.shape) for aval in program.avals]
    assert isinstance(call.form, Attention)
    parts = call.form.parts
    queries, keys = call.inputs[:parts], call.inputs[parts : 2 * parts]
    mixed = call.inputs[2 * parts]
    value = _product(producers, mixed)
    if value is None:
        return None
    for part, number in enumerate(keys):
        key = _product(producers, number)
        if key is None or key[0] != value[0] or shapes[number][:3] != shapes[mixed][:3]:
            continue
        if shapes[number][2] != shapes[queries[part]][2]:
            continue  # several queries look at one key
        elements = math.prod(shapes[number]) + math.prod(shapes[mixed])
        if elements >= LARGER * shapes[key[0]][-1]:
            return Latent(part=part, source=key[0], key=key[1], value=value[1])
    return None


def _product(producers: Mapping[int, Equation], number: int) -> tuple[int, int] | None:
    """The vector [1, 1, L] and matrices [L, N, H] of which a value [1, 1, N, H] is the product."""
    equation = producers.get(number)
    if equation is None or equation.name != "dot_general":
        return None
    vector, matrices = (tuple(var.aval.shape) for var in equation.eqn.invars)
    dims = equation.params["dimension_numbers"]
    summed = tuple(tuple(side) for side in dims[0])
    if len(vector) != 3 or len(matrices) != 3 or summed != ((2,), (0,)) or any(dims[1]):
        return None
    return equation.inputs[0], equation.inputs[1]
