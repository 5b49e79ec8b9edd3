"""Tokens are routed as loops route them; losses and biases of balance are those of the papers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.errors import ModelError
from shardlib.functions.routing import balance_loss, bias_step, route, z_loss
from shardlib.layout import MeshShape
from shardlib.verification.traffic import read_traffic
from tests.functions import numpy_experts

COUNT = 8
LOGITS = np.random.default_rng(0).normal(size=(3, 10, COUNT))
BIAS = np.linspace(0.4, -0.4, COUNT)
GROUPED = {"groups": 4, "groups_per_token": 2, "group_score": 2}


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalise": False, "scaling": 2.5},
        {"scores": "sigmoid"},
        {"scores": "sigmoid", **GROUPED},
        {"bias": BIAS},
        {"scores": "sigmoid", "bias": BIAS, "scaling": 2.5, **GROUPED},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_choices_are_those_of_loops(k, options):
    weights, chosen, shares = numpy_experts.route(LOGITS.reshape(-1, COUNT), k, **options)
    found = route(
        jnp.asarray(LOGITS, jnp.float32),
        k,
        **{**options, **({"bias": jnp.asarray(BIAS, jnp.float32)} if "bias" in options else {})},
    )
    assert (np.asarray(found.chosen).reshape(-1, k) == chosen).all()
    np.testing.assert_allclose(np.asarray(found.weights).reshape(-1, k), weights, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(found.shares).reshape(-1, COUNT), shares, rtol=1e-5)


def test_a_bias_chooses_and_has_no_gradient():
    def total(bias, logits):
        return jnp.sum(
            jnp.square(route(logits, 2, scores="sigmoid", bias=bias, normalise=False).weights)
        )

    logits = jnp.asarray(LOGITS, jnp.float32)
    favour = jnp.zeros(COUNT).at[3].set(5.0)
    slope, back = jax.grad(total, argnums=(0, 1))(favour, logits)
    assert not slope.any() and back[..., 3].all()
    assert (route(logits, 2, scores="sigmoid", bias=favour).chosen[..., 0] == 3).all()


def test_more_assignments_than_an_int32_counts_are_balanced():
    tokens = (1 << 16, 1 << 12)
    shares = jax.ShapeDtypeStruct((*tokens, COUNT), jnp.float32)
    chosen = jax.ShapeDtypeStruct((*tokens, 8), jnp.int32)
    assert jax.eval_shape(balance_loss, shares, chosen).shape == ()


def test_balance_is_one_where_uniform_and_the_number_of_experts_where_one_takes_all():
    chosen = jnp.arange(3 * 16).reshape(3, 16, 1) % COUNT
    assert float(balance_loss(jnp.full((3, 16, COUNT), 1 / COUNT), chosen)) == pytest.approx(1.0)
    assert float(
        balance_loss(jax.nn.one_hot(jnp.zeros((3, 16), int), COUNT), jnp.zeros((3, 16, 1), int))
    ) == pytest.approx(COUNT)


def test_balance_and_z_are_those_of_loops():
    found = route(jnp.asarray(LOGITS, jnp.float32), 2)
    shares, chosen = (
        np.asarray(found.shares, np.float64).reshape(-1, COUNT),
        np.asarray(found.chosen).reshape(-1, 2),
    )
    parts = [sum(e in row for row in chosen) / chosen.size for e in range(COUNT)]
    assert float(balance_loss(found.shares, found.chosen)) == pytest.approx(
        COUNT * sum(part * shares[:, e].mean() for e, part in enumerate(parts)), rel=1e-5
    )
    sums = [np.log(np.exp(row).sum()) ** 2 for row in LOGITS.reshape(-1, COUNT)]
    assert float(z_loss(jnp.asarray(LOGITS, jnp.float32))) == pytest.approx(np.mean(sums), rel=1e-5)


def test_equal_scores_are_taken_in_order():
    flat = jnp.zeros((2, 3, COUNT)).at[..., 5].set(1.0)
    assert (route(flat, 3).chosen == jax.lax.top_k(flat, 3)[1]).all() and (
        route(flat, 3).chosen == jnp.asarray([5, 0, 1])
    ).all()


@pytest.mark.parametrize(
    "options", [{}, {"scores": "sigmoid", "bias": BIAS, **GROUPED}], ids=["plain", "groups"]
)
def test_tokens_that_are_cut_are_not_gathered_and_are_routed_the_same_to_the_bit(options):
    def loss(logits):
        found = route(logits, 2, **options)
        return (
            jnp.square(found.weights).sum()
            + balance_loss(found.shares, found.chosen)
            + z_loss(logits),
            found.chosen,
        )

    logits = jnp.asarray(np.random.default_rng(4).normal(size=(4, 16, COUNT)), jnp.float32)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "context"))
    cut = NamedSharding(mesh, PartitionSpec("data", "context"))
    step = jax.jit(jax.grad(loss, has_aux=True), in_shardings=cut, out_shardings=(cut, cut))
    found, whole = step(logits), jax.jit(jax.grad(loss, has_aux=True))(logits)
    assert (found[1] == whole[1]).all()
    np.testing.assert_allclose(found[0], whole[0], rtol=1e-5, atol=1e-8)
    assert {
        (c.kind, c.bytes <= 4 * COUNT)
        for c in read_traffic(
            step.lower(logits).compile().as_text(), MeshShape(data=4, context=2)
        ).collectives
    } == {("all-reduce", True)}  # of shares and loads


def test_biases_balance_a_skewed_router():
    logits = jnp.asarray(
        np.random.default_rng(2).normal(size=(512, COUNT)) + np.linspace(2, 0, COUNT), jnp.float32
    )

    @jax.jit
    def step(bias):
        chosen = route(logits, 2, scores="sigmoid", bias=bias).chosen
        return bias_step(bias, chosen, 0.005), jnp.bincount(chosen.reshape(-1), length=COUNT)

    bias = jnp.zeros(COUNT)
    moved, first = step(bias)
    assert (
        np.asarray(moved) == np.float32(0.005) * np.sign(128 - np.asarray(first))
    ).all()  # 512 tokens x 2 / 8 experts
    for _ in range(300):
        bias, load = step(bias)
    assert int(first.max()) > 1.8 * 128 and int(load.max()) < 1.1 * 128


@pytest.mark.parametrize(
    ("k", "options", "message"),
    [
        (9, {}, "a token cannot visit 9 of 8 experts"),
        (0, {}, "a token cannot visit 0 of 8 experts"),
        (2, {"groups": 3}, "8 experts in 3 groups, 1 of them for a token, do not fit"),
        (3, {"groups": 4}, "1 groups of 2 experts have no 3 experts"),
        (2, {"scores": "tanh"}, "scores 'tanh' are not known; known are softmax, sigmoid"),
        (2, {"bias": jnp.zeros(3)}, r"bias is \(3,\); it must be \(8,\)"),
    ],
)
def test_what_does_not_fit(k, options, message):
    with pytest.raises(ModelError, match=message):
        route(jnp.asarray(LOGITS, jnp.float32), k, **options)
