"""A smaller model is made to guess for another one."""

from __future__ import annotations

import jax

from shardlib.annotation.model import Tree
from shardlib.annotation.read import Init
from shardlib.errors import ArgumentError, raise_all
from shardlib.lowering.serving.program import Forward
from shardlib.serving.computing.built import Computes, built
from shardlib.serving.computing.drafts import DraftModel
from shardlib.serving.scheduling.capacity import Capacity
from shardlib.serving.step import Step


def draft_model(
    init: Init, forward: Forward, weights: Tree | int, *, beside: Computes, sizes: Capacity
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
