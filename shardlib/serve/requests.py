"""Requests: their prompts, sampling, forms and answers, and the capacity of an engine.

The `Form` of an answer is JSON of a schema, a regular expression, or one of some texts.

>>> Form.choice(["yes", "no"])
Form(kind='choice', text='["yes", "no"]')

`behind` and `longest` say which pages a request needs in layers that look back a few tokens alone.

>>> behind(window=8, computed=17, size=4), longest(8, 4, [True, True, False, True, True, True])
(2, 6)
>>> longest(8, 4, [True, True, False, True])
2
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from shardlib.errors import ArgumentError, raise_all
from shardlib.serve.cache import CacheGroup
from shardlib.serve.cost import needed, ordered, pages_each
from shardlib.serve.plan import ServingPlan
from shardlib.untrusted.data import is_integer, is_number

#: Tokens with a bias, and likeliest tokens that are listed, at most: those of OpenAI's interface.
MOST_BIASED, MOST_LISTED = 300, 20


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of how the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: likeliest tokens that are left to choose from; 0 for all.
        top_p: of those, the fewest likeliest whose probabilities add up to it are left.
        min_p: of those, tokens at least so likely, over the likeliest, are left.
        seed: of the choices: the same seed, prompt and settings give the same tokens, whatever
            else is served.
        frequency: is subtracted from the logit of a token for each time that the answer has it.
        presence: is subtracted from the logit of a token that the answer has.
        repetition: positive logits of tokens that prompt or answer have are divided by it, negative
            ones multiplied.
        bias: is added to logits, by token.
        barred: tokens that are never chosen.

    Raises:
        ArgumentError: a figure is not usable.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict[int, float])
    barred: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {value!r}; it is a number {what}"
            for name, value, what, right in (
                ("temperature", self.temperature, "from 0 on", lambda x: x >= 0),
                ("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1),
                ("min_p", self.min_p, "from 0 to 1", lambda x: 0 <= x <= 1),
                ("frequency", self.frequency, "from -2 to 2", lambda x: -2 <= x <= 2),
                ("presence", self.presence, "from -2 to 2", lambda x: -2 <= x <= 2),
                ("repetition", self.repetition, "above 0", lambda x: x > 0),
            )
            if not is_number(value) or not right(value)
        ]
        failures += [
            f"{name} is {value!r}; it is a whole number {what}"
            for name, value, what, right in (
                ("top_k", self.top_k, "from 0 to 2^31 - 1", lambda x: 0 <= x < 1 << 31),
                ("seed", self.seed, "from 0 to 2^32 - 1", lambda x: 0 <= x < 1 << 32),
            )
            if not is_integer(value) or not right(value)
        ]
        failures += [
            f"bias of token {token!r} is {value!r}; it is a number from -100 to 100"
            for token, value in self.bias.items()
            if not is_number(value) or not -100 <= value <= 100
        ][:3]
        if len(self.bias) > MOST_BIASED:
            failures.append(f"{len(self.bias)} tokens have a bias; at most {MOST_BIASED} may")
        if failures:
            raise_all(ArgumentError, "the next token cannot be chosen so", failures)

    def __hash__(self) -> int:
        return hash((self.temperature, self.seed, frozenset(self.bias.items()), self.barred))

    @property
    def penalises(self) -> bool:
        """True if what has been said counts."""
        return bool(self.frequency or self.presence or self.repetition != 1)


def wrong_shares(shares: Mapping[str, float]) -> list[str]:
    """Lists the shares that are not numbers above 0."""
    return [
        f"the share of {name!r} is {share!r}; it is a number above 0"
        for name, share in shares.items()
        if not is_number(share) or not 0 < share < 1e9
    ]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The tokens of a program.

    Attributes:
        singles: tokens that look at pages of their own, the next one of a request each.
        chunks: how many there are of several tokens of one request, which look at its pages
            together.
        chunk: tokens of each.
    """

    singles: int
    chunks: int = 0
    chunk: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens that a step computes."""
        return self.singles + self.chunks * self.chunk


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Dtypes in which weights and the cache are stored.

    Attributes:
        weights: "model", as it has them; or "int8" or "fp8", matrices with a scale for each row or
            column.
        cache: "model", as it makes keys and values; "int8", with a scale for each token and head;
            or "fp8", without a scale.

    Raises:
        ArgumentError: another word.
    """

    weights: str = "model"
    cache: str = "model"

    def __post_init__(self) -> None:
        failures = [
            f"{name} are stored as {value!r}; known are {', '.join(formats)}"
            for name, value, formats in (
                ("weights", self.weights, ("model", "int8", "fp8")),
                ("keys and values", self.cache, ("model", "int8", "fp8")),
            )
            if value not in formats
        ]
        if failures:
            raise_all(ArgumentError, "the model cannot be stored so", failures)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The requests and tokens that are served.

    Attributes:
        longest: tokens of a request at most, prompt and answer together.
        slots: requests that are served at a time.
        page: tokens of a page of the cache.
        pages: of the cache, of the layers that keep the most tokens; None for those of as many
            requests of half the length as there are slots, and at least of one of the full length.
            Layers with a shorter window have as many as all slots need at most.
        budget: tokens that a step computes at most; None for 64, or as many as slots and drafts.
        chunk: tokens of a prompt that look at its pages together; None for a quarter of the budget,
            at most 64.
        prefixes: whether requests that begin alike share pages.
        drafts: tokens that a step may guess ahead for each request, see `Engine`.
        adapters: of the model at most, see `Engine.adapt`.
        tenants: shares of tenants in what is computed, by the salt of their requests; 1 of all
            others.
        windows: tokens that layers keep, the most first, 0 for all. An engine sees to it
            (`within`).
        storage: of weights and the cache.

    Raises:
        ArgumentError: sizes that are not usable, or do not fit each other.
    """

    longest: int = 1024
    slots: int = 8
    page: int = 16
    pages: int | None = None
    budget: int | None = None
    chunk: int | None = None
    prefixes: bool = True
    drafts: int = 0
    adapters: int = 0
    tenants: Mapping[str, float] = field(default_factory=dict[str, float])
    windows: tuple[int, ...] = (0,)
    storage: Storage = Storage()

    def __post_init__(self) -> None:
        minima = {"longest": 2, "slots": 1, "page": 1, "pages": 1, "budget": 1, "chunk": 1} | {
            "drafts": 0,
        }
        failures = [
            f"{name} is {value!r}; it is a whole number from {start} on"
            for name, start in minima.items()
            if (value := getattr(self, name)) is not None
            or name not in ("pages", "budget", "chunk")
            if not is_integer(value) or value < start
        ]
        if not failures and self.budget is not None and self.budget < self.slots:
            failures.append(
                f"budget is {self.budget}; each of {self.slots} slots has a token in a step"
            )
        failures += wrong_shares(self.tenants)
        if failures:
            raise_all(ArgumentError, "the model cannot be served so", failures)

    @classmethod
    def of(cls, plan: ServingPlan, *, longest: int | None = None) -> Self:
        """Returns the capacity of a replica of a plan."""
        choice = plan.choice
        words = (plan.workload.weights, plan.workload.cache)
        weights, cache = ("model" if word == "bf16" else word for word in words)
        return cls(
            longest=plan.workload.tokens if longest is None else longest,
            slots=choice.batch,
            page=choice.page,
            pages=choice.pages,
            budget=choice.batch + choice.chunk,
            storage=Storage(weights=weights, cache=cache),
        )

    @property
    def table(self) -> int:
        """Pages of the longest request."""
        return -(-self.longest // self.page)

    def within(self, windows: Iterable[int]) -> Self:
        """The same for a model whose layers keep so many tokens."""
        return replace(self, windows=ordered(windows, longest=self.longest))

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Layers that keep the same tokens, and their pages."""
        pages = pages_each(
            self.windows,
            first=self.all_pages,
            slots=self.slots,
            budget=self.most_tokens,
            size=self.page,
            drafts=self.drafts,
        )
        return tuple(
            CacheGroup(window=window, pages=count, table=self._most_pages(window))
            for window, count in zip(self.windows, pages, strict=True)
        )

    @property
    def most_pages(self) -> int:
        """Pages that a request has at a time at most, of the layers that keep the most tokens."""
        return self._most_pages(self.windows[0])

    def _most_pages(self, window: int) -> int:
        if not window:
            return self.table
        few = needed(window=window, budget=self.most_tokens, size=self.page)
        return min(self.table, few)

    @property
    def all_pages(self) -> int:
        """Pages of the cache, of the layers that keep the most tokens."""
        if self.pages is not None:
            return self.pages
        half = max(self.table, self.slots * self.table // 2)
        return min(half, self.slots * self.most_pages)

    @property
    def room(self) -> int:
        """Tokens of a request at most, prompt and answer together."""
        if self.all_pages >= self.most_pages:
            return self.longest
        return min(self.longest, self.all_pages * self.page)

    @property
    def most_tokens(self) -> int:
        """Tokens that a step computes at most."""
        return max(64, self.rows) if self.budget is None else self.budget

    @property
    def rows(self) -> int:
        """Tokens of a step whose logits are wanted at most."""
        return self.slots * (1 + self.drafts)

    @property
    def chunk_size(self) -> int:
        """Tokens of a prompt that look at its pages together."""
        return min(max(self.most_tokens // 4, 1), 64) if self.chunk is None else self.chunk

    @property
    def chunks(self) -> int:
        """Chunks of prompts that a step computes at most."""
        return -(-self.most_tokens // self.chunk_size)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of the programs: for the next tokens alone, with drafts, with prompts."""
        drafts = Shape(singles=0, chunks=self.slots, chunk=1 + self.drafts)
        return (
            Shape(singles=self.slots),
            *((drafts,) if self.drafts else ()),
            Shape(singles=self.slots, chunks=self.chunks, chunk=self.chunk_size),
        )


#: Kinds of forms, by what their text is.
KINDS = {
    "json": "a schema, as JSON",
    "regex": "a regular expression without look-around",
    "choice": "a list of texts, as JSON",
    "lark": "a grammar in the notation of Lark",
}
#: Characters of a text at most.
LONGEST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form of an answer.

    Attributes:
        kind: see `KINDS`.
        text: that says more.

    Raises:
        ArgumentError: there is no such kind, or the text is none of it.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"the form is {self.kind!r}; it is one of {', '.join(KINDS)}")
        if not isinstance(self.text, str) or not 0 < len(self.text) <= LONGEST:
            raise ArgumentError(
                f"the text of a form is {KINDS[self.kind]}, of 1 to {LONGEST} characters"
            )
        if self.kind == "choice" and not _texts(self.text):
            raise ArgumentError(
                f"a choice is {KINDS['choice']}, of at least one, none of them empty"
            )

    @classmethod
    def schema(cls, schema: Mapping[str, object] | bool) -> Form:
        """JSON that a schema describes, without spaces."""
        try:
            return cls(kind="json", text=json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"the schema is not valid JSON: {error}") from error

    @classmethod
    def regex(cls, pattern: str) -> Form:
        """Texts that a regular expression matches from beginning to end."""
        return cls(kind="regex", text=pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Form:
        """One of some texts."""
        return cls(kind="choice", text=json.dumps(list(texts)))

    @classmethod
    def grammar(cls, lark: str) -> Form:
        """Texts of a grammar."""
        return cls(kind="lark", text=lark)


def _texts(text: str) -> bool:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return (
        isinstance(items, list)
        and bool(items)
        and all(isinstance(item, str) and item for item in items)
    )


def behind(*, window: int, computed: int, size: int) -> int:
    """Pages, from the first on, that no token to come sees."""
    return max(computed - window + 1, 0) // size if window else 0


def longest(window: int, size: int, there: Sequence[bool]) -> int:
    """The most pages that a request may begin with, where some are there and some are not: those
    that its next token sees have to be.
    """
    pages = run = 0
    for count, present in enumerate(there, 1):
        run = run + 1 if present else 0
        if run >= count - behind(window=window, computed=count * size, size=size):
            pages = count
    return pages


@dataclass(kw_only=True, eq=False)
class GroupPages:
    """Pages that a request has in a cache group.

    Attributes:
        gone: how many it has given back, or never had: those before its window.
        pages: the others, in order.
    """

    gone: int = 0
    pages: list[int] = field(default_factory=list[int])

    @property
    def end(self) -> int:
        """Pages from the first token to the last that there is room for."""
        return self.gone + len(self.pages)

    def at(self, number: int) -> int:
        """The page that holds some tokens."""
        assert number >= self.gone, f"page {number} was given back"
        return self.pages[number - self.gone]


#: Why a request has ended.
LENGTH, STOP, CANCELLED, LATE = "length", "stop", "cancelled", "late"
#: The same, where no token fits the form any more: the grammar takes more work than it may.
BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request as it is asked.

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

    def answers(self, count: int) -> list[Self]:
        """The same request several times, with seeds that follow each other."""
        sampling = self.sampling
        seeds = ((sampling.seed + number) % (1 << 32) for number in range(count))
        return [replace(self, sampling=replace(sampling, seed=seed)) for seed in seeds]

    def failures(self, *, vocab: int, room: int) -> list[str]:
        """Lists the reasons why a model cannot serve it; empty where it can."""
        failures = [] if self.prompt else ["the prompt is empty"]
        for what, tokens in (
            ("the prompt has", self.prompt),
            ("stop has", self.stop),
            ("bias has", self.sampling.bias),
            ("barred has", self.sampling.barred),
        ):
            wrong = [token for token in tokens if not is_integer(token) or not 0 <= token < vocab]
            if wrong:
                failures.append(
                    f"{what} {wrong[0]!r}; tokens are whole numbers from 0 to {vocab - 1}"
                )
        if len({*self.sampling.barred, *(self.stop if self.least else ())}) >= vocab:
            failures.append("no token is left to choose from")
        if self.form is not None and (self.sampling.barred or self.least):
            failures.append("an answer that has a form bars no tokens, and has no least length")
        if not is_integer(self.priority):
            failures.append(f"priority is {self.priority!r}; it is a whole number")
        if self.seconds is not None and (not is_number(self.seconds) or self.seconds <= 0):
            failures.append(f"seconds is {self.seconds!r}; it is a number above 0")
        if not is_integer(self.top) or not 0 <= self.top <= MOST_LISTED:
            failures.append(f"top is {self.top!r}; from 0 to {MOST_LISTED} tokens are listed")
        if not is_integer(self.most) or self.most < 0:
            failures.append(f"most is {self.most!r}; it is a whole number from 0 on")
        elif len(self.prompt) + self.most > room:
            failures.append(
                f"{len(self.prompt)} tokens of the prompt and {self.most} of the answer are more"
                f" than the {room} that a request may have"
            )
        most = self.most if is_integer(self.most) else math.inf
        if not is_integer(self.least) or not 0 <= self.least <= most:
            failures.append(f"least is {self.least!r}; it is a whole number from 0 to most")
        return failures


@dataclass(frozen=True, kw_only=True)
class SampledToken:
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
    """A request, and its answer so far.

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
    asked: GenerationRequest
    answer: list[int] = field(default_factory=list[int])
    told: list[SampledToken] = field(default_factory=list[SampledToken])
    scores: list[SampledToken] = field(default_factory=list[SampledToken])
    held: tuple[GroupPages, ...] = ()
    computed: int = 0
    digests: list[bytes] = field(default_factory=list[bytes])
    reused: int = 0
    ended: str | None = None
    cancelled: bool = False
    late: bool = False

    @property
    def logprobs(self) -> list[float]:
        """Natural logarithms of the probabilities of the answer's tokens, see `SampledToken`."""
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
        """True if tokens of the prompt still lack the logarithms that are asked for."""
        return self.asked.scored and len(self.scores) < len(self.asked.prompt) - 1

    @property
    def rank(self) -> tuple[int, int]:
        """Order in which requests are served: higher priority, then who came first."""
        return -self.asked.priority, self.number

    def took(
        self, token: int, logprob: float, likeliest: tuple[tuple[int, float], ...] = ()
    ) -> None:
        """Takes the next token."""
        if token in self.asked.stop:
            self.ended = STOP
            return
        self.answer.append(token)
        self.told.append(
            SampledToken(token=token, logprob=logprob, likeliest=likeliest[: self.asked.top])
        )
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


#: Earlier names.
Asked, Told = GenerationRequest, SampledToken
