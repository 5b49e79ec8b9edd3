"""A diffusion model of Flax NNX learns to draw points on a ring out of noise.

python examples/diffusion.py
python examples/diffusion.py --topology v5e:16x16
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import pairwise

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # where there are no accelerators

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib

ROWS, WIDE, LAYERS, DRAWN, LAST = 512, 128, 3, 1024, 0.98


class Denoiser(nnx.Module):
    """Says which noise is in points, [rows, 2] and the time of each, [rows]."""

    def __init__(self, rngs: nnx.Rngs):
        self.inward = nnx.Linear(2 + 16, WIDE, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDE, WIDE, rngs=rngs) for _ in range(LAYERS)])
        self.outward = nnx.Linear(WIDE, 2, rngs=rngs)

    def __call__(self, x, time):
        waves = time[:, None] * 2.0 ** jnp.arange(8)
        x = self.inward(jnp.concatenate([x, jnp.sin(waves), jnp.cos(waves)], axis=1))
        for layer in self.layers:
            x = x + nnx.silu(layer(x))
        return self.outward(x)


def mixed(time):
    """Shares of a point and of noise, which begin at (1, 0) and end near (0, 1)."""
    return jnp.cos(time * jnp.pi / 2), jnp.sin(time * jnp.pi / 2)


def loss(model, batch):
    kept, added = mixed(batch["time"][:, None])
    found = model(kept * batch["point"] + added * batch["noise"], batch["time"])
    return ((found - batch["noise"]) ** 2).mean()


def rows(number):
    """Points on a ring, noise and times."""
    rng = np.random.default_rng(number)
    angle = rng.uniform(0, 2 * np.pi, ROWS)
    batch = {
        "point": np.stack([np.cos(angle), np.sin(angle)], axis=1),
        "noise": rng.normal(size=(ROWS, 2)),
        "time": rng.uniform(0, LAST, ROWS),
    }
    return {name: array.astype(np.float32) for name, array in batch.items()}


@nnx.jit(static_argnames="steps")
def drawn(model, noise, steps=40):
    """Points out of noise, by the deterministic sampler of DDIM (arXiv:2010.02502)."""
    times = jnp.linspace(LAST, 0.0, steps + 1)
    x = noise
    for now, then in pairwise(times):
        found = model(x, jnp.full(x.shape[:1], now))
        kept, added = mixed(now)
        point = jnp.clip((x - added * found) / kept, -1.5, 1.5)
        kept, added = mixed(then)
        x = kept * point + added * found
    return x


def from_ring(points):
    """Mean distance from the ring."""
    return float(jnp.abs(jnp.linalg.norm(points, axis=1) - 1).mean())


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns how far noise is from the ring, and what is drawn out of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="cpu:8")
    parser.add_argument("--steps", type=int, default=600)
    asked = parser.parse_args(arguments)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, asked.steps))
    program = shardlib.compile(Denoiser, loss, optimizer, rows(0), topology=asked.topology)
    print(program.plan.explain().split("\n\n")[0])
    state = program.init(seed=0)
    for number in range(asked.steps):
        state, metrics = program.step(state, rows(number))
        if number % 100 == 0 or number == asked.steps - 1:
            print(f"step {number}: loss {float(metrics['loss']):.3f}")
    noise = jax.random.normal(jax.random.key(1), (DRAWN, 2))
    points = drawn(program.module(state), noise)
    print(f"from the ring: noise {from_ring(noise):.3f}, points {from_ring(points):.3f}")
    return [from_ring(noise), from_ring(points)]


if __name__ == "__main__":
    main()
