"""Folders of Hugging Face are served as they are, with the tokens of `transformers`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardlib.cli import main
from shardlib.errors import ArgumentError, CheckpointError, MissingFileError, ModelError
from shardlib.serve.folders import generation, read_folder, read_text
from shardlib.serve.loading import named
from shardlib.serve.requests import Capacity
from shardlib.serve.served import ByteText, Pieces, Served
from tests.models.configs import PUBLISHED, tiny
from tests.serve.hf_folders import write_folder, write_tokenizer

#: What `transformers` continues some prompts with, in float32: benchmarks/serving_families.py.
GOLDEN = json.loads((Path(__file__).parent / "transformers_tokens.json").read_text())
SMALL = Capacity(longest=32, slots=3, page=4)
#: Forms that are far from each other; the others by `--every-case`.
FIRST = ("deepseek-v3", "gemma-3-1b", "gpt2")


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FIRST else [pytest.mark.matrix])
        for name in sorted(PUBLISHED)
    ],
)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path):
    assert set(GOLDEN["tokens"]) == set(PUBLISHED)
    found = read_folder(write_folder(tmp_path / name, tiny(name), name))
    engine = found.engine(SMALL)
    assert engine.generate(GOLDEN["prompts"], most=GOLDEN["most"]) == GOLDEN["tokens"][name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a tokenizer, whose answers end with a token that it says."""
    config = {**tiny("llama-3.1-8b"), "vocab_size": 300, "max_position_embeddings": 64}
    return write_folder(tmp_path_factory.mktemp("hf") / "tiny-llama", config)


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return named(str(folder))


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.mark.long
def test_the_command_line_continues_a_text(
    folder: Path, served: Served, capsys: pytest.CaptureFixture[str]
):
    words = ["generate", str(folder), "--prompt", "value_1", "--most", "12"]
    code, out, _ = run([*words, "--json"], capsys)
    assert code == 0
    found = json.loads(out)
    given = served.text.encode("value_1")
    assert given[0] == 0  # the token that begins a prompt
    engine = served.engine(Capacity(longest=64, slots=1))
    assert found["tokens"] == engine.generate([given], most=12)[0]
    assert found["text"] == served.text.decode(found["tokens"])
    code, out, _ = run(words, capsys)
    assert (code, out) == (0, f"value_1{found['text']}\n".replace("\x00", r"\x00"))
    # A token that the folder says ends answers is not part of them.
    end = found["tokens"][5]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    try:
        code, out, _ = run([*words, "--json"], capsys)
        first = found["tokens"].index(end)
        assert json.loads(out)["tokens"] == found["tokens"][:first]
    finally:
        (folder / "generation_config.json").unlink()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "a", "--most", "100"], "2 tokens of the prompt and 100 of the answer"),
        (["--prompt", ""], "the prompt is empty"),
    ],
    ids=["too long", "empty"],
)
def test_what_cannot_be_answered_is_said(
    folder: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    code, _, error = run(["generate", str(folder), *words], capsys)
    assert (code, said in error) == (2, True), error


def test_characters_are_never_cut(folder: Path):
    for text in (read_text(folder), ByteText()):
        tokens = text.encode("größer – 7", begin=False)
        stream = Pieces(text)
        pieces = [*map(stream.add, tokens), stream.end()]
        assert "".join(pieces) == "größer – 7"
        assert not any("\ufffd" in piece for piece in pieces)
        assert len([piece for piece in pieces if piece]) > 2


@pytest.mark.long
def test_the_program_of_the_page_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = (Path(__file__).parents[2] / "docs" / "folders.md").read_text()
    (program,) = re.findall(r"<!-- served -->\n```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(folder.parent)
    names: dict[str, Any] = {}
    exec(program, names)
    assert len(names["answer"]) == 16
    assert capsys.readouterr().out == names["found"].text.decode(names["answer"]) + "\n"


def test_templates_and_what_they_find(tmp_path: Path):
    write_tokenizer(tmp_path)
    assert (read_text(tmp_path).template, read_text(tmp_path).variables) == (None, {})
    about = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "pad_token": None,
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    found = read_text(tmp_path, frozenset({1}))
    assert (found.template, found.ends) == ("{{ messages }}", {1})
    assert found.variables == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert read_text(tmp_path).template == "newer"
    assert read_text(tmp_path).encode("\ud800") == read_text(tmp_path).encode("?")


def test_generation_config():
    assert generation({}, "it").sampling.temperature == 0
    found = generation({"do_sample": True, "top_p": 0.9, "eos_token_id": 3}, "it")
    assert (found.sampling.temperature, found.sampling.top_k, found.sampling.top_p) == (1, 50, 0.9)
    assert found.stop == {3}
    for data in ({"eos_token_id": "x"}, {"eos_token_id": [True]}, {"eos_token_id": -1}):
        with pytest.raises(ModelError, match="it has eos_token_id"):
            generation(data, "it")
    with pytest.raises(ModelError, match=r"it is not usable: .*temperature is -1"):
        generation({"do_sample": True, "temperature": -1}, "it")


def test_folders_that_are_none_are_said(tmp_path: Path):
    with pytest.raises(MissingFileError, match=r"holds no config\.json"):
        read_folder(tmp_path)
    config: dict[str, Any] = tiny("llama-2-7b")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MissingFileError, match=r"has no tokenizer\.json"):
        read_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a tokenizer"):
        read_folder(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(MissingFileError, match=r"no \.safetensors file"):
        read_folder(tmp_path)
    with pytest.raises(ArgumentError, match="dtype is 'int4'"):
        read_folder(tmp_path, dtype="int4")
    whole = write_folder(tmp_path / "whole", config)
    data = (whole / "model.safetensors").read_bytes()
    (whole / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_folder(whole)
    (whole / "config.json").write_text(json.dumps(config | {"dtype": "float8"}))
    with pytest.raises(ModelError, match="has dtype 'float8'"):
        read_folder(whole)
