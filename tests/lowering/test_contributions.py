"""A batch that is worked through in parts gives the loss, the metrics and the gradients of the
whole batch, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib.errors import PinError
from tests.zoo import losses

BATCH = losses.batch(3)


def each(p: Any, b: Any) -> Any:
    return losses.PER_TOKEN["cross-entropy"](losses.hidden(p, b["x"]), p, b)


def masked(p: Any, b: Any) -> Any:
    values = each(p, b)
    return (values * b["mask"]).sum() / b["mask"].sum() + 0.01 * (p["head"] ** 2).sum(), {
        "tokens": b["mask"].sum(),
        "hits": (values < 1.5).sum(),
        "plain": values.mean(),
        "longest": b["mask"].sum(1).max(),
        "weighted": (values.mean(1) * b["weight"]).sum() / b["weight"].sum(),
    }


def summed(p: Any, b: Any) -> Any:
    return each(p, b).sum() / 100, {}


def vouched(p: Any, b: Any) -> Any:
    values = each(p, b)
    return shardlib.WeightedMean((values * b["mask"]).sum(), b["mask"].sum()), {
        "zz": shardlib.WeightedMean(values.sum(), b["weight"].sum()),
        "a": values.mean(),
    }


def by_row(p: Any, b: Any) -> Any:
    values = each(p, b)
    return shardlib.WeightedMean((values * b["mask"]).sum(), b["mask"].sum()), {
        "flat": values.reshape(-1),
        "hits": values < 1.5,
        "mean": values.mean(),
        "scaled": values / values.size,
        "share": values * b["mask"] / b["mask"].sum(),
        "turned": values.T,
        "values": values,
    }


def number(result: Any) -> Any:
    return (
        result.total / jax.lax.stop_gradient(result.weight)
        if isinstance(result, shardlib.WeightedMean)
        else result
    )


def unsharded(
    loss: Callable[..., Any], params: Any, optimizer: optax.GradientTransformation, steps: int
) -> tuple[Any, list[dict[str, Any]]]:
    """Parameters and metrics after some steps of plain JAX and optax."""

    def plain(p: Any) -> Any:
        value, metrics = loss(p, BATCH)
        return number(value), {name: number(metric) for name, metric in metrics.items()}

    @jax.jit
    def step(p: Any, state: Any) -> Any:
        (value, metrics), gradients = jax.value_and_grad(plain, has_aux=True)(p)
        updates, state = optimizer.update(gradients, state, p)
        return optax.apply_updates(p, updates), state, {"loss": value, **metrics}

    state, seen = optimizer.init(params), []
    for _ in range(steps):
        params, state, metrics = step(params, state)
        seen.append(metrics)
    return params, seen


@pytest.mark.parametrize(
    ("loss", "pin"),
    [
        (masked, {"mesh": {"data": 4}, "microbatches": 4}),
        (masked, {"mesh": {"stage": 2, "data": 2}, "microbatches": 4, "schedule": "1f1b"}),
        (summed, {"mesh": {"data": 2, "fsdp": 2}, "microbatches": 4, "zero": 3}),
        (vouched, {"mesh": {"fsdp": 2}, "microbatches": 4, "zero": 2}),
        (by_row, {"mesh": {"data": 2, "fsdp": 2}, "microbatches": 4, "zero": 3}),
        (by_row, {"mesh": {"data": 2}, "microbatches": 4}),
        (
            vouched,
            {"mesh": {"stage": 2}, "microbatches": 4, "schedule": "gpipe", "pipeline": "programs"},
        ),
    ],
    ids=[
        "masked, accumulated",
        "masked, in lockstep",
        "sum, ZeRO 3",
        "weighted mean, ZeRO 2",
        "values of every row, ZeRO 3",
        "values of every row, gradients reduced once",
        "weighted mean, stages as programs",
    ],
)
def test_parts_give_the_numbers_of_the_whole(loss: Callable[..., Any], pin: dict[str, Any]):
    optimizer = optax.sgd(0.3, momentum=0.9)
    program = shardlib.compile(
        shardlib.tree(losses.params, losses.AXES), loss, optimizer, BATCH, topology="cpu:8", pin=pin
    )
    assert program.plan.microbatches == 4
    state = program.init(0)
    params, wanted = unsharded(
        loss, jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, state.params)), optimizer, 3
    )
    for expected in wanted:
        state, metrics = program.step(state, BATCH)
        assert {name: value.dtype for name, value in metrics.items()} == {
            name: value.dtype for name, value in expected.items()
        }
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    for name, leaf in params.items():
        np.testing.assert_allclose(
            state.params[name], leaf, rtol=1e-5, atol=1e-5 * float(np.abs(leaf).max()), err_msg=name
        )


def contrastive(p: Any, b: Any) -> Any:
    h = losses.hidden(p, b["x"])
    return optax.softmax_cross_entropy_with_integer_labels(
        h[:, 0] @ h[:, 1].T, jnp.arange(h.shape[0])
    ).mean()


def perplexity(p: Any, b: Any) -> Any:
    value = each(p, b).mean()
    return value, {"perplexity": jnp.exp(value)}


@jax.custom_vjp
def centred(values: Any) -> Any:
    return values


centred.defvjp(
    lambda values: (values, None), lambda _, cotangents: (cotangents - cotangents.mean(0),)
)


def by_hand(p: Any, b: Any) -> Any:
    return centred(each(p, b)).mean()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (contrastive, "the loss: rows meet other rows (dot_general"),
        (perplexity, "metric 'perplexity': a function of a sum over rows that is not linear (exp"),
        (by_hand, "its derivative, which was written by hand, mixes rows"),
    ],
)
def test_what_no_part_can_say_is_never_worked_through_in_parts(loss: Callable[..., Any], said: str):
    model = shardlib.tree(losses.params, losses.AXES)
    with pytest.raises(PinError) as raised:
        shardlib.plan(
            model,
            loss,
            optax.sgd(0.1),
            BATCH,
            topology="cpu:8",
            pin={"mesh": {"data": 4}, "microbatches": 4},
        )
    assert said in str(raised.value)
    assert "test_contributions.py:" in str(raised.value)
    plan = shardlib.plan(model, loss, optax.sgd(0.1), BATCH, topology="cpu:8")
    (finding,) = [finding for finding in plan.findings if finding.code == "rows-coupled"]
    assert plan.microbatches == 1 and said in finding.message


def test_the_planner_splits_no_contrastive_batch_that_it_would_split_as_a_mean():
    shapes = {
        name: jax.ShapeDtypeStruct((65536, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in BATCH.items()
    }
    model = shardlib.tree(losses.params, losses.AXES)
    plan = shardlib.plan(model, contrastive, optax.sgd(0.1), shapes, topology="h100:8")
    assert plan.microbatches == 1


class Normalised(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(losses.WIDTH, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.norm(self.first(x)))


def test_statistics_of_the_batch_are_a_reason_and_random_streams_are_none():
    def loss(model: Normalised, b: Any) -> Any:
        return (model(b["x"]) ** 2).mean()

    def without_statistics(model: Normalised, b: Any) -> Any:
        return (model.drop(model.first(b["x"])) ** 2).mean()

    with pytest.raises(PinError, match=r"model state 'norm\.mean'"):
        shardlib.plan(
            Normalised,
            loss,
            optax.sgd(0.1),
            BATCH,
            topology="cpu:8",
            pin={"mesh": {"data": 2}, "microbatches": 2},
        )
    assert (
        shardlib.plan(
            Normalised,
            without_statistics,
            optax.sgd(0.1),
            BATCH,
            topology="cpu:8",
            pin={"mesh": {"data": 2}, "microbatches": 2},
        ).microbatches
        == 2
    )


def test_the_user_can_say_that_a_loss_is_a_mean():
    plan = shardlib.plan(
        shardlib.tree(losses.params, losses.AXES),
        contrastive,
        optax.sgd(0.1),
        BATCH,
        topology="cpu:8",
        pin={"mesh": {"data": 2}, "microbatches": 2},
        rows="mean",
    )
    assert plan.microbatches == 2


def test_a_plan_for_parts_is_not_carried_out_for_a_loss_that_has_none():
    model, pin = shardlib.tree(losses.params, losses.AXES), {"mesh": {"data": 2}, "microbatches": 2}
    plan = shardlib.plan(
        model, contrastive, optax.sgd(0.1), BATCH, topology="cpu:8", pin=pin, rows="mean"
    )
    with pytest.raises(PinError, match="2 microbatches would change the numbers"):
        shardlib.compile(model, contrastive, optax.sgd(0.1), BATCH, plan=plan)


def test_values_of_every_row_go_through_no_stages():
    with pytest.raises(PinError, match=r"4 microbatches cannot go through 2 pipeline stages"):
        shardlib.plan(
            shardlib.tree(losses.params, losses.AXES),
            by_row,
            optax.sgd(0.3),
            BATCH,
            topology="cpu:8",
            pin={"mesh": {"stage": 2}, "microbatches": 4},
        )
    free = shardlib.plan(
        shardlib.tree(losses.params, losses.AXES),
        by_row,
        optax.sgd(0.3),
        BATCH,
        topology="cpu:8",
        pin={"mesh.stage": 2},
    )
    assert free.microbatches == 1


def test_values_of_every_row_are_counted_in_whole():
    def planned(loss: Callable[..., Any]) -> float:
        return shardlib.plan(
            shardlib.tree(losses.params, losses.AXES),
            loss,
            optax.sgd(0.3),
            BATCH,
            topology="cpu:8",
            pin={"mesh": {"data": 2}, "microbatches": 4},
        ).estimate.device_bytes.batch

    def plain(p: Any, b: Any) -> Any:
        return each(p, b).mean(), {}

    def valued(p: Any, b: Any) -> Any:
        values = each(p, b)
        return values.mean(), {"values": values}

    values = jax.eval_shape(each, losses.params(jax.random.key(0)), BATCH)
    assert planned(valued) - planned(plain) == values.size * 4 / 2
