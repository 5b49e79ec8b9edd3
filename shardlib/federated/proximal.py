"""The proximal term of FedProx ([arXiv:1812.06127](https://arxiv.org/abs/1812.06127)), as a part of
the optimizer.

Clients minimise loss(w) + mu / 2 |w - w0|^2, w0 the parameters of the server. The gradient of the
term, mu (w - w0), is added to that of the loss before the client's optimizer sees it, which is what
an optimizer of the sum would see; the loss that is reported is that of the rows alone. w0 is a part
of the optimizer's state, and is sharded as that is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardlib.annotation.trees.paths import Tree


class ProximalState(NamedTuple):
    """The state of an optimizer with a proximal term.

    Attributes:
        mu: weight of the term, float32 scalar.
        anchor: w0, like the trained parameters.
        inner: of the client's optimizer.
    """

    mu: jax.Array
    anchor: Tree
    inner: Tree


def proximal(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """An optimizer of the loss and the proximal term. Where its state is made, there is the anchor;
    mu is 0 until `with_mu` says more.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> ProximalState:
        return ProximalState(
            mu=jnp.zeros((), jnp.float32),
            anchor=jax.tree.map(jnp.array, params),
            inner=inner.init(params),
        )

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **more: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        assert isinstance(state, ProximalState)

        def pulled(gradient: jax.Array, now: jax.Array, anchor: jax.Array) -> jax.Array:
            term = state.mu.astype(now.dtype) * (now - anchor.astype(now.dtype))
            return gradient + term.astype(gradient.dtype)

        gradients = jax.tree.map(pulled, updates, params, state.anchor)
        inner_updates, after = inner.update(gradients, state.inner, params, **more)
        return inner_updates, state._replace(inner=after)

    return optax.GradientTransformationExtraArgs(init, update)


def with_mu(opt_state: Tree, mu: float) -> Tree:
    """The same state with a weight of the proximal term, where there is one."""

    def weighted(state: ProximalState) -> ProximalState:
        number = jax.device_put(jnp.float32(mu), state.mu.sharding)
        return state._replace(mu=number)

    return _mapped(opt_state, weighted)


def inner_of(opt_state: Tree) -> Tree:
    """The state of the client's own optimizer."""
    return _mapped(opt_state, lambda state: state.inner)


def with_inner(opt_state: Tree, inner: Tree) -> Tree:
    """The same state with that of the client's own optimizer."""
    if isinstance(opt_state, ProximalState):
        return opt_state._replace(inner=inner)
    return inner


def _mapped(opt_state: Tree, change: Callable[[ProximalState], Tree]) -> Tree:
    return change(opt_state) if isinstance(opt_state, ProximalState) else opt_state
