"""Routing of tokens to experts, and load balancing.

All functions work on logits [..., E] with any leading dims, which are never merged, gathered or
scattered, neither forward nor backward, so that a partitioner can shard tokens along any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.errors import ModelError, raise_all
from shardlib.functions.attention import is_array, marked
from shardlib.untrusted.data import Kind, require_kinds


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The computation of `balance_loss`."""

    kind: str = "balance"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Routing:
    """The experts of every token.

    Attributes:
        weights: weights of the chosen experts, float32 [..., K].
        chosen: their numbers, int32 [..., K], the best first.
        shares: normalised scores of all experts, float32 [..., E], which sum to 1.
    """

    weights: jax.Array
    chosen: jax.Array
    shares: jax.Array


def _is_index(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


_INTEGERS = ("k", "groups", "groups_per_token", "group_score")
#: Expected kinds of the arguments of `route`.
_KINDS: Mapping[str, Kind] = {
    "logits": (
        is_array,
        "an array [..., experts] of logits of the router",
        "logits=jnp.ones((2, 128, 8))",
    ),
    "bias": (lambda value: is_array(value, 1), "an array [experts]", "bias=jnp.zeros(8)"),
    **{name: (_is_index, "an integer", f"{name}=2") for name in _INTEGERS},
}


def route(
    logits: jax.Array,
    k: int,
    *,
    scores: str = "softmax",
    bias: jax.Array | None = None,
    normalise: bool = True,
    scaling: float = 1.0,
    groups: int = 1,
    groups_per_token: int = 1,
    group_score: int = 1,
) -> Routing:
    """Chooses the k best experts of every token.

    Args:
        logits: output of the router, [..., E], any float dtype; scores are float32.
        k: experts per token.
        scores: "softmax" over the experts, or "sigmoid" of each.
        bias: [E], added to the scores for the choice only, without a gradient (DeepSeek-V3,
            arXiv:2412.19437, section 2.1.2); None for no bias.
        normalise: whether the weights of the chosen experts are divided by their sum.
        scaling: factor on the weights.
        groups: number of equal groups of experts.
        groups_per_token: groups from which a token may choose, the best by the sum of the
            `group_score` best scores in them (arXiv:2405.04434, section 2.1.2).
        group_score: number of best scores of a group that are added up to rank it.

    Returns:
        Weights and numbers of the chosen experts, [..., K] each, the best first, and the normalised
        scores of all experts, [..., E].

    Raises:
        ArgumentError: logits or a bias that are not arrays of such ranks, or other numbers than
            integers.
        ModelError: `k` or the groups do not fit the number of experts, `bias` is not [E], or
            `scores` is unknown; all errors are listed.
    """
    require_kinds(
        "route",
        _KINDS,
        {
            "logits": logits,
            "k": k,
            "bias": bias,
            "groups": groups,
            "groups_per_token": groups_per_token,
            "group_score": group_score,
        },
        needed=("logits", *_INTEGERS),
    )
    _check(logits, k, scores, bias, groups, groups_per_token)
    wide = logits.astype(jnp.float32)
    scored = jax.nn.softmax(wide, axis=-1) if scores == "softmax" else jax.nn.sigmoid(wide)
    ranking = jax.lax.stop_gradient(scored if bias is None else scored + bias.astype(jnp.float32))
    if groups > 1:
        ranking = jnp.where(
            _allowed(ranking, groups, groups_per_token, group_score), ranking, -jnp.inf
        )
    chosen = _best(ranking, k)
    weights = jnp.sum(jnp.where(_hot(chosen, scored.shape[-1]), scored[..., None, :], 0.0), axis=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    shares = scored if scores == "softmax" else scored / scored.sum(-1, keepdims=True)
    return Routing(weights=weights * scaling, chosen=chosen, shares=shares)


def balance_loss(shares: jax.Array, chosen: jax.Array) -> jax.Array:
    """E times the sum over experts of their fraction of all assignments times their mean share
    (Switch, arXiv:2101.03961, equation 4): 1 if both are uniform.

    It is a product of two means over the tokens. With microbatches, each has its own, and their
    mean replaces that of the whole batch; a finding reports it ("balance-per-microbatch").

    Args:
        shares: normalised scores of every token (`Routing.shares`), float [..., E].
        chosen: experts of every token (`Routing.chosen`), int [..., K].

    Returns:
        Float scalar.
    """
    return marked(Balance(), _balance)(shares, chosen)


def _balance(_: Balance, shares: jax.Array, chosen: jax.Array) -> jax.Array:
    count, leading = shares.shape[-1], tuple(range(shares.ndim - 1))
    return count * jnp.sum(loads(chosen, count) / float(chosen.size) * shares.mean(leading))


def z_loss(logits: jax.Array) -> jax.Array:
    """Mean over tokens of the squared log-sum-exp of the router logits [..., E] (ST-MoE,
    arXiv:2202.08906, equation 5).
    """
    return jnp.mean(jnp.square(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)))


def loads(chosen: jax.Array, count: int) -> jax.Array:
    """Number of assignments of each of `count` experts, float32 [E], from chosen [..., K]."""
    return jnp.sum(_hot(chosen, count), axis=tuple(range(chosen.ndim)), dtype=jnp.float32)


def bias_step(bias: jax.Array, chosen: jax.Array, rate: float) -> jax.Array:
    """The bias after a step, moved by `rate` towards the mean load (balancing without auxiliary
    loss, arXiv:2408.15664, algorithm 1).

    Args:
        bias: [E].
        chosen: experts of all tokens of the step, int [..., K].
    """
    return stepped(bias, loads(chosen, bias.shape[-1]), rate)


def stepped(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """As `bias_step`, from the assignments of every expert [..., E] and biases [..., E]."""
    return bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load).astype(bias.dtype)


def _allowed(ranking: jax.Array, groups: int, groups_per_token: int, group_score: int) -> jax.Array:
    """Mask [..., E] of the experts in the best groups of each token."""
    grouped = ranking.reshape(*ranking.shape[:-1], groups, -1)
    ranks = -jax.lax.sort(-grouped)[..., :group_score].sum(-1)
    mask = _hot(_best(ranks, groups_per_token), groups).any(-2)
    return jnp.broadcast_to(mask[..., None], grouped.shape).reshape(ranking.shape)


def _best(ranking: jax.Array, k: int) -> jax.Array:
    """Numbers of the k largest [..., K], ties in order of their number.

    Like `jax.lax.top_k`, but by sorting: partitioners gather all tokens for a `top_k`, and can
    shard a sort along every other dim.
    """
    numbers = jax.lax.broadcasted_iota(jnp.int32, ranking.shape, ranking.ndim - 1)
    return jax.lax.sort((-ranking, numbers), num_keys=1, is_stable=True)[1][..., :k]


def _hot(chosen: jax.Array, count: int) -> jax.Array:
    """One-hot mask of the chosen experts: [..., K] -> [..., K, E]."""
    return chosen[..., None] == jnp.arange(count, dtype=chosen.dtype)


def _check(
    logits: jax.Array,
    k: int,
    scores: str,
    bias: jax.Array | None,
    groups: int,
    groups_per_token: int,
) -> None:
    count, failures = logits.shape[-1], list[str]()
    if scores not in ("softmax", "sigmoid"):
        failures.append(f"scores {scores!r} are not known; known are softmax, sigmoid")
    if not 1 <= k <= count:
        failures.append(f"a token cannot visit {k} of {count} experts")
    if bias is not None and bias.shape != (count,):
        failures.append(f"bias is {bias.shape}; it must be {(count,)}")
    if groups < 1 or count % groups or not 1 <= groups_per_token <= groups:
        failures.append(
            f"{count} experts in {groups} groups, {groups_per_token} of them for a token, do"
            " not fit"
        )
    elif k > groups_per_token * (count // groups):
        failures.append(
            f"{groups_per_token} groups of {count // groups} experts have no {k} experts"
        )
    if failures:
        raise_all(ModelError, "tokens cannot be routed", failures)
