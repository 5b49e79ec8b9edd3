"""Computation of an engine's steps: models over pages or with a cache of their own, adapters,
drafts, and encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.annotation.model import Init, read
from shardlib.annotation.names import Model
from shardlib.annotation.trees import Tree, path_text
from shardlib.errors import ArgumentError, ModelError, raise_all
from shardlib.jax_types import Leaf
from shardlib.lowering.mesh import device_mesh
from shardlib.processes.progress import counted
from shardlib.processes.values import processes_text
from shardlib.serve.cache import (
    CacheGroup,
    Columns,
    Layered,
    TokenPlacement,
    all_plain,
    is_held,
    is_stored,
)
from shardlib.serve.layers import AdaptedParams, bodies
from shardlib.serve.program import Forward, TracedForward, traced_forward
from shardlib.serve.requests import Capacity, GenerationRequest, Request, SampledToken
from shardlib.serve.sampling import (
    Choices,
    Chosen,
    Row,
    UserForward,
    choices,
    choose,
    rows_of,
    told,
)
from shardlib.serve.scheduling import ScheduledChunk
from shardlib.serve.step import Step, arranged, both, placed
from shardlib.tracing.program import Program
from shardlib.untrusted.data import bounded, is_integer

# --------------------------------------------------------------------------------------------------
# Adapters of one base: each request names its own, and all of them run in one program.
#
# Of the parameters that adapters have, those of all adapters are stacked; each token takes those
# of the adapter that its request names (`jax.vmap` makes a batched product of it), and a token
# without one the model's own. So `y = x W + x A B` costs a gather of A and B for each token (Chen
# et al., "Punica", arXiv:2310.18547), and W is read once for all.

#: Dotted path of a parameter -> the array that an adapter has in its place.
AdapterArrays = dict[str, jax.Array]


class Adapters:
    """Adapters of an engine.

    Args:
        most: of them; 0 for none.

    Attributes:
        rows: number of each, from 1 on, by name.
    """

    def __init__(self, limit: int) -> None:
        self.most = limit
        self.rows: dict[str, int] = {}
        self._stacks: dict[int, jax.Array] = {}

    def failures(self, request: GenerationRequest) -> list[str]:
        """Lists the reasons why the adapter of a request cannot be served; empty where it can."""
        if not request.adapter or request.adapter in self.rows:
            return []
        there = ", ".join(map(repr, self.rows)) or "none"
        return [f"there is no adapter {request.adapter!r}; there are {there}"]

    def wrapped(self, weights: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        """Weights with those of all adapters."""
        if not self._stacks:
            return weights
        return AdaptedParams(params=weights[0], stacks=self._stacks), weights[1]

    def add(self, name: str, arrays: Tree, weights: tuple[Tree, Tree]) -> None:
        """One more adapter."""
        leaves = jax.tree_util.tree_leaves_with_path(weights[0], is_leaf=is_held)
        stored = any(map(is_stored, jax.tree.leaves(weights[0], is_leaf=is_stored)))
        places = {path_text(path): index for index, (path, _) in enumerate(leaves)}
        parts = parts_of(arrays)
        failures = [
            why
            for why, wrong in (
                ("weights are stored in eight bits", stored),
                (f"there is room for {self.most}", len({*self.rows, name}) > self.most),
                ("the name is empty", not name),
                ("it has no parameters", not parts),
            )
            if wrong
        ]
        for path, array in parts.items():
            if path not in places:
                failures.append(f"the model has no parameter {path}")
            elif tuple(array.shape) != tuple(leaves[places[path]][1].shape):
                parameter = list(leaves[places[path]][1].shape)
                failures.append(f"{path} is {list(array.shape)}; that of the model is {parameter}")
        adapted = {places[path] for path in parts if path in places}
        if self._stacks and adapted != set(self._stacks):
            failures.append("it has other parameters than the adapters that are there")
        if failures:
            raise_all(ArgumentError, f"the adapter {name!r} cannot be served", failures[:5])
        row = self.rows.get(name, len(self.rows) + 1)
        for path, array in parts.items():
            index, parameter = places[path], leaves[places[path]][1]
            stack = self._stacks.get(index)
            if stack is None:
                stack = empty_stack(parameter, self.most)
            new = jnp.asarray(array, parameter.dtype)
            self._stacks = {
                **self._stacks,
                index: jax.jit(
                    lambda stack, new, row: stack.at[row].set(new), out_shardings=stack.sharding
                )(stack, new, row - 1),
            }
        self.rows[name] = row


def parts_of(tree: Tree) -> AdapterArrays:
    """Arrays by dotted path."""
    if isinstance(tree, Mapping) and all(hasattr(array, "shape") for array in tree.values()):
        return {str(path): array for path, array in tree.items()}
    return {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def empty_stack(parameter: jax.Array | Layered | Columns, count: int) -> jax.Array:
    """Room for so many arrays like one of the model, sharded as it is."""
    sharding = parameter.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.device_put(jnp.zeros((count, *parameter.shape), parameter.dtype), sharding)


# --------------------------------------------------------------------------------------------------
# Drafts: guesses of the next tokens of an answer, computed in one step beside the last one.
#
# The model chooses a token after each guess, with the random numbers that belong to its position,
# and takes guesses as long as they are what it has chosen. So tokens are those of serving without
# guesses, one by one, also with a temperature. For a guess that is one token this is the rule of
# Leviathan et al. (arXiv:2211.17192), which keeps it with its probability; for a model that
# guesses with the same random numbers, it is the coupling of Daliri et al. (arXiv:2408.07978),
# which keeps guesses with a probability of at least (1 - d) / (1 + d), d the total variation of
# the two models.
#
#     Ngrams       what followed the last time the answer, or the prompt, went like this
#     DraftModel   a smaller model, over pages of its own with the same numbers


class Ngrams:
    """Guesses what followed the last time that the tokens went like this (prompt lookup).

    Args:
        longest: tokens at the end that are looked for; fewer, down to `shortest`, where these are
            not found.
        shortest: see there.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.longest, self.shortest = longest, shortest

    def guessed(self, running: Sequence[Request], count: int) -> Mapping[int, Sequence[int]]:
        """Guesses, by number of the request."""
        waiting = [request for request in running if request.waiting == 1]
        return {request.number: self._after(request.tokens, count) for request in waiting}

    def filled(self, shares: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        """The shares of a step with their guesses, which they have."""
        return list(shares)

    def done(self, shares: Sequence[ScheduledChunk], accepted: Mapping[int, int]) -> None:
        """A step has computed them."""

    def _after(self, tokens: Sequence[int], count: int) -> list[int]:
        text = np.asarray(tokens, np.int32)
        for length in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
            matches = np.flatnonzero((windows == text[-length:]).all(axis=1))
            if len(matches):
                start = int(matches[-1]) + length
                followed = text[start : start + count].tolist()
                # where it repeats itself, what follows goes on behind the end
                period = len(text) - start
                return [followed[n % period] for n in range(count)] if period < count else followed
        return []


class DraftModel:
    """Guesses with a smaller model.

    Args:
        step: of the model, with as many pages, of the same size, as the one that is served.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._behind: dict[int, int] = {}

    def guessed(self, running: Sequence[Request], count: int) -> Mapping[int, Sequence[int]]:
        """As many tokens as guesses, of any kind: `filled` guesses."""
        return {request.number: (0,) * count for request in running if request.waiting == 1}

    def filled(self, shares: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        """The shares of a step with their guesses."""
        now = [self._own(share) for share in shares]
        if not self.step.holds(now):
            now = [self._own(share, behind=False) for share in shares]
        guesses: dict[int, tuple[int, ...]] = {share.request.number: () for share in shares}
        lengths = {share.request.number: len(share.drafted) for share in shares}
        while now:
            sampled = self.step(now)
            for share, rows in zip(now, sampled, strict=True):
                if rows:
                    guesses[share.request.number] += (rows[-1].token,)
            now = [
                replace(
                    share,
                    first=share.request.count + len(guesses[number]) - 1,
                    count=1,
                    drafted=guesses[number],
                )
                for share in now
                if 0 < len(guesses[number := share.request.number]) < lengths[number]
            ]
        return [replace(share, drafted=guesses[share.request.number]) for share in shares]

    def done(self, shares: Sequence[ScheduledChunk], accepted: Mapping[int, int]) -> None:
        """A step has computed them."""
        self._behind = {
            share.request.number: share.first + share.count
            for share in shares
            if share.drafted and accepted[share.request.number] == len(share.drafted)
        }

    def _own(self, share: ScheduledChunk, behind: bool = True) -> ScheduledChunk:
        """Returns the part of a share that this model computes: no guesses, but the last one of the
        step before, which it has not seen yet.
        """
        late = int(behind and self._behind.get(share.request.number) == share.first)
        return replace(
            share,
            first=share.first - late,
            count=share.count - len(share.drafted) + late,
            rows=1 if share.drafted else 0,
            drafted=(),
        )


#: Guesses of the next tokens.
Drafts: TypeAlias = Ngrams | DraftModel


# --------------------------------------------------------------------------------------------------
# Models with a cache of their own: Flax's `decode=True`, recurrent states.
#
#     def forward(model, tokens):                # NNX: int32 [1, 1] -> logits [1, 1, vocab]
#         return model(tokens, decode=True)
#
#     def forward(variables, tokens):            # Linen: (logits, updated collections)
#         return module.apply(variables, tokens, mutable=["cache"])
#
# Such a cache has one index, and so one request. `jax.vmap` over slots gives each its own: what
# the forward pass changes of the model's state is kept once a slot, and set back when a request
# begins. Tokens of a prompt go in one after another, those of several slots together. There are no
# pages, so that no prefix is shared.

#: Variables of Flax's attention that have a row a token, at the third dim from behind.
FLAX = ("cached_key", "cached_value")


@dataclass(frozen=True, kw_only=True)
class OwnCache:
    """A forward pass of one token that keeps a cache in the model's state.

    Attributes:
        model: whose it is.
        forward: the user's own.
        changed: numbers of the leaves of the state that it changes.
        vocab: size of the logits.
    """

    model: Model
    forward: UserForward
    changed: tuple[int, ...]
    vocab: int

    def __call__(
        self, params: Tree, state: Sequence[jax.Array], token: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Logits [vocab] after a token, and the leaves of the state."""
        tree = jax.tree.unflatten(jax.tree.structure(self.model.state), state)
        return _run(self.model, self.forward, params, tree, token[None, None])


def own_cache(model: Model, forward: UserForward, *, longest: int) -> OwnCache | None:
    """Returns the program for a forward pass with a cache of its own; None where it has none."""
    if not jax.tree.leaves(model.state):
        return None
    traced = jax.make_jaxpr(
        lambda params, state, tokens: _run(model, forward, params, state, tokens)
    )(model.params, model.state, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    before = traced.jaxpr.invars[len(jax.tree.leaves(model.params)) : -1]
    after = traced.jaxpr.outvars[1:]
    changed = tuple(
        index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old is not new
    )
    if not changed:
        return None
    leaves = jax.tree_util.tree_leaves_with_path(model.state)
    for index in changed:
        name, shape = path_text(leaves[index][0]), leaves[index][1].shape
        if any(word in name for word in FLAX) and len(shape) > 2 and shape[-3] < longest:
            raise ModelError(
                f"{name} has room for {shape[-3]} tokens, and a request may have {longest}\nTry:"
                f" init_cache with {longest} tokens, or Capacity(longest={shape[-3]})"
            )
    (vocab,) = traced.out_avals[0].shape
    return OwnCache(model=model, forward=forward, changed=changed, vocab=vocab)


def slotted(capacity: Capacity) -> Capacity:
    """Sizes where each slot has room for a whole request."""
    return replace(
        capacity,
        page=capacity.longest,
        pages=capacity.slots,
        chunk=max(1, capacity.most_tokens // capacity.slots),
        prefixes=False,
        drafts=0,
    )


class SlotStep:
    """Compiled programs, and the cache of each slot.

    Args:
        forward: that keeps a cache.
        weights: (params, state) on their device; the state is the cache of nobody.
        sizes: of the programs.
    """

    def __init__(self, forward: OwnCache, weights: tuple[Tree, Tree], sizes: Capacity) -> None:
        self.forward, self.weights, self.sizes = forward, weights, sizes
        self.chunk = sizes.chunk_size
        blank = [jax.tree.leaves(weights[1])[index] for index in forward.changed]
        self.caches = [jnp.repeat(leaf[None], sizes.slots, axis=0) for leaf in blank]
        self._step = jax.jit(self._computed, donate_argnums=1)
        self._programs: dict[int, jax.stages.Compiled] = {}

    @property
    def compiled(self) -> int:
        """Programs that have been compiled."""
        return len(self._programs)

    def warm_up(self) -> None:
        """Compiles all programs."""
        for columns in counted(sorted({1, self.chunk}), "compiling programs of the server"):
            self._run(self._empty(columns), [], {})

    def __call__(
        self,
        shares: Sequence[ScheduledChunk],
        allowed: Mapping[int, Sequence[np.ndarray]] | None = None,
    ) -> list[list[SampledToken]]:
        """Computes a step; returns what is chosen in the rows of each share."""
        columns = 1 if all(share.count == 1 for share in shares) else self.chunk
        tokens, live, fresh, row = self._empty(columns)
        rows, masks = list[Row](), dict[int, np.ndarray]()
        for share in shares:
            tokens[: share.count, share.slot] = share.tokens
            live[: share.count, share.slot] = True
            fresh[share.slot] = share.first == 0
            computed_rows = (
                np.arange(share.count - share.rows, share.count) * self.sizes.slots + share.slot
            )
            row[len(rows) : len(rows) + share.rows] = computed_rows
            for number, mask in enumerate((allowed or {}).get(share.request.number, ())):
                masks[len(rows) + number] = mask
            rows += rows_of(share)
        chosen = iter(self._run((tokens, live, fresh, row), rows, masks))
        return [[next(chosen) for _ in range(share.rows)] for share in shares]

    def _empty(self, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        slots = self.sizes.slots
        return (
            np.zeros((columns, slots), np.int32),
            np.zeros((columns, slots), bool),
            np.zeros(slots, bool),
            np.zeros(slots, np.int32),
        )

    def _run(
        self, operands: tuple[np.ndarray, ...], rows: Sequence[Row], masks: Mapping[int, np.ndarray]
    ) -> list[SampledToken]:
        row_choices = choices(
            [*rows, *[None] * (self.sizes.slots - len(rows))],
            vocab=self.forward.vocab,
            longest=self.sizes.longest,
            allowed=masks,
        )
        columns = len(operands[0])
        if columns not in self._programs:
            lowered = self._step.lower(self.weights, self.caches, *operands, row_choices)
            self._programs[columns] = lowered.compile()
        chosen, self.caches = self._programs[columns](
            self.weights, self.caches, *operands, row_choices
        )
        return list(told(chosen, dict(enumerate(rows))).values())

    def _computed(
        self,
        weights: tuple[Tree, Tree],
        caches: list[jax.Array],
        tokens: jax.Array,
        live: jax.Array,
        fresh: jax.Array,
        rows: jax.Array,
        row_choices: Choices,
    ) -> tuple[Chosen, list[jax.Array]]:
        params, state = weights[0], jax.tree.leaves(weights[1])
        blank = [state[index] for index in self.forward.changed]

        def one(cache: list[jax.Array], token: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            leaves = list(state)
            for index, leaf in zip(self.forward.changed, cache, strict=True):
                leaves[index] = leaf
            logits, after = self.forward(params, leaves, token)
            return logits, [after[index] for index in self.forward.changed]

        def column(
            caches: list[jax.Array], inputs: tuple[jax.Array, jax.Array]
        ) -> tuple[list[jax.Array], jax.Array]:
            token, on = inputs
            logits, after = jax.vmap(one)(caches, token)
            return [_selected(on, new, old) for new, old in zip(after, caches, strict=True)], logits

        caches = jax.lax.cond(
            jnp.any(fresh),
            lambda: [
                _selected(fresh, jnp.broadcast_to(first[None], old.shape), old)
                for first, old in zip(blank, caches, strict=True)
            ],
            lambda: caches,
        )
        caches, logits = jax.lax.scan(column, caches, (tokens, live))
        return choose(logits.reshape(-1, logits.shape[-1])[rows], row_choices), caches


def _selected(slots: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(slots.reshape(-1, *[1] * (old.ndim - 1)), new.astype(old.dtype), old)


def _run(
    model: Model, forward: UserForward, params: Tree, state: Tree, tokens: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """Logits [vocab] of tokens [1, 1], and the leaves of the state after it."""

    def kept(module: Tree, tokens: jax.Array) -> Tree:
        result = forward(model.evaluating(module), tokens)
        logits, *updates = result if isinstance(result, tuple) else (result,)
        if tuple(jnp.shape(logits))[:2] != (1, 1) or jnp.ndim(logits) != 3:
            raise ModelError(
                f"the forward pass of tokens [1, 1] gives {list(jnp.shape(logits))}; logits are"
                " [1, 1, vocab]"
            )
        return (jnp.zeros(()), {"logits": logits}, *updates)

    _, (metrics, after) = model.bind(kept)(params, state, tokens)
    return metrics["logits"][0, 0], jax.tree.leaves(after)


#: What computes the steps of an engine.
StepProgram: TypeAlias = Step | SlotStep


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """The computation of the steps of an engine.

    Attributes:
        compute: does.
        capacity: how many requests and tokens are served.
        forward: the traced forward pass.
        place: weights as a user gives them -> on their devices.
        chunk: tokens of a prompt that a step computes at most.
    """

    compute: StepProgram
    capacity: Capacity
    forward: TracedForward | OwnCache
    place: Callable[[Tree | int], tuple[Tree, Tree]]
    chunk: int


# --------------------------------------------------------------------------------------------------
# Logits with a cache against those of the forward pass. One that uses positions in a way that
# `serve/layers.py` does not know would give wrong answers, and no error. So some random tokens go
# both ways.

#: Tokens that are compared, and of the row that they stand in; fewer where a request may have no
#: more.
TOKENS, ROW = 40, 64
#: Largest difference of logits, over the largest logit, that rounding explains.
ROUNDING = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.03}


def compare(
    model: Model, forward: Forward, traced: TracedForward, weights: tuple[Tree, Tree], *, page: int
) -> None:
    """Compares them; models whose experts leave tokens out, by the batch, are not compared."""
    if traced.capped:
        return
    count = min(TOKENS, traced.longest - 1)  # nobody computes the last token of a request
    tokens = _tokens(traced, count)
    used = -(-count // page)
    groups = (CacheGroup(window=0, pages=used, table=used),)
    pages = {
        name: tuple(jnp.zeros(array.shape, array.dtype) for array in arrays)
        for name, arrays in traced.new_pages(groups, page).items()
    }
    position = np.arange(count, dtype=np.int32)
    placement = TokenPlacement(
        position=position,
        entry=(position,),
        table=(np.zeros((0, used), np.int32),),
        chunks=(np.arange(used, dtype=np.int32)[None],),
    )

    def plain(params: Tree, state: Tree, tokens: jax.Array) -> jax.Array:
        return forward(model.evaluating(model.rebuild(all_plain(params), state)), tokens)[0, :count]

    def of(seq: int) -> np.ndarray:
        row = np.zeros((2, seq), np.int32)  # another request beside it, of which it knows nothing
        row[0, :count], row[1, :count] = tokens, tokens[::-1]
        try:
            jax.eval_shape(plain, *weights, row)
        except ModelError:
            raise
        except Exception:  # a model whose state has one row takes one
            row = row[:1]
        return np.asarray(jax.jit(plain)(*weights, row), np.float32)

    try:
        right = of(min(ROW, traced.longest))
    except ModelError:  # a model may want whole blocks of tokens
        right = of(traced.longest)
    barred = np.isneginf(right)  # tokens that a model never says
    if not np.isfinite(right[~barred]).all() or barred.all(axis=-1).any():
        raise ModelError(
            "the forward pass gives logits that are not numbers\nTry: look at the weights; they may"
            " hold NaN"
        )
    served = jax.jit(partial(traced.__call__, groups=groups))
    computed = np.asarray(served(*weights, pages, tokens, placement, position)[0])
    computed, right = (
        np.where(barred & np.isneginf(logits), 0, logits).astype(np.float32)
        for logits in (computed, right)
    )
    error = np.abs(computed - right).max(axis=-1)
    coarsest = max(
        (ROUNDING.get(str(leaf.dtype), 0.0) for leaf in jax.tree.leaves((model.params, pages))),
        default=0.0,
    )
    allowed = max(coarsest, ROUNDING["float32"]) * max(float(np.abs(right).max()), 1e-30)
    if not (error <= allowed).all():
        first = int(np.argmax(~(error <= allowed)))
        raise ModelError(
            f"with a cache the logits of token {first} are off by {error[first]:.3g}, where the"
            f" largest logit is {np.abs(right).max():.3g}: the forward pass looks at other tokens,"
            " other rows, or its position, in a way that is not known here\nTry: attention by"
            " shardlib.attention, and positions by jnp.arange(tokens.shape[1])"
        )


def _tokens(traced: TracedForward, count: int) -> np.ndarray:
    """Random tokens, and among them those that the forward pass may treat apart: every whole number
    that stands in it.
    """
    tokens = np.random.default_rng(0).integers(0, traced.vocab, count).astype(np.int32)
    named = sorted({number for number in _numbers(traced.program) if 0 <= number < traced.vocab})
    places = range(2, count - 1, 3)
    for place, token in zip(places, named, strict=False):
        tokens[place] = token
    return tokens


def _numbers(program: Program) -> Iterator[int]:
    for value in program.constants.values():
        if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.integer):
            yield int(np.asarray(value))
    for equation in program.equations:
        for body, _ in bodies(equation):
            yield from _numbers(body)


# --------------------------------------------------------------------------------------------------
# The computation of an engine, built for a model.


def built(
    init: Init,
    forward: Forward,
    *,
    weights: Tree | int,
    capacity: Capacity,
    grid: tuple[int, int],
    devices: Sequence[jax.Device],
    check: bool,
    windows: Iterable[int] | None = None,
) -> EngineParts:
    """Makes what computes the steps of an engine.

    Args:
        windows: of cache groups that there are already, beside another model; None for its own.
    """
    data, tensor = grid
    _require_own(devices, weights)
    _check_devices(tensor, data, len(devices))
    model = read(init)
    cached_forward = own_cache(model, forward, longest=capacity.longest)
    if cached_forward is not None:
        return _slotted(cached_forward, weights, capacity, grid, devices[0])
    if capacity.adapters and capacity.storage.weights != "model":
        raise ArgumentError(
            f"weights are {capacity.storage.weights}, and those of adapters are not\nTry: no"
            ' adapters, or Storage(weights="model")'
        )
    traced = traced_forward(model, forward, longest=capacity.longest)
    capacity = capacity.within(traced.windows if windows is None else windows)
    arrangement = arranged(model, forward, traced, tensor=tensor, data=data)
    mesh = device_mesh(arrangement.mesh, devices[: tensor * data])[0]
    cpu = traced if devices[0].platform == "cpu" else None
    placement = placed(model, arrangement, mesh, capacity.storage, cpu)

    def place(weights: Tree | int) -> tuple[Tree, Tree]:
        return placement.weights(*_weights(model, weights))

    stored, pages = place(weights), placement.pages(traced, capacity.groups, capacity.page)
    if check:
        compare(model, forward, traced, stored, page=capacity.page)
    return EngineParts(
        compute=Step(traced, stored, pages, capacity, placement.grid),
        capacity=capacity,
        forward=traced,
        place=place,
        chunk=capacity.most_tokens,
    )


def _slotted(
    forward: OwnCache,
    weights: Tree | int,
    capacity: Capacity,
    grid: tuple[int, int],
    device: jax.Device,
) -> EngineParts:
    if grid != (1, 1):
        raise ArgumentError(
            f"data is {grid[0]}, tensor is {grid[1]}; a model with a cache of its own is served by"
            " one device\nTry: attention by shardlib.attention, whose cache is sharded"
        )
    if capacity.drafts:
        raise ArgumentError(
            f"drafts is {capacity.drafts}; a cache of the model's own takes no token back"
        )
    sizes = slotted(capacity)

    def place(weights: Tree | int) -> tuple[Tree, Tree]:
        return jax.device_put(_weights(forward.model, weights), device)

    compute = SlotStep(forward, place(weights), sizes)
    return EngineParts(
        compute=compute, capacity=sizes, forward=forward, place=place, chunk=compute.chunk
    )


def _require_own(devices: Sequence[jax.Device], weights: Tree | int) -> None:
    """Refuses devices of other processes, and weights on them: every process schedules requests by
    its own clock.
    """
    others = sorted({device.process_index for device in devices} - {jax.process_index()})
    if others:
        raise ArgumentError(
            f"an engine computes on devices of its own process, and devices of"
            f" {processes_text(others)} are among the {len(devices)} that are to serve in"
            f" {processes_text([jax.process_index()])}\nTry: devices=jax.local_devices(), an engine"
            " in each process that is to answer"
        )
    leaves = jax.tree.leaves(weights)
    if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves):
        raise ArgumentError(
            "the weights are on devices of other processes, and an engine computes in one\nTry:"
            " jax.tree.map(whole, weights) with `whole` of shardlib.processes.values, which all"
            " processes call"
        )


def _check_devices(tensor: int, data: int, there: int) -> None:
    failures = [
        f"{name} is {value!r}; it is a whole number from 1 on"
        for name, value in (("tensor", tensor), ("data", data))
        if not is_integer(value) or value < 1
    ]
    if not failures and tensor * data > there:
        failures = [
            f"{data} groups of {tensor} devices are more than the {there} devices that there are"
        ]
    if failures:
        raise_all(ArgumentError, "the model cannot be served so", failures)


def _weights(model: Model, weights: Tree | int) -> tuple[Tree, Tree]:
    """(params, state) of what a user gave."""
    alone = not isinstance(weights, int) and not (isinstance(weights, tuple) and len(weights) == 2)
    if alone and jax.tree.leaves(model.state):
        raise ArgumentError(
            "the model has state, and weights are params alone\nTry: (params, state)"
        )
    _require_own((), weights)
    pair = (weights, model.state) if alone else both(model, weights)
    _require_same(model.params, pair[0])
    return pair


def _require_same(expected: Tree, params: Tree) -> None:
    """Refuses weights of another model."""
    shapes, theirs = (
        {
            path_text(path) or "params": tuple(jnp.shape(leaf))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (expected, params)
    )
    failures = [f"{path} is missing" for path in shapes if path not in theirs]
    failures += [f"{path} is not a parameter of the model" for path in theirs if path not in shapes]
    failures += [
        f"{path} is {list(theirs[path])}; the model has {list(shape)}"
        for path, shape in shapes.items()
        if theirs.get(path, shape) != shape
    ]
    if failures:
        raise_all(ArgumentError, "the weights are not those of the model", bounded(failures))


def shapes(weights: Tree) -> list[object]:
    """Returns the shapes that all weights of one model have."""
    leaves = jax.tree.leaves(weights)
    return [jax.tree.structure(weights), *((leaf.shape, leaf.dtype) for leaf in leaves)]


def draft_model(
    init: Init, forward: Forward, weights: Tree | int, *, beside: StepProgram, sizes: Capacity
) -> DraftModel:
    """Makes a model that guesses, on the first device of the one that is served."""
    if not sizes.drafts:
        raise ArgumentError(
            "the model cannot guess: drafts of the capacity is 0\nTry: Capacity(drafts=4)"
        )
    if isinstance(beside, Step) and beside.grid.groups > 1:
        raise ArgumentError(
            f"the model cannot guess: data is {beside.grid.groups}, and it has pages for the"
            " requests of one group\nTry: data=1, or guesses of what followed the last time"
        )
    devices = jax.tree.leaves(beside.weights)[0].devices()
    draft = built(
        init,
        forward,
        weights=weights,
        capacity=sizes,
        grid=(1, 1),
        devices=sorted(devices, key=lambda device: device.id)[:1],
        check=False,
        windows=sizes.windows,
    )
    assert isinstance(beside, Step) and isinstance(draft.compute, Step), "drafts need pages"
    draft_vocab, vocab = draft.forward.vocab, beside.forward.vocab
    if draft_vocab != vocab:
        raise_all(
            ArgumentError,
            "the model cannot guess",
            [f"it knows {draft_vocab} tokens, and the model that is served {vocab}"],
        )
    return DraftModel(draft.compute)


# --------------------------------------------------------------------------------------------------
# Decoders that look at what an encoder made of a source.
#
# What the encoder makes stands in the model as arrays that the forward pass reads: variables of an
# NNX module, or leaves of params or state. They are computed once, when a request gets a slot, and
# kept once a slot; each token takes those of its request, as it would take the parameters of an
# adapter.

#: The user's encoder: (model, int32 source [1, S], how many of its tokens count) -> arrays by the
#: dotted path of the variable that the forward pass reads.
Encode = Callable[[Tree, jax.Array, jax.Array], Mapping[str, jax.Array]]


class Sources:
    """The encoder's results for the sources of requests.

    Args:
        model: from a front end in `annotation/`.
        encode: the user's encoder.
        longest: tokens of a source at most.
        weights: (params, state) on their devices.
        slots: of requests.

    Raises:
        ModelError: the encoder gives arrays that the model has not, or of other shapes.
    """

    def __init__(
        self,
        model: Model,
        encode: Encode,
        longest: int,
        weights: tuple[Tree, Tree],
        slots: int,
    ) -> None:
        self.longest, self.slots = longest, slots
        self._held: dict[int, Request] = {}

        def made(
            params: Tree, state: Tree, source: jax.Array, count: jax.Array
        ) -> dict[str, jax.Array]:
            return dict(
                encode(model.evaluating(model.rebuild(all_plain(params), state)), source, count)
            )

        leaves = [
            (path_text(path), leaf)
            for part in weights
            for path, leaf in jax.tree_util.tree_leaves_with_path(part, is_leaf=is_held)
        ]
        places = {path: index for index, (path, _) in enumerate(leaves)}
        row = jax.ShapeDtypeStruct((1, longest), jnp.int32)
        shapes = jax.eval_shape(made, *weights, row, jax.ShapeDtypeStruct((), jnp.int32))
        failures = [] if shapes else ["it gives nothing"]
        for path, shape in shapes.items():
            variable = leaves[places[path]][1] if path in places else None
            if variable is None:
                failures.append(f"the model has no variable {path}")
            elif _kind(variable) != _kind(shape):
                failures.append(f"{path} is {_kind(shape)}; that of the model is {_kind(variable)}")
        if failures:
            raise_all(ModelError, "the encoder does not fit the model", failures)
        self._stacks = {
            places[path]: empty_stack(leaves[places[path]][1], slots) for path in shapes
        }

        def written(
            stacks: dict[int, jax.Array],
            weights: tuple[Tree, Tree],
            source: jax.Array,
            slot_and_length: jax.Array,
        ) -> dict[int, jax.Array]:
            new = made(*weights, source, slot_and_length[1])
            return {
                places[path]: stacks[places[path]].at[slot_and_length[0]].set(array)
                for path, array in new.items()
            }

        self._written = jax.jit(
            written,
            donate_argnums=0,
            out_shardings={index: stack.sharding for index, stack in self._stacks.items()},
        )

    def failures(self, request: GenerationRequest) -> list[str]:
        """Lists the reasons why the source of a request cannot be served; empty where it can."""
        if not 0 < len(request.source) <= self.longest:
            return [f"the source has {len(request.source)} tokens; it has from 1 to {self.longest}"]
        if not all(is_integer(token) and 0 <= token < 1 << 31 for token in request.source):
            return ["the source has what is not a token; tokens are whole numbers from 0 on"]
        return []

    def forget(self) -> None:
        """Weights are other ones: nothing that was encoded counts."""
        self._held = {}

    def wrapped(
        self, weights: tuple[Tree, Tree], shares: Sequence[ScheduledChunk] = ()
    ) -> tuple[Tree, Tree]:
        """Weights with what the encoder makes of the sources of a step."""
        for share in shares:
            if self._held.get(share.slot) is share.request:
                continue
            tokens = share.request.asked.source
            source = np.zeros((1, self.longest), np.int32)
            source[0, : len(tokens)] = tokens
            slot_and_length = np.asarray([share.slot, len(tokens)], np.int32)
            self._stacks = self._written(self._stacks, weights, source, slot_and_length)
            self._held[share.slot] = share.request
        return AdaptedParams(params=weights[0], stacks=self._stacks), weights[1]


def _kind(leaf: Leaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
