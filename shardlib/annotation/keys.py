"""Random keys in place of seeds: `program.init(jax.random.key(3))` is `program.init(3)`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.errors import ArgumentError
from shardlib.jax_types import Index
from shardlib.untrusted.arguments import SEEDS, read_seed

#: What `program.init` takes: an integer, a typed key, or the raw data of a key.
Seed = int | np.integer[Any] | jax.Array | np.ndarray

_TRY = f"Try: an integer from 0 to {SEEDS - 1}, or jax.random.key(0)"


def read_seed_or_key(seed: Seed) -> np.ndarray | np.int32:
    """A seed as an int32 scalar, or a key as its uint32 data, which every process can hand to a
    program over several processes.
    """
    if not isinstance(seed, jax.Array | np.ndarray) or _is_integer(seed):
        return np.int32(read_seed(seed))  # pyright: ignore[reportArgumentType]
    default = jax.random.key(0)
    if jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if seed.dtype != default.dtype:
            raise ArgumentError(
                f"seed is a {seed.dtype}, and JAX's default is {default.dtype}\nTry:"
                f" jax.config.update('jax_default_prng_impl', {str(jax.random.key_impl(seed))!r})"
                " before the program is compiled"
            )
        if seed.ndim:
            raise ArgumentError(f"seed is {seed.size} keys of shape {seed.shape}\nTry: one key")
        return np.asarray(jax.random.key_data(seed))
    raw = jax.random.key_data(default).shape
    if seed.dtype != jnp.uint32 or seed.shape != raw:
        raise ArgumentError(
            f"seed is an array {seed.dtype}{list(seed.shape)}, and neither an integer nor a key"
            f" (uint32{list(raw)})\n{_TRY}"
        )
    return np.asarray(seed)


def key_of(seed: Index) -> jax.Array:
    """The key of what `read_seed_or_key` gives."""
    return jax.random.wrap_key_data(jnp.asarray(seed)) if jnp.ndim(seed) else jax.random.key(seed)


def _is_integer(array: jax.Array | np.ndarray) -> bool:
    return array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.integer)
