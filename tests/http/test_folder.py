"""A folder of Hugging Face behind the server: tokenizer, template, generation settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from shardlib import serving
from shardlib.serving.hosting.deployment import Deployment, deploy
from shardlib.serving.http.app import application
from shardlib.serving.http.server import serving as serve
from tests.models.configs import tiny
from tests.serving.hf_folders import write_folder

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
MESSAGES: Any = [{"role": "user", "content": " größer als 7? "}]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    config = {**tiny("llama-3.1-8b"), "vocab_size": 300, "max_position_embeddings": 128}
    folder = write_folder(tmp_path_factory.mktemp("hf") / "tiny-llama", config)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    about = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return deploy(serving.named(str(folder)), serving.Capacity(longest=96, slots=4, page=8))


@pytest.fixture(scope="module")
def url(deployment: Deployment) -> Iterator[str]:
    with serve(application([deployment])) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def engine(deployment: Deployment) -> serving.Engine:
    return deployment.served.engine(serving.Capacity(longest=96, slots=1))


def test_a_conversation_is_what_the_template_writes(
    client: openai.OpenAI, deployment: Deployment, engine: serving.Engine
):
    tokenizer: Any = deployment.served.text
    written = "<s>[user]größer als 7?</s>[assistant]"
    tokens = tokenizer.tokenizer.encode(written, add_special_tokens=False).ids
    assert (tokens[0], tokens.count(0), tokens.count(1)) == (0, 1, 1)
    found = client.chat.completions.create(
        model="tiny-llama", messages=MESSAGES, seed=3, max_tokens=20
    )
    assert found.usage is not None and found.usage.prompt_tokens == len(tokens)
    how = serving.Sampling(temperature=0.6, top_k=20, seed=3)  # of generation_config.json
    asked = serving.Asked(prompt=tuple(tokens), most=20, sampling=how, stop=frozenset({1}))
    request = engine.add(asked)
    engine.run()
    text = tokenizer.tokenizer.decode(request.answer, skip_special_tokens=True)
    assert found.choices[0].message.content == text
    assert found.choices[0].finish_reason == request.ended
    again = client.chat.completions.create(
        model="tiny-llama", messages=MESSAGES, seed=3, max_tokens=20, stream=True
    )
    assert "".join(one.choices[0].delta.content or "" for one in again) == text


def test_a_prompt_begins_with_the_token_that_the_model_wants(
    client: openai.OpenAI, deployment: Deployment, engine: serving.Engine
):
    tokenizer: Any = deployment.served.text
    found = client.completions.create(
        model="tiny-llama",
        prompt="value_1",
        max_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True, "top_k": 0},
    )
    prompt = [0, *tokenizer.tokenizer.encode("value_1", add_special_tokens=False).ids]
    (answer,) = engine.generate([prompt], 12)
    assert found.choices[0].text == tokenizer.tokenizer.decode(answer, skip_special_tokens=True)
    assert found.usage is not None and found.usage.prompt_tokens == len(prompt)


def test_a_form_is_kept_over_tokens_of_several_bytes(client: openai.OpenAI):
    schema = {
        "type": "object",
        "properties": {"value": {"enum": ["größer", "7"]}},
        "required": ["value"],
    }
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": schema | {"additionalProperties": False}},
    }
    found = client.chat.completions.create(
        model="tiny-llama", messages=MESSAGES, max_tokens=40, n=3, response_format=form
    )
    for choice in found.choices:
        assert json.loads(choice.message.content or "")["value"] in ("größer", "7")
        assert choice.finish_reason == "stop"


def test_what_no_browser_may_send_is_refused(url: str):
    """A page of somebody else can send plain text to this machine, and no JSON."""
    found = httpx2.post(
        f"{url}/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"}
    )
    assert found.status_code == 400
