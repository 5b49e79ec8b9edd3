"""Are logits with a cache those of the forward pass itself?

What a forward pass finds out about positions in a way that `lowering/serving/positions.py` does not
know would give wrong answers, and no error. So some random tokens go both ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.annotation.model import Model, Tree
from shardlib.errors import ModelError
from shardlib.lowering.serving.cache_groups import CacheGroup, Token
from shardlib.lowering.serving.calls import bodies
from shardlib.lowering.serving.program import Forward, TracedForward
from shardlib.lowering.serving.stored import all_plain
from shardlib.tracing.program import Program

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
    placement = Token(
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
            "the forward pass gives logits that are no numbers\nTry: look at the weights; they may"
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
