"""What completions and chat have in common: places, and answers whole or streamed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.bodies.choosing import Choosing
from shardlib.serving.http.faults import Fault
from shardlib.serving.http.replies.events import EventStream, listening
from shardlib.serving.http.replies.reply import Reply
from shardlib.serving.http.settings import Settings


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


async def sent(
    http: Request, body: Choosing, reply: Reply, stack: contextlib.ExitStack, settings: Settings
) -> Response:
    """An answer, whole or streamed as the body says; given up when its client goes."""
    if body.stream:
        return EventStream(
            reply, usage=body.counted, seconds=settings.send_seconds, close=stack.pop_all().close
        )
    async with listening(http.receive, reply.gone):
        return JSONResponse(await reply.whole())
