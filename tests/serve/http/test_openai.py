"""OpenAI's own client gets what the engine generates, in every form of its interface."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import jax
import numpy as np
import openai
import pytest

from shardlib import serve
from shardlib.serve.cache import all_plain
from shardlib.serve.hosting import Deployment, written
from shardlib.serve.http.app import COMPLETION

PROMPT = "value_1 = 7 + 1\n"
BYTES = list(PROMPT.encode())


def text_of(engine: serve.Engine, prompt: list[int], most: int, **how: Any) -> str:
    """What the engine answers."""
    (answer,) = engine.generate([prompt], most, sampling=serve.Sampling(**how))
    return bytes(answer).decode("utf-8", "replace")


def test_models_are_listed(client: openai.OpenAI):
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "shardlib"
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.models.retrieve("../../etc/passwd")


def test_a_completion_is_what_the_engine_generates(client: openai.OpenAI, engine: serve.Engine):
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    assert found.choices[0].text == text_of(engine, BYTES, 24)
    assert found.choices[0].finish_reason == "length" and found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(BYTES), 24)
    assert found.usage.total_tokens == len(BYTES) + 24
    default = client.completions.create(model="tiny", prompt=BYTES, temperature=0)
    assert default.choices[0].text == text_of(engine, BYTES, 16)


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.7, "seed": 5}, {"temperature": 0.7, "seed": 5}),
    ({"seed": -1}, {"temperature": 1.0, "seed": 2**32 - 1}),
    ({"top_p": 0.5, "seed": 3}, {"temperature": 1.0, "top_p": 0.5, "seed": 3}),
    ({"extra_body": {"top_k": 3}, "seed": 3}, {"temperature": 1.0, "top_k": 3, "seed": 3}),
    ({"extra_body": {"min_p": 0.4}, "seed": 3}, {"temperature": 1.0, "min_p": 0.4, "seed": 3}),
    ({"frequency_penalty": 1.5, "temperature": 0}, {"frequency": 1.5}),
    ({"presence_penalty": 2.0, "temperature": 0}, {"presence": 2.0}),
    ({"extra_body": {"repetition_penalty": 1.7}, "temperature": 0}, {"repetition": 1.7}),
    ({"logit_bias": {"65": 100}, "temperature": 0}, {"bias": {65: 100.0}}),
]


@pytest.mark.parametrize(("asked", "how"), SETTINGS, ids=lambda value: "-".join(value))
def test_settings_are_those_of_the_engine(
    client: openai.OpenAI, engine: serve.Engine, asked: dict[str, Any], how: dict[str, Any]
):
    found = client.completions.create(model="tiny", prompt=BYTES, max_tokens=20, **asked)
    assert found.choices[0].text == text_of(engine, BYTES, 20, **how)


def test_top_p_of_nothing_takes_the_likeliest(client: openai.OpenAI, engine: serve.Engine):
    found = client.completions.create(model="tiny", prompt=BYTES, max_tokens=8, top_p=0)
    assert found.choices[0].text == text_of(engine, BYTES, 8)


def test_a_conversation_is_lines_where_there_is_no_template(
    client: openai.OpenAI, engine: serve.Engine
):
    lines = "system: Be short.\nuser: Hello, you.\nassistant:"
    found = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "Be short."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you."}],
            },
        ],
        temperature=0,
        max_completion_tokens=12,
    )
    message = found.choices[0].message
    assert (message.role, message.content) == (
        "assistant",
        text_of(engine, list(lines.encode()), 12),
    )
    assert found.usage is not None and found.usage.prompt_tokens == len(lines)


def test_a_conversation_may_fill_the_context(client: openai.OpenAI):
    found = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x" * 200}]
    )
    assert found.usage is not None and found.usage.total_tokens == 256
    assert found.choices[0].finish_reason == "length"


def test_streams_say_what_the_whole_answer_says(client: openai.OpenAI):
    how: dict[str, Any] = {"model": "tiny", "temperature": 0.9, "seed": 4, "max_tokens": 40}
    whole = client.completions.create(prompt=PROMPT, **how)
    events = list(
        client.completions.create(
            prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **how
        )
    )
    assert "".join(one.choices[0].text for one in events[:-1]) == whole.choices[0].text
    assert len(events) > 10 and len({one.id for one in events}) == 1
    assert [one.usage for one in events[:-1]] == [None] * (len(events) - 1)
    last, before = events[-1], events[-2]
    assert not last.choices and before.choices[0].finish_reason == "length"
    assert last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 40
    messages: Any = [{"role": "user", "content": "hello"}]
    talk = client.chat.completions.create(messages=messages, **how)
    said = list(client.chat.completions.create(messages=messages, stream=True, **how))
    assert said[0].choices[0].delta.role == "assistant"
    assert (
        "".join(one.choices[0].delta.content or "" for one in said)
        == talk.choices[0].message.content
    )
    assert said[-1].choices[0].finish_reason == "length" and all(one.choices for one in said)


def test_several_answers_and_several_prompts(client: openai.OpenAI, engine: serve.Engine):
    found = client.completions.create(
        model="tiny", prompt=[PROMPT, "b = "], n=2, seed=8, max_tokens=9
    )
    expected = [
        text_of(engine, list(prompt.encode()), 9, temperature=1.0, seed=seed)
        for prompt in (PROMPT, "b = ")
        for seed in (8, 9)
    ]
    assert [one.text for one in found.choices] == expected
    assert [one.index for one in found.choices] == [0, 1, 2, 3]
    pieces = [""] * 2
    for event in client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        n=2,
        seed=1,
        max_tokens=9,
        stream=True,
    ):
        pieces[event.choices[0].index] += event.choices[0].delta.content or ""
    prompt = list(b"user: a\nassistant:")
    assert pieces == [text_of(engine, prompt, 9, temperature=1.0, seed=seed) for seed in (1, 2)]


def test_prompts_that_begin_alike_are_cached_but_not_over_tokens(client: openai.OpenAI, url: str):
    prompt = "a prompt that nobody else asks " * 3

    def cached(by: openai.OpenAI) -> int | None:
        usage = by.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens

    assert cached(client) == 0
    assert cached(client) == 88  # 93 tokens in pages of 8, the last token computed anew
    with openai.OpenAI(base_url=f"{url}/v1", api_key="second-token-of-the-tests") as other:
        assert cached(other) == 0


def test_stop_strings_end_an_answer_wherever_tokens_end(
    client: openai.OpenAI, deployed: Deployment
):
    how: dict[str, Any] = {"model": "tiny", "prompt": BYTES, "temperature": 0.8, "seed": 7}
    whole = client.completions.create(max_tokens=60, **how).choices[0].text
    stop = whole[20:24]
    right = whole[: whole.index(stop)]
    for stops in (stop, ["never, ever", stop]):
        found = client.completions.create(max_tokens=60, stop=stops, **how)
        assert (found.choices[0].text, found.choices[0].finish_reason) == (right, "stop")
        events = client.completions.create(max_tokens=60, stop=stops, stream=True, **how)
        assert "".join(one.choices[0].text for one in events) == right
    byte = BYTES[0]
    ended = client.completions.create(
        model="tiny",
        prompt=BYTES,
        logit_bias={str(byte): 100},
        extra_body={"stop_token_ids": [byte]},
    )
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")


def test_min_tokens_hold_stop_strings_back(client: openai.OpenAI):
    """As vLLM does: a stop string that is whole within the first tokens ends nothing."""
    bias = {str(ord(one)): 100 for one in "abc"}
    how: dict[str, Any] = {"model": "tiny", "prompt": BYTES, "seed": 7, "logit_bias": bias}
    whole = client.completions.create(max_tokens=60, **how).choices[0].text
    stop = whole[10:12]
    assert set(whole) <= set("abc") and whole.count(stop) > 2
    for least in (0, whole.index(stop) + 1, whole.index(stop) + 2, 30):
        right = next(at for at in range(60) if whole.startswith(stop, at) and at + 2 > least)
        asked = {"max_tokens": 60, "stop": stop, "extra_body": {"min_tokens": least}, **how}
        found = client.completions.create(**asked).choices[0]
        assert (found.text, found.finish_reason) == (whole[:right], "stop")
        events = client.completions.create(stream=True, **asked)
        assert "".join(one.choices[0].text for one in events) == whole[:right]


def test_an_answer_that_is_late_is_a_beginning(client: openai.OpenAI):
    found = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=200, seed=2, extra_body={"seconds": 0.02}
    )
    assert found.choices[0].finish_reason == "length" and found.usage is not None
    assert found.usage.completion_tokens < 200
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=200, seed=2)
    assert whole.choices[0].text.startswith(found.choices[0].text.rstrip("\ufffd"))


def test_answers_have_the_form_that_is_asked_for(client: openai.OpenAI):
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "ok": {"type": "boolean"},
        },
        "required": ["age", "ok"],
        "additionalProperties": False,
    }
    messages: Any = [{"role": "user", "content": "How old?"}]
    found = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": schema, "strict": True},
        },
    )
    answer = json.loads(found.choices[0].message.content or "")
    assert 0 <= answer["age"] <= 99 and isinstance(answer["ok"], bool)
    assert found.choices[0].finish_reason == "stop"
    form = {"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}}
    dated = client.completions.create(model="tiny", prompt="a", max_tokens=30, extra_body=form)
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", dated.choices[0].text)
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    chosen = client.completions.create(model="tiny", prompt="a", n=3, extra_body=form)
    assert {one.text for one in chosen.choices} <= {"yes", "no"}


def test_logarithms_are_those_of_the_forward_pass(client: openai.OpenAI, engine: serve.Engine):
    found = client.completions.create(
        model="tiny", prompt=BYTES, max_tokens=6, logprobs=3, echo=True, temperature=0
    ).choices[0]
    (answer,) = engine.generate([BYTES], 6)
    tokens = BYTES + answer
    logits = _logits(engine, tokens)
    right = [float(logits[at, token]) for at, token in enumerate(tokens[1:])]
    listed = found.logprobs
    assert listed is not None and listed.token_logprobs is not None and listed.top_logprobs
    assert listed.token_logprobs[0] is None
    assert listed.token_logprobs[1:] == pytest.approx(right, abs=1e-4)
    assert found.text == bytes(tokens).decode("utf-8", "replace")
    top = listed.top_logprobs[len(BYTES)]
    assert max(top.values()) == pytest.approx(float(logits[len(BYTES) - 1].max()), abs=1e-4)
    assert listed.text_offset is not None and listed.text_offset[: len(BYTES)] == list(
        range(len(BYTES))
    )
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
        temperature=0,
    ).choices[0]
    prompt = list(b"user: a\nassistant:")
    (answer,) = engine.generate([prompt], 3)
    logits = _logits(engine, prompt + answer)
    assert chat.logprobs is not None and chat.logprobs.content is not None
    for at, one in enumerate(chat.logprobs.content):
        row = logits[len(prompt) - 1 + at]
        assert one.logprob == pytest.approx(float(row[answer[at]]), abs=1e-4)
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(
            np.sort(row)[::-1][:2].tolist(), abs=1e-4
        )
        assert one.bytes == [answer[at]]
        assert one.token == _name(answer[at]).removeprefix("bytes:")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 30, 256])
def test_a_prompt_alone_is_scored(
    client: openai.OpenAI, engine: serve.Engine, size: int, stream: bool
):
    """As lm-evaluation-harness asks: `echo` with `max_tokens=0`; a prompt may fill all the room."""
    prompt = np.random.default_rng(size).integers(0, 256, size).tolist()
    how: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 20}
    found: Any = client.completions.create(**how, stream=stream)
    if stream:
        events = list(found)
        listed, last = events[0].choices[0].logprobs, events[-1].choices[0]
    else:
        last = found.choices[0]
        listed = last.logprobs
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (size, 0)
        assert last.text == bytes(prompt).decode("utf-8", "replace")
    assert last.finish_reason == "length"
    rows = _logits(engine, prompt)[:-1]
    assert listed.token_logprobs[0] is None and listed.top_logprobs[0] is None
    right = [float(row[token]) for row, token in zip(rows, prompt[1:], strict=True)]
    assert listed.token_logprobs[1:] == pytest.approx(right, abs=1e-4)
    assert listed.tokens == [_name(one) for one in prompt]
    for top, row in zip(listed.top_logprobs[1:], rows, strict=True):
        likeliest = np.argsort(-row)[:20]
        assert top == pytest.approx({_name(one): float(row[one]) for one in likeliest}, abs=1e-4)


def test_tokens_that_are_written_alike_are_told_apart(folder: Deployment):
    likeliest = tuple((token, -1.0 - token) for token in (0, 1, 40))  # two special ones, and "F"
    told = serve.SampledToken(token=40, logprob=-41.0, likeliest=likeliest)
    one = written(folder.served.text, told, 0)
    top: Any = COMPLETION.listed([one])["top_logprobs"]
    assert top == [{"": -1.0, "token_id:1": -2.0, one.listed.text: -41.0}]


def _name(byte: int) -> str:
    """As OpenAI writes a token that is a byte."""
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"


def _logits(engine: serve.Engine, tokens: list[int]) -> np.ndarray:
    """Logarithms of probabilities by the forward pass without a cache, [seq, vocab]."""
    model = engine.forward.model
    logits = model.rebuild(*all_plain(engine.compute.weights))(np.asarray([tokens]))[0]
    return np.asarray(jax.nn.log_softmax(logits[..., :256], axis=-1))


def test_embeddings_are_means_of_hidden_states(client: openai.OpenAI, engine: serve.Engine):
    found = client.embeddings.create(model="tiny", input=["a text", "another text " * 12])
    plain = client.embeddings.create(model="tiny", input="a text", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(found.data[0].embedding)
    module = engine.forward.model.rebuild(*all_plain(engine.compute.weights))
    for text, one in zip(("a text", "another text " * 12), found.data, strict=True):
        mean = np.asarray(module.hidden(np.asarray([list(text.encode())]))[0]).mean(axis=0)
        assert one.embedding == pytest.approx((mean / np.linalg.norm(mean)).tolist(), abs=1e-5)
        assert math.hypot(*one.embedding) == pytest.approx(1)
    assert found.usage.prompt_tokens == 6 + 13 * 12


def test_nothing_is_compiled_after_the_start(client: openai.OpenAI, deployed: Deployment):
    from tests.conftest import compiled

    before, programs = len(compiled), deployed.worker.engine.compute.compiled
    for most, prompt in ((1, "a"), (30, "a" * 200), (200, "b" * 9)):
        client.completions.create(model="tiny", prompt=prompt, max_tokens=most, n=3, logprobs=2)
    client.embeddings.create(model="tiny", input=["c", "d" * 250])
    with_none = compiled[before:]
    jax.jit(lambda x: x * 3 + most)(1.0)
    assert len(compiled) > before, "compilations are seen"
    assert (with_none, deployed.worker.engine.compute.compiled) == ([], programs)
