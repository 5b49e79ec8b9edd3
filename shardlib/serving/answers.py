"""Whole answers, and streams of tokens, of what serves requests step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardlib.serving.scheduling.requests import Asked, Event, Request
from shardlib.serving.scheduling.settings import Sampling

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
        how = sampling or Sampling()
        requests = [
            self.add(Asked(prompt=tuple(prompt), most=most, sampling=how)) for prompt in prompts
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
        how = sampling or Sampling()
        request = self.add(Asked(prompt=tuple(prompt), most=most, sampling=how))
        try:
            while request.ended is None:
                for event in self.step():
                    if event.request is request and event.token is not None:
                        yield event.token
        finally:
            request.cancelled = True
