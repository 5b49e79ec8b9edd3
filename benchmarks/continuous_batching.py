"""Steps and seconds that continuous batching saves.

    python -m benchmarks continuous_batching

A Llama of 27.8 M parameters, float32, answers 40 requests of skewed lengths
(`serving/workload.json`) in 8 slots: continuously, so that a slot is taken again as soon as its
request has ended, and in groups of 8, of which the next begins when all have ended. Both run in
turn in one process, with the same programs and no shared prefixes. Steps are exact on any machine;
seconds are medians, and their ratio is the median of the ratios of neighbours in time. Answers are
equal, and some are compared with the forward pass without a cache.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from benchmarks.environment import alternate, card, command_line, ratio, write
from shardlib import models, serve
from shardlib.annotation.model import read

LLAMA = card("llama-28m")
SLOTS, LONGEST = 8, 256
WORKLOAD = Path(__file__).parent / "serving" / "workload.json"


def forward(model: Any, tokens: jax.Array) -> jax.Array:
    """Logits."""
    return model(tokens)


def served(
    engine: serve.Engine, asked: Sequence[serve.GenerationRequest], group: int
) -> tuple[int, list[list[int]]]:
    """Steps and answers, with so many requests added at a time."""
    steps, answers = engine.steps, list[list[int]]()
    for first in range(0, len(asked), group):
        requests = [engine.add(one) for one in asked[first : first + group]]
        engine.run()
        answers += [request.answer for request in requests]
    return engine.steps - steps, answers


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
    parser = command_line(__doc__, "continuous_batching_jax-*.json")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each")
    args = parser.parse_args()
    workload = json.loads(WORKLOAD.read_text())
    asked = [
        serve.GenerationRequest(prompt=tuple(one["prompt"]), most=one["most"]) for one in workload
    ]
    engine = serve.Engine(
        models.build(LLAMA)[0],
        forward,
        capacity=serve.Capacity(longest=LONGEST, slots=SLOTS, prefixes=False),
    )
    engine.warm_up()
    compiled = engine.compute.compiled
    groups = {"continuous": len(asked), "static": SLOTS}
    calls = alternate(
        {name: functools.partial(served, engine, asked, group) for name, group in groups.items()},
        args.pairs,
        warm_up=False,
    )
    answers = {name: timings.results[-1][1] for name, timings in calls.items()}
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
        "seconds_ratio": ratio(calls["static"].seconds, calls["continuous"].seconds),
        "ways": {
            name: {
                "steps": timings.results[0][0],
                "seconds": timings.seconds,
                "tokens_per_s": tokens / statistics.median(timings.seconds),
            }
            for name, timings in calls.items()
        },
    }
    for name, way in result["ways"].items():
        print(f"{name}: {way['steps']} steps, {way['tokens_per_s']:.0f} tokens/s")
    print(f"static takes {result['seconds_ratio']:.2f} times as long as continuous")
    write(args.out, result)
