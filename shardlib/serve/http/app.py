"""OpenAI's interface over `shardlib.serve.hosting`, with FastAPI and uvicorn (extra `serve`)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import resource
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardlib import __version__
from shardlib.errors import ArgumentError, LaunchError
from shardlib.serve.hosting import (
    CALLED,
    Answer,
    AnswerPart,
    AnswerToken,
    CallReader,
    Deployment,
    ListedToken,
    Stream,
    StreamError,
    ToolCall,
    _listed,
    written,
)
from shardlib.serve.http import settings as faults
from shardlib.serve.http.bodies import (
    Answered,
    Chat,
    Completion,
    Embedding,
    asked_of,
    compile_form,
    conversation,
    reader_of,
    refuse_tools,
    refuse_unserved,
    tokens_of,
)
from shardlib.serve.http.settings import (
    Catalog,
    Fault,
    Guard,
    NamedModel,
    ServerMetrics,
    Settings,
    ended,
)
from shardlib.serve.requests import BROKEN, CANCELLED, LENGTH, STOP, GenerationRequest, SampledToken
from shardlib.serve.served import UNKNOWN, Pieces, Text
from shardlib.untrusted.data import Json, JsonObject


def embedding_routes(catalog: Catalog) -> APIRouter:
    """Texts as vectors."""
    router = APIRouter()

    @router.post("/embeddings")
    async def embeddings(body: Embedding) -> Response:
        named = catalog.find(body.model)
        deployed = named.deployed
        if named.adapter:
            raise Fault(
                400,
                f"{named.name} is an adapter, and gives no embeddings; {deployed.name} does",
                code="unsupported_value",
                param="model",
            )
        with deployed.worker.places(1):
            texts = await tokens_of(body.input, deployed, name="input")
            vectors = await _embedded(texts, deployed)
        if body.dimensions not in (None, len(vectors[0])):
            raise Fault(
                400,
                f"embeddings of {deployed.name} have {len(vectors[0])} dimensions",
                code="unsupported_value",
                param="dimensions",
            )
        tokens = sum(map(len, texts))
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, body)}
            for index, vector in enumerate(vectors)
        ]
        return JSONResponse(
            {
                "object": "list",
                "model": deployed.name,
                "data": data,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    return router


async def _embedded(texts: Sequence[Sequence[int]], deployed: Deployment) -> list[np.ndarray]:
    """Vectors of some texts."""
    embed = deployed.embedder
    if embed is None:
        raise Fault(
            400, f"{deployed.name} gives no embeddings: it has no hidden states", param="model"
        )
    longest = deployed.worker.engine.capacity.longest
    if (length := max(map(len, texts))) > longest:
        raise Fault(
            400,
            f"{deployed.name} looks at {longest} tokens at most; a text has {length}",
            code="context_length_exceeded",
            param="input",
        )
    jobs = [deployed.worker.call(partial(embed, tokens)) for tokens in texts]
    return [await asyncio.wrap_future(job) for job in jobs]


def _written(vector: np.ndarray, body: Embedding) -> list[float] | str:
    if body.encoding_format == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


@contextlib.contextmanager
def places(deployed: Deployment, count: int, settings: Settings) -> Iterator[contextlib.ExitStack]:
    """Takes places for some answers until the end of the block, before anything is encoded."""
    limit = min(settings.choices, deployed.worker.capacity)
    if count > limit:
        raise Fault(
            400,
            f"{count} answers are asked for; {limit} are the most",
            code="invalid_value",
            param="n",
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(deployed.worker.places(count))
        yield stack


# --------------------------------------------------------------------------------------------------
# Replies: choices, whole or as streams of events.


@dataclass(kw_only=True)
class Usage:
    """Tokens of a request.

    Attributes:
        prompt: of its prompts.
        answer: of its answers, so far.
        cached: of its prompts, that other requests had computed.
    """

    prompt: int
    answer: int = 0
    cached: dict[int, int] = field(default_factory=dict)

    @property
    def json(self) -> JsonObject:
        """As JSON."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


def new_head(prefix: str, kind: str, model: str) -> JsonObject:
    """The fields that all objects of one answer have."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def with_choices(
    head: JsonObject, choices: Sequence[JsonObject], version: str, **more: Json
) -> JsonObject:
    """An object of an answer."""
    return {**head, "system_fingerprint": version or None, "choices": list(choices), **more}


#: The logarithm that stands for a probability of 0, which JSON has no number for.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, kw_only=True)
class ChoiceForm:
    """The form in which an interface writes choices.

    Attributes:
        prefix: of ids.
        kind: of objects with a whole answer.
        event: of objects with a piece.
        whole: fields of a whole choice.
        part: fields of a piece.
        listed: tokens with their logarithms.
        begin: what the first piece has, before there is a token; empty for no such
            piece.
    """

    prefix: str
    kind: str
    event: str
    whole: Callable[[AnswerPart], JsonObject]
    part: Callable[[AnswerPart], JsonObject]
    listed: Callable[[Sequence[AnswerToken]], JsonObject]
    begin: JsonObject = field(default_factory=dict)

    def choice(
        self, index: int, fields: JsonObject, part: AnswerPart, *, listed: bool
    ) -> JsonObject:
        """A choice, whole or a piece."""
        return {
            "index": index,
            **fields,
            "logprobs": self.listed(part.tokens) if listed else None,
            "finish_reason": _finish(part.ended),
        }


def _finish(ended: str | None) -> str | None:
    return ended if ended in (None, STOP, LENGTH, CALLED) else LENGTH  # late ones lack their end


def _odds(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def _columns(tokens: Sequence[AnswerToken]) -> JsonObject:
    """Tokens as lists of what they have."""
    return {
        "tokens": [_key(token.listed) for token in tokens],
        "token_logprobs": [_odds(token.listed.logprob) for token in tokens],
        "top_logprobs": [_by_key(token.likely) or None for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _by_key(likely: Sequence[ListedToken]) -> JsonObject:
    """Logarithms by token; a token that is written as a likelier one has its number, as vLLM has
    it.
    """
    odds: JsonObject = {}
    for token in likely:
        key = _key(token)
        odds[f"token_id:{token.token}" if key in odds else key] = _odds(token.logprob)
    return odds


def _key(token: ListedToken) -> str:
    """A token's text; where it is none its bytes, as OpenAI has them: `bytes:\\xe2\\x82`."""
    return token.text if token.raw is None else f"bytes:{_escaped(token.raw)}"


def _escaped(raw: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in raw)


def _rows(tokens: Sequence[AnswerToken]) -> JsonObject:
    """Tokens as objects."""
    rows = [
        {
            **_likely(token.listed),
            "top_logprobs": [_likely(likely) for likely in token.likely],
        }
        for token in tokens
    ]
    return {"content": rows, "refusal": None}


def _likely(token: ListedToken) -> JsonObject:
    if token.raw is not None:
        text, raw = _escaped(token.raw), list(token.raw)
    else:
        text = token.text
        raw = None if UNKNOWN in text else list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": _odds(token.logprob), "bytes": raw}


def _message(part: AnswerPart) -> JsonObject:
    content = part.text or (None if part.calls else "")
    message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
    if part.calls:
        message["tool_calls"] = [_call(call) for call in part.calls]
    return {"message": message}


def _delta(part: AnswerPart) -> JsonObject:
    delta: JsonObject = {"content": part.text} if part.text or part.tokens else {}
    if part.calls:
        delta["tool_calls"] = [
            {"index": call.index, **(_call(call) if call.begins else _more(call))}
            for call in part.calls
        ]
    return {"delta": delta}


def _call(call: ToolCall) -> JsonObject:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _more(call: ToolCall) -> JsonObject:
    return {"function": {"arguments": call.arguments}}


#: Choices of `/v1/completions`.
COMPLETION = ChoiceForm(
    prefix="cmpl",
    kind="text_completion",
    event="text_completion",
    whole=lambda part: {"text": part.text},
    part=lambda part: {"text": part.text},
    listed=_columns,
)


#: Choices of `/v1/chat/completions`.
CHAT = ChoiceForm(
    prefix="chatcmpl",
    kind="chat.completion",
    event="chat.completion.chunk",
    whole=_message,
    part=_delta,
    listed=_rows,
    begin={"delta": {"role": "assistant", "content": ""}},
)


#: What is said of answers that end for these reasons.
GIVEN_UP = {
    CANCELLED: "the answer was given up",
    BROKEN: "the form of the answer takes more work than it may",
}


def prompt_part(text: Text, prompt: Sequence[int], scores: Sequence[SampledToken]) -> AnswerPart:
    """A prompt as the beginning of what is answered."""
    prompt_text = text.decode(prompt)
    if len(scores) != len(prompt) - 1:
        return AnswerPart(prompt_text, (), None)
    tokens = [AnswerToken(listed=_listed(text, prompt[0], None), likely=(), offset=0)]
    pieces = Pieces(text)
    offset = len(pieces.add(prompt[0]))
    for score in scores:
        tokens.append(written(text, score, offset))
        offset += len(pieces.add(score.token))
    return AnswerPart(prompt_text, tuple(tokens), None)


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

    named: NamedModel
    asked: Sequence[GenerationRequest]
    shape: ChoiceForm
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

    async def parts(self) -> AsyncIterator[tuple[int, AnswerPart]]:
        """Yields the new parts of each choice, until all are whole."""
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
        tokens: list[list[AnswerToken]] = [[] for _ in self.asked]
        ends: list[str | None] = [None] * len(self.asked)
        calls: list[list[ToolCall]] = [[] for _ in self.asked]
        async for index, part in self.parts():
            texts[index] += part.text
            tokens[index] += part.tokens
            ends[index] = part.ended
            calls[index] += part.calls
        wholes = [
            AnswerPart(texts[index], tuple(tokens[index]), ends[index], tuple(joined(calls[index])))
            for index in range(len(self.asked))
        ]
        choices = [
            self.shape.choice(index, self.shape.whole(part), part, listed=self.listed)
            for index, part in enumerate(wholes)
        ]
        head = new_head(self.shape.prefix, self.shape.kind, self.named.name)
        return with_choices(head, choices, self.version, usage=self.usage.json)

    async def events(self, *, usage: bool) -> AsyncGenerator[JsonObject, None]:
        """The answer as objects; the last is an error where it ends early."""
        shape = self.shape
        head = new_head(shape.prefix, shape.event, self.named.name)
        more = {"usage": None} if usage else {}
        nothing = AnswerPart("", (), None)
        try:
            for index in range(len(self.asked) if shape.begin else 0):
                begun = shape.choice(index, shape.begin, nothing, listed=False)
                yield with_choices(head, [begun], self.version, **more)
            async for index, part in self.parts():
                choice = shape.choice(index, shape.part(part), part, listed=self.listed)
                yield with_choices(head, [choice], self.version, **more)
        except StreamError as error:
            yield ended(error).body
            return
        if usage:
            yield with_choices(head, [], self.version, usage=self.usage.json)


@contextlib.asynccontextmanager
async def listening(receive: Receive, gone: Callable[[], None]) -> AsyncIterator[None]:
    """Listens until the end of the block whether the client goes."""

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


def joined(deltas: Iterable[ToolCall]) -> list[ToolCall]:
    """Calls, of the pieces that an answer gave."""
    calls: list[ToolCall] = []
    for piece in deltas:
        if piece.begins:
            calls.append(piece)
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + piece.arguments)
    return calls


async def answered(
    http: Request,
    body: Answered,
    named: NamedModel,
    prompts: Sequence[Sequence[int]],
    stack: contextlib.ExitStack,
    settings: Settings,
) -> Response:
    """The answer to prompts, whole or streamed as the body says; given up when its client goes."""
    deployed = named.deployed
    requests = asked_of(body, prompts, named, salt=http.state.salt, seconds=settings.answer_seconds)
    await compile_form(requests, deployed, stack)
    reply = Reply(
        named=named,
        asked=requests,
        shape=CHAT if isinstance(body, Chat) else COMPLETION,
        listed=body.listed,
        stops=body.stops,
        echo=body.echoes,
        usage=Usage(prompt=sum(map(len, prompts))),
        reader=reader_of(body, deployed) if isinstance(body, Chat) else None,
    )
    if body.stream:
        return EventStream(
            reply, usage=body.counted, seconds=settings.send_seconds, close=stack.pop_all().close
        )
    async with listening(http.receive, reply.gone):
        return JSONResponse(await reply.whole())


def generation_routes(catalog: Catalog, settings: Settings) -> APIRouter:
    """Conversations, and texts that go on."""
    router = APIRouter()

    @router.post("/chat/completions")
    async def chat(body: Chat, http: Request) -> Response:
        named = catalog.find(body.model)
        refuse_unserved(body)
        refuse_tools(body, named.deployed)
        with places(named.deployed, body.answers, settings) as stack:
            prompt = await conversation(body, named.deployed)
            return await answered(http, body, named, [prompt], stack, settings)

    @router.post("/completions")
    async def completions(body: Completion, http: Request) -> Response:
        named = catalog.find(body.model)
        refuse_unserved(body)
        with places(named.deployed, len(body.prompt) * body.answers, settings) as stack:
            prompts = await tokens_of(body.prompt, named.deployed)
            return await answered(http, body, named, prompts, stack, settings)

    return router


def model_routes(catalog: Catalog, started: int) -> APIRouter:
    """The list of models, and each of them.

    Args:
        started: when the server began, seconds since 1970.
    """
    router = APIRouter()

    def described(named: NamedModel) -> JsonObject:
        worker = named.deployed.worker
        return {
            "id": named.name,
            "object": "model",
            "created": started,
            "owned_by": "shardlib",
            "max_model_len": worker.engine.room,
            "version": worker.version or None,
            "parent": named.deployed.name if named.adapter else None,  # as vLLM has it
        }

    @router.get("/models")
    async def list_models() -> JsonObject:
        return {"object": "list", "data": [described(named) for named in catalog]}

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> JsonObject:
        return described(catalog.find(name))

    return router


def status_routes(models: Mapping[str, Deployment], watching: ServerMetrics) -> APIRouter:
    """Returns the routes for people, Prometheus and whatever starts servers."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        trouble = {name: deployment.worker.trouble for name, deployment in models.items()}
        bad = any(trouble.values())
        return JSONResponse(
            {"status": "failed" if bad else "ok", "models": trouble}, 503 if bad else 200
        )

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(watching.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/figures")
    async def page_figures() -> Response:
        return JSONResponse(figures(models, watching))

    @router.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE

    return router


def application(deployed: Sequence[Deployment], settings: Settings | None = None) -> FastAPI:
    """The application that serves some models; it starts and stops their engines."""
    limits = settings or Settings()
    names = [deployment.name for deployment in deployed]
    if not names or len(set(names)) < len(names):
        raise ArgumentError(
            f"the models are {', '.join(names) or 'none'}; each has a name of its own\nTry:"
            " NAME=MODEL"
        )
    models: Mapping[str, Deployment] = {deployment.name: deployment for deployment in deployed}
    catalog, started = Catalog(models), int(time.time())
    watching = ServerMetrics(models)
    for name, deployment in models.items():
        deployment.worker.watch = watching.of[name].heard

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(watching.look(models))]
        for deployment in models.values():
            deployment.worker.start(loop)
            tasks.append(loop.create_task(deployment.follow(limits.refresh_seconds)))
        yield
        for task in tasks:
            task.cancel()
        for deployment in models.values():
            await asyncio.to_thread(deployment.worker.stop)
            deployment.renderer.close()

    app = FastAPI(
        title="shardlib", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    faults.install(app)
    for routes in (
        model_routes(catalog, started),
        generation_routes(catalog, limits),
        embedding_routes(catalog),
    ):
        app.include_router(routes, prefix="/v1")
    app.include_router(status_routes(models, watching))
    app.add_middleware(Guard, settings=limits)
    return app


#: It loads nothing but `/figures`.
PAGE = Path(__file__).with_name("page.html").read_text("utf-8")


def figures(models: Mapping[str, Deployment], watching: ServerMetrics) -> JsonObject:
    """Returns the figures that the page shows."""
    return {
        "shardlib": __version__,
        "models": [
            {
                "name": name,
                "version": deployed.worker.version,
                "warning": deployed.served.warning,
                "trouble": deployed.worker.trouble,
                "slots": deployed.worker.load.slots,
                "pages": deployed.worker.load.pages,
                "shared": watching.of[name].shared,
                "history": list(watching.of[name].history),
            }
            for name, deployed in models.items()
        ],
    }


# --------------------------------------------------------------------------------------------------
# The process that serves: connections, signals, drain.

#: Bytes that wait in the system for the reader of a connection, about.
SEND_BYTES = 1 << 17
#: Open files of the process that are not connections, at most.
OTHER_FILES = 512


class _Connections:
    """Connections of a server: strangers, and those that have shown a token.

    Strangers have places of their own. Where they are taken, in all or for one address, the first
    stranger of the address that has the most is cut off.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._strangers: dict[H11Protocol, str] = {}  # address by connection, the first in front
        self._known: set[H11Protocol] = set()

    def came(self, connection: H11Protocol) -> None:
        """A connection is there."""
        address = connection.client[0] if connection.client else ""
        self._strangers[connection] = address
        counts = Counter(self._strangers.values())
        if counts[address] > self._settings.strangers_per_address:
            self._cut_off(address)
        elif len(self._strangers) > self._settings.strangers:
            self._cut_off(counts.most_common(1)[0][0])

    def shown(self, connection: H11Protocol) -> bool:
        """A connection has shown a token; whether there is a place for it."""
        if connection not in self._known and len(self._known) >= self._settings.connections:
            return False
        self._strangers.pop(connection, None)
        self._known.add(connection)
        return True

    def gone(self, connection: H11Protocol) -> None:
        """A connection has ended."""
        self._strangers.pop(connection, None)
        self._known.discard(connection)

    def _cut_off(self, address: str) -> None:
        first = next(connection for connection, peer in self._strangers.items() if peer == address)
        del self._strangers[first]
        first.transport.abort()


def protocol(settings: Settings) -> type[H11Protocol]:
    """Returns the protocol class that handles connections: as uvicorn does, within limits; who
    sends no head in time is cut off.
    """
    connections = _Connections(settings)

    class Limited(H11Protocol):
        def __init__(self, config: uvicorn.Config, *arguments: object, **named: object) -> None:
            super().__init__(config, *arguments, **named)  # type: ignore[arg-type]
            self.app_state = {
                **self.app_state,
                "abort": lambda: self.transport.abort(),
                "shown": lambda: connections.shown(self),
            }
            self._seen = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            connections.came(self)
            self._expect(0)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.gone(self)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._seen += 1
            elif before is not None and before.response_complete:
                self._expect(self._seen)  # the head of the next request has begun

        def _expect(self, seen: int) -> None:
            def check() -> None:
                if self._seen == seen:
                    self.transport.abort()

            self.loop.call_later(settings.head_seconds, check)

    return Limited


class _Server(uvicorn.Server):
    """One that ends in order when it is asked to, rather than of the signal that asked."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, number)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        listening.bind(address)
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"{host}:{port} cannot be listened at ({error})\nTry: --port 0 for any that is free"
        ) from error
    return listening


def run(
    app: FastAPI,
    settings: Settings,
    listening: socket.socket,
    *,
    ready: Callable[[], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; answers that have begun may end then, and no others begin. A
    second SIGINT ends it at once.
    """
    files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = settings.connections + settings.strangers + OTHER_FILES
    if files < required:
        files = required if hard_limit == resource.RLIM_INFINITY else min(required, hard_limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard_limit))
    _server(app, settings, ready or (lambda: None)).run(sockets=[listening])


@contextlib.contextmanager
def serving(
    app: FastAPI, settings: Settings | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> Iterator[str]:
    """Serves in a thread until the end of the block, and gives the address."""
    started = threading.Event()
    with listen(host, port) as listening:
        server = _server(app, settings or Settings(), started.set)
        thread = threading.Thread(target=lambda: server.run(sockets=[listening]), name="server")
        thread.start()
        while not started.wait(0.1):
            if not thread.is_alive():
                raise LaunchError("the server has not started")
        try:
            yield f"http://{host}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def _server(app: FastAPI, settings: Settings, ready: Callable[[], None]) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=protocol(settings),
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(max(1, settings.drain_seconds)),
    )
    server = _Server(config)
    startup = server.startup

    async def started(sockets: list[socket.socket] | None = None) -> None:
        await startup(sockets)
        if server.started:
            ready()

    server.startup = started
    return server
