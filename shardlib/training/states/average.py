"""A moving average of the parameters, as a part of the optimizer's state.

    optimizer = with_average(optax.adamw(1e-3), 0.999)
    program = shardlib.compile(init, loss, optimizer, batch)
    ...
    program.evaluate(averaged(program, state), rows)

It is sharded, priced, saved and restored on another mesh as moments are, and a step that guards
leave out changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import ModelError, StateError
from shardlib.jax_types import Index
from shardlib.lowering.program.program import Program, shardings_of
from shardlib.lowering.runtime.donated import require_present
from shardlib.lowering.runtime.state import TrainState


class AverageState(NamedTuple):
    """The state of an optimizer with an average.

    Attributes:
        count: updates that are done, int32 scalar.
        average: of the trained parameters, in float32 at least.
        inner: the state of the optimizer.
    """

    count: Any
    average: Any
    inner: Any


def with_average(
    optimizer: optax.GradientTransformation,
    decay: float | Callable[[Index], Tree] = 0.999,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that keeps an exponential moving average of what it makes of the parameters:
    average = decay * average + (1 - decay) * parameters, from the first parameters on.

    Updates are those of the optimizer, to the bit. With `moment_dtype` pinned to fewer bits than
    float32, the average is stored so, too, and a slow one then no longer moves.
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
            lambda old, one: (old + (1 - factor) * (_wide(one) - old)).astype(old.dtype),
            state.average,
            new,
        )
        return updates, AverageState(count=state.count + 1, average=average, inner=after)

    return optax.GradientTransformationExtraArgs(init, update)


def warmed_up_decay(decay: float) -> Callable[[Index], jax.Array]:
    """A decay that is small at the beginning, when parameters are far from where they will be:
    min(decay, (1 + n) / (10 + n)) after n updates, as `tf.train.ExponentialMovingAverage` has it.
    """
    return lambda count: jnp.minimum(decay, (1.0 + count) / (10.0 + count))


def averaged(program: Program, state: TrainState) -> TrainState:
    """A state with the average in place of the trained parameters, where these are and in their
    dtypes: for `program.evaluate`, `program.module`, for serving and for writing folders. The state
    that is given stays usable; training goes on from that one.
    """
    require_present("averaged", state.inference)
    found = [
        one
        for one in jax.tree.leaves(
            state.opt_state, is_leaf=lambda node: isinstance(node, AverageState)
        )
        if isinstance(one, AverageState)
    ]
    if not found:
        raise StateError(
            "the state has no average of the parameters\nTry: shardlib.compile(init, loss,"
            " with_average(optimizer, 0.999), batch)"
        )

    def joined(average: Tree, params: Tree) -> Tree:
        trained = jax.tree.map(
            lambda one, like: one.astype(like.dtype),
            average,
            program.model.partition.trained(params),
        )
        return program.model.partition.joined(trained, params)

    cast = jax.jit(joined, out_shardings=shardings_of(program.state.params))
    params = cast(found[0].average, state.params)
    return replace(state, params=params)


def _wide(leaf: Any) -> jax.Array:
    return jnp.asarray(leaf, jnp.promote_types(leaf.dtype, jnp.float32))
