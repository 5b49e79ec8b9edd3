"""Draws of random numbers for the rows of a batch.

Threefry (`jax_threefry_partitionable`, JAX's default) makes every number of a draw from the key and
the number's position alone. A part of the batch can therefore draw exactly the numbers that the
whole batch draws for its rows: the same key at the positions of these rows. Generators with a
hidden state cannot; what they draw is a value of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from shardlib.jax_types import Eqn
from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program, callee, flatten, subjaxprs
from shardlib.tracing.rows.handed import Unlike

#: Primitives that draw an array of a shape of their own from each key.
SHAPED = frozenset({"random_bits", "random_split"})


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Where the rows are in the shape that is drawn from a key.

    Attributes:
        dim: of that shape.
        inner: elements of one row that follow each other along it.
    """

    dim: int
    inner: int


@cache
def _threefry() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def by_position(dtype: Any) -> bool:
    """Whether keys of a dtype make every number from its position alone."""
    return dtype == _threefry() and bool(getattr(jax.config, "jax_threefry_partitionable", True))


def own_dims(first_eqn: Eqn, two: Eqn) -> list[int]:
    """Dims of the drawn shape that the number of rows changes, in two traces of one draw."""
    pairs = zip(first_eqn.params["shape"], two.params["shape"], strict=True)
    return [dim for dim, (first, second) in enumerate(pairs) if first != second]


def draw_of(first: Eqn, two: Eqn, sizes: tuple[int, int]) -> Draw | None:
    """The rows of a draw; None where they cannot be drawn by their positions."""
    keys: Any = (first.invars[0].aval, two.invars[0].aval)
    dims = own_dims(first, two)
    if len(dims) != 1 or keys[0].shape != keys[1].shape or not by_position(keys[0].dtype):
        return None
    shapes = (first.params["shape"], two.params["shape"])
    inner = {divmod(shape[dims[0]], size) for shape, size in zip(shapes, sizes, strict=True)}
    quotient, remainder = next(iter(inner))
    return None if len(inner) > 1 or remainder else Draw(dim=dims[0], inner=quotient)


def draws(first_program: Program, two: Program, sizes: tuple[int, int]) -> dict[str, Draw | None]:
    """Every draw whose shape the number of rows changes, by its path, those of loops included; None
    for one whose rows cannot be drawn by their positions.
    """
    if [(e.path, e.name) for e in first_program.equations] != [
        (e.path, e.name) for e in two.equations
    ]:
        raise Unlike
    draw_by_path: dict[str, Draw | None] = {}
    for first, second in zip(first_program.equations, two.equations, strict=True):
        if first.name in SHAPED:
            if own_dims(first.eqn, second.eqn):
                draw_by_path[first.path] = draw_of(first.eqn, second.eqn, sizes)
        else:
            for pair in zip(_inner(first), _inner(second), strict=True):
                inside = draws(*pair, sizes)
                draw_by_path.update(dict.fromkeys(inside) if first.name in CUSTOM else inside)
    return draw_by_path


def _inner(equation: Equation) -> Iterator[Program]:
    """The programs inside of an equation, under the paths of `shardlib.tracing.program`."""
    params, path = equation.params, equation.path
    if equation.name in (*REMAT, *CUSTOM):
        yield flatten(callee(equation.eqn), f"{path}/")
    elif equation.name == "scan":
        yield flatten(params["jaxpr"], f"{path}/body/")
    elif equation.name == "while":
        yield flatten(params["cond_jaxpr"], f"{path}/cond/")
        yield flatten(params["body_jaxpr"], f"{path}/body/")
    elif equation.name == "cond":
        for number, branch in enumerate(params["branches"]):
            yield flatten(branch, f"{path}/branch{number}/")
    else:
        for number, jaxpr in enumerate(subjaxprs(equation.eqn)):
            yield flatten(jaxpr, f"{path}/{number}/")
