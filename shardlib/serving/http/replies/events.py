"""An answer as server-sent events, until the client is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardlib.serving.http.replies.reply import Reply


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
