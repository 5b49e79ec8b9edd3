"""The maths of a decoder in plain NumPy loops, written from the papers and independent of
`shardlib.models`.

Float64 throughout; one sequence, one head, one query at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.functions import numpy_experts


def rms(x: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def turn(head: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Turns pair (i, i + half) as complex numbers."""
    half = len(head) // 2
    turned = (head[:half] + 1j * head[half:]) * np.exp(
        1j * position * theta ** (-np.arange(half) / half)
    )
    return np.concatenate([turned.real, turned.imag])


def attention(
    x: np.ndarray, weights: Mapping[str, np.ndarray], theta: float, window: int = 0
) -> np.ndarray:
    """Causal grouped-query attention of `x` [seq, embed]."""
    seq, heads, groups = (
        len(x),
        weights["query"].shape[1],
        weights["query"].shape[1] // weights["key"].shape[1],
    )
    out = np.zeros_like(x)
    for head in range(heads):
        shared = head // groups
        keys = [turn(x[t] @ weights["key"][:, shared], t, theta) for t in range(seq)]
        values = [x[t] @ weights["value"][:, shared] for t in range(seq)]
        for s in range(seq):
            first = max(0, s - window + 1) if window else 0
            query = turn(x[s] @ weights["query"][:, head], s, theta)
            scores = np.array([query @ keys[t] for t in range(first, s + 1)]) / np.sqrt(len(query))
            shares = np.exp(scores) / np.exp(scores).sum()
            out[s] += (
                sum(share * values[t] for share, t in zip(shares, range(first, s + 1), strict=True))
                @ weights["out"][head]
            )
    return out


def experts(x: np.ndarray, weights: Mapping[str, np.ndarray], per_token: int) -> np.ndarray:
    """Mixture of gated experts, softmax router, weights of the chosen ones normalised; one token at
    a time.
    """
    shares, chosen, _ = numpy_experts.route(x @ weights["router"], per_token)
    matrices = (weights[name] for name in ("up", "down", "gate"))
    return numpy_experts.visit(x, shares, chosen, *matrices)[0]


def decoder(
    tokens: np.ndarray,
    params: Mapping[str, Any],
    *,
    theta: float,
    epsilon: float,
    window: int = 0,
    per_token: int = 0,
) -> np.ndarray:
    """Logits [seq, vocab] of an untied decoder with RMS norms and SwiGLU, for tokens [seq]."""
    x = params["embedding"][tokens]
    stacks = (
        list(params["layers"]["blocks"].values())
        if "blocks" in params["layers"]
        else [params["layers"]]
    )
    for layer in range(len(stacks[0]["attention_norm"]["scale"])):
        for stack in stacks:
            block = {room: {name: w[layer] for name, w in stack[room].items()} for room in stack}
            x = x + attention(
                rms(x, block["attention_norm"]["scale"], epsilon), block["attention"], theta, window
            )
            normal = rms(x, block["mlp_norm"]["scale"], epsilon)
            if "experts" in block:
                x = x + experts(normal, block["experts"], per_token)
            else:
                x = (
                    x
                    + (silu(normal @ block["mlp"]["gate"]) * (normal @ block["mlp"]["up"]))
                    @ block["mlp"]["down"]
                )
    return rms(x, params["norm"]["scale"], epsilon) @ params["head"]
