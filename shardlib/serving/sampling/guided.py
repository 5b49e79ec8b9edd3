"""Answers of an engine that have a form, and their guides."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from multiprocessing import connection

import numpy as np

from shardlib.errors import ArgumentError
from shardlib.serving.sampling.guides import Guide, Guides
from shardlib.serving.scheduling.requests import BROKEN, LENGTH, STOP, Asked, Request
from shardlib.serving.scheduling.schedule import Share

#: Seconds that a step waits for masks after guesses.
GUESS_SECONDS = 0.02


class Guided:
    """Requests whose answers have a form.

    Attributes:
        guides: of the model's tokens; None while nothing is known of what they spell.
    """

    def __init__(self) -> None:
        self.guides: Guides | None = None
        self._guided: dict[Request, Guide] = {}

    def request(self, number: int, asked: Asked) -> Request:
        """A request; one whose answer has a form ends with the tokens that end an answer."""
        if asked.form is None:
            return Request(number=number, asked=asked)
        if self.guides is None:
            raise ArgumentError(
                "an answer has a form, and nothing is known of what tokens spell\nTry:"
                " engine.spell(tokens, ends) before"
            )
        guide = self.guides.guide(asked.form)
        ends = asked.stop | self.guides.ends
        request = Request(number=number, asked=replace(asked, stop=ends))
        self._guided[request] = guide
        return request

    def settled(self, seconds: float) -> list[tuple[Request, str]]:
        """Requests that end as their forms say, and why. Those whose masks are late sit out the
        next step.

        Args:
            seconds: that masks are waited for.
        """
        ended = [request for request in self._guided if request.ended is not None]
        for request in ended:
            self._guided.pop(request).close()
        self._wait(self._guided.values(), lambda guide: guide.late, seconds)
        why = dict[Request, str]()
        for request, guide in self._guided.items():
            request.late = guide.late
            if guide.form.ended or guide.failure:
                why[request] = BROKEN
            elif not guide.late and (guide.stopped or guide.full):
                why[request] = STOP if guide.stopped else LENGTH
        return list(why.items())

    def masks(self, shares: Sequence[Share]) -> dict[int, list[np.ndarray]]:
        """Tokens that may come next in the rows of a step, by number of the request."""
        guides = {
            share: self._guided[share.request]
            for share in shares
            if share.ends and share.request in self._guided
        }
        for share, guide in guides.items():
            if share.drafted:
                guide.guess(share.drafted)
        self._wait(guides.values(), lambda guide: guide.guessing, GUESS_SECONDS)
        return {
            share.request.number: guide.masks(share.rows, share.drafted)
            for share, guide in guides.items()
        }

    def took(self, request: Request, token: int) -> bool:
        """A request has taken a token; whether the row after it may be taken, too."""
        guide = self._guided.get(request)
        if guide is None or token in request.asked.stop:
            return True
        if request.ended == LENGTH:  # unless the form says that it is whole
            request.ended, guide.full = None, True
        return guide.took(token) and not guide.full

    def ask(self) -> None:
        """Asks for the masks after all that was taken: they are computed beside everything else."""
        for request, guide in self._guided.items():
            if request.ended is None:
                guide.ask()

    def _wait(
        self, guides: Collection[Guide], waits: Callable[[Guide], bool], seconds: float
    ) -> None:
        until = time.monotonic() + seconds
        while forms := {guide.form for guide in guides if waits(guide) and not guide.form.ended}:
            for form in forms:
                form.hear()
            forms = {guide.form for guide in guides if waits(guide) and not guide.form.ended}
            left = until - time.monotonic()
            if left <= 0 or not forms:
                return
            connection.wait([form.fork for form in forms], left)  # type: ignore[arg-type]
