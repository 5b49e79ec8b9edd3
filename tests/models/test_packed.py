"""Documents that share rows: each token sees its own document alone, as if it were by itself."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib.data.open import read
from shardlib.models.config import LatentAttention, TransformerConfig
from shardlib.models.transformer import build, example_batch
from tests.models.configs import TINY

CONFIG = replace(TINY, layers=2)
LEARNED = replace(CONFIG, learned_positions=True, norm="layer")
LATENT = replace(
    CONFIG, kv_heads=4, latent=LatentAttention(q_lora=8, kv_lora=8, nope_dim=4, rope_dim=2, v_dim=4)
)
LENGTHS = ((5, 7, 4), (16,), (3, 3, 3), (9, 6))


def documents(seed: int = 0) -> list[list[np.ndarray]]:
    generator = np.random.default_rng(seed)
    return [[generator.integers(0, 32, length + 1, np.int32) for length in row] for row in LENGTHS]


def packed(rows: list[list[np.ndarray]], seq: int = 16) -> dict[str, np.ndarray]:
    """A batch with the documents of each row one after the other, and padding."""
    batch = {
        name: np.zeros((len(rows), seq), np.float32 if name == "weights" else np.int32)
        for name in ("inputs", "targets", "segments", "positions", "weights")
    }
    for number, row in enumerate(rows):
        start = 0
        for segment, text in enumerate(row, 1):
            place = slice(start, start + len(text) - 1)
            for name, value in (
                ("inputs", text[:-1]),
                ("targets", text[1:]),
                ("segments", segment),
                ("positions", np.arange(len(text) - 1)),
                ("weights", 1.0),
            ):
                batch[name][number, place] = value
            start = place.stop
    return batch


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [CONFIG, replace(CONFIG, sliding_window=3), LEARNED, LATENT],
    ids=["rotary", "window", "learned", "latent"],
)
def test_documents_are_as_if_by_themselves(config: TransformerConfig):
    init, loss = build(config)
    model = nnx.jit(lambda: init(nnx.Rngs(0)))()
    batch = packed(documents())
    both = nnx.jit(
        lambda model, batch: (
            loss(model, batch)[0],
            model.forward(batch["inputs"], batch["segments"], batch["positions"])[0],
        )
    )(model, batch)
    single, total = nnx.jit(lambda model, tokens: model(tokens)), []
    for number, row in enumerate(documents()):
        start = 0
        for text in row:
            alone = np.asarray(single(model, text[None, :-1]))[0]
            np.testing.assert_allclose(
                np.asarray(both[1])[number, start : start + len(alone)], alone, rtol=2e-5, atol=2e-5
            )
            total += list(-np.asarray(jax.nn.log_softmax(alone))[np.arange(len(alone)), text[1:]])
            start += len(alone)
    np.testing.assert_allclose(float(both[0]), np.mean(total), rtol=1e-5)


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    "pin",
    [
        {"mesh": {"fsdp": 2, "tensor": 2}, "zero": 3},
        {"mesh": {"data": 2, "context": 2}, "context": "ring"},
        {"mesh": {"stage": 2, "data": 2}, "microbatches": 2},
    ],
    ids=str,
)
def test_packed_steps_on_devices_are_those_of_one(pin: dict):
    init, loss = build(CONFIG)
    rows = [*documents(), *documents(1)] if "stage" in pin["mesh"] else documents()
    batch = packed([[row[0][:5], *row[1:]] for row in rows] if "stage" in pin["mesh"] else rows)
    if (
        "stage" in pin["mesh"]
    ):  # the mean of a microbatch is that of all where weights add up to the same
        batch["weights"] = np.ones_like(batch["weights"])
    axes = dict.fromkeys(batch, ("batch", "seq"))

    def steps(topology: str, pins: dict) -> tuple[list[float], list[np.ndarray]]:
        program = shardlib.compile(
            init, loss, optax.sgd(0.1), batch, topology=topology, pin=pins, batch_axes=axes
        )
        state, losses = program.init(0), []
        for _ in range(2):
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]

    (one, params), (other, cut) = steps("cpu:1", {"mesh": {}}), steps("cpu:4", pin)
    np.testing.assert_allclose(other, one, rtol=1e-5)
    for a, b in zip(cut, params, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_rows_of_the_data_room_are_what_models_take(tmp_path):
    (tmp_path / "text.jsonl").write_text(
        "".join('{"text": "' + "abcdefgh"[: 3 + n % 6] * (1 + n % 3) + '"}\n' for n in range(200))
    )
    data = read(tmp_path / "text.jsonl", seq=32, packing="best-fit", cache=tmp_path / "cache")
    config = replace(CONFIG, vocab_size=256)
    found, batch = example_batch(config, 4, 32, packed=True), data.batch(0, 4)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in found.items()} == {
        name: (value.shape, jnp.dtype(value.dtype)) for name, value in batch.items()
    }
    init, loss = build(config)
    assert np.isfinite(
        float(
            nnx.jit(lambda model, batch: loss(model, batch)[0])(
                nnx.jit(lambda: init(nnx.Rngs(0)))(), batch
            )
        )
    )
