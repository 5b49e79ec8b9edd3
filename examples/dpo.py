"""Preferences without a reward model: DPO, with a reference model that is frozen beside the policy.

    python examples/dpo.py
    python examples/dpo.py --topology v5e:16x16

Of two answers to a prompt the one is preferred that counts on from it. The loss is that of Rafailov
et al. (arXiv:2305.18290, equation 7). The figure is the share of unseen pairs in which the policy,
over the reference, makes the preferred answer no likelier: all of them at first, as it is that one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # where there are no accelerators

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib

VOCAB, PROMPT, ANSWER, ROWS, WIDE, BETA = 24, 4, 8, 256, 64, 0.1
optimizer = optax.adamw(2e-3)


class Policy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDE, rngs=rngs)
        self.place = nnx.Embed(PROMPT + ANSWER, WIDE, rngs=rngs)
        self.mix = nnx.MultiHeadAttention(4, WIDE, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDE, 256, rngs=rngs), nnx.Linear(256, WIDE, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(WIDE, rngs=rngs) for _ in range(3)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        x = x + self.mix(self.norms[0](x), mask=nnx.make_causal_mask(tokens))
        x = x + self.down(nnx.gelu(self.up(self.norms[1](x))))
        return self.embed.attend(self.norms[2](x))


GRAPH = nnx.graphdef(nnx.eval_shape(lambda: Policy(nnx.Rngs(0))))


def init(key):
    policy = nnx.state(Policy(nnx.Rngs(key)), nnx.Param)
    return {"policy": policy, "reference": policy, "moments": optimizer.init(policy)}


def likelihood(params, tokens):
    """The logarithm of the probability of each answer, [rows]."""
    logits = nnx.merge(GRAPH, params)(tokens[:, :-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return -each[:, PROMPT - 1 :].sum(axis=1)


def margins(policy, reference, batch):
    """How much likelier the policy makes the preferred answer than the reference does, [rows]."""
    ours, theirs = (
        likelihood(params, batch["chosen"]) - likelihood(params, batch["rejected"])
        for params in (policy, reference)
    )
    return ours - theirs


def step(state, batch):
    def loss(policy):
        found = margins(policy, state["reference"], batch)
        return jax.nn.softplus(-BETA * found).mean(), found

    (value, found), gradients = jax.value_and_grad(loss, has_aux=True)(state["policy"])
    updates, moments = optimizer.update(gradients, state["moments"], state["policy"])
    policy = optax.apply_updates(state["policy"], updates)
    after = {"policy": policy, "reference": state["reference"], "moments": moments}
    return after, {"loss": value, "wrong": (found <= 0).mean()}


def rows(number):
    """Prompts, each with an answer that counts on and one that errs in one place."""
    rng = np.random.default_rng(number)
    chosen = (rng.integers(0, VOCAB, (ROWS, 1)) + np.arange(PROMPT + ANSWER)) % VOCAB
    rejected = chosen.copy()
    places = PROMPT + rng.integers(0, ANSWER, ROWS)
    rejected[np.arange(ROWS), places] += rng.integers(1, VOCAB, ROWS)
    return {"chosen": chosen.astype(np.int32), "rejected": (rejected % VOCAB).astype(np.int32)}


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns the share of wrong pairs before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="cpu:8")
    parser.add_argument("--steps", type=int, default=150)
    asked = parser.parse_args(arguments)
    program = shardlib.compile_step(init, step, rows(0), topology=asked.topology)
    print(program.plan.explain().split("\n\n")[0])
    state, wrong = program.init(seed=0), list[float]()
    for number in range(asked.steps):  # rows are new at each step: what is counted is unseen
        state, metrics = program.step(state, rows(number))
        wrong.append(float(metrics["wrong"]))
        if number % 25 == 0 or number == asked.steps - 1:
            print(f"step {number}: loss {float(metrics['loss']):.3f}, {wrong[-1]:.0%} wrong")
    return [wrong[0], float(np.mean(wrong[-5:]))]


if __name__ == "__main__":
    main()
