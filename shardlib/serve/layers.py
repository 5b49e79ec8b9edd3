"""The program of one token over a cache of keys and values, from a traced forward pass: its calls
of attention, its positions, its latents and experts.

    forward(model, tokens [1, 1]) -> logits    traced once, for one token of one row
    each call of `attention`                   writes the token's keys and values to its page, and
                                               attends over the pages of its request
    what depends on the position               an operand in place of an iota, a slice or a table

`jax.vmap` makes of it the program for many tokens, each with its own position and pages: those of
a prompt, one after another, and the next ones of many requests alike (continuous batching). Pages
are shared, so that writing to them is an operation on all tokens at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from shardlib._jax_compat import scan_counts
from shardlib.annotation.trees import Tree
from shardlib.errors import ModelError, raise_all
from shardlib.functions.attention import Attention, Operands
from shardlib.functions.experts import ExpertForm, visited
from shardlib.jax_types import Function, Index, Value
from shardlib.serve.cache import (
    SHARED,
    CacheGroup,
    Columns,
    Constants,
    Grid,
    Layered,
    Layers,
    Pages,
    TokenPlacement,
    attending,
    is_held,
    layer,
    plain,
    product,
)
from shardlib.tracing.program import REMAT, CustomCall, Equation, Program
from shardlib.tracing.rewriting import Labels, bind, carried_avals, dependence, needed, typed


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AdaptedParams:
    """Parameters, and those of adapters.

    Attributes:
        params: of the base.
        stacks: number of a leaf of the params -> [adapters, ...], what they have in its place.
    """

    params: Tree
    stacks: Mapping[int, jax.Array]


def base_of(weights: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """(params, state) of the model itself."""
    params, state = weights
    return (params.params if isinstance(params, AdaptedParams) else params), state


def leaves_for(params: Tree, state: Tree, adapter: Value | np.ndarray | None) -> list[Value]:
    """Leaves of params and state, as one token has them.

    Args:
        adapter: int32, that of the token, from 1 on; 0, or None, for the base.
    """
    if not isinstance(params, AdaptedParams):
        return jax.tree.leaves((params, state), is_leaf=is_held)
    leaves = jax.tree.leaves((params.params, state), is_leaf=is_held)
    if adapter is None:
        return leaves
    for index, stack in params.stacks.items():
        adapted, base = jnp.take(stack, jnp.maximum(adapter - 1, 0), axis=0), leaves[index]
        if isinstance(base, Layered):
            both = zip(adapted, base.rows, strict=True)
            rows = [jnp.where(adapter > 0, adapted_row, plain(row)) for adapted_row, row in both]
            leaves[index] = Layered(rows=tuple(rows))
        else:
            leaves[index] = jnp.where(adapter > 0, adapted, plain(base))
    return leaves


# --------------------------------------------------------------------------------------------------
# The end of a forward pass, which only tokens with a next one need.
#
# Of a chunk of a prompt only the last token has a next one. What comes after the last call of
# attention, the logits above all, is computed for such tokens and no others.


@dataclass(frozen=True, kw_only=True)
class Ends:
    """A forward pass in two.

    Attributes:
        every: what all tokens need; its results are the last inputs of `last`.
        last: what gives the results, from the inputs of the whole and those results.
    """

    every: Program
    last: Program


def ends(program: Program, calls: Collection[str], varies: Callable[[Equation], bool]) -> Ends:
    """Cuts a forward pass of one token after its last call of attention."""
    before = _before(program, calls)
    moving = {program.inputs[-1]}
    for equation in program.equations:
        if varies(equation) or moving & {*equation.inputs}:
            moving.update(equation.outputs)
    produced = {number for equation in before for number in equation.outputs}
    paths = {equation.path for equation in before}
    after = [equation for equation in program.equations if equation.path not in paths]
    # what depends on weights alone is rematerialised: it has no row for each token
    fixed = [equation for equation in before if not moving & {*equation.outputs}]
    again, reads = needed(
        fixed, {*program.outputs, *(n for equation in after for n in equation.inputs)}
    )
    after += again
    live = tuple(sorted(reads & produced & moving))
    order = {equation.path: index for index, equation in enumerate(program.equations)}
    return Ends(
        every=replace(program, equations=tuple(before), outputs=live),
        last=replace(
            program,
            inputs=(*program.inputs, *live),
            equations=tuple(sorted(after, key=lambda equation: order[equation.path])),
        ),
    )


def _before(program: Program, calls: Collection[str]) -> list[Equation]:
    """The equations that calls of attention need, and these themselves, in order."""
    needed, equations = set[int](), list[Equation]()
    for group in reversed(list(_groups(program))):
        call = group[0].call
        results = group[0].outputs if call is None else call.outputs
        attends = (
            any(path.startswith(f"{group[0].path}/") for path in calls)
            if call is None
            else isinstance(call.form, Attention)
        )
        if attends or needed & {*results}:
            equations[:0] = group
            needed.update(group[0].inputs if call is None else call.inputs)
            needed.update(number for equation in group for number in equation.inputs)
    return equations


def _groups(program: Program) -> Iterator[list[Equation]]:
    """Equations, those of one custom call together."""
    group: list[Equation] = []
    for equation in program.equations:
        if group and (equation.call is None or equation.call is not group[0].call):
            yield group
            group = []
        group.append(equation)
    if group:
        yield group


# --------------------------------------------------------------------------------------------------
# Experts that all tokens of a program visit together.
#
# Every device computes for the tokens of its group those experts, or those parts of all experts,
# whose weights it has; one all-reduce adds them up.


def visiting(form: ExpertForm, grid: Grid) -> Callable[..., tuple[Value, Value]]:
    """The function that takes the place of a call of `visit` for one token; mapped over tokens it
    sorts all of them by expert, once. No token is dropped: how many an expert may take depends on
    the other rows of a batch, of which a request knows nothing.
    """
    dropless = replace(form, capacity=None)

    @custom_vmap
    def visit(*arrays: Value) -> tuple[Value, Value]:
        return visited(dropless, *arrays)

    @visit.def_vmap
    def visit_many(
        size: int, mapped: tuple[bool, ...], *arrays: Value
    ) -> tuple[tuple[Value, Value], tuple[bool, bool]]:
        if any(mapped[3:]):
            raise ModelError("experts whose parameters depend on the token cannot be served")
        tokens = [
            array if has else jnp.broadcast_to(array, (size, *array.shape))
            for array, has in zip(arrays[:3], mapped[:3], strict=True)
        ]
        return _visited(dropless, grid, tokens, arrays[3:]), (True, False)

    return visit


def _visited(
    form: ExpertForm, grid: Grid, tokens: list[Value], parameters: tuple[Value, ...]
) -> tuple[Value, Value]:
    count, _, inner = parameters[0].shape
    devices, data = grid.ways(SHARED), PartitionSpec("data")
    by_expert = count % devices == 0
    if not by_expert and inner % devices:
        return visited(form, *tokens, *parameters)
    up, down = (
        (PartitionSpec(SHARED), PartitionSpec(SHARED))
        if by_expert
        else (PartitionSpec(None, None, SHARED), PartitionSpec(None, SHARED))
    )

    def local(x: Value, weights: Value, chosen: Value, *parameters: Value) -> Value:
        if by_expert and devices > 1:
            first = grid.first(SHARED, parameters[0].shape[0])
            weights, chosen, parameters = _own_choices(weights, chosen - first, parameters)
        result, _ = visited(form, x, weights, chosen, *parameters)
        return jax.lax.psum(result, SHARED) if devices > 1 else result

    specs = (up, down, up)[: len(parameters)]
    result = grid.local(local, (data, data, data, *specs), data)(*tokens, *parameters)
    return result, jnp.zeros((), jnp.int32)


def _own_choices(
    weights: Value, chosen: Value, parameters: tuple[Value, ...]
) -> tuple[Value, Value, tuple[Value, ...]]:
    """The choices that a device has the experts of; others count nothing, at its last expert."""
    last = parameters[0].shape[0] - 1
    here = (chosen >= 0) & (chosen <= last)
    return jnp.where(here, weights, 0), jnp.where(here, chosen, last), parameters


# --------------------------------------------------------------------------------------------------
# Keys and values that are linear in one small vector (latent attention, arXiv:2405.04434).
#
#     keys    K_n = c A_n         one matrix a head
#     values  V_n = c B_n
#
# A cache keeps c alone, beside parts of keys that are kept as they are: a score q_n . K_n is (q_n
# A_n^T) . c, and what is mixed of values is what is mixed of c, times B_n. So attention is that of
# one key head, as wide as c (section 2.1.2, the absorbed form). It is found in the traced program,
# where a key and the value are products of one value of the token.

#: Times that keys and values have to be larger than the vector that they are made of.
LARGER = 4


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The vector that keys and values are made of.

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


def latent(program: Program, call: CustomCall) -> Latent | None:
    """Finds the vector that the keys and values of a call are made of; None where it is not worth
    it.
    """
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


@dataclass(frozen=True, kw_only=True)
class CachedCall:
    """A call of attention in a forward pass of one token.

    Attributes:
        path: where it stands.
        form: what it computes.
        windows: tokens that each of its layers keeps, iterations of the loops around it in the
            order in which they run; 0 for all.
        kept: of a token, for each of the arrays of keys and then the values: shape and dtype. With
            a latent the values are those of the key that is linear in it.
        heads: of queries.
        width: elements of a query and of a value, of one head, as they are multiplied.
        latent: what keys and values are made of, where a cache keeps that.
    """

    path: str
    form: Attention
    windows: tuple[int, ...]
    kept: tuple[jax.ShapeDtypeStruct, ...]
    heads: int
    width: int
    latent: Latent | None = None

    @property
    def key_heads(self) -> int:
        """Heads of what is kept."""
        return max(array.shape[0] for array in self.kept if len(array.shape) > 1)

    @property
    def layers(self) -> int:
        """Number of times that the call runs."""
        return len(self.windows)

    def pages(
        self, groups: Sequence[CacheGroup], size: int, devices: int = 1
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes of its pages: [layers, pages, tokens, ...] for each array that is
        kept.
        """
        layers, count = Layers.of(self.windows, groups).leading
        return tuple(
            jax.ShapeDtypeStruct((layers, devices * count, size, *array.shape), array.dtype)
            for array in self.kept
        )


def cached_calls(program: Program, there: int = 0) -> tuple[CachedCall, ...]:
    """The calls of attention of a forward pass, in order."""
    beside = beside_calls(program)
    calls = [
        call for call in _calls(program, [Constants(program=program)]) if call.path not in beside
    ]
    failures = [
        f"the call of shardlib.attention at equation {call.path} {why}"
        for call in calls
        for why, wrong in (
            ("is not causal: its keys are not those of tokens before", not call.form.causal),
            ("has segments: a request is one document", call.form.packed),
        )
        if wrong
    ]
    if not calls and not there:
        failures = ["the forward pass calls shardlib.attention nowhere, or inside of jax.vmap"]
    if failures:
        raise_all(
            ModelError,
            "the model cannot be served with a cache",
            failures,
            hint="shardlib.attention(query, key, value) in place of the model's own attention",
        )
    return tuple(calls)


def beside_calls(program: Program) -> frozenset[str]:
    """Paths of calls of attention that need no cache: not causal, and what they look at depends on
    no token, such as what an encoder made of a source.
    """
    inputs: list[Labels] = [frozenset()] * len(program.inputs)
    inputs[-1] = frozenset({"tokens"})
    return frozenset(_beside(program, inputs))


def _beside(program: Program, inputs: Sequence[Labels]) -> Iterator[str]:
    labels = dependence(program, inputs)
    for equation in program.equations:
        call = equation.call
        if call is not None and isinstance(call.form, Attention) and not call.form.causal:
            operands = Operands.of(call.form, list(call.inputs))
            biased = call.form.bias is not None  # of a query that has no position here
            looked = [*operands.keys, operands.value, *(operands.queries if biased else ())]
            if not any(labels[cast(int, number)] for number in looked):
                yield call.path
        for body, _ in bodies(equation) if call is None else ():
            entering = [labels[number] for number in equation.inputs]
            if equation.name == "scan":
                constants, carried = scan_counts(equation.params)
                for index, number in enumerate(equation.outputs[:carried], constants):
                    entering[index] |= labels[number]
            yield from _beside(body, entering)


def bodies(equation: Equation) -> Iterator[tuple[Program, int]]:
    """The programs inside of an equation that is walked into, and how often each runs."""
    if equation.name == "scan":
        yield (equation.inside("body"), equation.params["length"])
    elif equation.name in REMAT:
        yield equation.inside(), 1


def _calls(program: Program, layers: Sequence[Constants]) -> Iterator[CachedCall]:
    """Calls of attention of a program that runs once for each layer."""
    done: CustomCall | None = None
    for equation in program.equations:
        call = equation.call
        if call is not None and isinstance(call.form, Attention):
            if call is not done:
                yield _cached(program, call, layers)
            done = call
            continue
        for body, _ in bodies(equation):
            inner = [
                turn
                for layer in layers
                for turn in (
                    layer.iterations(equation, body)
                    if equation.name == "scan"
                    else [layer.inside(equation, body)]
                )
            ]
            yield from _calls(body, inner)


def _cached(program: Program, call: CustomCall, layers: Sequence[Constants]) -> CachedCall:
    windows = (call.form.window,) * len(layers)
    everywhere = Operands.of(call.form, call.inputs).global_layer  # its number
    if everywhere is not None:  # a layer that sees all tokens, or may, keeps all of them
        known = [layer.of(cast(int, everywhere)) for layer in layers]
        windows = tuple(0 if value is None or value else call.form.window for value in known)
    operands = Operands.of(call.form, [program.avals[number] for number in call.inputs])
    latent_parts = latent(program, call)
    arrays = [
        jax.ShapeDtypeStruct(operand.shape[2:], operand.dtype)
        for operand in (*operands.keys, operands.value)
    ]
    width = sum(operand.shape[-1] for operand in (*operands.queries, operands.value))
    if latent_parts is not None:
        source = program.avals[latent_parts.source]
        across = source.shape[-1] - operands.queries[latent_parts.part].shape[-1]
        width += across + source.shape[-1] - operands.value.shape[-1]
        arrays = arrays[:-1]
        arrays[latent_parts.part] = jax.ShapeDtypeStruct((1, source.shape[-1]), source.dtype)
    return CachedCall(
        path=call.path,
        form=call.form,
        windows=windows,
        kept=tuple(arrays),
        heads=operands.queries[0].shape[2],
        width=width,
        latent=latent_parts,
    )


# --------------------------------------------------------------------------------------------------
# Places where a forward pass looks at the position of a token.
#
# Traced for one token of one row, it has no position: the number of the token in the row, 0, stands
# for it. It comes from
#
#     an iota           of as many elements as the row has tokens: `jnp.arange(seq)`
#     a slice           of a parameter or table, of as many rows: `positions[:seq]`
#     a constant        with as many rows: a table that NumPy made
#
# and each is told by how it differs in a trace of as many tokens as a request may have. What a
# forward pass finds out in another way (a sum over the tokens before) is not found here: the
# engine compares results.


@dataclass(frozen=True, kw_only=True)
class Positions:
    """The places where a forward pass of one token looks at its position.

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


@dataclass(frozen=True, kw_only=True)
class TokenState:
    """The cache that runs beside the values of a forward pass.

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
    token: TokenPlacement
    pages: Mapping[str, Pages]
    layers: Mapping[str, Layers] = field(default_factory=dict[str, Layers])
    latents: Mapping[str, Latent] = field(default_factory=dict[str, Latent])
    grid: Grid = field(default_factory=Grid)
    layer: Index = 0


def evaluate(
    program: Program, arguments: Sequence[Value], cached: TokenState, path: str = ""
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


def _attended(
    call: CustomCall, env: Mapping[int, Value], cached: TokenState
) -> tuple[Value, TokenState]:
    """Computes a call of attention, and the pages with the token's keys and values."""
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


def _constant(cached: TokenState, path: str, number: int, value: Value) -> Value:
    """A constant; of a table with a row a token, the row of this one."""
    entry = cached.positions.tables.get((path, number))
    if entry is None:
        return value
    dim, table = entry
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(table), cached.token.position, 1, dim)


def looks(equation: Equation, places: Positions, calls: Iterable[str]) -> bool:
    """Returns whether an equation has attention in it, or looks at the position."""
    below = f"{equation.path}/"
    paths = [
        *calls,
        *places.iotas,
        *places.slices,
        *(path_of_table for path_of_table, _ in places.tables),
    ]
    return any(path.startswith(below) or path == equation.path for path in paths)


def _equation(
    equation: Equation, operands: list[Any], cached: TokenState
) -> tuple[Sequence[Any], TokenState]:
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
    if equation.name == "scan" and looks(equation, places, cached.pages):
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
    """Returns the dims that a product sums over, in the order of its second operand, the weights
    where there are such: in another order compilers for CPUs copy them.
    """
    (left, right), batch = equation.params["dimension_numbers"]
    pairs = sorted(zip(left, right, strict=True), key=lambda pair: pair[1])
    return tuple(tuple(side) for side in zip(*pairs, strict=True)) or (left, right), batch


def _row(equation: Equation, array: Value, dim: int, cached: TokenState) -> Value:
    """Of a slice from the first row on, the row of the token."""
    start = list(equation.params["start_indices"])
    rows = jax.lax.dynamic_slice_in_dim(array, start[dim] + cached.token.position, 1, dim)
    limits = list(equation.params["limit_indices"])
    start[dim], limits[dim] = 0, 1
    return jax.lax.slice(rows, start, limits, equation.params["strides"])


def written_out(
    body: Function, carry: Tree, scanned: Sequence[Tree], *, length: int, reverse: bool
) -> tuple[Tree, tuple[Value, ...]]:
    """Computes what `jax.lax.scan` does, each iteration with the rows that are held for it.

    Args:
        body: (carry, rows) -> (carry, results).
    """
    results: dict[int, tuple[Value, ...]] = {}
    for index in reversed(range(length)) if reverse else range(length):
        carry, results[index] = body(carry, tuple(layer(stack, index) for stack in scanned))
    rows = [results[index] for index in range(length)]
    return carry, tuple(jnp.stack(rows_of_result) for rows_of_result in zip(*rows, strict=True))


def _scan(
    equation: Equation, operands: list[Value], cached: TokenState
) -> tuple[Sequence[Value], TokenState]:
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
        typed(plain(value), aval)
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


#: Dims that a product sums over; None for any other use.
Use = tuple[int, ...] | None
#: Stands before the dims of a row.
ROW = -1


def summed_dims(
    program: Program, loops: Iterable[str], latents: Mapping[str, Latent]
) -> Mapping[int, tuple[int, ...]]:
    """Of each input that is only a factor of products, all over the same dims and without batch
    dims: these dims, ascending. Of what a loop takes rows of: `ROW` and those of a row.
    """
    uses_by_number = _uses(program, frozenset(loops), latents)
    return {
        number: use
        for number in program.inputs
        if len(uses := uses_by_number.get(number, set())) == 1
        and (use := next(iter(uses))) is not None
    }


def _uses(
    program: Program, loops: frozenset[str], latents: Mapping[str, Latent]
) -> dict[int, set[Use]]:
    uses_by_number: dict[int, set[Use]] = {number: {None} for number in program.outputs}
    for equation in reversed(program.equations):
        latent = equation.call and latents.get(equation.call.path)
        if latent:
            uses_by_number[latent.key] = uses_by_number[latent.value] = {None}
        uses = _of(equation, uses_by_number, loops, latents)
        for number, input_uses in zip(equation.inputs, uses, strict=True):
            uses_by_number[number] = uses_by_number.get(number, set[Use]()) | input_uses
    return uses_by_number


def _of(
    equation: Equation,
    uses_by_number: Mapping[int, set[Use]],
    loops: frozenset[str],
    latents: Mapping[str, Latent],
) -> list[set[Use]]:
    """Returns the uses of each input of an equation."""
    unknown: list[set[Use]] = [{None} for _ in equation.inputs]
    if equation.call is not None:
        return unknown
    if equation.name == "convert_element_type":
        uses = uses_by_number.get(equation.outputs[0], set[Use]())
        return [{use if use and use[0] != ROW else None for use in uses}]
    if equation.name == "dot_general":
        summed, batch = equation.params["dimension_numbers"]
        return unknown if batch[0] else [{tuple(sorted(dims))} for dims in summed]
    body = next((program for program, _ in bodies(equation)), None)
    if body is None or (equation.name == "scan" and equation.path not in loops):
        return unknown
    inner = _uses(body, loops, latents)
    uses = [inner.get(number, set[Use]()) for number in body.inputs]
    if equation.name == "scan":
        constants, carried = scan_counts(equation.params)
        uses[constants : constants + carried] = unknown[constants : constants + carried]
        first = constants + carried
        uses[first:] = [{use and (ROW, *use) for use in row_uses} for row_uses in uses[first:]]
    return uses


def converted(columns: Columns, equation: Equation) -> Columns:
    """Columns in another dtype."""
    parts = tuple(bind(equation, [part])[0] for part in columns.parts)
    return Columns(parts=parts, summed=columns.summed, shape=columns.shape)
