"""Whole answers, and streams of tokens, of what serves requests step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardlib.errors import ArgumentError
from shardlib.serving.scheduling.requests import Asked, Event, Request
from shardlib.serving.scheduling.settings import Sampling, whole

if TYPE_CHECKING:
    from shardlib.serving.scheduling.groups import Groups
    from shardlib.serving.scheduling.schedule import Schedule


class Answers:
    """Serves until answers are there.

    Attributes:
        schedule: requests that wait, and those that have a slot.
    """

    schedule: Schedule | Groups

    def add(self, asked: Asked) -> Request:
        """See `Engine`."""
        raise NotImplementedError

    def step(self) -> list[Event]:
        """See `Engine`."""
        raise NotImplementedError

    def add_several(self, asked: Asked, count: int) -> list[Request]:
        """Several answers to one prompt wait to be served. The pages that the prompt fills are
        computed once, and shared.

        Args:
            asked: what is asked; each answer after the first has the next seed.
            count: of answers, at least 1.

        Raises:
            ArgumentError: see `add`.
        """
        if not whole(count) or count < 1:
            raise ArgumentError(f"{count!r} answers are asked for; a prompt has at least one")
        sampling = asked.sampling
        return [
            self.add(
                replace(
                    asked, sampling=replace(sampling, seed=(sampling.seed + number) % (1 << 32))
                )
            )
            for number in range(count)
        ]

    def run(self) -> None:
        """Serves until every request has ended."""
        while self.schedule.waiting or self.schedule.running:
            self.step()

    def generate(
        self, prompts: Sequence[Sequence[int]], most: int = 16, *, sampling: Sampling | None = None
    ) -> list[list[int]]:
        """The answers to some prompts.

        Args:
            prompts: tokens of each.
            most: tokens of an answer at most.
            sampling: how each is chosen; by default the likeliest.

        Raises:
            ArgumentError: see `add`.
        """
        options = sampling or Sampling()
        requests = [
            self.add(Asked(prompt=_tokens(prompt), most=most, sampling=options))
            for prompt in prompts
        ]
        self.run()
        return [request.answer for request in requests]

    def stream(
        self, prompt: Sequence[int], most: int = 16, *, sampling: Sampling | None = None
    ) -> Iterator[int]:
        """The tokens of one answer, as they come; others are served beside it.

        Args:
            prompt: tokens.
            most: tokens of the answer at most.
            sampling: how each is chosen; by default the likeliest.

        Raises:
            ArgumentError: see `add`.
        """
        options = sampling or Sampling()
        request = self.add(Asked(prompt=_tokens(prompt), most=most, sampling=options))
        try:
            while request.ended is None:
                for event in self.step():
                    if event.request is request and event.token is not None:
                        yield event.token
        finally:
            request.cancelled = True


def _tokens(prompt: Sequence[int]) -> tuple[int, ...]:
    """Of a list or an array of NumPy."""
    return tuple(prompt.tolist() if isinstance(prompt, np.ndarray) else prompt)
