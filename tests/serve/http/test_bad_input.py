"""Whatever is sent: an answer of 4xx that says why, and the server serves on."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from shardlib.serve.hosting import Deployment, spell
from shardlib.serve.http.bodies import Chat, asked_of
from shardlib.serve.http.settings import Fault, NamedModel
from tests.processes import until
from tests.serve.http.conftest import TOKENS

HEAD = {"Authorization": f"Bearer {TOKENS[0]}"}
FORM = {"type": "json_schema"}
CHAT = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def ask(url: str):
    """Posts a body, and gives status, error and answer."""
    with httpx2.Client(base_url=f"{url}/v1", headers=HEAD, timeout=60) as client:

        def post(path: str, body: Any = None, **how: Any) -> tuple[int, str]:
            given = how if body is None else {"json": body, **how}
            found = client.post(path, **given)
            error = found.json().get("error") if found.status_code != 200 else None
            if error is not None:
                assert set(error) == {"message", "type", "param", "code"}, error
            return found.status_code, found.text if error is None else error["message"]

        yield post


#: What is wrong in a body that is right but for that, by path, and what is said of it.
USUAL: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "a"},
    "chat/completions": {"messages": CHAT},
    "embeddings": {"input": "a"},
}
CHANGED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "completions": [
        ({"seconds": 0}, "seconds"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0, which needs echo"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens is '3'; it is a whole number"),
        ({"max_tokens": 10**40}, "and 1" + "0" * 40),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"top_p": 1.1}, "top_p is 1.1; it is at most 1"),
        ({"top_k": -2}, "top_k"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias is by tokens"),
        ({"logit_bias": {"256": 1}}, "logit_bias has the token 256; tokens of tiny are"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"n": 0}, "n is 0; it is at least 1"),
        ({"n": 7}, "7 answers are asked for; 6 are the most"),
        ({"best_of": 3}, "best_of is not served here"),
        ({"suffix": "b"}, "suffix is not served here"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["a"] * 17}, "stop has 17 items; it has at most 16"),
        ({"stop": [""]}, "stop.0 has 0 characters; it has at least 1"),
        ({"stop": "a" * 300}, "stop has 300 characters; it has at most"),
        ({"stop": ["a", 1]}, "stop.1 is 1; it is a text"),
        ({"stop": 5}, "stop is 5; it is a text or a list"),
        ({"stop_token_ids": [999]}, "stop_token_ids has the token 999; tokens of"),
        ({"seed": 2**63}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"min_tokens": 99, "max_tokens": 2}, "min_tokens is 99; it is at most max_tokens, 2"),
        ({"min_tokens": 17}, "it is at most max_tokens, 16 by default"),
        (
            {"logit_bias": {str(one): 1 for one in range(301)}},
            "logit_bias has 301 tokens; 300 may have one",
        ),
        (
            {"min_tokens": 1, "structured_outputs": {"regex": "a"}},
            "min_tokens is not for answers that have a form",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "form of the answer"),
        ({"structured_outputs": {"choice": []}}, "a choice is"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "an answer has one form"),
    ],
    "chat/completions": [
        (
            {"min_tokens": 9, "max_completion_tokens": 8},
            "min_tokens is 9; it is at most max_completion_tokens, 8",
        ),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools is not served here: tiny has no template of conversations that writes them",
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type is 'xml'; it is 'text', 'json_object' or 'json_schema'",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format has no json_schema"),
        (
            {"response_format": FORM | {"json_schema": {"schema": {"type": "car"}}}},
            "the form of the answer is not usable",
        ),
    ],
    "embeddings": [
        ({"dimensions": 3}, "embeddings of tiny have 16 dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {}, "prompt is missing"),
    ("completions", {"prompt": None}, "prompt"),
    ("completions", {"prompt": 3}, "prompt"),
    ("completions", {"prompt": ""}, "prompt is empty"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": ["a", 3]}, "prompt: item 1 is a number, and item 0 a text; it is a"),
    ("completions", {"prompt": [[1], "a"]}, "prompt: item 1 is a text, and item 0 a list; it is"),
    ("completions", {"prompt": [1, "a"]}, "prompt: item 1 is a text; tokens are whole numbers"),
    ("completions", {"prompt": [[1], [2.5]]}, "prompt: item 1.0 is 2.5; tokens are whole numbers"),
    ("completions", {"prompt": ["a"] * 257}, "prompt: there are 257 of them; 256 are the most"),
    ("completions", {"prompt": {"a": 1}}, "prompt: it is an object; it is a text, tokens, a list"),
    ("completions", {"prompt": [True]}, "prompt: item 0 is a boolean; it is a text, tokens"),
    ("completions", {"prompt": [256]}, "prompt has the token 256; tokens of tiny are below 256"),
    ("completions", {"prompt": [-1]}, "prompt"),
    ("completions", {"prompt": [[1], []]}, "prompt"),
    ("completions", {"prompt": [10**30]}, "prompt has the token"),
    (
        "completions",
        {"prompt": "a" * 200, "max_tokens": 57},
        "256 tokens at most; the prompt has 200, and 57 of",
    ),
    ("completions", {"prompt": "a" * 256}, "the prompt has 256, and 16 of an answer"),
    ("completions", {"prompt": ["a"] * 4, "n": 2}, "8 answers are asked for; 6 are the most"),
    ("chat/completions", {}, "messages is missing"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": ["a"]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, "messages"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "part that is not text",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a" * 300}]},
        "the prompt has 317, and 1 of",
    ),
    ("embeddings", {"input": ""}, "input is empty"),
    ("embeddings", {"input": "a" * 257}, "256 tokens at most; a text has 257"),
    ("embeddings", {"input": [[1, 400]]}, "input has the token 400"),
    *((path, USUAL[path] | body, said) for path, rows in CHANGED.items() for body, said in rows),
]


@pytest.mark.parametrize(("path", "body", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_said(ask: Any, path: str, body: dict[str, Any], said: str):
    status, message = ask(path, body)
    assert (status, said in message) == (400, True), message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{nope",
        b"[]",
        b"null",
        b'"a"',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'\xff\xfe{"prompt": 1}',
        b'{"prompt": ' + b"[" * 50_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_body_is_refused(ask: Any, content: bytes):
    status, message = ask(
        "completions", content=content, headers={"content-type": "application/json"}
    )
    assert status == 400 and message, message


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("completions", r'{"prompt": "a\ud800"}', "prompt has half of a surrogate pair"),
        ("completions", r'{"prompt": ["a", "\udc00b"]}', "prompt.1 has half of a surrogate pair"),
        ("completions", r'{"prompt": "a", "stop": "\ud800"}', "stop has half of"),
        ("completions", r'{"prompt": "a", "model": "\ud800"}', "model has half of"),
        (
            "chat/completions",
            r'{"messages": [{"role": "user", "content": "\ud800"}]}',
            "messages.0.content has half of a surrogate pair, which is not a character",
        ),
        ("embeddings", r'{"input": "\ud800"}', "input has half of"),
        ("embeddings", r'{"input": "a", "user": {"\ud800": 1}}', "user has half of"),
    ],
)
def test_half_a_surrogate_pair_is_no_character(ask: Any, path: str, body: str, said: str):
    status, message = ask(path, content=body, headers={"content-type": "application/json"})
    assert (status, said in message) == (400, True), message
    whole = r'{"prompt": "a\ud83d\ude00", "max_tokens": 1, "echo": true}'
    head = {"content-type": "application/json"}
    status, text = ask("completions", content=whole, headers=head)
    assert (status, json.loads(text)["choices"][0]["text"][:2]) == (200, "a\U0001f600")


def test_a_form_without_its_package_says_so(deployed: Deployment, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardlib.serve.hosting.find_spec", lambda _: None)
    bare = replace(deployed, formless=spell(deployed.worker.engine, deployed.served.text))
    for name, field in (
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a"}),
    ):
        body = Chat.model_validate({"messages": CHAT, name: field})
        with pytest.raises(Fault, match=rf"{name} is not served here.*package llguidance") as found:
            asked_of(body, [[1]], NamedModel(name="tiny", deployed=bare), salt="")
        assert (found.value.status_code, found.value.param) == (400, name)


def test_fields_that_nobody_knows_are_ignored(ask: Any):
    more = {
        "nonsense": {"a": [1]},
        "user": "me",
        "store": True,
        "metadata": {},
        "service_tier": "auto",
    }
    assert ask("completions", {"prompt": "a", "max_tokens": 1, **more})[0] == 200
    assert ask("chat/completions", {"messages": CHAT, "max_tokens": 1, **more})[0] == 200


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"Authorization": "Bearer no"},
        {"Authorization": TOKENS[0]},
        {"Authorization": "Bearer " + TOKENS[0][:-1]},
    ],
)
def test_who_has_no_token_learns_nothing(url: str, head: dict[str, str]):
    for method, path in (("GET", "models"), ("POST", "completions"), ("GET", "nothing")):
        found = httpx2.request(method, f"{url}/v1/{path}", headers=head)
        assert found.status_code == 401 and found.json()["error"]["code"] == "invalid_api_key"
    assert httpx2.get(f"{url}/openapi.json", headers=head).status_code == 401
    assert httpx2.get(f"{url}/openapi.json", headers=HEAD).status_code == 200
    assert httpx2.get(f"{url}/health").status_code == 200


def test_a_model_is_a_key_and_never_a_path(ask: Any):
    for name in ("../tiny", "/etc/passwd", "tiny/", "other", "\0"):
        status, message = ask("completions", {"prompt": "a", "model": name})
        assert status == 404 and "there is no model" in message
    assert ask("completions", {"prompt": "a", "model": "tiny", "max_tokens": 1})[0] == 200


def test_large_bodies_are_not_read(url: str, ask: Any):
    assert ask("completions", content=b"x" * (2 << 20))[0] == 413

    def chunks():
        for _ in range(64):
            yield b"x" * (1 << 15)

    assert ask("completions", content=chunks())[0] == 413


def raw(url: str, text: bytes, *, slowly: bytes = b"", seconds: float = 60.0) -> bytes:
    """What the server says to some bytes, followed slowly by others, until it closes."""
    where = urlsplit(url)
    assert where.hostname and where.port
    found, end = b"", time.monotonic() + seconds
    with socket.create_connection((where.hostname, where.port), timeout=0.2) as one:
        one.sendall(text)
        while time.monotonic() < end:
            try:
                if slowly:
                    one.sendall(slowly)
                if not (piece := one.recv(1 << 16)):
                    break
                found += piece
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("the server keeps the connection")
    return found


@pytest.mark.long
def test_floods_and_drips_are_cut_off(url: str):
    start = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
    assert raw(
        url, start + b"".join(b"x%d: %s\r\n" % (n, b"y" * 99) for n in range(2000))
    ).startswith(b"HTTP/1.1 400")
    assert raw(url, start, slowly=b"x-a: b\r\n") == b""
    authorized = (
        start + f"Authorization: Bearer {TOKENS[0]}\r\nContent-Type: application/json\r\n".encode()
    )
    assert raw(url, authorized + b"Content-Length: 500\r\n\r\n{", slowly=b" ").startswith(
        b"HTTP/1.1 408"
    )
    assert raw(url, authorized + b"Content-Length: -5\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert httpx2.get(f"{url}/health").json()["status"] == "ok"


def test_nothing_is_left_of_all_that(url: str, deployed: Deployment):
    until(lambda: not deployed.worker.taken)
    pool = deployed.worker.engine.schedule.pool
    assert (deployed.worker.taken, pool.available) == (0, pool.pages)
    assert httpx2.get(f"{url}/health").json() == {"status": "ok", "models": {"tiny": ""}}
