"""A single pass over a batch: classification, embeddings, recommendation, logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardlib import models
from shardlib.annotation.model import Model, Tree
from shardlib.annotation.read import Init, read
from shardlib.errors import ArgumentError, ModelError
from shardlib.models.load import UserModel
from shardlib.serving.served import Served
from shardlib.serving.weights import both

#: Tokens of a row where nobody says how many.
ROW = 128
#: (model, inputs by name) -> outputs by name, or one array; rows in the first dim of all.
Pass = Callable[[Tree, Mapping[str, jax.Array]], Tree]


@dataclass(frozen=True, kw_only=True)
class SinglePass:
    """What is computed of a batch.

    Attributes:
        name: for people and servers.
        model: whose it is.
        weights: (params, state).
        run: the pass.
        inputs: by name; their first dim is that of the rows.
    """

    name: str
    model: Model
    weights: tuple[Tree, Tree]
    run: Pass
    inputs: Mapping[str, jax.ShapeDtypeStruct]


def single_pass(
    init: Init,
    forward: Pass,
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    weights: Tree | int = 0,
    name: str = "model",
) -> SinglePass:
    """A pass of a model of the user's own.

    Args:
        forward: (model, inputs) -> outputs by name, or one array; rows in the first dim of all.
        inputs: arrays, or shapes and dtypes, by name; rows in the first dim.
    """
    flat = {
        key: jax.ShapeDtypeStruct(tuple(shape.shape), shape.dtype) for key, shape in inputs.items()
    }
    if not flat or not all(shape.shape for shape in flat.values()):
        raise ArgumentError("the inputs of a pass are arrays by name, with rows in the first dim")
    model = read(init)
    arrays = both(model, weights)
    return SinglePass(name=name, model=model, weights=arrays, run=forward, inputs=flat)


def user_pass(model: UserModel, word: str, seq: int | None = None) -> SinglePass:
    """The pass that a user's function gives, see `shardlib.models.load`."""
    if seq is not None:
        raise ArgumentError(
            f"{word} brings its own batch; --seq cannot change it\nTry: leave out --seq"
        )
    if model.outputs is None or not isinstance(model.batch, Mapping):
        raise ModelError(
            f"{word} gives no 'outputs', (model, batch) -> arrays by name, over a batch that is a"
            " mapping of arrays\nTry: add it to what the function returns"
        )
    return single_pass(
        model.init,
        model.outputs,
        model.batch,
        weights=0 if model.weights is None else model.weights,
        name=model.name.rpartition(":")[2] or "model",
    )


def logits_pass(served: Served, seq: int) -> SinglePass:
    """The logits of a language model, of rows of so many tokens."""
    tokens = {"tokens": jax.ShapeDtypeStruct((1, seq), jnp.int32)}
    return single_pass(
        served.init,
        lambda model, inputs: {"logits": served.forward(model, inputs["tokens"])},
        tokens,
        weights=served.weights,
        name=served.name,
    )


def embedding_pass(served: Served, seq: int) -> SinglePass:
    """The mean of the last states of a language model, over the tokens that a row has."""
    hidden = served.hidden
    if hidden is None:
        raise ModelError(f"{served.name} does not give the states before its logits")

    def run(model: Tree, inputs: Mapping[str, jax.Array]) -> Tree:
        states = hidden(model, inputs["tokens"]).astype(jnp.float32)
        count = inputs["length"]  # [rows, 1]
        there = (jnp.arange(seq)[None, :] < count)[..., None]
        total = jnp.where(there, states, 0.0).sum(axis=1)
        return {"embedding": total / jnp.maximum(count, 1)}

    inputs = {
        "tokens": jax.ShapeDtypeStruct((1, seq), jnp.int32),
        "length": jax.ShapeDtypeStruct((1, 1), jnp.int32),
    }
    return single_pass(served.init, run, inputs, weights=served.weights, name=served.name)


def row_length(served: Served, seq: int | None) -> int:
    """Tokens of a row of a language model.

    Args:
        seq: as asked for; None for `ROW`, or as many as the model takes.
    """
    if seq is None:
        return min(ROW, served.longest)
    if seq > served.longest:
        raise ArgumentError(
            f"a row of {seq} tokens is asked for; {served.name} looks at {served.longest} at most"
            f"\nTry: --seq {served.longest}, or fewer"
        )
    return seq


def named_pass(word: str, seq: int | None = None) -> SinglePass:
    """The pass of what a word names: that of the user's own function, or the logits of a language
    model.
    """
    if ":" in word:
        loaded = models.load(word)
        if isinstance(loaded, UserModel):
            return user_pass(loaded, word, seq)
    from shardlib.serving.words import named

    served = named(word)
    return logits_pass(served, row_length(served, seq))
