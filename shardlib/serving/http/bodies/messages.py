"""Messages of a conversation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardlib.serving.http.bodies.fields import Body


class Part(Body):
    """A part of a message."""

    type: str
    text: str | None = None


class CalledFunction(Body):
    """A function that was called, with its arguments as JSON."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class Call(Body):
    """A call that an assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Call], Field(min_length=1)] | None = None
    tool_call_id: str | None = None
