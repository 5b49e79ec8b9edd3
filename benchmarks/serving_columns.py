"""Time that it saves on a CPU that weights stand first in products of few rows.

    python -m benchmarks serving_columns [--rounds N]

A Llama of three layers, 2,048 and 5,632 wide, float32, answers eight requests: once as engines on
CPUs hold its weights (`shardlib.serve`), once as arrays. Both take turns in one
process; a step is the median of those that compute eight next tokens.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from dataclasses import replace
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from benchmarks.continuous_batching import LLAMA, forward
from benchmarks.environment import alternate, command_line, write
from shardlib import models, serve
from shardlib.serve.program import TracedForward

ROWS, PROMPT, MOST, STEPS = 8, 32, 24, 20
WIDE = replace(LLAMA, layers=3, embed=2048, heads=16, kv_heads=8, head_dim=128, mlp=5632)


def engine() -> serve.Engine:
    """With its programs compiled."""
    sizes = serve.Capacity(longest=96, slots=ROWS, budget=ROWS * PROMPT, pages=48)
    made = serve.Engine(models.build(WIDE)[0], forward, capacity=sizes, check=False)
    made.warm_up()
    return made


def step_ms(served: serve.Engine) -> float:
    """Milliseconds of a step of eight next tokens."""
    served.schedule.pool.forget()
    for prompt in np.random.default_rng(0).integers(0, WIDE.vocab_size, (ROWS, PROMPT)).tolist():
        served.add(serve.GenerationRequest(prompt=tuple(prompt), most=MOST))
    times: list[float] = []
    while served.schedule.running or served.schedule.waiting:
        start = time.perf_counter()
        served.step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[-STEPS:])


def main() -> None:
    parser = command_line(__doc__, "serving_columns_jax-*.json")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    held = {"columns": engine()}
    with mock.patch.object(TracedForward, "factors", property(lambda _: {})):
        held["arrays"] = engine()
    calls = alternate(
        {name: functools.partial(step_ms, engine) for name, engine in held.items()}, asked.rounds
    )
    found = {name: timings.results for name, timings in calls.items()}
    step = {name: statistics.median(times) for name, times in found.items()}
    write(
        asked.out,
        {"step_ms": step, "rounds": found, "arrays_over_columns": step["arrays"] / step["columns"]},
    )
    print({name: round(one, 1) for name, one in step.items()})
