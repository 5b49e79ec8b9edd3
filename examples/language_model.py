"""A language model from scratch: it reads the sources of Python's own library, byte by byte.

    python examples/language_model.py
    python examples/language_model.py --topology v5e:16x16 --run runs/a --steps 100000

`shardlib.fit` trains; with `--run` it saves beside the training, and goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # where there are no accelerators

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib

ROWS, SEQ, BYTES, WIDE, HEADS, LAYERS = 32, 64, 256, 64, 4, 2


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = (nnx.RMSNorm(WIDE, rngs=rngs) for _ in range(2))
        self.qkv = nnx.Linear(WIDE, 3 * WIDE, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDE, WIDE, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDE, 4 * WIDE, rngs=rngs)
        self.down = nnx.Linear(4 * WIDE, WIDE, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], HEADS, WIDE // HEADS)
        q, k, v = (y.reshape(heads) for y in jnp.split(self.qkv(self.first(x)), 3, -1))
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class LanguageModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(BYTES, WIDE, rngs=rngs)
        self.positions = nnx.Embed(SEQ, WIDE, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDE, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(self.norm(x)) / WIDE**0.5


def loss(model, batch):
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def text() -> np.ndarray:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns the loss at the start and at the end, nats a byte."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="cpu:8")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--run", help="folder for checkpoints and metrics")
    asked = parser.parse_args(arguments)
    corpus = text()

    def rows(number: int) -> dict[str, np.ndarray]:  # the same for the same step
        starts = np.random.default_rng(number).integers(0, len(corpus) - SEQ - 1, ROWS)
        return {"tokens": np.stack([corpus[s : s + SEQ + 1] for s in starts]).astype(np.int32)}

    program = shardlib.compile(
        LanguageModel, loss, optax.adamw(3e-3), rows(0), topology=asked.topology
    )
    print(program.plan.explain().split("\n\n")[0])
    untrained = float(program.evaluate(program.init(seed=0), rows(0))["loss"])
    settings = shardlib.Settings(run=asked.run) if asked.run else None
    fitted = shardlib.fit(program, rows, steps=asked.steps, settings=settings)
    trained = float(program.evaluate(fitted.state, rows(10**6))["loss"])
    print(f"{untrained:.2f} nats a byte before, {trained:.2f} after {asked.steps} steps")
    return [untrained, trained]


if __name__ == "__main__":
    main()
