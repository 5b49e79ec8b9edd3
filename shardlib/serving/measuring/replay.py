"""Asks a server as a workload says, and writes down when tokens came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

from shardlib.errors import LaunchError
from shardlib.serving.measuring.workload import Job

#: Seconds between two pieces of an answer after which it counts as failed.
PATIENCE = 300.0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """How a request went.

    Attributes:
        begun: seconds from the beginning of the workload to the request.
        first: from the request to the first token; None where there was none.
        ended: from the request to the end.
        tokens: of the answer.
        cached: of the prompt, that the server had computed for others.
        status: of HTTP; 0 where the connection failed.
        error: what went wrong; empty where nothing did.
    """

    begun: float
    first: float | None
    ended: float
    tokens: int = 0
    cached: int = 0
    status: int = 200
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Who is asked.

    Attributes:
        url: of OpenAI's interface, "http://127.0.0.1:8000/v1".
        model: which; empty for the first that the server lists.
        token: that the server wants; empty for none.
        together: requests at a time at most; the others wait for their turn, and that counts.
    """

    url: str
    model: str = ""
    token: str = ""
    together: int = 1024


async def replay(jobs: Sequence[Job], target: Target) -> list[Seen]:
    """Asks everything, each request at its time."""
    headers = {"Authorization": f"Bearer {target.token}"} if target.token else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(headers=headers, limits=limits, timeout=PATIENCE) as client:
        url = target.url.rstrip("/")
        try:
            response = await client.get(f"{url}/models")
            response.raise_for_status()
            name = target.model or response.json()["data"][0]["id"]
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise LaunchError(f"nobody answers at {url} ({error})") from error
        turn, start = asyncio.Semaphore(target.together), time.perf_counter()

        async def one(job: Job) -> Seen:
            await asyncio.sleep(job.at + start - time.perf_counter())
            begun = time.perf_counter()
            async with turn:
                return await _asked(client, f"{url}/completions", name, job, begun, begun - start)

        return list(await asyncio.gather(*map(one, jobs)))


async def _asked(
    client: httpx2.AsyncClient, url: str, name: str, job: Job, begun: float, start: float
) -> Seen:
    body = {
        "model": name,
        "prompt": list(job.prompt),
        "max_tokens": job.most,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first: float | None = None
    tokens = cached = status = 0
    error = ""
    try:
        async with client.stream("POST", url, json=body) as answer:
            status = answer.status_code
            if status != 200:
                error = (await answer.aread()).decode("utf-8", "replace")[:300]
            else:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        error = str(event["error"])[:300]
                        break
                    if event["choices"] and first is None:
                        first = time.perf_counter() - begun
                    if usage := event.get("usage"):
                        tokens = usage["completion_tokens"]
                        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                if not error and tokens != job.most:
                    error = f"the answer has {tokens} tokens, and {job.most} were asked for"
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Seen(
        begun=start,
        first=first,
        ended=time.perf_counter() - begun,
        tokens=tokens,
        cached=cached,
        status=status,
        error=error,
    )
