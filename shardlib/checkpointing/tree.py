"""A training state as named arrays, and what two of them do not have in common.

Checkpoints know no classes: every array has its dotted path, "params.layers.mlp.up" or
"opt_state.0.mu.embedding". Typed random keys are stored as the integers that they are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.errors import CheckpointError, raise_all
from shardlib.report import Finding


class OtherOptimizerError(CheckpointError):
    """A checkpoint of this model, with the state of another optimizer."""


#: Differences that a message lists before it counts the rest.
SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a checkpoint says of an array.

    Attributes:
        shape: elements per dim; of random keys, of their integers.
        dtype: name of the dtype as stored.
        key: name of the generator where the array holds random keys, else "".
    """

    shape: tuple[int, ...]
    dtype: str
    key: str = ""

    def __str__(self) -> str:
        return f"{f'key {self.key} ' if self.key else ''}{self.dtype}{list(self.shape)}"


def named_leaves(tree: Tree) -> dict[str, Tree]:
    """The leaves of a tree by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {path_text(path): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        paths = [path_text(path) for path, _ in leaves]
        raise CheckpointError(
            "arrays of the state share a path:"
            f" {shortened(sorted({path for path in paths if paths.count(path) > 1}))}\nTry: names"
            " without dots"
        )
    return named


def is_key(leaf: Tree) -> bool:
    """Whether an array, concrete or abstract, holds typed random keys."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_name(leaf: Tree) -> str:
    """Name of the generator of an array of keys, "" for other arrays."""
    return str(jax.random.key_impl(leaf)) if is_key(leaf) else ""


def spec_of(leaf: Tree) -> Spec:
    """What a checkpoint says of an array, concrete or abstract."""
    raw = raw_abstract(leaf)
    return Spec(shape=tuple(raw.shape), dtype=str(raw.dtype), key=_generator(leaf))


def _generator(leaf: Tree) -> str:
    """Abstract arrays of keys name their generator in their dtype alone, "key<fry>"; a key of that
    dtype says the whole name.
    """
    if not is_key(leaf):
        return ""
    if isinstance(leaf, jax.Array):
        return key_name(leaf)
    found: list[str] = []

    def look(keys: Any) -> Tree:
        found.append(key_name(keys))
        return keys

    jax.eval_shape(look, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return found[0]


def raw_abstract(leaf: Tree) -> jax.ShapeDtypeStruct:
    """An array as a checkpoint stores it, abstract, with its sharding where it has one: keys as
    integers with one more dim.
    """
    sharding = getattr(leaf, "sharding", None)
    if not is_key(leaf):
        return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)
    raw = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=_with_inner_dim(sharding, leaf.ndim))


def _with_inner_dim(sharding: Sharding | None, ndim: int) -> Sharding | None:
    if not isinstance(sharding, NamedSharding):
        return sharding
    dims = (*sharding.spec, *([None] * (ndim - len(sharding.spec))))
    return NamedSharding(
        sharding.mesh, PartitionSpec(*dims, None), memory_kind=sharding.memory_kind
    )


def raw_arrays(named: Mapping[str, Tree]) -> dict[str, Tree]:
    """Arrays by path, keys as integers; no array is copied."""
    return {
        path: jax.random.key_data(leaf) if is_key(leaf) else leaf for path, leaf in named.items()
    }


def fitted(target: Mapping[str, Tree], arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Stored arrays cast to the target's dtypes, each where the target says."""
    return {path: _fitted(arrays[path], leaf) for path, leaf in target.items()}


def _fitted(array: jax.Array, leaf: Tree) -> jax.Array:
    if is_key(leaf):
        return jax.jit(
            lambda data: jax.random.wrap_key_data(data, impl=_generator(leaf)),
            out_shardings=leaf.sharding,
        )(array)
    if array.dtype == leaf.dtype:
        return array
    return jax.jit(lambda x: x.astype(leaf.dtype), out_shardings=leaf.sharding)(array)


def check_target(target: Tree) -> None:
    """Makes sure that every array of a target says where it is to live."""
    lacking = [
        path
        for path, leaf in named_leaves(target).items()
        if not isinstance(getattr(leaf, "sharding", None), Sharding)
    ]
    if lacking:
        raise CheckpointError(
            f"the target of a restore has no sharding for {shortened(lacking)}\nTry: program.state,"
            " which has all of them"
        )
    if any(
        isinstance(getattr(leaf.sharding, "mesh", None), jax.sharding.AbstractMesh)
        for leaf in jax.tree.leaves(target)
    ):
        raise CheckpointError(
            "the target of a restore is laid out for devices that are not here\nTry: a program that"
            " is compiled for the devices of this machine"
        )


def compared(
    stored: Mapping[str, Spec], target: Mapping[str, Spec], where: str
) -> tuple[Finding, ...]:
    """Compares what a checkpoint holds with what is to be restored.

    Returns:
        Findings where floating-point dtypes differ, which a restore casts.
    """
    differences = {
        path: text
        for path in sorted({*stored, *target})
        if (text := _difference(path, stored.get(path), target.get(path)))
    }
    model = [
        text
        for path, text in differences.items()
        if path.removeprefix("islands.").partition(".")[0] != "opt_state"
    ]
    if model:
        raise_all(
            CheckpointError,
            f"{where} is of another model",
            _cut(model),
            hint="the model that it was saved with, or another folder for this one",
        )
    if differences:
        raise_all(
            OtherOptimizerError,
            f"{where} is of another optimizer",
            _cut(list(differences.values())),
            hint=(
                "the optimizer that it was saved with, or restore(program, parameters_only=True),"
                " which starts the optimizer anew"
            ),
        )
    cast = [
        f"{path} {stored[path].dtype} -> {target[path].dtype}"
        for path in target
        if stored[path].dtype != target[path].dtype
    ]
    if not cast:
        return ()
    return (
        Finding(
            code="checkpoint-dtype",
            severity="warning",
            where=shortened(cast),
            message=f"{len(cast)} arrays of {where} have another dtype and are cast.",
        ),
    )


def _difference(path: str, stored: Spec | None, target: Spec | None) -> str:
    if stored is None or target is None:
        return (
            f"{path} is {'not in the checkpoint' if stored is None else 'in the checkpoint alone'}"
        )
    castable = all(jnp.issubdtype(jnp.dtype(spec.dtype), jnp.floating) for spec in (stored, target))
    same = (
        stored.shape == target.shape
        and stored.key == target.key
        and (stored.dtype == target.dtype or castable)
    )
    return "" if same else f"{path} is {stored} in the checkpoint, {target} here"


def _cut(texts: list[str]) -> list[str]:
    return texts if len(texts) <= SHOWN else [*texts[:SHOWN], f"and {len(texts) - SHOWN} more"]


def shortened(names: list[str]) -> str:
    """Names with commas, the first ones and how many more."""
    return ", ".join(_cut(names))


def said(error: Exception) -> str:
    """What an error says on one line, shortened."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:300]}..."
