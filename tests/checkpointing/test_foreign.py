"""Names of tensors learned for models of one's own, beside the tables of published families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import shardlib
from shardlib import models
from shardlib.annotation.model import read
from shardlib.checkpointing import huggingface
from shardlib.checkpointing.foreign import (
    in_form,
    learn_names,
    read_adapter,
    read_weights,
    tensors_of,
    write_adapter,
)
from shardlib.checkpointing.tree import named_leaves
from shardlib.errors import CheckpointError, MissingFileError
from tests.models.configs import tiny


def written(name: str, folder: Path) -> tuple[Any, Any]:
    """(configuration, parameters) of a model that the table of its family has written."""
    config = tiny(name)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    found = models.load(str(folder))
    init, _ = models.build(found)
    params, state = read(init).init(0)
    (folder / "config.json").unlink()
    huggingface.save_weights((params, state), folder, config)
    return found, params


@pytest.mark.parametrize(
    "name", ["llama-2-7b", "llama-3.1-8b", "qwen2-7b", "qwen3-8b", "gemma-2-9b", "gemma-3-1b"]
)
def test_learned_names_are_those_of_the_published_families(name: str, tmp_path: Path):
    _, params = written(name, tmp_path)
    names = learn_names(params, tensors_of(tmp_path))
    tensors = {
        key: one for path in tmp_path.glob("*.safetensors") for key, one in load_file(path).items()
    }
    names.require()
    for path, leaf in named_leaves(params).items():
        source = names.sources[path]
        shape = leaf.shape[1:] if source.stacked else leaf.shape
        parts = [in_form(tensors[one], source.form, shape) for one in source.names]
        found = np.stack(parts) if source.stacked else parts[0]
        assert (found == np.asarray(leaf)).all(), f"{path} <- {source.names[0]}"


def test_names_are_shown_and_what_is_unsure_is_not_used():
    params = {
        "blocks": {
            str(at): {"first": {"kernel": np.zeros((4, 4))}, "second": {"kernel": np.zeros((4, 4))}}
            for at in range(2)
        },
        "head": {"kernel": np.zeros((4, 9))},
    }
    tensors = {f"layers.{at}.{name}.weight": (4, 4) for at in range(2) for name in ("a", "b")}
    tensors |= {"lm_head.weight": (9, 4), "inv_freq": (2,)}
    names = learn_names(params, tensors)
    assert "head.kernel <- lm_head.weight (transposed)" in str(names)
    assert names.left == ("inv_freq",)
    with pytest.raises(CheckpointError, match=r"blocks.#.first.kernel: layers.#.b.weight fit"):
        names.require()
    given = {"blocks.#.first.kernel": "layers.#.b.weight"}
    names = learn_names(params, tensors, expected_names=given)
    names.require()
    assert names.sources["blocks.1.second.kernel"].names == ("layers.1.a.weight",)
    square = {"w": np.zeros((4, 4))}
    with pytest.raises(CheckpointError, match="its transpose"):
        learn_names(square, {"w": (4, 4)}).require()
    assert learn_names(square, {"w": (4, 4)}, transposed=True).sources["w"].form == "transposed"
    with pytest.raises(CheckpointError, match="no tensor fits"):
        learn_names(params, {"lm_head.weight": (9, 4)}).require()


@pytest.mark.long
def test_weights_are_read_where_the_plan_has_them(tmp_path: Path):
    found, params = written("llama-2-7b", tmp_path)
    init, loss = models.build(found)
    program = shardlib.compile(
        init,
        loss,
        optax.adam(1e-3),
        models.example_batch(found, 4, 8),
        topology="cpu:4",
        pin={"mesh": {"fsdp": 2, "tensor": 2}, "zero": 3},
    )
    names = learn_names(program.state.params, tensors_of(tmp_path))
    state = read_weights(tmp_path, program, names, seed=5)
    for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        assert (np.asarray(one) == np.asarray(other)).all()
    assert any("tensor" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(state.params))
    with pytest.raises(MissingFileError, match="no safetensors"):
        tensors_of(tmp_path / "nowhere")


def test_adapters_go_out_and_come_back(tmp_path: Path):
    drawn = np.random.default_rng(0)

    def pair(inner: int, outer: int) -> dict[str, np.ndarray]:
        a, b = drawn.normal(size=(inner, 2)), drawn.normal(size=(2, outer))
        return {"lora_a": a.astype(np.float32), "lora_b": b.astype(np.float32)}

    params = {"layers": {"0": {"up": {"lora": pair(4, 6), "kernel": np.zeros((4, 6))}}}}
    names = {"layers.0.up": "model.layers.0.mlp.up_proj"}
    write_adapter(tmp_path, params, names, base="base", task="CAUSAL_LM")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {name: one.shape for name, one in tensors.items()} == {
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (2, 4),
        "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": (6, 2),
    }
    found = read_adapter(tmp_path, names)
    up = params["layers"]["0"]["up"]["lora"]
    assert (found["layers.0.up.lora.lora_a"] == up["lora_a"]).all()
    assert (found["layers.0.up.lora.lora_b"] == up["lora_b"]).all()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    changed = {**config, "lora_alpha": 6, "use_rslora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(changed))
    scaled = read_adapter(tmp_path, names)["layers.0.up.lora.lora_b"]
    assert np.allclose(scaled, up["lora_b"] * 6 / 2**0.5)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(CheckpointError, match="use_dora is True"):
        read_adapter(tmp_path, names)
    with pytest.raises(CheckpointError, match=r"layers\.0\.up has no name"):
        write_adapter(tmp_path / "other", params, {})
    save_file({}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is not there"):
        read_adapter(tmp_path, names)
    with pytest.raises(MissingFileError, match="save_pretrained"):
        read_adapter(tmp_path / "nowhere", names)
