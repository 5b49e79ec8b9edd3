"""T5 and Switch: sizes, the bias of positions, the forward pass in NumPy, and steps on many
devices.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib import models
from shardlib.errors import ModelError
from shardlib.functions.attention import distance_buckets
from shardlib.models import huggingface
from shardlib.models.config import EncoderDecoderConfig, Experts
from tests.functions import numpy_experts
from tests.models.numpy_decoder import rms

SMALL = EncoderDecoderConfig(
    name="small",
    vocab_size=64,
    encoder_layers=2,
    decoder_layers=2,
    embed=16,
    heads=4,
    head_dim=8,
    mlp=32,
    max_seq=32,
    buckets=8,
    max_distance=16,
    compute_dtype="float32",
    experts=Experts(
        count=4, per_token=1, mlp=32, normalise=False, capacity=4.0, balance=0.01, z_loss=0.001
    ),
)
#: https://huggingface.co/google/switch-base-8/blob/main/config.json
SWITCH_BASE_8 = {
    "model_type": "switch_transformers",
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 3072,
    "num_heads": 12,
    "num_layers": 12,
    "num_decoder_layers": 12,
    "num_sparse_encoder_layers": 6,
    "num_sparse_decoder_layers": 6,
    "num_experts": 8,
    "expert_capacity": 64,
    "feed_forward_proj": "relu",
    "vocab_size": 32128,
    "router_bias": False,
    "tie_word_embeddings": True,
    "router_z_loss_coef": 0.001,
    "router_aux_loss_coef": 0.001,
    "relative_attention_num_buckets": 32,
}


def batch(rows: int = 8, seq: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 64, (rows, seq)).astype(np.int32)
        for name in ("inputs", "decoder_inputs", "targets")
    }


def test_published_sizes():
    """Table 9 of arXiv:2101.03961 has 1571 billion parameters for Switch-C, 7 for Switch-Base and
    395 for Switch-XXL, whose weights (https://huggingface.co/google/switch-xxl-128) have 128
    experts.
    """
    assert round(models.PRESETS["switch-c-2048"].parameter_count() / 1e9) == 1571
    gated = EncoderDecoderConfig(
        name="base",
        vocab_size=32128,
        encoder_layers=12,
        decoder_layers=12,
        embed=768,
        heads=12,
        head_dim=64,
        mlp=2048,
        activation="gelu_tanh",
        gated=True,
        experts=Experts(count=128, per_token=1, mlp=2048),
    )
    assert round(gated.parameter_count() / 1e9) == 7
    large = replace(
        gated,
        embed=4096,
        mlp=10240,
        heads=64,
        encoder_layers=24,
        decoder_layers=24,
        experts=Experts(count=128, per_token=1, mlp=10240),
    )
    assert round(large.parameter_count() / 1e9) == 395
    assert round(models.PRESETS["switch-base-8"].parameter_count() / 1e6) == 619


def test_the_preset_is_the_published_file():
    read, preset = (
        huggingface.read(SWITCH_BASE_8, name="switch-base-8"),
        models.load("switch-base-8"),
    )
    assert (
        isinstance(read, EncoderDecoderConfig)
        and isinstance(preset, EncoderDecoderConfig)
        and read.experts is not None
    )
    assert read.experts.load_limit(512) == 1.0 and read.experts.load_limit(16) == 8.0
    assert replace(read, experts=preset.experts) == preset


def test_layers_with_experts_of_files():
    found = huggingface.read(
        {
            "model_type": "switch_transformers",
            "num_layers": 5,
            "num_decoder_layers": 4,
            "num_sparse_encoder_layers": 3,
            "num_sparse_decoder_layers": 0,
        }
    )
    assert isinstance(found, EncoderDecoderConfig) and (
        found.encoder_every,
        found.decoder_every,
    ) == (1, 0)
    assert found.pattern(4) == (False, True, False, False)
    with pytest.raises(ModelError, match="router_bias true"):
        huggingface.read({"model_type": "switch_transformers", "router_bias": True})


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"tied": False, "gated": True, "activation": "gelu_tanh"},
        {"encoder_every": 1, "decoder_every": 0},
        {"experts": None},
    ],
)
def test_parameters_are_counted(changed: dict):
    config = replace(SMALL, **changed)
    shapes = nnx.eval_shape(lambda: models.build(config)[0](nnx.Rngs(0)))
    assert (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(shapes, nnx.Param)))
        == config.parameter_count()
    )


@pytest.mark.parametrize("both", [True, False])
def test_buckets_of_distances(both: bool):
    """From the words of arXiv:1910.10683, section 2.1: logarithmically wider up to an offset of
    128, then all alike.
    """

    def bucket(ahead: int) -> int:
        count, first = (16, 16 if ahead > 0 else 0) if both else (32, 0)
        distance = abs(ahead) if both else max(-ahead, 0)
        if distance < count // 2:
            return first + distance
        return first + min(
            count - 1,
            count // 2
            + math.floor(
                math.log(distance / (count // 2)) / math.log(128 / (count // 2)) * (count // 2)
                + 1e-6
            ),
        )

    found = np.asarray(distance_buckets(ahead(300), buckets=32, max_distance=128, both=both))
    assert (found == [[bucket(key - query) for key in range(300)] for query in range(300)]).all()


def ahead(seq: int) -> jax.Array:
    return jnp.arange(seq) - jnp.arange(seq)[:, None]


def reference(model: nnx.Module, data: dict[str, np.ndarray]) -> np.ndarray:
    """Logits of `SMALL`, in NumPy, token by token where experts are concerned."""
    get = {
        "/".join(map(str, path)): np.asarray(leaf[...], np.float64)
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return rms(x, scale, SMALL.norm_epsilon)

    def attend(
        x: np.ndarray, source: np.ndarray, at: str, layer: int, bias: np.ndarray | float
    ) -> np.ndarray:
        query, key, value, out = (
            get[f"{at}/{name}"][layer] for name in ("query", "key", "value", "out")
        )
        mixed = np.zeros_like(x)
        for head in range(SMALL.heads):
            scores = x @ query[:, head] @ (source @ key[:, head]).T + (
                bias if np.isscalar(bias) else bias[..., head]
            )
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed += (
                weights / weights.sum(-1, keepdims=True) @ (source @ value[:, head]) @ out[head]
            )
        return mixed

    def experts(x: np.ndarray, at: str, layer: int) -> np.ndarray:
        router, up, down = (get[f"{at}/{name}"][layer] for name in ("router", "up", "down"))
        shares, chosen, _ = numpy_experts.route(x @ router, 1, normalise=False)
        return numpy_experts.visit(x, shares, chosen, up, down, activation="relu")[0]

    def stack(x: np.ndarray, side: str, memory: np.ndarray | None) -> np.ndarray:
        seq = len(x)
        bias = get[f"{side}/bias"][
            np.asarray(
                distance_buckets(
                    ahead(seq),
                    buckets=SMALL.buckets,
                    max_distance=SMALL.max_distance,
                    both=memory is None,
                )
            )
        ]
        if memory is not None:
            bias = np.where(np.tril(np.ones((seq, seq), bool))[..., None], bias, -np.inf)
        for k in range(2):  # both in one repetition of the loop
            at = f"{side}/layers/blocks/{k}"
            normal = norm(x, get[f"{at}/attention_norm/scale"][0])
            x = x + attend(normal, normal, f"{at}/attention", 0, bias)
            if memory is not None:
                x = x + attend(
                    norm(x, get[f"{at}/cross_norm/scale"][0]), memory, f"{at}/cross", 0, 0.0
                )
            normal = norm(x, get[f"{at}/mlp_norm/scale"][0])
            x = x + (
                experts(normal, f"{at}/experts", 0)
                if k == 1
                else np.maximum(normal @ get[f"{at}/mlp/up"][0], 0) @ get[f"{at}/mlp/down"][0]
            )
        return norm(x, get[f"{side}/norm/scale"])

    rows = []
    for source, target in zip(data["inputs"], data["decoder_inputs"], strict=True):
        memory = stack(get["embedding"][source], "encoder", None)
        rows.append(
            stack(get["embedding"][target], "decoder", memory)
            @ get["embedding"].T
            / math.sqrt(SMALL.embed)
        )
    return np.stack(rows)


@pytest.mark.long
def test_forward_pass():
    model, data = models.build(SMALL)[0](nnx.Rngs(0)), batch(rows=2)
    np.testing.assert_allclose(
        model(data["inputs"], data["decoder_inputs"]), reference(model, data), rtol=1e-4, atol=1e-4
    )


@pytest.mark.long
def test_steps_on_devices_are_those_of_one():
    """Every second layer has experts of a small capacity on their devices; losses, drops and
    parameters are those of one device.
    """
    config = replace(SMALL, experts=replace(SMALL.experts, capacity=0.75))
    init, loss = models.build(config)
    found = []
    for topology, pin in (
        ("cpu:1", {"mesh": {}}),
        ("cpu:8", {"mesh": {"expert": 4, "fsdp": 2}, "experts": "capacity", "zero": 3}),
    ):
        program = shardlib.compile(init, loss, optax.sgd(0.1), batch(), topology=topology, pin=pin)
        state, metrics = program.step(program.init(0), batch())
        found.append(
            (float(metrics["loss"]), int(metrics["dropped"]), jax.tree.leaves(state.params))
        )
    assert found[0][1] > 0
    for one in found[1:]:
        assert one[0] == pytest.approx(found[0][0], rel=1e-5) and one[1] == found[0][1]
        for leaf, other in zip(one[2], found[0][2], strict=True):
            np.testing.assert_allclose(
                leaf, other, rtol=1e-5, atol=1e-5 * float(np.abs(other).max())
            )


def test_contradictions_are_listed_together():
    with pytest.raises(ModelError) as caught:
        EncoderDecoderConfig(
            name="odd",
            vocab_size=8,
            encoder_layers=3,
            decoder_layers=4,
            embed=8,
            heads=2,
            head_dim=4,
            mlp=8,
            experts=Experts(count=4, per_token=1, mlp=8, first_dense=1),
        )
    assert "the 3 layers of the encoder are not a multiple" in str(
        caught.value
    ) and "first_dense is 1" in str(caught.value)
    with pytest.raises(ModelError, match="takes sequences of 1 to 32 tokens, not 64"):
        models.example_batch(SMALL, 8, 64)
