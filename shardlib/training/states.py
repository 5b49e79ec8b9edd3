"""Operations on training states: averages of parameters, learning rates, adapters, and changed
models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardlib.annotation.trees import Tree, path_text
from shardlib.checkpointing.tree import is_key, named_leaves, spec_of
from shardlib.errors import ModelError, StateError, raise_all
from shardlib.jax_types import Index
from shardlib.lowering.program import Program, shardings_of
from shardlib.lowering.runtime import TrainState, require_not_donated
from shardlib.processes.values import whole

#: Former submodules are resolved by `shardlib._moved`.
__path__: list[str] = []

# --------------------------------------------------------------------------------------------------
# A moving average of the parameters, as a part of the optimizer's state.
#
#     optimizer = with_average(optax.adamw(1e-3), 0.999)
#     program = shardlib.compile(init, loss, optimizer, batch)
#     ...
#     program.evaluate(averaged(program, state), rows)
#
# It is sharded, priced, saved and restored on another mesh like moments, and steps that guards skip
# leave it unchanged.


class AverageState(NamedTuple):
    """The state of an optimizer with an average.

    Attributes:
        count: number of updates, int32 scalar.
        average: of the trained parameters, at least float32.
        inner: the state of the optimizer.
    """

    count: Any
    average: Any
    inner: Any


def with_average(
    optimizer: optax.GradientTransformation, decay: float | Callable[[Index], Tree] = 0.999
) -> optax.GradientTransformationExtraArgs:
    """An optimizer with an exponential moving average of the parameters: average = decay * average
    + (1 - decay) * parameters, starting from the initial parameters.

    Updates are bitwise those of the optimizer. If `moment_dtype` is pinned to less than float32,
    the average is stored in it too, and with a decay close to 1 no longer moves.
    """
    if not callable(decay) and not 0 <= decay < 1:
        raise ModelError(f"decay is {decay!r}; it must be at least 0 and below 1")
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> AverageState:
        return AverageState(
            count=jnp.zeros((), jnp.int32),
            average=jax.tree.map(_wide, params),
            inner=inner.init(params),
        )

    def update(
        updates: Tree, state: Tree, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, AverageState]:
        if params is None:
            raise ModelError("an average needs the parameters\nTry: update(updates, state, params)")
        updates, after = inner.update(updates, state.inner, params, **extra)
        factor = decay(state.count) if callable(decay) else decay
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(
            lambda old, value: (old + (1 - factor) * (_wide(value) - old)).astype(old.dtype),
            state.average,
            new,
        )
        return updates, AverageState(count=state.count + 1, average=average, inner=after)

    return optax.GradientTransformationExtraArgs(init, update)


def warmed_up_decay(decay: float) -> Callable[[Index], jax.Array]:
    """A decay that is small at the beginning, when parameters change fast: min(decay, (1 + n) / (10
    + n)) after n updates, as in `tf.train.ExponentialMovingAverage`.
    """
    return lambda count: jnp.minimum(decay, (1.0 + count) / (10.0 + count))


def averaged(program: Program, state: TrainState) -> TrainState:
    """A state with the average in place of the trained parameters, in their layout and dtypes: for
    `program.evaluate`, `program.module`, serving and export. The given state stays usable; training
    continues from it.
    """
    require_not_donated("averaged", state.inference)
    averages = [
        node
        for node in jax.tree.leaves(
            state.opt_state, is_leaf=lambda node: isinstance(node, AverageState)
        )
        if isinstance(node, AverageState)
    ]
    if not averages:
        raise StateError(
            "the state has no average of the parameters\nTry: shardlib.compile(init, loss,"
            " with_average(optimizer, 0.999), batch)"
        )

    def joined(average: Tree, params: Tree) -> Tree:
        trained = jax.tree.map(
            lambda mean, like: mean.astype(like.dtype),
            average,
            program.model.partition.trained(params),
        )
        return program.model.partition.joined(trained, params)

    cast = jax.jit(joined, out_shardings=shardings_of(program.state.params))
    params = cast(averages[0].average, state.params)
    return replace(state, params=params)


def _wide(leaf: Any) -> jax.Array:
    return jnp.asarray(leaf, jnp.promote_types(leaf.dtype, jnp.float32))


# --------------------------------------------------------------------------------------------------
# The learning rate and the step count of a state.


def learning_rate(state: Tree) -> float | None:
    """The learning rate of the step that made a state, if the optimizer stores it, as with
    `optax.inject_hyperparams`; waits for the state.

    Returns:
        The rate; None if no array of the state is called `learning_rate`.
    """
    return _scalar(state, "learning_rate")


def steps_done(state: Tree) -> int | None:
    """The number of steps done, as counted in the state: `TrainState.step`, or else an integer
    named "step" or "count".

    Returns:
        The number; None if there is none.
    """
    for name in ("step", "count"):
        count = _scalar(state, name, integer=True)
        if count is not None:
            return int(count)
    return None


def _scalar(state: Tree, name: str, *, integer: bool = False) -> float | None:
    """The first scalar whose path ends with a name."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if path_text(path).split(".")[-1] == name and not np.shape(leaf):
            value: Any = whole(leaf)
            if not integer or np.issubdtype(value.dtype, np.integer):
                return float(value)
    return None


# --------------------------------------------------------------------------------------------------
# The state of a model reused for a changed one: newly frozen parts, a larger embedding, adapters.
#
#     changed = shardlib.compile(Larger, loss, optimizer, batch, topology="cpu:8")
#     surgery = operate(changed, state, resize=("embed.embedding",))
#     print(surgery)
#     state = surgery.state(seed=0)
#
# Arrays are matched by path. Those of the same shape are reused with their moments, in the layouts
# of the new plan; new ones are initialised by the new program.

#: Prefixes of the model's arrays in a state.
MODEL = ("params.", "model_state.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Surgery:
    """Changes to the arrays of a state, by path; applied only when `state` is called.

    Attributes:
        program: of the changed model.
        old: the given state; it stays usable.
        kept: arrays that are reused.
        resized: arrays whose common part is reused, with both shapes.
        new: arrays that the new program initialises.
        dropped: arrays that the new program does not have: moments of newly frozen parameters, and
            arrays named in `drop`.
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
        require_not_donated("surgery", self.old)
        fresh = self.program.init(seed)
        before = named_leaves(self.old)
        leaves, structure = jax.tree.flatten(fresh)
        arrays = dict(zip(named_leaves(fresh), leaves, strict=True))
        for path in self.kept:
            arrays[path] = _moved(before[path], arrays[path])
        for path in self.resized:
            arrays[path] = _resized(before[path], arrays[path])
        return structure.unflatten(list(arrays.values()))


def operate(
    program: Program, state: TrainState, *, resize: Sequence[str] = (), drop: Sequence[str] = ()
) -> Surgery:
    """The changes that take a state to the program of a changed model."""
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
    """True if an array is one of some parameters, or a moment of one."""
    return any(path.endswith(f".{name}") for name in names)


def _moved(old: Tree, new: Tree) -> jax.Array:
    if is_key(new):
        return jax.device_put(jnp.copy(old), new.sharding)
    return jax.device_put(jnp.array(old, dtype=new.dtype, copy=True), new.sharding)


def _resized(old: Tree, new: Tree) -> jax.Array:
    common = tuple(
        slice(0, min(old_size, new_size))
        for old_size, new_size in zip(old.shape, new.shape, strict=True)
    )
    part = jax.device_put(old, jax.sharding.SingleDeviceSharding(next(iter(new.devices()))))[common]

    def joined(part: jax.Array, new: jax.Array) -> jax.Array:
        return new.at[common].set(part.astype(new.dtype))

    replicated = jax.sharding.NamedSharding(new.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.jit(joined, out_shardings=new.sharding)(jax.device_put(part, replicated), new)
