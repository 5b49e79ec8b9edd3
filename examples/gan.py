"""A GAN learns eight clusters on a circle: two models, two optimizers, one step.

    python examples/gan.py
    python examples/gan.py --topology v5e:16x16

Where one loss and one optimizer do not say it, the step is written by hand; `compile_step` plans
and shards all of it. The figure is the energy distance between what is generated and the clusters,
which is 0 where they are one distribution.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # where there are no accelerators

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib

ROWS, NOISE, WIDE = 1024, 8, 256
make, judge = optax.adam(5e-4, b1=0.5), optax.adam(1e-3, b1=0.5)


def mlp(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def layers(key, *sizes):
    pairs = list(itertools.pairwise(sizes))
    return [
        {"w": jax.random.normal(one, pair) * (2 / pair[0]) ** 0.5, "b": jnp.zeros(pair[1])}
        for one, pair in zip(jax.random.split(key, len(pairs)), pairs, strict=True)
    ]


def init(key):
    keys = jax.random.split(key)
    maker, critic = layers(keys[0], NOISE, WIDE, WIDE, 2), layers(keys[1], 2, WIDE, WIDE, 1)
    return {
        "maker": maker,
        "critic": critic,
        "making": make.init(maker),
        "judging": judge.init(critic),
    }


def step(state, batch):
    def judged(critic):
        fake = mlp(state["maker"], batch["noise"])
        real, made = jnp.split(mlp(critic, jnp.concatenate([batch["real"], fake])), 2)
        return jax.nn.softplus(-real).mean() + jax.nn.softplus(made).mean()

    def fooled(maker):
        return jax.nn.softplus(-mlp(critic, mlp(maker, batch["noise"]))).mean()

    critic_loss, gradients = jax.value_and_grad(judged)(state["critic"])
    updates, judging = judge.update(gradients, state["judging"])
    critic = optax.apply_updates(state["critic"], updates)
    maker_loss, gradients = jax.value_and_grad(fooled)(state["maker"])
    updates, making = make.update(gradients, state["making"])
    maker = optax.apply_updates(state["maker"], updates)
    state = {"maker": maker, "critic": critic, "making": making, "judging": judging}
    return state, {"critic": critic_loss, "maker": maker_loss}


def rows(number):
    """Points of the clusters, and noise."""
    rng = np.random.default_rng(number)
    angle = rng.integers(0, 8, ROWS) * np.pi / 4
    real = np.stack([np.cos(angle), np.sin(angle)], -1) + rng.normal(0, 0.05, (ROWS, 2))
    noise = rng.normal(0, 1, (ROWS, NOISE))
    return {"real": real.astype(np.float32), "noise": noise.astype(np.float32)}


def distance(maker):
    """The energy distance between generated points and those of the clusters."""
    batch = rows(10**6)  # which no step has seen
    made, real = np.asarray(mlp(maker, batch["noise"])), batch["real"]

    def apart(a, b):
        return np.linalg.norm(a[:, None] - b[None], axis=-1).mean()

    return float(2 * apart(made, real) - apart(made, made) - apart(real, real))


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns the distance at the start and at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="cpu:8")
    parser.add_argument("--steps", type=int, default=600)
    asked = parser.parse_args(arguments)
    program = shardlib.compile_step(init, step, rows(0), topology=asked.topology)
    print(program.plan.explain().split("\n\n")[0])
    state = program.init(seed=0)
    found = [distance(jax.device_get(state["maker"]))]
    print(f"before: energy distance {found[0]:.4f}")
    for number in range(asked.steps):
        state, metrics = program.step(state, rows(number))
        if number % 100 == 99 or number == asked.steps - 1:
            found.append(distance(jax.device_get(state["maker"])))
            losses = ", ".join(f"{name} {float(metrics[name]):.3f}" for name in ("critic", "maker"))
            print(f"step {number}: energy distance {found[-1]:.4f} ({losses})")
    return [found[0], found[-1]]


if __name__ == "__main__":
    main()
