"""A folder of Hugging Face behind the server: tokenizer, template, generation settings."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from shardlib import serve
from shardlib.serve.hosting import Deployment

MESSAGES: Any = [{"role": "user", "content": " größer als 7? "}]


@pytest.fixture(scope="module")
def engine(folder: Deployment) -> serve.Engine:
    return folder.served.engine(serve.Capacity(longest=96, slots=1))


@pytest.mark.long
def test_a_conversation_is_what_the_template_writes(
    folder_client: openai.OpenAI, folder: Deployment, engine: serve.Engine
):
    tokenizer = folder.served.text
    written = "<s>[user]größer als 7?</s>[assistant]"
    tokens = tokenizer.encode(written, begin=False)
    assert (tokens[0], tokens.count(0), tokens.count(1)) == (0, 1, 1)
    found = folder_client.chat.completions.create(
        model="tiny-llama", messages=MESSAGES, seed=3, max_tokens=20
    )
    assert found.usage is not None and found.usage.prompt_tokens == len(tokens)
    how = serve.Sampling(temperature=0.6, top_k=20, seed=3)  # of generation_config.json
    asked = serve.GenerationRequest(
        prompt=tuple(tokens), most=20, sampling=how, stop=frozenset({1})
    )
    request = engine.add(asked)
    engine.run()
    text = tokenizer.decode(request.answer)
    assert found.choices[0].message.content == text
    assert found.choices[0].finish_reason == request.ended
    again = folder_client.chat.completions.create(
        model="tiny-llama", messages=MESSAGES, seed=3, max_tokens=20, stream=True
    )
    assert "".join(one.choices[0].delta.content or "" for one in again) == text


@pytest.mark.long
def test_a_prompt_begins_with_the_token_that_the_model_wants(
    folder_client: openai.OpenAI, folder: Deployment, engine: serve.Engine
):
    tokenizer = folder.served.text
    found = folder_client.completions.create(
        model="tiny-llama",
        prompt="value_1",
        max_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True, "top_k": 0},
    )
    prompt = [0, *tokenizer.encode("value_1", begin=False)]
    (answer,) = engine.generate([prompt], 12)
    assert found.choices[0].text == tokenizer.decode(answer)
    assert found.usage is not None and found.usage.prompt_tokens == len(prompt)


@pytest.mark.long
def test_a_form_is_kept_over_tokens_of_several_bytes(folder_client: openai.OpenAI):
    schema = {
        "type": "object",
        "properties": {"value": {"enum": ["größer", "7"]}},
        "required": ["value"],
    }
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": schema | {"additionalProperties": False}},
    }
    found = folder_client.chat.completions.create(
        model="tiny-llama", messages=MESSAGES, max_tokens=40, n=3, response_format=form
    )
    for choice in found.choices:
        assert json.loads(choice.message.content or "")["value"] in ("größer", "7")
        assert choice.finish_reason == "stop"


def test_what_no_browser_may_send_is_refused(folder_url: str):
    """A page of somebody else can send plain text to this machine, and no JSON."""
    found = httpx2.post(
        f"{folder_url}/v1/completions",
        content=b'{"prompt": "a"}',
        headers={"content-type": "text/plain"},
    )
    assert found.status_code == 400
