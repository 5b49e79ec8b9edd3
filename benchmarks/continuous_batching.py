"""How many steps, and seconds, does continuous batching save?

    python benchmarks/continuous_batching.py

A Llama of 27.8 M parameters, float32, answers 40 requests of skewed lengths
(`serving/workload.json`) in 8 slots: continuously, so that a slot is taken again as soon as its
request has ended, and in groups of 8, of which the next begins when all have ended. Both run in
turn in one process, with the same programs and no shared prefixes. Steps are exact on any machine;
seconds are medians, and their ratio is the median of the ratios of neighbours in time. Answers are
equal, and some are compared with the forward pass without a cache.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from benchmarks.environment import RESULTS, command_line, write
from shardlib import models, serve
from shardlib.annotation.tree import read
from shardlib.models.config import TransformerConfig

LLAMA = TransformerConfig(
    name="llama-28m",
    vocab_size=4096,
    layers=8,
    embed=512,
    heads=8,
    kv_heads=4,
    head_dim=64,
    mlp=1408,
    max_seq=2048,
    compute_dtype="float32",
)
SLOTS, LONGEST = 8, 256
WORKLOAD = Path(__file__).parent / "serving" / "workload.json"


def forward(model: Any, tokens: jax.Array) -> jax.Array:
    """Logits."""
    return model(tokens)


def served(
    engine: serve.Engine, asked: Sequence[serve.Asked], group: int
) -> tuple[int, float, list[list[int]]]:
    """Steps, seconds and answers, with so many requests added at a time."""
    steps, start = engine.steps, time.perf_counter()
    answers: list[list[int]] = []
    for first in range(0, len(asked), group):
        requests = [engine.add(one) for one in asked[first : first + group]]
        engine.run()
        answers += [request.answer for request in requests]
    return engine.steps - steps, time.perf_counter() - start, answers


def greedy(prompt: Sequence[int], most: int) -> list[int]:
    """The answer by the whole forward pass, once for every token."""
    model = read(models.build(LLAMA)[0])
    module = model.rebuild(*model.init(0))
    logits = jax.jit(lambda tokens: forward(module, tokens))
    tokens = np.zeros((1, LONGEST), np.int32)
    tokens[0, : len(prompt)] = prompt
    for at in range(len(prompt), len(prompt) + most):
        tokens[0, at] = int(np.argmax(logits(tokens)[0, at - 1]))
    return tokens[0, len(prompt) : len(prompt) + most].tolist()


def main() -> None:
    """Runs both in turn and writes the table."""
    parser = command_line(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / f"continuous_batching_jax-{jax.__version__}.json"
    )
    args = parser.parse_args()
    workload = json.loads(WORKLOAD.read_text())
    asked = [serve.Asked(prompt=tuple(one["prompt"]), most=one["most"]) for one in workload]
    engine = serve.Engine(
        models.build(LLAMA)[0],
        forward,
        capacity=serve.Capacity(longest=LONGEST, slots=SLOTS, prefixes=False),
    )
    engine.warm_up()
    compiled = engine.compute.compiled
    rows: dict[str, list[tuple[int, float]]] = {"continuous": [], "static": []}
    answers: dict[str, list[list[int]]] = {}
    for _ in range(args.pairs):
        for name, group in (("continuous", len(asked)), ("static", SLOTS)):
            steps, seconds, answers[name] = served(engine, asked, group)
            rows[name].append((steps, seconds))
    assert answers["continuous"] == answers["static"]
    for one in sorted(workload, key=lambda one: one["most"])[:3]:
        at = workload.index(one)
        assert answers["continuous"][at] == greedy(one["prompt"], one["most"])
    tokens = sum(one["most"] for one in workload)
    result: dict[str, Any] = {
        "benchmark": "continuous_batching",
        "requests": len(asked),
        "tokens": tokens,
        "compiled_after_warm_up": engine.compute.compiled - compiled,
        "load": os.getloadavg()[0],
        "seconds_ratio": statistics.median(
            static / continuous for (_, continuous), (_, static) in zip(*rows.values(), strict=True)
        ),
        "ways": {
            name: {
                "steps": found[0][0],
                "seconds": [seconds for _, seconds in found],
                "tokens_per_s": tokens / statistics.median(seconds for _, seconds in found),
            }
            for name, found in rows.items()
        },
    }
    for name, way in result["ways"].items():
        print(f"{name}: {way['steps']} steps, {way['tokens_per_s']:.0f} tokens/s")
    print(f"static takes {result['seconds_ratio']:.2f} times as long as continuous")
    write(args.out, result)


if __name__ == "__main__":
    main()
