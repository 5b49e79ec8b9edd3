"""A request: what is asked, and what it has so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shardlib.errors import ArgumentError, raise_all

#: Why a request has ended.
LENGTH, STOP, CANCELLED = "length", "stop", "cancelled"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: likeliest tokens that are left to choose from; 0 for all.
        top_p: the fewest likeliest tokens whose probabilities add up to it are left.
        min_p: tokens at least so likely, over the likeliest, are left.
        seed: of the choices: the same seed, prompt and settings give the same tokens, whatever
            else is served.

    Raises:
        ArgumentError: a figure is not usable.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {value!r}; it is a number {what}"
            for name, value, what, right in (
                ("temperature", self.temperature, "from 0 on", lambda x: x >= 0),
                ("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1),
                ("min_p", self.min_p, "from 0 to 1", lambda x: 0 <= x <= 1),
            )
            if not _number(value) or not right(value)
        ]
        failures += [
            f"{name} is {value!r}; it is a whole number {what}"
            for name, value, what, right in (
                ("top_k", self.top_k, "from 0 on", lambda x: x >= 0),
                ("seed", self.seed, "from 0 to 2^32 - 1", lambda x: 0 <= x < 1 << 32),
            )
            if not _whole(value) or not right(value)
        ]
        if failures:
            raise_all(ArgumentError, "the next token cannot be chosen so", failures)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked.

    Attributes:
        prompt: tokens, at least one.
        most: tokens of the answer at most.
        sampling: how each is chosen.
        stop: tokens that end the answer; they are not part of it.
        salt: requests of different salts share no pages.
        priority: of several the highest is served first.
    """

    prompt: tuple[int, ...]
    most: int = 16
    sampling: Sampling = Sampling()
    stop: frozenset[int] = frozenset()
    salt: str = ""
    priority: int = 0

    def failures(self, *, vocab: int, room: int) -> list[str]:
        """Why a model cannot serve it; empty where it can.

        Args:
            vocab: tokens are below it.
            room: tokens of a request at most.
        """
        found = [] if self.prompt else ["the prompt is empty"]
        for what, tokens in (("the prompt has", self.prompt), ("stop has", sorted(self.stop))):
            wrong = [one for one in tokens if not _whole(one) or not 0 <= one < vocab]
            if wrong:
                found.append(f"{what} {wrong[0]!r}; tokens are whole numbers from 0 to {vocab - 1}")
        if not _whole(self.priority):
            found.append(f"priority is {self.priority!r}; it is a whole number")
        if not _whole(self.most) or self.most < 1:
            found.append(f"most is {self.most!r}; an answer has at least one token")
        elif len(self.prompt) + self.most > room:
            found.append(
                f"{len(self.prompt)} tokens of the prompt and {self.most} of the answer are more"
                f" than the {room} that a request may have"
            )
        return found


@dataclass(kw_only=True, eq=False)
class Request:
    """What is asked, and what there is of the answer.

    Attributes:
        number: in the order of arrival.
        asked: what is asked.
        answer: tokens so far.
        logprobs: natural logarithms of their probabilities, under the temperature asked for.
        pages: that hold its keys and values.
        computed: tokens whose keys and values they hold.
        digests: of the full ones.
        reused: tokens of the prompt that another request had computed.
        ended: why; None while it goes on.
        cancelled: whether it is to end before the next step.
    """

    number: int
    asked: Asked
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    digests: list[bytes] = field(default_factory=list)
    reused: int = 0
    ended: str | None = None
    cancelled: bool = False

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.asked.prompt, *self.answer]

    @property
    def count(self) -> int:
        """Of its tokens."""
        return len(self.asked.prompt) + len(self.answer)

    @property
    def waiting(self) -> int:
        """Tokens that are still to be computed before the next one of the answer."""
        return self.count - self.computed

    @property
    def rank(self) -> tuple[int, int]:
        """Who is served first: higher priority, then who came first."""
        return -self.asked.priority, self.number

    def took(self, token: int, logprob: float) -> None:
        """Takes the next token.

        Args:
            token: as chosen.
            logprob: of it.
        """
        if token in self.asked.stop:
            self.ended = STOP
            return
        self.answer.append(token)
        self.logprobs.append(logprob)
        if len(self.answer) >= self.asked.most:
            self.ended = LENGTH
