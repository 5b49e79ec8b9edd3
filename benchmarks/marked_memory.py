"""Memory of a step whose loss is marked, as predicted and as compiled.

    python -m benchmarks marked_memory [--only fsdp|stage] [--seconds 400]

A language model of 16 layers of 2,048 (fsdp 8, ZeRO 3, two microbatches; two stages of fsdp 4,
ZeRO 2, four microbatches) under AdamW in float32, for eight H100s: the peak of bytes on a device
that is planned, beside the one of the compiler of the chip (extra `shardlib[gpu]`), for
`shardlib.compile_step` with the loss marked, and for `shardlib.plan` and `shardlib.verify` of the
same loss and optimizer. Compiled ahead of time, in processes of their own.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib
from benchmarks.environment import RESULTS, command_line, show, source_digest, stored, table, write
from shardlib.verification.isolation import Limits
from shardlib.verification.report import Verification

LAYERS, WIDE, VOCAB, SEQ, ROWS = 16, 2048, 16384, 1024, 64
#: Pins of each case.
CASES: dict[str, dict[str, Any]] = table("marked_memory")
OPTIMIZER = optax.adamw(1e-3)


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Weights of the model, layers stacked."""
    shapes = {
        "embed": (VOCAB, WIDE),
        "q": (LAYERS, WIDE, WIDE),
        "k": (LAYERS, WIDE, WIDE),
        "v": (LAYERS, WIDE, WIDE),
        "o": (LAYERS, WIDE, WIDE),
        "up": (LAYERS, WIDE, 4 * WIDE),
        "down": (LAYERS, 4 * WIDE, WIDE),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(one, shape) * shape[-2] ** -0.5
        for one, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Cross entropy of the next tokens."""
    x = params["embed"][batch["ids"]]

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        q, k, v = ((x @ w[name]).reshape(*x.shape[:2], -1, 128) for name in "qkv")
        x = x + shardlib.attention(q, k, v, causal=True).reshape(x.shape) @ w["o"]
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x = jax.lax.scan(layer, x, {name: params[name] for name in params if name != "embed"})[0]
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], batch["ids"][:, 1:]
    ).mean()


def start(key: jax.Array) -> dict[str, Any]:
    """The state of the step."""
    params = init(key)
    return {"params": params, "opt": OPTIMIZER.init(params)}


def step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
    """The step, its loss marked."""
    value, gradients = shardlib.value_and_grad(loss)(state["params"], batch)
    updates, opt = OPTIMIZER.update(gradients, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt}, {"loss": value}


def row(planned: float, found: Verification) -> dict[str, Any]:
    """What was planned beside what was made."""
    if found.compiled is None:
        return {"predicted_peak": planned, "failed": str(found.findings[0])[:600]}
    made = found.compiled.device_bytes
    return {
        "predicted_peak": planned,
        "peak": made["peak"],
        "predicted_over_peak": planned / made["peak"] - 1,
        "device_bytes": made,
        "compile_seconds": found.compile_seconds,
    }


def measured(pin: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One case in both forms."""
    batch = {"ids": jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)}
    limits = Limits(seconds=seconds)
    program = shardlib.compile_step(start, step, batch, topology="h100:8", pin=pin, abstract=True)
    marked = row(program.plan.estimate.device_bytes.peak, program.verify(limits=limits))
    given = {"init": shardlib.tree(init), "loss": loss, "optimizer": OPTIMIZER, "batch": batch}
    plan = shardlib.plan(**given, topology="h100:8", pin={"offload": [], **pin})
    verified = shardlib.verify(**given, topology="h100:8", plan=plan, limits=limits)
    whole = row(plan.estimate.device_bytes.peak, verified)
    found = {"pin": pin, "marked": marked, "compile": whole}
    if "peak" in marked and "peak" in whole:
        found["marked_over_compile"] = marked["peak"] / whole["peak"] - 1
    return found


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--only", choices=list(CASES), help="a case; all when left out")
    parser.add_argument("--seconds", type=float, default=400.0, help="for a compiler")
    given = parser.parse_args()
    path = RESULTS / "marked_memory.json"
    table = stored(path, "cases")
    source = source_digest("lowering", "tracing", "frontend", "cost")
    for name, pin in CASES.items():
        if given.only in (None, name):
            table[name] = {**measured(pin, given.seconds), "source": source}
            show(name, table[name])
            write(path, {"parameters": parameters(), "cases": table})
    return 0


def parameters() -> int:
    """Of the model."""
    shapes = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
