"""Step time of an expert layer against a dense layer with the FLOPs that a token uses.

    python -m benchmarks expert_layer [--repeats 9] [--out FILE]

One layer alone, with its residual: a mixture of experts, or a gated feed-forward layer as wide as
the experts that one token visits; float32, forward, backward and an SGD update through
`shardlib.compile`. Both have the same matmuls of tokens, but for the router's; the mixture also
sorts, moves rows and has count / per_token times the parameters to update. On eight simulated
devices the experts are shared by an `expert` axis of 8 and the dense layer is data-parallel. All
programs of one case run in turn, forth and back, in one process; ratios are of medians of that run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.environment import alternate, command_line, show, simulate_devices, write

simulate_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib
from benchmarks.stepping import stepping
from shardlib.models.blocks import FeedForward, mixture_of_experts
from shardlib.models.config import Experts, TransformerConfig

WIDTH, ROWS, SEQ = 512, 16, 256
#: The shapes of Mixtral (8 experts, 2 a token) and of DeepSeek-V2 Lite (64 fine ones, 6 a token),
#: made small.
CASES = {
    "8-top-2": Experts(count=8, per_token=2, mlp=1024, balance=0.01),
    "64-top-6": Experts(count=64, per_token=6, mlp=256, balance=0.01),
}
FORMS = {"dropless": 0.0, "capacity": 1.25}


class Layer(nnx.Module):
    """A mixture of experts, or a feed-forward layer of the same active width."""

    def __init__(self, experts: Experts, dense: bool, rngs: nnx.Rngs):
        width = experts.per_token * experts.mlp
        config = TransformerConfig(
            name="dense",
            vocab_size=1,
            layers=1,
            embed=WIDTH,
            heads=1,
            kv_heads=1,
            head_dim=2,
            mlp=width,
        )
        self.balance = experts.balance
        if dense:
            self.dense = FeedForward(config, width, "mlp", rngs)
        else:
            self.experts = mixture_of_experts(experts, WIDTH, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(Results [batch, seq, embed], auxiliary loss [])."""
        if hasattr(self, "dense"):
            return x + self.dense(x), jnp.zeros(())
        changed, terms = self.experts(x)
        return x + changed, self.balance * terms["balance"]


def loss(model: Layer, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Mean squared error, and the balancing loss."""
    found, auxiliary = model(batch["x"])
    return jnp.mean(jnp.square(found - batch["y"])) + auxiliary


def stepper(experts: Experts, dense: bool, devices: int) -> Callable[[], float]:
    """A function that runs one training step and returns the loss."""
    numbers = np.random.default_rng(0)
    batch = {
        name: numbers.normal(size=(ROWS, SEQ, WIDTH)).astype(np.float32) for name in ("x", "y")
    }
    form = {"experts": "capacity" if experts.capacity else "dropless"}
    pin = (
        {"mesh": {"data": devices}}
        if dense
        else {"mesh": {"expert": devices}, **(form if devices > 1 else {})}
    )
    program = shardlib.compile(
        lambda rngs: Layer(experts, dense, rngs),
        loss,
        optax.sgd(1e-3),
        batch,
        topology=f"cpu:{devices}",
        pin={**pin, "zero": 0, "microbatches": 1},
        batch_axes=dict.fromkeys(batch, ("batch", "seq", "embed")),
        devices=jax.devices()[:devices],
    )
    return stepping(program, batch)


def compare(experts: Experts, devices: int, repeats: int) -> dict[str, Any]:
    """The forms of experts and the dense layer on some devices."""
    steps = {"dense": stepper(experts, True, devices)} | {
        form: stepper(replace(experts, capacity=capacity), False, devices)
        for form, capacity in FORMS.items()
    }
    found = {name: calls.summary() for name, calls in alternate(steps, repeats).items()}
    return {
        "devices": devices,
        "repeats": repeats,
        "steps": found,
        "ratio": {form: found[form]["median_s"] / found["dense"]["median_s"] for form in FORMS},
        "processor_ratio": {
            form: found[form]["processor_s"] / found["dense"]["processor_s"] for form in FORMS
        },
    }


def main() -> None:
    parser = command_line(__doc__, "expert_layer.json")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each program")
    parser.add_argument("--devices", type=int, action="append", help="1 and 8 when left out")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, experts in CASES.items():
        for devices in args.devices or (1, 8):
            row = {"case": name, **compare(experts, devices, args.repeats)}
            rows.append(row)
            show(f"{name}, {devices} devices", row, "ratio", "processor_ratio")
            write(
                args.out,
                {"benchmark": "expert_layer", "width": WIDTH, "tokens": ROWS * SEQ, "rows": rows},
                quiet=True,
            )
