"""Answers of an engine that have a form, and their guides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardlib.errors import ArgumentError
from shardlib.serving.sampling.guides import Guide, Guides
from shardlib.serving.scheduling.requests import BROKEN, STOP, Asked, Request
from shardlib.serving.scheduling.schedule import Share


class Guided:
    """Requests whose answers have a form.

    Attributes:
        guides: of the model's tokens; None while nothing is known of what they spell.
    """

    def __init__(self) -> None:
        self.guides: Guides | None = None
        self._guided: dict[Request, Guide] = {}

    def request(self, number: int, asked: Asked) -> Request:
        """A request; one whose answer has a form ends with the tokens that end an answer.

        Args:
            number: of the request.
            asked: what is asked.

        Raises:
            ArgumentError: the form cannot be compiled, or nothing is known of what tokens spell.
        """
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

    def masks(self, shares: Sequence[Share]) -> dict[int, list[np.ndarray]]:
        """Tokens that may come next in the rows of a step, by number of the request.

        Args:
            shares: of the step.
        """
        self._guided = {one: guide for one, guide in self._guided.items() if one.ended is None}
        return {
            share.request.number: self._guided[share.request].masks(share.rows, share.drafted)
            for share in shares
            if share.ends and share.request in self._guided
        }

    def took(self, request: Request, token: int) -> None:
        """A request has taken a token; it ends where none can follow.

        Args:
            request: any.
            token: that it took, or that has ended it.
        """
        guide = self._guided.get(request)
        if guide is None or token in request.asked.stop:
            return
        if guide.took(token):
            request.ended = BROKEN if guide.failure else STOP
