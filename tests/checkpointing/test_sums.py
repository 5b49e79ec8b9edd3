from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.checkpointing.tree import Camera
from shardlib.lowering.runtime import checksums, checksums_by_path
from tests.checkpointing.states import mesh


def by_hand(array: np.ndarray) -> list[int]:
    """The same sums with Python's integers, one element after another."""
    words = array.reshape(-1).view(f"u{min(array.dtype.itemsize, 4)}")
    totals = [0, 0]
    for index, word in enumerate(int(word) for word in words):
        mixed = (index ^ (index >> 16)) * 0x85EBCA6B % 2**32
        mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35 % 2**32
        totals[0] += word * (2 * index + 1)
        totals[1] += word * ((mixed ^ (mixed >> 16)) | 1)
    return [total % 2**32 for total in totals]


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "uint32", "complex64"]
)
def test_equal_to_sums_by_hand(dtype: str):
    array = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(jnp.dtype(dtype)) * 3
    np.testing.assert_array_equal(
        np.asarray(checksums({"x": jnp.asarray(array)}))[0], by_hand(array)
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 16 * 24 - 1), st.integers(0, 31))
def test_every_single_bit_counts(element: int, bit: int):
    array = np.random.default_rng(1).normal(size=(16, 24)).astype(np.float32)
    changed = array.copy()
    changed.view(np.uint32).reshape(-1)[element] ^= np.uint32(1 << bit)
    found = np.asarray(jax.jit(checksums)({"changed": changed, "old": array}))
    assert (found[0] != found[1]).all()


def test_the_layout_changes_nothing_and_no_array_travels():
    array = np.random.default_rng(2).normal(size=(16, 8)).astype(np.float32)
    on, seen = mesh(4, 2), set()
    for spec in (
        PartitionSpec(),
        PartitionSpec("a"),
        PartitionSpec("b", "a"),
        PartitionSpec(None, ("a", "b")),
    ):
        cut = {"x": jax.device_put(array, NamedSharding(on, spec))}
        program = Camera().sums(cut)
        seen.add(checksums_by_path(cut, np.asarray(program(cut)))["x"])
        assert not any(
            word in program.as_text() for word in ("all-gather", "all-to-all", "collective-permute")
        )
    assert len(seen) == 1
