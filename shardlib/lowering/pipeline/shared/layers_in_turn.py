"""The layers of a chunk, one after the other, and what each saves for its backward pass.

Some of the layers of a chunk may follow a remat policy, the first ones, and the others keep all
that their gradients read:

    chunk of 4 layers, Saved(policy="full", count=2)    layers 0 and 1 keep their inputs alone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardlib.annotation.trees.paths import Tree
from shardlib.lowering.pipeline.shared.partition import Arrays
from shardlib.tracing.rewriting.partly import Part, in_parts, keeping
from shardlib.tracing.rewriting.remat_policies import LAYER_INPUT, rematerialised

#: What layers hand on, and what they read layer by layer: trees of arrays.
Carry = Tree
#: (carry, slices) -> (carry, results) of one layer.
Body = Callable[[Carry, Tree], tuple[Carry, Arrays]]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What the layers of a chunk save.

    Attributes:
        policy: remat policy.
        count: how many layers follow it, the first ones; None where all do.
        offloaded: whether what is saved waits in host memory.
    """

    policy: str
    count: int | None = None
    offloaded: bool = False

    def followed(self, layers: int) -> int:
        """How many of so many layers follow the policy."""
        if self.policy == "none":
            return 0
        return layers if self.count is None else min(layers, self.count)

    def ways(self, *, prevent_cse: bool) -> tuple[Callable[[Body], Body], Callable[[Body], Body]]:
        """What becomes of a layer that follows the policy, and of one that does not."""
        following, saving_all = (
            partial(rematerialised, remat=policy, prevent_cse=prevent_cse, offloaded=self.offloaded)
            for policy in (self.policy, "none")
        )
        return following, saving_all


def _named(body: Body) -> Body:
    """A layer that names what it starts from, so that this waits in host memory, too."""

    def named(carry: Carry, sliced: Tree) -> tuple[Carry, Arrays]:
        return body(tuple(checkpoint_name(leaf, LAYER_INPUT) for leaf in carry), sliced)

    return named


def as_loop(
    body: Body, saved: Saved, layers: int, carry: Carry, scanned: Tree
) -> tuple[Carry, Arrays]:
    """Runs the layers as a loop, or as two where only the first of them follow the policy.

    Args:
        scanned: tree of arrays [layers, ...].

    Returns:
        What leaves the last, and results [layers, ...].
    """
    body = _named(body) if saved.offloaded else body
    following, saving_all = saved.ways(prevent_cse=False)
    count = saved.followed(layers)
    if count in (0, layers):
        return jax.lax.scan(
            (following if count else saving_all)(body), carry, scanned, length=layers
        )
    parts = [
        Part(first=0, count=count, kept=following),
        Part(first=count, count=layers - count, kept=saving_all if saved.offloaded else keeping),
    ]
    return in_parts(
        parts,
        body,
        carry,
        scanned,
        lambda layer, carry, slices, length: jax.lax.scan(layer, carry, slices, length=length),
    )


def written_out(
    body: Body, saved: Saved, layers: int, carry: Carry, scanned: Sequence[Tree]
) -> tuple[Carry, Arrays]:
    """What `as_loop` gives, with the layers written out; `scanned` may be given layer by layer."""
    body = _named(body) if saved.offloaded else body
    following, saving_all = (wrap(body) for wrap in saved.ways(prevent_cse=True))
    count, exits = saved.followed(layers), list[Arrays]()
    for layer in range(layers):
        carry, results = (following if layer < count else saving_all)(
            carry,
            tuple(
                leaves[layer] if hasattr(leaves, "dtype") else [leaf[layer] for leaf in leaves]
                for leaves in scanned
            ),
        )
        exits.append(results)
    return carry, [jnp.stack(rows) for rows in zip(*exits, strict=True)]
