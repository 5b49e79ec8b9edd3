"""Statistics of Linen models: what a loss returns is told apart by structure, and trained models
are those of plain Flax.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import shardlib
from shardlib.annotation.model import read
from shardlib.errors import TracingError


class Normed(nn.Module):
    """Two layers around a batch norm."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(16, use_bias=False)(
            x
        )  # what a mean takes away again has no gradient but rounding, which Adam blows up
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(8)(nn.relu(x))


MODULE = Normed()
ROWS = 8


def batch(rows=ROWS, seed=0):
    random = np.random.default_rng(seed)
    return {
        "x": (random.normal(size=(rows, 8)) * 2 + 1).astype(np.float32),
        "y": random.normal(size=(rows, 8)).astype(np.float32),
    }


def parts(variables, batch):
    logits, updates = MODULE.apply(variables, batch["x"], mutable=["batch_stats"])
    return jnp.mean((logits - batch["y"]) ** 2), {"size": jnp.mean(logits**2)}, updates


FORMS = {
    "updates": lambda loss, metrics, updates: (loss, updates),
    "triple": lambda loss, metrics, updates: (loss, metrics, updates),
    "triple, updates first": lambda loss, metrics, updates: (loss, updates, metrics),
    "nested": lambda loss, metrics, updates: (loss, (metrics, updates)),
    "named metrics": lambda loss, metrics, updates: (loss, {"metrics": metrics, **updates}),
    "one mapping": lambda loss, metrics, updates: (loss, {**metrics, **updates}),
}


@pytest.fixture(scope="module")
def plain():
    """Five steps of plain Flax and optax: (losses, parameters, statistics)."""
    variables = MODULE.init(jax.random.key(0), batch()["x"])
    optimizer = optax.adam(1e-2)
    opt_state, losses = optimizer.init(variables["params"]), []

    @jax.jit
    def step(variables, opt_state, batch):
        def loss(params):
            value, _, updates = parts({**variables, "params": params}, batch)
            return value, updates

        (value, updates), gradients = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        changes, opt_state = optimizer.update(gradients, opt_state)
        return (
            {"params": optax.apply_updates(variables["params"], changes), **updates},
            opt_state,
            value,
        )

    for number in range(5):
        variables, opt_state, value = step(variables, opt_state, batch(seed=number))
        losses.append(float(value))
    return losses, variables["params"], variables["batch_stats"]


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 4}])
def test_five_steps_are_those_of_plain_flax(form, mesh, plain):
    program = shardlib.compile(
        shardlib.linen(MODULE, batch()["x"]),
        lambda variables, batch: FORMS[form](*parts(variables, batch)),
        optax.adam(1e-2),
        batch(),
        topology="cpu:8",
        pin={"mesh": mesh, "zero": 3, "microbatches": 1},
    )
    state, losses = program.init(0), []
    for number in range(5):
        state, metrics = program.step(state, batch(seed=number))
        losses.append(float(metrics["loss"]))
        assert set(metrics) == ({"loss"} if form == "updates" else {"loss", "size"})
    np.testing.assert_allclose(losses, plain[0], rtol=1e-5)
    for found, wanted in zip(
        jax.tree.leaves((state.params, state.model_state["batch_stats"])),
        jax.tree.leaves(plain[1:]),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert float(np.abs(state.model_state["batch_stats"]["BatchNorm_0"]["mean"]).max()) > 0.1


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (
            lambda loss, metrics, updates: (loss, {"batch_stats": loss}),
            "batch_stats: float32[] returned, the model has no such variable",
        ),
        (
            lambda loss, metrics, updates: (
                loss,
                {
                    "batch_stats": {
                        "BatchNorm_0": {"mean": updates["batch_stats"]["BatchNorm_0"]["mean"]}
                    }
                },
            ),
            "batch_stats.BatchNorm_0.var: nothing returned",
        ),
        (
            lambda loss, metrics, updates: (loss, jax.tree.map(lambda leaf: leaf[:3], updates)),
            "batch_stats.BatchNorm_0.mean: float32[3] returned, the model has float32[16]",
        ),
        (
            lambda loss, metrics, updates: (loss, {**updates, "intermediates": {"x": loss}}),
            "'intermediates' holds variables",
        ),
        (
            lambda loss, metrics, updates: (loss, {**updates, "params": {"x": loss}}),
            "'params' are what the optimizer trains",
        ),
        (
            lambda loss, metrics, updates: (loss, updates, updates),
            "'batch_stats' is returned twice",
        ),
        (
            lambda loss, metrics, updates: (loss, metrics, {"other": loss}),
            "two mappings of metrics",
        ),
        (
            lambda loss, metrics, updates: (loss, (jnp.zeros((8, 8)), updates)),
            "mapping of batch_stats",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_neither_is_refused_with_the_forms(result, said):
    model = read(shardlib.linen(MODULE, batch()["x"]))
    with pytest.raises(TracingError) as error:
        jax.eval_shape(
            model.bind(lambda variables, batch: result(*parts(variables, batch))),
            model.params,
            model.state,
            batch(),
        )
    assert (
        said in str(error.value)
        and "(loss, metrics, updates)" in str(error.value)
        and "'batch_stats'" in str(error.value)
    )


def test_statistics_that_no_step_changes_are_a_finding():
    program = shardlib.compile(
        shardlib.linen(MODULE, batch()["x"]),
        lambda variables, batch: parts(variables, batch)[0],
        optax.sgd(1e-2),
        batch(),
        topology="cpu:1",
    )
    (finding,) = [one for one in program.findings if one.code == "state-unchanged"]
    assert "batch_stats" in finding.message and finding.severity == "warning"
