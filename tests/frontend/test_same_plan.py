"""The same model through `shardlib.compile` and through a step of its own has the same plan."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import shardlib
from shardlib._jax_compat import names_alone
from shardlib.errors import AnnotationError
from shardlib.tracing.steps import trace_step

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
        ("scanned", {"mesh": {"stage": 2, "fsdp": 4}, "microbatches": 4, "remat": "full"}),
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


# A step reads the names that Flax writes in its state as `shardlib.compile` does in a model.

KERNEL = nn.initializers.lecun_normal()
B = np.ones((16, 8), np.float32)
EXPECTED = {"bias": ["mlp", "embed"], "kernel": [("embed", "mlp"), ("mlp", "embed")]}


class Perceptron(nn.Module):
    boxed: bool = True

    @nn.compact
    def __call__(self, x):
        def init(*names):
            return nn.with_logical_partitioning(KERNEL, names) if self.boxed else KERNEL

        h = nn.relu(nn.Dense(32, kernel_init=init("embed", "mlp"))(x))
        return nn.Dense(8, kernel_init=init("mlp", "embed"))(h)


def linen_init(boxed=True):
    module = Perceptron(boxed)

    def init(key):
        params = module.init(key, B)["params"]
        return TrainState.create(apply_fn=module.apply, params=params, tx=optax.adam(1e-3))

    return init


def linen_step(state, batch):
    def loss(params):
        return jnp.mean(state.apply_fn({"params": params}, batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), {"loss": value}


class Module(nnx.Module):
    def __init__(self, rngs, **more):
        def linear(n, m, *names):
            init = nnx.with_partitioning(KERNEL, names, **more)
            return nnx.Linear(n, m, kernel_init=init, rngs=rngs)

        self.a, self.b = linear(8, 32, "embed", "mlp"), linear(32, 8, "mlp", "embed")

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def nnx_init(key, **more):
    module = Module(nnx.Rngs(key), **more)
    return {"m": module, "o": nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)}


def nnx_step(state, batch):
    value, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(state["m"])
    state["o"].update(state["m"], gradients)
    return state, {"loss": value}


def kernels(traced):
    return [p.axes for p in traced.problem.parameters if "kernel" in p.path]


@pytest.mark.parametrize("eager", [True, False, None], ids=["eager", "not eager", "default"])
def test_names_of_variables_are_those_of_the_plan(eager):
    switch = contextlib.nullcontext() if eager is None else nnx.use_eager_sharding(eager)
    with switch:
        program = shardlib.compile_step(
            nnx_init, nnx_step, B, topology="cpu:8", pin={"mesh": {"fsdp": 2, "tensor": 4}}
        )
        layouts = {p.path: p.colours for p in program.plan.parameters if "kernel" in p.path}
        assert list(layouts.values()) == EXPECTED["kernel"]
        assert not {"state-names-unread", "diagnostic-failed"} & {
            one.code for one in program.findings
        }
        _, metrics = program.step(program.init(0), B)
        with names_alone():
            plain = nnx_init(jax.random.key(0))
            _, expected = jax.jit(nnx_step)(plain, B)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)


@pytest.mark.parametrize(
    "boxed, axes",
    [
        (True, None),
        (True, "get_partition_spec"),
        (False, "get_partition_spec"),
        (False, {"params.Dense_0.kernel": ("embed", "mlp"), "params.Dense_1.kernel": P("mlp")}),
    ],
)
def test_names_of_boxes_and_of_trees_of_names_are_read(boxed, axes):
    init = linen_init(boxed)
    shapes = jax.eval_shape(init, jax.random.key(0))
    if axes == "get_partition_spec":
        axes = nn.get_partition_spec(jax.eval_shape(linen_init(), jax.random.key(0)))
    found = kernels(trace_step(linen_step, shapes, B, axes=axes))
    assert found[0] == ("embed", "mlp") and found[1] in (("mlp", "embed"), ("mlp", None))


def test_other_trees_of_names_are_read_or_refused():
    with names_alone():
        shapes = nnx.eval_shape(nnx_init, jax.random.key(0))
    specs = nnx.get_partition_spec(shapes)
    assert kernels(trace_step(nnx_step, shapes, B, axes=specs)) == EXPECTED["kernel"]
    boxes = jax.eval_shape(linen_init(), jax.random.key(0))
    mesh = jax.make_mesh((1, 1), ("embed", "mlp"))
    shardings = nn.get_sharding(boxes, mesh)
    assert kernels(trace_step(linen_step, boxes, B, axes=shardings)) == EXPECTED["kernel"]
    with pytest.raises(AnnotationError, match=r"'params.Dense_2'; did you mean"):
        trace_step(linen_step, boxes, B, axes={"params": {"Dense_2": {"kernel": P("mlp")}}})
    with pytest.raises(AnnotationError, match=r"2 names .* for an array of 1 dims"):
        trace_step(linen_step, boxes, B, axes={"params": {"Dense_0": {"bias": P("mlp", "x")}}})


def test_names_of_optimizer_state_are_told():
    def init(key):
        return nnx_init(key, optimizer_sharding=("zero", None))

    with names_alone():
        shapes = nnx.eval_shape(init, jax.random.key(0))
    traced = trace_step(nnx_step, shapes, B)
    assert kernels(traced) == EXPECTED["kernel"]
    [finding] = traced.findings
    assert finding.code == "state-names-unread" and "o.opt_state" in finding.where
    plan = shardlib.plan(
        lambda rngs: Module(rngs, optimizer_sharding=("zero", None)),
        lambda model, x: jnp.mean(model(x) ** 2),
        optax.adam(1e-3),
        B,
        topology="cpu:8",
    )
    [finding] = [one for one in plan.findings if one.code == "state-names-unread"]
    assert finding.where == "a.kernel, b.kernel"


def test_parallelize_reads_them_too():
    program = shardlib.parallelize(linen_step, topology="cpu:8")
    state = linen_init()(jax.random.key(0))
    planned = [p.colours for p in program.program(state, B).plan.parameters if "kernel" in p.path]
    assert planned == EXPECTED["kernel"]
    new, metrics = program(state, B)
    expected, told = linen_step(state, B)
    np.testing.assert_allclose(metrics["loss"], told["loss"], rtol=1e-6)
    for ours, plain in zip(
        jax.tree.leaves(new.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(ours, plain, atol=1e-5)


def test_a_stack_in_the_state_that_init_makes_gets_layers():
    def init(key):
        def build(rngs):
            return nnx.LinearGeneral(
                8, (2, 4), kernel_init=nnx.with_partitioning(KERNEL, ("embed", "heads")), rngs=rngs
            )

        return {"m": nnx.split_rngs(splits=3)(nnx.vmap(build))(nnx.Rngs(key))}

    def step(state, batch):
        graph, params = nnx.split(state["m"])

        def loss(params):
            def layer(x, kernel):
                return jnp.tanh(jnp.einsum("bd,dhk->bhk", x, kernel).reshape(x.shape)), None

            return jnp.mean(jax.lax.scan(layer, batch, params["kernel"][...])[0] ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        new = jax.tree.map(lambda one, of: one - 0.1 * of, params, gradients)
        return {"m": nnx.merge(graph, new)}, {"loss": value}

    program = shardlib.compile_step(init, step, B, topology="cpu:8", abstract=True)
    [kernel] = [p for p in program.traced.problem.parameters if "kernel" in p.path]
    assert kernel.axes == ("layers", "embed", "heads", None)
    assert "stacking-dim-unnamed" in {one.code for one in program.findings}
