"""How long do training steps take, side by side? The steps of several programs alternate in one
process, so that a busy machine slows all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import shardlib
from shardlib import models
from shardlib.models.config import TransformerConfig


def random_tokens(config: TransformerConfig, rows: int, seq: int) -> dict[str, np.ndarray]:
    """A batch of random tokens, [rows, seq] each."""
    numbers = np.random.default_rng(0)
    return {
        key: numbers.integers(0, config.vocab_size, (rows, seq)).astype(np.int32)
        for key in ("inputs", "targets")
    }


def stepper(
    config: TransformerConfig,
    optimizer: Any,
    rows: int,
    seq: int,
    devices: int,
    pin: Mapping[str, Any],
) -> Callable[[], float]:
    """A function that runs one training step of a model under pins and returns the loss."""
    init, loss = models.build(config)
    batch = random_tokens(config, rows, seq)
    program = shardlib.compile(
        init,
        loss,
        optimizer,
        batch,
        topology=f"cpu:{devices}",
        pin=pin,
        devices=jax.devices()[:devices],
    )
    placed, carry = program.put(batch), [program.init(0)]

    def step() -> float:
        carry[0], metrics = program.step(carry[0], placed)
        jax.block_until_ready(carry[0])
        return float(metrics["loss"])

    return step


def alternate(
    steps: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, dict[str, float]]:
    """Of each step the median and least seconds, the median seconds of processors, which other work
    on the machine changes little, and the cores that it kept busy.

    Forth and back in turn, after one call that is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    busy: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for repeat in range(repeats):
        for name in list(steps) if repeat % 2 == 0 else list(steps)[::-1]:
            start, worked = time.perf_counter(), time.process_time()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
            busy[name].append(time.process_time() - worked)
    return {
        name: {
            "median_s": statistics.median(found),
            "least_s": min(found),
            "processor_s": statistics.median(busy[name]),
            "cores": sum(busy[name]) / sum(found),
        }
        for name, found in seconds.items()
    }
