"""Small training states by hand, with every kind of array, laid out on a mesh as asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.lowering.runtime import TrainState

P = PartitionSpec
#: Layouts of "embedding" and "kernel" on a mesh of two axes.
ROWS: Mapping[str, PartitionSpec] = {"embedding": P("a"), "kernel": P(None, "a")}
BOTH: Mapping[str, PartitionSpec] = {"embedding": P("a", "b"), "kernel": P("b", "a")}
WHOLE: Mapping[str, PartitionSpec] = {}


def mesh(a: int, b: int) -> Mesh:
    return jax.make_mesh((a, b), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2)


def state(step: int = 1, optimizer: optax.GradientTransformation | None = None) -> TrainState:
    """A state on one device with numbers that depend on the step."""
    numbers = np.random.default_rng(step)
    params = {
        "embedding": jnp.asarray(numbers.normal(size=(64, 32)), jnp.float32),
        "kernel": jnp.asarray(numbers.normal(size=(32, 64)), jnp.bfloat16),
        "scale": jnp.asarray(numbers.normal(size=(8,)), jnp.float16),
    }
    opt_state = (optimizer or optax.adam(1e-3)).init(params)
    opt_state = jax.tree.map(
        lambda leaf: leaf + jnp.asarray(numbers.normal(size=leaf.shape) * 10, leaf.dtype), opt_state
    )
    model_state = {
        "dropout": {"count": jnp.uint32(step), "key": jax.random.key(step)},
        "streams": jax.random.split(jax.random.key(step, impl="rbg"), 3),
        "seen": jnp.asarray(numbers.integers(0, 2, 5), bool),
        "bytes": jnp.asarray(numbers.integers(-9, 9, 6), jnp.int8),
    }
    return TrainState(
        step=jnp.int32(step), params=params, model_state=model_state, opt_state=opt_state
    )


def abstract(tree: Any, on: Mesh, layout: Mapping[str, PartitionSpec]) -> Any:
    """The tree without numbers, with shardings: arrays of two dims by the last name of their
    path.
    """

    def leaf(path: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
        spec = layout.get(str(getattr(path[-1], "key", "")), P()) if x.ndim == 2 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, spec))

    return jax.tree_util.tree_map_with_path(leaf, tree)


def placed(tree: Any, on: Mesh, layout: Mapping[str, PartitionSpec]) -> Any:
    return jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), tree, abstract(tree, on, layout)
    )


def numbers(tree: Any) -> Any:
    """The arrays as NumPy, random keys as their integers."""
    return jax.tree.map(
        lambda x: np.asarray(
            jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        ),
        tree,
    )


def assert_same(found: Any, expected: Any) -> None:
    """Bit for bit, dtypes and kinds of keys included."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [
        leaf.dtype for leaf in jax.tree.leaves(expected)
    ]
    for one, other in zip(
        jax.tree.leaves(numbers(found)), jax.tree.leaves(numbers(expected)), strict=True
    ):
        assert one.tobytes() == other.tobytes()


def data_files(folder: Path) -> list[Path]:
    """The files of a checkpoint with array data; some are drafts that Orbax does not read any
    more.
    """
    return [path for path in (folder / "state").rglob("d/*") if path.is_file()]
