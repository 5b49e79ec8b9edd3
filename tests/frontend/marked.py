"""The steps of `examples` with their losses marked; with `jax.value_and_grad` they are plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import shardlib
from tests.frontend import examples
from tests.frontend.examples import WIDE, Batch, Example, State, drawn, lm, mlp, mlp_init, nll

#: `shardlib.value_and_grad`, or JAX's.
ValueAndGrad = Callable[..., Callable[..., Any]]


def language_model(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """One loss, gradients clipped by their norm."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))

    def loss(params: State, batch: Batch) -> jax.Array:
        return nll(lm(params, batch["ids"]), batch["ids"]).mean()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        value, gradients = value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "steps": state["steps"] + 1}, {"loss": value}

    plain = examples.language_model()
    return Example(plain.init, step, plain.batch)


def distillation(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """A teacher outside of the loss, which gets what it says of every row."""
    optimizer = optax.adamw(1e-2, eps=1e-3)

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

    plain = examples.distillation()
    return Example(plain.init, step, plain.batch)


def gan(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """Two losses, of which the second gets the first one's updated weights, in a branch."""
    make, judge = optax.adam(1e-3, b1=0.5), optax.rmsprop(1e-3)

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

    plain = examples.gan()
    return Example(plain.init, step, plain.batch)


def dpo(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """Adapters over a reference model, which is among the rest, and an auxiliary result."""
    optimizer = optax.adam(1e-2)

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

    plain = examples.dpo()
    return Example(plain.init, step, plain.batch)


def ppo(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """A loss in a loop of epochs, over a rollout that the step makes."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))
    push = jnp.asarray(drawn(6, 4, 3)) / 4

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

    plain = examples.ppo()
    return Example(plain.init, step, plain.batch)


def trained(
    value_and_grad: ValueAndGrad, init: Callable[[jax.Array], Any], loss: Any, batch: Batch
) -> Example:
    """One loss under AdamW."""
    optimizer = optax.adamw(1e-2, eps=1e-3)

    def start(key: jax.Array) -> State:
        params = init(key)
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        value, gradients = value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": value}

    return Example(start, step, batch)


def unit(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def contrastive(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """Keys of a slow encoder outside of the loss, and a queue of earlier ones among the rest."""
    optimizer = optax.sgd(1e-2, momentum=0.9)

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

    plain = examples.contrastive()
    return Example(plain.init, step, plain.batch)


def two_towers(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """Sampled items, which are the same for all rows, among the rest."""
    optimizer = optax.adagrad(0.1)

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

    plain = examples.two_towers()
    return Example(plain.init, step, plain.batch, plain.batch_axes)


def meta_learning(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """Gradient steps for each task inside of the loss."""
    optimizer = optax.adam(1e-2)

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

    plain = examples.meta_learning()
    return Example(plain.init, step, plain.batch)


def ema_teacher(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """A teacher and random numbers outside of the loss, both of every row."""
    optimizer = optax.chain(optax.scale_by_adam(eps=1e-3), optax.scale(-1e-2))

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

    plain = examples.ema_teacher()
    return Example(plain.init, step, plain.batch)


def in_batch(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """Two views of every row, of which each meets all other rows of the batch."""

    def loss(encoder: Any, batch: Batch) -> jax.Array:
        one, two = (unit(mlp(encoder, batch[name])) for name in ("one", "two"))
        near = one @ two.T / 0.5
        right = jnp.diagonal(near)
        found = [jax.nn.logsumexp(near, at) - right for at in (0, 1)]
        return (found[0].mean() + found[1].mean()) / 2

    return trained(
        value_and_grad,
        lambda key: mlp_init(key, 16, WIDE, 8),
        loss,
        examples.contrastive().batch,
    )


def normals(key: jax.Array, **shapes: tuple[int, ...]) -> State:
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(one, shape) * shape[-2] ** -0.5
        for one, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def attending(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """Layers that call `shardlib.attention`."""

    def init(key: jax.Array) -> State:
        square = dict.fromkeys(("q", "k", "v", "o"), (2, 32, 32))
        return normals(key, embed=(24, 32), **square, up=(2, 32, 64), down=(2, 64, 32))

    def loss(params: State, batch: Batch) -> jax.Array:
        x = params["embed"][batch["ids"]]

        def layer(x: jax.Array, w: State) -> tuple[jax.Array, None]:
            q, k, v = ((x @ w[name]).reshape(*x.shape[:2], 4, 8) for name in "qkv")
            x = x + shardlib.attention(q, k, v, causal=True).reshape(x.shape) @ w["o"]
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

        layers = {name: params[name] for name in params if name != "embed"}
        logits = jax.lax.scan(layer, x, layers)[0] @ params["embed"].T
        return nll(logits, batch["ids"]).mean()

    return trained(value_and_grad, init, loss, {"ids": examples.tokens(0)})


def experts(value_and_grad: ValueAndGrad = shardlib.value_and_grad) -> Example:
    """Tokens that visit two of four experts."""

    def init(key: jax.Array) -> State:
        wide = dict.fromkeys(("up", "gate"), (4, 32, 64))
        return normals(key, enter=(16, 32), router=(32, 4), **wide, down=(4, 64, 32))

    def loss(params: State, batch: Batch) -> jax.Array:
        x = jnp.tanh(batch["x"] @ params["enter"])
        routed = shardlib.route(x @ params["router"], 2)
        weights = (params[name] for name in ("up", "down", "gate"))
        found, _ = shardlib.visit(x, routed.weights, routed.chosen, *weights)
        return ((found.mean(-1) - batch["y"]) ** 2).mean()

    batch = {"x": drawn(1, examples.ROWS, 8, 16), "y": drawn(2, examples.ROWS, 8)}
    return trained(value_and_grad, init, loss, batch)


MARKED: dict[str, Callable[..., Example]] = {
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
        attending,
        experts,
    )
}
