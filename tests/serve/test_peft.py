"""Adapters of PEFT are served with the tokens that PEFT says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardlib import serve as serving
from shardlib.cli import main
from shardlib.errors import ArgumentError, MissingFileError, ModelError
from shardlib.serve.folders import adapted, read_adapter
from shardlib.serve.hosting import Beside, Deployment, Renderer, Worker
from shardlib.serve.http.app import application
from shardlib.serve.http.server import serving as serve
from tests.models.configs import tiny
from tests.serve.hf_folders import write_adapter, write_folder
from tests.serve.test_folders import GOLDEN

SMALL = serving.Capacity(longest=32, slots=3, page=4, adapters=2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, and its adapters."""
    found = tmp_path_factory.mktemp("peft")
    write_folder(found / "base", tiny("llama-3.1-8b"), "llama-3.1-8b")
    for name, how in GOLDEN["adapters"].items():
        about = {key: value for key, value in how.items() if key != "tokens"}
        write_adapter(found / name, found / "base", name, about)
    return found


@pytest.mark.long
def test_tokens_are_those_of_peft_and_adapters_are_models_of_the_server(home: Path):
    import httpx2

    base = serving.read_folder(home / "base", dtype="float32")
    served, adapters = adapted(base, home / "base", {name: home / name for name in "ab"})
    engine = served.engine(SMALL)
    Beside(adapters=adapters).join(engine)
    prompts, most = GOLDEN["prompts"], GOLDEN["most"]
    asked = {
        name: [
            engine.add(serving.Asked(prompt=tuple(prompt), most=most, adapter=name))
            for prompt in prompts
        ]
        for name in ("a", "b", "")
    }
    engine.run()
    for name in "ab":
        assert [one.answer for one in asked[name]] == GOLDEN["adapters"][name]["tokens"]
    assert [one.answer for one in asked[""]] == GOLDEN["tokens"]["llama-3.1-8b"]
    deployed = Deployment(
        name="base",
        served=served,
        worker=Worker(engine),
        renderer=Renderer(served.text),
        adapters=tuple(adapters),
    )
    with serve(application([deployed])) as url, httpx2.Client(base_url=f"{url}/v1") as client:
        listed = client.get("/models").json()["data"]
        assert [(one["id"], one["parent"]) for one in listed] == [
            ("base", None),
            ("a", "base"),
            ("b", "base"),
        ]
        body = {"prompt": prompts[0], "max_tokens": most, "temperature": 0, "ignore_eos": True}
        for name in ("base", "a", "b"):
            found = client.post("/completions", json={**body, "model": name}, timeout=60).json()
            right = asked["" if name == "base" else name][0].answer
            assert found["model"] == name
            assert found["choices"][0]["text"] == served.text.decode(right)
        wrong = client.post("/embeddings", json={"input": "a", "model": "a"})
        assert wrong.status_code == 400 and "a is an adapter" in wrong.text
        assert client.post("/completions", json={**body, "model": "c"}).status_code == 404
    with pytest.raises(ArgumentError, match="each has a name of its own"):
        application([Deployment(**{**vars(deployed), "adapters": ("base",)})])


@pytest.mark.unit
@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; 'LORA' is served"),
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"rank_pattern": {"q_proj": 3}}, "rank_pattern is"),
        ({"r": 0}, "r is 0; it is a whole number above 0"),
        ({"r": 2}, "is no adapter of rank 2"),
        ({"lora_alpha": None}, "lora_alpha is None"),
    ],
)
def test_adapters_of_another_kind_are_refused(
    home: Path, tmp_path: Path, about: dict[str, Any], said: str
):
    config = json.loads((home / "a" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **about}))
    save_file(
        load_file(home / "a" / "adapter_model.safetensors"),
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(ModelError, match=said):
        read_adapter(tmp_path)


def test_adapters_of_another_model_are_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tensors = load_file(home / "a" / "adapter_model.safetensors")
    start = "base_model.model.model.layers.0.self_attn"
    wider = {**tensors, f"{start}.q_proj.lora_B.weight": np.zeros((7, 3), np.float32)}
    other = {
        **tensors,
        f"{start}.r_proj.lora_A.weight": np.zeros((3, 4), np.float32),
        f"{start}.r_proj.lora_B.weight": np.zeros((4, 3), np.float32),
    }
    base = serving.read_folder(home / "base", dtype="float32")
    for held, said in ((wider, "q_proj is .7, "), (other, "r_proj has no adapter in the model")):
        config = (home / "a" / "adapter_config.json").read_text()
        (tmp_path / "adapter_config.json").write_text(config)
        save_file(held, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ModelError, match=f"the adapter 'x' does not fit.*{said}"):
            adapted(base, home / "base", {"x": tmp_path})
    with pytest.raises(MissingFileError, match=r"has no adapter_config\.json"):
        read_adapter(home)
    for words, said in (
        (["serve", "demo", "--adapter", "a=b", "--port", "0"], "adapters are for folders of"),
        (["serve", "demo", "--adapter", "a", "--port", "0"], "--adapter a gives no new name"),
        (["serve", "demo", "x=demo", "--adapter", "a=b", "--port", "0"], "--adapter is for one"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and said in capsys.readouterr().err
