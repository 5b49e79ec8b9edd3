"""Programs of `jax.pmap`: the axis that they are mapped over is bound to the whole batch.

Such a program computes on the rows of one device and averages with the others by name,
`lax.pmean(gradients, "batch")`. On the whole batch there is one member: a mean over the axis is
what it is given, and so is a sum, which is over all rows already; its size is 1, its index 0.

>>> import jax
>>> step = whole_batch(lambda x: 2.0 * jax.lax.pmean(x, "batch"), ("batch",))
>>> step(3.0)
Array(6., dtype=float32)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from shardlib._jax_compat import AnyJaxpr, open_jaxpr
from shardlib.errors import TracingError
from shardlib.jax_types import Eqn, EqnParams, Function
from shardlib.report import Finding

#: Collectives that give what they are given where the axis has one member.
_SAME = frozenset({"psum", "psum_invariant", "pmax", "pmin", "pvary", "pbroadcast", "all_to_all"})
#: How JAX says that no axis has a name.
_UNBOUND = re.compile(r"unbound axis name: ?(\w+)")
_BOUND: ContextVar[tuple[str, ...]] = ContextVar("bound", default=())


def bound_axes() -> tuple[str, ...]:
    """The axes that are bound to the whole batch in the trace that is made now."""
    return _BOUND.get()


def unbound_axis(error: Exception) -> str:
    """The name of the axis that a trace has asked for and that nothing binds; "" for other errors."""
    match = _UNBOUND.search(str(error)) if isinstance(error, NameError) else None
    return match[1] if match else ""


def found_axes(trace: Callable[[tuple[str, ...]], Any]) -> Any:
    """What a trace gives, with the axes bound that it asks for.

    Args:
        trace: names of axes to bind -> anything.
    """
    names: tuple[str, ...] = ()
    while True:
        try:
            return trace(names)
        except NameError as error:
            name = unbound_axis(error)
            if not name or name in names:
                raise
            names = (*names, name)


def mapped_finding(names: Sequence[str]) -> tuple[Finding, ...]:
    """What the user should know of axes that were bound."""
    if not names:
        return ()
    return (
        Finding(
            code="mapped-axis",
            severity="info",
            where=", ".join(names),
            message=(
                f"the axis {', '.join(names)} of jax.pmap is bound to the whole batch: means and"
                " sums over it are those of all rows, its size is 1 and its index 0"
            ),
            hint="whole batches and one state: no jax_utils.replicate, no common_utils.shard",
        ),
    )


def whole_batch(function: Function, names: Sequence[str]) -> Function:
    """A function with axes of `jax.pmap` bound to the whole batch."""
    if not names:
        return function

    def bound(*args: Any) -> Any:
        with _binding(names):
            closed, out = jax.make_jaxpr(
                function, axis_env=[(name, 1) for name in names], return_shape=True
            )(*args)
        inner, constants = open_jaxpr(closed)
        alone = jex.ClosedJaxpr(of_one_member(inner, names), list(constants))
        results = jex.jaxpr_as_fun(alone)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return bound


@contextmanager
def _binding(names: Sequence[str]) -> Iterator[None]:
    token = _BOUND.set((*_BOUND.get(), *names))
    try:
        yield
    finally:
        _BOUND.reset(token)


def of_one_member(jaxpr: AnyJaxpr, names: Collection[str]) -> AnyJaxpr:
    """A jaxpr without the collectives over some axes, which have one member."""
    if not names:
        return jaxpr
    replaced: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, jex.Literal) else replaced.get(atom, atom)

    equations: list[Any] = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(
            invars=[read(atom) for atom in eqn.invars],
            params={key: _inside(value, names) for key, value in eqn.params.items()},
            effects=_effects(eqn.effects, names),
        )
        axes = _axes(eqn.params)
        if not axes or not set(axes) <= set(names):
            equations.append(eqn)
            continue
        body, _ = open_jaxpr(jax.make_jaxpr(_meaning(eqn))(*(atom.aval for atom in eqn.invars)))
        inner = dict(zip(body.invars, eqn.invars, strict=True))

        def taken(atom: Any, inner: dict[Any, Any] = inner) -> Any:
            return atom if isinstance(atom, jex.Literal) else inner.get(atom, atom)

        equations += [
            equation.replace(invars=[taken(atom) for atom in equation.invars])
            for equation in body.eqns
        ]
        replaced.update(zip(eqn.outvars, map(taken, body.outvars), strict=True))
    return jaxpr.replace(
        eqns=equations,
        outvars=[read(atom) for atom in jaxpr.outvars],
        effects=_effects(jaxpr.effects, names),
    )


def _inside(value: Any, names: Collection[str]) -> Any:
    """A parameter of an equation, with the jaxprs in it."""
    if isinstance(value, (tuple, list)) and any(hasattr(item, "eqns") for item in value):
        return type(value)(_inside(item, names) for item in value)
    if not hasattr(value, "eqns"):
        return value
    if not hasattr(value, "consts"):
        return of_one_member(value, names)
    inner, constants = open_jaxpr(value)
    return jex.ClosedJaxpr(of_one_member(inner, names), list(constants))


def _axes(params: EqnParams) -> tuple[Any, ...]:
    """The named axes of a collective; none of other equations."""
    named_axes = params.get("axes", params.get("axis_name", ()))
    axes = named_axes if isinstance(named_axes, (tuple, list)) else (named_axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _effects(effects: Any, names: Collection[str]) -> Any:
    return type(effects)(effect for effect in effects if getattr(effect, "name", None) not in names)


def _meaning(eqn: Eqn) -> Callable[..., Any]:
    """What a collective computes where its axis has one member."""
    name, params = eqn.primitive.name, eqn.params
    if name in _SAME or (name != "axis_index" and params.get("tiled")):
        return lambda *arrays: arrays
    if name == "axis_index":
        return lambda: jnp.int32(0)
    if name == "all_gather":
        return lambda array: jnp.expand_dims(array, params["all_gather_dimension"])
    if name == "reduce_scatter":
        return lambda array: jnp.squeeze(array, params["scatter_dimension"])
    if name == "ppermute":
        from_itself = (0, 0) in {tuple(pair) for pair in params["perm"]}
        return lambda *arrays: arrays if from_itself else tuple(map(jnp.zeros_like, arrays))
    raise TracingError(
        f"{name} over the axis {', '.join(_axes(params))} of jax.pmap has no meaning on the whole"
        " batch\nTry: without jax.pmap, the same computed of all rows"
    )
