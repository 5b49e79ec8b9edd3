"""A server under twice its load, with clients that go and clients that hardly read.

    python -m benchmarks serving_soak

A process of `shardlib serve demo` has 8 slots and 8 places to wait. 32 clients ask 1,000 times in
all; who is refused comes back when the server says. In every other run all are alike; in the others
one in ten goes amid its answer, or before it, and one in ten reads 512 bytes every 20 ms through a
small socket. After each run no request, place or page may be in use. Times are of the others, from
the request that was let in to the first token and to the end; ratios are of neighbours in time.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np

from benchmarks.environment import command_line, serving, write

REQUESTS, CLIENTS, SLOTS, WAITING = 1000, 32, 8, 8
#: Shares of those that go, and of those that hardly read.
GONE, SLOW = 0.1, 0.1


@dataclass
class Seen:
    """What one run saw."""

    times: list[tuple[float, float]] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def metric(url: str, name: str) -> float:
    """A figure of the server."""
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}{{")).rsplit(" ", 1)[1])


def resident(pid: int) -> int:
    """Bytes of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) << 10


def body(number: int) -> dict[str, Any]:
    """A request; the same ones in every run."""
    draw = random.Random(number)
    prompt = [draw.randrange(32, 127) for _ in range(draw.randrange(8, 80))]
    return {"prompt": prompt, "max_tokens": draw.randrange(10, 120), "seed": number, "stream": True}


async def usual(client: httpx2.AsyncClient, url: str, number: int, seen: Seen) -> None:
    """Asks until it is let in, and reads the answer."""
    asked = body(number)
    while True:
        begun, first, tokens = time.perf_counter(), 0.0, 0
        async with client.stream(
            "POST", f"{url}/v1/completions", json=asked | {"logprobs": 0}
        ) as answer:
            seen.statuses[answer.status_code] += 1
            if answer.status_code == 429:
                await answer.aread()
                wait = float(answer.headers["retry-after"])
            else:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        first = first or time.perf_counter()
                        if "error" in event:
                            seen.wrong.append(line)
                        else:
                            tokens += len(event["choices"][0]["logprobs"]["tokens"])
                if tokens != asked["max_tokens"]:
                    seen.wrong.append(f"{tokens} tokens of {asked['max_tokens']}")
                seen.times.append((first - begun, time.perf_counter() - begun))
                return
        await asyncio.sleep(wait)


async def gone(client: httpx2.AsyncClient, url: str, number: int, seen: Seen) -> None:
    """Asks once, and goes before the answer is whole."""
    draw = random.Random(-number)
    try:
        async with asyncio.timeout(draw.choice([0.001, 0.02, 0.1, 5])):
            async with client.stream("POST", f"{url}/v1/completions", json=body(number)) as answer:
                seen.statuses[answer.status_code] += 1
                left = draw.randrange(1, 10)
                async for line in answer.aiter_lines():
                    left -= line.startswith("data: {")
                    if not left:
                        break
    except (TimeoutError, httpx2.HTTPError):
        pass


async def slow(url: str, number: int, seen: Seen) -> None:
    """Asks until it is let in, and reads hardly anything at a time."""
    where, text = urlsplit(url), json.dumps(body(number)).encode()
    while True:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.setblocking(False)
        await asyncio.get_running_loop().sock_connect(one, (where.hostname, where.port))
        reader, writer = await asyncio.open_connection(sock=one, limit=1024)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write(head.encode() + text)
        found = b""
        while piece := await reader.read(512):
            found += piece
            await asyncio.sleep(0.02)
        writer.close()
        status = int(found.split(b" ", 2)[1])
        seen.statuses[status] += 1
        if status != 429:
            if b"[DONE]" not in found:
                seen.wrong.append("a slow answer that was cut off")
            return
        await asyncio.sleep(1)


async def run(url: str, requests: int, *, alike: bool) -> Seen:
    """One run."""
    seen, numbers = Seen(), iter(range(requests))
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(limits=limits, timeout=120) as client:

        async def one_client() -> None:
            for number in numbers:
                kind = random.Random(f"kind {number}").random()
                if alike or kind >= GONE + SLOW:
                    await usual(client, url, number, seen)
                elif kind < GONE:
                    await gone(client, url, number, seen)
                else:
                    await slow(url, number, seen)

        await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
    return seen


def settled(url: str) -> dict[str, float]:
    """Figures when everybody is gone."""
    names = ("running", "waiting", "open", "used")
    for _ in range(100):
        found = {name: metric(url, f"shardlib_engine_{name}") for name in names}
        if not any(found.values()):
            break
        time.sleep(0.1)
    return found


def told(seen: Seen, seconds: float) -> dict[str, Any]:
    """A run as plain data."""
    firsts, wholes = zip(*seen.times, strict=True)
    return {
        "seconds": seconds,
        "answered": len(seen.times),
        "statuses": {str(status): count for status, count in sorted(seen.statuses.items())},
        "wrong": seen.wrong[:5],
        "ttft_p50_p99": np.percentile(firsts, (50, 99)).tolist(),
        "request_p50_p99": np.percentile(wholes, (50, 99)).tolist(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "serving_soak_jax-*.json")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args(arguments)
    with serving("demo", "--slots", f"{SLOTS}", "--waiting", f"{WAITING}") as (url, server):
        asyncio.run(run(url, options.requests // 5, alike=True))
        pairs: list[dict[str, Any]] = []
        bytes_before = resident(server.pid)
        for number in range(options.pairs):
            pair: dict[str, Any] = {}
            for name in ("alike", "mixed") if number % 2 == 0 else ("mixed", "alike"):
                begun = time.perf_counter()
                seen = asyncio.run(run(url, options.requests, alike=name == "alike"))
                pair[name] = told(seen, time.perf_counter() - begun) | {"left": settled(url)}
            for what in ("ttft", "request"):
                mixed, alike = (pair[name][f"{what}_p50_p99"][1] for name in ("mixed", "alike"))
                pair[f"{what}_p99_ratio"] = mixed / alike
            pairs.append(pair)
            print(json.dumps(pair))
        growth = resident(server.pid) - bytes_before
    result = {
        "command": "python -m benchmarks serving_soak",
        "requests": options.requests,
        "clients": CLIENTS,
        "places": SLOTS + WAITING,
        "pairs": pairs,
        "request_p99_ratio": statistics.median(pair["request_p99_ratio"] for pair in pairs),
        "ttft_p99_ratio": statistics.median(pair["ttft_p99_ratio"] for pair in pairs),
        "left": [pair[name]["left"] for pair in pairs for name in ("alike", "mixed")],
        "wrong": sum(len(pair[name]["wrong"]) for pair in pairs for name in ("alike", "mixed")),
        "server_grew_bytes": growth,
        "exit_code": server.returncode,
    }
    print(f"p99 of the others: {result['request_p99_ratio']:.2f} of what it is when all are alike")
    write(options.out, result)
