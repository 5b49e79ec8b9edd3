"""Models with a cache of their own: Flax's `decode=True`, recurrent states.

    def forward(model, tokens):                # NNX: int32 [1, 1] -> logits [1, 1, vocab]
        return model(tokens, decode=True)

    def forward(variables, tokens):            # Linen: (logits, updated collections)
        return module.apply(variables, tokens, mutable=["cache"])

Such a cache has one index, and so one request. `jax.vmap` over slots gives each its own: what the
forward pass changes of the model's state is kept once a slot, and set back when a request begins.
Tokens of a prompt go in one after another, those of several slots together. There are no pages, so
that no prefix is shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.annotation.model import Model, Tree
from shardlib.annotation.trees.paths import path_text
from shardlib.errors import ModelError
from shardlib.serving.sampling.choices import Choices, Row, choices
from shardlib.serving.sampling.choose import Chosen, choose
from shardlib.serving.sampling.told import UserForward, rows_of, told
from shardlib.serving.scheduling.capacity import Capacity
from shardlib.serving.scheduling.requests import Told
from shardlib.serving.scheduling.schedule import Share

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
    """How a forward pass with a cache of its own is served; None where it has none."""
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
        for columns in sorted({1, self.chunk}):
            self._run(self._empty(columns), [], {})

    def __call__(
        self, shares: Sequence[Share], allowed: Mapping[int, Sequence[np.ndarray]] | None = None
    ) -> list[list[Told]]:
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
    ) -> list[Told]:
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
            return [_where(on, new, old) for new, old in zip(after, caches, strict=True)], logits

        caches = jax.lax.cond(
            jnp.any(fresh),
            lambda: [
                _where(fresh, jnp.broadcast_to(first[None], old.shape), old)
                for first, old in zip(blank, caches, strict=True)
            ],
            lambda: caches,
        )
        caches, logits = jax.lax.scan(column, caches, (tokens, live))
        return choose(logits.reshape(-1, logits.shape[-1])[rows], row_choices), caches


def _where(slots: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
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
