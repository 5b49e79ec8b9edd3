"""The program of many tokens, of any requests: logits, and pages with their keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib._jax_compat import scan_counts
from shardlib.annotation.names import Model
from shardlib.annotation.trees import Tree
from shardlib.errors import ModelError, ShardlibError
from shardlib.functions.attention import Attention
from shardlib.functions.experts import ExpertForm
from shardlib.serve.cache import (
    DTYPES,
    TOKEN_DIMS,
    CacheGroup,
    Grid,
    Layers,
    Pages,
    StoredPages,
    TokenPlacement,
)
from shardlib.serve.layers import (
    ROW,
    CachedCall,
    Latent,
    Positions,
    TokenState,
    beside_calls,
    cached_calls,
    ends,
    evaluate,
    leaves_for,
    looks,
    positions,
    summed_dims,
)
from shardlib.tracing.program import Equation, Program, flatten, forms_of

#: The user's forward pass: (model, int32 tokens [batch, seq]) -> logits [batch, seq, vocab].
Forward = Callable[[Tree, jax.Array], jax.Array]


def stored_page(page: jax.ShapeDtypeStruct, cache: str) -> jax.ShapeDtypeStruct | StoredPages:
    """Returns the shapes of pages in a cache, without contents."""
    if cache == "model":
        return page
    values = page.update(dtype=DTYPES[cache][0])
    if cache == "fp8":
        return values
    scale = page.update(shape=page.shape[:-1], dtype=jnp.float32)
    return StoredPages(values=values, scale=scale, dtype=str(page.dtype))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class TracedForward:
    """A forward pass that can be served.

    Attributes:
        model: whose it is.
        program: the forward pass of one token: leaves of params and state, and tokens [1, 1].
        calls: of attention.
        positions: where it looks at the position.
        longest: tokens that a request may have.
        vocab: size of the logits.
        capped: whether experts take no more tokens than a share of the batch, of which a request
            knows nothing.
    """

    model: Model
    program: Program
    calls: tuple[CachedCall, ...]
    positions: Positions
    longest: int
    vocab: int
    capped: bool

    @property
    def key_heads(self) -> tuple[int, ...]:
        """Of each call of attention."""
        return tuple(call.key_heads for call in self.calls)

    @property
    def windows(self) -> frozenset[int]:
        """Tokens that layers keep, the token itself included; 0 where one keeps all."""
        return frozenset(window for call in self.calls for window in call.windows)

    @property
    def scanned(self) -> frozenset[int]:
        """Numbers of the params of which each iteration of a loop with attention takes a row."""
        numbers: list[int] = []
        for equation in self._loops:
            numbers += equation.inputs[sum(scan_counts(equation.params)) :]
        return frozenset(index for index, number in enumerate(self._params) if number in numbers)

    @property
    def factors(self) -> Mapping[int, tuple[int, ...]]:
        """Of each of the params, by number, that is only multiplied with: the dims that products
        sum over, of a row where it is `scanned`.
        """
        loops = [equation.path for equation in self._loops]
        dims_by_number = summed_dims(self.program, loops, self._latents)
        dims = {
            index: dims_by_number[number]
            for index, number in enumerate(self._params)
            if number in dims_by_number
        }
        return {index: tuple(dim for dim in summed if dim != ROW) for index, summed in dims.items()}

    @property
    def _params(self) -> tuple[int, ...]:
        return self.program.inputs[: len(jax.tree.leaves(self.model.params))]

    @property
    def _latents(self) -> Mapping[str, Latent]:
        return {call.path: call.latent for call in self.calls if call.latent is not None}

    @property
    def _loops(self) -> list[Equation]:
        return [
            equation
            for equation in self.program.equations
            if equation.name == "scan"
            and any(path.startswith(f"{equation.path}/") for path in self._paths)
        ]

    def new_pages(
        self, groups: Sequence[CacheGroup], size: int, cache: str = "model", devices: int = 1
    ) -> Mapping[str, Tree]:
        """Pages, for each call."""
        return {
            call.path: tuple(stored_page(page, cache) for page in call.pages(groups, size, devices))
            for call in self.calls
        }

    def __call__(
        self,
        params: Tree,
        state: Tree,
        pages: Mapping[str, Pages],
        tokens: jax.Array,
        location: TokenPlacement,
        rows: jax.Array,
        groups: Sequence[CacheGroup],
        grid: Grid | None = None,
    ) -> tuple[jax.Array, Mapping[str, Pages]]:
        """Logits [D R, vocab] of some of the tokens, and the pages with all of them.

        Args:
            tokens: int32 [T].
            rows: which of the tokens of each group of devices give logits, int32 [D R], groups one
                after another.
            grid: the devices; None for one.
        """
        grid = grid or Grid()
        layers = {call.path: Layers.of(call.windows, groups) for call in self.calls}
        dims = replace(TOKEN_DIMS, adapter=None if location.adapter is None else 0)
        latents = self._latents
        cut = ends(self.program, self._paths, self._varies)

        def one(
            pages: Mapping[str, Pages], token: jax.Array, location: TokenPlacement
        ) -> tuple[list[jax.Array], Mapping[str, Pages]]:
            leaves, location = (
                leaves_for(params, state, location.adapter),
                replace(location, adapter=None),
            )
            cached = TokenState(
                positions=self.positions,
                token=location,
                pages=pages,
                layers=layers,
                latents=latents,
                grid=grid,
            )
            results, written = evaluate(cut.every, [*leaves, token[None, None]], cached)
            return results, dict(written)

        def last(live: list[jax.Array], token: jax.Array, location: TokenPlacement) -> jax.Array:
            leaves, location = (
                leaves_for(params, state, location.adapter),
                replace(location, adapter=None),
            )
            cached = TokenState(positions=self.positions, token=location, pages={}, grid=grid)
            results, _ = evaluate(cut.last, [*leaves, token[None, None], *live], cached)
            return results[0][0, 0]

        live, pages = jax.vmap(one, in_axes=(None, 0, dims), out_axes=(0, None))(
            pages, tokens, location
        )
        carried = live, tokens, location.position, location.adapter
        live, tokens, position, adapter = taken(carried, rows, grid)
        location = replace(
            location, position=position, entry=(position,) * len(location.entry), adapter=adapter
        )
        return jax.vmap(last, in_axes=(0, 0, dims))(live, tokens, location), pages

    @property
    def _paths(self) -> list[str]:
        return [call.path for call in self.calls]

    def _varies(self, equation: Equation) -> bool:
        """Returns whether an equation depends on where the token stands."""
        tables = {number for path, number in self.positions.tables if not path}
        return looks(equation, self.positions, self._paths) or bool(tables & {*equation.inputs})


def taken(arrays: Tree, rows: jax.Array, grid: Grid) -> Tree:
    """Some rows of arrays, each group of devices its own.

    Args:
        arrays: [T, ...] each.
        rows: of those of a group, int32 [D R].
    """

    def take(arrays: Tree, rows: jax.Array) -> Tree:
        return jax.tree.map(lambda array: jnp.take(array, rows, axis=0, mode="clip"), arrays)

    if grid.groups == 1:
        return take(arrays, rows)
    data = PartitionSpec("data")
    return grid.local(take, (data, data), data)(arrays, rows)


def traced_forward(model: Model, forward: Forward, *, longest: int) -> TracedForward:
    """Traces a forward pass, for one token and for several."""

    def trace(seq: int) -> Any:
        def run(params: Tree, state: Tree, tokens: jax.Array) -> jax.Array:
            logits = forward(model.evaluating(model.rebuild(params, state)), tokens)
            if not hasattr(logits, "shape"):
                raise ModelError(
                    f"the forward pass gives a {type(logits).__name__}; logits are one array,"
                    " [batch, seq, vocab]\nTry: lambda model, tokens: model(tokens)[0], or what"
                    " picks the logits"
                )
            return logits

        shape = jax.ShapeDtypeStruct((1, seq), jnp.int32)
        try:
            return jax.make_jaxpr(run)(model.params, model.state, shape)
        except ShardlibError:
            raise
        except Exception as error:
            raise ModelError(
                f"the forward pass of {model.name} cannot be traced for tokens [1, {seq}]:"
                f" {type(error).__name__}: {error}\nTry: shorter requests, if the model looks at"
                " fewer tokens"
            ) from error

    jaxpr = trace(1)
    program, shape = flatten(jaxpr), tuple(jaxpr.out_avals[0].shape)
    if len(shape) != 3 or shape[:2] != (1, 1):
        raise ModelError(
            f"the forward pass of tokens [1, 1] gives {list(shape)}; logits are [1, 1, vocab]"
        )
    all_calls = sum(isinstance(form, Attention) for form, _ in forms_of(jaxpr))
    calls = cached_calls(program, all_calls)
    lost = all_calls - len(calls) - len(beside_calls(program))
    if lost:
        raise ModelError(
            f"{lost} of {all_calls} calls of shardlib.attention stand in a"
            " branch, a while loop or a custom derivative, where a cache cannot follow"
            " them\nTry: jax.lax.scan over layers, or layers that are written out"
        )
    try:
        counted = positions(program, flatten(trace(longest)), longest)
    except ModelError:
        # `table[:seq]` of all rows is not a slice. Nobody computes the last token of a request.
        if longest < 3:
            raise
        counted = positions(program, flatten(trace(longest - 1)), longest - 1)
    return TracedForward(
        model=model,
        program=program,
        calls=calls,
        positions=counted,
        longest=longest,
        vocab=shape[2],
        capped=any(
            isinstance(form, ExpertForm) and form.capacity is not None
            for form, _ in forms_of(jaxpr)
        ),
    )
