"""Functions that an answer may call, or has to."""

from __future__ import annotations

import re
from collections.abc import Callable

from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.hosting.tool_calls import OPEN, CallReader, forced, plain, tagged
from shardlib.serving.http.bodies.chat import Chat
from shardlib.serving.http.bodies.tools import NamedTool, Tool
from shardlib.serving.http.faults import Fault
from shardlib.serving.scheduling.forms import Form
from shardlib.serving.scheduling.requests import STOP


def refuse_tools(body: Chat, deployed: Deployment) -> None:
    """Refuses functions that the model is not told of, and choices among none."""
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise _fault("tool_choice", "tool_choice needs tools")
        return
    if body.tool_choice != "none" and not knows_tools(deployed):
        raise Fault(
            400,
            f"tools is not served here: {deployed.name} has no template of conversations that"
            " writes them",
            code="unsupported_value",
            param="tools",
        )
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise _fault("tools", "two functions of tools have one name")
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.function.name not in names:
        raise _fault(
            "tool_choice",
            f"tool_choice has the function {body.tool_choice.function.name}; tools has"
            f" {', '.join(names)}",
        )


def knows_tools(deployed: Deployment) -> bool:
    """Whether the template of a model writes functions."""
    return re.search(r"\btools\b", deployed.served.text.template or "") is not None


def tool_form(body: Chat) -> Form | None:
    """The form of an answer that has to call a function; None for any."""
    if not body.tools or body.tool_choice in (None, "none", "auto"):
        return None
    if isinstance(body.tool_choice, NamedTool):
        function = body.tool_choice.function.name
        tool = next(tool for tool in body.tools if tool.function.name == function)
        return Form.schema(tool.schema_of_arguments)
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": 1 if body.parallel_tool_calls is False else len(body.tools),
        "items": {"anyOf": [_call_schema(tool) for tool in body.tools]},
    }
    return Form.schema(schema)


def reader_of(body: Chat, deployed: Deployment) -> Callable[[], CallReader] | None:
    """What takes the calls out of each answer; None where there are none."""
    if not body.tools or body.tool_choice == "none":
        return None
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        return lambda: CallReader(forced(name), ends=STOP)  # the end that OpenAI has for it
    names = frozenset(tool.function.name for tool in body.tools)
    tags = body.tool_choice != "required" and OPEN in (deployed.served.text.template or "")
    return lambda: CallReader(tagged(names) if tags else plain(names))


def _call_schema(tool: Tool) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": tool.schema_of_arguments,
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _fault(field: str, message: str) -> Fault:
    return Fault(400, message, code="invalid_value", param=field)
