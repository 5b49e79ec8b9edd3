"""Models of islands as files of Hugging Face: what is written are the outer parameters, and all
islands start with what is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import shardlib
from shardlib import models
from shardlib.checkpointing import huggingface
from tests.checkpointing.states import assert_same, numbers
from tests.checkpointing.test_huggingface import CONFIGS, written


def test_outer_parameters_are_written_and_all_islands_start_with_them(tmp_path: Path) -> None:
    config: Any = models.load(str(written(CONFIGS["llama-2-7b"], tmp_path)))
    init, loss = models.build(config)
    draw = np.random.default_rng(0)
    batch = jax.tree.map(
        lambda leaf: draw.integers(0, 8, leaf.shape).astype(leaf.dtype),
        models.example_batch(config, 8, 8),
    )

    def compiled(topology: str, **pin: Any) -> Any:
        return shardlib.compile(
            init, loss, optax.adam(1e-2), batch, topology=topology, pin={"zero": 3, **pin}
        )

    made = compiled("cpu:8", mesh={"fsdp": 4}, exchange="diloco:2:2")
    state, outer = made.init(5), None
    for step in range(3):
        state, _ = made.step(state, batch)
        outer = numbers(state.exchange.params) if step == 1 else outer
    huggingface.save(made, state, tmp_path / "out", config=tmp_path / "config.json")
    one = compiled("cpu:4", mesh={"fsdp": 4})
    alone = huggingface.load(tmp_path / "out", one).state
    assert_same([*jax.tree.leaves(numbers(alone.params))], outer)
    again: Any = huggingface.load(tmp_path / "out", made).state
    for island in again.islands:
        assert_same(numbers(island.params), numbers(alone.params))
        assert_same(numbers(island.opt_state), numbers(alone.opt_state))
    assert_same(numbers(again.exchange.params), outer)
    assert not any(np.any(np.asarray(leaf)) for leaf in again.exchange.momentum)
    after, _ = made.step(again, batch)
    assert after.step == 1
