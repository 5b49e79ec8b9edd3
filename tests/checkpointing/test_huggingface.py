from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardlib import models
from shardlib.annotation.read import read
from shardlib.checkpointing import huggingface
from shardlib.checkpointing.huggingface import reading
from shardlib.lowering.state import TrainState
from tests.checkpointing.states import assert_same, mesh
from tests.models.configs import PUBLISHED, tiny

SWITCH = {"model_type": "switch_transformers", "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "num_layers": 4, "num_decoder_layers": 2, "num_sparse_encoder_layers": 2,
          "num_sparse_decoder_layers": 2, "num_experts": 4, "vocab_size": 64, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "n_positions": 32}
CONFIGS = {name: tiny(name) for name in sorted(PUBLISHED)} | {"switch": SWITCH, "llama-biased": {**tiny("llama-2-7b"), "attention_bias": True, "mlp_bias": True},
                                                              "gpt2-untied": {**tiny("gpt2"), "tie_word_embeddings": False}}


def written(config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def program_of(config: dict[str, Any], folder: Path, sizes: tuple[int, int] = (2, 4)) -> Any:
    """What an import asks of a program: its abstract state, its model, its optimizer and its mesh, with the last dims that divide cut."""
    init, _ = models.build(models.load(str(written(config, folder))))
    model, on, optimizer = read(init), mesh(*sizes), optax.sgd(0.1)

    def cut(leaf: Any) -> jax.ShapeDtypeStruct:
        dims: list[str | None] = [None] * leaf.ndim
        for axis, size in (("b", sizes[1]), ("a", sizes[0])):
            free = [i for i in range(leaf.ndim) if dims[i] is None and leaf.shape[i] % size == 0 and leaf.ndim > 1]
            if free:
                dims[free[-1]] = axis
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(on, PartitionSpec(*dims)))

    state = TrainState(step=jax.ShapeDtypeStruct((), jnp.int32), params=model.params, model_state=model.state, opt_state=jax.eval_shape(optimizer.init, model.params))
    return SimpleNamespace(state=jax.tree.map(cut, state), model=model, optimizer=optimizer, mesh=on)


def drawn(program: Any) -> TrainState:
    """Numbers that are all different, where the program wants them."""
    random = np.random.default_rng(3)

    def leaf(path: tuple[Any, ...], one: Any) -> jax.Array:
        if not jnp.issubdtype(one.dtype, jnp.floating):
            return jax.device_put(jnp.zeros(one.shape, one.dtype) if not jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key) else jax.random.key(0), one.sharding)
        return jax.device_put(np.asarray(random.normal(size=one.shape), one.dtype), one.sharding)

    return jax.tree_util.tree_map_with_path(leaf, program.state)


@pytest.mark.parametrize("name", CONFIGS)
def test_export_then_import_is_bit_equal(name: str, tmp_path: Path):
    program = program_of(CONFIGS[name], tmp_path / "config")
    state = drawn(program)
    huggingface.save(program, state, tmp_path / "out", config=tmp_path / "config" / "config.json")
    imported = huggingface.load(tmp_path / "out", program_of(CONFIGS[name], tmp_path / "config", (4, 2)))
    assert_same(imported.state.params, state.params)
    held = reading.held_state(imported.state.model_state)
    assert_same(held, reading.held_state(state.model_state))
    assert bool(held) == (name == "deepseek-v3") and imported.findings == ()
