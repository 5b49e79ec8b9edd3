"""The places of OpenAI's interface."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Mapping
from functools import partial

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.asking import asked_of, conversation, refuse_unserved, tokens_of
from shardlib.serving.http.bodies import Chat, Completion, Embedding
from shardlib.serving.http.faults import Fault
from shardlib.serving.http.replies import EventStream, Reply, listening
from shardlib.serving.http.settings import Settings
from shardlib.serving.http.shapes import ChatShape, CompletionShape, Usage
from shardlib.untrusted import shown
from shardlib.untrusted.json_types import JsonObject


def router(models: Mapping[str, Deployment], settings: Settings, started: int) -> APIRouter:
    """The places under `/v1`.

    Args:
        models: by name.
        settings: limits.
        started: when the server began, seconds since 1970.
    """
    made = APIRouter(prefix="/v1")

    def found(name: str | None) -> Deployment:
        if name is None and len(models) == 1:
            return next(iter(models.values()))
        if name is None:
            raise Fault(400, f"model is missing; there are {', '.join(models)}", param="model")
        if name not in models:
            raise Fault(
                404,
                f"there is no model {shown(name)}; there is {', '.join(models)}",
                code="model_not_found",
                param="model",
            )
        return models[name]

    def described(name: str) -> JsonObject:
        deployed = models[name]
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "shardlib",
            "max_model_len": deployed.worker.engine.room,
            "version": deployed.worker.version or None,
        }

    @made.get("/models")
    async def list_models() -> JsonObject:
        return {"object": "list", "data": [described(name) for name in models]}

    @made.get("/models/{name:path}")
    async def one_model(name: str) -> JsonObject:
        return described(found(name).name)

    async def answered(
        http: Request, body: Completion | Chat, deployed: Deployment, held: contextlib.ExitStack
    ) -> Response:
        if isinstance(body, Chat):
            prompts = [await conversation(body, deployed)]
            shape = ChatShape(logprobs=bool(body.logprobs))
        else:
            prompts = await tokens_of(body.prompt, deployed)
            shape = CompletionShape(logprobs=body.logprobs is not None)
        asked = asked_of(body, prompts, deployed, salt=http.state.salt)
        reply = Reply(
            deployed=deployed,
            asked=asked,
            shape=shape,
            stops=body.stops,
            echo=isinstance(body, Completion) and bool(body.echo),
            usage=Usage(prompt=sum(map(len, prompts))),
        )
        if body.stream:
            return EventStream(
                reply,
                usage=body.stream_options is not None and body.stream_options.include_usage,
                seconds=settings.send_seconds,
                close=held.pop_all().close,
            )
        async with listening(http.receive, reply.gone):
            return JSONResponse(await reply.whole())

    async def admitted(http: Request, body: Completion | Chat) -> Response:
        """Answers, where there are places; before anything is encoded."""
        deployed = found(body.model)
        refuse_unserved(body)
        count = (body.n or 1) * (1 if isinstance(body, Chat) else _prompts(body))
        if count > min(settings.choices, deployed.worker.capacity):
            raise Fault(
                400,
                f"{count} answers are asked for;"
                f" {min(settings.choices, deployed.worker.capacity)} are the most",
                code="invalid_value",
                param="n",
            )
        with contextlib.ExitStack() as held:
            held.enter_context(deployed.worker.places(count))
            return await answered(http, body, deployed, held)

    @made.post("/completions")
    async def completions(body: Completion, http: Request) -> Response:
        return await admitted(http, body)

    @made.post("/chat/completions")
    async def chat(body: Chat, http: Request) -> Response:
        return await admitted(http, body)

    @made.post("/embeddings")
    async def embeddings(body: Embedding) -> Response:
        deployed = found(body.model)
        embed = deployed.embedder
        if embed is None:
            raise Fault(
                400, f"{deployed.name} gives no embeddings: it has no hidden states", param="model"
            )
        with deployed.worker.places(1):
            texts = await tokens_of(body.input, deployed, name="input")
            longest = deployed.worker.engine.capacity.longest
            if (most := max(map(len, texts))) > longest:
                raise Fault(
                    400,
                    f"{deployed.name} looks at {longest} tokens at most; a text has {most}",
                    code="context_length_exceeded",
                    param="input",
                )
            jobs = [deployed.worker.call(partial(embed, one)) for one in texts]
            vectors = [await asyncio.wrap_future(job) for job in jobs]
        if body.dimensions not in (None, len(vectors[0])):
            raise Fault(
                400,
                f"embeddings of {deployed.name} have {len(vectors[0])} dimensions",
                code="unsupported_value",
                param="dimensions",
            )
        tokens = sum(map(len, texts))
        return JSONResponse(
            {
                "object": "list",
                "model": deployed.name,
                "data": [
                    {
                        "object": "embedding",
                        "index": index,
                        "embedding": _written(vector, body.encoding_format),
                    }
                    for index, vector in enumerate(vectors)
                ],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    return made


def _prompts(body: Completion) -> int:
    """How many prompts a body has."""
    prompt = body.prompt
    return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)


def _written(vector: np.ndarray, form: str) -> list[float] | str:
    if form == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
