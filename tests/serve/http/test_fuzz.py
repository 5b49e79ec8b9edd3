"""Right bodies with something wrong put in: every route answers, none with 5xx, none late."""

from __future__ import annotations

import copy
import json
import os
import time
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardlib.serve.hosting import Deployment
from tests.processes import until

#: Bodies; more by SHARDLIB_FUZZ.
EXAMPLES = int(os.environ.get("SHARDLIB_FUZZ", "60"))
#: Seconds in which every request is answered.
SECONDS = 30.0
CHOOSING: dict[str, Any] = {
    "model": "tiny-llama",
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "n": 2,
    "seed": 3,
    "stop": ["x"],
    "stop_token_ids": [7],
    "min_tokens": 1,
    "ignore_eos": True,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "stream": False,
    "stream_options": {"include_usage": True},
    "seconds": 5.0,
    "user": "me",
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "a", "echo": True, "logprobs": 2, "best_of": 2, **CHOOSING}),
    ("completions", {"prompt": [[5, 2], [7]], "structured_outputs": {"regex": "a+"}}),
    ("completions", {"prompt": ["a", "b"], "suffix": None, "max_tokens": 2, "stream": True}),
    (
        "chat/completions",
        {
            **CHOOSING,
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "c", "tool_call_id": "1"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "logprobs": True,
            "top_logprobs": 2,
            "max_completion_tokens": 3,
            "modalities": ["text"],
        },
    ),
    (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "max_tokens": 5,
            "stream": True,
        },
    ),
    (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True},
            },
            "max_tokens": 5,
        },
    ),
    ("embeddings", {"input": ["a", "b"], "encoding_format": "base64", "dimensions": None}),
    ("embeddings", {"input": [[1, 2], [3]], "model": "tiny-llama"}),
]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 2**31, 2**32, 2**63, 10**30, -(2**63)]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=12),
    st.sampled_from(["", "x" * 5000, "\x00", "{{ 1 / 0 }}", "<tool_call>", "</s>", "../x"]),
)
VALUES = st.recursive(
    ODD,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
) | st.sampled_from([[[[[[]]]]], {"a": {"a": {"a": {}}}}, [1] * 2000, {"$ref": "#"}])


def places(one: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a body."""
    inner = one.items() if isinstance(one, dict) else enumerate(one) if type(one) is list else ()
    return [path, *(found for key, value in inner for found in places(value, (*path, key)))]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route, and a body with one to three things changed in it."""
    route, body = draw(st.sampled_from(BODIES))
    whole: Any = {"body": copy.deepcopy(body)}
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(places(whole["body"], ("body",))))
        at = whole
        for key in path:
            at = at[key]
        how = draw(st.sampled_from(["put", "put", "drop", "more"]))
        if how == "drop" and path:
            del at[last]
        elif how == "more" and isinstance(at[last], dict):
            at[last][draw(st.text(max_size=8))] = copy.deepcopy(draw(VALUES))
        elif how == "more" and isinstance(at[last], list):
            at[last].append(copy.deepcopy(draw(VALUES)))
        else:
            at[last] = copy.deepcopy(draw(VALUES))
    text = json.dumps(whole["body"]).encode()
    cut = draw(st.integers(0, 20))
    return route, text[: len(text) - cut] if cut > 18 else text


@pytest.mark.long
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=bodies())
def test_no_body_fails_the_server(folder_url: str, asked: tuple[str, bytes]):
    route, body = asked
    begun = time.monotonic()
    found = httpx2.post(
        f"{folder_url}/v1/{route}",
        content=body,
        headers={"content-type": "application/json"},
        timeout=SECONDS,
    )
    assert time.monotonic() - begun < SECONDS
    assert found.status_code in (200, 400, 404), (found.status_code, found.text)
    if found.status_code != 200:
        error = found.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error", error
    else:
        assert "server_error" not in found.text and "unavailable" not in found.text
        if found.headers["content-type"].startswith("text/event-stream"):
            assert found.text.endswith("data: [DONE]\n\n") or '"error"' in found.text


@pytest.mark.long
@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]),
    path=st.sampled_from(
        ["", "health", "metrics", "figures", "openapi.json", "v1", "v1/models", "v1/nothing"]
    )
    | st.text(max_size=20).map("v1/models/{}".format)
    | st.sampled_from(["v1/completions", "v1/chat/completions", "v1/embeddings"]),
    kind=st.sampled_from(
        ["", "text/plain", "application/json", "multipart/form-data", "a/b;c=\xff"]
    ),
    query=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
def test_no_request_fails_the_server(
    folder_url: str, method: str, path: str, kind: str, query: dict[str, str]
):
    found = httpx2.request(
        method,
        f"{folder_url}/{quote(path)}",
        params=query,
        headers={"content-type": kind.encode("latin-1")} if kind else {},
        content=b"" if method in ("GET", "HEAD") else b"{}",
        timeout=SECONDS,
    )
    assert found.status_code < 500 and found.status_code != 422, (found.status_code, found.text)


@pytest.mark.long
def test_nothing_is_left_of_all_that(folder_url: str, folder: Deployment):
    until(lambda: not folder.worker.taken)
    pool = folder.worker.engine.schedule.pool
    assert (folder.worker.taken, pool.available) == (0, pool.pages)
    assert httpx2.get(f"{folder_url}/health").json()["status"] == "ok"
