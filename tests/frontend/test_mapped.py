"""Programs of `jax.pmap` on whole batches: the numbers are those without the collectives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state
from jax import lax
from jax.sharding import PartitionSpec as P

import shardlib
from shardlib.functions.experts import found_axes, whole_batch
from tests.frontend.equality import plain, require_near
from tests.frontend.examples import drawn

ROWS = 16
BATCH = {"x": drawn(1, ROWS, 4, 4, 3), "y": np.arange(ROWS, dtype=np.int32) % 4}
MESH: dict[str, Any] = {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 3}


class TrainState(train_state.TrainState):
    batch_stats: Any


class Net(nn.Module):
    axis: str | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(8, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis)(x)
        return nn.Dense(4)(nn.relu(x).mean((1, 2)))


def program(axis: str | None, grad: Any = jax.value_and_grad) -> Any:
    """A classifier as Flax's examples train it, over an axis or without one."""

    def mean(tree: Any) -> Any:
        return tree if axis is None else lax.pmean(tree, axis_name=axis)

    def total(tree: Any) -> Any:
        return tree if axis is None else lax.psum(tree, axis)

    def init(key: jax.Array) -> TrainState:
        model = Net(axis)
        made = model.init(key, jnp.ones((1, 4, 4, 3)))
        return TrainState.create(
            apply_fn=model.apply,
            params=made["params"],
            tx=optax.sgd(0.1, momentum=0.9),
            batch_stats=made["batch_stats"],
        )

    def step(state: TrainState, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), 0 if axis is None else lax.axis_index(axis))
        kept = jax.random.bernoulli(key, 0.9, batch["x"].shape)

        def loss_fn(params: Any) -> Any:
            logits, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["x"] * kept,
                mutable=["batch_stats"],
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return losses.mean(), (new["batch_stats"], logits)

        (loss, (stats, logits)), gradients = grad(loss_fn, has_aux=True)(state.params)
        right = (logits.argmax(-1) == batch["y"]).astype(jnp.float32)
        share = total(right.sum()) / total(jnp.float32(ROWS))
        state = state.apply_gradients(grads=mean(gradients), batch_stats=mean(stats))
        return state, {"loss": mean(loss), "share": share}

    return init, step


@pytest.mark.parametrize("grad", [jax.value_and_grad, shardlib.value_and_grad])
def test_a_mapped_step_gives_the_numbers_of_the_whole_batch(grad: Any):
    init, step = program(None)
    theirs = jax.jit(init)(jax.random.key(3))
    compiled = shardlib.compile_step(*program("batch", grad), BATCH, topology="cpu:8", pin=MESH)
    [said] = [one for one in compiled.findings if one.code == "mapped-axis"]
    assert said.where == "batch" and "whole batch" in said.message
    assert "opaque" not in " ".join(one.code for one in compiled.findings)
    mine = compiled.init(seed=3)
    for _ in range(2):
        mine, found = compiled.step(mine, BATCH)
        theirs, wanted = jax.jit(step)(theirs, BATCH)
        require_near((mine, found), plain((theirs, wanted)))


def test_a_mapped_loss_is_compiled_too():
    def loss_of(model: Net) -> Any:
        def loss(variables: Any, batch: Any) -> Any:
            logits, new = model.apply(variables, batch["x"], mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            value = losses.mean() if model.axis is None else lax.pmean(losses.mean(), model.axis)
            return value, {}, new

        return loss

    found = []
    for axis in ("devices", None):
        model = Net(axis)
        compiled = shardlib.compile(
            shardlib.linen(model, BATCH["x"]), loss_of(model), optax.sgd(0.1), BATCH,
            topology="cpu:8", pin={"mesh": {"data": 4, "tensor": 2}},
        )  # fmt: skip
        state, metrics = compiled.step(compiled.init(seed=0), BATCH)
        found.append((state, metrics))
    require_near(found[0], plain(found[1]))


def everything(x: jax.Array) -> Any:
    """All collectives over an axis of one member, also in loops, branches and gradients."""
    gathered = lax.all_gather(x, "i")
    return {
        "mean": lax.pmean(x, "i"),
        "sum": lax.psum(x, ("i", "j")),
        "most": lax.pmax(x, "i"),
        "size": lax.psum(1, "i"),
        "index": lax.axis_index("j"),
        "gathered": gathered,
        "tiled": lax.all_gather(x, "i", tiled=True),
        "scattered": lax.psum_scatter(gathered, "i"),
        "exchanged": lax.all_to_all(gathered, "i", 0, 1),
        "moved": lax.ppermute(x, "i", [(0, 0)]),
        "loop": lax.scan(lambda c, _: (lax.pmean(2 * c, "i"), c), x, None, length=3),
        "branch": lax.cond(x[0] > 0, lambda: lax.pmean(x, "i"), lambda: -x),
        "slope": jax.grad(lambda x: lax.pmean((jax.nn.relu(x) ** 2).sum(), "i"))(x),
        "inner": jax.jit(lambda x: lax.psum(jax.nn.relu(x), "i"))(x),
    }


def test_every_collective_is_that_of_one_member():
    x = jnp.arange(-1.0, 3.0)
    found = found_axes(lambda names: jax.jit(whole_batch(everything, names))(x))
    mesh = jax.make_mesh((1, 1), ("i", "j"), devices=jax.devices()[:1])
    one = jax.shard_map(everything, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    for name, wanted in jax.jit(one)(x).items():
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, found[name], wanted))), name
    text = str(jax.make_jaxpr(whole_batch(everything, ("i", "j")))(x))
    assert not any(word in text for word in ("psum", "all_gather", "ppermute", "axis_index"))
    with pytest.raises(NameError, match="nothing"):
        found_axes(lambda names: nothing)  # noqa: F821  # pyright: ignore


def test_sums_over_no_axis_are_no_operation():
    def step(state: Any, batch: Any) -> Any:
        def each(x: jax.Array) -> jax.Array:
            return lax.psum(((x @ state) ** 2).mean(), "i") + lax.psum(jnp.float32(1), "i")

        value, slope = jax.value_and_grad(
            lambda weight: jax.vmap(lambda x: ((x @ weight) ** 2).mean(), axis_name="i")(
                batch["x"][None]
            )[0]
        )(state)
        met = jax.vmap(each, axis_name="i")(batch["x"][None])
        return state - 0.1 * slope, {"loss": value, "met": met}

    batch = {"x": drawn(1, ROWS, 8)}
    compiled = shardlib.compile_step(
        lambda key: jnp.eye(8), step, batch, topology="cpu:8", pin={"mesh": {"data": 8}}
    )
    assert "opaque-primitive" not in {one.code for one in compiled.findings}
    require_near(compiled.step(compiled.init(), batch), plain(jax.jit(step)(jnp.eye(8), batch)))
