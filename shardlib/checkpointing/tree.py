"""Training states as named arrays, their differences, and copies of them.

Checkpoints contain no classes: every array has its dotted path, "params.layers.mlp.up" or
"opt_state.0.mu.embedding". Typed random keys are stored as their integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardlib.annotation.trees import Tree, path_text
from shardlib.errors import CheckpointError
from shardlib.lowering.disk import DiskArray
from shardlib.lowering.runtime import TrainState, checksums, checksums_by_path
from shardlib.lowering.training_program import CompositeState
from shardlib.processes.values import in_every_process


class OtherOptimizerError(CheckpointError):
    """A checkpoint of this model with the state of another optimizer."""


#: Maximum number of differences that a message lists.
SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The description of an array in a checkpoint.

    Attributes:
        shape: of random keys, that of their integers.
        dtype: name of the dtype as stored.
        key: name of the generator of random keys, "" for other arrays.
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


#: A training state; that of a user's own step is any tree.
State: TypeAlias = TrainState | Tree
#: Parts of a training state that belong to the optimizer.
_OPTIMIZER = ("opt_state", "guard", "exchange")


def form_of(state: State) -> Tree:
    """A tree with the arrays of a state as they are stored."""
    return state.stored_form() if isinstance(state, CompositeState) else state


def without_optimizer(state: State) -> State:
    """A state without optimizer state and related parts."""
    if isinstance(state, CompositeState):
        return state.mapped(without_optimizer)
    return TrainState(
        step=state.step, params=state.params, model_state=state.model_state, opt_state=()
    )


def is_of_optimizer(path: str) -> bool:
    """True if an array belongs to the optimizer state or related parts."""
    return path.removeprefix("islands.").partition(".")[0] in _OPTIMIZER


def is_key(leaf: Tree) -> bool:
    """True if a concrete or abstract array contains typed random keys."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_name(leaf: Tree) -> str:
    """Name of the generator of an array of keys, "" for other arrays."""
    return str(jax.random.key_impl(leaf)) if is_key(leaf) else ""


def spec_of(leaf: Tree) -> Spec:
    """The description of a concrete or abstract array in a checkpoint."""
    raw = raw_abstract(leaf)
    return Spec(shape=tuple(raw.shape), dtype=str(raw.dtype), key=_generator(leaf))


def _generator(leaf: Tree) -> str:
    """Name of the generator. Abstract arrays of keys contain it only in their dtype, "key<fry>"; a
    key of that dtype has the full name.
    """
    if not is_key(leaf):
        return ""
    if isinstance(leaf, jax.Array):
        return key_name(leaf)
    names: list[str] = []

    def look(keys: Any) -> Tree:
        names.append(key_name(keys))
        return keys

    jax.eval_shape(look, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return names[0]


def raw_abstract(leaf: Tree) -> jax.ShapeDtypeStruct:
    """The abstract array as a checkpoint stores it, with its sharding if it has one: keys as
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


def fitted(array: jax.Array, leaf: Tree) -> jax.Array:
    """A stored array cast to the target's dtype, in its sharding."""
    if is_key(leaf):
        return jax.jit(
            lambda data: jax.random.wrap_key_data(data, impl=_generator(leaf)),
            out_shardings=leaf.sharding,
        )(array)
    if array.dtype == leaf.dtype:
        return array
    return jax.jit(lambda x: x.astype(leaf.dtype), out_shardings=leaf.sharding)(array)


def check_target(target: Tree) -> None:
    """Raises an error unless every array of a target has a sharding."""
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


def cut(texts: list[str]) -> list[str]:
    """The first of some texts, and the number of others."""
    return texts if len(texts) <= SHOWN else [*texts[:SHOWN], f"and {len(texts) - SHOWN} more"]


def shortened(names: list[str]) -> str:
    """Names with commas, the first ones and the number of others."""
    return ", ".join(cut(names))


def said(error: Exception) -> str:
    """The text of an error on one line, shortened."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:300]}..."


# --------------------------------------------------------------------------------------------------
# A copy of the training state that the next step cannot overwrite, taken asynchronously.
#
# A step donates the buffers of its state. The copy is queued after the step that makes the state
# and before the step that overwrites it, in the devices' own order of execution, so that the
# training loop continues at once. On TPUs and GPUs the copy is in pinned host memory and takes no
# device memory; on a CPU, where host and device are one, it is a plain copy.

#: Memory for copies: "host", "device", or "auto" for the host if it has separate memory.
PLACES = ("auto", "host", "device")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy in progress.

    Attributes:
        arrays: by path, each with the layout of the original.
        stored: arrays on disk by path, whose files are kept until `delete`.
        copied: checksums, uint32 [arrays, 2], see `shardlib.lowering.runtime`.
        kept: checksums, uint32 [2], of each of `stored`, by path.
    """

    arrays: dict[str, jax.Array]
    stored: dict[str, DiskArray]
    copied: jax.Array
    kept: dict[str, jax.Array | np.ndarray]

    def sums(self) -> dict[str, tuple[int, int]]:
        """The checksums of all arrays; waits for them."""
        on_disk = {path: np.asarray(pair) for path, pair in self.kept.items()}
        return {
            **checksums_by_path(self.arrays, np.asarray(self.copied)),
            **{path: (int(pair[0]), int(pair[1])) for path, pair in on_disk.items()},
        }

    def delete(self) -> None:
        """Releases the files on disk."""
        for leaf in self.stored.values():
            leaf.delete()


@dataclass(kw_only=True)
class Camera:
    """Takes snapshots; its programs are compiled once for each layout of the state."""

    place: str = "auto"
    _programs: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise CheckpointError(
                f"snapshot={self.place!r} is not a place for copies\nTry: one of"
                f" {', '.join(PLACES)}"
            )

    def take(self, state: Mapping[str, jax.Array | DiskArray]) -> Snapshot:
        """Queues the copies and the checksums of some arrays and returns at once; files of those on
        disk are kept.
        """
        arrays = {path: leaf for path, leaf in state.items() if not isinstance(leaf, DiskArray)}
        stored = {
            path: leaf.second_reference()
            for path, leaf in state.items()
            if isinstance(leaf, DiskArray)
        }
        if self._place(arrays) == "device":
            copies, sums = self._program(arrays, copies=True)(arrays)
        else:
            sums = self._program(arrays, copies=False)(arrays)
            copies = {
                path: jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
                for path, array in arrays.items()
            }
        copied, disk_sums = in_every_process(
            (sums, {path: leaf.checksums for path, leaf in stored.items()})
        )
        return Snapshot(arrays=copies, stored=stored, copied=copied, kept=disk_sums)

    def prepare(self, arrays: Mapping[str, Tree]) -> None:
        """Compiles for concrete arrays, or abstract ones with shardings, ahead of the first
        `take`.
        """
        self._program(arrays, copies=self._place(arrays) == "device")

    def sums(self, arrays: Mapping[str, Tree]) -> Tree:
        """`shardlib.lowering.runtime.checksums`, compiled for concrete arrays or abstract ones with
        shardings.
        """
        return self._program(arrays, copies=False)

    def _place(self, arrays: Mapping[str, Tree]) -> str:
        if self.place != "auto":
            return self.place
        devices = {device for array in arrays.values() for device in array.sharding.device_set}
        separate = all(
            device.platform != "cpu"
            and any(memory.kind == "pinned_host" for memory in device.addressable_memories())
            for device in devices
            if device.process_index == jax.process_index()
        )
        return "host" if separate else "device"

    def _program(self, arrays: Mapping[str, Tree], *, copies: bool) -> Tree:
        key = (
            copies,
            *(
                (path, array.shape, str(array.dtype), array.sharding)
                for path, array in arrays.items()
            ),
        )
        if key not in self._programs:
            shapes = {
                path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
                for path, array in arrays.items()
            }
            self._programs[key] = _compiled(shapes, copies=copies)
        return self._programs[key]


def _compiled(shapes: dict[str, jax.ShapeDtypeStruct], *, copies: bool) -> Tree:
    """One program for the checksums and, with `copies`, the copies, so that the state is read
    once.
    """

    def run(arrays: dict[str, jax.Array]) -> Tree:
        return (
            ({path: jnp.copy(array) for path, array in arrays.items()}, checksums(arrays, kept))
            if copies
            else checksums(arrays, kept)
        )

    run.__name__ = "snapshot" if copies else "sums"
    kept = {path: shape.sharding for path, shape in shapes.items()}
    meshes = [sharding.mesh for sharding in kept.values() if isinstance(sharding, NamedSharding)]
    whole = (
        NamedSharding(meshes[0], PartitionSpec()) if meshes else None
    )  # every process reads the sums
    return jax.jit(run, out_shardings=(kept, whole) if copies else whole).lower(shapes).compile()
