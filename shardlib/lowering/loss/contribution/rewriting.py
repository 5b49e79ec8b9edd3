"""The program of a microbatch, run with factors and values of the whole batch at some operands, and
with the draws of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from shardlib._jax_compat import open_jaxpr, scan_counts
from shardlib.functions.marks import form_of
from shardlib.functions.mean import WeightedMeanForm
from shardlib.jax_types import Atom, Aval, Eqn, Jaxpr
from shardlib.lowering.loss.contribution.draws import drawn
from shardlib.tracing.program import INLINED, REMAT, Program, callee
from shardlib.tracing.rewriting.binding import strong
from shardlib.tracing.rows.draws import Draw
from shardlib.tracing.rows.handed import Handed

#: Operand of an equation, by (path, index).
Place = tuple[str, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewriting:
    """A run of the program of a microbatch with some of its operands changed; every equation stays
    where it is, so that its path does.

    Attributes:
        factors: of operands.
        handed: operands that are handed in.
        values: what is handed in.
        sums: (result, total, weight) of every weighted mean.
        draws: by path, those at positions in the whole batch.
        rows: positions of the microbatch's rows; None where nothing is drawn.
        parts: number of microbatches.
    """

    factors: Mapping[Place, float]
    handed: Mapping[Place, Handed]
    values: Mapping[Handed, jax.Array]
    sums: list[tuple[Any, Any, Any]]
    draws: Mapping[str, Draw]
    rows: jax.Array | None
    parts: int

    def run(
        self, jaxpr: Jaxpr, arguments: Sequence[jax.Array], prefix: str, scope: str
    ) -> list[jax.Array]:
        """Results of a jaxpr."""
        inner, constants = open_jaxpr(jaxpr)
        env = dict(zip(inner.constvars, constants, strict=True))
        env.update(zip(inner.invars, arguments, strict=True))

        def read(atom: Atom) -> jax.Array:
            return atom.val if isinstance(atom, jex.Literal) else env[atom]

        for index, eqn in enumerate(inner.eqns):
            path, operands = f"{prefix}{index}", [read(atom) for atom in eqn.invars]
            here = str(eqn.source_info.name_stack)
            within = here[len(scope) :].lstrip("/") if scope and here.startswith(scope) else here
            with jax.named_scope(within) if within else nullcontext():
                results = self._equation(eqn, operands, path, here)
            if isinstance(form_of(eqn), WeightedMeanForm):
                self.sums.append((results[0], operands[0], operands[1]))
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in inner.outvars]

    def _equation(
        self, eqn: Any, operands: list[jax.Array], path: str, scope: str
    ) -> Sequence[jax.Array]:
        name = eqn.primitive.name
        if (name in INLINED or name in REMAT) and self._changed(path):
            return self._call(eqn, operands, path, scope)
        if path in self.draws:
            draw, rows, parts = self.draws[path], self.rows, self.parts
            return jax.jit(lambda keys, rows: drawn(eqn, keys, rows, draw, parts))(
                operands[0], rows
            )
        if name in _LOOPS and self._changed(path):
            return _LOOPS[name](self, eqn, operands, path, scope)
        for position, variable in enumerate(eqn.invars):
            handed = self.handed.get((path, position))
            if handed is not None:
                operands[position] = self.values[handed]
                assert (operands[position].shape, operands[position].dtype) == (
                    variable.aval.shape,
                    variable.aval.dtype,
                ), (path, position, operands[position], variable.aval)
        factors = {
            position: self.factors[path, position]
            for position in range(len(operands))
            if (path, position) in self.factors
        }
        if not factors:
            return _bound(eqn, operands)
        return jax.jit(
            lambda *arguments: tuple(
                _bound(
                    eqn,
                    [
                        times(leaf, factors.get(position, 1.0))
                        for position, leaf in enumerate(arguments)
                    ],
                )
            )
        )(*operands)

    def _changed(self, path: str) -> bool:
        return any(
            place.startswith(f"{path}/") for place, _ in (*self.handed, *self.factors)
        ) or any(drawn_at.startswith(f"{path}/") for drawn_at in self.draws)

    def _call(
        self, eqn: Eqn, operands: list[jax.Array], path: str, scope: str
    ) -> Sequence[jax.Array]:
        """A call with changes inside."""

        def inside(*arguments: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(self.run(callee(eqn), arguments, f"{path}/", scope))

        if eqn.primitive.name in REMAT:
            return jax.checkpoint(
                inside,
                policy=eqn.params.get("policy"),
                prevent_cse=eqn.params.get("prevent_cse", True),
            )(*operands)
        inside.__name__ = inside.__qualname__ = str(eqn.params.get("name", "inside"))
        return jax.jit(inside)(*operands)

    def _scan(
        self, eqn: Eqn, operands: list[jax.Array], path: str, scope: str
    ) -> Sequence[jax.Array]:
        params, (constants, carried) = eqn.params, scan_counts(eqn.params)
        fixed, first = operands[:constants], operands[constants : constants + carried]

        def body(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[Any, Any]:
            results = self.run(params["jaxpr"], [*fixed, *carry, *slices], f"{path}/body/", scope)
            return tuple(results[:carried]), tuple(results[carried:])

        carry, stacked = jax.lax.scan(
            body,
            tuple(_strong(first, eqn.invars[constants:])),
            tuple(operands[constants + carried :]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacked]

    def _while(
        self, eqn: Eqn, operands: list[jax.Array], path: str, scope: str
    ) -> Sequence[jax.Array]:
        params, tests = eqn.params, eqn.params["cond_nconsts"]
        first = tests + params["body_nconsts"]
        return jax.lax.while_loop(
            lambda state: self.run(
                params["cond_jaxpr"], [*operands[:tests], *state], f"{path}/cond/", scope
            )[0],
            lambda state: tuple(
                self.run(
                    params["body_jaxpr"], [*operands[tests:first], *state], f"{path}/body/", scope
                )
            ),
            tuple(_strong(operands[first:], eqn.invars[first:])),
        )

    def _cond(
        self, eqn: Eqn, operands: list[jax.Array], path: str, scope: str
    ) -> Sequence[jax.Array]:
        def branch(number: int, jaxpr: Jaxpr) -> Any:
            return lambda *arguments: tuple(
                self.run(jaxpr, arguments, f"{path}/branch{number}/", scope)
            )

        branches = [branch(*numbered) for numbered in enumerate(eqn.params["branches"])]
        return jax.jit(lambda index, *arguments: jax.lax.switch(index, branches, *arguments))(
            *operands
        )


#: Loops and branches, whose bodies are run again.
_LOOPS = {"scan": Rewriting._scan, "while": Rewriting._while, "cond": Rewriting._cond}


def _strong(values: Sequence[Any], variables: Sequence[Any]) -> list[jax.Array]:
    """Initial carries as arrays: literals are numbers of Python."""
    return [
        strong(value, variable.aval) for value, variable in zip(values, variables, strict=False)
    ]


def _bound(eqn: Eqn, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def times(leaf: jax.Array, factor: float) -> jax.Array:
    """A value times a number, in its own dtype; itself for 1."""
    return leaf if factor == 1.0 else leaf * jnp.asarray(factor, jnp.result_type(leaf))


def part_of_value(aval: Aval, handed: Handed, parts: int) -> jax.ShapeDtypeStruct:
    """What a microbatch gets of a value."""
    shape = tuple(aval.shape)
    if handed.dim is not None:
        shape = (*shape[: handed.dim], shape[handed.dim] // parts, *shape[handed.dim + 1 :])
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def dealt_by_rows(leaf: jax.Array, handed: Handed, parts: int) -> jax.Array:
    """A value in an order of which every part-th element of the dim of rows makes a part: whole
    rows of several elements each.
    """
    if handed.dim is None or handed.inner == 1:
        return leaf
    before, after = leaf.shape[: handed.dim], leaf.shape[handed.dim + 1 :]
    rows = leaf.reshape(*before, -1, parts, handed.inner, *after)
    return jnp.swapaxes(rows, handed.dim + 1, handed.dim + 2).reshape(leaf.shape)


def numbers_of(program: Program, values: Sequence[Handed]) -> list[int]:
    """The numbers of values in the whole batch's program."""
    results = {
        (equation.path, position): number
        for equation in program.equations
        for position, number in enumerate(equation.outputs)
    }
    return [results[handed.origin] for handed in values]
