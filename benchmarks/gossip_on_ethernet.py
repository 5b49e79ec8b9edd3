"""Predicted hours of ResNet-50 on 32 nodes of 8 V100s over Ethernet, exactly and by gossip.

    python -m benchmarks gossip_on_ethernet

Assran et al. (Stochastic Gradient Push, arXiv:1811.10792, figure 1 and section 6) trained ResNet-50
on ImageNet for 90 epochs on 32 nodes of 8 V100s, 256 images a node and step, over 10 Gbit/s of
Ethernet: over 5 hours with an all-reduce in every step, 1.6 hours by gossip over a directed
exponential graph. Here the same two jobs are planned; nothing was fitted to them. Stored are the
hours that the plans predict and the parts of a step.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib
from benchmarks.environment import command_line, write
from shardlib.machines.topology import Topology

NODES, GPUS, ROWS = 32, 8, 256
EPOCHS, IMAGES = 90, 1_281_167  # ILSVRC 2012
#: Hours, as published.
PUBLISHED = {"exact": 5.0, "gossip": 1.6, "gossip, whole parameters": 1.6}
#: Pins: parameters whole on every device, as both were trained.
JOBS: dict[str, dict[str, Any]] = {
    "exact": {"mesh.data": NODES * GPUS},
    "gossip": {"exchange": shardlib.islands.Gossip(islands=NODES, graph="exponential")},
    "gossip, whole parameters": {
        "mesh.data": GPUS,
        "exchange": shardlib.islands.Gossip(islands=NODES, graph="exponential"),
    },
}


def machine() -> Topology:
    """32 nodes of 8 devices on Ethernet that a node's devices share, with the figures of a V100 SXM2
    in place of those that the spelling has: NVIDIA DS-8488 (15.7 TFLOP/s in float32, in which it
    was trained), 6 NVLinks of 25 GB/s in one direction (DGX-1 whitepaper WP-08437), 16,160 MiB
    (nvidia-smi).
    """
    spelled = shardlib.topology(f"{NODES}@10gbit-0.05ms*a100:{GPUS}")
    chip = replace(
        spelled.chip,
        flops_per_s=(("float16", 125e12), ("bfloat16", 15.7e12), ("float32", 15.7e12)),
        hbm_bytes=16160 << 20,
        reserved_bytes=0,
        hbm_bytes_per_s=900e9,
        sources=("NVIDIA DS-8488",),
    )
    ethernet, nvlink = spelled.tiers
    return replace(spelled, chip=chip, tiers=(ethernet, replace(nvlink, bytes_per_s=150e9)))


def convolution(rngs: nnx.Rngs, inputs: int, outputs: int, size: int, stride: int = 1) -> nnx.Conv:
    """A convolution without bias."""
    return nnx.Conv(
        inputs,
        outputs,
        (size, size),
        strides=(stride, stride),
        padding="SAME",
        use_bias=False,
        rngs=rngs,
    )


class Bottleneck(nnx.Module):
    """Three convolutions beside a shortcut (He et al., arXiv:1512.03385, figure 5)."""

    def __init__(self, rngs: nnx.Rngs, inputs: int, width: int, stride: int):
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convolutions = nnx.List([convolution(rngs, *size) for size in sizes])
        self.norms = nnx.List([nnx.GroupNorm(size[1], num_groups=32, rngs=rngs) for size in sizes])
        self.shortcut = (
            convolution(rngs, inputs, 4 * width, 1, stride)
            if stride > 1 or inputs != 4 * width
            else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for number, (apply, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(apply(y))
            y = nnx.relu(y) if number < 2 else y
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet50(nnx.Module):
    """[rows, 224, 224, 3] images -> [rows, 1000] logits; 25.6 M parameters. With normalisation by
    groups, which keeps no statistics.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.stem, self.norm = (
            convolution(rngs, 3, 64, 7, 2),
            nnx.GroupNorm(64, num_groups=32, rngs=rngs),
        )
        blocks, inputs = [], 64
        for stage, count in enumerate((3, 4, 6, 3)):
            for block in range(count):
                width = 64 << stage
                stride = 2 if stage and not block else 1
                blocks.append(Bottleneck(rngs, inputs, width, stride))
                inputs = 4 * width
        self.blocks, self.head = nnx.List(blocks), nnx.Linear(inputs, 1000, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.norm(self.stem(images))), (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


def loss(model: ResNet50, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch["images"]), batch["labels"]
    ).mean()


def main() -> None:
    parser = command_line(__doc__, "gossip_on_ethernet.json")
    args = parser.parse_args()
    rows = NODES * ROWS
    batch = {
        "images": jax.ShapeDtypeStruct((rows, 224, 224, 3), np.float32),
        "labels": jax.ShapeDtypeStruct((rows,), np.int32),
    }
    steps = EPOCHS * IMAGES / rows
    found: dict[str, Any] = {}
    for name, pin in JOBS.items():
        plan = shardlib.plan(
            ResNet50, loss, optax.sgd(0.1, momentum=0.9), batch, topology=machine(), pin=pin
        )
        seconds = plan.estimate.step_seconds
        hours = seconds * steps / 3600
        found[name] = {
            "mesh": dict(plan.mesh),
            "step_s": seconds,
            "parts_s": plan.estimate.to_json()["seconds"],
            "hours": hours,
            "published_hours": PUBLISHED[name],
        }
        print(f"{name}: {seconds:.3f} s a step, {hours:.2f} h, published {PUBLISHED[name]} h")
    write(args.out, {"benchmark": "gossip_on_ethernet", "steps": steps, "jobs": found})
