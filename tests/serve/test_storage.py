"""Weights and a cache of eight bits: how far logits move."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import models
from shardlib.annotation.tree import read
from shardlib.errors import ArgumentError
from shardlib.serve.cache import (
    all_plain,
    is_stored,
    plain,
    read_pages,
    store,
    stored_page,
    write_rows,
)
from shardlib.serve.engine import Engine
from shardlib.serve.requests import Asked, Capacity, Storage
from tests.serve.test_meshes import FAMILIES, LONGEST, forward, prompts


def engine(family: str, tensor: int, **stored: str) -> Engine:
    """It compares its logits with those of the forward pass with the weights that it holds."""
    return Engine(
        models.build(FAMILIES[family])[0],
        forward,
        weights=3,
        capacity=Capacity(longest=LONGEST, slots=4, page=4, budget=8, storage=Storage(**stored)),
        tensor=tensor,
    )


@pytest.mark.parametrize(
    ("family", "tensor", "how", "moved"),
    [("grouped", 4, "int8", 0.03), ("latent", 2, "int8", 0.03), ("grouped", 1, "fp8", 0.12)],
)
def test_logits_hardly_move_with_weights_of_eight_bits(
    family: str, tensor: int, how: str, moved: float
):
    model = read(models.build(FAMILIES[family])[0])
    served = engine(family, tensor, weights=how)
    held = served.compute.weights
    tokens = np.random.default_rng(0).integers(0, 61, (2, LONGEST))
    exact = np.asarray(forward(model.rebuild(*model.init(3)), tokens))
    found = np.asarray(forward(model.rebuild(*jax.device_get(all_plain(held))), tokens))
    # of matrices the eight bits; with experts a choice of another one moves logits, too
    off = np.abs(found - exact).max(axis=-1) / np.abs(exact).max()
    assert 0 < np.median(off) <= moved, np.median(off)
    stored = [leaf for leaf in jax.tree.leaves(held[0], is_leaf=is_stored) if is_stored(leaf)]
    assert len(stored) >= 7 and all(leaf.values.dtype.itemsize == 1 for leaf in stored)
    assert all(leaf.scale.size < leaf.values.size for leaf in stored)
    (answer,) = served.generate([[5, 3, 9]], 4)
    assert len(answer) == 4


@pytest.mark.parametrize(
    ("family", "how", "tensor", "moved"),
    [("grouped", "fp8", 2, 0.1), ("grouped", "int8", 4, 0.02), ("latent", "int8", 2, 0.02)],
)
def test_logarithms_hardly_move_with_a_cache_of_eight_bits(
    family: str, how: str, tensor: int, moved: float
):
    found: list[np.ndarray] = []
    for cache in ("model", how):
        served = engine(family, tensor, cache=cache)
        request = served.add(Asked(prompt=prompts()[0], most=1, scored=True))
        served.run()
        found.append(np.asarray([one.logprob for one in request.scores]))
        dtypes = {str(page.dtype) for page in jax.tree.leaves(served.compute.pages)}
        kept = {"model": {"float32"}, "fp8": {"float8_e4m3fn"}, "int8": {"int8", "float32"}}
        assert dtypes == kept[cache]
        (answer,) = served.generate([[5, 3, 9, *range(20)]], 4)  # chunks, and tokens after them
        assert len(answer) == 4
    off = np.abs(found[0] - found[1])
    assert 0 < off.max() <= moved, off


def test_rows_of_an_int8_cache_are_those_that_were_written():
    draw = np.random.default_rng(0)
    rows = jnp.asarray(draw.normal(size=(5, 2, 16)) * [[[1.0], [30.0]]], jnp.float32)
    page = stored_page(jax.ShapeDtypeStruct((1, 3, 4, 2, 16), jnp.float32), "int8")
    pages = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), page)
    number, place = jnp.asarray([0, 0, 2, 2, 3]), jnp.asarray([0, 3, 1, 2, 0])  # the last nowhere
    found = read_pages(write_rows(pages, (0, number, place), rows), 0, jnp.arange(3))
    wanted = np.zeros((3, 4, 2, 16))
    wanted[number[:4], place[:4]] = rows[:4]
    largest = np.abs(wanted).max(-1, keepdims=True)
    assert (np.abs(found - wanted) <= largest / 254 + 1e-6).all(), "half a step of each head"


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"weights": "int4"}, "weights are stored as 'int4'; known are model, int8, fp8"),
        ({"cache": "int4"}, "keys and values are stored as 'int4'; known are model, int8, fp8"),
    ],
    ids=["weights", "cache"],
)
def test_other_words_are_refused(stored: dict[str, str], said: str):
    with pytest.raises(ArgumentError, match=said):
        Storage(**stored)


@pytest.mark.parametrize(("how", "dtype"), [("fp8", jnp.float8_e4m3fn), ("int8", jnp.int8)])
def test_qwix_stores_no_better(how: str, dtype: type):
    """fp8 to the bit, and int8 with no smaller error."""
    qwix = pytest.importorskip("qwix", reason="needs the extra `fp8`")
    array = jax.random.normal(jax.random.key(1), (40, 24)) * jnp.exp(jnp.arange(24.0) / 4)
    theirs = qwix.dequantize(qwix.quantize(array, dtype, channelwise_axes=(1,)))
    ours = plain(store(array, 0, how))
    if how == "fp8":
        np.testing.assert_array_equal(ours, theirs)
    assert jnp.linalg.norm(ours - array) <= jnp.linalg.norm(theirs - array)
