"""A state taken over by the program of a changed model: parts that are frozen now, a larger
embedding, adapters.

    changed = shardlib.compile(Larger, loss, optimizer, batch, topology="cpu:8")
    surgery = operate(changed, state, resize=("embed.embedding",))
    print(surgery)
    state = surgery.state(seed=0)

Arrays are known by their paths. Those of the same shape are taken over, with their moments, in the
layouts of the new plan; new ones are as the new program makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardlib.annotation.trees.paths import Tree
from shardlib.checkpointing.tree import is_key, named_leaves, spec_of
from shardlib.errors import StateError, raise_all
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.donated import require_present
from shardlib.lowering.runtime.state import TrainState

#: Names of the parts of a state that the model has.
MODEL = ("params.", "model_state.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Surgery:
    """What becomes of the arrays of a state, by path; nothing is done before `state` is called.

    Attributes:
        program: of the changed model.
        old: the state that is taken over; it stays usable.
        kept: arrays that are taken over.
        resized: those whose common part is taken over, with both shapes.
        new: arrays that the new program makes.
        dropped: arrays that the new program has not: moments of what is frozen now, and what was
            named.
    """

    program: Program
    old: TrainState
    kept: tuple[str, ...]
    resized: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]

    def __str__(self) -> str:
        before, after = named_leaves(self.old), named_leaves(self.program.state)
        lines = [f"{len(self.kept)} arrays are taken over"]
        lines += [
            f"  resized  {path}: {spec_of(before[path])} -> {spec_of(after[path])}"
            for path in self.resized
        ]
        lines += [f"  new      {path}: {spec_of(after[path])}" for path in self.new]
        lines += [f"  dropped  {path}: {spec_of(before[path])}" for path in self.dropped]
        return "\n".join(lines)

    def state(self, seed: int = 0) -> TrainState:
        """The state of the new program."""
        require_present("surgery", self.old)
        fresh = self.program.init(seed)
        before = named_leaves(self.old)
        leaves, structure = jax.tree.flatten(fresh)
        made = dict(zip(named_leaves(fresh), leaves, strict=True))
        for path in self.kept:
            made[path] = _moved(before[path], made[path])
        for path in self.resized:
            made[path] = _resized(before[path], made[path])
        return structure.unflatten(list(made.values()))


def operate(
    program: Program, state: TrainState, *, resize: Sequence[str] = (), drop: Sequence[str] = ()
) -> Surgery:
    """What becomes of a state under the program of a changed model."""
    before, after = named_leaves(state), named_leaves(program.state)
    kept, resized, new, failures = list[str](), list[str](), list[str](), list[str]()
    for path, leaf in after.items():
        if path not in before:
            new.append(path)
        elif spec_of(before[path]).shape == spec_of(leaf).shape and is_key(leaf) == is_key(
            before[path]
        ):
            kept.append(path)
        elif _named(path, resize) and before[path].ndim == leaf.ndim:
            resized.append(path)
        elif path.startswith(MODEL):
            failures.append(f"{path} is {spec_of(before[path])}, and {spec_of(leaf)} there")
        else:
            new.append(path)
    gone = [path for path in before if path not in after]
    failures += [
        f"{path} is not there" for path in gone if path.startswith(MODEL) and not _named(path, drop)
    ]
    if failures:
        raise_all(
            StateError,
            "the changed model does not take over arrays of the state",
            failures,
            hint="resize=(path, ...), drop=(path, ...)",
        )
    return Surgery(
        program=program,
        old=state,
        kept=tuple(kept),
        resized=tuple(resized),
        new=tuple(new),
        dropped=tuple(gone),
    )


def _named(path: str, names: Sequence[str]) -> bool:
    """Whether an array is one of some parameters, or a moment of one."""
    return any(path.endswith(f".{name}") for name in names)


def _moved(old: Tree, new: Tree) -> jax.Array:
    if is_key(new):
        return jax.device_put(jnp.copy(old), new.sharding)
    return jax.device_put(jnp.array(old, dtype=new.dtype, copy=True), new.sharding)


def _resized(old: Tree, new: Tree) -> jax.Array:
    common = tuple(
        slice(0, min(one, other)) for one, other in zip(old.shape, new.shape, strict=True)
    )
    part = jax.device_put(old, jax.sharding.SingleDeviceSharding(next(iter(new.devices()))))[common]

    def joined(part: jax.Array, new: jax.Array) -> jax.Array:
        return new.at[common].set(part.astype(new.dtype))

    whole = jax.sharding.NamedSharding(new.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.jit(joined, out_shardings=new.sharding)(jax.device_put(part, whole), new)
