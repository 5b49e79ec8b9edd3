from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardlib import models
from shardlib.errors import MissingFileError, ModelError
from shardlib.models import huggingface, presets
from shardlib.models.config import Experts, TransformerConfig
from shardlib.models.presets import PRESETS, UserModel
from tests.models.configs import PUBLISHED

COUNTS = {
    "gpt2-small": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
}


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_presets_have_the_published_size(name: str):
    assert models.load(name) is PRESETS[name]
    assert PRESETS[name].parameter_count() == COUNTS[name]


def test_the_size_of_mt_nlg_is_that_of_the_papers_formula():
    """Equation 2 of arXiv:2104.04473, which leaves out the norm after the last layer."""
    layers, width, vocabulary, seq = 105, 20480, 51200, 2048
    formula = 12 * layers * width**2 + 13 * layers * width + (vocabulary + seq) * width
    assert PRESETS["mt-nlg-530b"].parameter_count() == formula + 2 * width
    assert round(formula / 1e9) == 530


def test_active_parameters():
    billions = {
        name: round(PRESETS[name].active_parameter_count() / 1e9, 1)
        for name in ("mixtral-8x7b", "deepseek-v3", "1t-moe", "llama3-8b")
    }
    assert billions == {"mixtral-8x7b": 12.9, "deepseek-v3": 37.6, "1t-moe": 32.9, "llama3-8b": 8.0}
    assert 1.0e12 < PRESETS["1t-moe"].parameter_count() < 1.05e12


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_configurations(name: str, tmp_path: Path):
    data, count = PUBLISHED[name]
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(data))
    config = models.load(str(folder / "config.json"))
    assert isinstance(config, TransformerConfig)
    assert (config.name, config.parameter_count()) == (name, count)
    assert models.load(str(folder)) == config


def test_same_model_by_preset_and_by_configuration():
    preset, read = (
        PRESETS["deepseek-v3"],
        huggingface.read(PUBLISHED["deepseek-v3"][0], name="deepseek-v3"),
    )
    assert read.experts is not None and read.experts.bias
    assert (preset.experts, preset.latent, preset.rope_scaling) == (
        read.experts,
        read.latent,
        read.rope_scaling,
    )


def test_multimodal_gemma_3_reads_its_text_model():
    config = huggingface.read(
        {
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        }
    )
    assert config.parameter_count() == 3_880_263_168  # gemma-3-4b's language model, tied
    assert [config.is_global(layer) for layer in range(6)] == [False] * 5 + [True]
    assert config.rope_theta == 1e6 and config.rope_local_theta == 1e4


def test_newer_rope_parameters():
    data = {
        **PUBLISHED["mistral-7b"][0],
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
    }
    config = huggingface.read(data)
    assert (
        config.rope_theta == 5e5
        and config.rope_scaling is not None
        and config.rope_scaling.factor == 2.0
    )


def test_layers_without_experts_of_qwen():
    """Experts in every second layer, after two layers that are dense; the count is that of a matrix
    of each kind in every layer.
    """
    data = {**PUBLISHED["qwen3-30b-a3b"][0], "decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}
    config, all_ = huggingface.read(data), huggingface.read(PUBLISHED["qwen3-30b-a3b"][0])
    assert config.experts is not None and (
        config.experts.first_dense,
        config.experts.every,
        config.dense_layers,
    ) == (2, 2, 25)
    sparse, dense = 2048 * 128 + 128 * 3 * 2048 * 768, 3 * 2048 * 6144
    assert all_.parameter_count() - config.parameter_count() == 25 * (sparse - dense)
    with pytest.raises(ModelError, match=r"mlp_only_layers \[3\]; they can be the first layers"):
        huggingface.read({**data, "mlp_only_layers": [3]})


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"sliding_window": -1}, "sliding_window -1 and global_every 0 cannot be negative"),
        ({"experts": Experts(count=4, per_token=5, mlp=8)}, "a token cannot visit 5 of 4 experts"),
        (
            {"experts": Experts(count=4, per_token=1, mlp=8, capacity=-1.0)},
            "capacity and bias_rate cannot be negative",
        ),
        ({"experts": Experts(count=4, per_token=0, mlp=8)}, "experts.per_token is 0"),
        (
            {"experts": Experts(count=4, per_token=1, mlp=8, every=2)},
            "experts.every 2 does not divide the 3 layers",
        ),
        (
            {"experts": Experts(count=4, per_token=1, mlp=8, capacity=1.0, sequence_capacity=4)},
            "0 where experts.capacity says it",
        ),
    ],
)
def test_what_experts_and_windows_cannot_be(changed: dict[str, Any], wrong: str):
    with pytest.raises(ModelError, match=wrong):
        TransformerConfig(
            **{
                "name": "odd",
                "vocab_size": 8,
                "layers": 3,
                "embed": 8,
                "heads": 2,
                "kv_heads": 2,
                "head_dim": 4,
                "mlp": 8,
                **changed,
            }
        )


def message(spec: str, kind: type[Exception] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        models.load(spec)
    return str(caught.value)


def test_misspelt_preset():
    assert (
        message("llama3-8")
        == "'llama3-8' is not a preset, .json or .toml file, or package.module:function; did you mean"
        " 'llama3-8b'? (presets are demo, gpt2-small, llama2-7b, llama2-70b, llama3-8b,"
        " llama3-70b, llama3-405b, mt-nlg-530b, mixtral-8x7b, deepseek-v3, 1t-moe,"
        " switch-base-8, switch-c-2048)"
    )


def test_names_that_are_no_functions():
    assert message("os:path") == "os:path: 'path' of os is of the type module, not a function"
    assert message("json:lod") == "json:lod: json has no function 'lod'; did you mean 'load'?"
    assert "package.module:function (presets are demo, " in message("zzz")


def test_missing_files(tmp_path: Path):
    assert (
        message("no/such/config.json", MissingFileError)
        == "there is no model configuration no/such/config.json"
    )
    assert message("no/such.toml", MissingFileError) == "there is no model card no/such.toml"
    assert message(str(tmp_path), MissingFileError) == f"the folder {tmp_path} holds no config.json"


def test_all_missing_keys_at_once(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 64}')
    assert (
        message(str(path))
        == f"{path} (llama) lacks keys:\n  - intermediate_size\n  - num_attention_heads\n  -"
        " num_hidden_layers\n  - vocab_size"
    )


def test_unknown_family_lists_the_known(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "bert"}')
    assert message(str(path)).startswith(
        f"{path} has model_type 'bert'; known are deepseek_v2, deepseek_v3, gemma, gemma2, gemma3,"
    )


def test_settings_that_the_model_does_not_have_are_refused(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                **PUBLISHED["qwen2-7b"][0],
                "use_sliding_window": True,
                "rope_scaling": {"rope_type": "dynamic", "factor": 2},
            }
        )
    )
    assert (
        message(str(path)) == f"{path} (qwen2) asks for what the reference model does not have:\n"
        "  - use_sliding_window true, a window in some layers only\n"
        "  - rope scaling 'dynamic'; known are default, linear, llama3, yarn"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "{",
        (
            '{"model_type": "llama", "hidden_size": "a", "num_attention_heads": 2,'
            ' "num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8}'
        ),
    ],
)
def test_configurations_of_a_wrong_form(text: str, tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert str(path) in message(str(path))


CARD = "vocab_size = 64\nlayers = 2\nembed = 8\nheads = 2\nkv_heads = 1\nhead_dim = 4\nmlp = 16\n"


def test_card(tmp_path: Path):
    path = tmp_path / "small.toml"
    path.write_text(CARD + "rope_theta = 5000\n[experts]\ncount = 4\nper_token = 2\nmlp = 8\n")
    config = models.load(str(path))
    assert isinstance(config, TransformerConfig)
    assert (config.name, config.rope_theta, config.experts) == (
        "small",
        5000,
        Experts(count=4, per_token=2, mlp=8),
    )


def test_card_lists_all_that_is_wrong():
    with pytest.raises(ModelError) as caught:
        presets.parse(
            'vocab_sise = 64\nlayers = "two"\nembed = 8\nheads = 2\nkv_heads = 1\nhead_dim ='
            " 4\ntied = 1\n[experts]\ncount = 4\ntop = 2\n",
            name="x",
        )
    assert (
        str(caught.value)
        == "the model card is not usable:\n  - vocab_size is missing\n  - mlp is missing\n  -"
        " vocab_sise is not a key; did you mean vocab_size?\n  - layers is 'two'; expected int\n  -"
        " tied is 1; expected bool\n  - experts.per_token is missing\n  - experts.mlp is"
        " missing\n  - experts.top is not a key; keys are count, per_token, mlp, shared,"
        " shared_gate, first_dense, every, router, normalise, scaling, groups, groups_per_token,"
        " group_score, balance, z_loss, capacity, sequence_capacity, bias, bias_rate"
    )


def test_contradictions_are_listed_together():
    with pytest.raises(ModelError) as caught:
        TransformerConfig(
            name="odd",
            vocab_size=8,
            layers=2,
            embed=8,
            heads=3,
            kv_heads=2,
            head_dim=3,
            mlp=8,
            norm="batch",
        )
    assert (
        str(caught.value)
        == "the model 'odd' is not usable:\n  - norm is 'batch'; known are rms, layer\n  - kv_heads"
        " 2 does not divide heads 3\n  - rotary positions turn pairs, and 3 dims of a head are"
        " not pairs"
    )


def test_sequences_that_are_too_long():
    with pytest.raises(
        ModelError, match="the model 'demo' takes sequences of 1 to 256 tokens, not 512"
    ):
        models.example_batch(PRESETS["demo"], 8, 512)


def write_module(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))


def test_user_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_module(
        tmp_path,
        "user_model_a",
        "import types\ndef make():\n return {'init': dict, 'loss': max, 'batch': [1]}\ndef"
        " thing():\n return types.SimpleNamespace(init=dict, loss=max, batch=[1], optimizer=min)\n",
        monkeypatch,
    )
    assert models.load("user_model_a:make") == UserModel(
        name="user_model_a:make", init=dict, loss=max, batch=[1]
    )
    found = models.load("user_model_a:thing")
    assert isinstance(found, UserModel) and found.optimizer is min


def test_user_functions_that_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_module(
        tmp_path,
        "user_model_b",
        "def make():\n return {'init': dict, 'bach': 1}\ndef ask(batch):\n return {}\n",
        monkeypatch,
    )
    write_module(tmp_path, "user_model_c", "import no_such_package\n", monkeypatch)
    assert (
        message("user_model_b:make")
        == "what user_model_b:make returned is not a model:\n  - 'loss' is missing\n  - 'batch' is"
        " missing\n  - 'bach' is not a key; keys are name, init, loss, batch, optimizer,"
        " batch_axes, wrt, rows, forward, outputs, weights"
    )
    assert (
        message("user_model_b:ask")
        == "user_model_b:ask must be callable without arguments; it asks for batch"
    )
    assert (
        message("user_model_b:mak")
        == "user_model_b:mak: user_model_b has no function 'mak'; did you mean 'make'?"
    )
    assert message("no_such_module_x:f").startswith(
        "no_such_module_x:f: there is no module 'no_such_module_x' on the path"
    )
    assert (
        message("user_model_c:f")
        == "user_model_c:f: importing user_model_c needs the module 'no_such_package', which is not"
        " installed"
    )
