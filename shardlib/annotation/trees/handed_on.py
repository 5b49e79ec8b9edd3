"""Inputs that a program hands on as results, unchanged.

Through calls, names of values and rematerialisation, and through scans: a carry that no iteration
changes, and slices that are stacked up again as they came.

>>> import jax
>>> origins(jax.make_jaxpr(lambda x, y: (y, x + 1, jax.jit(lambda z: z)(x)))(1.0, 2.0))
[1, None, 0]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from shardlib._jax_compat import open_jaxpr, scan_counts
from shardlib.jax_types import Eqn, Jaxpr, Value

_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def origins(jaxpr: Jaxpr) -> list[int | None]:
    """The position of the input that each result is; None for what is computed, or a constant."""
    body, _ = open_jaxpr(jaxpr)
    positions: dict[Value, int] = {var: position for position, var in enumerate(body.invars)}
    for eqn in body.eqns:
        for var, source in zip(eqn.outvars, _sources(eqn), strict=True):
            if not isinstance(source, jex.Literal) and source in positions:
                positions[var] = positions[source]
    return [None if isinstance(var, jex.Literal) else positions.get(var) for var in body.outvars]


def _sources(eqn: Eqn) -> Sequence[Any]:
    """The operand that each result of an equation is, or None."""
    if eqn.primitive.name == "name":
        return eqn.invars
    nothing = [None] * len(eqn.outvars)
    body = next((eqn.params[key] for key in _BODIES if key in eqn.params), None)
    if body is None:
        return nothing
    inner = origins(body)
    if len(inner) != len(eqn.outvars):
        return nothing
    if eqn.primitive.name != "scan":
        alike = len(open_jaxpr(body)[0].invars) == len(eqn.invars)
        return [eqn.invars[k] if alike and k is not None else None for k in inner]
    constants, carried = scan_counts(eqn.params)
    first = constants + carried
    return [
        eqn.invars[k]
        if k is not None and (k == constants + result if result < carried else k >= first)
        else None
        for result, k in enumerate(inner)
    ]
