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
from tests.lowering import small
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
    loss: Callable[..., Any], params: Any, batch: Any, optimizer: optax.GradientTransformation
) -> tuple[Any, list[dict[str, Any]]]:
    """Parameters and metrics after three steps of plain JAX and optax."""

    def plain(p: Any) -> Any:
        result = loss(p, batch)
        value, metrics = result if isinstance(result, tuple) else (result, {})
        return number(value), {name: number(metric) for name, metric in metrics.items()}

    @jax.jit
    def step(p: Any, state: Any) -> Any:
        (value, metrics), gradients = jax.value_and_grad(plain, has_aux=True)(p)
        updates, state = optimizer.update(gradients, state, p)
        return optax.apply_updates(p, updates), state, {"loss": value, **metrics}

    state, seen = optimizer.init(params), []
    for _ in range(3):
        params, state, metrics = step(params, state)
        seen.append(metrics)
    return params, seen


WRITTEN = {**losses.batch(0), "y": np.random.default_rng(0).normal(size=(16, 8)).astype("f")}
WRITTEN |= {"x": WRITTEN["x"][:, 0], "mask": np.linspace(0, 3, 16).astype("f")}


def written_out(key: Any) -> Any:
    """Layers that no loop runs over."""
    return {"layers": [jax.random.normal(one, (8, 8)) / 3 for one in jax.random.split(key, 4)]}


def outputs(p: Any, b: Any) -> Any:
    x = b["x"]
    for weight in p["layers"]:
        x = x + jnp.tanh(x @ weight)
    return x


def errors(p: Any, b: Any) -> Any:
    return ((outputs(p, b) - b["y"]) ** 2).mean(-1)


def masked_rows(p: Any, b: Any) -> Any:
    return (errors(p, b) * b["mask"]).sum() / b["mask"].sum()


def mean_where(p: Any, b: Any) -> Any:
    return jnp.mean(errors(p, b), where=b["mask"] > 0.5)


def rolled(p: Any, b: Any) -> Any:
    return ((outputs(p, b) - jnp.roll(b["y"], 1, 0)) ** 2).mean()


def numbered(p: Any, b: Any) -> Any:
    return errors(p, b) @ jnp.arange(len(b["x"])) / 100


STAGES = {"mesh": {"stage": 2}}
PROGRAMS = {"pipeline": "programs"}
TWO = {"mesh": {"data": 2}, "microbatches": 2}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("loss", "pin"),
    [
        (masked, {"mesh": {"data": 4}}),
        (masked, {"mesh": {"stage": 2, "data": 2}, "schedule": "1f1b"}),
        (summed, {"mesh": {"data": 2, "fsdp": 2}, "zero": 3}),
        (vouched, {"mesh": {"fsdp": 2}, "zero": 2}),
        (vouched, {**STAGES, "schedule": "gpipe", **PROGRAMS}),
        (by_row, {"mesh": {"data": 2, "fsdp": 2}, "zero": 3}),
        (by_row, {"mesh": {"data": 2}}),
        # What the whole batch says beforehand reaches stages of layers that are written out.
        (masked_rows, {**STAGES, "schedule": "gpipe", "microbatches": 2}),
        (masked_rows, {"mesh": {"stage": 4, "data": 2}, "schedule": "1f1b"}),
        (masked_rows, {**STAGES, **PROGRAMS, "microbatches": 2}),
        (masked_rows, {"mesh": {"stage": 4}, **PROGRAMS}),
        (mean_where, {"mesh": {"stage": 2, "fsdp": 2}, "schedule": "1f1b", "microbatches": 2}),
        (rolled, {"mesh": {"stage": 4}, "schedule": "gpipe", "microbatches": 2}),
        (rolled, {"mesh": {"stage": 2, "data": 2}, **PROGRAMS, "microbatches": 2}),
        (numbered, {"mesh": {"stage": 2, "data": 2}, "schedule": "1f1b", "microbatches": 2}),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value["mesh"]),
)
def test_parts_give_the_numbers_of_the_whole(loss: Callable[..., Any], pin: dict[str, Any]):
    optimizer, pin = optax.sgd(0.3, momentum=0.9), {"microbatches": 4, **pin}
    whole, batch = shardlib.tree(losses.params, losses.AXES), BATCH
    if loss in (masked_rows, mean_where, rolled, numbered):
        whole, batch = shardlib.tree(written_out), WRITTEN
        optimizer = optax.sgd(0.1)
    program = shardlib.compile(whole, loss, optimizer, batch, topology="cpu:8", pin=pin)
    assert program.plan.microbatches == pin["microbatches"]
    state = program.init(0)
    start = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state.params)
    params, wanted = unsharded(loss, start, batch, optimizer)
    for expected in wanted:
        state, metrics = program.step(state, batch)
        assert {name: value.dtype for name, value in metrics.items()} == {
            name: value.dtype for name, value in expected.items()
        }
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    for mine, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5 * float(np.abs(theirs).max()))


def planned(
    loss: Any,
    pin: Any = None,
    *,
    init: Any = None,
    batch: Any = BATCH,
    where: str = "cpu:8",
    **more: Any,
) -> shardlib.Plan:
    model = init or shardlib.tree(losses.params, losses.AXES)
    return shardlib.plan(model, loss, optax.sgd(0.1), batch, topology=where, pin=pin, **more)


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
    with pytest.raises(PinError) as raised:
        planned(loss, {"mesh": {"data": 4}, "microbatches": 4})
    assert said in str(raised.value)
    assert "test_contributions.py:" in str(raised.value)
    plan = planned(loss)
    (finding,) = [finding for finding in plan.findings if finding.code == "rows-coupled"]
    assert plan.microbatches == 1 and said in finding.message


def test_the_planner_splits_no_contrastive_batch_that_it_would_split_as_a_mean():
    shapes = {
        name: jax.ShapeDtypeStruct((65536, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in BATCH.items()
    }
    assert planned(contrastive, batch=shapes, where="h100:8").microbatches == 1


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
        planned(loss, TWO, init=Normalised)
    assert planned(without_statistics, TWO, init=Normalised).microbatches == 2


def test_a_loss_that_is_said_to_be_a_mean_is_split_and_not_without_these_words():
    plan = planned(contrastive, TWO, rows="mean")
    assert plan.microbatches == 2
    model = shardlib.tree(losses.params, losses.AXES)
    with pytest.raises(PinError, match="2 microbatches would change the numbers"):
        shardlib.compile(model, contrastive, optax.sgd(0.1), BATCH, plan=plan)


def test_values_of_every_row_go_through_no_stages():
    with pytest.raises(PinError, match=r"4 microbatches cannot go through 2 pipeline stages"):
        planned(by_row, {**STAGES, "microbatches": 4})
    assert planned(by_row, {"mesh.stage": 2}).microbatches == 1


def test_values_of_every_row_are_counted_in_whole():
    def plain(p: Any, b: Any) -> Any:
        return each(p, b).mean(), {}

    def valued(p: Any, b: Any) -> Any:
        values = each(p, b)
        return values.mean(), {"values": values}

    more, less = (
        planned(loss, {"mesh": {"data": 2}, "microbatches": 4}).estimate.device_bytes.batch
        for loss in (valued, plain)
    )
    values = jax.eval_shape(each, losses.params(jax.random.key(0)), BATCH)
    assert more - less == values.size * 4 / 2


NUMBERS = {"lr": 3.0, "on": True, "off": False, "count": 2, "half": np.float32(0.5)}
LOCKSTEP = {"mesh": {"stage": 2, "data": 2}, "microbatches": 4}


def loss(params, batch):
    return small.loss(params, batch), {**NUMBERS, "rows": batch["weight"].shape[0]}


@pytest.mark.long
@pytest.mark.parametrize(
    "pin",
    [
        {"mesh": {"data": 2}, "microbatches": 4},
        {"mesh": {"fsdp": 2}, "microbatches": 4, "zero": 3},
        LOCKSTEP,
        {**LOCKSTEP, "pipeline": "programs", "schedule": "1f1b"},
        {**LOCKSTEP, "pipeline": "programs", "schedule": "zero-bubble"},
    ],
    ids=["reduced once", "accumulated", "lockstep", "a program a stage", "zero bubble"],
)
def test_metrics_that_are_numbers_of_python_are_those_numbers(pin):
    program = small.program(optax.sgd(0.01), pin, loss)
    state = program.init(0)
    evaluated = program.evaluate(state, small.batch())
    _, stepped = program.step(state, small.batch())
    for metrics in (evaluated, stepped):
        assert {name: float(value) for name, value in metrics.items() if name != "loss"} == {
            **NUMBERS,
            "rows": 16,
        }
        assert [metrics[name].dtype.name for name in ("lr", "on", "count", "rows")] == [
            "float32",
            "bool",
            "int32",
            "int32",
        ]
