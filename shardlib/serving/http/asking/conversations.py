"""Messages as a prompt."""

from __future__ import annotations

import asyncio

from shardlib.errors import ArgumentError
from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.asking.prompts import whole
from shardlib.serving.http.bodies.chat import Chat
from shardlib.serving.http.faults import Fault


async def conversation(body: Chat, deployed: Deployment) -> list[int]:
    """Tokens of a conversation, up to where the assistant answers.

    Args:
        body: of the request.
        deployed: the model.

    Raises:
        Fault: 400; parts that are no text, or messages that the template refuses.
    """
    messages: list[dict[str, str]] = []
    for number, message in enumerate(body.messages):
        parts = [] if isinstance(message.content, str) else message.content or []
        if any(part.type != "text" or part.text is None for part in parts):
            raise Fault(
                400,
                f"messages[{number}] has a part that is no text",
                code="unsupported_value",
                param="messages",
            )
        text = (
            message.content
            if isinstance(message.content, str)
            else "".join(part.text or "" for part in parts)
        )
        messages.append({"role": whole(message.role), "content": whole(text)})
    try:
        text = await asyncio.to_thread(deployed.renderer, messages)
    except ArgumentError as error:
        raise Fault(400, str(error), code="invalid_value", param="messages") from error
    return await asyncio.to_thread(
        deployed.served.text.encode, text, begin=deployed.served.text.template is None
    )
