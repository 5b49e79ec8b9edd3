"""The forward pass of one token, run again with pages and a position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardlib._jax_compat import scan_counts
from shardlib.functions.attention import Attention
from shardlib.functions.experts import ExpertForm
from shardlib.jax_types import Index, Value
from shardlib.lowering.serving.cache_groups import Layers, Token
from shardlib.lowering.serving.calls import bodies
from shardlib.lowering.serving.experts import visiting
from shardlib.lowering.serving.grid import Grid
from shardlib.lowering.serving.held.columns import Columns, converted, product
from shardlib.lowering.serving.latent import Latent
from shardlib.lowering.serving.pages import Pages, attending
from shardlib.lowering.serving.positions import Positions
from shardlib.lowering.serving.stored import Layered, plain, written_out
from shardlib.tracing.program import REMAT, Call, Equation, Program
from shardlib.tracing.rewriting.binding import bind, carried_avals, strong


@dataclass(frozen=True, kw_only=True)
class Cached:
    """What runs beside the values of a forward pass.

    Attributes:
        positions: where it looks at the position.
        token: where the token stands.
        pages: of each call of attention, by path.
        layers: of each call, by path, and where their pages lie.
        latents: what keys and values of a call are made of, by path.
        grid: the devices.
        layer: iteration of the loops around.
    """

    positions: Positions
    token: Token
    pages: Mapping[str, Pages]
    layers: Mapping[str, Layers] = field(default_factory=dict[str, Layers])
    latents: Mapping[str, Latent] = field(default_factory=dict[str, Latent])
    grid: Grid = field(default_factory=Grid)
    layer: Index = 0


def evaluate(
    program: Program, arguments: Sequence[Value], cached: Cached, path: str = ""
) -> tuple[list[Value], Mapping[str, Pages]]:
    """Runs a forward pass of one token; returns its results, and the pages with the token's keys
    and values.
    """
    env: dict[int, Any] = {
        number: _constant(cached, path, number, value)
        for number, value in program.constants.items()
    }
    env.update(zip(program.inputs, arguments, strict=True))
    done = None
    for equation in program.equations:
        call = equation.call
        if call is not None and isinstance(call.form, Attention) and call.path in cached.pages:
            if call is not done:
                env[call.outputs[0]], cached = _attended(call, env, cached)
            done = call
            continue
        if call is not None and isinstance(call.form, ExpertForm):
            if call is not done:
                results = visiting(call.form, cached.grid)(*(plain(env[n]) for n in call.inputs))
                env.update(zip(call.outputs, results, strict=True))
            done = call
            continue
        results, cached = _equation(equation, [env[n] for n in equation.inputs], cached)
        env.update(zip(equation.outputs, results, strict=True))
    return [env[number] for number in program.outputs], cached.pages


def _attended(call: Call, env: Mapping[int, Value], cached: Cached) -> tuple[Value, Cached]:
    """What a call of attention gives, and the pages with the token's keys and values."""
    operands, form = [env[number] for number in call.inputs], call.form
    assert isinstance(form, Attention)
    latent_parts = cached.latents.get(call.path)
    if latent_parts is not None:
        source = env[latent_parts.source]
        query = operands[latent_parts.part]
        operands[latent_parts.part] = jnp.einsum(
            "bsnh,lnh->bsnl", query, plain(env[latent_parts.key]).astype(query.dtype)
        )
        operands[form.parts + latent_parts.part] = operands[2 * form.parts] = source[:, :, None]
    row, location = cached.layers[call.path].where(cached.layer, cached.token)
    mixed, pages = attending(form, cached.grid, latent_parts and latent_parts.part)(
        cached.pages[call.path], row, location, *operands
    )
    if latent_parts is not None:
        mixed = jnp.einsum(
            "bsnl,lnv->bsnv", mixed, plain(env[latent_parts.value]).astype(mixed.dtype)
        )
    return mixed, replace(cached, pages={**cached.pages, call.path: pages})


def _constant(cached: Cached, path: str, number: int, value: Value) -> Value:
    """A constant; of a table with a row a token, the row of this one."""
    entry = cached.positions.tables.get((path, number))
    if entry is None:
        return value
    dim, table = entry
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(table), cached.token.position, 1, dim)


def looks(equation: Equation, places: Positions, calls: Iterable[str]) -> bool:
    """Whether an equation has attention in it, or looks at the position."""
    below = f"{equation.path}/"
    paths = [
        *calls,
        *places.iotas,
        *places.slices,
        *(path_of_table for path_of_table, _ in places.tables),
    ]
    return any(path.startswith(below) or path == equation.path for path in paths)


def _equation(
    equation: Equation, operands: list[Any], cached: Cached
) -> tuple[Sequence[Any], Cached]:
    """Results of an equation, of arrays or of what stands for them."""
    places = cached.positions
    if any(isinstance(operand, Columns) for operand in operands):
        if equation.name == "convert_element_type":
            return [converted(operands[0], equation)], cached
        if equation.name == "dot_general" and not equation.params["dimension_numbers"][1][0]:
            left, right = operands
            right = plain(right) if isinstance(left, Columns) else right
            return [product(equation, (left, right))], cached
    if equation.name != "scan" and equation.name not in REMAT:
        operands = [plain(operand) for operand in operands]
    if equation.path in places.iotas:
        params = equation.params
        return [jnp.full(params["shape"], cached.token.position, params["dtype"])], cached
    if equation.path in places.slices:
        return [_row(equation, operands[0], places.slices[equation.path], cached)], cached
    if equation.name == "scan" and _inside(equation, cached):
        return _scan(equation, operands, cached)
    if equation.name in REMAT:
        ((program, _),) = bodies(equation)
        results, pages = evaluate(program, operands, cached, equation.path)
        return results, replace(cached, pages=pages)
    operands = [plain(operand) for operand in operands]
    if equation.name == "dot_general":
        return bind(equation, operands, dimension_numbers=_in_order(equation)), cached
    return bind(equation, operands), cached


def _in_order(equation: Equation) -> tuple[Any, Any]:
    """Which dims a product sums over, in the order of its second operand, the weights where there
    are such: in another order compilers for CPUs copy them.
    """
    (left, right), batch = equation.params["dimension_numbers"]
    pairs = sorted(zip(left, right, strict=True), key=lambda pair: pair[1])
    return tuple(tuple(side) for side in zip(*pairs, strict=True)) or (left, right), batch


def _row(equation: Equation, array: Value, dim: int, cached: Cached) -> Value:
    """Of a slice from the first row on, the row of the token."""
    start = list(equation.params["start_indices"])
    rows = jax.lax.dynamic_slice_in_dim(array, start[dim] + cached.token.position, 1, dim)
    limits = list(equation.params["limit_indices"])
    start[dim], limits[dim] = 0, 1
    return jax.lax.slice(rows, start, limits, equation.params["strides"])


def _inside(equation: Equation, cached: Cached) -> bool:
    """Whether a loop has attention in it, or looks at the position."""
    return looks(equation, cached.positions, cached.pages)


def _scan(
    equation: Equation, operands: list[Value], cached: Cached
) -> tuple[Sequence[Value], Cached]:
    """A loop that carries pages: what it stacks would be a second copy of them."""
    params, path = equation.params, equation.path
    constants, carried = scan_counts(params)
    ((program, length),) = bodies(equation)
    pages_inside = {
        call_path: pages
        for call_path, pages in cached.pages.items()
        if call_path.startswith(f"{path}/")
    }

    def body(carry: Any, sliced: Any) -> Any:
        values, pages, iteration = carry
        inner = replace(cached, pages=pages, layer=cached.layer * length + iteration)
        outputs, pages = evaluate(
            program, [*operands[:constants], *values, *sliced], inner, equation.path
        )
        return (tuple(outputs[:carried]), dict(pages), iteration + 1), tuple(outputs[carried:])

    scanned = operands[constants + carried :]
    start = tuple(
        strong(plain(value), aval)
        for value, aval in zip(
            operands[constants : constants + carried],
            carried_avals(program, constants),
            strict=False,
        )
    )
    if any(isinstance(rows, Layered) for rows in scanned):
        run, first = written_out, 0
    else:
        run, first = partial(jax.lax.scan, unroll=params["unroll"]), jnp.zeros((), jnp.int32)
    (values, pages, _), stacked = run(
        body, (start, pages_inside, first), tuple(scanned), length=length, reverse=params["reverse"]
    )
    return [*values, *stacked], replace(cached, pages={**cached.pages, **pages})
