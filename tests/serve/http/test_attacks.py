"""Requests that are meant to end the server, or to keep others out of it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from fastapi import FastAPI

from benchmarks import hostile_forms
from shardlib.serve.http.app import serving as serve
from shardlib.serve.http.settings import Guard, Settings
from tests.serve.http.conftest import TOKENS

HEAD = {"Authorization": f"Bearer {TOKENS[0]}"}
FEW = Settings(tokens=TOKENS, connections=2, strangers=20, strangers_per_address=8)


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[str, int]]:
    """A server of few connections without a model."""
    app = FastAPI()
    app.get("/v1/models")(lambda: {"object": "list"})
    app.add_middleware(Guard, settings=FEW)
    with serve(app, FEW) as url:
        where = urlsplit(url)
        assert where.hostname is not None and where.port is not None
        yield where.hostname, where.port


def connected(
    stack: contextlib.ExitStack, where: tuple[str, int], count: int, source: str = "127.0.0.1"
) -> list[socket.socket]:
    """Connections from an address of this machine."""
    return [
        stack.enter_context(socket.create_connection(where, 5.0, source_address=(source, 0)))
        for _ in range(count)
    ]


def is_ended(one: socket.socket) -> bool:
    one.settimeout(0.2)
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def answer(one: socket.socket, head: str = f"Authorization: Bearer {TOKENS[0]}\r\n") -> bytes:
    """What is said to a request on a connection."""
    one.settimeout(5.0)
    one.sendall(f"GET /v1/models HTTP/1.1\r\nHost: a\r\n{head}\r\n".encode())
    return one.recv(1 << 16)


def test_connections_without_a_token_leave_room_for_others(small: tuple[str, int]):
    with contextlib.ExitStack() as stack:
        (first,) = connected(stack, small, 1, "127.0.0.9")
        assert answer(first).startswith(b"HTTP/1.1 200")
        many = connected(stack, small, 40)
        assert all(map(is_ended, many[:32])), "an address has 8 places"
        others = [one for n in (2, 3) for one in connected(stack, small, 8, f"127.0.0.{n}")]
        (second,) = connected(stack, small, 1, "127.0.0.8")
        assert answer(second).startswith(b"HTTP/1.1 200")
        assert answer(first).startswith(b"HTTP/1.1 200")
        gone = sum(map(is_ended, [*many[32:], *others]))
        assert gone == 8 + 16 + 1 - 20, "all strangers together have 20 places"


def test_too_many_connections_with_a_token_are_told_in_the_form_of_the_interface(
    small: tuple[str, int],
):
    with contextlib.ExitStack() as stack:
        first, second, third = connected(stack, small, 3, "127.0.0.7")
        until = time.monotonic() + 60
        while not answer(first).startswith(b"HTTP/1.1 200"):  # those of the test before may be open
            assert time.monotonic() < until
            (first,) = connected(stack, small, 1, "127.0.0.7")
        while not answer(second).startswith(b"HTTP/1.1 200"):
            assert time.monotonic() < until
            (second,) = connected(stack, small, 1, "127.0.0.7")
        said = answer(third)
        assert said.startswith(b"HTTP/1.1 503") and b"retry-after: 5" in said.lower()
        assert b'"type":"service_unavailable"' in said and b'"code":"server_busy"' in said
        assert is_ended(third)
        first.close()
        while True:
            (third,) = connected(stack, small, 1, "127.0.0.7")
            if (said := answer(third)).startswith(b"HTTP/1.1 200"):
                break
            assert time.monotonic() < until, said


def test_a_request_of_two_lengths_ends_its_connection(small: tuple[str, int]):
    with contextlib.ExitStack() as stack:
        (one,) = connected(stack, small, 1, "127.0.0.6")
        one.sendall(
            f"POST /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKENS[0]}\r\n"
            "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            "GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n".encode()
        )
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := one.recv(1 << 16):
                said += piece
        assert said.startswith(b"HTTP/1.1 400") and said.count(b"HTTP/1.1") == 1
        assert b"both content-length and transfer-encoding" in said


DEFINITIONS = {
    f"a{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}}}
    for n in range(1000)
}
RULES = "\n".join(f'r{n}: r{n + 1} | "x"' for n in range(5000))
TOO_MUCH = "it takes too long or too much memory: more than 2 s of computation, 256 MiB"


def asked(url: str, form: dict[str, Any]) -> httpx2.Response:
    body = {"prompt": "a", "max_tokens": 3, "structured_outputs": form}
    return httpx2.post(f"{url}/v1/completions", json=body, headers=HEAD, timeout=60)


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "says"),
    [
        (
            {"json": {"$ref": "#/$defs/a0", "$defs": DEFINITIONS | {"a1000": {"type": "null"}}}},
            TOO_MUCH,
        ),
        ({"grammar": f'start: r0\n{RULES}\nr5000: "y"'}, TOO_MUCH),
        ({"regex": "(" * 200 + "a|b" + ")*" * 200}, ""),
        ({"choice": ["a" * 50_000, "a" * 49_999 + "b"]}, ""),
    ],
    ids=["definitions", "rules", "groups", "texts"],
)
def test_forms_that_overflow_their_compiler_leave_the_server(
    url: str, form: dict[str, Any], says: str
):
    pytest.importorskip("llguidance")
    found = asked(url, form)
    assert found.status_code == 400 if says else found.status_code in (200, 400)
    assert says in found.text
    assert asked(url, {"json": {"enum": [12]}}).json()["choices"][0]["text"] == "12"
    assert httpx2.get(f"{url}/health").json()["status"] == "ok"


def test_a_schema_of_any_depth_is_refused(url: str):
    pytest.importorskip("llguidance")
    for depth in (400, 940, 951, 953, 960, 5000):
        nested = '{"a":' * depth + "1" + "}" * depth
        body = f'{{"prompt":"a","max_tokens":1,"structured_outputs":{{"json":{nested}}}}}'
        found = httpx2.post(
            f"{url}/v1/completions",
            content=body.encode(),
            headers={**HEAD, "content-type": "application/json"},
            timeout=60,
        )
        assert found.status_code == 400, (depth, found.text)


@pytest.mark.long
def test_hostile_forms_of_every_kind_leave_others_their_answers(url: str):
    """A short run of `benchmarks/hostile_forms.py`, which measures how long the others wait."""
    pytest.importorskip("llguidance")
    found = hostile_forms.run(url, 12, 4.0, settle=0.1, most_seconds=60.0, head=HEAD, seed=1)
    assert found["forms"] and found["health"] == "ok"
    assert set(found["statuses"]) <= {"200", "400", "429"}, found
    assert found["requests"]["hostile"] and found["requests"]["quiet"]
