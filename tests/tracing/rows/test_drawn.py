"""What is proven of losses that are drawn: no coupled one is taken for one that can be worked
through in parts, and no other one is refused.
"""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.tracing.rows import LossInputs, Proof, ResultNames, prove
from tests.zoo import losses


def proof_of(loss: object, arrays: dict[str, np.ndarray] | None = None) -> Proof:
    batch = losses.batch(0) if arrays is None else arrays
    shapes = jax.eval_shape(losses.params, jax.random.key(0))

    def at(rows: int) -> object:
        return jax.make_jaxpr(loss)(
            shapes,
            {
                name: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)
                for name, leaf in batch.items()
            },
        )

    return prove(
        at(losses.ROWS),
        at,
        LossInputs(parameters=len(shapes), states=0, dims=(0,) * len(batch)),
        ResultNames(metrics=(), states=()),
        losses.ROWS,
    )


@pytest.mark.parametrize("seed", range(40))
def test_drawn_losses_are_told_apart(seed: int):
    drawn = losses.draw(random.Random(seed))
    found = proof_of(drawn.loss).rows
    assert (found.loss.kind == "coupled") == drawn.coupled, (drawn.name, found.loss)


@pytest.mark.parametrize("reduction", list(losses.REDUCTIONS))
def test_every_reduction(reduction: str):
    found = proof_of(
        lambda p, b: losses.REDUCTIONS[reduction](
            losses.PER_TOKEN["cross-entropy"](losses.hidden(p, b["x"]), p, b), b
        )
    ).rows.loss.kind
    means, sums = ("mean", "sum over rows", "masked mean of rows", "scan over rows"), ("sum",)
    assert found == (
        "mean"
        if reduction in means
        else (
            "sum"
            if reduction in sums
            else "additive"
            if reduction == "over the root of rows"
            else "weighted mean"
        )
    )


def _of_matrices(x):
    square = jnp.einsum("bsd,bse->bde", x, x) + jnp.eye(losses.WIDTH)
    return jnp.linalg.cholesky(square).sum((1, 2))


@pytest.mark.parametrize(
    ("each", "coupled"),
    [
        (lambda x: jnp.stack(jnp.unstack(x, axis=2)[:3], axis=0).sum((0, 2)), False),
        (lambda x: sum(jnp.unstack(x, axis=0)), True),
        (_of_matrices, False),
        (lambda x: jnp.abs(jnp.fft.rfft(x)).sum((1, 2)), False),
        (lambda x: jnp.abs(jnp.fft.rfft(x, axis=0)).sum((1, 2)), True),
    ],
    ids=[
        "unstacked features",
        "unstacked rows",
        "matrices of a row",
        "transforms of a row",
        "transforms over rows",
    ],
)
def test_operations_on_slices_and_matrices(each, coupled: bool):
    found = proof_of(lambda p, b: (each(losses.hidden(p, b["x"])) ** 2).mean()).rows.loss
    assert (found.kind == "coupled") == coupled, found
