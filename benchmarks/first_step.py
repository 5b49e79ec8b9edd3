"""Compile time of the program of a plan, over a plain `jax.jit` of the same step.

    python -m benchmarks first_step

From the plan to the compiled step (lowering, trace, compilation), on simulated CPU devices:
`hand_transformer.py` under `jax.jit`, sharded by hand, on one device and on three meshes of eight,
and a Flax model with its layers in a Python loop. Both alternate in one process, with JAX's caches
emptied between; seconds of processors, of all threads, stand beside those of the clock, and a ratio
is the median of those of neighbours in time. The time of reading and planning is stored beside it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.environment import alternate, command_line, ratio, show, simulate_devices, write

simulate_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import hand_sharded
from benchmarks.stepping import random_tokens
from shardlib import models
from shardlib.annotation import tree
from shardlib.frontend import choice, lowered
from shardlib.frontend.model import read_and_trace
from shardlib.models.config import TransformerConfig

MESHES = {
    "one device": {"data": 1},
    **{name: hand_sharded.MESHES[name] for name in ("data8", "fsdp8", "fsdp4-tensor2")},
}
#: Mesh of the model whose layers are in a Python loop.
LOOPS = {"python loop, one device": 1, "python loop, data8": 8}
#: Runs something, and returns its seconds: of the clock, of processors.
Timed = Callable[[], dict[str, float]]


class Layers(nnx.Module):
    """A Flax transformer with its layers in a Python loop."""

    def __init__(self, rngs: nnx.Rngs):
        shape = hand_sharded.CONFIG
        self.embedding = nnx.Embed(shape.vocab_size, shape.embed, rngs=rngs)
        self.layers = nnx.List([Layer(shape, rngs) for _ in range(8)])
        self.norm = nnx.RMSNorm(shape.embed, rngs=rngs)
        self.head = nnx.Linear(shape.embed, shape.vocab_size, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Layer(nnx.Module):
    """Attention and feed-forward."""

    def __init__(self, shape: TransformerConfig, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(shape.embed, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            shape.heads, shape.embed, decode=False, rngs=rngs, deterministic=True
        )
        self.up = nnx.Linear(shape.embed, shape.mlp, rngs=rngs)
        self.down = nnx.Linear(shape.mlp, shape.embed, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


def loop_loss(model: Layers, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch["inputs"]), batch["targets"]
    ).mean()


def stopwatch(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds of some work."""
    start, worked = time.perf_counter(), time.process_time()
    work()
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - worked,
    }


def planned(
    init: Any, loss: Any, batch: Any, pin: dict[str, Any]
) -> Callable[[], tuple[dict[str, float], dict[str, float]]]:
    """A function that plans a step, and compiles it: seconds of both."""
    optimizer, devices = optax.adamw(1e-3), int(np.prod(list(pin["mesh"].values())))

    def run() -> tuple[dict[str, float], dict[str, float]]:
        found: list[Any] = []

        def plan() -> None:
            traced = read_and_trace(init, loss, optimizer, batch, None, None)
            found.append(choice.given_or_searched(traced, None, f"cpu:{devices}", pin))

        with tree.no_mesh():
            before = stopwatch(plan)
            traced, chosen = found[0]
            return before, stopwatch(
                lambda: lowered.lower(traced, chosen, devices=jax.devices()[:devices]).compiled()
            )

    return run


def plain(devices: int, batch: dict[str, np.ndarray]) -> Timed:
    """A function that compiles the step of `Layers`, data parallel."""
    optimizer = optax.adamw(1e-3)
    graphdef, params, rest = nnx.split(Layers(nnx.Rngs(0)), nnx.Param, ...)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(
            lambda params: loop_loss(nnx.merge(graphdef, params, rest), batch)
        )(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype),
        (params, jax.eval_shape(optimizer.init, params), batch),
    )

    def compiled() -> Any:
        return (
            jax.jit(
                lambda *arguments: step(*arguments),  # one that JAX has not traced yet
                donate_argnums=(0, 1),
                in_shardings=(whole, whole, rows),
                out_shardings=(whole, whole, whole),
            )
            .lower(*shapes)
            .compile()
        )

    return lambda: stopwatch(compiled)


def compare(ours: Callable[[], Any], theirs: Timed, repeats: int) -> dict[str, Any]:
    """Both in turn, after one of each that is not counted."""

    def emptied(run: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: (jax.clear_caches(), run())[1]

    def median(rows: list[dict[str, float]]) -> dict[str, float]:
        return {key: statistics.median(row[key] for row in rows) for key in rows[0]}

    calls = alternate({"shardlib": emptied(ours), "plain": emptied(theirs)}, repeats)
    plans = [before for before, _ in calls["shardlib"].results]
    seconds = {
        "shardlib": [after for _, after in calls["shardlib"].results],
        "plain": calls["plain"].results,
    }
    return {
        **{who: median(rows) for who, rows in seconds.items()},
        "reading_and_planning": median(plans),
        "ratio": {
            key: ratio(*([row[key] for row in rows] for rows in seconds.values()))
            for key in ("seconds", "processor_seconds")
        },
        "all": seconds,
    }


def main() -> None:
    parser = command_line(__doc__, "first_step.json")
    parser.add_argument("--case", choices=[*MESHES, *LOOPS], action="append")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    batch = random_tokens(hand_sharded.CONFIG.vocab_size, 32, 128)
    for name in args.case or [*MESHES, *LOOPS]:
        pin = {"microbatches": 1, "remat": "none"}
        if name in LOOPS:
            ours = planned(Layers, loop_loss, batch, {**pin, "mesh": {"data": LOOPS[name]}})
            theirs = plain(LOOPS[name], batch)
        else:
            init, loss = models.build(hand_sharded.CONFIG)
            ours = planned(init, loss, batch, {**pin, **hand_sharded.recipe(MESHES[name])})
            hand = hand_sharded.by_hand(MESHES[name], init, batch)
            theirs = functools.partial(stopwatch, hand.compiled)
        row = rows[name] = compare(ours, theirs, args.repeats)
        show(name, row, "shardlib", "plain", "ratio")
    worst = max(row["ratio"]["processor_seconds"] for row in rows.values())
    write(
        args.out,
        {"benchmark": "first_step", "repeats": args.repeats, "worst_ratio": worst, "cases": rows},
    )
    print(f"worst ratio, of processors: {worst:.3f}")
