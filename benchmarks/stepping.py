"""Training steps of reference models, for `benchmarks.environment.alternate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import shardlib
from shardlib import models
from shardlib.models.config import TransformerConfig


def random_tokens(vocab: int, rows: int, seq: int) -> dict[str, np.ndarray]:
    """A batch of random tokens, [rows, seq] each."""
    numbers = np.random.default_rng(0)
    return {
        key: numbers.integers(0, vocab, (rows, seq)).astype(np.int32)
        for key in ("inputs", "targets")
    }


def stepping(program: shardlib.Program, batch: Any) -> Callable[[], float]:
    """A function that trains a program by one step and returns the loss."""
    placed, carry = program.put(batch), [program.init(0)]

    def step() -> float:
        carry[0], metrics = program.step(carry[0], placed)
        jax.block_until_ready(carry[0])
        return float(metrics["loss"])

    return step


def stepper(
    config: TransformerConfig,
    optimizer: Any,
    rows: int,
    seq: int,
    devices: int,
    pin: Mapping[str, Any],
) -> Callable[[], float]:
    """A function that runs one training step of a model under pins and returns the loss."""
    batch = random_tokens(config.vocab_size, rows, seq)
    program = shardlib.compile(
        *models.build(config),
        optimizer,
        batch,
        topology=f"cpu:{devices}",
        pin=pin,
        devices=jax.devices()[:devices],
    )
    return stepping(program, batch)
