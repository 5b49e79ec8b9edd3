"""Random keys in a batch, divided among microbatches.

A key is an array of typed keys (`jax.random.key`), or of integers that the loss uses as one
(`jax.random.PRNGKey`). A key with a batch dim belongs to its rows, and is split with them. One
without belongs to the whole batch: with several microbatches, number i gets
`jax.random.fold_in(key, i)`, since no two may draw the same numbers. A batch without microbatches
gets the key itself, so that it draws the numbers of the model in plain JAX, on any mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from shardlib._jax_compat import open_jaxpr
from shardlib.annotation.trees import Tree
from shardlib.errors import BatchError, raise_all
from shardlib.jax_types import Jaxpr
from shardlib.lowering.mesh import batch_path
from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program, callee, flatten, subjaxprs

#: Operations that move integers without changing them.
_MOVEMENT: frozenset[str] = frozenset(
    {
        "reshape",
        "squeeze",
        "slice",
        "dynamic_slice",
        "gather",
        "broadcast_in_dim",
        "expand_dims",
        "transpose",
        "copy",
        "sharding_constraint",
        "optimization_barrier",
    }
)


#: Operations that draw random numbers from keys.
_DRAWS: frozenset[str] = frozenset(
    {"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"}
)


def draws_numbers(jaxpr: Jaxpr) -> bool:
    """True if a program, or anything it calls, draws random numbers."""
    return any(
        eqn.primitive.name in _DRAWS or any(map(draws_numbers, subjaxprs(eqn)))
        for eqn in open_jaxpr(jaxpr)[0].eqns
    )


def is_key(leaf: Tree) -> bool:
    """True if an array, concrete or abstract, contains typed random keys."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def dtype_of(leaf: Tree) -> np.dtype:
    """The dtype that JAX gives an array; that of typed keys is unchanged."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return dtype if is_key(leaf) else jax.dtypes.canonicalize_dtype(dtype)


@dataclass(frozen=True, kw_only=True)
class KeyFold:
    """In place of a batch dim: the array is a key of the whole batch, of which each microbatch gets
    its own.

    Attributes:
        dtype: dtype of the keys that the integers represent; None for typed keys.
        distinct: whether microbatches get different keys; otherwise all get the same, because they
            draw the whole batch's numbers for their rows.
    """

    dtype: Any = None
    distinct: bool = True

    def microbatch_keys(self, leaf: jax.Array, count: int) -> jax.Array:
        """The keys of all microbatches, [count, ...]; the key itself for a single microbatch."""
        if count == 1 or not self.distinct:
            return jnp.broadcast_to(leaf[None], (count, *leaf.shape))
        keys = (
            leaf
            if self.dtype is None
            else jax.random.wrap_key_data(leaf, impl=key_impl(self.dtype))
        )
        fold = jax.random.fold_in
        for _ in range(keys.ndim):
            fold = jax.vmap(fold, in_axes=(0, None))
        folded = jax.vmap(fold, in_axes=(None, 0))(keys, jnp.arange(count, dtype=jnp.uint32))
        return folded if self.dtype is None else jax.random.key_data(folded)


#: Dim of the rows of each array of a batch, by path: None if it has none, a `KeyFold` for a key of
#: the whole batch.
BatchDims = Mapping[str, int | KeyFold | None]


def with_folds(dims: Mapping[str, int | None], batch: Tree, program: Program) -> BatchDims:
    """The batch dim of every array of a batch, by path, with a `KeyFold` for keys of the whole
    batch.
    """
    paths = [batch_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
    paths_by_number = {
        number: path
        for number, path in zip(
            program.inputs[len(program.inputs) - len(paths) :], paths, strict=True
        )
        if dims[path] is None
    }
    typed = {
        path: KeyFold()
        for number, path in paths_by_number.items()
        if jax.dtypes.issubdtype(program.avals[number].dtype, jax.dtypes.prng_key)
    }
    raw: dict[str, Any] = {}
    first = len(program.inputs) - len(paths)
    _find_raw_keys(
        program,
        {
            number: path
            for number, path in zip(program.inputs[first:], paths, strict=True)
            if path not in typed
        },
        raw,
    )
    split_keys = [
        path
        for number, path in zip(program.inputs[first:], paths, strict=True)
        if path in raw and dims[path] == len(program.avals[number].shape) - 1
    ]
    if split_keys:
        raise_all(
            BatchError,
            "the integers of a random key are not rows of the batch",
            split_keys,
            hint="batch_axes with (None,) for them, or typed keys, jax.random.key",
        )
    raw = {path: dtype for path, dtype in raw.items() if dims[path] is None}
    return {
        **{path: dims[path] for path in paths},
        **typed,
        **{path: KeyFold(dtype=dtype) for path, dtype in raw.items()},
    }


def with_same_keys(dims: BatchDims) -> BatchDims:
    """Batch dims with the keys of the whole batch passed to all microbatches."""
    return {
        path: replace(dim, distinct=False) if isinstance(dim, KeyFold) else dim
        for path, dim in dims.items()
    }


def key_inputs(dims: BatchDims, jaxpr: jex.ClosedJaxpr) -> frozenset[int]:
    """Positions, among the inputs of a loss, of arrays of the batch without rows, such as keys and
    seeds.
    """
    first = len(jaxpr.in_avals) - len(dims)
    return frozenset(
        first + index for index, dim in enumerate(dims.values()) if not isinstance(dim, int)
    )


def _find_raw_keys(program: Program, paths: dict[int, str], dtypes: dict[str, Any]) -> None:
    """Adds to `dtypes` the arrays among `paths` that become keys, with the dtype of these."""
    paths = dict(paths)
    for equation in program.equations:
        arrays = {
            position: paths[number]
            for position, number in enumerate(equation.inputs)
            if number in paths
        }
        if not arrays:
            continue
        if equation.name == "random_wrap":
            dtypes[arrays[0]] = program.avals[equation.outputs[0]].dtype
        elif equation.name in _MOVEMENT and 0 in arrays:
            paths.update(dict.fromkeys(equation.outputs, arrays[0]))
        else:
            for body, offset in _bodies(equation):
                _find_raw_keys(
                    body,
                    {
                        body.inputs[position - offset]: path
                        for position, path in arrays.items()
                        if 0 <= position - offset < len(body.inputs)
                    },
                    dtypes,
                )


def _bodies(equation: Equation) -> list[tuple[Program, int]]:
    """Inner programs of an equation, each with the index of the operand that is its first input."""
    if equation.name == "cond":
        return [(flatten(branch), 1) for branch in equation.params["branches"]]
    if equation.name == "while":
        return [(flatten(equation.params["body_jaxpr"]), equation.params["cond_nconsts"])]
    if equation.name == "scan":
        return [(flatten(equation.params["jaxpr"]), 0)]
    return [(flatten(callee(equation.eqn)), 0)] if equation.name in (*REMAT, *CUSTOM) else []


def key_impl(dtype: Any) -> Any:
    """The generator of typed keys of a dtype."""
    implementations: list[Any] = []

    def record(keys: Any) -> Any:
        implementations.append(jax.random.key_impl(keys))
        return keys

    jax.eval_shape(record, jax.ShapeDtypeStruct((), dtype))
    return implementations[0]
