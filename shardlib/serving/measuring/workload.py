"""Requests with their times: a workload that can be asked again.

A file is a JSON list; a request has "prompt" (tokens) or "length" (as many drawn ones), "most" (the
tokens of its answer) and "at" (seconds from the beginning, 0 where it is left out):

    [{"length": 512, "most": 64}, {"prompt": [17, 4, 99], "most": 8, "at": 0.25}]
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardlib.errors import DataError
from shardlib.untrusted import construct, parse_json

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


def tokens_of(jobs: Sequence[Job]) -> tuple[int, int]:
    """Tokens of the prompts and of the answers of some requests."""
    return sum(len(job.prompt) for job in jobs), sum(job.most for job in jobs)
