"""`/v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from shardlib.serving.http.asking.checks import refuse_unserved
from shardlib.serving.http.asking.prompts import tokens_of
from shardlib.serving.http.asking.requests import asked_of, compile_form
from shardlib.serving.http.bodies.completion import Completion
from shardlib.serving.http.catalog import Catalog
from shardlib.serving.http.replies.heads import Usage
from shardlib.serving.http.replies.reply import Reply
from shardlib.serving.http.replies.shapes import COMPLETION
from shardlib.serving.http.routes.generation import places, sent
from shardlib.serving.http.settings import Settings


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
            requests = asked_of(
                body, prompts, named, salt=http.state.salt, seconds=settings.answer_seconds
            )
            await compile_form(requests, deployed, stack)
            reply = Reply(
                named=named,
                asked=requests,
                shape=COMPLETION,
                listed=body.listed,
                stops=body.stops,
                echo=body.echoes,
                usage=Usage(prompt=sum(map(len, prompts))),
            )
            return await sent(http, body, reply, stack, settings)

    return router
