"""Replays a stored workload against a server, and measures latencies and throughput."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardlib.errors import DataError, LaunchError, MissingPackageError
from shardlib.untrusted.data import JsonObject, construct, parse_json

try:
    import httpx2
except ModuleNotFoundError as error:
    raise MissingPackageError(
        f"asking needs the package {error.name}\nTry: pip install 'shardlib[serve]'"
    ) from error

# --------------------------------------------------------------------------------------------------
# Requests with their times: a workload that can be asked again.
#
# A file is a JSON list; a request has "prompt" (tokens) or "length" (as many drawn ones), "most"
# (the tokens of its answer) and "at" (seconds from the beginning, 0 where it is left out):
#
#     [{"length": 512, "most": 64}, {"prompt": [17, 4, 99], "most": 8, "at": 0.25}]

#: Drawn tokens are in this range: letters and digits of tokenizers of bytes, and in every other
#: vocabulary, too.
DRAWN = range(32, 127)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request.

    Attributes:
        prompt: its tokens; empty for as many drawn ones as `length` says.
        length: of the prompt.
        most: tokens of the answer, which does not end before.
        at: seconds from the beginning of the workload.

    Raises:
        DataError: no prompt, or two; no answer; a time before the beginning.
    """

    most: int
    prompt: tuple[int, ...] = ()
    length: int = 0
    at: float = 0.0

    def __post_init__(self) -> None:
        if (
            bool(self.prompt) == bool(self.length)
            or self.length < 0
            or min(self.prompt, default=0) < 0
        ):
            raise DataError("a request has a prompt of tokens, or the length of one")
        if self.most < 1 or not self.at >= 0:
            raise DataError("an answer has at least one token, and times are from 0 on")


def read_workload(text: bytes, what: str, *, seed: int = 0, rate: float | None = None) -> list[Job]:
    """Requests of a file, by time; their prompts are drawn where it gives lengths.

    Args:
        rate: requests a second that come in place of the times of the file, as a Poisson process;
            None for these.
    """
    data = parse_json(text, what, DataError)
    if not isinstance(data, list) or not data:
        raise DataError(f"{what} holds no list of requests")
    draw, now, jobs = random.Random(seed), 0.0, list[Job]()
    for number, entry in enumerate(data):
        job = construct(Job, entry, f"request {number} of {what}", DataError)
        if rate is not None:
            now += draw.expovariate(rate)
            job = replace(job, at=now)
        if job.length:
            tokens = tuple(draw.choice(DRAWN) for _ in range(job.length))
            job = replace(job, prompt=tokens, length=0)
        jobs.append(job)
    return sorted(jobs, key=lambda job: job.at)


#: Seconds between two pieces of an answer after which it counts as failed.
PATIENCE = 300.0


@dataclass(frozen=True, kw_only=True)
class MeasuredAnswer:
    """Times and result of a request.

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
    """The server to send requests to.

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


async def replay(jobs: Sequence[Job], target: Target) -> list[MeasuredAnswer]:
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

        async def timed(job: Job) -> MeasuredAnswer:
            await asyncio.sleep(job.at + start - time.perf_counter())
            begun = time.perf_counter()
            async with turn:
                return await _answered(
                    client, f"{url}/completions", name, job, begun, begun - start
                )

        return list(await asyncio.gather(*map(timed, jobs)))


async def _answered(
    client: httpx2.AsyncClient, url: str, name: str, job: Job, begun: float, start: float
) -> MeasuredAnswer:
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
    return MeasuredAnswer(
        begun=start,
        first=first,
        ended=time.perf_counter() - begun,
        tokens=tokens,
        cached=cached,
        status=status,
        error=error,
    )


#: Percentiles that are told.
PERCENTILES = (50, 90, 99)


def tpot(answer: MeasuredAnswer) -> float | None:
    """Seconds from token to token of an answer, in the mean; None for one of a single token."""
    if answer.first is None or answer.tokens < 2:
        return None
    return (answer.ended - answer.first) / (answer.tokens - 1)


def figures(
    seen: Sequence[MeasuredAnswer],
    *,
    ttft_limit: float | None = None,
    tpot_limit: float | None = None,
) -> JsonObject:
    """Returns the figures of a replay, as plain data. An answer is in time when its first token and
    its tokens in the mean are; refused and failed ones never are.

    Args:
        ttft_limit: seconds to the first token at most; None for any.
        tpot_limit: seconds from token to token at most; None for any.
    """
    good = [answer for answer in seen if not answer.error]
    refused = sum(answer.status == 429 for answer in seen)
    seconds = max(answer.begun + answer.ended for answer in seen) - min(
        answer.begun for answer in seen
    )
    in_time = [
        answer
        for answer in good
        if (ttft_limit is None or (answer.first or 0.0) <= ttft_limit)
        and (tpot_limit is None or (tpot(answer) or 0.0) <= tpot_limit)
    ]
    tokens = sum(answer.tokens for answer in good)
    return {
        "requests": len(seen),
        "answered": len(good),
        "refused": refused,
        "failed": len(seen) - len(good) - refused,
        "errors": sorted({answer.error for answer in seen if answer.error})[:5],
        "seconds": seconds,
        "output_tokens": tokens,
        "cached_tokens": sum(answer.cached for answer in good),
        "output_tokens_per_second": tokens / seconds,
        "requests_per_second": len(good) / seconds,
        "ttft_seconds": _spread([answer.first for answer in good]),
        "tpot_seconds": _spread([tpot(answer) for answer in good]),
        "request_seconds": _spread([answer.ended for answer in good]),
        "limits": {"ttft_seconds": ttft_limit, "tpot_seconds": tpot_limit},
        "in_time": len(in_time) / len(seen),
    }


def _spread(values: Sequence[float | None]) -> JsonObject | None:
    measured = [value for value in values if value is not None]
    if not measured:
        return None
    percentiles = np.percentile(measured, PERCENTILES)
    return {"mean": float(np.mean(measured))} | {
        f"p{percent}": float(value) for percent, value in zip(PERCENTILES, percentiles, strict=True)
    }
