"""OpenAI's interface over `shardlib.serve.hosting`, with FastAPI and uvicorn (extra `serve`)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    generate_latest,
)

from shardlib import __version__
from shardlib.errors import ArgumentError
from shardlib.serve.hosting import Deployment
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
from shardlib.serve.http.replies import CHAT, COMPLETION, EventStream, Reply, Usage, listening
from shardlib.serve.http.settings import Catalog, Fault, Guard, Named, Settings, Watching
from shardlib.untrusted.data import JsonObject


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


async def answered(
    http: Request,
    body: Answered,
    named: Named,
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


def chat_routes(catalog: Catalog, settings: Settings) -> APIRouter:
    """Conversations."""
    router = APIRouter()

    @router.post("/chat/completions")
    async def chat(body: Chat, http: Request) -> Response:
        named = catalog.find(body.model)
        deployed = named.deployed
        refuse_unserved(body)
        refuse_tools(body, deployed)
        with places(deployed, body.answers, settings) as stack:
            prompt = await conversation(body, deployed)
            return await answered(http, body, named, [prompt], stack, settings)

    return router


def completion_routes(catalog: Catalog, settings: Settings) -> APIRouter:
    """Texts that go on."""
    router = APIRouter()

    @router.post("/completions")
    async def completions(body: Completion, http: Request) -> Response:
        named = catalog.find(body.model)
        deployed = named.deployed
        refuse_unserved(body)
        with places(deployed, len(body.prompt) * body.answers, settings) as stack:
            prompts = await tokens_of(body.prompt, deployed)
            return await answered(http, body, named, prompts, stack, settings)

    return router


def model_routes(catalog: Catalog, started: int) -> APIRouter:
    """The list of models, and each of them.

    Args:
        started: when the server began, seconds since 1970.
    """
    router = APIRouter()

    def described(named: Named) -> JsonObject:
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


def status_routes(models: Mapping[str, Deployment], watching: Watching) -> APIRouter:
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
    watching = Watching(models)
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
        completion_routes(catalog, limits),
        chat_routes(catalog, limits),
        embedding_routes(catalog),
    ):
        app.include_router(routes, prefix="/v1")
    app.include_router(status_routes(models, watching))
    app.add_middleware(Guard, settings=limits)
    return app


#: It loads nothing but `/figures`.
PAGE = Path(__file__).with_name("page.html").read_text("utf-8")


def figures(models: Mapping[str, Deployment], watching: Watching) -> JsonObject:
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
