from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib import models
from shardlib.errors import ModelError
from shardlib.models import huggingface
from shardlib.models.blocks import cross_entropy, mixture_of_experts
from shardlib.models.config import Experts, LatentAttention, TransformerConfig
from tests.models import numpy_decoder
from tests.models.configs import PUBLISHED, tiny
from tests.models.configs import TINY as CONFIG

SPARSE = replace(CONFIG, experts=Experts(count=4, per_token=2, mlp=8))
FAMILIES = sorted(PUBLISHED)


def made(config: TransformerConfig):
    """The model with random numbers for parameters, drawn with NumPy: quick, and no scale or bias
    is at its start.
    """
    init, loss = models.build(config)
    definition, state = nnx.split(nnx.eval_shape(lambda: init(nnx.Rngs(0))))
    generator = np.random.default_rng(5)
    return (
        nnx.merge(definition, jax.tree.map(lambda leaf: drawn(generator, leaf.shape), state)),
        loss,
    )


def drawn(generator: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    centre, spread = (1.0, 0.1) if len(shape) == 1 else (0.0, 0.25)
    return jnp.asarray(generator.normal(centre, spread, shape), jnp.float32)


def tokens_of(config: TransformerConfig, batch: int, seq: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, seq), np.int32)


def run(config: TransformerConfig, model, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(nnx.jit(lambda m, t: m(t))(model, tokens))


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, kv_heads=4),
        replace(CONFIG, kv_heads=1, sliding_window=3),
        SPARSE,
        replace(SPARSE, layers=4, experts=replace(SPARSE.experts, every=2)),
    ],
    ids=["grouped", "multi-head", "multi-query-window", "experts", "every-second"],
)
def test_forward_equals_numpy(config: TransformerConfig):
    model = made(config)[0]
    params = jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    )
    tokens = tokens_of(config, 2, 8)
    expected = np.stack(
        [
            numpy_decoder.decoder(
                row,
                params,
                theta=config.rope_theta,
                epsilon=config.norm_epsilon,
                window=config.sliding_window,
                per_token=config.experts.per_token if config.experts else 0,
            )
            for row in tokens
        ]
    )
    np.testing.assert_allclose(run(config, model, tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_causal_and_trains(name: str):
    config = replace(huggingface.read(tiny(name)), compute_dtype="float32")
    model, loss = made(config)
    tokens = tokens_of(config, 1, 9)
    changed = tokens.copy()
    changed[:, 6] = (changed[:, 6] + 1) % config.vocab_size
    batch = {
        "inputs": np.concatenate([tokens, changed]),
        "targets": np.roll(np.concatenate([tokens, changed]), -1, 1),
    }

    @nnx.jit
    def both(model, batch):
        return model(batch["inputs"]), nnx.value_and_grad(loss, has_aux=True)(model, batch)

    (before, after), ((value, metrics), gradients) = both(model, batch)
    np.testing.assert_allclose(before[:6], after[:6], rtol=1e-5, atol=1e-5)
    assert np.abs(before[6] - after[6]).max() > 1e-3
    assert np.isfinite(value) and np.isfinite(metrics["cross_entropy"])
    leaves = jax.tree.leaves_with_path(gradients)
    assert [
        jax.tree_util.keystr(path)
        for path, leaf in leaves
        if not (np.isfinite(leaf).all() and np.abs(leaf).max() > 0)
    ] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_counted_and_named(name: str):
    config = huggingface.read(tiny(name))
    model = nnx.eval_shape(lambda: models.build(config)[0](nnx.Rngs(0)))
    params = jax.tree.leaves(
        nnx.state(model, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    assert sum(param.get_value().size for param in params) == config.parameter_count()
    for param in params:
        names = param.get_metadata("out_sharding")
        assert (
            len(names) == param.get_value().ndim
            and None not in names
            and len(set(names)) == len(names)
        ), names


def test_window_limits_what_a_token_sees_and_global_layers_do_not():
    local = replace(CONFIG, layers=2, sliding_window=2)
    for config, reach in ((local, 2), (replace(local, global_every=2), 7)):
        model, tokens = made(config)[0], tokens_of(config, 1, 8)
        changed = tokens.copy()
        changed[:, 0] = (changed[:, 0] + 1) % config.vocab_size
        moved = np.abs(run(config, model, tokens) - run(config, model, changed)).max((0, 2)) > 1e-6
        assert moved.tolist() == [position <= reach for position in range(8)]


def test_experts_of_one_choice_of_one_are_a_dense_layer():
    dense = replace(CONFIG, experts=None, mlp=8)
    sparse = replace(CONFIG, mlp=8, experts=Experts(count=1, per_token=1, mlp=8))
    one, other = made(dense)[0], made(sparse)[0]
    for name in ("gate", "up", "down"):
        getattr(other.layers.experts, name)[...] = getattr(one.layers.mlp, name)[...][:, None]
    for room in ("attention", "attention_norm", "mlp_norm"):
        nnx.update(getattr(other.layers, room), nnx.state(getattr(one.layers, room)))
    for name in ("embedding", "head"):
        getattr(other, name)[...] = getattr(one, name)[...]
    nnx.update(other.norm, nnx.state(one.norm))
    tokens = tokens_of(CONFIG, 2, 8)
    np.testing.assert_allclose(
        run(dense, one, tokens), run(sparse, other, tokens), rtol=1e-5, atol=1e-5
    )


def loss_of(experts: Experts):
    """Loss and metrics of the model with these experts."""
    config = replace(CONFIG, experts=experts)
    model, loss = made(config)
    tokens = jnp.asarray(tokens_of(config, 2, 16))
    return jax.tree.map(float, nnx.jit(loss)(model, {"inputs": tokens, "targets": tokens}))


def test_a_capacity_drops_and_counts():
    plain, tight, wide = (
        loss_of(replace(SPARSE.experts, capacity=capacity)) for capacity in (0.0, 0.5, 4.0)
    )
    assert "dropped" not in plain[1] and wide[1]["dropped"] == 0
    assert (
        tight[1]["dropped"] >= CONFIG.layers * 2 * 16 * 2 / 2
    )  # experts take half of the assignments at most
    assert wide[0] == pytest.approx(plain[0], rel=1e-5) and abs(tight[0] - plain[0]) > 1e-4


def test_the_router_z_loss_is_added():
    plain, added = (
        loss_of(replace(SPARSE.experts, z_loss=coefficient)) for coefficient in (0.0, 0.01)
    )
    assert (
        added[0] - plain[0] == pytest.approx(0.01 * added[1]["router_z"], rel=1e-3)
        and added[1]["router_z"] > 0
    )


@pytest.mark.parametrize("every", [1, 2])
def test_biases_move_in_training_alone_and_have_no_gradient(every: int):
    experts = replace(SPARSE.experts, bias=True, bias_rate=0.01, balance=0.0, every=every)
    config = replace(CONFIG, layers=4, experts=experts)
    model, loss = made(config)
    layers = model.layers if every == 1 else model.layers.blocks[1]
    count = config.layers // every
    layers.experts.bias[...] = jnp.zeros((count, 4))
    tokens = jnp.asarray(tokens_of(config, 2, 16))
    loads = model.forward(tokens)[1]["loads"]
    assert not layers.experts.bias[...].any()
    assert loads.shape == (count, 4) and (loads.sum(1) == 2 * 16 * 2).all()
    loss(model, {"inputs": tokens, "targets": tokens})
    moved = 0.01 * np.sign(16 - np.asarray(loads))
    np.testing.assert_allclose(layers.experts.bias[...], moved, rtol=1e-6)
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    assert not any("bias" in map(str, path) for path, _ in params)


@pytest.mark.long
def test_biases_move_in_a_compiled_step():
    config = replace(CONFIG, layers=2, experts=replace(SPARSE.experts, bias=True, bias_rate=0.01))
    program = shardlib.compile(
        *models.build(config),
        optax.adamw(1e-3),
        models.example_batch(config, 8, 16),
        topology="cpu:8",
        pin={"mesh": {"data": 8}},
    )
    state = program.init(seed=0)
    tokens = jnp.asarray(tokens_of(config, 8, 16))
    state, _ = program.step(state, {"inputs": tokens, "targets": tokens})
    (bias,) = [leaf for leaf in jax.tree.leaves(state.model_state) if leaf.shape == (2, 4)]
    assert (
        set(np.unique(np.abs(np.asarray(bias)))) <= {0.0, np.float32(0.01)}
        and np.asarray(bias).any()
    )


def test_a_mixture_without_a_transformer():
    mixture = mixture_of_experts(Experts(count=4, per_token=2, mlp=8), 16, nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 6, 16))
    out, terms = mixture(jnp.asarray(x, jnp.float32))
    weights = {
        name: np.asarray(getattr(mixture, name)[...], np.float64)
        for name in ("router", "gate", "up", "down")
    }
    np.testing.assert_allclose(
        out, np.stack([numpy_decoder.experts(row, weights, 2) for row in x]), rtol=1e-4, atol=1e-5
    )
    assert set(terms) == {"balance"} and float(terms["balance"]) > 0.9
    with pytest.raises(ModelError, match="a token cannot visit 5 of 4 experts"):
        mixture_of_experts(Experts(count=4, per_token=5, mlp=8), 16, nnx.Rngs(0))


def test_cross_entropy_equals_optax():
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 5, (2, 5, 11)), jnp.float32)
    targets = jnp.asarray(np.random.default_rng(1).integers(0, 11, (2, 5)), jnp.int32)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    np.testing.assert_allclose(cross_entropy(logits, targets), expected, rtol=1e-6)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    from shardlib.models.transformer import frequencies

    for name in ("deepseek-v3", "llama-3.1-8b"):
        config = huggingface.read(PUBLISHED[name][0])
        ratio = frequencies(64, config.rope_theta, config.rope_scaling) / frequencies(
            64, config.rope_theta
        )
        assert (
            ratio[0] == 1
            and np.isclose(ratio[-1], 1 / config.rope_scaling.factor)
            and (np.diff(ratio) <= 1e-12).all()
        )


def test_the_loss_holds_no_gather_on_the_logits():
    init, loss = models.build(CONFIG)
    definition, state = nnx.split(nnx.eval_shape(lambda: init(nnx.Rngs(0))))
    text = str(
        jax.make_jaxpr(lambda s, b: loss(nnx.merge(definition, s), b))(
            state, models.example_batch(CONFIG, 8, 16)
        )
    )
    assert text.count("gather") == text.count("gather[") == 1  # the embedding


@pytest.mark.long
def test_parameters_are_made_outside_and_inside_a_mesh():
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:2]), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    init, _ = models.build(replace(CONFIG, layers=1))
    outside = nnx.eval_shape(lambda: init(nnx.Rngs(0)))
    with jax.set_mesh(mesh):
        inside = init(nnx.Rngs(0))
    shapes = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.to_pure_dict(nnx.state(model)))
        for model in (outside, inside)
    ]
    assert shapes[0] == shapes[1]


def test_a_new_model_guesses_evenly():
    config = replace(CONFIG, vocab_size=256, embed=64, tied=True)
    init, loss = models.build(config)
    tokens = tokens_of(config, 4, 17)
    entropy = jax.jit(
        lambda: loss(init(nnx.Rngs(0)), {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})[0]
    )()
    assert abs(entropy - np.log(256)) < 1.0  # logits of unit variance cost 0.5


@pytest.mark.matrix
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"sliding_window": 5, "global_every": 2, "attention_softcap": 20.0},
        {"latent": LatentAttention(kv_lora=8, rope_dim=4, nope_dim=4, v_dim=6, q_lora=0)},
    ],
    ids=["grouped", "window", "latent"],
)
def test_attention_in_blocks_is_attention(changed: dict[str, Any]):
    config = replace(CONFIG, **changed)
    tokens = tokens_of(config, 2, 17)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def outcome(block: int) -> Any:
        model, loss = made(replace(config, attention_block=block))
        return jax.jit(nnx.value_and_grad(lambda model: loss(model, batch)[0]))(model)

    (whole, wanted), (parts, found) = outcome(0), outcome(4)
    assert float(parts) == pytest.approx(float(whole), rel=1e-6)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()


def test_a_sequence_that_blocks_do_not_divide_is_an_error():
    model, _ = made(replace(CONFIG, attention_block=5))
    with pytest.raises(ModelError, match="a sequence of 16 is not a multiple of attention_block=5"):
        model(jnp.asarray(tokens_of(CONFIG, 1, 16)))
