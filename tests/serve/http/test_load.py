"""Too many requests, clients that go, that do not read, an engine that fails, other weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import jax
import openai
import pytest

from shardlib import serve as serving
from shardlib.annotation.model import read
from shardlib.errors import ArgumentError
from shardlib.serve.hosting import Deployment, Stream, StreamError, StreamEvent, deploy
from shardlib.serve.http.app import application
from shardlib.serve.http.app import serving as serve
from shardlib.serve.http.settings import Settings
from shardlib.serve.requests import GenerationRequest, Request, SampledToken
from tests.processes import until
from tests.serve.http.conftest import CAPACITY, TOKENS

HEAD = {"Authorization": f"Bearer {TOKENS[0]}"}


@contextlib.contextmanager
def held(deployed: Deployment) -> Iterator[None]:
    """No step is computed until the end of the block."""
    inside, go = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        go.wait(60)

    done = deployed.worker.call(wait)
    assert inside.wait(60)
    try:
        yield
    finally:
        go.set()
        done.result(60)


def idle(deployed: Deployment) -> bool:
    """Whether no place, slot and page is in use."""
    schedule = deployed.worker.engine.schedule
    busy = deployed.worker.taken or schedule.running or schedule.waiting
    return not busy and schedule.pool.available == schedule.pool.pages


def opened(stack: contextlib.ExitStack, url: str, **body: Any) -> httpx2.Response:
    """A stream that has begun."""
    client = stack.enter_context(httpx2.Client(timeout=60, headers=HEAD))
    given = {"prompt": "a stream", "max_tokens": 200, "stream": True, **body}
    return stack.enter_context(client.stream("POST", f"{url}/v1/completions", json=given))


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """What a stream says; the mark of its end is None."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) if line != "data: [DONE]" else {"done": True} for line in lines]


def test_one_more_than_there_are_places_is_told_to_come_back(url: str, deployed: Deployment):
    with held(deployed), contextlib.ExitStack() as stack:
        for _ in range(8):
            assert opened(stack, url).status_code == 200
        # What is not a prompt at all is not even looked at: places come before tokens.
        for body in ({"prompt": "a"}, {"prompt": [999]}):
            late = httpx2.post(f"{url}/v1/completions", json=body, headers=HEAD)
            assert late.status_code == 429 and 1 <= int(late.headers["retry-after"]) <= 60
            assert late.json()["error"]["code"] == "server_busy"
        assert httpx2.get(f"{url}/health").status_code == 200
    until(lambda: idle(deployed))


def test_clients_that_go_give_back_what_they_had(url: str, deployed: Deployment):
    with held(deployed):
        with contextlib.ExitStack() as stack:  # none of these has been seen by the engine
            for _ in range(8):
                opened(stack, url)
        until(lambda: deployed.worker.taken == 0)
        with contextlib.suppress(httpx2.TimeoutException):  # nor has one that waits for the whole
            httpx2.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=HEAD, timeout=0.3)
        until(lambda: deployed.worker.taken == 0)
    until(lambda: idle(deployed))
    with contextlib.ExitStack() as stack:
        streams = [opened(stack, url, n=2) for _ in range(4)]
        for one in streams:
            assert next(one.iter_lines()).startswith("data: ")
    until(lambda: idle(deployed))


def test_an_engine_that_hangs_is_not_well(
    url: str, deployed: Deployment, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shardlib.serve.hosting.HUNG_SECONDS", 0.05)
    with held(deployed):
        time.sleep(0.1)
        health = httpx2.get(f"{url}/health")
        assert health.status_code == 503 and "more than 0.05 seconds" in health.text
    until(lambda: httpx2.get(f"{url}/health").status_code == 200)


@pytest.mark.long
def test_a_request_that_all_pages_cannot_hold_is_refused(card: Path):
    capacity = serving.Capacity(longest=64, slots=1, page=8, pages=3)
    small = deploy(serving.named(str(card)), capacity, name="small")
    with serve(application([small])) as url:
        body = {"prompt": "a" * 10, "max_tokens": 15}
        found = httpx2.post(f"{url}/v1/completions", json=body)
        assert found.status_code == 400
        assert "small looks at 24 tokens at most; the prompt has 10, and 15" in found.text
        body["max_tokens"] = 14
        found = httpx2.post(f"{url}/v1/completions", json=body).json()
        assert found["usage"]["total_tokens"] == 24


def test_others_do_not_notice(client: openai.OpenAI, url: str, deployed: Deployment):
    how: dict[str, Any] = {
        "model": "tiny",
        "prompt": "the one that stays",
        "max_tokens": 60,
        "temperature": 0,
    }
    alone = client.completions.create(**how).choices[0].text
    with contextlib.ExitStack() as others:
        begun = [opened(others, url) for _ in range(5)]
        assert len(begun) == 5
        beside = client.completions.create(stream=True, **how)
        first = next(beside).choices[0].text
        others.close()
        assert first + "".join(one.choices[0].text for one in beside) == alone
    until(lambda: idle(deployed))


def heard(token: int, ended: str | None = None) -> StreamEvent:
    told = SampledToken(token=token, logprob=0.0)
    return StreamEvent(
        index=0, token=token, told=told, scores=(), ended=ended, reused=0, version="", at=0.0
    )


def test_a_stream_that_nobody_reads_is_given_up():
    async def run() -> tuple[list[int | None], bool]:
        stream = Stream([GenerationRequest(prompt=(1,))], buffer=3)
        stream.requests.append(Request(number=0, asked=stream.asked[0]))
        for token in range(5):
            stream.take(heard(token))
        found = [(await stream.next()).token for _ in range(3)]
        with pytest.raises(StreamError, match="3 tokens wait, and nobody reads them"):
            await stream.next()
        return found, stream.requests[0].cancelled

    assert asyncio.run(run()) == ([0, 1, 2], True)


@pytest.fixture(scope="module")
def others(card: Path) -> tuple[serving.Served, Any]:
    """A model that may have other weights, once they are asked for, and these."""
    served = serving.named(str(card))
    fresh = jax.jit(read(served.init).init)(5)
    asked: list[str] = []

    def newer(version: str) -> tuple[Any, str] | None:
        if not asked or version == "step 2":
            return None
        return fresh, "step 2"

    return replace(served, name="other", version="step 1", newer=newer), (fresh, asked)


@pytest.fixture(scope="module")
def second(others: tuple[serving.Served, Any]) -> Iterator[tuple[str, Deployment]]:
    """A server of short patience."""
    limits = Settings(send_seconds=0.5, refresh_seconds=0.1)
    made = deploy(others[0], CAPACITY, waiting=0, buffer=128)
    with serve(application([made], limits), limits) as url:
        yield url, made


def test_who_does_not_read_is_cut_off(second: tuple[str, Deployment]):
    url, deployed = second
    where, steps = urlsplit(url), deployed.worker.engine.steps
    body = json.dumps(
        {"prompt": "a", "max_tokens": 250, "n": 4, "logprobs": 20, "stream": True}
    ).encode()
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect((where.hostname, where.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        one.sendall(head.encode() + body)
        until(lambda: deployed.worker.taken == 4)
        assert until(lambda: idle(deployed)), "the slots of who does not read"
        assert deployed.worker.engine.steps - steps < 250
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := one.recv(1 << 16):
                found += piece
    assert b"data: {" in found and b"[DONE]" not in found
    assert (
        httpx2.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code
        == 200
    )


@pytest.mark.long
def test_newer_weights_are_served_without_a_dropped_request(
    second: tuple[str, Deployment], others: tuple[serving.Served, Any], engine: serving.Engine
):
    url, deployed = second
    served, (fresh, asked) = others
    prompt = "a prompt of some pages, to be answered"
    tokens = list(prompt.encode())
    (old,) = engine.generate([tokens], 150)
    (new,) = replace(served, weights=fresh).engine(engine.capacity).generate([tokens], 40)
    assert old[:40] != new
    given: dict[str, Any] = {"prompt": prompt, "temperature": 0}

    def answer(most: int) -> dict[str, Any]:
        return httpx2.post(
            f"{url}/v1/completions", json=given | {"max_tokens": most}, timeout=60
        ).json()

    assert answer(9)["system_fingerprint"] == "step 1"
    with contextlib.ExitStack() as stack:
        with held(deployed):
            begun = opened(stack, url, **given, max_tokens=150)
        asked.append("now")
        found: list[dict[str, Any]] = []
        while not found or found[-1]["system_fingerprint"] == "step 1":
            found.append(answer(40))
        said = events(begun)
    text = "".join(one["choices"][0]["text"] for one in said[:-1])
    assert text == bytes(old).decode("utf-8", "replace") and said[-1] == {"done": True}
    assert {one["system_fingerprint"] for one in said[:-1]} == {"step 1"}
    last = found[-1]
    assert last["system_fingerprint"] == "step 2"
    assert last["choices"][0]["text"] == bytes(new).decode("utf-8", "replace")
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "pages of the old weights"
    for one in found[:-1]:
        assert one["choices"][0]["text"] == bytes(old[:40]).decode("utf-8", "replace")


def figures_of(url: str) -> dict[str, float]:
    """What the server counts, by name."""
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.replace('{model="other"', "{").replace("{,", "{"): float(n) for name, n in pairs}


def test_figures_count_what_was_done(second: tuple[str, Deployment]):
    url, deployed = second
    before = figures_of(url)
    for _ in range(2):
        body = {"prompt": "a prompt of three pages and more", "max_tokens": 9}
        assert httpx2.post(f"{url}/v1/completions", json=body).status_code == 200
    with contextlib.ExitStack() as stack:
        lines = opened(stack, url).iter_lines()
        assert next(lines).startswith("data: ")
    until(lambda: idle(deployed))

    def more(name: str) -> float:
        return figures_of(url)[f"shardlib_{name}"] - before.get(f"shardlib_{name}", 0)

    until(lambda: more('requests_ended_total{reason="cancelled"}') == 1)
    assert more('requests_ended_total{reason="length"}') == 2
    assert more("time_to_first_token_seconds_count{}") == 3
    assert 2 * 9 < more("generated_tokens_total{}") < 2 * 9 + 200
    assert more("cached_prompt_tokens_total{}") >= 24  # of the second, 32 tokens in pages of 8
    assert more("prompt_tokens_sum{}") == 2 * 32 + len("a stream")
    now = figures_of(url)
    assert now["shardlib_engine_running{}"] == 0 and now["shardlib_engine_slots{}"] == 4
    page, found = httpx2.get(url).text, httpx2.get(f"{url}/figures").json()
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page, "the page loads nothing of others"
    (model,) = found["models"]
    assert model["name"] == "other" and "RANDOM" in model["warning"] and model["history"]


def test_an_engine_that_fails_says_so_to_all(card: Path, monkeypatch: pytest.MonkeyPatch):
    deployed = deploy(serving.named(str(card)), CAPACITY, name="other")

    def broken(*_: Any) -> None:
        raise RuntimeError("no such device")

    with serve(application([deployed])) as url:
        with contextlib.ExitStack() as stack:
            with held(deployed):
                streams = [opened(stack, url) for _ in range(3)]
                monkeypatch.setattr(deployed.worker.engine, "step", broken)
            for one in streams:
                (error,) = events(one)
                assert "no such device" in error["error"]["message"]
        health = httpx2.get(f"{url}/health")
        assert health.status_code == 503 and "no such device" in health.json()["models"]["other"]
        for path, body in (("completions", {"prompt": "a"}), ("embeddings", {"input": "a"})):
            assert httpx2.post(f"{url}/v1/{path}", json=body).status_code == 503
        made = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with made, pytest.raises(openai.InternalServerError, match="no such device"):
            made.completions.create(model="other", prompt="a", stream=True)


def test_two_models_of_one_name_are_refused(deployed: Deployment):
    with pytest.raises(
        ArgumentError, match="the models are tiny, tiny; each has a name of its own"
    ):
        application([deployed, deployed])
