"""Where does a forward pass look at the position of a token?

Traced for one token of one row, it has no position: what stands for it is the number of the token
in the row, 0. It comes from

    an iota           of as many elements as the row has tokens: `jnp.arange(seq)`
    a slice           of a parameter or table, of as many rows: `positions[:seq]`
    a constant        with as many rows: a table that NumPy made

and each is told by how it differs in a trace of as many tokens as a request may have. What a
forward pass finds out in another way (a sum over the tokens before) is not found here: the engine
compares results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from shardlib.errors import ModelError
from shardlib.functions.attention import Attention
from shardlib.jax_types import Value
from shardlib.lowering.serving.calls import bodies
from shardlib.tracing.program import Equation, Program


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Where a forward pass of one token looks at its position.

    Attributes:
        iotas: paths of the equations that count tokens.
        slices: path of an equation that takes the rows of the tokens -> the dim that it cuts.
        tables: number of a constant, and path of the program that it belongs to -> its dim with a
            row a token, and the constant of the longest sequence.
    """

    iotas: frozenset[str] = frozenset()
    slices: dict[str, int] = field(default_factory=dict[str, int])
    tables: dict[tuple[str, int], tuple[int, Value]] = field(
        default_factory=dict[tuple[str, int], tuple[int, Value]]
    )


def positions(shortest: Program, longest: Program, tokens: int) -> Positions:
    """Compares a forward pass of one token with that of as many as a request may have."""
    few, many = list(_places(shortest)), list(_places(longest))
    if [kind for kind, *_ in few] != [kind for kind, *_ in many]:
        raise ModelError(
            "the forward pass of one token counts in other places than that of several, so that"
            " positions cannot be told from other numbers\nTry: positions by"
            " jnp.arange(tokens.shape[1])"
        )
    iotas, slices = set[str](), dict[str, int]()
    tables = dict[tuple[str, int], tuple[int, Value]]()
    for (kind, key, size, _), (_, _, longer_size, value) in zip(few, many, strict=True):
        dim = _differs(size, longer_size, tokens)
        if dim is None:
            continue
        if kind == "iota":
            iotas.add(key[0])
        elif kind == "slice":
            slices[key[0]] = dim
        elif value is not None:
            tables[key] = dim, value
    return Positions(iotas=frozenset(iotas), slices=slices, tables=tables)


#: What may depend on the position: kind, where it stands, its sizes, its value.
_Place = tuple[str, tuple[str, int], tuple[int, ...], "Value | None"]


def _places(program: Program, path: str = "") -> Iterator[_Place]:
    for number, value in program.constants.items():
        if np.ndim(value):
            yield "constant", (path, number), tuple(np.shape(value)), value
    for equation in program.equations:
        if equation.call is not None and isinstance(equation.call.form, Attention):
            continue  # it is told where its token stands
        if equation.name in ("iota", "slice"):
            yield equation.name, (equation.path, 0), _sizes(equation), None
        for body, _ in bodies(equation):
            yield from _places(body, equation.path)


def _sizes(equation: Equation) -> tuple[int, ...]:
    params = equation.params
    if equation.name == "iota":
        return (params["shape"][params["dimension"]],)
    return tuple(params["limit_indices"])


def _differs(shape: tuple[int, ...], more: tuple[int, ...], tokens: int) -> int | None:
    """The dim that has a row a token."""
    if len(shape) != len(more):
        return None
    pairs = zip(shape, more, strict=True)
    return next((dim for dim, sizes in enumerate(pairs) if sizes == (1, tokens)), None)
