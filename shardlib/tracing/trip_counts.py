"""How often a while loop runs, and other facts that are read off a jaxpr."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from shardlib._jax_compat import open_jaxpr
from shardlib.graph.factors import Dims
from shardlib.jax_types import Aval, Constant
from shardlib.tracing.program import Equation


def counted_trips(equation: Equation, first: int) -> int | None:
    """Trip count of a while loop that counts an integer from one literal to another by ones; None
    where it does not.
    """
    condition, _ = open_jaxpr(equation.params["cond_jaxpr"])
    body, _ = open_jaxpr(equation.params["body_jaxpr"])
    tests, constants = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    if (
        len(condition.eqns) != 1
        or condition.eqns[0].primitive.name != "lt"
        or condition.outvars[0] is not condition.eqns[0].outvars[0]
    ):
        return None
    starts = {var: equation.eqn.invars[first + k] for k, var in enumerate(condition.invars[tests:])}
    starts.update({var: equation.eqn.invars[k] for k, var in enumerate(condition.invars[:tests])})
    ends = [
        getattr(starts.get(atom, atom), "val", None) if not hasattr(atom, "val") else atom.val
        for atom in condition.eqns[0].invars
    ]
    counter = next(
        (k for k, var in enumerate(condition.invars[tests:]) if var is condition.eqns[0].invars[0]),
        None,
    )
    limit = next(
        (k for k, var in enumerate(condition.invars[tests:]) if var is condition.eqns[0].invars[1]),
        None,
    )
    begin, end = ends
    if counter is None or begin is None or end is None:
        return None
    steps = [
        e for e in body.eqns if e.outvars[0] is body.outvars[counter] and e.primitive.name == "add"
    ]
    by_ones = any(
        e.invars[0] is body.invars[constants + counter] and getattr(e.invars[1], "val", None) == 1
        for e in steps
    )
    fixed = limit is None or body.outvars[limit] is body.invars[constants + limit]
    return max(0, int(end) - int(begin)) if by_ones and fixed else None


def dtype_name(aval: Aval) -> str:
    """JAX's name of a dtype; "key" for PRNG keys, "token" for values with no dtype."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return "token"
    return "key" if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else str(dtype.name)


def literal(constant: Constant) -> str:
    """The text of a whole number, which tells a window of attention from another; "" for every
    other constant.
    """
    scalar = np.shape(constant) == ()
    is_integer = scalar and jax.dtypes.issubdtype(jnp.result_type(constant), np.integer)
    return str(int(np.asarray(constant))) if is_integer else ""


def stacking(shape: tuple[int, ...]) -> tuple[Dims, Dims]:
    """Dims of a stack and of one item of it."""
    stack_dims: Dims = tuple((i,) if size > 1 else () for i, size in enumerate(shape))
    return stack_dims, stack_dims[1:]
