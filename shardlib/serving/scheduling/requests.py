"""A request: what is asked, and what it has so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardlib.serving.scheduling.forms import Form
from shardlib.serving.scheduling.settings import MOST_LISTED, Sampling, number, whole
from shardlib.serving.scheduling.windows import Held

#: Why a request has ended.
LENGTH, STOP, CANCELLED, LATE = "length", "stop", "cancelled", "late"
#: The same, where no token fits the form any more: the grammar takes more work than it may.
BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked.

    Attributes:
        prompt: tokens, at least one.
        most: tokens of the answer at most; 0 for the prompt alone.
        least: tokens of the answer before one of `stop` may come.
        sampling: how each is chosen.
        stop: tokens that end the answer; they are not part of it.
        salt: a tenant: requests of different salts share no pages, and of several tenants that wait
            the one that has had the least is served first.
        priority: of several the highest is served first; it takes slots of lower ones.
        seconds: after which it ends with what it has; None for as long as it takes.
        top: likeliest tokens that are listed beside each of the answer, with their logarithms.
        scored: whether the tokens of the prompt have logarithms, too, all but the first; they share
            no pages then, and are computed as slowly as so many next tokens.
        adapter: name of the one that it is served with (`Engine.adapt`); "" for the base.
        source: tokens that an encoder reads, where the model has one (`Engine.encode_with`).
        form: that the answer has, where it ends by itself; needs `Engine.spell`.
    """

    prompt: tuple[int, ...]
    most: int = 16
    least: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()
    salt: str = ""
    priority: int = 0
    seconds: float | None = None
    top: int = 0
    scored: bool = False
    adapter: str = ""
    source: tuple[int, ...] = ()
    form: Form | None = None

    def failures(self, *, vocab: int, room: int) -> list[str]:
        """Why a model cannot serve it; empty where it can."""
        failures = [] if self.prompt else ["the prompt is empty"]
        for what, tokens in (
            ("the prompt has", self.prompt),
            ("stop has", self.stop),
            ("bias has", self.sampling.bias),
            ("barred has", self.sampling.barred),
        ):
            wrong = [token for token in tokens if not whole(token) or not 0 <= token < vocab]
            if wrong:
                failures.append(
                    f"{what} {wrong[0]!r}; tokens are whole numbers from 0 to {vocab - 1}"
                )
        if len({*self.sampling.barred, *(self.stop if self.least else ())}) >= vocab:
            failures.append("no token is left to choose from")
        if self.form is not None and (self.sampling.barred or self.least):
            failures.append("an answer that has a form bars no tokens, and has no least length")
        if not whole(self.priority):
            failures.append(f"priority is {self.priority!r}; it is a whole number")
        if self.seconds is not None and (not number(self.seconds) or self.seconds <= 0):
            failures.append(f"seconds is {self.seconds!r}; it is a number above 0")
        if not whole(self.top) or not 0 <= self.top <= MOST_LISTED:
            failures.append(f"top is {self.top!r}; from 0 to {MOST_LISTED} tokens are listed")
        if not whole(self.most) or self.most < 0:
            failures.append(f"most is {self.most!r}; it is a whole number from 0 on")
        elif len(self.prompt) + self.most > room:
            failures.append(
                f"{len(self.prompt)} tokens of the prompt and {self.most} of the answer are more"
                f" than the {room} that a request may have"
            )
        if not whole(self.least) or self.least < 0 or (whole(self.most) and self.least > self.most):
            failures.append(f"least is {self.least!r}; it is a whole number from 0 to most")
        return failures


@dataclass(frozen=True, kw_only=True)
class Told:
    """A token, as the model sees it.

    Attributes:
        token: which.
        logprob: natural logarithm of its probability under the model itself, before temperature,
            bias and penalties.
        likeliest: the likeliest tokens in its place and their logarithms, falling, as many as the
            request lists.
    """

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(kw_only=True, eq=False)
class Request:
    """What is asked, and what there is of the answer.

    Attributes:
        number: in the order of arrival.
        asked: what is asked.
        answer: tokens so far.
        told: of each of them.
        scores: of the tokens of the prompt but the first, where they are asked for.
        held: pages that hold its keys and values, by cache group; none while it waits.
        computed: tokens whose keys and values they hold.
        digests: of the full ones.
        reused: tokens of the prompt that another request had computed.
        ended: why; None while it goes on.
        cancelled: whether it is to end before the next step.
        late: whether the tokens that its form allows next are not known yet; it sits out a step.
    """

    number: int
    asked: Asked
    answer: list[int] = field(default_factory=list[int])
    told: list[Told] = field(default_factory=list[Told])
    scores: list[Told] = field(default_factory=list[Told])
    held: tuple[Held, ...] = ()
    computed: int = 0
    digests: list[bytes] = field(default_factory=list[bytes])
    reused: int = 0
    ended: str | None = None
    cancelled: bool = False
    late: bool = False

    @property
    def logprobs(self) -> list[float]:
        """Natural logarithms of the probabilities of the answer's tokens, see `Told`."""
        return [token.logprob for token in self.told]

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.asked.prompt, *self.answer]

    def tokens_from(self, first: int) -> list[int]:
        """Prompt and answer from a position on."""
        prompt = self.asked.prompt
        if first < len(prompt):
            return [*prompt[first:], *self.answer]
        return self.answer[first - len(prompt) :]

    @property
    def count(self) -> int:
        """Of its tokens."""
        return len(self.asked.prompt) + len(self.answer)

    @property
    def waiting(self) -> int:
        """Tokens that are still to be computed before the next one of the answer."""
        return self.count - self.computed

    @property
    def apart(self) -> str:
        """Requests that differ in it share no pages."""
        salt, adapter, source = self.asked.salt, self.asked.adapter, self.asked.source
        return repr((salt, adapter, source)) if adapter or source else salt

    @property
    def unscored(self) -> bool:
        """Whether tokens of the prompt still lack the logarithms that are asked for."""
        return self.asked.scored and len(self.scores) < len(self.asked.prompt) - 1

    @property
    def rank(self) -> tuple[int, int]:
        """Who is served first: higher priority, then who came first."""
        return -self.asked.priority, self.number

    def took(
        self, token: int, logprob: float, likeliest: tuple[tuple[int, float], ...] = ()
    ) -> None:
        """Takes the next token."""
        if token in self.asked.stop:
            self.ended = STOP
            return
        self.answer.append(token)
        self.told.append(Told(token=token, logprob=logprob, likeliest=likeliest[: self.asked.top]))
        if len(self.answer) >= self.asked.most:
            self.ended = LENGTH


@dataclass(frozen=True, kw_only=True)
class Event:
    """A request has one more token, or has ended.

    Attributes:
        request: which.
        token: the next one of its answer; None where it ended without one.
    """

    request: Request
    token: int | None
