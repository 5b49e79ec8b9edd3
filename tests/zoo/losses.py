"""Losses that are put together at random: what is computed of each token, how tokens are weighted
and reduced, what is added, and whether rows meet on the way.

drawn = draw(random.Random(7))
drawn.name, drawn.coupled
drawn.loss(params(0), batch(0))
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS, LENGTH, WIDTH, HIDDEN, LAYERS, CLASSES = 16, 4, 8, 16, 4, 6
AXES: Mapping[str, tuple[str, ...]] = {
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
    "head": ("embed", "vocab"),
    "gain": ("embed",),
}

Arrays = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A loss.

    Attributes:
        name: what it is made of.
        loss: (params, batch) -> scalar.
        coupled: whether rows meet in it before the end.
    """

    name: str
    loss: Callable[[Arrays, Arrays], Any]
    coupled: bool


def params(key: Any) -> dict[str, jax.Array]:
    """Parameters from a random key."""
    up, down, head = jax.random.split(key, 3)
    return {
        "up": jax.random.normal(up, (LAYERS, WIDTH, HIDDEN)) * 0.3,
        "down": jax.random.normal(down, (LAYERS, HIDDEN, WIDTH)) * 0.3,
        "head": jax.random.normal(head, (WIDTH, CLASSES)) * 0.4,
        "gain": jnp.ones(WIDTH),
    }


def batch(seed: int) -> dict[str, np.ndarray]:
    """A batch whose masks are uneven: the first rows have no weight at all."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((ROWS, LENGTH)) < np.linspace(0.1, 1, ROWS)[:, None]).astype(np.float32)
    mask[::4] = 0  # one of four microbatches has no weight
    return {
        "x": rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32),
        "y": rng.integers(0, CLASSES, (ROWS, LENGTH)).astype(np.int32),
        "mask": mask,
        "weight": np.linspace(0.1, 3, ROWS).astype(np.float32) ** 2,
        "target": rng.normal(size=(ROWS, LENGTH)).astype(np.float32),
    }


def hidden(p: Arrays, x: Any) -> Any:
    """Layers under a scan."""

    def layer(h: Any, w: Any) -> tuple[Any, None]:
        return h + jnp.tanh(h @ w[0]) @ w[1], None

    return jax.lax.scan(layer, x, (p["up"], p["down"]))[0] * p["gain"]


def _cross_entropy(h: Any, p: Arrays, b: Arrays) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(h @ p["head"], b["y"])


def _squared(h: Any, p: Arrays, b: Arrays) -> Any:
    return (h @ p["head"][:, 0] - b["target"]) ** 2


def _huber(h: Any, p: Arrays, b: Arrays) -> Any:
    return optax.huber_loss(h @ p["head"][:, 1], b["target"])


def _focal(h: Any, p: Arrays, b: Arrays) -> Any:
    each = _cross_entropy(h, p, b)
    return (1 - jnp.exp(-each)) ** 2 * each


def _ranking(h: Any, p: Arrays, b: Arrays) -> Any:
    score = h @ p["head"][:, 0]
    return jnp.where(
        b["target"][:, :, None] > b["target"][:, None, :],
        jax.nn.softplus(score[:, None, :] - score[:, :, None]),
        0,
    ).mean(-1)


PER_TOKEN = {
    "cross-entropy": _cross_entropy,
    "squared": _squared,
    "huber": _huber,
    "focal": _focal,
    "ranking": _ranking,
}


def _class_means(each: Any, b: Arrays) -> Any:
    flat, labels = each.reshape(-1), b["y"].reshape(-1)
    return (
        jnp.zeros(CLASSES).at[labels].add(flat)
        / jnp.maximum(jnp.zeros(CLASSES).at[labels].add(1.0), 1)
    ).mean()


def _scanned_rows(each: Any, b: Arrays) -> Any:
    return jax.lax.scan(lambda total, row: (total + row.mean(), None), 0.0, each)[0] / each.shape[0]


def _chunks(each: Any, b: Arrays) -> Any:
    pieces = [
        jnp.moveaxis(leaf.reshape(leaf.shape[0], 2, LENGTH // 2), 1, 0)
        for leaf in (each, jnp.asarray(b["mask"]))
    ]
    total, weight = jax.lax.scan(
        lambda sums, one: ((sums[0] + (one[0] * one[1]).sum(), sums[1] + one[1].sum()), None),
        (0.0, 0.0),
        tuple(pieces),
    )[0]
    return total / jnp.maximum(weight, 1)


REDUCTIONS: Mapping[str, Callable[[Any, Arrays], Any]] = {
    "mean": lambda each, b: each.mean(),
    "sum": lambda each, b: each.sum() / 40,
    "sum over rows": lambda each, b: each.sum() / each.shape[0],
    "over the root of rows": lambda each, b: each.sum() / each.shape[0] ** 0.5,
    "masked mean": lambda each, b: (each * b["mask"]).sum() / b["mask"].sum(),
    "masked mean, at least one": (
        lambda each, b: (each * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1.0)
    ),
    "where": lambda each, b: jnp.mean(each, where=b["mask"] > 0),
    "masked mean of rows": (
        lambda each, b: ((each * b["mask"]).sum(1) / jnp.maximum(b["mask"].sum(1), 1)).mean()
    ),
    "average by row": lambda each, b: jnp.average(each.mean(-1), weights=b["weight"]),
    "weights of sum one": lambda each, b: (each.mean(-1) * (b["weight"] / b["weight"].sum())).sum(),
    "flat masked mean": (
        lambda each, b: (each.reshape(-1) * (b["mask"].reshape(-1) / b["mask"].sum())).sum()
    ),
    "tokens and rows": (
        lambda each, b: (
            (each * b["mask"] * b["weight"][:, None]).sum()
            / (b["mask"] * b["weight"][:, None]).sum()
        )
    ),
    "normalised weights": (
        lambda each, b: (
            each.mean(-1) * (b["weight"] - b["weight"].mean()) / (b["weight"].std() + 1e-6)
        ).mean()
    ),
    "means of classes": _class_means,
    "scan over rows": _scanned_rows,
    "masked chunks": _chunks,
    "longest row": lambda each, b: (each * b["mask"]).sum() / b["mask"].sum(1).max(),
}
EXTRAS: Mapping[str, Callable[[Any, Any, Arrays, Arrays], Any]] = {
    "": lambda each, h, p, b: 0.0,
    "decay": lambda each, h, p, b: 0.05 * sum((leaf**2).sum() for leaf in p.values()),
    "activations": lambda each, h, p, b: 0.01 * (h**2).mean(),
    "a masked term": (
        lambda each, h, p, b: (
            0.1 * ((h**2).mean(-1) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1)
        )
    ),
    "a sum": lambda each, h, p, b: 0.001 * jnp.abs(h).sum(),
    "an average": lambda each, h, p, b: 0.1 * jnp.average((h**2).mean((1, 2)), weights=b["weight"]),
}


def _contrastive(h: Any) -> Any:
    a, b = h[:, 0], h[:, 1]
    return optax.softmax_cross_entropy_with_integer_labels(a @ b.T, jnp.arange(a.shape[0])).mean()


COUPLINGS: Mapping[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "batch statistics": lambda each, h: (
        each,
        ((h - h.mean(0)) / (h.std(0) + 1.0)).sum(-1).mean() + (h / (h.std(0) + 1.0)).mean(),
    ),
    "contrastive": lambda each, h: (each, 0.1 * _contrastive(h)),
    "hardest rows": lambda each, h: (
        jnp.sort(each.mean(-1))[-4:][:, None] + jnp.zeros((1, LENGTH)),
        0.0,
    ),
    "exponential of the mean": lambda each, h: (each, jnp.exp(0.1 * each.mean())),
    "neighbours": lambda each, h: (each, ((h[1:] - h[:-1]) ** 2).mean()),
    "temperature": lambda each, h: (
        each,
        jax.nn.logsumexp(each.mean(-1) / jnp.sqrt(jnp.mean(each)), axis=0),
    ),
    "variance": lambda each, h: (each, jax.nn.relu(1 - jnp.sqrt(h.var(0) + 1e-4)).mean()),
    "first row": lambda each, h: (each, each[0].mean()),
}


def draw(rng: random.Random) -> Drawn:
    """A loss; one in six is coupled."""
    token, reduction, extra = (
        rng.choice(list(PER_TOKEN)),
        rng.choice(list(REDUCTIONS)),
        rng.choice(list(EXTRAS)),
    )
    coupling = rng.choice(list(COUPLINGS)) if rng.random() < 1 / 6 else ""
    remat = rng.random() < 0.25

    def loss(p: Arrays, b: Arrays) -> Any:
        h = hidden(p, b["x"])
        each = (jax.checkpoint(PER_TOKEN[token]) if remat else PER_TOKEN[token])(h, p, b)
        kept, more = COUPLINGS[coupling](each, h) if coupling else (each, 0.0)
        reduced = REDUCTIONS[reduction](kept, b) if kept is each else kept.mean()
        return reduced + EXTRAS[extra](each, h, p, b) + more

    return Drawn(
        name=" + ".join(
            filter(None, (token, reduction, extra, coupling, "rematerialised" if remat else ""))
        ),
        loss=loss,
        coupled=bool(coupling),
    )
