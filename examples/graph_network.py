"""A graph network learns which community a node is of, from its edges and noisy features.

    python examples/graph_network.py
    python examples/graph_network.py --topology v5e:16x16

Nodes are rows; messages are sums over edges. The parameters are a plain tree.
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

import shardlib

NODES, EDGES, COMMUNITIES, FEATURES, WIDE, LAYERS = 1024, 8192, 8, 32, 128, 2


def init(key):
    sizes = {"in": (FEATURES, WIDE), "out": (WIDE, COMMUNITIES)}
    for at in range(LAYERS):
        sizes |= {f"self_{at}": (WIDE, WIDE), f"message_{at}": (WIDE, WIDE)}
    keys = jax.random.split(key, len(sizes))
    return {
        name: jax.random.normal(k, shape) * shape[0] ** -0.5
        for k, (name, shape) in zip(keys, sizes.items(), strict=True)
    }


def apply(params, graph):
    x = jax.nn.relu(graph["features"] @ params["in"])
    degree = jax.ops.segment_sum(jnp.ones(EDGES), graph["receivers"], NODES)
    for at in range(LAYERS):
        sent = (x @ params[f"message_{at}"])[graph["senders"]]
        heard = jax.ops.segment_sum(sent, graph["receivers"], NODES)
        x = jax.nn.relu(x @ params[f"self_{at}"] + heard / jnp.maximum(degree, 1)[:, None])
    return x @ params["out"]


def loss(params, graph):
    logits = apply(params, graph)
    error = optax.softmax_cross_entropy_with_integer_labels(logits, graph["community"])
    return error.mean(), {"accuracy": (logits.argmax(-1) == graph["community"]).mean()}


def graph(seed):
    rng = np.random.default_rng(seed)
    community = rng.integers(0, COMMUNITIES, NODES).astype(np.int32)
    senders = rng.integers(0, NODES, EDGES)
    inside = [np.flatnonzero(community == c) for c in range(COMMUNITIES)]
    near = np.array([rng.choice(inside[community[s]]) for s in senders])
    receivers = np.where(rng.random(EDGES) < 0.7, near, rng.integers(0, NODES, EDGES))
    means = np.random.default_rng(0).normal(size=(COMMUNITIES, FEATURES)) / 4
    return {
        "features": (means[community] + rng.normal(size=(NODES, FEATURES))).astype(np.float32),
        "senders": senders.astype(np.int32),
        "receivers": receivers.astype(np.int32),
        "community": community,
    }


AXES = {
    "features": ("batch", "features"),
    "senders": ("edges",),
    "receivers": ("edges",),
    "community": ("batch",),
}


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns the loss at the start and that of a graph it has not seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="cpu:8")
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args(arguments)
    program = shardlib.compile(
        shardlib.tree(init),
        loss,
        optax.adam(3e-3),
        graph(0),
        topology=asked.topology,
        batch_axes=AXES,
    )
    print(program.plan.explain().split("\n\n")[0])
    state, losses = program.init(seed=0), []
    for number in range(asked.steps):
        state, metrics = program.step(state, graph(number % 8))
        losses.append(float(metrics["loss"]))
        if number % 25 == 0 or number == asked.steps - 1:
            print(f"step {number}: {', '.join(f'{k} {float(v):.3f}' for k, v in metrics.items())}")
    unseen = program.evaluate(state, graph(100))
    print(f"unseen graph: accuracy {float(unseen['accuracy']):.3f}")
    return [losses[0], float(unseen["loss"])]


if __name__ == "__main__":
    main()
