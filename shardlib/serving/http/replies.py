"""Answers as a whole and as events, until the client is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardlib.serving.hosting.answer import Answer, Part, Written, prompt_part
from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.hosting.stream import Stream, StreamError
from shardlib.serving.http.faults import ended
from shardlib.serving.http.shapes import Shape, Usage, new_head
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
        deployed: the model that answers.
        asked: what it was asked.
        shape: how choices are written.
        stops: texts that end a choice.
        echo: whether prompts stand in front of their answers.
        usage: tokens, so far.
        version: of the weights, once it is known.
        stream: of tokens.
    """

    deployed: Deployment
    asked: Sequence[Asked]
    shape: Shape
    stops: Sequence[str]
    echo: bool
    usage: Usage
    version: str = ""
    stream: Stream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = self.deployed.worker.submit(self.asked)

    def gone(self) -> None:
        """Nobody waits for the answer any more."""
        self.stream.fail(StreamError("the client is gone"))

    async def parts(self) -> AsyncIterator[tuple[int, Part]]:
        """What is new, of each choice, until all are whole.

        Raises:
            StreamError: an answer ends early.
        """
        text = self.deployed.served.text
        answers: dict[int, Answer] = {}
        for index, one in enumerate(self.asked):
            before = len(text.decode(one.prompt)) if self.echo else 0
            answers[index] = Answer(text, stop=self.stops, before=before)
        echoed: set[int] = set()
        try:
            while answers:
                heard = await self.stream.next()
                if (answer := answers.get(heard.index)) is None:
                    continue  # it ended with a stop string, and the engine was ahead
                if heard.ended in GIVEN_UP:
                    raise StreamError(GIVEN_UP[heard.ended])
                self.version = heard.version
                self.usage.cached[heard.index] = heard.reused
                self.usage.answer += heard.token is not None
                if self.echo and heard.index not in echoed:
                    echoed.add(heard.index)
                    prompt = self.asked[heard.index].prompt
                    yield heard.index, prompt_part(text, prompt, heard.scores)
                part = answer.add(heard.told, ended=heard.ended)
                if part.ended is not None:
                    del answers[heard.index]
                    self.stream.end(heard.index)
                if part.text or part.tokens or part.ended:
                    yield heard.index, part
        finally:
            self.stream.cancel()

    async def whole(self) -> JsonObject:
        """The answer as one object.

        Raises:
            StreamError: it ends early.
        """
        texts = [""] * len(self.asked)
        tokens: list[list[Written]] = [[] for _ in self.asked]
        ends: list[str | None] = [None] * len(self.asked)
        async for index, part in self.parts():
            texts[index] += part.text
            tokens[index] += part.tokens
            ends[index] = part.ended
        choices = [
            self.shape.whole(index, Part(texts[index], tuple(tokens[index]), ends[index]))
            for index in range(len(self.asked))
        ]
        head = new_head(self.shape.prefix, self.shape.kind, self.deployed.name)
        return head.json(choices, self.version, usage=self.usage.json)

    async def events(self, *, usage: bool) -> AsyncGenerator[JsonObject, None]:
        """The answer as objects; the last is an error where it ends early.

        Args:
            usage: whether an object with the tokens comes at the end.
        """
        head = new_head(self.shape.prefix, self.shape.event, self.deployed.name)
        more = {"usage": None} if usage else {}
        try:
            for index in range(len(self.asked)):
                if (first := self.shape.begin(index)) is not None:
                    yield head.json([first], self.version, **more)
            async for index, part in self.parts():
                yield head.json([self.shape.part(index, part)], self.version, **more)
        except StreamError as error:
            yield ended(error).body
            return
        if usage:
            yield head.json([], self.version, usage=self.usage.json)


@contextlib.asynccontextmanager
async def listening(receive: Receive, gone: Callable[[], None]) -> AsyncIterator[None]:
    """Listens until the end of the block whether the client goes.

    Args:
        receive: of the request, whose body has been read.
        gone: is called then.
    """

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()

    task = asyncio.create_task(listen())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class EventStream(Response):
    """An answer as server-sent events.

    Args:
        reply: what is written.
        usage: whether tokens are counted at the end.
        seconds: that one event may wait for its reader.
        close: is called at the end, whatever happens.
    """

    media_type = "text/event-stream"

    def __init__(
        self, reply: Reply, *, usage: bool, seconds: float, close: Callable[[], None]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._reply, self._usage = reply, usage
        self._seconds, self._close = seconds, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it; who does not read for too long is cut off."""

        async def write(text: str, *, more: bool = True) -> None:
            async with asyncio.timeout(self._seconds):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        try:
            async with listening(receive, self._reply.gone):
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                failed = False
                async with contextlib.aclosing(self._reply.events(usage=self._usage)) as events:
                    async for event in events:
                        failed = "error" in event
                        await write(f"data: {json.dumps(event, separators=(',', ':'))}\n\n")
                await write("" if failed else "data: [DONE]\n\n", more=False)
        except TimeoutError:
            scope["state"]["abort"]()
            await asyncio.sleep(0)  # the connection is lost then, and nothing is missing of it
        finally:
            self._reply.stream.cancel()
            self._close()
