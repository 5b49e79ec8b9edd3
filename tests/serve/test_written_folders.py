"""What is served goes out as a folder of Hugging Face, and says the same there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardlib import models, serve
from shardlib.checkpointing.tree import named_leaves
from shardlib.cli import main
from shardlib.errors import CheckpointError, ModelError
from shardlib.models.config import LatentAttention, TransformerConfig
from shardlib.models.huggingface import read
from shardlib.models.presets import PRESETS, described
from shardlib.serve.folders import byte_tokenizer, write_folder
from tests.checkpointing.test_huggingface import CONFIGS
from tests.models.configs import PUBLISHED
from tests.serve.cards import card

CARD = card(vocab=300, layers=2)
SMALL = serve.Capacity(longest=48, slots=2, page=4)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer of bytes with random weights and more tokens than there are bytes, written."""
    home = tmp_path_factory.mktemp("written")
    (home / "tiny.toml").write_text(CARD)
    with pytest.raises(SystemExit) as ended:
        main(["export", str(home / "tiny.toml"), "--huggingface", str(home / "out"), "--json"])
    assert not ended.value.code
    return home / "out"


@pytest.mark.long
def test_what_is_written_says_the_same(out: Path):
    before, after = serve.named(str(out.parent / "tiny.toml")), serve.named(str(out))
    assert after.config is not None
    assert after.config.vocab_size == 256
    prompt = "größer {0} \n"
    assert after.text.encode(prompt) == before.text.encode(prompt) == list(prompt.encode())
    assert after.text.decode(list(range(256))) == bytes(range(256)).decode("utf-8", "replace")
    asked = [list(prompt.encode()), [7]]
    answers = before.engine(SMALL).generate(asked, most=16)
    assert after.engine(SMALL).generate(asked, most=16) == answers
    assert json.loads((out / "generation_config.json").read_text()) == {"do_sample": False}


def test_transformers_says_the_same(out: Path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    given = tokenizer("größer {0}", return_tensors="pt")
    whole = model.generate(**given, max_new_tokens=16, do_sample=False, pad_token_id=0)[0]
    assert given["input_ids"][0].tolist() == list("größer {0}".encode())
    engine = serve.read_folder(out).engine(SMALL)
    assert [whole[len(given["input_ids"][0]) :].tolist()] == engine.generate(
        [given["input_ids"][0].tolist()], most=16
    )
    assert torch.isfinite(model(**given).logits).all()


def test_nothing_is_overwritten(out: Path):
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="already; nothing is overwritten"):
        write_folder(serve.named(str(out)), out, source=out)
    assert (out / "model.safetensors").read_bytes() == before


def test_a_folder_goes_out_in_another_dtype(out: Path, tmp_path: Path):
    found = serve.read_folder(out)
    write_folder(found, tmp_path / "half", source=out, dtype="bfloat16")
    half = serve.read_folder(tmp_path / "half")
    assert half.config is not None
    assert half.config.param_dtype == "bfloat16"
    assert (tmp_path / "half" / "tokenizer.json").read_text() == byte_tokenizer()
    for one, other in zip(_leaves(found), _leaves(half), strict=True):
        np.testing.assert_array_equal(one.astype(other.dtype), other)


def _leaves(found: serve.Served) -> list[np.ndarray]:
    assert isinstance(found.weights, tuple)
    return [np.asarray(leaf) for leaf in named_leaves(found.weights[0]).values()]


@pytest.mark.parametrize("name", ["demo", "gpt2-small", "llama3-70b", *PUBLISHED])
def test_the_description_is_read_as_the_same(name: str):
    found = PRESETS[name] if name in PRESETS else read(PUBLISHED[name][0], name)
    assert isinstance(found, TransformerConfig)
    again = read(described(found), name)
    assert isinstance(again, TransformerConfig)
    assert again.parameter_count() == found.parameter_count()
    # 0 stands for the scale that is written; no file says how experts are balanced in training.
    experts = (
        again.experts and found.experts and replace(again.experts, balance=found.experts.balance)
    )
    alike = {key: getattr(found, key) for key in ("param_dtype", "compute_dtype", "query_scale")}
    assert replace(again, experts=experts, **alike) == found


def test_an_encoder_decoder_is_described():
    found = read(CONFIGS["switch"], "switch")
    assert isinstance(found, models.EncoderDecoderConfig) and found.experts is not None
    data = described(found)
    assert data["model_type"] == "switch_transformers"
    again = read(data, "switch")
    assert again.experts is not None
    experts = replace(again.experts, balance=found.experts.balance, z_loss=found.experts.z_loss)
    assert replace(again, experts=experts, compute_dtype=found.compute_dtype) == found


def test_what_no_family_has_is_refused(tmp_path: Path):
    latent = LatentAttention(q_lora=0, kv_lora=8, rope_dim=4, nope_dim=4, v_dim=4)
    demo = models.PRESETS["demo"]
    assert isinstance(demo, TransformerConfig)
    for config in (
        replace(demo, latent=latent, kv_heads=4),
        replace(demo, sliding_window=8, qk_norm=True),
        replace(demo, mlp_bias=True, norm="layer"),
    ):
        with pytest.raises(ModelError, match="of no family of Hugging Face"):
            described(config)
