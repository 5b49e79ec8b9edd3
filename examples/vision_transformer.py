"""A vision transformer of Flax Linen learns to tell patterns apart, and is evaluated on others.

python examples/vision_transformer.py
python examples/vision_transformer.py --topology v5e:16x16
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # where there are no accelerators

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import shardlib

ROWS, SIDE, PATCH, WIDE, LAYERS, KINDS = 128, 16, 4, 64, 2, 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDE)(nn.gelu(nn.Dense(4 * WIDE)(nn.LayerNorm()(x))))


class VisionTransformer(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Conv(WIDE, (PATCH, PATCH), strides=PATCH)(images)
        x = x.reshape(x.shape[0], -1, WIDE)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(LAYERS):
            x = Block()(x)
        return nn.Dense(KINDS)(nn.LayerNorm()(x).mean(1))


module = VisionTransformer()


def loss(params, batch):
    logits = module.apply({"params": params}, batch["image"])
    error = optax.softmax_cross_entropy_with_integer_labels(logits, batch["kind"])
    return error.mean(), {"accuracy": (logits.argmax(-1) == batch["kind"]).mean()}


def rows(number):
    """Waves along, across and askew, at any phase, under noise."""
    rng = np.random.default_rng(number)
    kind = rng.integers(0, KINDS, ROWS).astype(np.int32)
    angle = (np.pi * kind / KINDS)[:, None, None]
    x, y = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    phase = rng.uniform(0, 2 * np.pi, (ROWS, 1, 1))
    waves = np.sin(1.3 * (x * np.cos(angle) + y * np.sin(angle)) + phase)
    images = waves + 0.5 * rng.normal(size=waves.shape)
    return {"image": images[..., None].astype(np.float32), "kind": kind}


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns the loss at the start and that of images it has not seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="cpu:8")
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args(arguments)
    first = rows(0)
    program = shardlib.compile(
        shardlib.linen(module, jnp.asarray(first["image"])),
        loss,
        optax.adamw(2e-3),
        first,
        topology=asked.topology,
    )
    print(program.plan.explain().split("\n\n")[0])
    state, losses = program.init(seed=0), []
    for number in range(asked.steps):
        state, metrics = program.step(state, rows(number))
        losses.append(float(metrics["loss"]))
        if number % 20 == 0 or number == asked.steps - 1:
            print(f"step {number}: {', '.join(f'{k} {float(v):.3f}' for k, v in metrics.items())}")
    unseen = program.evaluate(state, rows(10**6))
    print(f"unseen images: accuracy {float(unseen['accuracy']):.3f}")
    return [losses[0], float(unseen["loss"])]


if __name__ == "__main__":
    main()
