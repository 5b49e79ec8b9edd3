"""A step reads the names that Flax writes in its state as `shardlib.compile` does in a model."""

from __future__ import annotations

import contextlib

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
