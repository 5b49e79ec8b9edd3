r"""Models that answer many clients at once: the layer between an engine and a network. Workers,
streams of answers, stop strings, calls of functions, conversations as text.

`Answer` makes the text of an answer of tokens, up to the first stop string.

>>> from shardlib.serve import SampledToken
>>> from shardlib.serve.served import ByteText
>>> answer = Answer(ByteText(), stop=("\n\n",))
>>> [answer.add(SampledToken(token=byte, logprob=-1)).text for byte in b"a\nb\n"]
['a', '', '\nb', '']
>>> answer.add(SampledToken(token=10, logprob=-1))
AnswerPart(text='', tokens=(), ended='stop', calls=())

`CallReader` takes calls of functions out of the text of an answer.

Models write them as text, in one of two forms:

- with tags, as Hermes and Qwen do: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`;
- as JSON alone, as Llama 3 does: `{"name": "f", "parameters": {}}`, several in a list or with `;`.

A call begins with the brace of its arguments, after the name of a function that was given; from
there on its arguments are given as they come. Where they end too early, or are not JSON, they are
what the model wrote.

>>> reader = CallReader(tagged({"f"}))
>>> part = reader.add(AnswerPart('So: <tool_call>{"name": "f", "arguments": {"a": ', (), None))
>>> part.text, [(one.name, one.arguments) for one in part.calls]
('So: ', [('f', '{"a": ')])
>>> part = reader.add(AnswerPart("1}}</tool_call>", (), "stop"))
>>> part.text, [(one.begins, one.arguments) for one in part.calls], part.ended
('', [(False, '1}')], 'tool_calls')
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import queue
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.annotation.trees import Tree
from shardlib.errors import ArgumentError, ModelError, ShardlibError
from shardlib.serve.cache import all_plain
from shardlib.serve.engine import Engine
from shardlib.serve.layers import base_of
from shardlib.serve.program import Forward
from shardlib.serve.requests import STOP, Capacity, Event, GenerationRequest, Request, SampledToken
from shardlib.serve.served import UNKNOWN, Pieces, Served, Text
from shardlib.untrusted.confined import ChildLimits, Confined, RefusedError
from shardlib.untrusted.data import JsonMapping

#: Earlier names of its parts are found by `shardlib._moved`.
__path__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class ListedToken:
    """A token with its logarithm.

    Attributes:
        token: which.
        text: of the token alone.
        raw: its bytes, where they are not text; None where they are, or are not known.
        logprob: natural logarithm of its probability; None for the first token of a prompt.
    """

    token: int
    text: str
    raw: bytes | None
    logprob: float | None


@dataclass(frozen=True, kw_only=True)
class AnswerToken:
    """A token of an answer.

    Attributes:
        listed: the token.
        likely: the likeliest tokens there, in falling order.
        offset: characters of the answer before it.
    """

    listed: ListedToken
    likely: tuple[ListedToken, ...]
    offset: int


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A function that an answer calls, or a piece of that.

    Attributes:
        name: of the function.
        arguments: as JSON, or a piece of it; of an answer that was cut off only a beginning.
        index: of the call in its answer.
        begins: whether the call begins with the piece.
        id: by which its result is told.
    """

    name: str
    arguments: str
    index: int = 0
    begins: bool = True
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True)
class AnswerPart:
    """New text and tokens of an answer.

    Attributes:
        text: that follows.
        tokens: whose text has begun.
        ended: why the answer is whole with it; None while it goes on.
        calls: of functions, whole or what is new of them.
    """

    text: str
    tokens: tuple[AnswerToken, ...]
    ended: str | None
    calls: tuple[ToolCall, ...] = ()


def written(text: Text, sampled: SampledToken, offset: int) -> AnswerToken:
    """A token as text."""
    return AnswerToken(
        listed=_listed(text, sampled.token, sampled.logprob),
        likely=tuple(_listed(text, alternative, odds) for alternative, odds in sampled.likeliest),
        offset=offset,
    )


def _listed(text: Text, token: int, logprob: float | None) -> ListedToken:
    decoded = text.decode([token])
    raw = text.raw(token) if UNKNOWN in decoded else None
    if raw is not None and raw.decode("utf-8", "ignore").encode() == raw:
        raw = None  # it says U+FFFD itself
    return ListedToken(token=token, text=decoded, raw=raw, logprob=logprob)


class Answer:
    """The text of an answer, as its tokens come in.

    Args:
        text: the model's tokenizer.
        stop: texts that end the answer; they are not part of it.
        before: characters that stand in front of it.
        least: tokens in which no text ends the answer; one that goes on after them does.
    """

    def __init__(
        self, text: Text, *, stop: Sequence[str] = (), before: int = 0, minimum: int = 0
    ) -> None:
        self._text, self._stop = text, tuple(stop)
        self._pieces = Pieces(text)
        self._held = ""  # that may be the beginning of a stop string
        self._given = before
        self._least = minimum
        self._safe = 0  # characters that are held, of the first tokens
        self._tokens: list[AnswerToken] = []  # whose text has not begun

    def add(self, sampled: SampledToken | None, *, ended: str | None = None) -> AnswerPart:
        """One more token, or the end.

        Args:
            sampled: the token; None where the answer ends without one.
        """
        if sampled is not None:
            self._tokens.append(written(self._text, sampled, self._given + len(self._held)))
            self._held += self._pieces.add(sampled.token)
            if self._least > 0:
                self._least -= 1
                self._safe = len(self._held)
        if ended is not None:
            self._held += self._pieces.end()
        starts = [
            start
            for stop in self._stop
            if (start := self._held.find(stop, max(0, self._safe - len(stop) + 1))) >= 0
        ]
        if starts:
            self._held = self._held[: min(starts)]
            return replace(self._give(len(self._held), last=False), ended=STOP)
        if ended is not None:
            return replace(self._give(len(self._held), last=True), ended=ended)
        waiting = max((_waiting(self._held, stop) for stop in self._stop), default=0)
        return self._give(len(self._held) - waiting, last=False)

    def _give(self, size: int, *, last: bool) -> AnswerPart:
        piece, self._held = self._held[:size], self._held[size:]
        self._given += size
        self._safe = max(0, self._safe - size)
        complete = [token for token in self._tokens if last or token.offset < self._given]
        self._tokens = self._tokens[len(complete) :]
        return AnswerPart(text=piece, tokens=tuple(complete), ended=None)


@dataclass(frozen=True, kw_only=True)
class Companions:
    """Models that are served beside a model.

    Attributes:
        draft: a smaller model with the same tokens, that guesses `Capacity.drafts` tokens ahead;
            None where what followed before does.
        adapters: parameters by name, as `Engine.adapt` takes them; requests have the name in place
            of that of the model.
    """

    draft: Served | None = None
    adapters: Mapping[str, Tree] = field(default_factory=dict)

    def join(self, engine: Engine) -> None:
        """Gives them to the engine of the model, before anything is compiled."""
        if self.draft is not None:
            draft = self.draft
            engine.draft_with(draft.init, draft.forward, weights=draft.weights)
        for name, params in self.adapters.items():
            engine.adapt(name, params)


class Embedder:
    """Embeds with the weights that an engine serves; in the engine's thread.

    A token sees only those before it, so that a text may be followed by anything: there is one
    program for texts of a quarter of the longest, and one for all others.

    Args:
        engine: whose weights.
        hidden: (model, int32 tokens [batch, seq]) -> states [batch, seq, width].
    """

    def __init__(self, engine: Engine, hidden: Forward) -> None:
        self._engine, model = engine, engine.forward.model

        def embed(weights: tuple[Tree, Tree], tokens: jax.Array, count: jax.Array) -> jax.Array:
            states = hidden(model.evaluating(model.rebuild(*all_plain(weights))), tokens[None])[0]
            counted = jnp.arange(len(tokens))[:, None] < count
            mean = jnp.where(counted, states.astype(jnp.float32), 0).sum(axis=0) / count
            return mean / jnp.maximum(jnp.linalg.norm(mean), 1e-12)

        self._embed = jax.jit(embed)
        self._programs: dict[int, jax.stages.Compiled] = {}

    def warm_up(self) -> None:
        """Compiles the programs."""
        longest = self._engine.capacity.longest
        self._compile(longest)
        with contextlib.suppress(ModelError):  # a model may want whole blocks of tokens
            self._compile(-(-longest // 4))

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        """The vector of a text, float32 [width]."""
        size = min(size for size in self._programs if size >= len(tokens))
        row = np.zeros(size, np.int32)
        row[: len(tokens)] = tokens
        weights = base_of(self._engine.compute.weights)
        vector = self._programs[size](weights, row, np.float32(len(tokens)))
        return np.asarray(vector)

    def _compile(self, size: int) -> None:
        weights = base_of(self._engine.compute.weights)
        beside = np.zeros(size, np.int32), np.float32(1)
        self._programs[size] = self._embed.lower(weights, *beside).compile()


class StreamError(ShardlibError, RuntimeError):
    """An answer that ends before it is whole.

    Attributes:
        dead: whether the engine has failed, and will answer nobody any more.
        refused: whether the request is at fault.
        message: why; `str(error)`.
    """

    def __init__(self, message: str, *, dead: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.dead, self.refused = dead, refused


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamEvent:
    """A request has one more token, or has ended.

    Attributes:
        index: of the request in its stream.
        token: the next one of the answer; None where it ended without one.
        told: of that token, by the model; None where there is none.
        scores: of the tokens of the prompt but the first, with the first token of the answer, where
            they were asked for.
        ended: why; None while it goes on.
        reused: tokens of the prompt that another request had computed.
        version: of the weights.
        at: when the step ended, as `time.perf_counter` has it.
    """

    index: int
    token: int | None
    told: SampledToken | None
    scores: tuple[SampledToken, ...]
    ended: str | None
    reused: int
    version: str
    at: float


class Stream:
    """Answers to some requests. What is heard of them waits here, at most so much; who reads more
    slowly than that is given up. All of it runs in the event loop, but for `requests`, which the
    engine's thread fills.

    Args:
        asked: what is asked, together.
        buffer: tokens that wait at most.

    Attributes:
        requests: as the engine has them; empty before it has seen them.
        begun: when it was made, as `time.perf_counter` has it.
        open: requests that have not ended.
        cancelled: whether nobody wants the answers any more.
    """

    def __init__(self, requested: Sequence[GenerationRequest], *, buffer: int) -> None:
        self.asked = tuple(requested)
        self.requests: list[Request] = []
        self.begun = time.perf_counter()
        self.open = len(self.asked)
        self.cancelled = False
        self._buffer = buffer
        self._heard: deque[StreamEvent] = deque()
        self._news = asyncio.Event()
        self._error: StreamError | None = None

    def take(self, heard: StreamEvent) -> None:
        """Something is new."""
        self.open -= heard.ended is not None
        if self.cancelled:
            return
        if len(self._heard) >= self._buffer:
            self.fail(
                StreamError(
                    f"{self._buffer} tokens wait, and nobody reads them: the answer is given up"
                )
            )
            return
        self._heard.append(heard)
        self._news.set()

    def fail(self, error: StreamError) -> None:
        """The answers end here; what waits can still be read."""
        self._error = self._error or error
        self.cancel()
        self._news.set()

    def cancel(self) -> None:
        """Nobody wants the answers: slots and pages come back before the next step."""
        self.cancelled = True
        for request in self.requests:
            request.cancelled = True

    def end(self, index: int) -> None:
        """Nobody wants more of one of the answers."""
        self.requests[index].cancelled = True

    async def next(self) -> StreamEvent:
        """Waits for the next event and returns it."""
        while not self._heard:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._heard.popleft()


class FullError(ShardlibError, RuntimeError):
    """As many requests are open as there are places.

    Attributes:
        seconds: after which one may be free.
        message: `str(error)`.
    """

    def __init__(self, message: str, *, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """Load of an engine.

    Attributes:
        running: requests that have a slot.
        waiting: requests that wait for one.
        open: places that are taken; also by answers that are still being sent.
        slots: that there are.
        used: pages that requests use.
        pages: that there are.
        steps: that were computed.
        preempted: requests that lost their pages, ever.
    """

    running: int
    waiting: int
    open: int
    slots: int
    used: int
    pages: int
    steps: int
    preempted: int


#: Characters of a template.
LONGEST = 1 << 17
LIMITS = ChildLimits(seconds=2.0, memory_bytes=1 << 29)


class Renderer:
    """Renders conversations for a model, by the template that its checkpoint brings along; from any
    thread. That is done in a process of its own (`rendering.py`), which ends when it takes more
    than its limits allow; the next conversation has a new one.

    Raises:
        ArgumentError: the template is too long.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._confined = Confined(Path(__file__).with_name("rendering.py"), limits=LIMITS)
        if text.template is not None and len(text.template) > LONGEST:
            raise ArgumentError(
                f"the template of conversations has {len(text.template)} characters; {LONGEST} are"
                " the most"
            )

    def __call__(self, messages: Sequence[JsonMapping], tools: Sequence[JsonMapping] = ()) -> str:
        """The text of a conversation, up to where the assistant answers."""
        if self._text.template is None:
            return plain_chat(messages)
        variables = {
            **self._text.variables,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            **({"tools": [dict(tool) for tool in tools]} if tools else {}),
        }
        arguments = {"template": self._text.template, "variables": variables}
        with self._lock:
            try:
                return self._confined.call("render", arguments)[1].decode()
            except RefusedError as error:
                raise ArgumentError(
                    f"the template of conversations refuses this: {error}"
                ) from error

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._lock:
            self._confined.close()


#: What stands around a call.
OPEN, CLOSE = "<tool_call>", "</tool_call>"
#: Why an answer ends that has called functions.
CALLED = "tool_calls"
#: How a call begins whose arguments are given as they come.
BEGUN = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(arguments|parameters)"\s*:\s*(?=\{)')
#: What stands between calls.
BETWEEN = re.compile(r"[\s;,\[\]]*")
DECODER = json.JSONDecoder()


@dataclass(frozen=True, kw_only=True)
class BufferedText:
    """Text of an answer that is not given yet.

    Attributes:
        text: of it.
        last: whether nothing follows.
        begun: whether other text came before it.
        called: whether a call came before it.
    """

    text: str
    last: bool
    begun: bool
    called: bool


@dataclass(frozen=True, kw_only=True)
class ParsedText:
    """A text split into its parts.

    Attributes:
        text: that is not a call.
        calls: that are whole.
        begun: a call that has begun after them, with its arguments so far.
        rest: that may become a call, or more of the one that has begun.
    """

    text: str = ""
    calls: Sequence[ToolCall] = ()
    begun: ToolCall | None = None
    rest: str = ""


#: Tells text from calls. What is not a call of a function that was given is text.
TextParser = Callable[[BufferedText], ParsedText]


class CallReader:
    """Takes calls out of the text of one answer.

    Args:
        split: how they are written.
        ends: why an answer ends that has called functions, and would have stopped.
    """

    def __init__(self, split: TextParser, *, ends: str = CALLED) -> None:
        self._split, self._ends = split, ends
        self._rest, self._begun, self._calls = "", False, 0
        self._told: ToolCall | None = None  # the call that has begun

    def add(self, part: AnswerPart) -> AnswerPart:
        """More of the answer."""
        last = part.ended is not None
        called = self._calls > (self._told is not None)
        buffered = BufferedText(
            text=self._rest + part.text, last=last, begun=self._begun, called=called
        )
        parsed = self._split(buffered)
        pieces = [piece for call in parsed.calls for piece in self._new(call, complete=True)]
        if parsed.begun is not None:
            pieces += self._new(parsed.begun, complete=False)
        self._rest, self._begun = parsed.rest, self._begun or bool(parsed.text)
        ended = self._ends if part.ended == STOP and self._calls else part.ended
        return replace(part, text=parsed.text, calls=tuple(pieces), ended=ended)

    def _new(self, call: ToolCall, *, complete: bool) -> list[ToolCall]:
        """Returns the new parts of a call."""
        begins = self._told is None
        announced = self._told or replace(call, arguments="", index=self._calls)
        self._calls += begins
        self._told = None if complete else replace(announced, arguments=call.arguments)
        new = call.arguments[len(announced.arguments) :]
        return [replace(announced, arguments=new, begins=begins)] if new or begins else []


def tagged(names: Collection[str]) -> TextParser:
    """Calls between tags; text before them is given as it comes. Blanks after a call are none."""

    def split(buffered: BufferedText) -> ParsedText:
        text, calls, remaining = "", list[ToolCall](), buffered.text

        def given(piece: str) -> str:
            return "" if (buffered.called or calls) and piece.isspace() else piece

        while remaining:
            before, tag, after = remaining.partition(OPEN)
            if not tag:
                size = len(remaining) - (0 if buffered.last else _waiting(remaining, OPEN))
                return ParsedText(
                    text=text + given(remaining[:size]), calls=calls, rest=remaining[size:]
                )
            inner, close, after = after.partition(CLOSE)
            if not close and (waits := _waiting(inner, CLOSE)):
                inner, close = inner[:-waits], inner[-waits:]
            if close != CLOSE and not buffered.last:
                begun, remaining = _begun(inner, 0, names), tag + inner + close
                return ParsedText(
                    text=text + given(before), calls=calls, begun=begun, rest=remaining
                )
            call = _single_call(inner, names) or _begun(inner, 0, names)
            text += before + tag + inner + close if call is None else given(before)
            if call is not None:
                calls.append(call)
            remaining = after
        return ParsedText(text=text, calls=calls)

    return split


def plain(names: Collection[str]) -> TextParser:
    """Calls that the answer begins with, which is held back as long as it may be calls."""

    def split(buffered: BufferedText) -> ParsedText:
        text, calls, position = buffered.text, list[ToolCall](), 0
        if buffered.begun or text.lstrip()[:1] not in (
            "",
            "{",
            "[",
            *(",;]" if buffered.called else ""),
        ):
            return ParsedText(text=text)
        try:
            while (position := _after_blanks(text, position)) < len(text):
                call, end = _object(text, position, names)
                if call is None:  # of none of the functions
                    return ParsedText(
                        text=text[position:] if calls or buffered.called else text, calls=calls
                    )
                calls, position = [*calls, call], end
        except (ValueError, RecursionError):
            begun = _begun(text, position, names)
        else:
            begun = None
        called = bool(calls or begun or buffered.called)
        remaining = text[position:] if called else text
        if not buffered.last:
            return ParsedText(calls=calls, begun=begun, rest=remaining)
        if begun is not None:
            return ParsedText(calls=[*calls, begun])
        return ParsedText(calls=calls, text=remaining)

    return split


def forced(name: str) -> TextParser:
    """An answer that is the arguments of one function, by its form."""

    def split(buffered: BufferedText) -> ParsedText:
        call = ToolCall(name=name, arguments=buffered.text)
        if buffered.last:
            return ParsedText(calls=[call])
        return ParsedText(begun=call if buffered.text else None, rest=buffered.text)

    return split


def _begun(text: str, start: int, names: Collection[str]) -> ToolCall | None:
    """A call that begins at a place, with its arguments so far."""
    match = BEGUN.match(text, start)
    if match is None or match[1] not in names:
        return None
    end = len(text)  # unless they are whole, all that there is, is of the arguments
    with contextlib.suppress(ValueError, RecursionError):
        end = DECODER.raw_decode(text, match.end())[1]
    return ToolCall(name=match[1], arguments=text[match.end() : end])


def _single_call(text: str, names: Collection[str]) -> ToolCall | None:
    """The call that a text is; None where it is none."""
    try:
        call, end = _object(text, _after_blanks(text, 0), names)
    except (ValueError, RecursionError):
        return None
    return call if _after_blanks(text, end) == len(text) else None


def _object(text: str, start: int, names: Collection[str]) -> tuple[ToolCall | None, int]:
    """The JSON at a place as a call, where it is one, and where it ends."""
    value, end = DECODER.raw_decode(text, start)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or name not in names:
        return None, end
    if (begun := _begun(text, start, names)) is not None:
        return begun, end
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return (ToolCall(name=name, arguments=arguments) if isinstance(arguments, str) else None), end


def _after_blanks(text: str, start: int) -> int:
    """Returns the position after the blanks between calls."""
    match = BETWEEN.match(text, start)
    return start if match is None else match.end()


def _waiting(text: str, tag: str) -> int:
    """Characters at the end that a tag, or a stop string, may begin with."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)


# --------------------------------------------------------------------------------------------------
# A thread that steps an engine, for the event loop that asks it.
#
#     worker = Worker(engine, waiting=64)
#     worker.start(asyncio.get_running_loop())
#     with worker.places(1):
#         stream = worker.submit([GenerationRequest(prompt=(5, 2, 7))])
#         heard = await stream.next()
#
# Only the thread touches the engine. Every step's tokens go to the event loop in one call.

#: Seconds of a step after which the engine counts as hung.
HUNG_SECONDS = 60.0
#: How much of the mean of seconds a request takes is that of the newest one.
NEWEST = 0.1
#: Seconds that a client is told to wait at most.
LONGEST_WAIT = 60

Result = TypeVar("Result")


@dataclass(kw_only=True)
class _OpenRequest:
    """A request that has not ended: the `index`-th of its stream, with so many events heard."""

    stream: Stream
    index: int
    heard: int = 0


class Worker:
    """Steps an engine in a thread of its own.

    Args:
        engine: whose; nobody else may use it from now on.
        waiting: requests that wait for a slot at most.
        buffer: tokens that an answer may be ahead of who reads it.
        version: of the weights, in words.
        watch: called in the event loop with what is new on a stream; None by default.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        waiting: int = 64,
        buffer: int = 1024,
        version: str = "",
        watch: Callable[[Stream, StreamEvent], None] | None = None,
    ) -> None:
        self.engine, self.version, self.watch = engine, version, watch
        self.slots = len(engine.schedule.slots)
        self.capacity = self.slots + waiting
        self.taken = 0
        self.error = ""
        self._buffer = buffer
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: dict[Request, _OpenRequest] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._busy_since: float | None = None
        self._mean_seconds = 1.0
        self._fresh = ""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that it is at; answers that are open end with an error."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def trouble(self) -> str:
        """The fault of the worker; empty where all is well."""
        since = self._busy_since
        if not self.error and since is not None and time.monotonic() - since > HUNG_SECONDS:
            return f"a step has taken more than {HUNG_SECONDS:g} seconds"
        return self.error

    @property
    def load(self) -> EngineLoad:
        """The load of the engine; from another thread, as it was at some moment of its step."""
        schedule = self.engine.schedule
        return EngineLoad(
            running=len(schedule.running),
            waiting=len(schedule.waiting) + self._inbox.qsize(),
            open=self.taken,
            slots=len(schedule.slots),
            used=schedule.pool.used,
            pages=schedule.pool.pages,
            steps=self.engine.steps,
            preempted=schedule.preempted,
        )

    @contextlib.contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Takes places for so many requests until the end of the block; in the event loop."""
        if self.error:
            raise StreamError(f"the engine has failed: {self.error}", dead=True)
        if self.taken + count > self.capacity:
            rounds = self.taken / self.slots
            seconds = min(LONGEST_WAIT, max(1, math.ceil(rounds * self._mean_seconds)))
            raise FullError(
                f"{self.taken} of {self.capacity} places are taken, and {count} were asked for",
                seconds=seconds,
            )
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    def submit(self, requested: Sequence[GenerationRequest]) -> Stream:
        """Asks; in the event loop."""
        stream = Stream(requested, buffer=self._buffer)
        self._put(lambda: self._add(stream))
        return stream

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Calls a function in the thread, between two steps."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._put(run)
        return future

    def replace(self, weights: Tree, version: str) -> None:
        """Serves with other weights, as `Engine.replace` does; in the thread, see `call`."""
        self.engine.replace(weights)
        self._fresh = version

    def _put(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self.error:
                raise StreamError(f"the engine has failed: {self.error}", dead=True)
            self._inbox.put(job)

    def _add(self, stream: Stream) -> None:
        try:
            for index, query in enumerate(stream.asked):
                request = self.engine.add(query)
                stream.requests.append(request)
                self._open[request] = _OpenRequest(stream=stream, index=index)
        except ShardlibError as error:
            refusal = StreamError(str(error), refused=True)
            self._post(lambda: stream.fail(refusal))
            stream.cancelled = True
        if stream.cancelled:  # also those of which nobody knew when that was said
            stream.cancel()

    def _run(self) -> None:
        try:
            while self._take_in():
                self._busy_since = time.monotonic()
                self._tell(self.engine.step())
                self._busy_since = None
            self._end("the server has stopped")
        except BaseException as error:
            self._end(f"{type(error).__name__}: {error}")

    def _take_in(self) -> bool:
        """Handles what has come in, and waits for it where there is nothing else to do.

        Returns:
            Whether to go on.
        """
        schedule = self.engine.schedule
        idle = not (schedule.running or schedule.waiting or self.engine.replacing)
        while True:
            try:
                job = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if job is None:
                return False
            self._busy_since = time.monotonic()
            job()
            self._busy_since = None
            idle = False

    def _tell(self, events: Sequence[Event]) -> None:
        if self._fresh and not self.engine.replacing:
            self.version, self._fresh = self._fresh, ""
        if not events:
            return
        now = time.perf_counter()
        last = {event.request: position for position, event in enumerate(events)}
        messages: list[tuple[Stream, StreamEvent]] = []
        for position, event in enumerate(events):
            open_one = self._open[event.request]
            messages.append((open_one.stream, self._heard(event, open_one, now)))
            open_one.heard += 1
            if last[event.request] == position and event.request.ended is not None:
                del self._open[event.request]
                self._mean_seconds += NEWEST * (now - open_one.stream.begun - self._mean_seconds)
            elif event.request.ended is not None:  # more of its tokens follow
                messages[-1] = messages[-1][0], replace(messages[-1][1], ended=None)
        self._post(lambda: self._hand_out(messages))

    def _heard(self, event: Event, entry: _OpenRequest, now: float) -> StreamEvent:
        request = event.request
        return StreamEvent(
            index=entry.index,
            token=event.token,
            told=None if event.token is None else request.told[entry.heard],
            scores=() if entry.heard else tuple(request.scores),
            ended=request.ended,
            reused=request.reused,
            version=self.version,
            at=now,
        )

    def _hand_out(self, messages: Sequence[tuple[Stream, StreamEvent]]) -> None:
        for stream, heard in messages:
            if self.watch is not None:
                self.watch(stream, heard)
            stream.take(heard)

    def _end(self, why: str) -> None:
        """Nobody is answered any more."""
        with self._lock:
            self.error = why
        self._busy_since = None
        failure = StreamError(f"the engine has failed: {why}", dead=True)
        while not self._inbox.empty():
            job = self._inbox.get()
            if job is not None:
                with contextlib.suppress(Exception):
                    job()  # streams are among the open ones then, and functions have an answer
        streams = {entry.stream for entry in self._open.values()}
        self._post(lambda: [stream.fail(failure) for stream in streams])

    def _post(self, call: Callable[[], object]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to hear it
            self._loop.call_soon_threadsafe(call)


#: Tokens that end an answer that has a form, where a tokenizer has none that does.
NO_END = frozenset({0})
LOG = logging.getLogger("shardlib.serve")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model that is served.

    Attributes:
        name: by which requests ask for it.
        served: what it is.
        worker: its engine.
        renderer: of conversations.
        embedder: of texts; None where the model gives no hidden states.
        formless: why answers can have no form; empty where they can.
        adapters: names of them, by which requests ask for the model with one.
    """

    name: str
    served: Served
    worker: Worker
    renderer: Renderer = field(repr=False)
    embedder: Embedder | None = None
    formless: str = ""
    adapters: tuple[str, ...] = ()

    async def follow(self, seconds: float) -> None:
        """Serves newer weights as they come, for ever. What goes wrong with them is logged, and
        those that are there serve on.
        """
        newer = self.served.newer
        while newer is not None:
            await asyncio.sleep(seconds)
            try:
                update = await asyncio.to_thread(newer, self.worker.version)
                if update is None:
                    continue
                weights, version = update
                change = self.worker.call(
                    lambda weights=weights, version=version: self.worker.replace(weights, version)
                )
                await asyncio.wrap_future(change)
                LOG.info("%s: %s is served from now on", self.name, version)
                while self.worker.engine.replacing and not self.worker.error:
                    await asyncio.sleep(0.1)
            except StreamError:
                return
            except (ShardlibError, OSError) as error:
                LOG.warning("%s: newer weights cannot be served: %s", self.name, error)


def deploy(
    served: Served,
    capacity: Capacity,
    *,
    name: str = "",
    tensor: int = 1,
    groups: int = 1,
    waiting: int = 64,
    buffer: int = 1024,
    beside: Companions | None = None,
) -> Deployment:
    """Makes the engine of a model, and compiles everything that it will run.

    Args:
        name: by which requests ask for it; by default its own.
    """
    renderer = Renderer(served.text)
    others = beside or Companions()
    capacity = replace(capacity, adapters=len(others.adapters))
    engine = served.engine(capacity, tensor=tensor, data=groups)
    others.join(engine)
    formless = spell(engine, served.text)
    engine.warm_up()
    embedder = None if served.hidden is None else Embedder(engine, served.hidden)
    if embedder is not None:
        embedder.warm_up()
    return Deployment(
        name=name or served.name,
        served=served,
        worker=Worker(engine, waiting=waiting, buffer=buffer, version=served.version),
        renderer=renderer,
        embedder=embedder,
        formless=formless,
        adapters=tuple(others.adapters),
    )


def spell(engine: Engine, text: Text) -> str:
    """Tells an engine what tokens spell, so that answers may have a form."""
    if find_spec("llguidance") is None:
        return (
            "the server has no package llguidance, which forms need\nTry: pip install"
            " 'shardlib[structured]' there"
        )
    spelling = text.spelling()
    if spelling is None:
        return "nothing is known of what the tokens of the model spell"
    engine.spell(spelling, text.ends or NO_END)
    return ""


def plain_chat(messages: Sequence[JsonMapping]) -> str:
    """A conversation for a model that has no template of its own: a line for each message.

    >>> plain_chat([{"role": "user", "content": "Hello."}])
    'user: Hello.\\nassistant:'
    """
    lines = [f"{message['role']}: {message['content']}\n" for message in messages]
    return "".join([*lines, "assistant:"])
