"""Tokens visit the experts that they chose.

In the dropless form (MegaBlocks, arXiv:2211.15841) assignments of tokens to experts are sorted by
expert and multiplied with `jax.lax.ragged_dot`: every token visits all the experts that it chose,
and the FLOPs are those of the chosen experts, no more. In the capacity form (GShard,
arXiv:2006.16668; Switch, arXiv:2101.03961) an expert takes at most c T k / E of T tokens that
choose k of E experts, all first choices in the order of the tokens before all second ones; the rest
is dropped, which means that it adds nothing, and counted.

>>> ExpertForm(gated=False, capacity=1.25).slots(tokens=64, per_token=2, experts=8)
20
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardlib.cost.step.capacity_experts import CAPPED
from shardlib.errors import ModelError, raise_all
from shardlib.functions.activations import ACTIVATIONS
from shardlib.functions.marks import marked


@dataclass(frozen=True, kw_only=True)
class ExpertForm:
    """What experts compute.

    Attributes:
        activation: a name of `ACTIVATIONS`.
        gated: whether experts are down(activation(gate(x)) * up(x)), and not
            down(activation(up(x))).
        capacity: None drops nothing; else the factor c over the mean load that an expert takes.

    Raises:
        ModelError: an unknown activation, or a capacity that is not positive.
    """

    activation: str = "silu"
    gated: bool = True
    capacity: float | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ModelError(
                f"activation {self.activation!r} of experts is not known\nTry: one of"
                f" {', '.join(ACTIVATIONS)}"
            )
        if self.capacity is not None and not (self.capacity > 0 and math.isfinite(self.capacity)):
            raise ModelError(
                f"capacity {self.capacity} of experts is not positive\nTry: a factor over the mean"
                " load, 1.25 for example, or None to drop nothing"
            )

    @property
    def kind(self) -> str:
        """What planning calls it."""
        return "dropless" if self.capacity is None else "capacity"

    def activated(self, hidden: jax.Array, gate: jax.Array | None) -> jax.Array:
        """What the second matmul of an expert reads.

        Args:
            hidden: result of the first matmul, [..., F].
            gate: that of the gate, [..., F]; None where experts have none.
        """
        act = ACTIVATIONS[self.activation]
        return act(hidden) if gate is None else act(gate) * hidden

    @property
    def scope(self) -> str:
        """What pricing knows its operations by; empty where it needs no name."""
        return "" if self.capacity is None else CAPPED

    def slots(self, *, tokens: int, per_token: int, experts: int) -> int:
        """Tokens that one expert takes at most."""
        if self.capacity is None:
            return tokens * per_token
        return math.ceil(
            self.capacity * tokens * per_token / experts - 1e-9
        )  # products of decimals may end a little above a whole number


def visit(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate: jax.Array | None = None,
    *,
    activation: str = "silu",
    capacity: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sends every token to the experts that it chose and adds up their weighted results.

    Args:
        x: tokens [..., D].
        weights: of the chosen experts, [..., K].
        chosen: numbers of experts, int [..., K].
        up: [E, D, F]; all parameters are cast to the dtype of `x`.
        down: [E, F, D].
        gate: [E, D, F]; None where experts have no gate.
        activation: a name of `ACTIVATIONS`.
        capacity: factor over the mean load that an expert takes at most; None drops nothing.

    Returns:
        Results [..., D], and the number of assignments that were dropped, int32 [].

    Raises:
        ModelError: shapes that do not fit, more choices than experts, an unknown activation, or a
            capacity that is not positive.
    """
    form = ExpertForm(activation=activation, gated=gate is not None, capacity=capacity)
    _check(x, weights, chosen, up, down, gate)
    return marked(form, visited)(x, weights, chosen, up, down, *(() if gate is None else (gate,)))


def visited(form: ExpertForm, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What one device computes, for the arrays of a custom call: x, weights, chosen, up, down, and
    gate where the form is gated; see `visit`.
    """
    x, weights, chosen, *parameters = arrays
    per_token = chosen.shape[-1]
    tokens, token_weights, numbers = (
        x.reshape(-1, x.shape[-1]),
        weights.reshape(-1, per_token),
        chosen.reshape(-1, per_token),
    )
    used = [array.astype(x.dtype) for array in parameters]
    if form.capacity is None:
        home, dropped = _dropless(form, tokens, numbers, *used)
    else:
        with jax.named_scope(form.scope):
            home, dropped = _capped(form, tokens, numbers, *used)
    return jnp.einsum("nk,nkd->nd", token_weights.astype(home.dtype), home).reshape(
        x.shape
    ), dropped


def _dropless(
    form: ExpertForm,
    tokens: jax.Array,
    chosen: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Results [N, K, D] of the experts, by sorting the assignments."""
    sizes = jnp.bincount(chosen.reshape(-1), length=up.shape[0]).astype(jnp.int32)
    order = jnp.argsort(chosen.reshape(-1))
    rows = jnp.take(tokens, order // chosen.shape[-1], axis=0, mode="clip")
    hidden = form.activated(
        jax.lax.ragged_dot(rows, up, sizes),
        None if gate is None else jax.lax.ragged_dot(rows, gate, sizes),
    )
    results = jax.lax.ragged_dot(hidden, down, sizes)
    return jnp.take(results, jnp.argsort(order), axis=0, mode="clip").reshape(
        *chosen.shape, -1
    ), jnp.zeros((), jnp.int32)


def _capped(
    form: ExpertForm,
    tokens: jax.Array,
    chosen: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Results [N, K, D] of the experts, zeros where an assignment is dropped, from a slot for every
    assignment that an expert takes.
    """
    count, (number, per_token) = up.shape[0], chosen.shape
    slots = form.slots(tokens=number, per_token=per_token, experts=count)
    queue = chosen.T.reshape(
        -1
    )  # all first choices in the order of the tokens, then all second ones
    order = jnp.argsort(queue)
    starts = jnp.searchsorted(jnp.take(queue, order), jnp.arange(count + 1))
    position = jnp.argsort(order) - jnp.take(starts, queue)
    place = starts[:-1, None] + jnp.arange(slots)
    taken = place < starts[1:, None]
    rows = jnp.where(
        taken[..., None],
        jnp.take(tokens, jnp.take(order, place, mode="clip") % number, axis=0, mode="clip"),
        0,
    )
    hidden = form.activated(
        jnp.einsum("ecd,edf->ecf", rows, up),
        None if gate is None else jnp.einsum("ecd,edf->ecf", rows, gate),
    )
    results = jnp.einsum("ecf,efd->ecd", hidden, down).reshape(count * slots, -1)
    accepted = position < slots
    home = jnp.where(
        accepted[:, None],
        jnp.take(results, queue * slots + jnp.minimum(position, slots - 1), axis=0, mode="clip"),
        0,
    )
    return home.reshape(per_token, number, -1).swapaxes(0, 1), jnp.sum(~accepted, dtype=jnp.int32)


def _check(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate: jax.Array | None,
) -> None:
    failures = [
        f"{name} is {array.shape}; it has three dims"
        for name, array in (("up", up), ("down", down))
        if array.ndim != 3
    ]
    if failures or not (x.ndim and chosen.ndim):
        raise_all(
            ModelError,
            "experts do not fit",
            failures or ["x and chosen have a dim of features and one of choices"],
        )
    count, width, inner = up.shape
    shapes = {
        "x": (x.shape, (*x.shape[:-1], width)),
        "chosen": (chosen.shape, (*x.shape[:-1], chosen.shape[-1])),
        "weights": (weights.shape, chosen.shape),
        "down": (down.shape, (count, inner, width)),
        **({} if gate is None else {"gate": (gate.shape, up.shape)}),
    }
    failures = [
        f"{name} is {actual}; with up {up.shape} and x {x.shape} it must be {right}"
        for name, (actual, right) in shapes.items()
        if actual != right
    ]
    if chosen.shape[-1] > count:
        failures.append(f"a token cannot visit {chosen.shape[-1]} of {count} experts")
    if not jnp.issubdtype(chosen.dtype, jnp.integer):
        failures.append(f"chosen is {chosen.dtype}; it holds numbers of experts")
    if failures:
        raise_all(ModelError, "experts do not fit", failures)
