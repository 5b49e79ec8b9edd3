"""Tokens that an answer might have next are guessed, and computed in one step beside the last one.

The model chooses a token after each guess, with the random numbers that belong to its position, and
takes guesses as long as they are what it has chosen. So tokens are those of serving without
guesses, one by one, also with a temperature. For a guess that is one token this is the rule of
Leviathan et al. (arXiv:2211.17192), which keeps it with its probability; for a model that guesses
with the same random numbers, it is the coupling of Daliri et al. (arXiv:2408.07978), which keeps
guesses with a probability of at least (1 - d) / (1 + d), d the total variation of the two models.

    Ngrams       what followed the last time the answer, or the prompt, went like this
    DraftModel   a smaller model, over pages of its own with the same numbers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from shardlib.serving.scheduling.requests import Request
from shardlib.serving.scheduling.schedule import Share
from shardlib.serving.step import Step


class Drafts(Protocol):
    """Guesses tokens."""

    def guessed(self, running: Sequence[Request], count: int) -> Mapping[int, Sequence[int]]:
        """Guesses, by number of the request; any tokens, where `filled` guesses."""
        ...

    def filled(self, shares: Sequence[Share]) -> list[Share]:
        """The shares of a step with their guesses."""
        ...

    def done(self, shares: Sequence[Share], accepted: Mapping[int, int]) -> None:
        """A step has computed them."""
        ...


class Ngrams:
    """Guesses what followed the last time that the tokens went like this (prompt lookup).

    Args:
        longest: tokens at the end that are looked for; fewer, down to `shortest`, where these are
            not found.
        shortest: see there.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.longest, self.shortest = longest, shortest

    def guessed(self, running: Sequence[Request], count: int) -> Mapping[int, Sequence[int]]:
        """See `Drafts`."""
        waiting = [request for request in running if request.waiting == 1]
        return {request.number: self._after(request.tokens, count) for request in waiting}

    def filled(self, shares: Sequence[Share]) -> list[Share]:
        """See `Drafts`."""
        return list(shares)

    def done(self, shares: Sequence[Share], accepted: Mapping[int, int]) -> None:
        """See `Drafts`."""

    def _after(self, tokens: Sequence[int], count: int) -> list[int]:
        text = np.asarray(tokens, np.int32)
        for length in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
            matches = np.flatnonzero((windows == text[-length:]).all(axis=1))
            if len(matches):
                start = int(matches[-1]) + length
                followed = text[start : start + count].tolist()
                # where it repeats itself, what follows goes on behind the end
                period = len(text) - start
                return [followed[n % period] for n in range(count)] if period < count else followed
        return []


class DraftModel:
    """Guesses with a smaller model.

    Args:
        step: of the model, with as many pages, of the same size, as the one that is served.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._behind: dict[int, int] = {}

    def guessed(self, running: Sequence[Request], count: int) -> Mapping[int, Sequence[int]]:
        """See `Drafts`."""
        return {request.number: (0,) * count for request in running if request.waiting == 1}

    def filled(self, shares: Sequence[Share]) -> list[Share]:
        """See `Drafts`."""
        now = [self._own(share) for share in shares]
        if not self.step.holds(now):
            now = [self._own(share, behind=False) for share in shares]
        guesses: dict[int, tuple[int, ...]] = {share.request.number: () for share in shares}
        lengths = {share.request.number: len(share.drafted) for share in shares}
        while now:
            sampled = self.step(now)
            for share, rows in zip(now, sampled, strict=True):
                if rows:
                    guesses[share.request.number] += (rows[-1].token,)
            now = [
                replace(
                    share,
                    first=share.request.count + len(guesses[number]) - 1,
                    count=1,
                    drafted=guesses[number],
                )
                for share in now
                if 0 < len(guesses[number := share.request.number]) < lengths[number]
            ]
        return [replace(share, drafted=guesses[share.request.number]) for share in shares]

    def done(self, shares: Sequence[Share], accepted: Mapping[int, int]) -> None:
        """See `Drafts`."""
        self._behind = {
            share.request.number: share.first + share.count
            for share in shares
            if share.drafted and accepted[share.request.number] == len(share.drafted)
        }

    def _own(self, share: Share, behind: bool = True) -> Share:
        """What this model computes of a share: no guesses, but the last one of the step before,
        which it has not seen yet.
        """
        late = int(behind and self._behind.get(share.request.number) == share.first)
        return replace(
            share,
            first=share.first - late,
            count=share.count - len(share.drafted) + late,
            rows=1 if share.drafted else 0,
            drafted=(),
        )
