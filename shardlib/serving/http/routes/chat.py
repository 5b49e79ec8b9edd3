"""`/v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from shardlib.serving.http.asking.checks import refuse_unserved
from shardlib.serving.http.asking.conversations import conversation
from shardlib.serving.http.asking.requests import asked_of, compile_form
from shardlib.serving.http.asking.tools import reader_of, refuse_tools
from shardlib.serving.http.bodies.chat import Chat
from shardlib.serving.http.catalog import Catalog
from shardlib.serving.http.replies.heads import Usage
from shardlib.serving.http.replies.reply import Reply
from shardlib.serving.http.replies.shapes import CHAT
from shardlib.serving.http.routes.generation import places, sent
from shardlib.serving.http.settings import Settings


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
            requests = asked_of(
                body, [prompt], named, salt=http.state.salt, seconds=settings.answer_seconds
            )
            await compile_form(requests, deployed, stack)
            reply = Reply(
                named=named,
                asked=requests,
                shape=CHAT,
                listed=body.listed,
                stops=body.stops,
                echo=False,
                usage=Usage(prompt=len(prompt)),
                reader=reader_of(body, deployed),
            )
            return await sent(http, body, reply, stack, settings)

    return router
