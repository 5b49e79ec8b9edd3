"""A chunk of layers around one microbatch: what leaves it, and what its backward pass wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Leaf
from shardlib.lowering.pipeline.shared.partition import Arrays
from shardlib.tracing.program import flatten
from shardlib.tracing.rewriting.split import Split, split


@dataclass(frozen=True, kw_only=True)
class Linearised:
    """A chunk with what its backward pass wants.

    Attributes:
        left: what leaves the chunk.
        saved: what the backward pass wants, by number of the value.
        order: these numbers, in the order in which it wants them.
        kept: those of them that depend on the microbatch, each once.
        tree: structure of the backward pass around them.
        entered: how many gradients of what entered the backward pass gives, after all others.
    """

    left: Arrays
    saved: dict[int, Any]
    order: tuple[int, ...]
    kept: tuple[int, ...]
    tree: Any
    entered: int

    @property
    def stashed(self) -> Arrays:
        """What depends on the microbatch."""
        return [self.saved[number] for number in self.kept]

    def pull(self, stashed: Arrays) -> Callable[[Arrays], Tree]:
        """The backward pass, with what was stashed in place of what depends on the microbatch
        here.
        """
        return jax.tree.unflatten(self.tree, self._wants(stashed))

    def early(self, stashed: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        """Of the backward pass in two parts: (gradients of what entered, what the late part has to
        be given).
        """
        return self._halves(cotangents).run_first([*self._wants(stashed), *cotangents])

    def late(self, stashed: Arrays, passed: Arrays) -> Arrays:
        """The other gradients."""
        cotangents = [
            leaf for leaf in self.left if is_floating(leaf)
        ]  # of any value: the late part does not read them
        return self._halves(cotangents).run_second([*self._wants(stashed), *cotangents], passed)

    def _wants(self, stashed: Arrays) -> Arrays:
        """What the backward pass wants."""
        values = {**self.saved, **dict(zip(self.kept, stashed, strict=True))}
        return [values[number] for number in self.order]

    def _halves(self, cotangents: Arrays) -> Split:
        """The backward pass, split in what gives gradients of what entered and what gives the
        others.
        """
        count = len(self.order)
        shapes = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for leaf in [*(self.saved[number] for number in self.order), *cotangents]
        ]
        traced = jax.make_jaxpr(
            lambda *leaves: jax.tree.leaves(
                jax.tree.unflatten(self.tree, leaves[:count])(list(leaves[count:]))
            )
        )(*shapes)
        program = flatten(traced, remat=True)
        others = len(program.outputs) - self.entered
        return split(
            program, program.outputs[others:], program.outputs[:others], program.inputs[:count]
        )


def is_floating(leaf: Leaf) -> bool:
    """Whether gradients flow through an array."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
