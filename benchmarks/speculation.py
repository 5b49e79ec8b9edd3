"""Steps that guessing ahead saves on a text that repeats itself.

    python -m benchmarks speculation

A small transformer learns records of bytes (`id: 0417, name: item-0417, ...`), and a smaller one,
too; then 12 requests, each a few records and the beginning of the next, are answered with 120 bytes
in 4 slots: without guesses, with what followed the last time (n-grams), and with the smaller model,
4 bytes ahead, greedily and with temperature 0.8. All three run in turn in one process. Steps are
exact on any machine; seconds are medians, and their ratios medians of the ratios of neighbours in
time. Answers are equal.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import optax

import shardlib
from benchmarks.continuous_batching import forward, served
from benchmarks.environment import alternate, card, command_line, ratio, show, write
from shardlib import models, serve
from shardlib.models.config import TransformerConfig

LARGE = card("large")
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


def main() -> None:
    parser = command_line(__doc__, "speculation_jax-*.json")
    parser.add_argument("--runs", type=int, default=5, help="of each way")
    parser.add_argument("--steps", type=int, default=250, help="of training")
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
            serve.GenerationRequest(
                prompt=tuple(records(5000 + 37 * n, 3)[: -20 - n]),
                most=MOST,
                sampling=replace(how, seed=n),
            )
            for n in range(REQUESTS)
        ]
        calls = alternate(
            {
                name: functools.partial(served, engine, asked, len(asked))
                for name, engine in ways.items()
            },
            args.runs,
            warm_up=False,
        )
        answers = {name: timings.results[-1][1] for name, timings in calls.items()}
        assert answers["plain"] == answers["n-grams"] == answers["draft model"]
        found = {
            name: {
                "steps": timings.results[-1][0],
                "seconds": timings.seconds,
                "seconds_of_plain": ratio(timings.seconds, calls["plain"].seconds),
            }
            for name, timings in calls.items()
        }
        result["temperatures"][str(temperature)] = found
        for name, way in found.items():
            show(f"temperature {temperature}, {name}", way)
    result["load"] = os.getloadavg()[0]
    write(args.out, result)
