"""An answer: tokens as choices, whole or piece by piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from shardlib.serving.hosting.answer import Answer, Part, ToolCall, Written, prompt_part
from shardlib.serving.hosting.stream import Stream, StreamError
from shardlib.serving.hosting.tool_calls import CallReader, joined
from shardlib.serving.http.catalog import Named
from shardlib.serving.http.faults import ended
from shardlib.serving.http.replies.heads import Usage, new_head
from shardlib.serving.http.replies.shapes import Shape
from shardlib.serving.scheduling.requests import BROKEN, CANCELLED, Asked
from shardlib.untrusted.json_types import JsonObject

#: What is said of answers that end for these reasons.
GIVEN_UP = {
    CANCELLED: "the answer was given up",
    BROKEN: "the form of the answer takes more work than it may",
}


@dataclass(kw_only=True)
class Reply:
    """An answer that is written.

    Attributes:
        named: the model that answers.
        asked: what it was asked.
        shape: how choices are written.
        listed: whether tokens are listed with their logarithms.
        stops: texts that end a choice.
        reader: makes what takes calls of functions out of one answer; None where there are none.
        echo: whether prompts stand in front of their answers.
        usage: tokens, so far.
        version: of the weights, once it is known.
        stream: of tokens.
    """

    named: Named
    asked: Sequence[Asked]
    shape: Shape
    listed: bool
    stops: Sequence[str]
    echo: bool
    usage: Usage
    reader: Callable[[], CallReader] | None = None
    version: str = ""
    stream: Stream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = self.named.deployed.worker.submit(self.asked)

    def gone(self) -> None:
        """Nobody waits for the answer any more."""
        self.stream.fail(StreamError("the client is gone"))

    async def parts(self) -> AsyncIterator[tuple[int, Part]]:
        """What is new, of each choice, until all are whole."""
        text = self.named.deployed.served.text
        answers: dict[int, Answer] = {}
        for index, request in enumerate(self.asked):
            before = len(text.decode(request.prompt)) if self.echo else 0
            answers[index] = Answer(text, stop=self.stops, before=before, minimum=request.least)
        readers = [self.reader() for _ in self.asked] if self.reader is not None else []
        echoed: set[int] = set()
        try:
            while answers:
                heard = await self.stream.next()
                if (answer := answers.get(heard.index)) is None:
                    continue  # it ended with a stop string, and the engine was ahead
                if heard.ended in GIVEN_UP:
                    raise StreamError(GIVEN_UP[heard.ended], refused=heard.ended == BROKEN)
                self.version = heard.version
                self.usage.cached[heard.index] = heard.reused
                self.usage.answer += heard.token is not None
                if self.echo and heard.index not in echoed:
                    echoed.add(heard.index)
                    prompt = self.asked[heard.index].prompt
                    yield heard.index, prompt_part(text, prompt, heard.scores)
                part = answer.add(heard.told, ended=heard.ended)
                if readers:
                    part = readers[heard.index].add(part)
                if part.ended is not None:
                    del answers[heard.index]
                    self.stream.end(heard.index)
                shown = part.tokens and (self.listed or not readers)  # a call's have no text
                if part.text or shown or part.ended or part.calls:
                    yield heard.index, part
        finally:
            self.stream.cancel()

    async def whole(self) -> JsonObject:
        """The answer as one object."""
        texts = [""] * len(self.asked)
        tokens: list[list[Written]] = [[] for _ in self.asked]
        ends: list[str | None] = [None] * len(self.asked)
        calls: list[list[ToolCall]] = [[] for _ in self.asked]
        async for index, part in self.parts():
            texts[index] += part.text
            tokens[index] += part.tokens
            ends[index] = part.ended
            calls[index] += part.calls
        wholes = [
            Part(texts[index], tuple(tokens[index]), ends[index], tuple(joined(calls[index])))
            for index in range(len(self.asked))
        ]
        choices = [
            self.shape.choice(index, self.shape.whole(part), part, listed=self.listed)
            for index, part in enumerate(wholes)
        ]
        head = new_head(self.shape.prefix, self.shape.kind, self.named.name)
        return head.json(choices, self.version, usage=self.usage.json)

    async def events(self, *, usage: bool) -> AsyncGenerator[JsonObject, None]:
        """The answer as objects; the last is an error where it ends early."""
        shape = self.shape
        head = new_head(shape.prefix, shape.event, self.named.name)
        more = {"usage": None} if usage else {}
        nothing = Part("", (), None)
        try:
            for index in range(len(self.asked) if shape.begin else 0):
                begun = shape.choice(index, shape.begin, nothing, listed=False)
                yield head.json([begun], self.version, **more)
            async for index, part in self.parts():
                choice = shape.choice(index, shape.part(part), part, listed=self.listed)
                yield head.json([choice], self.version, **more)
        except StreamError as error:
            yield ended(error).body
            return
        if usage:
            yield head.json([], self.version, usage=self.usage.json)
