"""Experts and routing in plain NumPy loops, one token at a time, written from the papers."""

from __future__ import annotations

import math

import numpy as np


def act(name: str, x: np.ndarray) -> np.ndarray:
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "relu":
        return np.maximum(x, 0)
    return np.array([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])


def visit(x, weights, chosen, up, down, gate=None, *, activation="silu", capacity=None):
    """Results [N, D] and drops of tokens [N, D]: first choices are served before second ones, in
    the order of the tokens.
    """
    tokens, per_token, count = len(x), chosen.shape[1], len(up)
    room = np.full(
        count,
        (
            tokens * per_token
            if capacity is None
            else math.ceil(capacity * tokens * per_token / count - 1e-9)
        ),
    )
    out, dropped = np.zeros_like(x), 0
    for choice in range(per_token):
        for token in range(tokens):
            expert = chosen[token, choice]
            if room[expert] == 0:
                dropped += 1
                continue
            room[expert] -= 1
            hidden = x[token] @ up[expert]
            hidden = (
                act(activation, hidden)
                if gate is None
                else act(activation, x[token] @ gate[expert]) * hidden
            )
            out[token] += weights[token, choice] * (hidden @ down[expert])
    return out, dropped


def route(
    logits,
    k,
    *,
    scores="softmax",
    bias=None,
    normalise=True,
    scaling=1.0,
    groups=1,
    groups_per_token=1,
    group_score=1,
):
    """(weights, chosen, shares) of tokens [N, E]."""
    weights, chosen, shares = [], [], []
    for row in logits:
        found = (
            np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            if scores == "softmax"
            else 1 / (1 + np.exp(-row))
        )
        ranking = found + (0 if bias is None else bias)
        size = len(row) // groups
        best = sorted(
            range(groups),
            key=lambda g: -sum(sorted(ranking[g * size : (g + 1) * size])[-group_score:]),
        )[:groups_per_token]
        allowed = [e for e in range(len(row)) if e // size in best]
        mine = sorted(allowed, key=lambda e: -ranking[e])[:k]
        picked = found[mine] / (found[mine].sum() if normalise else 1)
        weights.append(picked * scaling)
        chosen.append(mine)
        shares.append(found / found.sum())
    return np.array(weights), np.array(chosen), np.array(shares)
