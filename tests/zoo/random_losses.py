"""Losses that draw random numbers for the rows of a batch: where the key comes from, what is drawn,
and where it stands are drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardlib
from tests.zoo.parity import capture

ROWS, SEQ, EMBED, LAYERS = 16, 4, 8, 4
Key = Any
Noise = Callable[[Key, jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A loss.

    Attributes:
        name: where its key is from, what it draws, and where.
        loss: (params, batch) -> scalar.
        batch: arrays.
        axes: logical axes of the batch.
        exact: whether every draw can be had by the positions of rows; otherwise several
            microbatches may be refused.
        layers: whether it has layers in a loop, for stages and remat.
    """

    name: str
    loss: Callable[[Any, Any], jax.Array]
    batch: dict[str, Any]
    axes: dict[str, Any]
    exact: bool
    layers: bool


def params(key: Key | None = None) -> dict[str, jax.Array]:
    """Of all losses."""
    layers = jnp.sin(1.3 * jnp.arange(LAYERS * EMBED * EMBED)).reshape(LAYERS, EMBED, EMBED)
    return {"layers": 0.3 * layers, "out": jnp.cos(jnp.arange(EMBED * 2.0)).reshape(EMBED, 2)}


#: What is drawn: (key, activations [rows, ...]) -> activations.
NOISES: dict[str, Noise] = {
    "bernoulli": lambda k, x: jnp.where(jax.random.bernoulli(k, 0.8, x.shape), x / 0.8, 0),
    "drop path": lambda k, x: jnp.where(jax.random.bernoulli(k, 0.8, (len(x), 1, 1)), x, 0),
    "shared mask": lambda k, x: jnp.where(jax.random.bernoulli(k, 0.8, x.shape[1:]), x, 0),
    "normal": lambda k, x: x + 0.1 * jax.random.normal(k, x.shape),
    "half normal": lambda k, x: x + 0.1 * jax.random.normal(k, x.shape, jnp.bfloat16),
    "truncated normal": lambda k, x: x * jax.random.truncated_normal(k, -1.0, 1.0, x.shape),
    "uniform": lambda k, x: x * jax.random.uniform(k, x.shape, minval=0.5),
    "gumbel": lambda k, x: x + 0.1 * jax.random.gumbel(k, x.shape),
    "categorical": lambda k, x: x + jax.nn.one_hot(jax.random.categorical(k, x), x.shape[-1]),
    "randint": lambda k, x: x * jax.random.randint(k, x.shape, 0, 3),
    "bits": lambda k, x: x * (jax.random.bits(k, x.shape, jnp.uint8) & 1),
    "exponential": lambda k, x: x * jax.random.exponential(k, (len(x), 1, 1)),
    "choice": lambda k, x: x * jax.random.choice(k, jnp.array([0.5, 1.0, 2.0]), (len(x), 1, 1)),
    "permutation": lambda k, x: x + 0.1 * jax.random.permutation(k, len(x))[:, None, None],
    "poisson": lambda k, x: x * jax.random.poisson(k, 1.0, (len(x), 1, 1)),
    "gamma": lambda k, x: x * jax.random.gamma(k, 2.0, (len(x), 1, 1)),
}
#: Those whose rows are drawn together.
TOGETHER = frozenset({"permutation", "poisson", "gamma"})


def scanned(params: Any, x: jax.Array, key: Key, noise: Noise) -> jax.Array:
    def layer(x: jax.Array, given: Any) -> Any:
        return x + noise(given[1], jnp.tanh(x @ given[0])), None

    return jax.lax.scan(layer, x, (params["layers"], jax.random.split(key, LAYERS)))[0]


def folded(params: Any, x: jax.Array, key: Key, noise: Noise) -> jax.Array:
    @jax.checkpoint
    def layer(carry: Any, w: jax.Array) -> Any:
        x, number = carry
        return (x + noise(jax.random.fold_in(key, number), jnp.tanh(x @ w)), number + 1), None

    return jax.lax.scan(layer, (x, 0), params["layers"])[0][0]


def unrolled(params: Any, x: jax.Array, key: Key, noise: Noise) -> jax.Array:
    for number, w in enumerate(params["layers"]):
        x = x + noise(jax.random.fold_in(key, number), jnp.tanh(x @ w))
    return x


def layered(params: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])[0]


def augmented(params: Any, x: jax.Array, key: Key, noise: Noise) -> jax.Array:
    return layered(params, noise(key, x))


def by_row(params: Any, x: jax.Array, key: Key, noise: Noise) -> jax.Array:
    keys = jax.random.split(key, len(x))
    x = jax.vmap(lambda k, row: noise(k, row[None])[0])(keys, x)
    return layered(params, x)


def by_token(params: Any, x: jax.Array, key: Key, noise: Noise) -> jax.Array:
    x = noise(key, x.reshape(-1, 1, EMBED)).reshape(x.shape)
    return layered(params, x)


def chosen(params: Any, x: jax.Array, key: Key, noise: Noise) -> jax.Array:
    x = jax.lax.cond(params["out"][0, 0] > 0, lambda: noise(key, x), lambda: x)
    return layered(params, x)


PLACES = (scanned, folded, unrolled, augmented, by_row, by_token, chosen)
SOURCES = ("closed over", "made", "seed", "step", "key", "keys of rows")


def draw(rng: random.Random) -> Drawn:
    """A loss and its batch."""
    source, what, place = rng.choice(SOURCES), rng.choice([*NOISES]), rng.choice(PLACES)
    raw, impl = rng.random() < 0.4, "rbg" if rng.random() < 0.1 else "threefry2x32"
    seed, noise = rng.randrange(1000), NOISES[what]
    new = jax.random.PRNGKey if raw else jax.random.key
    captured = new(seed, impl=impl)
    rows = np.random.default_rng(seed)
    batch: dict[str, Any] = {
        "x": rows.normal(size=(ROWS, SEQ, EMBED)).astype(np.float32),
        "y": rows.normal(size=(ROWS, SEQ, 2)).astype(np.float32),
    }
    axes: dict[str, Any] = dict.fromkeys(batch, ("batch", None, None))
    if source == "keys of rows":
        batch["key"], axes["key"] = jax.random.split(jax.random.key(seed), ROWS), ("batch",)
    elif source == "key":
        batch["key"], axes["key"] = captured, (None,) if raw else ()
    elif source in ("seed", "step"):
        batch[source], axes[source] = np.int32(seed), ()

    def key_of(batch: Any) -> Key:
        if source == "made":
            return new(seed, impl=impl)
        if source == "seed":
            return new(batch["seed"], impl=impl)
        if source == "step":
            return jax.random.fold_in(captured, batch["step"])
        return batch["key"] if source == "key" else captured

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        if source == "keys of rows":
            x = jax.vmap(lambda k, row: noise(k, row[None])[0])(batch["key"], x)
            x = layered(params, x)
        else:
            x = place(params, x, key_of(batch), noise)
        return jnp.mean((x @ params["out"] - batch["y"]) ** 2)

    where = "" if source == "keys of rows" else f", {place.__name__}"
    return Drawn(
        name=f"{source}, {what}{where}, {'integers' if raw else 'typed'}, {impl}",
        loss=loss,
        batch=batch,
        axes=axes,
        layers=source == "keys of rows" or place is not unrolled,
        exact=impl == "threefry2x32" and what not in TOGETHER,
    )


def program(drawn: Drawn, pin: dict[str, Any]) -> shardlib.Program:
    """The program of a loss under a plan; its optimizer keeps the gradients."""
    return shardlib.compile(
        shardlib.tree(params),
        drawn.loss,
        capture(),
        drawn.batch,
        batch_axes=drawn.axes,
        topology=f"cpu:{math.prod(pin['mesh'].values())}",
        pin=pin,
    )
