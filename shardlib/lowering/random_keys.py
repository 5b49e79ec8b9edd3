"""Random keys in a batch, divided among microbatches.

A key is an array of typed keys (`jax.random.key`), or integers that the loss uses as one
(`jax.random.PRNGKey`). One with a batch dim belongs to its rows, and is split like them. One
without belongs to the whole batch: where that is worked through in several microbatches, number i
of them is given `jax.random.fold_in(key, i)`, as no two may draw the same numbers. A batch in one
piece is given the key itself, so that it draws what the model draws in plain JAX, on any mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.sharding import NamedSharding, PartitionSpec

from shardlib._jax_compat import open_jaxpr
from shardlib.annotation.trees import Tree
from shardlib.errors import BatchError, raise_all
from shardlib.jax_types import Jaxpr
from shardlib.lowering.mesh import batch_path
from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program, callee, flatten, subjaxprs

#: Operations that hand integers on as they are.
_MOVED: frozenset[str] = frozenset(
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


#: Operations that make random numbers of keys.
_DRAWS: frozenset[str] = frozenset(
    {"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"}
)


def draws(jaxpr: Jaxpr) -> bool:
    """Returns whether a program, or anything it calls, draws random numbers."""
    return any(
        eqn.primitive.name in _DRAWS or any(map(draws, subjaxprs(eqn)))
        for eqn in open_jaxpr(jaxpr)[0].eqns
    )


def is_key(leaf: Tree) -> bool:
    """Returns whether an array, concrete or abstract, holds typed random keys."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def dtype_of(leaf: Tree) -> np.dtype:
    """The dtype that JAX gives an array; that of typed keys is one already."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return dtype if is_key(leaf) else jax.dtypes.canonicalize_dtype(dtype)


def placed_keys(keys: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Typed keys as they are to be sharded; several processes each take what their devices hold."""
    if jax.process_count() == 1:
        return jax.device_put(keys, sharding)
    words, impl = np.asarray(jax.random.key_data(keys)), jax.random.key_impl(keys)
    spec = (*sharding.spec, *(None,) * (words.ndim - len(sharding.spec)))
    raw = jax.make_array_from_callback(
        words.shape,
        NamedSharding(sharding.mesh, PartitionSpec(*spec)),
        lambda index: words[index],
        dtype=words.dtype,
    )
    return jax.jit(lambda data: jax.random.wrap_key_data(data, impl=impl), out_shardings=sharding)(
        raw
    )


@dataclass(frozen=True, kw_only=True)
class Fold:
    """In the place of a batch dim: an array is a key of the whole batch, and microbatches are given
    one each.

    Attributes:
        dtype: of the keys that integers stand for; None for typed keys.
        apart: whether the parts are given a key each; the same for all where they draw what the
            whole batch draws for their rows.
    """

    dtype: Any = None
    apart: bool = True

    def stacked(self, leaf: jax.Array, parts: int) -> jax.Array:
        """The keys of all microbatches, [parts, ...]; that of a batch in one piece is the key
        itself.
        """
        if parts == 1 or not self.apart:
            return jnp.broadcast_to(leaf[None], (parts, *leaf.shape))
        keys = (
            leaf
            if self.dtype is None
            else jax.random.wrap_key_data(leaf, impl=implementation(self.dtype))
        )
        fold = jax.random.fold_in
        for _ in range(keys.ndim):
            fold = jax.vmap(fold, in_axes=(0, None))
        folded = jax.vmap(fold, in_axes=(None, 0))(keys, jnp.arange(parts, dtype=jnp.uint32))
        return folded if self.dtype is None else jax.random.key_data(folded)


#: Dim of the rows of each array of a batch, by path: None where it has none, a `Fold` for a key of
#: the whole batch.
BatchDims = Mapping[str, int | Fold | None]


def with_keys(dims: Mapping[str, int | None], batch: Tree, program: Program) -> BatchDims:
    """The batch dim of every array of a batch, by path, with `Fold` in the place of None for the
    keys of the whole batch.
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
        path: Fold()
        for number, path in paths_by_number.items()
        if jax.dtypes.issubdtype(program.avals[number].dtype, jax.dtypes.prng_key)
    }
    raw: dict[str, Any] = {}
    first = len(program.inputs) - len(paths)
    _wrapped(
        program,
        {
            number: path
            for number, path in zip(program.inputs[first:], paths, strict=True)
            if path not in typed
        },
        raw,
    )
    cut = [
        path
        for number, path in zip(program.inputs[first:], paths, strict=True)
        if path in raw and dims[path] == len(program.avals[number].shape) - 1
    ]
    if cut:
        raise_all(
            BatchError,
            "the integers of a random key are not rows of the batch",
            cut,
            hint="batch_axes with (None,) for them, or typed keys, jax.random.key",
        )
    raw = {path: dtype for path, dtype in raw.items() if dims[path] is None}
    return {
        **{path: dims[path] for path in paths},
        **typed,
        **{path: Fold(dtype=dtype) for path, dtype in raw.items()},
    }


def of_the_whole(dims: BatchDims) -> BatchDims:
    """The same where all parts are given the keys of the whole batch."""
    return {
        path: replace(dim, apart=False) if isinstance(dim, Fold) else dim
        for path, dim in dims.items()
    }


def key_inputs(dims: BatchDims, jaxpr: jex.ClosedJaxpr) -> frozenset[int]:
    """Positions of the arrays of the batch without rows, keys and seeds for example, among the
    inputs of a loss.
    """
    first = len(jaxpr.in_avals) - len(dims)
    return frozenset(
        first + index for index, dim in enumerate(dims.values()) if not isinstance(dim, int)
    )


def _wrapped(program: Program, paths: dict[int, str], dtypes: dict[str, Any]) -> None:
    """Adds the arrays among `paths` values that become keys, with the dtype of these."""
    paths = dict(paths)
    for equation in program.equations:
        inside = {
            position: paths[number]
            for position, number in enumerate(equation.inputs)
            if number in paths
        }
        if not inside:
            continue
        if equation.name == "random_wrap":
            dtypes[inside[0]] = program.avals[equation.outputs[0]].dtype
        elif equation.name in _MOVED and 0 in inside:
            paths.update(dict.fromkeys(equation.outputs, inside[0]))
        else:
            for body, offset in _bodies(equation):
                _wrapped(
                    body,
                    {
                        body.inputs[position - offset]: path
                        for position, path in inside.items()
                        if 0 <= position - offset < len(body.inputs)
                    },
                    dtypes,
                )


def _bodies(equation: Equation) -> list[tuple[Program, int]]:
    """Inner programs of an equation, and the position of the operand that is the first input of
    each.
    """
    if equation.name == "cond":
        return [(flatten(branch), 1) for branch in equation.params["branches"]]
    if equation.name == "while":
        return [(flatten(equation.params["body_jaxpr"]), equation.params["cond_nconsts"])]
    if equation.name == "scan":
        return [(flatten(equation.params["jaxpr"]), 0)]
    return [(flatten(callee(equation.eqn)), 0)] if equation.name in (*REMAT, *CUSTOM) else []


def implementation(dtype: Any) -> Any:
    """The generator of keys of a dtype.

    Args:
        dtype: of typed keys.
    """
    implementations: list[Any] = []

    def look(keys: Any) -> Any:
        implementations.append(jax.random.key_impl(keys))
        return keys

    jax.eval_shape(look, jax.ShapeDtypeStruct((), dtype))
    return implementations[0]
