"""Tokens visit experts in rounds: one where routing is about even, more where it is skewed.

The first round is differentiated as it is written. The further ones are a loop, which usually has
no turn: its backward pass is a loop of its own that does every round again, so that nothing of them
is in memory but one round. Skewed routing costs time and neither memory nor results.

Of the first round the backward pass finds what it cannot make from its neighbours without another
matmul or message (`KEPT`): rows as they are multiplied, the products that activations read, results
that have come home, and where everything went. Activations, and rows on their way, are made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardlib.functions.experts import ExpertForm
from shardlib.jax_types import Index
from shardlib.lowering.experts.dispatch_and_combine import round_of
from shardlib.lowering.experts.groups import Where
from shardlib.lowering.experts.permute import moved
from shardlib.lowering.experts.queue import Queue

#: Operations of further rounds have it in their names.
OVERFLOW = "shardlib_overflow"
#: What the first round keeps for the backward pass is called so
#: (`jax.ad_checkpoint.checkpoint_name`).
KEPT = "shardlib_expert_rows"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What devices do in a round.

    Attributes:
        form: what experts compute.
        where: on which axes.
    """

    form: ExpertForm
    where: Where

    def all(
        self, queue: Queue, x: jax.Array, weights: jax.Array, parameters: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Weighted results [N, D] of the assignments of all rounds; partial sums where the hidden
        width is sharded.

        Args:
            x: tokens [N, D].
            weights: of the chosen experts, [N, K].
        """
        if self.where.ways == 1 or (
            self.where.exchange == "dense" and self.where.room(weights.size) >= weights.size
        ):
            return self.round(queue, 0, x, weights, parameters)
        further, x, weights, parameters = self._rest(queue, x, weights, parameters)
        return self.round(queue, 0, x, weights, parameters) + further

    def round(
        self,
        queue: Queue,
        number: Index,
        x: jax.Array,
        weights: jax.Array,
        parameters: tuple[jax.Array, ...],
    ) -> jax.Array:
        """The same of the assignments of one round.

        Args:
            x: this device's tokens [N, D].
            weights: of the chosen experts, [N, K].
        """
        per_token = weights.shape[1]
        now = round_of(self.where, queue, number)
        there, back, expert = (kept(places) for places in (now.there, now.back, now.expert))
        rows = now.dispatch(moved(per_token, x, there, back))
        home = kept(
            moved(
                1,
                now.combine(self._experts(rows, expert, parameters, ordered=now.ordered)),
                back,
                there,
            )
        )
        return jnp.einsum(
            "nk,nkd->nd", weights.astype(home.dtype), home.reshape(*weights.shape, -1)
        )

    def _rest(
        self, queue: Queue, x: jax.Array, weights: jax.Array, parameters: tuple[jax.Array, ...]
    ) -> jax.Array:
        return _further(self, queue, x, weights, parameters)

    def _experts(
        self,
        rows: jax.Array,
        expert: jax.Array,
        parameters: tuple[jax.Array, ...],
        *,
        ordered: bool,
    ) -> jax.Array:
        """Results [M, D] of rows [M, D] for the experts [M] of this device."""
        if ordered:
            return self._multiplied(rows, expert, parameters)
        order = kept(jnp.argsort(expert))
        rank = kept(jnp.argsort(order))
        return moved(
            1,
            self._multiplied(moved(1, rows, order, rank), jnp.take(expert, order), parameters),
            rank,
            order,
        )

    def _multiplied(
        self, rows: jax.Array, expert: jax.Array, parameters: tuple[jax.Array, ...]
    ) -> jax.Array:
        """The same, for rows in the order of their experts."""
        up, down, *gate = (array.astype(rows.dtype) for array in parameters)
        sizes = jnp.diff(
            jnp.searchsorted(expert, jnp.arange(up.shape[0] + 1, dtype=expert.dtype))
        ).astype(jnp.int32)
        grouped, rows = self.where.grouped, kept(rows)
        hidden = kept(grouped.matmul(rows, up, sizes))
        gates = kept(grouped.matmul(rows, gate[0], sizes)) if gate else None
        return grouped.matmul(self.form.activated(hidden, gates), down, sizes)


def kept(array: jax.Array) -> jax.Array:
    """An array that the backward pass finds."""
    return checkpoint_name(array, KEPT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _further(
    work: Work, queue: Queue, x: jax.Array, weights: jax.Array, parameters: tuple[jax.Array, ...]
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """Results of all rounds but the first, and the other arguments as they are.

    The first round takes them from here, so that its gradients come back through here and those of
    further rounds are added where they are.
    """

    def turn(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, result = state
        return number + 1, result + work.round(queue, number, x, weights, parameters)

    with jax.named_scope(OVERFLOW):
        return (
            jax.lax.while_loop(
                lambda state: state[0] < queue.rounds,
                turn,
                (jnp.ones((), jnp.int32), jnp.zeros_like(x)),
            )[1],
            x,
            weights,
            parameters,
        )


def _further_forward(
    work: Work, queue: Queue, x: jax.Array, weights: jax.Array, parameters: tuple[jax.Array, ...]
) -> tuple[Any, Any]:
    return _further(work, queue, x, weights, parameters), (queue, x, weights, parameters)


def _further_backward(
    work: Work, saved: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> tuple[Any, ...]:
    queue, *leaves = saved
    further, *gradients = cotangents

    def turn(state: tuple[Any, Any]) -> tuple[Any, Any]:
        number, so_far = state
        pull = jax.vjp(lambda *leaves: work.round(queue, number, *leaves), *leaves)[1]
        return number + 1, jax.tree.map(jnp.add, so_far, list(pull(further)))

    with jax.named_scope(OVERFLOW):
        summed = jax.lax.while_loop(
            lambda state: state[0] < queue.rounds, turn, (jnp.ones((), jnp.int32), gradients)
        )[1]
    return None, *summed


_further.defvjp(_further_forward, _further_backward)
