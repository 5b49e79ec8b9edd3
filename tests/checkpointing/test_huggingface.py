from __future__ import annotations

import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import shardlib
from shardlib import models
from shardlib.annotation.model import read
from shardlib.checkpointing import huggingface
from shardlib.checkpointing.huggingface import locate, names, stored
from shardlib.checkpointing.tree import named_leaves
from shardlib.errors import CheckpointError, MissingFileError
from shardlib.lowering.runtime import TrainState
from tests.checkpointing.states import assert_same, mesh, numbers
from tests.models.configs import PUBLISHED, tiny

SWITCH = {
    "model_type": "switch_transformers",
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_heads": 4,
    "num_layers": 4,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "num_experts": 4,
    "vocab_size": 64,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "n_positions": 32,
}
CONFIGS = {name: tiny(name) for name in sorted(PUBLISHED)} | {
    "switch": SWITCH,
    "llama-biased": {**tiny("llama-2-7b"), "attention_bias": True, "mlp_bias": True},
    "gpt2-untied": {**tiny("gpt2"), "tie_word_embeddings": False},
}


def written(config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


class StandIn(SimpleNamespace):
    """What reading and writing of files need of a program."""

    @property
    def loss_program(self) -> Any:
        return self

    def init_with(self, first: Any) -> Any:
        return first(self)

    def learned(self, state: TrainState) -> TrainState:
        return state


def program_of(config: dict[str, Any], folder: Path, sizes: tuple[int, int] = (2, 4)) -> Any:
    """What an import asks of a program: its abstract state, its model, its optimizer and its mesh,
    with the last dims that divide cut.
    """
    init, _ = models.build(models.load(str(written(config, folder))))
    model, on, optimizer = read(init), mesh(*sizes), optax.sgd(0.1)

    def cut(leaf: Any) -> jax.ShapeDtypeStruct:
        dims: list[str | None] = [None] * leaf.ndim
        for axis, size in (("b", sizes[1]), ("a", sizes[0])):
            free = [
                i
                for i in range(leaf.ndim)
                if dims[i] is None and leaf.shape[i] % size == 0 and leaf.ndim > 1
            ]
            if free:
                dims[free[-1]] = axis
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(on, PartitionSpec(*dims))
        )

    state = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params=model.params,
        model_state=model.state,
        opt_state=jax.eval_shape(optimizer.init, model.params),
    )
    return StandIn(
        state=jax.tree.map(cut, state),
        model=model,
        mesh=on,
        anew=lambda state: replace(state, opt_state=optimizer.init(state.params)),
    )


def drawn(program: Any) -> TrainState:
    """Numbers that are all different, where the program wants them."""
    random = np.random.default_rng(3)

    def leaf(path: tuple[Any, ...], one: Any) -> jax.Array:
        if not jnp.issubdtype(one.dtype, jnp.floating):
            return jax.device_put(
                (
                    jnp.zeros(one.shape, one.dtype)
                    if not jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key)
                    else jax.random.key(0)
                ),
                one.sharding,
            )
        return jax.device_put(np.asarray(random.normal(size=one.shape), one.dtype), one.sharding)

    return jax.tree_util.tree_map_with_path(leaf, program.state)


#: What `transformers` writes and computes for these configurations, with `weights` below in all
#: tensors: shapes and numbers of tensors, whose names have stars for numbers, and the first logits
#: of the last of nine tokens.
GOLDEN = json.loads((Path(__file__).parent / "transformers_golden.json").read_text())["models"]


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    centre, spread = (1.0, 0.1) if len(shape) == 1 and "norm" in name else (0.0, 0.25)
    return random.normal(centre, spread, shape).astype(np.float32)


def logits(program: Any, imported: huggingface.Imported) -> np.ndarray:
    """Of the last of nine tokens, in float32."""
    init, _ = models.build(replace(imported.config, compute_dtype="float32"))
    model = read(init).rebuild(imported.state.params, imported.state.model_state)
    tokens = jnp.arange(9)[None] * 7 % 64
    both = (
        (tokens, (tokens + 3) % 64)
        if isinstance(imported.config, models.EncoderDecoderConfig)
        else (tokens,)
    )
    return np.asarray(nnx.jit(lambda m, *t: m(*t))(model, *both))[0, -1]


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_those_of_transformers(name: str, tmp_path: Path):
    config, family = huggingface.read_config(written(CONFIGS[name], tmp_path))
    model = read(models.build(config)[0])
    shapes = {
        path: leaf.shape
        for path, leaf in {
            **named_leaves(model.params),
            **huggingface.held_state(model.state),
        }.items()
    }
    found: dict[str, list[Any]] = {}
    for tensor, one in stored(locate(config, names(config, family), shapes)).items():
        found.setdefault(re.sub(r"(?<=[._])\d+(?=\.)", "*", tensor), [list(one.shape), 0])[1] += 1
    assert found == {
        key.removeprefix("transformer."): value for key, value in GOLDEN[name]["tensors"].items()
    }


#: Every form of a tensor is among these.
COMPUTED = ("deepseek-v3", "gemma-2-9b", "gpt2", "mixtral-8x7b", "qwen1.5-moe-a2.7b", "switch")


@pytest.mark.parametrize("name", COMPUTED)
def test_computes_as_transformers_does(name: str, tmp_path: Path):
    """The way out and back is bit-equal, and the logits of what is read are those of
    `transformers`.
    """
    program = program_of(CONFIGS[name], tmp_path / "config")
    state = drawn(program)
    (file,) = huggingface.save(
        program, state, tmp_path / "out", config=tmp_path / "config" / "config.json"
    )
    other = program_of(CONFIGS[name], tmp_path / "config", (4, 2))
    imported = huggingface.load(tmp_path / "out", other)
    assert_same(imported.state.params, state.params)
    assert_same(
        huggingface.held_state(imported.state.model_state),
        huggingface.held_state(state.model_state),
    )
    assert imported.findings == ()

    tensors = load_file(tmp_path / "out" / file)
    save_file(
        {
            tensor: weights(transformers_name(name, tensor), array.shape)
            for tensor, array in tensors.items()
        },
        tmp_path / "out" / file,
    )
    np.testing.assert_allclose(
        logits(other, huggingface.load(tmp_path / "out", other))[:12],
        GOLDEN[name]["logits"],
        atol=3e-5,
    )


def transformers_name(name: str, tensor: str) -> str:
    """GPT-2's published files leave out the start of names that `transformers` writes."""
    return (
        f"transformer.{tensor}"
        if name.startswith("gpt2") and not tensor.startswith("lm_head")
        else tensor
    )


def test_no_more_is_read_at_once_than_a_device_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = program_of(CONFIGS["llama-2-7b"] | {"hidden_size": 64, "head_dim": 16}, tmp_path)
    state = drawn(program)
    huggingface.save(program, state, tmp_path / "out", config=tmp_path / "config.json")
    seen: dict[str, list[int]] = {"pieces": [], "parts": []}
    piece, part = huggingface.Files.read, huggingface.read_part

    def counted_piece(self, name, places):
        seen["pieces"].append(int(np.prod([dim.max() + 1 - dim.min() for dim in places])) * 4)
        return piece(self, name, places)

    def counted_part(*arguments):
        seen["parts"].append((found := part(*arguments)).nbytes)
        return found

    monkeypatch.setattr(huggingface.Files, "read", counted_piece)
    monkeypatch.setattr(huggingface, "read_part", counted_part)
    huggingface.load(tmp_path / "out", program)
    leaves = jax.tree.leaves(state.params)
    assert max(seen["parts"]) == max(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert (
        max(seen["pieces"])
        <= max(leaf.nbytes // (leaf.shape[0] if leaf.ndim > 2 else 1) for leaf in leaves) / 2
    )
    assert sum(seen["pieces"]) < 2.5 * sum(
        leaf.nbytes for leaf in leaves
    )  # devices with the same part share one reading


def test_an_export_of_several_files_in_another_dtype(tmp_path: Path):
    program = program_of(CONFIGS["llama-2-7b"], tmp_path)
    state = drawn(program)
    files = huggingface.save(
        program,
        state,
        tmp_path / "out",
        config=tmp_path / "config.json",
        dtype="bfloat16",
        max_bytes=4000,
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert files[1] == f"model-00002-of-{len(files):05d}.safetensors"
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == set(files)
    assert all((tmp_path / "out" / file).stat().st_size < 6000 for file in files)
    found = {}
    for file in files:
        with safe_open(tmp_path / "out" / file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118 - no dict
                assert index["weight_map"][name] == file
                found[name] = opened.get_tensor(name)
    assert (
        index["metadata"]["total_size"]
        == sum(array.nbytes for array in found.values())
        == 2 * sum(leaf.size for leaf in jax.tree.leaves(state.params))
    )
    np.testing.assert_array_equal(
        found["model.norm.weight"], np.asarray(state.params["norm"]["scale"]).astype(jnp.bfloat16)
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(CheckpointError, match=r"holds .* already; nothing is overwritten"):
        huggingface.save(program, state, tmp_path / "out", config=tmp_path / "config.json")
    assert_same(
        huggingface.load(tmp_path / "out", program).state.params,
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), state.params),
    )


def test_what_does_not_fit_is_listed(tmp_path: Path):
    config = CONFIGS["llama-2-7b"]
    program = program_of(config, tmp_path)
    with pytest.raises(MissingFileError, match=r"no \.safetensors file"):
        huggingface.load(tmp_path, program)
    (file,) = huggingface.save(
        program, drawn(program), tmp_path / "out", config=tmp_path / "config.json"
    )
    tensors = load_file(tmp_path / "out" / file)
    tensors["model.norm.weight"] = np.zeros(17, np.float32)
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors[
        "model.layers.0.self_attn.q_proj.weight"
    ].astype(np.int32)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    extra = {
        "model.layers.1.mlp.mystery": np.zeros(2, np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32),
    }
    save_file(tensors | extra, tmp_path / "out" / file)
    with pytest.raises(CheckpointError) as caught:
        huggingface.load(tmp_path / "out", program)
    text = str(caught.value)
    for part in (
        "model.norm.weight is [17], the program needs [16]",
        "q_proj.weight has dtype I32",
        "model.layers.2.mlp.up_proj.weight [24, 16] is missing",
        "model.layers.1.mlp.mystery [2] is in the files alone",
    ):
        assert part in text
    assert "inv_freq" not in text
    with pytest.raises(CheckpointError, match=r"not the reference model(.|\n)*query_bias"):
        huggingface.load(tmp_path / "out", _with_another_path(program))


def _with_another_path(program: Any) -> Any:
    params = {**program.state.params, "query_bias": program.state.params["norm"]["scale"]}
    return StandIn(**{**vars(program), "state": replace(program.state, params=params)})


def test_a_truncated_file_is_said(tmp_path: Path):
    program = program_of(CONFIGS["llama-2-7b"], tmp_path)
    (file,) = huggingface.save(
        program, drawn(program), tmp_path / "out", config=tmp_path / "config.json"
    )
    path = tmp_path / "out" / file
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        huggingface.load(tmp_path / "out", program)


@pytest.mark.long
@pytest.mark.parametrize(
    "wrt",
    [None, lambda path, variable: "norm" in "".join(map(str, path))],
    ids=["all trained", "norms trained"],
)
def test_a_real_program_takes_an_import(wrt: Any, tmp_path: Path):
    config = models.load(str(written(CONFIGS["llama-2-7b"], tmp_path)))
    init, loss = models.build(config)
    batch = models.example_batch(config, 8, 8)
    program = shardlib.compile(
        init,
        loss,
        optax.adam(1e-3),
        batch,
        topology="cpu:8",
        pin={"mesh": {"fsdp": 8}, "zero": 3},
        wrt=wrt,
    )
    start = program.init(5)
    huggingface.save(program, start, tmp_path / "out", config=tmp_path / "config.json")
    imported = huggingface.load(tmp_path / "out", program)
    assert_same(numbers(imported.state), numbers(start))
    assert all(
        leaf.sharding.is_equivalent_to(asked.sharding, asked.ndim)
        for leaf, asked in zip(*map(jax.tree.leaves, (imported.state, program.state)), strict=True)
    )
