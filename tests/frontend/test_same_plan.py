"""The same model through `shardlib.compile` and through a step of its own has the same plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import shardlib

Model = tuple[dict[str, Any], Callable[[Any, Any], jax.Array], dict[str, Any]]
OPTIMIZER = optax.adamw(1e-3)


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def entropy(logits: jax.Array, ids: jax.Array) -> jax.Array:
    hot = jax.nn.one_hot(ids, logits.shape[-1])
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * hot, axis=-1))


def attended(p: Any, x: jax.Array, window: int | None = None) -> jax.Array:
    y, size = norm(x), x.shape[1]
    q, k, v = (jnp.einsum("bse,ehd->bshd", y, p[name]) for name in "qkv")
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    apart = jnp.arange(size)[:, None] - jnp.arange(size)[None]
    near = (apart >= 0) & (apart < (window or size))
    scores = jax.nn.softmax(jnp.where(near, scores, -1e30))
    return x + jnp.einsum("bhst,bthd,hde->bse", scores, v, p["o"])


def widened(p: Any, x: jax.Array) -> jax.Array:
    y = norm(x)
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def layer_shapes(*lead: int, embed: int = 512, heads: int = 8, wide: int = 2048) -> dict[str, Any]:
    width = embed // heads
    return {
        **{name: shape(*lead, embed, heads, width) for name in "qkv"},
        "o": shape(*lead, heads, width, embed),
        "gate": shape(*lead, embed, wide),
        "up": shape(*lead, embed, wide),
        "down": shape(*lead, wide, embed),
    }


def decoder(layers: Any, run: Callable[[Any, jax.Array], jax.Array], vocab: int = 4096) -> Model:
    params = {"table": shape(vocab, 512), "head": shape(512, vocab), "layers": layers}

    def loss(p: Any, batch: Any) -> jax.Array:
        x = run(p["layers"], p["table"][batch["ids"]])
        return entropy(norm(x) @ p["head"], batch["ids"])

    return params, loss, {"ids": shape(32, 256, dtype=jnp.int32)}


def perceptron() -> Model:
    widths = [256, *[4096, 512] * 3, 10]
    params = {
        f"w{at}": {"kernel": shape(a, b), "bias": shape(b)}
        for at, (a, b) in enumerate(itertools.pairwise(widths))
    }

    def loss(p: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for at in range(len(params)):
            x = jax.nn.relu(x @ p[f"w{at}"]["kernel"] + p[f"w{at}"]["bias"])
        return jnp.mean((x - batch["y"]) ** 2)

    return params, loss, {"x": shape(256, 256), "y": shape(256, 10)}


def written_out() -> Model:
    def run(layers: Any, x: jax.Array) -> jax.Array:
        for one in layers:
            x = widened(one, attended(one, x))
        return x

    return decoder([layer_shapes() for _ in range(4)], run)


def scanned() -> Model:
    def run(layers: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, one: (widened(one, attended(one, x)), None), x, layers)[0]

    return decoder(layer_shapes(4), run)


def local_and_global() -> Model:
    """Gemma's pattern: five layers with a window, then one without."""

    def run(layers: Any, x: jax.Array) -> jax.Array:
        for at, one in enumerate(layers):
            x = widened(one, attended(one, x, None if at % 6 == 5 else 64))
        return x

    return decoder([layer_shapes() for _ in range(8)], run)


def experts() -> Model:
    def mixed(p: Any, x: jax.Array) -> jax.Array:
        tokens = norm(x).reshape(-1, x.shape[-1])
        weights, chosen = jax.lax.top_k(jax.nn.softmax(tokens @ p["router"]), 2)
        y, _ = shardlib.visit(
            tokens[None], weights[None], chosen[None], p["up"], p["down"], p["gate"]
        )
        return x + y.reshape(x.shape)

    def run(layers: Any, x: jax.Array) -> jax.Array:
        for one in layers:
            x = mixed(one, attended(one, x))
        return x

    wide = {"gate": shape(8, 512, 1024), "up": shape(8, 512, 1024), "down": shape(8, 1024, 512)}
    return decoder([{**layer_shapes(), **wide, "router": shape(512, 8)} for _ in range(2)], run)


def convolutional() -> Model:
    """Three stages of two residual blocks, each half as large and twice as wide."""
    widths = (64, 128, 256)
    params: dict[str, Any] = {"stem": shape(3, 3, 3, 64), "head": shape(256, 100)}
    for stage, width in enumerate(widths):
        if stage:
            params[f"wider{stage}"] = shape(1, 1, widths[stage - 1], width)
        for block in range(2):
            params[f"block{stage}_{block}"] = {
                "up": shape(3, 3, width, width),
                "down": shape(3, 3, width, width),
            }

    def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(p: Any, batch: Any) -> jax.Array:
        x = conv(batch["image"], p["stem"])
        for stage in range(3):
            if stage:
                x = conv(x, p[f"wider{stage}"], 2)
            for block in range(2):
                one = p[f"block{stage}_{block}"]
                x = x + conv(jax.nn.relu(conv(x, one["up"])), one["down"])
        return entropy(x.mean((1, 2)) @ p["head"], batch["label"])

    return params, loss, {"image": shape(128, 32, 32, 3), "label": shape(128, dtype=jnp.int32)}


MODELS = {
    one.__name__: one
    for one in (perceptron, written_out, scanned, local_and_global, experts, convolutional)
}


def plans(model: Model, topology: str, pin: dict[str, Any], *, marked: bool = True) -> Any:
    """(plan of the loss, plan of the step)."""
    params, loss, batch = model
    init = shardlib.tree(
        lambda _: jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), params), None
    )
    value_and_grad = shardlib.value_and_grad if marked else jax.value_and_grad

    def step(state: Any, batch: Any) -> Any:
        value, gradients = value_and_grad(loss)(state["params"], batch)
        updates, opt = OPTIMIZER.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    state = {"params": params, "opt": jax.eval_shape(OPTIMIZER.init, params)}
    return (
        shardlib.plan(init, loss, OPTIMIZER, batch, topology=topology, pin=pin),
        shardlib.compile_step(state, step, batch, topology=topology, pin=pin, abstract=True).plan,
    )


def told(plan: Any) -> dict[str, Any]:
    """The decisions, but for rules, whose words are paths of the state; and what is sharded."""
    decisions = {name: one for name, one in plan.decisions.items() if name != "rules"}
    cut = sorted(
        (one.shape, str(one.compute), str(one.rest), str(one.gradient)) for one in plan.parameters
    )
    return {**decisions, "parameters": cut}


@pytest.mark.parametrize(
    ("name", "pin"),
    [
        *((name, {}) for name in MODELS),
        *((name, {"mesh.tensor": 8}) for name in ("written_out", "local_and_global")),
    ],
)
def test_a_marked_step_has_the_plan_of_its_loss(name: str, pin: dict[str, Any]) -> None:
    ours, theirs = plans(MODELS[name](), "h100:8", pin)
    assert told(theirs) == told(ours)
    seconds = ours.estimate.step_seconds
    assert theirs.estimate.step_seconds == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("name", ["written_out", "local_and_global"])
def test_layers_of_a_step_without_marks_are_sharded_alike(name: str) -> None:
    params, *_ = model = MODELS[name]()
    ours, theirs = plans(model, "h100:8", {"mesh.tensor": 8}, marked=False)
    for one in (ours, theirs):
        cut = ["tensor" in str(p.compute) for p in one.parameters if "layers" in p.path]
        assert sum(cut) == 4 * len(params["layers"])  # heads of all, widths where that is faster
    assert theirs.estimate.step_seconds == pytest.approx(ours.estimate.step_seconds, rel=0.1)
    assert not [one for one in theirs.findings if one.code == "dimensions-left-out"]
