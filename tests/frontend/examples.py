"""Steps as people write them: several models, losses and optimizers in one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS, WIDE, VOCAB, SEQ = 16, 32, 24, 8
State = dict[str, Any]
Batch = dict[str, Any]
#: `jax.value_and_grad`, or that of shardlib.
ValueAndGrad = Callable[..., Callable[..., Any]]


@dataclass(frozen=True)
class Example:
    """A step, its first state and a batch."""

    init: Callable[[jax.Array], State]
    step: Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]
    batch: Batch
    batch_axes: Any = None


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (ROWS, SEQ)).astype(np.int32)


def mlp_init(key: jax.Array, *widths: int) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {"w": jax.random.normal(k, (a, b)) * a**-0.5, "b": jnp.zeros(b)}
        for k, a, b in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def mlp(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def lm_init(key: jax.Array) -> State:
    keys = jax.random.split(key, 6)

    def normal(number: int, *shape: int) -> jax.Array:
        return jax.random.normal(keys[number], shape) * shape[-2] ** -0.5

    return {
        "embed": normal(0, VOCAB, WIDE),
        "qkv": normal(1, 2, WIDE, 3 * WIDE),
        "out": normal(2, 2, WIDE, WIDE),
        "up": normal(3, 2, WIDE, 2 * WIDE),
        "down": normal(4, 2, 2 * WIDE, WIDE),
        "scale": jnp.ones((2, WIDE)),
        "head": normal(5, WIDE, VOCAB),
    }


def lm(params: State, ids: jax.Array) -> jax.Array:
    x = params["embed"][ids]

    def layer(x: jax.Array, w: State) -> tuple[jax.Array, None]:
        h = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w["scale"]
        q, k, v = jnp.split(h @ w["qkv"], 3, -1)
        scores = jnp.einsum("bsd,btd->bst", q, k) * WIDE**-0.5
        seen = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool))
        mixed = jnp.einsum("bst,btd->bsd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)
        x = x + mixed @ w["out"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    layers = {name: params[name] for name in ("qkv", "out", "up", "down", "scale")}
    return jax.lax.scan(layer, x, layers)[0] @ params["head"]


def nll(logits: jax.Array, ids: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])


def unit(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def language_model(value_and_grad: ValueAndGrad = jax.value_and_grad) -> Example:
    """One model, gradients clipped by their norm."""
    # Adam's first update is the sign of the gradient: a large eps keeps rounding out of it.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))

    def init(key: jax.Array) -> State:
        params = lm_init(key)
        return {"params": params, "opt": optimizer.init(params), "steps": jnp.zeros((), jnp.int32)}

    def loss(params: State, batch: Batch) -> jax.Array:
        return nll(lm(params, batch["ids"]), batch["ids"]).mean()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        value, gradients = value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "steps": state["steps"] + 1}, {"loss": value}

    return Example(init, step, {"ids": tokens(0)})


def gan(value_and_grad: ValueAndGrad = jax.value_and_grad) -> Example:
    """Two models and two optimizers, of which one works in every second step."""
    make, judge = optax.adam(1e-3, b1=0.5), optax.rmsprop(1e-3)

    def init(key: jax.Array) -> State:
        a, b = jax.random.split(key)
        g, d = mlp_init(a, 8, WIDE, WIDE, 16), mlp_init(b, 16, WIDE, WIDE, 1)
        return {
            "g": g,
            "d": d,
            "make": make.init(g),
            "judge": judge.init(d),
            "steps": jnp.zeros((), jnp.int32),
        }

    def judged(d: Any, batch: Batch, g: Any) -> jax.Array:
        both = jnp.concatenate([batch["real"], mlp(g, batch["noise"])])
        real, fake = jnp.split(mlp(d, both)[:, 0], 2)
        return jax.nn.softplus(-real).mean() + jax.nn.softplus(fake).mean()

    def made(g: Any, noise: jax.Array, d: Any) -> jax.Array:
        return jax.nn.softplus(-mlp(d, mlp(g, noise))[:, 0]).mean()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        d_loss, gradients = value_and_grad(judged)(state["d"], batch, state["g"])
        updates, judging = judge.update(gradients, state["judge"], state["d"])
        d = optax.apply_updates(state["d"], updates)

        def train(_: None) -> tuple[Any, Any, jax.Array]:
            loss, gradients = value_and_grad(made)(state["g"], batch["noise"], d)
            updates, making = make.update(gradients, state["make"])
            return optax.apply_updates(state["g"], updates), making, loss

        g, making, g_loss = jax.lax.cond(
            state["steps"] % 2 == 1, train, lambda _: (state["g"], state["make"], 0.0), None
        )
        new = {"g": g, "d": d, "make": making, "judge": judging, "steps": state["steps"] + 1}
        return new, {"d": d_loss, "g": g_loss}

    return Example(init, step, {"real": drawn(1, ROWS, 16), "noise": drawn(2, ROWS, 8)})


def distillation(value_and_grad: ValueAndGrad = jax.value_and_grad) -> Example:
    """A frozen teacher."""
    optimizer = optax.adamw(1e-2, eps=1e-3)

    def init(key: jax.Array) -> State:
        a, b = jax.random.split(key)
        student = lm_init(a)
        return {"student": student, "teacher": lm_init(b), "opt": optimizer.init(student)}

    def loss(student: State, batch: Batch) -> jax.Array:
        logits = lm(student, batch["ids"])
        near = optax.kl_divergence(jax.nn.log_softmax(logits / 2), batch["wanted"]).mean() * 4
        return near + nll(logits, batch["ids"]).mean() / 2

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        wanted = jax.nn.softmax(lm(state["teacher"], batch["ids"]) / 2)
        given = {**batch, "wanted": wanted}
        value, gradients = value_and_grad(loss)(state["student"], given)
        updates, opt = optimizer.update(gradients, state["opt"], state["student"])
        student = optax.apply_updates(state["student"], updates)
        return {**state, "student": student, "opt": opt}, {"loss": value}

    return Example(init, step, {"ids": tokens(3)})


def dpo(value_and_grad: ValueAndGrad = jax.value_and_grad) -> Example:
    """Preferences, with adapters over a reference model that stays."""
    optimizer = optax.adam(1e-2)

    def init(key: jax.Array) -> State:
        a, b = jax.random.split(key)
        lora = {
            "a": jax.random.normal(b, (2, WIDE, 4)) * WIDE**-0.5,
            "b": jnp.full((2, 4, 2 * WIDE), 1e-2),
        }
        return {"base": lm_init(a), "lora": lora, "opt": optimizer.init(lora)}

    def likely(params: State, ids: jax.Array) -> jax.Array:
        return -nll(lm(params, ids), ids).sum(-1)

    def loss(lora: State, batch: Batch, base: State) -> tuple[jax.Array, dict[str, jax.Array]]:
        adapted = {**base, "up": base["up"] + lora["a"] @ lora["b"]}
        better, worse = (
            likely(adapted, batch[name]) - likely(base, batch[name])
            for name in ("chosen", "rejected")
        )
        margin = 0.1 * (better - worse)
        return -jax.nn.log_sigmoid(margin).mean(), {"right": (margin > 0).mean()}

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        marked = value_and_grad(loss, has_aux=True)
        (value, aux), gradients = marked(state["lora"], batch, state["base"])
        updates, opt = optimizer.update(gradients, state["opt"])
        lora = optax.apply_updates(state["lora"], updates)
        return {**state, "lora": lora, "opt": opt}, {"loss": value, **aux}

    return Example(init, step, {"chosen": tokens(4), "rejected": tokens(5)})


def ppo(value_and_grad: ValueAndGrad = jax.value_and_grad) -> Example:
    """A rollout of a toy environment and several epochs over it, in one step."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))
    push = jnp.asarray(drawn(6, 4, 3)) / 4

    def init(key: jax.Array) -> State:
        a, b, c = jax.random.split(key, 3)
        nets = {"actor": mlp_init(a, 3, WIDE, 4), "critic": mlp_init(b, 3, WIDE, 1)}
        return {"nets": nets, "opt": optimizer.init(nets), "key": c}

    def loss(nets: State, batch: Batch) -> jax.Array:
        value = mlp(nets["critic"], batch["seen"])[..., 0]
        new = jax.nn.log_softmax(mlp(nets["actor"], batch["seen"]))
        picked = jnp.take_along_axis(new, batch["chosen"][..., None], -1)[..., 0]
        ratio, gain = jnp.exp(picked - batch["logp"]), batch["gain"]
        clipped = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
        return -clipped.mean() + 0.5 * ((value - batch["returns"]) ** 2).mean()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        key, draw = jax.random.split(state["key"])

        def act(where: jax.Array, draw: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
            logits = mlp(state["nets"]["actor"], where)
            chosen = jax.random.categorical(draw, logits)
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen[:, None], 1)[:, 0]
            after = 0.9 * where + push[chosen]
            return after, (where, chosen, logp, -(after**2).sum(-1))

        _, (seen, chosen, logp, reward) = jax.lax.scan(
            act, batch["start"], jax.random.split(draw, 6)
        )
        returns = jax.lax.scan(
            lambda ahead, now: (now + 0.9 * ahead,) * 2, reward[0] * 0, reward, reverse=True
        )[1]
        gain = returns - mlp(state["nets"]["critic"], seen)[..., 0]
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        rollout = {"seen": seen, "chosen": chosen, "logp": logp, "gain": gain, "returns": returns}

        def epoch(carry: Any, _: None) -> tuple[Any, jax.Array]:
            nets, opt = carry
            value, gradients = value_and_grad(loss)(nets, rollout)
            updates, opt = optimizer.update(gradients, opt, nets)
            return (optax.apply_updates(nets, updates), opt), value

        (nets, opt), losses = jax.lax.scan(epoch, (state["nets"], state["opt"]), length=3)
        return {"nets": nets, "opt": opt, "key": key}, {
            "loss": losses.mean(),
            "reward": reward.mean(),
        }

    return Example(init, step, {"start": drawn(7, ROWS, 3)})


def contrastive(value_and_grad: ValueAndGrad = jax.value_and_grad) -> Example:
    """Two views of every row against a queue of earlier ones, and a slow encoder."""
    optimizer = optax.sgd(1e-2, momentum=0.9)

    def init(key: jax.Array) -> State:
        a, b = jax.random.split(key)
        encoder = mlp_init(a, 16, WIDE, 8)
        return {
            "encoder": encoder,
            "slow": jax.tree.map(jnp.copy, encoder),
            "opt": optimizer.init(encoder),
            "queue": unit(jax.random.normal(b, (4 * ROWS, 8))),
        }

    def loss(encoder: Any, batch: Batch, queue: jax.Array) -> jax.Array:
        queries = unit(mlp(encoder, batch["one"]))
        right = (queries * batch["keys"]).sum(-1, keepdims=True)
        logits = jnp.concatenate([right, queries @ queue.T], -1) / 0.1
        return -jax.nn.log_softmax(logits)[:, 0].mean()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        keys = unit(mlp(state["slow"], batch["two"]))
        given = {"one": batch["one"], "keys": keys}
        value, gradients = value_and_grad(loss)(state["encoder"], given, state["queue"])
        updates, opt = optimizer.update(gradients, state["opt"])
        encoder = optax.apply_updates(state["encoder"], updates)
        slow = optax.incremental_update(encoder, state["slow"], 0.05)
        queue = jnp.concatenate([keys, state["queue"][: -len(keys)]])
        return {"encoder": encoder, "slow": slow, "opt": opt, "queue": queue}, {"loss": value}

    return Example(init, step, {"one": drawn(8, ROWS, 16), "two": drawn(9, ROWS, 16)})


def two_towers(value_and_grad: ValueAndGrad = jax.value_and_grad) -> Example:
    """Users and items by their embeddings, with a softmax over sampled items."""
    optimizer = optax.adagrad(0.1)

    def init(key: jax.Array) -> State:
        a, b, c, d = jax.random.split(key, 4)
        params = {
            "users": jax.random.normal(a, (64, 16)) / 4,
            "items": jax.random.normal(b, (96, 16)) / 4,
            "user": mlp_init(c, 16, WIDE, 8),
            "item": mlp_init(d, 16, WIDE, 8),
        }
        return {"params": params, "opt": optimizer.init(params)}

    def loss(params: State, batch: Batch, sampled: jax.Array) -> jax.Array:
        user = mlp(params["user"], params["users"][batch["user"]])
        item = mlp(params["item"], params["items"][batch["item"]])
        others = mlp(params["item"], params["items"][sampled])
        right = (user * item).sum(-1, keepdims=True)
        logits = jnp.concatenate([right, user @ others.T - jnp.log(24 / 96)], -1)
        return -jax.nn.log_softmax(logits)[:, 0].mean()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        rows = {name: batch[name] for name in ("user", "item")}
        value, gradients = value_and_grad(loss)(state["params"], rows, batch["sampled"])
        updates, opt = optimizer.update(gradients, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {
            "loss": value
        }

    draw = np.random.default_rng(10)
    return Example(
        init,
        step,
        {
            "user": draw.integers(0, 64, ROWS).astype(np.int32),
            "item": draw.integers(0, 96, ROWS).astype(np.int32),
            "sampled": draw.integers(0, 96, 24).astype(np.int32),
        },
        {"user": ("batch",), "item": ("batch",), "sampled": (None,)},
    )


def meta_learning(value_and_grad: ValueAndGrad = jax.value_and_grad) -> Example:
    """An inner loop of gradient steps for each task, and gradients through it."""
    optimizer = optax.adam(1e-2)

    def init(key: jax.Array) -> State:
        params = mlp_init(key, 4, WIDE, 1)
        return {"params": params, "opt": optimizer.init(params)}

    def fit(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((mlp(params, x)[:, 0] - y) ** 2).mean()

    def task(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for _ in range(2):
            gradients = jax.grad(fit)(params, x[:4], y[:4])
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return fit(params, x[4:], y[4:])

    def loss(params: Any, batch: Batch) -> jax.Array:
        return jax.vmap(task, (None, 0, 0))(params, batch["x"], batch["y"]).mean()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        value, gradients = value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(gradients, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {
            "loss": value
        }

    return Example(init, step, {"x": drawn(11, ROWS, 8, 4), "y": drawn(12, ROWS, 8)})


def ema_teacher(value_and_grad: ValueAndGrad = jax.value_and_grad) -> Example:
    """A teacher that follows its student slowly, and random numbers in the state."""
    optimizer = optax.chain(optax.scale_by_adam(eps=1e-3), optax.scale(-1e-2))

    def init(key: jax.Array) -> State:
        a, b = jax.random.split(key)
        params = lm_init(a)
        return {
            "student": params,
            "teacher": jax.tree.map(jnp.copy, params),
            "opt": optimizer.init(params),
            "key": b,
        }

    def loss(student: State, batch: Batch) -> jax.Array:
        found = lm(student, jnp.where(batch["hidden"], 0, batch["ids"]))
        far = (found - batch["wanted"]) ** 2
        return jnp.where(batch["hidden"][..., None], far, 0).mean()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        key, draw = jax.random.split(state["key"])
        hidden = jax.random.bernoulli(draw, 0.3, batch["ids"].shape)
        given = {**batch, "hidden": hidden, "wanted": lm(state["teacher"], batch["ids"])}
        value, gradients = value_and_grad(loss)(state["student"], given)
        updates, opt = optimizer.update(gradients, state["opt"])
        student = optax.apply_updates(state["student"], updates)
        teacher = optax.incremental_update(student, state["teacher"], 0.02)
        return {"student": student, "teacher": teacher, "opt": opt, "key": key}, {"loss": value}

    return Example(init, step, {"ids": tokens(13)})


EXAMPLES: dict[str, Callable[..., Example]] = {
    one.__name__: one
    for one in (
        language_model,
        gan,
        distillation,
        dpo,
        ppo,
        contrastive,
        two_towers,
        meta_learning,
        ema_teacher,
    )
}
