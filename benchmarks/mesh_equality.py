"""Attention and experts on every mesh of up to eight devices, beside one device.

    python -m benchmarks mesh_equality [--devices N ...] [--redo]

Every factorisation of 1 to 8 devices over data, fsdp, expert, context and tensor axes, and those
with stages: a model of attention with grouped heads and top-2 experts, written with the functions
of `shardlib` alone. With a context axis, as a ring and as an exchange of heads; experts that drop
nothing, and experts with a capacity that drop about a tenth (without stages, where a microbatch
would count by itself). Compared after two steps of training on simulated devices, in float32:
losses and parameters, relative to the largest element of each array, at most 1e-5; the decisions of
the routers of the first step, and the number of dropped tokens, bit by bit. A mesh that is refused
is listed with the error. What is in the results already is not done again as long as the code is
the same.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.environment import (
    RESULTS,
    command_line,
    missing,
    show,
    simulate_devices,
    source_digest,
    stored,
    write,
)

simulate_devices(8)
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0"  # hundreds of compilations, each of which runs twice
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib
from shardlib.errors import ShardlibError

AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
PATH = RESULTS / "mesh_equality.json"
TOLERANCE = 1e-5
VOCABULARY, EMBED, WIDTH = 32, 8, 4
#: Of the mean load of an expert.
CAPACITY = 1.0


class Model(nnx.Module):
    """Layers of attention and experts in a loop; dims are multiples of a number of devices."""

    def __init__(self, rngs: nnx.Rngs, devices: int, layers: int, capacity: float | None):
        self.capacity = capacity
        groups = devices // 2 if devices % 2 == 0 else devices

        def weights(*shape: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), shape) * shape[-2] ** -0.5)

        self.embedding = weights(VOCABULARY, EMBED)
        self.query, self.key, self.value = (
            weights(layers, EMBED, 2 * devices * WIDTH),
            weights(layers, EMBED, groups * WIDTH),
            weights(layers, EMBED, groups * WIDTH),
        )
        self.out, self.router = (
            weights(layers, 2 * devices * WIDTH, EMBED),
            weights(layers, EMBED, 2 * devices),
        )
        self.up, self.gate = (weights(layers, 2 * devices, EMBED, 2 * devices) for _ in range(2))
        self.down = weights(layers, 2 * devices, 2 * devices, EMBED)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Features, decisions of the routers, and per layer the loss of the balance and the number
        of dropped tokens.
        """

        def layer(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
            query, key, value, out, router, up, gate, down = weights
            heads = [(x @ one).reshape(*x.shape[:2], -1, WIDTH) for one in (query, key, value)]
            x = normalised(x + shardlib.attention(*heads).reshape(*x.shape[:2], -1) @ out)
            routing = shardlib.route(x @ router, 2)
            y, dropped = shardlib.visit(
                x, routing.weights, routing.chosen, up, down, gate, capacity=self.capacity
            )
            return normalised(x + y), (
                routing.chosen,
                shardlib.balance_loss(routing.shares, routing.chosen),
                dropped,
            )

        names = ("query", "key", "value", "out", "router", "up", "gate", "down")
        x, (chosen, balance, dropped) = jax.lax.scan(
            layer, self.embedding[...][tokens], tuple(getattr(self, name)[...] for name in names)
        )
        return x, chosen, balance, dropped


def normalised(x: jax.Array) -> jax.Array:
    """Features of mean square 1."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def loss(model: Model, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross entropy of the next tokens, and what is to be compared bit by bit."""
    x, chosen, balance, dropped = model(batch["inputs"])
    logits = x @ model.embedding[...].T
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
    return entropy + 0.01 * balance.mean(), {
        "decisions": chosen.astype(jnp.float32),
        "dropped": dropped.astype(jnp.float32),
    }


def factorisations(devices: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of sizes of axes."""
    if axes == 1:
        yield (devices,)
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            yield from ((size, *rest) for rest in factorisations(devices // size, axes - 1))


def grid(devices: int) -> Iterator[dict[str, Any]]:
    """Pins of every case, and the form of the experts."""
    for sizes in factorisations(devices, len(AXES)):
        mesh = dict(zip(AXES, sizes, strict=True))
        pin: dict[str, Any] = {
            "mesh": mesh,
            "microbatches": 2 if mesh["stage"] > 1 else 1,
            "zero": 3 if mesh["fsdp"] > 1 else 0,
        }
        for context in ("ring", "ulysses") if mesh["context"] > 1 else ("none",):
            for form in ("dropless", "capacity") if mesh["stage"] == 1 else ("dropless",):
                yield {
                    "pin": (
                        pin
                        | {
                            "context": context,
                            "experts": form if mesh["expert"] > 1 else "none",
                        }
                    ),
                    "experts": form,
                }


@functools.cache
def batch(devices: int) -> dict[str, np.ndarray]:
    """Two sequences for every device."""
    rng = np.random.default_rng(devices)
    return {
        name: rng.integers(0, VOCABULARY, (2 * devices, 4 * devices), dtype=np.int32)
        for name in ("inputs", "targets")
    }


def trained(
    devices: int, layers: int, form: str, topology: str, pin: dict[str, Any]
) -> tuple[list[float], list[np.ndarray], np.ndarray, np.ndarray]:
    """Losses of two steps, parameters after them, and decisions and drops of the first."""
    data = batch(devices)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), data)
    program = shardlib.compile(
        functools.partial(
            Model, devices=devices, layers=layers, capacity=CAPACITY if form == "capacity" else None
        ),
        loss,
        optax.sgd(0.3),
        shapes,
        topology=topology,
        pin=pin,
        batch_axes=dict.fromkeys(data, ("batch", "seq")),
    )
    state, losses, seen = program.init(0), [], []
    for _ in range(2):
        state, metrics = program.step(state, data)
        losses.append(float(metrics["loss"]))
        seen.append((np.asarray(metrics["decisions"]), np.asarray(metrics["dropped"])))
    return (
        losses,
        [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state.params)],
        *seen[0],
    )


@functools.cache
def reference(
    devices: int, layers: int, form: str, microbatches: int
) -> tuple[list[float], list[np.ndarray], np.ndarray, np.ndarray]:
    """The same on one device."""
    return trained(devices, layers, form, "cpu:1", {"mesh": {}, "microbatches": microbatches})


def compared(devices: int, case: dict[str, Any]) -> dict[str, Any]:
    """One case beside the reference."""
    pin, form = case["pin"], case["experts"]
    layers = max(2, pin["mesh"]["stage"])
    true = reference(devices, layers, form, pin["microbatches"])
    start = time.monotonic()
    try:
        found = trained(devices, layers, form, f"cpu:{devices}", pin)
    except ShardlibError as error:
        return {"refused": str(error).splitlines()[0]}
    worst = max(
        float(np.abs(one - other).max() / np.abs(other).max())
        for one, other in zip(found[1], true[1], strict=True)
    )
    worst = max(
        worst,
        *(abs(one - other) / abs(other) for one, other in zip(found[0], true[0], strict=True)),
    )
    return {
        "error": worst,
        "decisions_equal": bool((found[2] == true[2]).all()),
        "dropped": float(true[3].sum()),
        "drops_equal": bool((found[3] == true[3]).all()),
        "seconds": round(time.monotonic() - start, 1),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the cases come to."""
    run = [row for row in rows if "error" in row]
    return {
        "cases": len(rows),
        "run": len(run),
        "refused": len(rows) - len(run),
        "wrong": sum(
            row["error"] > TOLERANCE or not row["decisions_equal"] or not row["drops_equal"]
            for row in run
        ),
        "worst_error": max((row["error"] for row in run), default=None),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--devices", type=int, nargs="*", default=list(range(1, 9)))
    parser.add_argument("--redo", action="store_true", help="run what is stored too")
    given = parser.parse_args()
    digest = source_digest("lowering", "functions", "tracing")

    def key(case: dict[str, Any]) -> str:
        return json.dumps([case["devices"], case["pin"], case["experts"]])

    rows = {key(row): row for row in stored(PATH, "rows", [])}
    cases = [{"devices": n, **case} for n in given.devices for case in grid(n)]
    for name, case in missing(((key(case), case) for case in cases), rows, digest, redo=given.redo):
        rows[name] = {**case, **compared(case["devices"], case), "source": digest}
        show(name, rows[name])
        table = [*rows.values()]
        result = {"tolerance": TOLERANCE, "summary": summary(table), "rows": table}
        write(PATH, result, quiet=True)
        if len(rows) % 50 == 0:
            jax.clear_caches()
    print(summary([*rows.values()]))
