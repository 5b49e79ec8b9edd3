"""How many steps does guessing ahead save on a text that repeats itself?

    python benchmarks/speculation.py

A small transformer learns records of bytes (`id: 0417, name: item-0417, ...`), and a smaller one,
too; then 12 requests, each a few records and the beginning of the next, are answered with 120 bytes
in 4 slots: without guesses, with what followed the last time (n-grams), and with the smaller model,
4 bytes ahead, greedily and with temperature 0.8. All three run in turn in one process. Steps are
exact on any machine; seconds are medians, and their ratios medians of the ratios of neighbours in
time. Answers are equal.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax

import shardlib
from benchmarks.environment import RESULTS, command_line, write
from shardlib import models, serve
from shardlib.models.config import TransformerConfig

LARGE = TransformerConfig(
    name="large",
    vocab_size=256,
    layers=4,
    embed=128,
    heads=4,
    kv_heads=4,
    head_dim=32,
    mlp=384,
    max_seq=512,
    compute_dtype="float32",
)
SMALL = replace(LARGE, name="small", layers=1, embed=64, heads=2, kv_heads=2, mlp=128)
ROWS, SEQ, MOST, DRAFTS, REQUESTS = 16, 128, 120, 4, 12
SIZES = serve.Capacity(longest=384, slots=4, page=16, budget=64)


def records(first: int, count: int) -> bytes:
    """Some records, one a line."""
    return b"".join(
        f"id: {n:04}, name: item-{n:04}, path: /items/{n % 7}/item-{n:04}.json\n".encode()
        for n in range(first, first + count)
    )


def learned(config: TransformerConfig, steps: int) -> tuple[Any, float]:
    """Params after so many steps, and the loss of the last one."""
    init, loss = models.build(config)
    batch = models.example_batch(config, ROWS, SEQ)
    program = shardlib.compile(init, loss, optax.adam(3e-3), batch, topology="cpu:1")
    state, text, found = program.init(seed=0), np.frombuffer(records(0, 4000), np.uint8), None
    draw = np.random.default_rng(0)
    for _ in range(steps):
        starts = draw.integers(0, len(text) - SEQ - 1, ROWS)
        rows = np.stack([text[start : start + SEQ + 1] for start in starts]).astype(np.int32)
        state, metrics = program.step(state, {"inputs": rows[:, :-1], "targets": rows[:, 1:]})
        found = metrics["loss"]
    return (state.params, state.model_state), float(found)


def forward(model: Any, tokens: jax.Array) -> jax.Array:
    """Logits."""
    return model(tokens)


def served(
    engine: serve.Engine, asked: Sequence[serve.Asked]
) -> tuple[int, float, list[list[int]]]:
    """Steps, seconds and answers."""
    steps, start = engine.steps, time.perf_counter()
    requests = [engine.add(one) for one in asked]
    engine.run()
    return (
        engine.steps - steps,
        time.perf_counter() - start,
        [request.answer for request in requests],
    )


def main() -> None:
    """Learns, serves and writes the table."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each way")
    parser.add_argument("--steps", type=int, default=250, help="of training")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / f"speculation_jax-{jax.__version__}.json"
    )
    args = parser.parse_args()
    (large, loss), (small, other) = learned(LARGE, args.steps), learned(SMALL, args.steps)
    ways = {
        "plain": serve.Engine(models.build(LARGE)[0], forward, weights=large, capacity=SIZES),
        **{
            name: serve.Engine(
                models.build(LARGE)[0],
                forward,
                weights=large,
                capacity=replace(SIZES, drafts=DRAFTS),
            )
            for name in ("n-grams", "draft model")
        },
    }
    ways["draft model"].draft_with(models.build(SMALL)[0], forward, weights=small)
    for engine in ways.values():
        engine.warm_up()
    result: dict[str, Any] = {
        "benchmark": "speculation",
        "losses": {"large": loss, "small": other},
        "drafts": DRAFTS,
        "tokens": REQUESTS * MOST,
        "temperatures": {},
    }
    for temperature in (0.0, 0.8):
        how = serve.Sampling(temperature=temperature)
        asked = [
            serve.Asked(
                prompt=tuple(records(5000 + 37 * n, 3)[: -20 - n]),
                most=MOST,
                sampling=replace(how, seed=n),
            )
            for n in range(REQUESTS)
        ]
        rows: dict[str, list[tuple[int, float]]] = {name: [] for name in ways}
        answers: dict[str, list[list[int]]] = {}
        for _ in range(args.runs):
            for name, engine in ways.items():
                steps, seconds, answers[name] = served(engine, asked)
                rows[name].append((steps, seconds))
        assert answers["plain"] == answers["n-grams"] == answers["draft model"]
        found = {
            name: {
                "steps": runs[-1][0],
                "seconds": [seconds for _, seconds in runs],
                "seconds_of_plain": statistics.median(
                    seconds / plain
                    for (_, seconds), (_, plain) in zip(runs, rows["plain"], strict=True)
                ),
            }
            for name, runs in rows.items()
        }
        result["temperatures"][str(temperature)] = found
        for name, way in found.items():
            print(
                f"temperature {temperature}, {name}: {way['steps']} steps,"
                f" {way['seconds_of_plain']:.2f} times the seconds"
            )
    result["load"] = os.getloadavg()[0]
    write(args.out, result)


if __name__ == "__main__":
    main()
