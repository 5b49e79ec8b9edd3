"""Decoders that look at what an encoder made of a source.

What the encoder makes stands in the model as arrays that the forward pass reads: variables of an
NNX module, or leaves of params or state. They are computed once, when a request gets a slot, and
kept once a slot; each token takes those of its request, as it would take the parameters of an
adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.annotation.model import Model, Tree
from shardlib.annotation.trees.paths import path_text
from shardlib.errors import ArgumentError, ModelError, raise_all
from shardlib.jax_types import Leaf
from shardlib.lowering.serving.adapted import Adapted
from shardlib.lowering.serving.stored import all_plain, is_held
from shardlib.serving.computing.adapters import empty_stack
from shardlib.serving.scheduling.requests import Asked, Request
from shardlib.serving.scheduling.schedule import Share
from shardlib.serving.scheduling.settings import whole

#: The user's encoder: (model, int32 source [1, S], how many of its tokens count) -> arrays by the
#: dotted path of the variable that the forward pass reads.
Encode = Callable[[Tree, jax.Array, jax.Array], Mapping[str, jax.Array]]


class Sources:
    """What an encoder makes of the sources of requests.

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

    def failures(self, request: Asked) -> list[str]:
        """Why the source of a request cannot be served; empty where it can."""
        if not 0 < len(request.source) <= self.longest:
            return [f"the source has {len(request.source)} tokens; it has from 1 to {self.longest}"]
        if not all(whole(token) and 0 <= token < 1 << 31 for token in request.source):
            return ["the source has what is no token; tokens are whole numbers from 0 on"]
        return []

    def forget(self) -> None:
        """Weights are other ones: nothing that was encoded counts."""
        self._held = {}

    def wrapped(
        self, weights: tuple[Tree, Tree], shares: Sequence[Share] = ()
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
        return Adapted(params=weights[0], stacks=self._stacks), weights[1]


def check_longest(longest: int) -> None:
    """Checks how long a source may be."""
    if not whole(longest) or longest < 1:
        raise ArgumentError(f"longest is {longest!r}; a source has at least one token")


def _kind(leaf: Leaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
