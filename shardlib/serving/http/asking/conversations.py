"""Messages as a prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from shardlib.errors import ArgumentError
from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.asking.prompts import encoded
from shardlib.serving.http.asking.tools import knows_tools
from shardlib.serving.http.bodies.chat import Chat
from shardlib.serving.http.bodies.messages import Call, Message, Part
from shardlib.serving.http.faults import Fault
from shardlib.untrusted.json_types import JsonObject


async def conversation(body: Chat, deployed: Deployment) -> list[int]:
    """Tokens of a conversation, up to where the assistant answers."""
    supports_tools = knows_tools(deployed)
    messages = [
        _written(number, message, supports_tools) for number, message in enumerate(body.messages)
    ]
    tools = [tool.json_object for tool in body.tools or ()] if supports_tools else []
    try:
        text = await asyncio.to_thread(deployed.renderer, messages, tools)
    except ArgumentError as error:
        raise Fault(400, str(error), code="invalid_value", param="messages") from error
    begin = deployed.served.text.template is None
    return await encoded(text, deployed, name="messages", begin=begin)


def _written(number: int, message: Message, supports_tools: bool) -> JsonObject:
    """A message as templates get it."""
    parts = [] if isinstance(message.content, str) else message.content or []
    if any(part.type != "text" or part.text is None for part in parts):
        raise _fault(f"messages[{number}] has a part that is no text", "unsupported_value")
    if message.tool_calls and not supports_tools:
        raise _fault(
            f"messages[{number}] has tool_calls, which the template of conversations does not"
            " write",
            "unsupported_value",
        )
    text = message.content if isinstance(message.content, str) else _joined(parts)
    written: JsonObject = {"role": message.role, "content": text}
    if message.tool_calls:
        written["tool_calls"] = [_call(number, call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        written["name"] = message.name
    return written


def _joined(parts: Sequence[Part]) -> str:
    return "".join(part.text or "" for part in parts)


def _call(number: int, call: Call) -> JsonObject:
    """A call; templates get its arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise _fault(
            f"messages[{number}] has a call of {call.function.name} whose arguments are no JSON"
            " object",
            "invalid_value",
        )
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _fault(message: str, code: str) -> Fault:
    return Fault(400, message, code=code, param="messages")
